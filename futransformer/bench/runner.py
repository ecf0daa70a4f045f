"""A subject's cases -> rows: open, check, time, tell; within a budget of seconds.

The budget is divided over the cases that are left. What a case spends on its tensors, on compiling rivals and on the
check comes out of its share; the regimes divide the rest, and never get less than the harness needs for a sound figure.
A case whose turn comes after the budget is spent is left out with a note.
"""

from __future__ import annotations

import fnmatch
import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from futransformer.bench.case import (
    SECONDS_PER_UNIT,
    Case,
    Ceilings,
    HostCase,
    Problem,
    Regime,
    RivalMissingError,
    Row,
    Unit,
    ratio_to,
    told_beside,
)
from futransformer.bench.check import Verdict, judge, judge_rival
from futransformer.bench.harness import Harness, Timing
from futransformer.bench.shapes import SHAPES, shape_config
from futransformer.generator.errors import FuTransformerError, InputError
from futransformer.generator.precision import get_precision
from futransformer.library import KernelLibrary, load_kernels

# What a regime is given if the budget allows it, in seconds; more would narrow no spread worth narrowing.
WANTED_SECONDS: dict[Regime, float] = {"burst": 2.5, "sustained": 4.0, "steady": 1.0}
LEAST_SECONDS = 0.2  # of a regime; the harness takes its minimum number of turns anyway

Say = Callable[[str], None]
AnyCase = Case | HostCase
Found = TypeVar("Found")


class Bench:
    """What every case of a run shares: the device, the ceilings, the kernels of each shape."""

    def __init__(
        self,
        device: torch.device,
        ceilings: Ceilings | None,
        *,
        kernels: Path | None = None,
        tuned: bool = True,
        compile_seconds: float | None = None,
    ) -> None:
        """``kernels`` is a folder of exports, one a config's name; ``tuned`` rivals spend time on tuning themselves.

        Subjects that need no GPU have no ceilings. ``compile_seconds`` are for a rival that first compiles a whole
        model; None for the subject's own.
        """
        self.device = device
        self._ceilings = ceilings
        self.tuned = tuned
        self.compile_seconds = compile_seconds
        self.kernels = kernels
        self._libraries: dict[tuple[str, str, bool], KernelLibrary] = {}
        self._found: dict[str, Any] = {}

    @property
    def ceilings(self) -> Ceilings:
        """What the card reached in this run."""
        assert self._ceilings is not None, "a timed case needs measured ceilings"
        return self._ceilings

    def folder(self, shape: str, precision: str = "bf16") -> Path | None:
        """The export of a shape's config: named after it, and after the precision if that is not BF16."""
        name = SHAPES.get(shape, shape) + ("" if precision == "bf16" else f"-{precision}")
        return self.kernels / name if self.kernels else None

    def library(self, shape: str, precision: str = "bf16", *, batch_invariant: bool = False) -> KernelLibrary:
        """The kernels of a shape, loaded when they are first asked for."""
        key = shape, precision, batch_invariant
        if key not in self._libraries:
            folder = self.folder(shape, precision)
            self._libraries[key] = load_kernels(
                shape_config(shape), precision, folder=folder, batch_invariant=batch_invariant
            )
        return self._libraries[key]

    def once(self, name: str, measure: Callable[[], Found]) -> Found:
        """What ``measure`` finds, measured for the first case of a run that asks by this name."""
        if name not in self._found:
            self._found[name] = measure()
        found: Found = self._found[name]
        return found


@dataclass
class Outcome:
    """What a subject gave: rows in the order of its cases, notes on what was left out, and whether any case failed."""

    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failed: bool = False


def select(cases: Sequence[AnyCase], patterns: Sequence[str]) -> list[AnyCase]:
    """The default cases, or all whose name has one of the patterns among its parts: whole parts, ``*`` for anything."""
    if not patterns:
        return [case for case in cases if case.default]
    wanted = [f"*/{pattern.strip('/')}/*" for pattern in patterns]
    chosen = [case for case in cases if any(fnmatch.fnmatchcase(f"/{case.name}/", pattern) for pattern in wanted)]
    if not chosen:
        raise InputError(f"--only {' '.join(patterns)} matches no case of this subject; one is {cases[0].name}")
    return chosen


def by_file(chosen: Mapping[str, Sequence[AnyCase]]) -> list[tuple[str, str, list[AnyCase]]]:
    """The cases that were chosen of each subject, divided by precision: (subject, precision, cases)."""
    return [
        (subject, precision, [case for case in cases if case.precision == precision])
        for subject, cases in chosen.items()
        for precision in dict.fromkeys(case.precision for case in cases)
    ]


def run_cases(
    cases: Sequence[AnyCase],
    bench: Bench,
    harness: Harness,
    *,
    seconds: float,
    say: Say,
    save: Callable[[Outcome], None] = lambda _: None,
    now: Callable[[], float] = time.monotonic,
) -> Outcome:
    """Run the cases in order within ``seconds``; ``save`` hears after each, so that a killed run keeps what it had."""
    outcome = Outcome()
    end = now() + seconds
    for index, case in enumerate(cases):
        start = now()
        if start >= end:
            outcome.notes.append(f"{case.name}: left out, the budget of {seconds:g} s was spent")
            say(outcome.notes[-1])
            continue
        deadline = start + (end - start) / (len(cases) - index)
        try:
            if isinstance(case, HostCase):
                run_host_case(case, bench, outcome, say)
            else:
                run_case(case, bench, harness, outcome, partial(_left, deadline, now), say)
        except (FuTransformerError, RuntimeError) as error:
            outcome.failed = True
            outcome.notes.append(f"{case.name}: failed: {first_line(error)}")
            say(outcome.notes[-1])
        free(bench.device)
        save(outcome)
        say(f"[{index + 1} of {len(cases)} took {now() - start:.1f} s]")
    return outcome


