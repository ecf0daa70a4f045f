"""Who runs: what each step decodes and reads, who gets pages, and who gives them back. No tensors here.

A step decodes one token of every sequence that has been read, and reads at most ``max_num_batched_tokens`` rows of the
others. In this order:

1. *decode*, oldest first: a sequence at the end of its last page takes another. If none is free the newest sequence
   is evicted, itself if it is the newest.
2. *read on*: chunks of sequences that have their pages and are not read to the end, oldest first.
3. *admit*, oldest first and nobody past another: pages for all known tokens, those of complete pages that can be found
   already read, and a chunk. Who begins like somebody who is being read waits for those pages. Somebody is admitted
   only if a page stays free for each that runs already, so that whoever comes is not evicted at once.

An evicted sequence keeps its tokens, waits in its place by arrival, and is read again. The oldest one is never evicted
for another, so something always ends.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from typing import NamedTuple

from futransformer.engine.pages import PagePool
from futransformer.engine.sequence import EngineSequence
from futransformer.generator.specs import PAGE_SIZE
from futransformer.kv_cache import pages_for


class Chunk(NamedTuple):
    """Tokens start .. stop - 1 of a sequence, to be read in one pass."""

    sequence: EngineSequence
    start: int
    stop: int


@dataclass(slots=True)
class Schedule:
    """What one step launches."""

    decode: list[EngineSequence] = field(default_factory=list)
    read: list[Chunk] = field(default_factory=list)
    admitted: list[EngineSequence] = field(default_factory=list)  # with their first pages; all of them are read
    grown: list[EngineSequence] = field(default_factory=list)  # by one page; all of them are decoded


class Scheduler:
    """The waiting and the running sequences, and the pages of the latter."""

    def __init__(self, pool: PagePool, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        """Begin with nobody. Running sequences have a slot each, 0 .. max_num_seqs - 1."""
        self.pool = pool
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: list[EngineSequence] = []  # both lists by arrival
        self.running: list[EngineSequence] = []
        self.evictions = 0
        self.hit_tokens = 0
        self._slots = list(range(max_num_seqs))[::-1]

    def add(self, sequence: EngineSequence) -> None:
        """Let a sequence wait in its place."""
        insort(self.waiting, sequence, key=_order)

    def remove(self, sequence: EngineSequence) -> None:
        """Forget a sequence, wherever it is; its pages are free for others."""
        if sequence.slot < 0:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
            self._give_back(sequence)

    def share(self, sequence: EngineSequence) -> None:
        """Let the pages that are complete be found: of tokens that are known, and launched."""
        complete = min(sequence.cached.length, len(sequence.tokens)) // PAGE_SIZE
        if complete > sequence.shared and self.pool.keeps:
            keys = sequence.page_keys(complete)
            for index in range(sequence.shared, complete):
                self.pool.share(sequence.cached.pages[index], keys[index])
            sequence.shared = complete

    def schedule(self) -> Schedule:
        """Decide a step. Sequences that are to be read have a slot and pages; whoever launches counts their tokens."""
        found = Schedule()
        self._decode(found)
        budget = self.max_num_batched_tokens
        for sequence in self.running:
            if budget and sequence.prefilling:
                budget -= self._read(found, sequence, budget)
        while budget and self.waiting and self._admit(self.waiting[0]):
            sequence = self.waiting.pop(0)
            found.admitted.append(sequence)
            insort(self.running, sequence, key=_order)
            budget -= self._read(found, sequence, budget)
        return found

    def _decode(self, found: Schedule) -> None:
        for sequence in list(self.running):
            cached = sequence.cached
            if cached.length < sequence.target or len(sequence.tokens) + sequence.in_flight >= sequence.most:
                continue  # is being read, or its last token is on its way
            if sequence.slot < 0:
                continue  # was evicted for an older one
            if cached.length == len(cached.pages) * PAGE_SIZE:
                page = self.pool.take(1)
                while page is None:
                    victim = self.running[-1]
                    self._evict(victim)
                    if victim is sequence:
                        break
                    page = self.pool.take(1)
                if page is None:
                    continue
                cached.pages += page
                found.grown.append(sequence)
            found.decode.append(sequence)

    def _read(self, found: Schedule, sequence: EngineSequence, budget: int) -> int:
        start = sequence.cached.length
        stop = min(sequence.target, start + budget)
        found.read.append(Chunk(sequence, start, stop))
        return stop - start

    def _admit(self, sequence: EngineSequence) -> bool:
        """Give a waiting sequence its slot and pages, if there are any."""
        if not self._slots or sequence.in_flight:
            return False
        target = len(sequence.tokens)
        prefix = []
        if self.pool.keeps:
            keys = sequence.page_keys((target - 1) // PAGE_SIZE)  # at least one row is read, for its logits
            prefix = self.pool.find(keys)
            if len(prefix) < len(keys) and self._is_coming(len(prefix), keys[len(prefix)]):
                return False
        new = pages_for(target) - len(prefix)
        if new + self.pool.unheld(prefix) + len(self.running) > self.pool.free_pages:
            return False
        self.pool.hold(prefix)
        taken = self.pool.take(new)
        assert taken is not None
        sequence.cached.pages = prefix + taken
        sequence.cached.length = len(prefix) * PAGE_SIZE
        sequence.shared = len(prefix)
        sequence.target = target
        sequence.slot = self._slots.pop()
        self.hit_tokens += sequence.cached.length
        return True

    def _is_coming(self, index: int, key: bytes) -> bool:
        """Whether somebody is reading this very page. To wait costs nothing: older ones are read first anyway."""
        return any(
            other.shared <= index < len(other.keys) and other.keys[index] == key and other.slot >= 0
            for other in self.running
        )

    def _evict(self, sequence: EngineSequence) -> None:
        self.running.remove(sequence)
        self._give_back(sequence)
        self.add(sequence)
        self.evictions += 1
        sequence.request.metrics.evictions += 1

    def _give_back(self, sequence: EngineSequence) -> None:
        self.pool.release(sequence.cached.pages)
        sequence.cached.pages, sequence.cached.length = [], 0
        sequence.target = sequence.shared = 0
        self._slots.append(sequence.slot)
        sequence.slot = -1


def _order(sequence: EngineSequence) -> tuple[int, int]:
    return sequence.order
