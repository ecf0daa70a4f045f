"""Candidates against the kernel that is used now: checked on poisoned outputs, then timed together, at some rows each.

Everything is as in the benchmark: cold weights, contenders interleaved in shuffled order, medians. Up to 256 rows calls
are timed in a graph, as the model runs them: a chain of launches, each of which may start while the one before still
runs, so that what a kernel does at its start and end counts for what it costs there. Where arithmetic decides, from 256
rows on, they are timed in bursts, and the best few again sustained, at the power cap, where the order may be another. A
candidate's time is told relative to the incumbent's, as the geometric mean over rows and regimes.

What wins for any number of rows is at last tried in a whole layer beside the kernel in use, and kept if the layer is
faster too: by itself a projection has the card's power and L2 for itself (docs/notebook/gemm_fp8.md).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from futransformer.bench.case import COMPUTE_BOUND, Ceilings, Contender
from futransformer.bench.check import judge
from futransformer.bench.harness import Harness
from futransformer.bench.runner import WANTED_SECONDS, Bench, first_line
from futransformer.bench.shapes import gemm_work
from futransformer.bench.subjects import prefill_block
from futransformer.bench.subjects.gemm import graph_floor, regimes
from futransformer.bench.subjects.projection import ProjectionInputs
from futransformer.driver import Kernel
from futransformer.generator.errors import FuTransformerError
from futransformer.generator.precision import BF16
from futransformer.generator.schedules import Place, Schedule, schedule_of
from futransformer.generator.search import BUCKETS
from futransformer.generator.specs import GemmSpec
from futransformer.library import KernelLibrary
from futransformer.ops.interface import Projection
from futransformer.tune.sweep import Sweep

GAIN = 0.01  # what a candidate must win: two sets of bursts of one kernel differ by up to half of that
GAIN_OF_FEW_ROWS = 0.03  # and in a bucket of few rows, where it is a kernel more to build, some eight seconds
FINALISTS = 4  # of a burst, that are timed sustained as well
LAYER_PROMPTS = (2048,) * 4  # of the layer that what wins is tried in
LEAST_SECONDS = 0.5  # for one set of contenders; the harness takes its minimum number of turns anyway


@dataclass
class Result:
    """One place: the incumbent, every candidate's time relative to it, the best first, and who was refused, and why.

    ``layer`` is the time of a whole layer with the best candidate relative to that with the incumbent, if it was asked.
    """

    place: Place
    incumbent: GemmSpec
    times: list[tuple[GemmSpec, float]] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    layer: float | None = None

    @property
    def winner(self) -> GemmSpec:
        """The best candidate where it wins enough, else the incumbent."""
        least = GAIN if self.place.rows is None else GAIN_OF_FEW_ROWS
        if self.layer is not None and self.layer >= 1:
            return self.incumbent
        return self.times[0][0] if self.times and self.times[0][1] < 1 - least else self.incumbent


@dataclass
class Outcome:
    """All places that there was time for, and those that there was none for."""

    results: list[Result] = field(default_factory=list)
    left_out: list[Place] = field(default_factory=list)

    def changes(self) -> dict[Place, Schedule]:
        """The rows of the new table."""
        return {r.place: schedule_of(r.winner) for r in self.results if r.winner != r.incumbent}


class SweepBench(Bench):
    """A benchmark run whose kernels are one library's, whatever the shape is called."""

    def __init__(self, library: KernelLibrary, ceilings: Ceilings) -> None:
        super().__init__(library.device, ceilings)
        self._library = library

    def library(self, shape: str, precision: str = "bf16", *, batch_invariant: bool = False) -> KernelLibrary:
        """The sweep's library."""
        return self._library


def run_sweep(
    sweep: Sweep,
    shape: str,
    library: KernelLibrary,
    load: Callable[[GemmSpec], Kernel],
    harness: Harness,
    ceilings: Ceilings,
    *,
    seconds: float,
    say: Callable[[str], None],
) -> Outcome:
    """Time every place of the sweep within ``seconds``. ``shape`` names the sweep's config, as the user did."""
    bench, outcome = SweepBench(library, ceilings), Outcome()
    end = time.monotonic() + seconds
    for index, (place, specs) in enumerate(sweep.candidates.items()):
        now = time.monotonic()
        if now >= end:
            outcome.left_out.append(place)
            say(f"{place}: left out, the {seconds:g} s were spent")
            continue
        deadline = now + (end - now) / (len(sweep.candidates) - index)
        result = Result(place, sweep.incumbent(place))
        outcome.results.append(result)
        _time_place(result, specs, shape, bench, load, harness, deadline)
        if place.rows is None and result.winner != result.incumbent and layers_can_be_timed(library):
            try:
                result.layer = _time_of_a_layer(result, shape, bench, load, harness)
            except (FuTransformerError, RuntimeError) as error:
                result.layer = math.inf
                say(f"{place}: a layer could not be timed: {first_line(error)}")
        say(describe(result))
        if library.device.type == "cuda":
            torch.cuda.empty_cache()
    return outcome