def run_host_case(case: HostCase, bench: Bench, outcome: Outcome, say: Say) -> None:
    """Append the rows that passed their own check."""
    for row in case.measure(bench):
        for note in row.pop("notes", []):
            outcome.notes.append(f"{row['case']}: {note}")
            say(outcome.notes[-1])
        if row["error"] > row["tolerance"]:
            outcome.failed = True
            outcome.notes.append(f"{row['case']}: its check failed: {row['error']:g} things were not as they must be")
            say(outcome.notes[-1])
        else:
            outcome.rows.append(row)
            say(describe(row))


def run_case(case: Case, bench: Bench, harness: Harness, outcome: Outcome, left: Callable[[], float], say: Say) -> None:
    """Append the case's rows, or the reason why there are none."""
    precision = get_precision(case.precision)
    problem = case.open(bench)
    expected = problem.expected()
    verdict = judge(problem.ours.outputs(), expected, precision)
    if not verdict.passed:
        outcome.failed = True
        outcome.notes.append(
            f"{case.name}: not timed, its error {verdict.error:.2e} exceeds the tolerance {verdict.tolerance:.2e}"
        )
        say(outcome.notes[-1])
        return
    contenders, notes = {"ours": problem.ours}, []
    for name, make in {**problem.rivals, **problem.beside}.items():
        try:
            rival = make()
            outputs = rival.outputs()
            judged = judge_rival(outputs, expected, precision) if outputs else None
        except RivalMissingError as error:
            notes.append(f"{case.name}: {name} left out: {error}")
            continue
        except Exception as error:  # a rival may fail in any way; ours is measured all the same
            reason = first_line(error)
            if bench.kernels is not None:  # a result tells of exports by their names, wherever they lay
                reason = reason.replace(f"{bench.kernels}/", "")
            notes.append(f"{case.name}: {name} left out: {type(error).__name__}: {reason}")
            continue
        if judged is not None and not judged.passed:
            notes.append(f"{case.name}: {name} left out: it computes something else (error {judged.error:.2e})")
            continue
        contenders[name] = rival
    del expected
    for note in notes:
        say(note)
    outcome.notes += notes
    for position, regime in enumerate(case.regimes):
        share = left() / (len(case.regimes) - position)
        timings = harness.measure(regime, contenders, min(max(share, LEAST_SECONDS), WANTED_SECONDS[regime]))
        outcome.rows.append(make_row(case, regime, problem, timings, verdict, bench.ceilings))
        say(describe(outcome.rows[-1]))


def make_row(
    case: Case, regime: Regime, problem: Problem, timings: dict[str, Timing], verdict: Verdict, ceilings: Ceilings
) -> Row:
    """One row of the results file."""
    ours = timings["ours"]
    rivals = {name: timing for name, timing in timings.items() if name in problem.rivals}
    beside = {name: timing for name, timing in timings.items() if name in problem.beside}
    spread = sorted(case.value(edge, problem.work) for edge in (ours.p10, ours.p90))
    best = min((timing.median for timing in rivals.values()), default=None)

    def figures(timings: dict[str, Timing]) -> dict[str, float]:
        return {name: _figure(case.value(timing.median, problem.work)) for name, timing in timings.items()}

    row = {
        "case": case.name if regime == "steady" else f"{case.name}/{regime}",
        "ours": _figure(case.value(ours.median, problem.work)),
        "unit": case.unit,
        "spread": [_figure(edge) for edge in spread],
        "rivals": figures(rivals),
        "ratio": None if best is None else round(best / ours.median, 3),
        "percent_of_ceiling": round(100 * problem.work.floor_seconds(ceilings) / ours.median, 1),
        "error": float(f"{verdict.error:.3g}"),
        "tolerance": float(f"{verdict.tolerance:.3g}"),
    }
    return {**row, "beside": figures(beside)} if beside else row


def host_row(name: str, timing: Timing, *, error: float, unit: Unit = "s") -> Row:
    """One row of a host case: a time in its unit, or a figure of another kind as it is; nothing may be wrong."""
    scale = SECONDS_PER_UNIT.get(unit, 1.0)
    ours, low, high = (_figure(value / scale) for value in (timing.median, timing.p10, timing.p90))
    return {
        "case": name,
        "ours": ours,
        "unit": unit,
        "spread": [low, high],
        "rivals": {},
        "ratio": None,
        "percent_of_ceiling": None,
        "error": error,
        "tolerance": 0,
    }


def describe(row: Row) -> str:
    """A row in one line."""
    told = [f"{name} {figure:g}" for name, figure in row["rivals"].items()]
    told += [f"beside: {name} {figure:g}, ratio {ratio_to(figure, row):.3f}" for name, figure in told_beside(row)]
    rivals = ", ".join(told)
    ratio = "" if row["ratio"] is None else f", ratio {row['ratio']:.3f}"
    ceiling = "" if row["percent_of_ceiling"] is None else f", {row['percent_of_ceiling']:.1f} % of the ceiling"
    return f"{row['case']}: {row['ours']:g} {row['unit']}{ratio}{ceiling}" + (f" ({rivals})" if rivals else "")


def _left(deadline: float, now: Callable[[], float]) -> float:
    return deadline - now()


def _figure(value: float) -> float:
    """Five significant digits: more than any spread leaves meaningful."""
    return float(f"{value:.5g}")


def first_line(error: BaseException) -> str:
    """What an error says, in one line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def free(device: torch.device) -> None:
    """Give a case's memory back, and forget what was compiled for it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch._dynamo.reset()
