"""Candidates checked and timed: on a stand-in library whose launches take the time that a test gives their schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from futransformer.bench import graphs, llama
from futransformer.bench.case import Ceilings, Contender, Regime
from futransformer.bench.harness import Harness, Timing
from futransformer.driver import Kernel
from futransformer.generator.config import LlamaConfig
from futransformer.generator.errors import DeviceError
from futransformer.generator.heuristics import MAX_ROWS
from futransformer.generator.precision import get_precision
from futransformer.generator.schedules import Place, shipped_table
from futransformer.generator.specs import GemmSpec
from futransformer.library import KernelLibrary
from futransformer.reference import ReferenceOps
from futransformer.tune import measure, sweep
from tests.ops.stand_in import StandInKernel, stand_in_library

TINY = LlamaConfig("tiny", 128, 192, 2, 4, 2, 64, 300, 4096, 1e-5, 1e4)
CEILINGS = Ceilings(read_tbps=4.0, fp8_tflops=1600.0, bf16_tflops=800.0)
NOW = 1e-3  # seconds of a launch of the incumbent
LAYER_PROMPTS = (5, 6)


class Clock:
    """Device time passes with launches; ``timing``: they need not compute anything."""

    def __init__(self) -> None:
        self.time, self.timing = 0.0, False

    def mark(self) -> float:
        return self.time

    def seconds(self, first: float, second: float) -> float:
        return second - first

    def idle(self, seconds: float) -> None:
        self.time += seconds


class TellingHarness(Harness):
    """Tells the clock when it is timing, and remembers the regimes and how many contended in each."""

    clock: Clock

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.asked: list[tuple[Regime, int]] = []

    def measure(self, regime: Regime, contenders: Mapping[str, Contender], seconds: float) -> dict[str, Timing]:
        self.asked.append((regime, len(contenders)))
        self.clock.timing = True
        try:
            return super().measure(regime, contenders, seconds)
        finally:
            self.clock.timing = False


class TimedKernel(StandInKernel):
    """Computes what the reference does and takes ``seconds``; ``fault`` may spoil the result, or refuse the launch.

    In a layer it takes ``in_a_layer`` times as long.
    """

    in_a_layer = 1.0

    def __init__(self, spec: GemmSpec, clock: Clock, seconds: float, fault: Callable[[Tensor], None] | None) -> None:
        super().__init__(spec, ReferenceOps(TINY))
        self.clock, self.seconds_a_launch, self.fault = clock, seconds, fault

    def launch(self, grid: tuple[int, int, int], **arguments: Any) -> None:
        self.clock.time += self.seconds_a_launch
        if self.clock.timing:
            return
        super().launch(grid, **arguments)
        if self.fault is not None:
            self.fault(arguments["out"])


def layer_of_one_launch(_: str, lengths: tuple[int, ...], bench: measure.SweepBench, precision: str) -> SimpleNamespace:
    """All else in a layer takes no time."""
    assert (lengths, precision) == (LAYER_PROMPTS, "bf16")
    gemm = cast(Any, bench.library("tiny")._projections.gemms["prefill", "down"])
    (kernel,) = gemm.kernels.values()

    def run() -> None:
        kernel.clock.time += kernel.seconds_a_launch * kernel.in_a_layer

    return SimpleNamespace(ours=Contender(run, list))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> KernelLibrary:
    def looped(calls: Sequence[Callable[[], object]], _: float, __: object) -> tuple[Callable[[], None], int]:
        def run() -> None:
            for call in calls:
                call()

        return run, len(calls)

    monkeypatch.setattr(graphs, "captured", looped)
    monkeypatch.setattr(llama, "ROTATION_BYTES", 1)
    monkeypatch.setattr(measure, "BUCKETS", {64: (3, 5), None: (9, 1024)})
    monkeypatch.setattr(measure, "LAYER_PROMPTS", LAYER_PROMPTS)
    monkeypatch.setattr("futransformer.bench.subjects.prefill_block.open_case", layer_of_one_launch)
    monkeypatch.setattr("futransformer.bench.subjects.projection.shape_config", lambda _: TINY)
    torch.manual_seed(0)
    return stand_in_library(TINY, monkeypatch)


@pytest.fixture
def small_sweep() -> sweep.Sweep:
    """Three candidates for down at few rows, and at any number."""
    whole = sweep.make_sweep(TINY, "bf16", shipped_table(), ["down"], 4)
    kept = {place: specs[:3] for place, specs in whole.candidates.items() if place.rows in (64, None)}
    return sweep.Sweep(whole.config, whole.precision, whole.table, kept)


def run(
    small_sweep: sweep.Sweep,
    library: KernelLibrary,
    clock: Clock,
    seconds: dict[str, float],
    faults: Mapping[str, Callable[[Tensor], None]] | None = None,
    budget: float = 1000,
) -> measure.Outcome:
    """Time the sweep; a launch takes ``seconds`` by the spec's name, else as long as the incumbent's."""

    def load(spec: GemmSpec) -> Kernel:
        kernel = TimedKernel(spec, clock, seconds.get(spec.name, NOW), (faults or {}).get(spec.name))
        return cast(Kernel, kernel)

    said: list[str] = []
    return measure.run_sweep(
        small_sweep, "tiny", library, load, TellingHarness(clock), CEILINGS, seconds=budget, say=said.append
    )


def place_of(small_sweep: sweep.Sweep, rows: int | None) -> tuple[Place, tuple[GemmSpec, ...]]:
    return next(item for item in small_sweep.candidates.items() if item[0].rows == rows)


@pytest.mark.parametrize("rows", [64, None])
def test_the_fastest_wins_its_place_alone(
    small_sweep: sweep.Sweep, library: KernelLibrary, clock: Clock, rows: int | None
) -> None:
    place, specs = place_of(small_sweep, rows)
    outcome = run(small_sweep, library, clock, {specs[0].name: 0.97 * NOW, specs[2].name: 0.9 * NOW})
    assert outcome.changes()[place]["tile"] == specs[2].tile
    result = next(result for result in outcome.results if result.place == place)
    assert [spec for spec, _ in result.times] == [specs[2], specs[0], specs[1]]
    assert [ratio for _, ratio in result.times] == pytest.approx([0.9, 0.97, 1.0])
    assert result.winner == specs[2]
    assert measure.describe(result).startswith(f"{place}: {measure.schedule_name(specs[2])} takes 0.900 of the time")


@pytest.mark.parametrize(("in_a_layer", "kept"), [(1.05, True), (1.2, False)])
def test_a_layer_has_the_last_word(
    small_sweep: sweep.Sweep, library: KernelLibrary, clock: Clock, in_a_layer: float, kept: bool
) -> None:
    place, specs = place_of(small_sweep, None)
    slower = {specs[1].name: in_a_layer}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TimedKernel, "in_a_layer", property(lambda kernel: slower.get(kernel.spec.name, 1.0)))
        outcome = run(small_sweep, library, clock, {specs[1].name: 0.9 * NOW})
    result = next(result for result in outcome.results if result.place == place)
    assert result.layer == pytest.approx(0.9 * in_a_layer)
    assert (place in outcome.changes()) is kept
    told, now = measure.describe(result), measure.schedule_name(result.incumbent)
    assert f"takes 0.900 of the time of {now}, a layer {0.9 * in_a_layer:.3f}" in told
    assert told.endswith("; what is used now stays") is not kept


def test_the_layer_that_is_asked_is_the_benchmarks(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "LAYER_PROMPTS", LAYER_PROMPTS)
    monkeypatch.setattr("futransformer.bench.subjects.prefill_block.shape_config", lambda _: TINY)
    ours = stand_in_library(TINY, monkeypatch)
    place, specs = next(iter(sweep.make_sweep(TINY, "bf16", shipped_table(), ["down"], 1).candidates.items()))
    incumbent = ours.plan.prefill["down"][place.rows or MAX_ROWS]
    result = measure.Result(place, incumbent, [(specs[0], 0.5)])
    ran: list[str] = []

    class Once(Harness):
        def measure(self, regime: Regime, contenders: Mapping[str, Contender], seconds: float) -> dict[str, Timing]:
            for name, contender in contenders.items():
                contender.run()
                ran.append(f"{regime}/{name}")
            return {name: Timing.of([2.0 if name == incumbent.name else 1.0]) for name in contenders}

    bench = measure.SweepBench(ours, CEILINGS)
    load = cast(Callable[[GemmSpec], Kernel], lambda spec: TimedKernel(spec, clock, NOW, None))
    assert measure._time_of_a_layer(result, "tiny", bench, load, Once(clock)) == pytest.approx(0.5)
    names = (incumbent.name, specs[0].name)
    assert ran == [f"{regime}/{name}" for regime in ("burst", "sustained") for name in names]
    assert clock.time == 4 * NOW


def test_a_layer_that_fails_keeps_what_is_used_now(
    small_sweep: sweep.Sweep, library: KernelLibrary, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(measure, "_time_of_a_layer", full)
    place, specs = place_of(small_sweep, None)
    outcome = run(small_sweep, library, clock, {specs[1].name: 0.9 * NOW})
    assert place not in outcome.changes()
    result = next(result for result in outcome.results if result.place == place)
    assert measure.describe(result).endswith(f"{measure.schedule_name(result.incumbent)}; what is used now stays")


def test_a_layer_is_asked_where_there_is_one(
    small_sweep: sweep.Sweep, library: KernelLibrary, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of few rows it is not: the layer has many. Nor of a cache of codes, of which the benchmark has no layer."""
    few, specs = place_of(small_sweep, 64)
    outcome = run(small_sweep, library, clock, {specs[1].name: 0.9 * NOW})
    assert few in outcome.changes()
    assert next(result for result in outcome.results if result.place == few).layer is None
    monkeypatch.setattr(library, "precision", get_precision("bf16-kv8"))
    assert not measure.layers_can_be_timed(library)
    monkeypatch.setattr(library, "precision", get_precision("fp8-int4"))
    assert measure.layers_can_be_timed(library)


