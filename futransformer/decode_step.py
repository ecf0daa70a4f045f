"""The decode step of one batch: its state on the device, and the CUDA graphs that replay it.

The state of B sequences with room for W pages each stands at fixed addresses, so that one graph serves every step:

| tensor | type | shape | |
| --- | --- | --- | --- |
| tokens | int32 | [B] | what the next step reads; a step leaves its greedy choice here |
| lengths | int32 | [B] | tokens in the cache; a step adds one; -1: no sequence, the row is there to fill the shape |
| block_table | int32 | [B, W] | as in docs/architecture.md; -1 where there is no sequence |

A row of no sequence writes no K and V, for its slot is negative, and attends nothing, for its length becomes zero.

A graph is captured when a step of the same shape runs for the second time: the first allocates the workspaces. Eager
steps and replays launch the same kernels with the same arguments, so they give the same bits. Shapes are few: the
pages that attention is launched for come in ``page_bucket`` steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from futransformer.blocks import DecodePass
from futransformer.generator.specs import PAGE_SIZE
from futransformer.graphs import capture
from futransformer.kv_cache import CachedSequence, KVCache, page_bucket, pages_for, token_slots, upload
from futransformer.ops.interface import Ops

# Tokens and rows, and whether logits are asked for, float32 [B, vocab_size]. The next tokens take the tokens' place.
Forward = Callable[[Tensor, DecodePass, bool], Tensor | None]


class DecodeStep:
    """The step of a batch of ``batch`` sequences of at most ``width`` pages."""

    def __init__(self, ops: Ops, forward: Forward, batch: int, width: int) -> None:
        """``forward`` runs the model on one token a sequence, and leaves the likeliest next ones in their place."""
        self.ops = ops
        self.forward = forward
        self.rows = torch.arange(batch, device=ops.device)
        self.tokens = torch.zeros(batch, dtype=torch.int32, device=ops.device)
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=ops.device)
        self.block_table = torch.zeros(batch, width, dtype=torch.int32, device=ops.device)
        # by pages, and whether it gives logits; None: has run eagerly
        self._graphs: dict[tuple[int, bool], tuple[torch.cuda.CUDAGraph, Tensor | None] | None] = {}

    def load(self, sequences: Sequence[CachedSequence], cache: KVCache) -> None:
        """Put the sequences' lengths and pages on the device."""
        self.lengths.copy_(upload([sequence.length for sequence in sequences], torch.int32, cache.device))
        self.block_table.copy_(cache.block_table(sequences, self.block_table.shape[1]))

    def run(self, longest: int, *, logits: bool) -> Tensor | None:
        """One step; ``logits`` [B, vocab_size] if asked for, valid until the next. ``longest`` is the longest length
        after the step.
        """
        kind = min(page_bucket(pages_for(longest)), self.block_table.shape[1]), logits
        if not self.ops.capturable or kind not in self._graphs:
            self._graphs.setdefault(kind, None)
            return self._run(*kind)
        captured = self._graphs[kind]
        if captured is None:
            captured = self._graphs[kind] = self._capture(*kind)
        graph, found = captured
        graph.replay()
        return found

    def _capture(self, pages: int, logits: bool) -> tuple[torch.cuda.CUDAGraph, Tensor | None]:
        graph = torch.cuda.CUDAGraph()
        with capture(graph):
            found = self._run(pages, logits)
        return graph, found

    def _run(self, pages: int, logits: bool) -> Tensor | None:
        positions = self.lengths.clamp(min=0)
        slots = token_slots(self.block_table, self.rows, positions)
        self.lengths += 1
        rows = DecodePass(positions, slots, self.block_table, self.lengths, pages * PAGE_SIZE)
        with self.ops.chain():
            return self.forward(self.tokens, rows, logits)
