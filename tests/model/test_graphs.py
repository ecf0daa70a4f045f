"""Capturing a CUDA graph."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import pytest
import torch

from futransformer.graphs import capture


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
