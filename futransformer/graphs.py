"""Capturing a CUDA graph of the thread's own launches."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class _Collector:
    """Python's collector, which is of all threads: off from the first of several blocks to the end of the last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks = 0
        self._on = False  # before the first

    @contextmanager
    def off(self) -> Iterator[None]:
        with self._lock:
            if self._blocks == 0:
                self._on = gc.isenabled()
                gc.disable()
            self._blocks += 1
        try:
            yield
        finally:
            with self._lock:
                self._blocks -= 1
                if self._blocks == 0 and self._on:
                    gc.enable()


_collector = _Collector()


@contextmanager
def capture(graph: torch.cuda.CUDAGraph, pool: Any = None) -> Iterator[None]:
    """Record what the block launches, into the memory of ``pool`` (another graph's ``pool()``; None: its own).

    Python's collector waits meanwhile: a dead model's graphs and memory, freed by this thread in the middle, would
    invalidate the capture.
    """
    with _collector.off(), torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        yield
