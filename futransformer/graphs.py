"""Capturing CUDA graphs of the thread's own launches, and the memory that all graphs of a model share."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

Captured = tuple[torch.cuda.CUDAGraph, Tensor | None]  # and what it writes


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


class GraphPool:
    """One pool of memory for all graphs of a model.

    They run one at a time, so each may overwrite what another has left: what a graph writes is valid until the next
    replay of any. With pools of their own the graphs of an 8B model's shapes would hold gigabytes, most of it logits.
    """

    def __init__(self) -> None:
        """Begin empty."""
        self.full = False  # there was no memory for another graph: shapes without one stay eager
        self._handle: Any = None

    def record(self, run: Callable[[], Tensor | None]) -> Captured | None:
        """Capture what ``run`` launches; None, and the pool is full, if the device has no memory for it."""
        if self.full:
            return None
        if self._handle is None:
            self._handle = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            with capture(graph, self._handle):
                found = run()
        except RuntimeError as error:  # ending what has failed may fail as well
            if not isinstance(error, torch.OutOfMemoryError) and not isinstance(
                error.__context__, torch.OutOfMemoryError
            ):
                raise
            self.full = True
            return None
        return graph, None if found is None else _unheld(found)


class _Shown:
    """What shows a tensor's memory without keeping it."""

    def __init__(self, tensor: Tensor) -> None:
        self.__cuda_array_interface__ = tensor.__cuda_array_interface__


def _unheld(tensor: Tensor) -> Tensor:
    """A view of a tensor in the pool that lets the next capture have its memory; the pool keeps it mapped."""
    return torch.as_tensor(_Shown(tensor), device=tensor.device)
