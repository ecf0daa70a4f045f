"""Timing: contenders in one process, interleaved, in shuffled order, in the regime that their users meet.

- *burst*: a pause in which the card cools and its power budget recovers, two untimed runs that bring the clock up, then
  a few timed ones; the next contender after the next pause. What a single prompt on an idle server sees.
- *sustained*: one stretch of at least two seconds without a gap, at the power cap, in blocks of one contender each. The
  first part of a block only brings the clock to where this contender's power draw puts it. What a loaded server sees.
- *steady*: runs of all contenders in turn, queued without a gap; for what memory bounds, where power is no limit.

A sample is the time between two marks on the stream over the calls between them; a mark stands at least
``MARK_SPACING`` after the last, so that its own few hundred nanoseconds do not count. Everything is told as the median
with the tenth and ninetieth percentile.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

from futransformer.bench.case import Contender, Regime

MARK_SPACING = 5e-4  # seconds between marks
BURST_PAUSE = 0.05  # seconds of idling before a burst, and three times the burst itself if that is longer
BURST_WARM_RUNS = 2
BURST_SAMPLES = 5
HEAT_SECONDS = 0.7  # until clocks have settled at the power cap
BLOCK_SECONDS = 0.3  # one contender's turn in the sustained stretch
SETTLING = 0.4  # part of a block that is not counted
SUSTAINED_SECONDS = 2.0  # the shortest stretch after heating
MIN_ROUNDS = 3
MAX_ROUNDS = 40
QUEUE_SECONDS = 0.05  # runs queued before anybody waits: enough to hide the host, few enough to stop in time


class Clock(Protocol):
    """The device's stream of time."""

    def mark(self) -> Any:
        """Enqueue a mark behind all that was enqueued so far."""
        ...

    def seconds(self, first: Any, second: Any) -> float:
        """Wait for the second mark; return the time between the two."""
        ...

    def idle(self, seconds: float) -> None:
        """Wait for all work, then let the device rest."""
        ...


