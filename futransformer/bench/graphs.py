"""CUDA graphs of many calls: what removes the host from the time of a microsecond kernel, for ours and rivals alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import cycle

import torch

from futransformer.bench.case import Contender
from futransformer.graphs import capture

GRAPH_SECONDS = 2e-3  # length of one replay: its own launch, some 10 us, is then half a per cent
MAX_CALLS = 256


def captured(
    calls: Sequence[Callable[[], object]],
    floor_seconds: float,
    context: AbstractContextManager[object] = nullcontext(),  # noqa: B008 - it has no state
) -> tuple[Callable[[], None], int]:
    """Capture every call in turn, several times over; return what replays the graph, and the calls in it.

    ``context`` is open meanwhile: a chain of launches that overlap. Each call runs twice before, so that whatever it
    compiles, allocates or looks up is done outside the graph.
    """
    repeats = max(1, min(MAX_CALLS, round(GRAPH_SECONDS / floor_seconds)) // len(calls))
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            for call in calls:
                call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with capture(graph), context:
        for _ in range(repeats):
            for call in calls:
                call()

    def replay(held: object = calls) -> None:
        """Hold what the calls do: the graph reads it."""
        graph.replay()

    return replay, repeats * len(calls)


def graphed(
    calls: Sequence[Callable[[], object]],
    outputs: Callable[[], Sequence[torch.Tensor]],
    floor_seconds: float,
    context: AbstractContextManager[object] = nullcontext(),  # noqa: B008
) -> Contender:
    """Return a contender whose run replays a graph of the calls; see ``captured``."""
    run, count = captured(calls, floor_seconds, context)
    return Contender(run=run, outputs=outputs, calls=count)


def rotating(calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
    """Return what makes the next of the calls each time: launches from the host, as a prefill makes them."""
    turns = cycle(calls)

    def run() -> object:
        call = next(turns)
        return call()

    return run