@pytest.mark.parametrize(("rows", "kept", "replaced"), [(None, 0.993, 0.987), (64, 0.973, 0.967)])
def test_a_gain_that_is_not_worth_it_changes_nothing(
    small_sweep: sweep.Sweep,
    library: KernelLibrary,
    clock: Clock,
    rows: int | None,
    kept: float,
    replaced: float,
) -> None:
    """Within the noise for any number of rows; for few rows, where it costs a kernel more, below three per cent."""
    place, specs = place_of(small_sweep, rows)
    outcome = run(small_sweep, library, clock, {specs[1].name: kept * NOW})
    assert place not in outcome.changes()
    result = next(result for result in outcome.results if result.place == place)
    assert "; what is used now stays" in measure.describe(result)
    assert place in run(small_sweep, library, clock, {specs[1].name: replaced * NOW}).changes()


@pytest.mark.parametrize(
    ("bucket", "rows", "graphed", "told"),
    [
        (128, 128, True, ["steady"]),
        (256, 256, True, ["burst", "sustained"]),
        (None, 1024, False, ["burst", "sustained"]),
    ],
)
def test_places_are_timed_as_the_benchmark_times_them(
    monkeypatch: pytest.MonkeyPatch,
    library: KernelLibrary,
    clock: Clock,
    bucket: int | None,
    rows: int,
    graphed: bool,
    told: list[Regime],
) -> None:
    captured, chains = graphs.captured, []

    def watched(calls: Sequence[Callable[[], object]], floor: float, chain: Any) -> tuple[Callable[[], None], int]:
        chains.append(chain)
        return captured(calls, floor, chain)

    monkeypatch.setattr(graphs, "captured", watched)
    monkeypatch.setattr(measure, "BUCKETS", {bucket: (rows,)})
    whole = sweep.make_sweep(TINY, "bf16", shipped_table(), ["down"], measure.FINALISTS + 3)
    places = {place: specs for place, specs in whole.candidates.items() if place.rows == bucket}
    harness = TellingHarness(clock)
    measure.run_sweep(
        sweep.Sweep(whole.config, whole.precision, whole.table, places),
        "tiny",
        library,
        lambda spec: cast(Kernel, TimedKernel(spec, clock, NOW, None)),
        harness,
        CEILINGS,
        seconds=1000,
        say=lambda _: None,
    )
    assert [regime for regime, _ in harness.asked] == told
    contenders = 1 + len(next(iter(places.values())))
    assert harness.asked[0][1] == contenders
    assert all(count in (measure.FINALISTS, measure.FINALISTS + 1) for _, count in harness.asked[1:])
    assert len(chains) == (contenders if graphed else 0)
    assert all(chain is library.launch_chain for chain in chains)


