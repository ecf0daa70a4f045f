"""The decode step of one batch: its state on the device, and the CUDA graphs that replay it.

The state of B sequences with room for W pages each stands at fixed addresses, so that one graph serves every step:

| tensor | type | shape | |
| --- | --- | --- | --- |
| tokens | int32 | [B] | what the next step reads; a step leaves its choice here |
| lengths | int32 | [B] | tokens in the cache; a step adds one. -1: no sequence; the row writes and attends nothing |
| block_table | int32 | [B, W] | as in docs/architecture.md; -1 where there is no sequence |

A step either gives logits to its caller, or chooses greedily, or is one of a *generation*: then it chooses as
``sampling`` says, and the rows whose text ends lose their sequence, on the device (``stops``, see Ops.end_step).

A graph is captured when a step of the same shape and kind runs for the second time: the first allocates the
workspaces. All graphs share one pool of memory: logits are valid until the next step or pass. Eager steps and replays
launch the same kernels with the same arguments, so they give the same bits. Shapes are few: the pages that attention is
launched for come in ``page_bucket`` steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from futransformer.blocks import DecodePass
from futransformer.generator.specs import PAGE_SIZE
from futransformer.graphs import Captured, GraphPool
from futransformer.kv_cache import CachedSequence, KVCache, page_bucket, pages_for, upload
from futransformer.ops.interface import Ops, StepRows, Stops
from futransformer.sampling import Sampling, SamplingRows

LOG_STEPS = 8  # of a generation, that the device notes for the host

# Tokens and rows, and whether logits are asked for, float32 [B, vocab_size]. The next tokens take the tokens' place:
# the likeliest, or what the settings say.
Forward = Callable[[Tensor, DecodePass, bool, SamplingRows | None], Tensor | None]
Kind = Literal["greedy", "logits", "generation", "sampled generation"]


class DecodeStep:
    """The step of a batch of ``batch`` sequences of at most ``width`` pages."""

    def __init__(
        self, ops: Ops, forward: Forward, batch: int, width: int, vocab_size: int, pool: GraphPool | None = None
    ) -> None:
        """``forward`` runs the model on one token a sequence, and leaves the next ones in their place."""

        def rows(dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(batch, dtype=dtype, device=ops.device)

        self.ops = ops
        self.forward = forward
        self.pool = GraphPool() if pool is None else pool
        self.tokens = rows()
        self.lengths = rows()
        self.block_table = torch.zeros(batch, width, dtype=torch.int32, device=ops.device)
        self.rows = StepRows(self.lengths, self.block_table, rows(), rows(torch.int64), rows())
        words = -(-vocab_size // 32)
        self.stops = Stops(
            left=rows(),
            ends=torch.zeros(words, dtype=torch.int32, device=ops.device),
            log=torch.zeros(LOG_STEPS, batch, dtype=torch.int32, device=ops.device),
            steps=torch.zeros(1, dtype=torch.int32, device=ops.device),
        )
        self.sampling: SamplingRows | None = None  # of this generation
        self._sampling: SamplingRows | None = None  # of any: its tensors stay where graphs read them
        # by pages and kind; None: has run eagerly
        self._graphs: dict[tuple[int, Kind], Captured | None] = {}

    def load(self, sequences: Sequence[CachedSequence], cache: KVCache) -> None:
        """Put the sequences' lengths and pages on the device."""
        self.lengths.copy_(upload([sequence.length for sequence in sequences], torch.int32, cache.device))
        self.block_table.copy_(cache.block_table(sequences, self.block_table.shape[1]))

    def begin_generation(
        self, left: Sequence[int], ends: Tensor, settings: Sequence[Sampling] | None, seen: Tensor | None
    ) -> None:
        """Each row may be given ``left`` tokens, and ends at any of ``ends`` (``pack_seen``).

        Its tokens are chosen as ``settings`` say, of which ``seen`` has those to penalise; None: greedily.
        """
        device = self.lengths.device
        self.stops.left.copy_(upload(left, torch.int32, device))
        self.stops.ends.copy_(ends)
        self.stops.steps.zero_()
        self.sampling = None
        if settings is None:
            return
        assert seen is not None
        # once a step has begun, lengths are the new tokens' places
        asked = SamplingRows.of(settings, self.lengths, seen)
        if self._sampling is None:
            self._sampling = replace(asked, seen=seen.to(device, copy=True))
        else:
            for field in fields(SamplingRows):
                getattr(self._sampling, field.name).copy_(getattr(asked, field.name))
        self.sampling = self._sampling

    def run(self, longest: int, *, logits: bool) -> Tensor | None:
        """One step; ``logits`` [B, vocab_size] if asked for, valid until the next step or pass. ``longest`` is the
        longest length after the step.
        """
        return self._launch(longest, "logits" if logits else "greedy")

    def warm_up(self, *, logits: bool) -> None:
        """Capture the step of all ``width`` pages, on no sequence: nothing is written or attended."""
        self.tokens.zero_()
        self.lengths.fill_(-1)
        self.block_table.fill_(-1)
        for _ in range(2):
            self.run(self.block_table.shape[1] * PAGE_SIZE, logits=logits)

    def run_generation(self, longest: int, count: int = 1) -> None:
        """So many steps of a generation, of which the host need know nothing; ``longest`` is after the first."""
        kind: Kind = "generation" if self.sampling is None else "sampled generation"
        end = longest + count
        while longest < end:
            pages = self._pages(longest)
            captured = self._graphs.get((pages, kind)) if self.ops.capturable else None
            if captured is None:
                self._launch(longest, kind)
                longest += 1
                continue
            replay = captured[0].replay
            alike = end - longest
            if pages < self.block_table.shape[1]:
                alike = min(alike, pages * PAGE_SIZE - longest + 1)
            for _ in range(alike):
                replay()
            longest += alike

    def end(self) -> None:
        """Take the tokens that were chosen: note them, and let the rows go whose text ends with them."""
        self.ops.end_step(self.tokens, self.lengths, self.stops)

    def _launch(self, longest: int, kind: Kind) -> Tensor | None:
        pages = self._pages(longest)
        if not self.ops.capturable or (pages, kind) not in self._graphs:
            self._graphs.setdefault((pages, kind), None)
            return self._run(pages, kind)
        captured = self._graphs[pages, kind]
        if captured is None:
            captured = self._graphs[pages, kind] = self._capture(pages, kind)
            if captured is None:
                return self._run(pages, kind)
        graph, found = captured
        graph.replay()
        return found

    def _pages(self, longest: int) -> int:
        """Pages a sequence that attention is launched for."""
        return min(page_bucket(pages_for(longest)), self.block_table.shape[1])

    def _capture(self, pages: int, kind: Kind) -> Captured | None:
        return self.pool.record(partial(self._run, pages, kind))

    def _run(self, pages: int, kind: Kind) -> Tensor | None:
        self.ops.begin_step(self.rows)
        _, table, positions, slots, seqlens_k = self.rows
        rows = DecodePass(positions, slots, table, seqlens_k, pages * PAGE_SIZE)
        with self.ops.chain():
            sampling = self.sampling if kind == "sampled generation" else None
            found = self.forward(self.tokens, rows, kind == "logits", sampling)
            if kind in ("generation", "sampled generation"):
                self.end()
            return found
