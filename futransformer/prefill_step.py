"""A pass of a prefill: what it reads from the host, in one upload, and the CUDA graphs that replay short ones.

T rows, B sequences with room for W pages each, E rows whose logits are wanted. One int32 buffer holds all of it:

| part | type | shape | rows and sequences beyond those of the pass |
| --- | --- | --- | --- |
| slots | int64 | [T] | -1: writes no K and V |
| tokens | int32 | [T] | -1: a row of NaN, which raises no maximum and counts as nothing |
| positions | int32 | [T] | 0 |
| block_table | int32 | [B, W] | -1, never read |
| cu_seqlens_q | int32 | [B + 1] | the end: no queries |
| seqlens_k | int32 | [B] | 0 |
| ends | int32 | [E] | 0; its logits are cut off |

Five launches a layer take the host longer than a short prompt takes the device (docs/notebook/prefill_chain.md). So a
pass of at most ``CAPTURED_ROWS`` is padded to a shape of few, and captured when that shape comes for the second time.
Padding never takes rows to another kernel (rows of 64, 128 and 256 are among the shapes), and no row depends on
another: eager, padded and replayed passes give the same bits.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from futransformer.blocks import PrefillPass
from futransformer.generator.specs import PAGE_SIZE
from futransformer.graphs import Captured, GraphPool
from futransformer.kv_cache import CachedSequence, page_bucket, pages_for, token_slots

CAPTURED_ROWS = 512  # an 8B layer of more rows keeps the device busy for longer than the host takes to launch it


class PassShape(NamedTuple):
    """The extents of a pass."""

    rows: int
    sequences: int
    width: int
    ends: int

    @property
    def extents(self) -> tuple[int, ...]:
        """Of each part of the buffer, in int32; those of eight bytes first."""
        rows, sequences, width, ends = self
        return 2 * rows, rows, rows, sequences * width, sequences + 1, sequences, ends

    def padded(self) -> PassShape:
        """The shape that stands for this one and others."""
        rows = PAGE_SIZE * page_bucket(pages_for(self.rows))
        return PassShape(rows, page_bucket(self.sequences), page_bucket(self.width), page_bucket(self.ends))


class PassInputs(NamedTuple):
    """The parts of a buffer."""

    slots: Tensor
    tokens: Tensor
    positions: Tensor
    block_table: Tensor
    cu_seqlens_q: Tensor
    seqlens_k: Tensor
    ends: Tensor

    @classmethod
    def of(cls, buffer: Tensor, shape: PassShape) -> PassInputs:
        """Views of a buffer."""
        slots, tokens, positions, table, *rest = torch.split(buffer, list(shape.extents))
        return cls(slots.view(torch.int64), tokens, positions, table.view(shape.sequences, shape.width), *rest)

    def prefill_pass(self, max_seqlen_q: int) -> PrefillPass:
        """Without tokens and ends."""
        return PrefillPass(
            self.positions, self.slots, self.block_table, self.cu_seqlens_q, self.seqlens_k, max_seqlen_q
        )


class HostPass:
    """The rows of one pass, gathered on the host; sequences grow as their rows are added."""

    def __init__(self, width: int = 1) -> None:
        """Begin empty. ``width``: at least so many pages a sequence, for a shape that more passes share."""
        self.width = width
        self.tokens: list[int] = []
        self.starts: list[int] = []  # of each sequence, the position of its first row
        self.offsets = [0]
        self.lengths: list[int] = []
        self.ends: list[int] = []
        self.pages: list[list[int]] = []

    def add(self, sequence: CachedSequence, tokens: Sequence[int], *, ends: bool) -> None:
        """Append tokens to a sequence that has pages for them; ``ends``: their last row's logits are wanted."""
        self.tokens += tokens
        self.starts.append(sequence.length)
        sequence.length += len(tokens)
        self.lengths.append(sequence.length)
        self.offsets.append(len(self.tokens))
        self.pages.append(sequence.pages)
        if ends:
            self.ends.append(self.offsets[-1] - 1)

    @property
    def shape(self) -> PassShape:
        """Its own, without padding."""
        width = max(self.width, *map(len, self.pages))
        return PassShape(len(self.tokens), len(self.lengths), width, len(self.ends))

    @property
    def longest(self) -> int:
        """Most rows of a sequence."""
        return max(stop - start for start, stop in zip(self.offsets[:-1], self.offsets[1:], strict=True))

    def buffer(self, shape: PassShape, *, pinned: bool) -> Tensor:
        """The buffer, padded to ``shape``, on the host."""
        buffer = torch.empty(sum(shape.extents), dtype=torch.int32, pin_memory=pinned)
        parts = PassInputs.of(buffer, shape)
        rows, sequences = len(self.tokens), len(self.lengths)
        offsets = int32(self.offsets)
        counts = offsets.diff()
        owners = torch.arange(sequences).repeat_interleave(counts)
        positions = torch.arange(rows, dtype=torch.int32)
        positions += (int32(self.starts) - offsets[:-1]).repeat_interleave(counts)
        padded = (pages + [-1] * (shape.width - len(pages)) for pages in self.pages)
        table = int32([page for pages in padded for page in pages]).view(sequences, shape.width)
        for part, values, rest in (
            (parts.slots, token_slots(table, owners, positions), -1),
            (parts.tokens, int32(self.tokens), -1),
            (parts.positions, positions, 0),
            (parts.block_table, table, -1),
            (parts.cu_seqlens_q, offsets, rows),
            (parts.seqlens_k, int32(self.lengths), 0),
            (parts.ends, int32(self.ends), 0),
        ):
            part[: len(values)] = values
            part[len(values) :] = rest
        return buffer


