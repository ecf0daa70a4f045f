"""The timing itself, on a clock that contenders advance."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import groupby

import pytest

from futransformer.bench import harness as timing
from futransformer.bench.case import Contender, Regime
from futransformer.bench.harness import Harness, Timing, percentile
from tests.bench.conftest import FakeClock

Timed = Callable[..., Contender]


def turns(log: list[str]) -> list[str]:
    """Who ran, in turns: neighbouring runs of one contender are one turn."""
    return [name for name, _ in groupby(entry for entry in log if entry != "|")]


def test_statistics() -> None:
    assert percentile([1.0], 0.9) == 1.0
    assert percentile([0.0, 10.0], 0.1) == pytest.approx(1.0)
    summed = Timing.of([5, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11])
    assert (summed.median, summed.p10, summed.p90, summed.samples) == (6, 2, 10, 11)


@pytest.mark.parametrize("regime", ["burst", "sustained", "steady"])
def test_each_regime_finds_the_time_of_one_call(harness: Harness, timed: Timed, regime: Regime) -> None:
    contenders = {
        "ours": timed("ours", 2e-3),
        "graphed": timed("graphed", 1e-5, calls=200),
        "tiny": timed("tiny", 1e-5),
        "uneven": timed("uneven", 1e-3, 1e-3, 1e-3, 1e-3, 9e-3),
    }
    timings = harness.measure(regime, contenders, 3.0)
    assert timings["ours"].median == pytest.approx(2e-3)
    assert timings["graphed"].median == pytest.approx(1e-5)
    assert timings["tiny"].median == pytest.approx(1e-5)
    assert timings["uneven"].median == pytest.approx(1e-3)  # what happens once in five runs moves no median
    assert timings["uneven"].p90 == pytest.approx(9e-3)
    assert timings["ours"].p10 == pytest.approx(timings["ours"].p90)


@pytest.mark.parametrize("regime", ["burst", "sustained", "steady"])
def test_contenders_take_turns_in_shuffled_order(clock: FakeClock, timed: Timed, regime: Regime) -> None:
    contenders = {name: timed(name, 1e-2) for name in "abc"}
    Harness(clock, seed=3).measure(regime, contenders, 6.0)
    order = [name for name in turns(clock.log[12:]) if name != "idle"]
    if regime == "burst":  # without rests, neighbours in two rounds are one turn
        rounds = ["".join(order[i : i + 3]) for i in range(0, len(order) - 2, 3)]
        assert len(set(rounds)) > 2
    counts = [clock.log.count(name) for name in "abc"]
    assert max(counts) == min(counts) > 6
    again = FakeClock()
    repeat = {name: Contender(run=partial(again.work, name, 1e-2), outputs=tuple) for name in "abc"}
    Harness(again, seed=3).measure(regime, repeat, 6.0)
    assert again.log == clock.log


def test_a_burst_rests_before_each_turn_and_warms_up(clock: FakeClock, harness: Harness, timed: Timed) -> None:
    harness.measure("burst", {"a": timed("a", 4e-3), "b": timed("b", 4e-2)}, 1.0)
    # every turn: a rest, two untimed runs, then a mark, a run, a mark, ...
    start = clock.log.index("idle")
    turn = clock.log[start : start + 3]
    assert turn[0] == "idle"
    assert turn[1] == turn[2] != "|"
    assert clock.log[start + 3] == "|"
    assert min(clock.idled) == pytest.approx(3 * 7 * 4e-3)
    assert max(clock.idled) == pytest.approx(3 * 7 * 4e-2)  # a longer burst rests longer
    short = FakeClock()
    Harness(short).measure("burst", {"a": Contender(lambda: short.work("a", 1e-4), tuple)}, 1.0)
    assert set(short.idled) == {timing.BURST_PAUSE}


def test_a_sustained_stretch_never_rests_and_lasts(clock: FakeClock, harness: Harness, timed: Timed) -> None:
    timings = harness.measure("sustained", {"a": timed("a", 3e-3), "b": timed("b", 5e-3)}, 0.1)
    assert not clock.idled
    assert clock.time >= timing.HEAT_SECONDS * 0.8 + timing.SUSTAINED_SECONDS * 0.8
    assert timings["a"].samples > 100


def test_the_first_part_of_a_sustained_block_does_not_count(clock: FakeClock, harness: Harness) -> None:
    """A contender whose first tenth of every block runs slow, as a clock that has yet to settle."""
    last, since = "", 0

    def make(name: str) -> Contender:
        def run() -> None:
            nonlocal last, since
            since = since + 1 if last == name else 0
            last = name
            clock.work(name, 3e-3 if since < 20 else 1e-3)

        return Contender(run=run, outputs=tuple)

    timings = harness.measure("sustained", {name: make(name) for name in "ab"}, 4.0)
    assert timings["a"].p90 == pytest.approx(1e-3)


def test_the_stretch_that_heats_the_card_does_not_count(clock: FakeClock, harness: Harness) -> None:
    """A card that is slower until it has reached its power cap."""

    def make(name: str) -> Contender:
        return Contender(
            run=lambda: clock.work(name, 9e-3 if clock.time < timing.HEAT_SECONDS / 2 else 3e-3), outputs=tuple
        )

    timings = harness.measure("sustained", {name: make(name) for name in "ab"}, 1.0)
    assert [timings[name].p90 for name in "ab"] == pytest.approx([3e-3, 3e-3])


def test_a_budget_is_kept(clock: FakeClock, harness: Harness, timed: Timed) -> None:
    contenders = {name: timed(name, 1e-3) for name in "abcde"}
    for regime, seconds, slack in (("burst", 4.0, 1.2), ("sustained", 6.0, 1.5), ("steady", 1.0, 1.2)):
        before = clock.time
        harness.measure(regime, contenders, seconds)  # type: ignore[arg-type]
        assert clock.time - before <= slack * seconds


def test_steady_samples_keep_marks_apart(clock: FakeClock, harness: Harness, timed: Timed) -> None:
    harness.measure("steady", {"a": timed("a", 1e-5)}, 0.2)
    first = clock.log.index("|", 4)
    second = clock.log.index("|", first + 1)
    assert (second - first - 1) * 1e-5 >= timing.MARK_SPACING
