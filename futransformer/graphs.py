"""Capturing a CUDA graph of the thread's own launches."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def capture(graph: torch.cuda.CUDAGraph, pool: Any = None) -> Iterator[None]:
    """Record what the block launches, into the memory of ``pool`` (another graph's ``pool()``; None: its own).

    Python's collector waits meanwhile: a dead model's graphs and memory, freed by this thread in the middle, would
    invalidate the capture.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            yield
    finally:
        if collects:
            gc.enable()