def int32(values: list[int]) -> Tensor:
    """Integers on the host; of thousands in a third of the time that torch.tensor takes."""
    return torch.frombuffer(array("i", values), dtype=torch.int32) if values else torch.empty(0, dtype=torch.int32)


Forward = Callable[[PassInputs, PrefillPass], Tensor]  # launches a pass -> float32 logits [E, vocab_size]


class PrefillGraphs:
    """Short passes of one model."""

    def __init__(self, forward: Forward, device: torch.device, pool: GraphPool | None = None) -> None:
        """``forward`` runs the model on one pass; graphs share ``pool``."""
        self.forward = forward
        self.device = device
        self.pool = GraphPool() if pool is None else pool
        self._buffers: dict[PassShape, Tensor] = {}
        self._graphs: dict[PassShape, Captured] = {}

    def run(self, rows: HostPass) -> Tensor:
        """Logits of the rows that end a prompt, [E, vocab_size], valid until the next pass or step."""
        shape = rows.shape.padded()
        host = rows.buffer(shape, pinned=self.device.type == "cuda")
        return self._launch(shape, host)[: len(rows.ends)]

    def warm_up(self, shape: PassShape) -> None:
        """Capture a padded shape: a pass of one sequence, whose rows are no tokens and write nothing."""
        host = torch.zeros(sum(shape.extents), dtype=torch.int32)
        inputs = PassInputs.of(host, shape)
        inputs.slots.fill_(-1)
        inputs.tokens.fill_(-1)
        inputs.cu_seqlens_q[1:] = shape.rows
        inputs.seqlens_k[0] = shape.rows
        for _ in range(2):
            self._launch(shape, host)

    def _launch(self, shape: PassShape, host: Tensor) -> Tensor:
        known = shape in self._buffers
        if not known:
            self._buffers[shape] = torch.empty(sum(shape.extents), dtype=torch.int32, device=self.device)
        self._buffers[shape].copy_(host, non_blocking=True)
        if not known:
            return self._run(shape)  # loads and allocates what a capture must not
        captured = self._graphs.get(shape) or self._capture(shape)
        if captured is None:
            return self._run(shape)
        self._graphs[shape] = captured
        graph, logits = captured
        graph.replay()
        assert logits is not None
        return logits

    def _capture(self, shape: PassShape) -> Captured | None:
        return self.pool.record(partial(self._run, shape))

    def _run(self, shape: PassShape) -> Tensor:
        inputs = PassInputs.of(self._buffers[shape], shape)
        # what only bounds the number of attention's blocks: no row of a batch of this shape is beyond it
        return self.forward(inputs, inputs.prefill_pass(shape.rows))
