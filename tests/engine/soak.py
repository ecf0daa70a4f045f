"""Random traffic over an engine, for as long as one likes: arrivals, lengths, cancellations and evictions.

What must hold is asserted as it runs: every finished text is the text of its request alone; when nothing is left, no
page, slot or request is; and between such moments memory does not grow.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from futransformer import LLM, SamplingParams
from futransformer.engine import Engine

ROUNDS = 9  # each ends with nothing left
HOST_GROWTH = 16 << 20  # bytes that the allocator of the C library may keep more in the last third
DEVICE_GROWTH = 1 << 20  # bytes of tensors: settings of the last batch, nothing else outlives a round
RESERVED_GROWTH = 20 << 20  # bytes: one more segment of the allocator, for pieces that did not fit
SETTLED_SECONDS = 60.0  # before it the host's memory is not flat: libraries load, lists grow


class Kind(NamedTuple):
    """A request whose text is known."""

    prompt: str
    params: SamplingParams
    alone: list[int]


class Memory(NamedTuple):
    """Bytes that the process holds when the engine is empty."""

    host: int
    tensors: int  # on the device
    reserved: int  # by its allocator, from which graphs have theirs

    @classmethod
    def now(cls) -> Memory:
        """Measure."""
        gc.collect()
        host = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
        if not torch.cuda.is_available():
            return cls(host, 0, 0)
        torch.cuda.synchronize()
        return cls(host, torch.cuda.memory_allocated(), torch.cuda.memory_reserved())

    @classmethod
    def most(cls, moments: Sequence[Memory]) -> Memory:
        """The largest of each."""
        return cls(*(max(moment[part] for moment in moments) for part in range(len(cls._fields))))


def kinds_of(llm: LLM, prompts: Sequence[str], params: Sequence[SamplingParams]) -> list[Kind]:
    """Each prompt with its parameters, and its text by itself."""
    found = []
    for prompt, each in zip(prompts, params, strict=True):
        (output,) = llm.generate(prompt, each)
        found.append(Kind(prompt, each, output.outputs[0].token_ids))
    return found


class Soak:
    """The traffic, and what has come of it."""

    def __init__(
        self, engine: Engine, kinds: Sequence[Kind], *, at_once: int, exact_after_eviction: bool, seed: int = 3
    ) -> None:
        """``at_once`` requests are open at most. Without ``exact_after_eviction`` a text may part from itself there:
        kernels read again what they had decoded.
        """
        self.engine, self.kinds, self.at_once, self.exact = engine, kinds, at_once, exact_after_eviction
        self.ended = self.cancelled = self.evicted = 0
        self.memory: list[Memory] = []
        self._draw = random.Random(seed)
        self._count = 0
        self._open: dict[str, tuple[Kind, list[int], list[int]]] = {}  # tokens, and those before the first eviction

    def run(self, seconds: float, seen: Callable[[], bool] = lambda: True) -> None:
        """Rounds of traffic; the memory of the last third is that of the second. Requests arrive for so many seconds,
        and until all has been ``seen`` that must come of them, which on a slow machine takes longer.
        """
        rounds = ROUNDS if seconds >= SETTLED_SECONDS else 3
        for _ in range(rounds):
            self._round(time.monotonic() + seconds / rounds, seen)
            self.memory.append(Memory.now())
        third = rounds // 3
        before, after = (Memory.most(part) for part in (self.memory[third:-third], self.memory[-third:]))
        assert seconds < SETTLED_SECONDS or after.host - before.host <= HOST_GROWTH, self.memory
        assert after.tensors - before.tensors <= DEVICE_GROWTH, self.memory
        assert after.reserved - before.reserved <= RESERVED_GROWTH, self.memory

    def _round(self, end: float, seen: Callable[[], bool]) -> None:
        def goes_on() -> bool:
            return time.monotonic() < end or not seen()

        while goes_on() or self.engine.has_unfinished():
            while len(self._open) < self.at_once and goes_on() and self._draw.random() < 0.7:
                self._arrive()
            self._step()
            if self._open and self._draw.random() < 0.02:
                name = self._draw.choice(list(self._open))
                assert self.engine.abort(name)
                del self._open[name]
                self.cancelled += 1
        self._check_empty()

    def _arrive(self) -> None:
        name, kind = str(self._count), self._draw.choice(self.kinds)
        self.engine.add_request(name, kind.prompt, kind.params)
        self._open[name] = kind, [], []
        self._count += 1

    def _step(self) -> None:
        for delta in self.engine.step():
            assert delta.error is None, delta.error
            kind, tokens, before = self._open[delta.request_id]
            tokens += delta.outputs[0].token_ids
            if self.exact or not delta.metrics.evictions:
                before[:] = tokens
            if delta.finished:
                assert before == kind.alone[: len(before)], f"request {delta.request_id}: {kind.prompt[:40]!r}"
                assert delta.metrics.evictions or len(tokens) == len(kind.alone)
                self.evicted += delta.metrics.evictions > 0
                self.ended += 1
                del self._open[delta.request_id]

    def _check_empty(self) -> None:
        stats, scheduler = self.engine.stats(), self.engine._scheduler
        assert not self._open
        assert (stats.running, stats.waiting, stats.free_pages) == (0, 0, stats.num_pages)
        scheduler.pool.check([])
        assert sorted(scheduler._slots) == list(range(len(scheduler._slots)))
