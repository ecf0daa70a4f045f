"""One Llama block, and what a pass over all blocks needs to know about its rows.

Five operations a layer, in either phase; the two RMSNorms are inside them (gain in the next weight, rstd in the next
epilogue), so the residual stream travels with the sums of squares of its rows. docs/architecture.md has the layouts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor

from futransformer.ops.interface import Fp8Output, Ops, Phase, Stream

Packed = dict[Phase, Tensor]  # one weight, as each phase's kernel reads it


@dataclass(frozen=True)
class LayerWeights:
    """The four projections of one layer."""

    qkv: Packed
    o: Packed
    gate_up: Packed
    down: Packed


@dataclass(frozen=True)
class BlockScales:
    """Scales of an FP8 prefill: of the sums of the four projections, and of the four FP8 results. In BF16, none."""

    qkv: Tensor | None = None
    o: Tensor | None = None
    gate_up: Tensor | None = None
    down: Tensor | None = None
    attended: Fp8Output | None = None  # read by o
    middle: Fp8Output | None = None  # x after o, read by gate_up
    h: Fp8Output | None = None  # read by down
    end: Fp8Output | None = None  # x after down, read by the next layer's qkv


UNSCALED = BlockScales()


@dataclass(frozen=True)
class BlockGains:
    """Gains of the norms behind o and down, float32 [H], where decode's weights cannot hold them; elsewhere none."""

    middle: Tensor | None = None
    end: Tensor | None = None


UNGAINED = BlockGains()


class Pass(Protocol):
    """The rows that go through the blocks together: where they stand, where their K and V go, whom they attend."""

    phase: ClassVar[Phase]

    @property
    def positions(self) -> Tensor:
        """RoPE position of each row, int32 [T]."""
        ...

    @property
    def slots(self) -> Tensor:
        """Cache slot of each row, int64 [T]."""
        ...

    def attention(self, ops: Ops, q: Tensor, k_pages: Tensor, v_pages: Tensor, fp8: Fp8Output | None = None) -> Tensor:
        """Attend q over one layer's pages."""
        ...


@dataclass(frozen=True)
class PrefillPass:
    """Rows of several sequences, concatenated; each attends causally to all of its sequence's tokens up to itself."""

    phase: ClassVar[Phase] = "prefill"

    positions: Tensor
    slots: Tensor
    block_table: Tensor
    cu_seqlens_q: Tensor
    seqlens_k: Tensor
    max_seqlen_q: int

    def attention(self, ops: Ops, q: Tensor, k_pages: Tensor, v_pages: Tensor, fp8: Fp8Output | None = None) -> Tensor:
        """See Pass.attention."""
        return ops.attention_prefill(
            q,
            k_pages,
            v_pages,
            self.block_table,
            self.cu_seqlens_q,
            self.seqlens_k,
            max_seqlen_q=self.max_seqlen_q,
            fp8=fp8,
        )


@dataclass(frozen=True)
class DecodePass:
    """One row a sequence: its newest token."""

    phase: ClassVar[Phase] = "decode"

    positions: Tensor
    slots: Tensor
    block_table: Tensor
    seqlens_k: Tensor
    max_seqlen_k: int

    def attention(self, ops: Ops, q: Tensor, k_pages: Tensor, v_pages: Tensor, fp8: Fp8Output | None = None) -> Tensor:
        """See Pass.attention."""
        return ops.attention_decode(
            q, k_pages, v_pages, self.block_table, self.seqlens_k, max_seqlen_k=self.max_seqlen_k
        )


def llama_block(
    ops: Ops,
    weights: LayerWeights,
    stream: Stream,
    rows: Pass,
    rope_table: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    scales: BlockScales = UNSCALED,
    gains: BlockGains = UNGAINED,
) -> Stream:
    """x + attention(norm(x)), then x + mlp(norm(x)); the stream's residual is overwritten.

    ``scales`` are for a phase whose GEMMs read FP8, ``gains`` for one whose weights keep a checkpoint's codes.
    """
    phase, s = rows.phase, scales
    x, sumsq, residual = stream
    q = ops.qkv(
        phase,
        x,
        sumsq,
        weights.qkv[phase],
        rope_table,
        rows.positions,
        rows.slots,
        k_pages,
        v_pages,
        scale=s.qkv,
    )
    attended = rows.attention(ops, q, k_pages, v_pages, s.attended)
    x, sumsq, residual = ops.o(phase, attended, weights.o[phase], residual, scale=s.o, fp8=s.middle, gain=gains.middle)
    h = ops.gate_up(phase, x, sumsq, weights.gate_up[phase], scale=s.gate_up, fp8=s.h)
    return ops.down(phase, h, weights.down[phase], residual, scale=s.down, fp8=s.end, gain=gains.end)
