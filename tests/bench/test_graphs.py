"""Graphs of many calls."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from futransformer.bench import graphs


class Buffer:
    """What a call reads."""


def test_a_graph_holds_what_its_calls_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their memory would otherwise be another's by the time of the replay."""
    for name in ("Stream", "stream", "current_stream", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    monkeypatch.setattr(graphs, "capture", lambda graph: nullcontext())
    buffer = Buffer()
    alive = weakref.ref(buffer)

    def call(held: Any = buffer) -> None:
        assert held is not None

    replay, calls = graphs.captured([call], graphs.GRAPH_SECONDS / 3)
    del buffer, call
    assert calls == 3
    assert alive() is not None
    replay()
    del replay
    assert alive() is None