def zero_a_row(out: Tensor) -> None:
    out[-1] = 0


def poison_one(out: Tensor) -> None:
    out[0, 0] = torch.nan


def refuse(_: Tensor) -> None:
    raise DeviceError("CUDA driver: CUDA_ERROR_INVALID_VALUE: invalid argument")


@pytest.mark.parametrize(
    ("fault", "reason"),
    [(zero_a_row, "rows: error"), (poison_one, "error inf exceeds"), (refuse, "CUDA_ERROR_INVALID_VALUE")],
)
def test_what_is_wrong_is_never_timed_however_fast(
    small_sweep: sweep.Sweep, library: KernelLibrary, clock: Clock, fault: Callable[[Tensor], None], reason: str
) -> None:
    for rows in (64, None):
        place, specs = place_of(small_sweep, rows)
        outcome = run(small_sweep, library, clock, {specs[0].name: 0.1 * NOW}, {specs[0].name: fault})
        result = next(result for result in outcome.results if result.place == place)
        assert reason in result.refused[specs[0].name]
        assert specs[0] not in [spec for spec, _ in result.times]
        assert place not in outcome.changes()


def test_places_without_time_are_left_out(small_sweep: sweep.Sweep, library: KernelLibrary, clock: Clock) -> None:
    outcome = run(small_sweep, library, clock, {}, budget=0)
    assert outcome.left_out == list(small_sweep.candidates)
    assert outcome.results == []


def test_an_incumbent_that_is_wrong_is_no_measure(
    small_sweep: sweep.Sweep, library: KernelLibrary, clock: Clock
) -> None:
    place, _ = place_of(small_sweep, 64)
    faults = {small_sweep.incumbent(place).name: zero_a_row}
    outcome = run(small_sweep, library, clock, {}, faults)
    result = next(result for result in outcome.results if result.place == place)
    assert result.times == []
    assert measure.describe(result) == f"{place}: no candidate could be timed"