def describe(result: Result) -> str:
    """One place in a line."""
    if not result.times:
        return f"{result.place}: no candidate could be timed"
    (best, ratio), now = result.times[0], result.incumbent
    layer = f", a layer {result.layer:.3f}" if result.layer and math.isfinite(result.layer) else ""
    kept = "" if result.winner != now else "; what is used now stays"
    return f"{result.place}: {schedule_name(best)} takes {ratio:.3f} of the time of {schedule_name(now)}{layer}{kept}"


def schedule_name(spec: GemmSpec) -> str:
    """A schedule in a few words."""
    cluster = "x".join(map(str, spec.cluster))
    return f"{spec.tile.m}x{spec.tile.n} {cluster} {spec.schedule}"


def _time_place(
    result: Result,
    specs: tuple[GemmSpec, ...],
    shape: str,
    bench: SweepBench,
    load: Callable[[GemmSpec], Kernel],
    harness: Harness,
    deadline: float,
) -> None:
    place, incumbent = result.place, result.incumbent
    op: Projection = place.op  # type: ignore[assignment]
    libraries = {spec: bench.library(shape).with_prefill_gemm(op, load(spec)) for spec in (incumbent, *specs)}
    logs: dict[GemmSpec, list[float]] = {spec: [] for spec in libraries}
    numbers = BUCKETS[place.rows]
    for position, rows in enumerate(numbers):
        share = (deadline - time.monotonic()) / (len(numbers) - position)
        timed = _time_rows(result, libraries, shape, rows, bench, harness, share)
        for spec in [spec for spec in logs if spec not in timed]:
            del logs[spec], libraries[spec]
        for spec, seconds in timed.items():
            logs[spec] += [math.log(value) for value in seconds]
    if incumbent not in logs:
        return
    means = {spec: math.exp((sum(log) - sum(logs[incumbent])) / len(log)) for spec, log in logs.items()}
    result.times = sorted(((s, m) for s, m in means.items() if s != incumbent), key=lambda pair: pair[1])


def _time_rows(
    result: Result,
    libraries: Mapping[GemmSpec, KernelLibrary],
    shape: str,
    rows: int,
    bench: SweepBench,
    harness: Harness,
    seconds: float,
) -> dict[GemmSpec, list[float]]:
    """The times of a call at this many rows, of every candidate that computes the right thing."""
    op: Projection = result.place.op  # type: ignore[assignment]
    precision = bench.library(shape).precision
    inputs = ProjectionInputs(bench, shape, op, rows, "prefill", precision=precision.name)
    floor = graph_floor(gemm_work(inputs.config, op, rows, precision.name), rows, bench.ceilings)
    expected = inputs.expected()
    weights = [inputs.packed(bench.library(shape)) for _ in range(inputs.sets)]
    contenders: dict[str, Contender] = {}
    named: dict[str, GemmSpec] = {}
    for spec, library in libraries.items():
        try:
            verdict = judge(inputs.our_outputs(library), expected, precision)
            if not verdict.passed:
                result.refused[spec.name] = f"{rows} rows: error {verdict.error:.2e} exceeds {verdict.tolerance:.2e}"
                continue
            contenders[spec.name] = _contender(inputs, library, weights, floor)
            named[spec.name] = spec
        except (FuTransformerError, RuntimeError) as error:
            result.refused[spec.name] = f"{rows} rows: {first_line(error)}"
    told = regimes(rows)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for regime in told:
        if result.incumbent.name not in contenders:
            return {}
        share = max(seconds / len(told), LEAST_SECONDS)
        timings = harness.measure(regime, contenders, min(share, WANTED_SECONDS[regime]))
        for name, timing in timings.items():
            times[name].append(timing.median)
        best = sorted(contenders, key=lambda name: timings[name].median)[:FINALISTS]
        contenders = {n: c for n, c in contenders.items() if n in best or n == result.incumbent.name}
    return {named[name]: values for name, values in times.items() if len(values) == len(told)}


def layers_can_be_timed(library: KernelLibrary) -> bool:
    """Whether the benchmark has a layer of this precision: one whose cache is BF16, without a copy."""
    return library.precision.kv == BF16 and library.precision.copy is None


def _time_of_a_layer(
    result: Result, shape: str, bench: SweepBench, load: Callable[[GemmSpec], Kernel], harness: Harness
) -> float:
    """Of a layer with the best candidate, relative to the incumbent's: the geometric mean over regimes."""
    op: Projection = result.place.op  # type: ignore[assignment]
    contenders: dict[str, Contender] = {}
    for spec in (result.incumbent, result.winner):
        library = bench.library(shape).with_prefill_gemm(op, load(spec))
        alone = SweepBench(library, bench.ceilings)
        contenders[spec.name] = prefill_block.open_case(shape, LAYER_PROMPTS, alone, library.precision.name).ours
    logs = []
    for regime in COMPUTE_BOUND:
        found = harness.measure(regime, contenders, WANTED_SECONDS[regime])
        logs.append(math.log(found[result.winner.name].median / found[result.incumbent.name].median))
    return math.exp(sum(logs) / len(logs))


def _contender(
    inputs: ProjectionInputs, library: KernelLibrary, weights: list[Tensor], floor: float | None
) -> Contender:
    """Calls that walk over the weights, which all candidates read in one packing."""
    return inputs.timed(inputs.calls_over(library, weights), list, floor, library.chain())