class CudaClock:
    """Marks are CUDA events on the current stream."""

    def mark(self) -> Any:
        """See Clock.mark."""
        import torch  # noqa: PLC0415 - the harness itself is tested without a GPU

        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, first: Any, second: Any) -> float:
        """See Clock.seconds."""
        second.synchronize()
        return float(first.elapsed_time(second)) * 1e-3

    def idle(self, seconds: float) -> None:
        """See Clock.idle."""
        import time  # noqa: PLC0415

        import torch  # noqa: PLC0415

        torch.cuda.synchronize()
        time.sleep(seconds)


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: median, tenth and ninetieth percentile, and how many samples gave them."""

    median: float
    p10: float
    p90: float
    samples: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        """Sum the samples up; percentiles interpolate between neighbours."""
        ordered = sorted(samples)
        return cls(statistics.median(ordered), percentile(ordered, 0.1), percentile(ordered, 0.9), len(ordered))


def percentile(ordered: Sequence[float], fraction: float) -> float:
    """Return the value below which ``fraction`` of the ordered samples lie, between neighbours if need be."""
    position = fraction * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


class Harness:
    """Times sets of contenders; ``seed`` fixes the order in which they take turns."""

    def __init__(self, clock: Clock, *, seed: int = 0) -> None:
        self.clock = clock
        self._random = random.Random(seed)

    def measure(self, regime: Regime, contenders: Mapping[str, Contender], seconds: float) -> dict[str, Timing]:
        """Time all contenders within about ``seconds``; never fewer than MIN_ROUNDS turns each."""
        spans = {name: self._span(contender) for name, contender in contenders.items()}
        method: Callable[[Mapping[str, Contender], dict[str, float], float], dict[str, list[float]]] = {
            "burst": self._burst,
            "sustained": self._sustained,
            "steady": self._steady,
        }[regime]
        return {name: Timing.of(samples) for name, samples in method(contenders, spans, seconds).items()}

    def _span(self, contender: Contender) -> float:
        """A first guess at the time of one run, after one that loads and warms everything."""
        contender.run()
        first = self.clock.mark()
        contender.run()
        return max(self.clock.seconds(first, self.clock.mark()), 1e-7)

    def _shuffled(self, contenders: Mapping[str, Contender]) -> list[str]:
        names = sorted(contenders)
        self._random.shuffle(names)
        return names

    def _timed(self, contender: Contender, samples: int, runs: int) -> list[Any]:
        """Enqueue ``samples`` times ``runs`` runs with a mark before, between and after; return the marks."""
        marks = [self.clock.mark()]
        for _ in range(samples):
            for _ in range(runs):
                contender.run()
            marks.append(self.clock.mark())
        return marks

    def _intervals(self, marks: Sequence[Any], calls: int) -> list[float]:
        return [self.clock.seconds(a, b) / calls for a, b in pairwise(marks)]

    def _burst(
        self, contenders: Mapping[str, Contender], spans: dict[str, float], seconds: float
    ) -> dict[str, list[float]]:
        runs = {name: _runs(MARK_SPACING, span) for name, span in spans.items()}
        busy = {name: (BURST_WARM_RUNS + BURST_SAMPLES * runs[name]) * span for name, span in spans.items()}
        pauses = {name: max(BURST_PAUSE, 3 * span) for name, span in busy.items()}
        rounds = _rounds(seconds, sum(busy.values()) + sum(pauses.values()))
        samples: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(rounds):
            for name in self._shuffled(contenders):
                contender = contenders[name]
                self.clock.idle(pauses[name])
                for _ in range(BURST_WARM_RUNS):
                    contender.run()
                marks = self._timed(contender, BURST_SAMPLES, runs[name])
                samples[name] += self._intervals(marks, runs[name] * contender.calls)
        return samples

    def _sustained(
        self, contenders: Mapping[str, Contender], spans: dict[str, float], seconds: float
    ) -> dict[str, list[float]]:
        runs = {name: _runs(MARK_SPACING, span) for name, span in spans.items()}
        counts = {name: max(2, round(BLOCK_SECONDS / (runs[name] * span))) for name, span in spans.items()}
        stretch = max(seconds - HEAT_SECONDS, SUSTAINED_SECONDS)
        rounds = _rounds(stretch, sum(counts[name] * runs[name] * span for name, span in spans.items()))
        heating = _rounds(HEAT_SECONDS, sum(counts[name] * runs[name] * span for name, span in spans.items()), least=1)
        samples: dict[str, list[float]] = {name: [] for name in contenders}
        waiting: list[tuple[str, list[Any]]] = []
        for turn in range(heating + rounds):
            for name in self._shuffled(contenders):
                marks = self._timed(contenders[name], counts[name], runs[name])
                if turn >= heating:
                    waiting.append((name, marks[int(SETTLING * counts[name]) :]))
                # The card works on this block while the host waits for the one before: never idle, never far behind.
                while len(waiting) > 1:
                    self._collect(*waiting.pop(0), contenders, runs, samples)
        for name, marks in waiting:
            self._collect(name, marks, contenders, runs, samples)
        return samples

    def _collect(
        self,
        name: str,
        marks: list[Any],
        contenders: Mapping[str, Contender],
        runs: dict[str, int],
        samples: dict[str, list[float]],
    ) -> None:
        samples[name] += self._intervals(marks, runs[name] * contenders[name].calls)

    def _steady(
        self, contenders: Mapping[str, Contender], spans: dict[str, float], seconds: float
    ) -> dict[str, list[float]]:
        runs = {name: _runs(MARK_SPACING, span) for name, span in spans.items()}
        once = sum((1 + runs[name]) * span for name, span in spans.items())  # a turn: one untimed run, then the timed
        rounds = max(MIN_ROUNDS, int(seconds / once))
        together = max(1, int(QUEUE_SECONDS / once))
        samples: dict[str, list[float]] = {name: [] for name in contenders}
        for start in range(0, rounds, together):
            waiting = []
            for _ in range(min(together, rounds - start)):
                for name in self._shuffled(contenders):
                    contenders[name].run()
                    waiting.append((name, self._timed(contenders[name], 1, runs[name])))
            for name, marks in waiting:
                self._collect(name, marks, contenders, runs, samples)
        return samples


def _runs(spacing: float, span: float) -> int:
    """Runs between two marks that stand at least ``spacing`` apart."""
    return max(1, -int(-spacing // span))


def _rounds(seconds: float, one: float, *, least: int = MIN_ROUNDS) -> int:
    return min(max(least, round(seconds / one)), MAX_ROUNDS)
