"""Capturing a CUDA graph."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import pytest
import torch

from futransformer import graphs
from futransformer.driver import hopper_problem
from futransformer.graphs import GraphPool, capture


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_nothing_is_collected_while_a_graph_is_captured(
    monkeypatch: pytest.MonkeyPatch, enabled: bool, fails: bool
) -> None:
    """And afterwards the collector is what it was, whether the capture fails or not."""
    seen: list[tuple[Any, ...]] = []

    @contextmanager
    def record(graph: Any, **options: Any) -> Iterator[None]:
        seen.append((graph, options, gc.isenabled()))
        yield

    monkeypatch.setattr(torch.cuda, "graph", record)
    graph: Any = object()
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with suppress(RuntimeError), capture(graph, "pool"):
            assert not gc.isenabled()
            if fails:
                raise RuntimeError
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()
    assert seen == [(graph, {"pool": "pool", "capture_error_mode": "thread_local"}, False)]


def test_the_last_of_several_captures_turns_the_collector_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two threads the first to begin is the first to end."""
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: nullcontext())
    graph: Any = object()
    before = gc.isenabled()
    try:
        gc.enable()
        first, second = capture(graph), capture(graph)
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert not gc.isenabled()
        second.__exit__(None, None, None)
        assert gc.isenabled()
    finally:
        (gc.enable if before else gc.disable)()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A device that captures; the pools that graphs were captured into."""
    pools: list[Any] = []

    @contextmanager
    def record(graph: Any, *, pool: Any, capture_error_mode: str) -> Iterator[None]:
        pools.append(pool)
        yield

    monkeypatch.setattr(torch.cuda, "graph", record)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(graphs, "_unheld", lambda tensor: tensor.view(-1))
    return pools


def test_all_graphs_of_a_model_share_their_memory(device: list[Any]) -> None:
    pool = GraphPool()
    logits = torch.ones(2, 3)
    first, second = pool.record(lambda: None), pool.record(lambda: logits)
    assert first is not None
    assert second is not None
    assert first[1] is None
    assert second[1] is not None
    assert second[1].shape == (6,), "logits keep memory from the next capture"
    assert len(set(device)) == 1
    GraphPool().record(lambda: None)
    assert len(set(device)) == 2, "another model's graphs may run at any time"


@pytest.mark.parametrize("ends_badly", [False, True])
def test_without_memory_no_other_graph_is_tried(
    device: list[Any], monkeypatch: pytest.MonkeyPatch, ends_badly: bool
) -> None:
    graph = torch.cuda.graph

    @contextmanager
    def failing(*arguments: Any, **options: Any) -> Iterator[None]:
        with graph(*arguments, **options):
            try:
                yield
            except torch.OutOfMemoryError:
                if ends_badly:
                    raise RuntimeError("a capture that failed cannot be ended")  # noqa: B904 - as CUDA does
                raise

    def run() -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch.cuda, "graph", failing)
    pool = GraphPool()
    assert pool.record(run) is None
    assert pool.full
    assert pool.record(lambda: None) is None
    assert len(device) == 1


def test_another_error_is_not_a_lack_of_memory(device: list[Any]) -> None:
    def run() -> None:
        raise RuntimeError("launch failed")

    pool = GraphPool()
    with pytest.raises(RuntimeError, match="launch failed"):
        pool.record(run)
    assert not pool.full


@pytest.mark.gpu
def test_what_a_graph_writes_is_seen_without_keeping_its_memory() -> None:
    """On the device: replays are read through the view, and the memory is the next capture's."""
    if (problem := hopper_problem()) is not None:
        pytest.skip(problem)
    pool = GraphPool()
    given = torch.arange(1 << 20, dtype=torch.float32, device="cuda").view(1024, 1024)
    captured = []
    for factor in (2, 3):
        run = partial(torch.mul, given, factor)
        run()
        captured.append(pool.record(run))
    (first, doubled), (second, trebled) = (each for each in captured if each is not None)
    assert doubled is not None
    assert trebled is not None
    assert doubled.data_ptr() == trebled.data_ptr()
    for _ in range(2):
        first.replay()
        assert torch.equal(doubled, given * 2)
        second.replay()
        assert torch.equal(trebled, given * 3)
