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
    """Scales of an FP8 prefill: of the sums of the four projections, and of the FP8 results.

    A part in BF16 (futransformer.layer_parts) has none. Where one in FP8 follows it, x in FP8 is gathered from the
    residual: ``begin`` for qkv, and ``middle``, which o would have written, for gate_up.
    """

    qkv: Tensor | None = None
    o: Tensor | None = None
    gate_up: Tensor | None = None
    down: Tensor | None = None
    attended: Fp8Output | None = None  # read by o
    middle: Fp8Output | None = None  # x after o, read by gate_up
    h: Fp8Output | None = None  # read by down
    end: Fp8Output | None = None  # x after down, read by the next layer's qkv
    begin: Fp8Output | None = None  # x before qkv, if the layer before ends in BF16
    order: Tensor | None = None  # int32, 0 1 2 ... for as many rows as a pass may have: what gathers all rows


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

    def attention(
        self,
        ops: Ops,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        fp8: Fp8Output | None = None,
        kv_scale: Tensor | None = None,
        kv_copy: Tensor | None = None,
    ) -> Tensor:
        """Attend q over one layer's pages; in decode over their INT4 copy, if there is one."""
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

    def attention(
        self,
        ops: Ops,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        fp8: Fp8Output | None = None,
        kv_scale: Tensor | None = None,
        kv_copy: Tensor | None = None,
    ) -> Tensor:
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
            kv_scale=kv_scale,
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

    def attention(
        self,
        ops: Ops,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        fp8: Fp8Output | None = None,
        kv_scale: Tensor | None = None,
        kv_copy: Tensor | None = None,
    ) -> Tensor:
        """See Pass.attention."""
        return ops.attention_decode(
            q,
            k_pages,
            v_pages,
            self.block_table,
            self.seqlens_k,
            max_seqlen_k=self.max_seqlen_k,
            kv_scale=kv_scale,
            kv_copy=kv_copy,
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
    kv_scale: Tensor | None = None,
    gains: BlockGains = UNGAINED,
    kv_copy: Tensor | None = None,
) -> Stream:
    """x + attention(norm(x)), then x + mlp(norm(x)); the stream's residual is overwritten.

    ``scales`` are for a phase whose GEMMs read FP8, ``kv_scale`` for pages of E4M3, ``gains`` for a phase whose weights
    keep a checkpoint's codes, ``kv_copy`` for a cache with an INT4 copy.
    """
    phase, s = rows.phase, scales
    q = ops.qkv(
        phase,
        _operand(ops, phase, stream, s.qkv, s.begin, s.order),
        stream.sumsq,
        weights.qkv[phase],
        rope_table,
        rows.positions,
        rows.slots,
        k_pages,
        v_pages,
        scale=s.qkv,
        kv_scale=kv_scale,
        kv_copy=kv_copy,
    )
    attended = rows.attention(ops, q, k_pages, v_pages, s.attended, kv_scale, kv_copy)
    middle = ops.o(
        phase,
        attended,
        weights.o[phase],
        stream.residual,
        scale=s.o,
        fp8=None if s.o is None else s.middle,
        gain=gains.middle,
    )
    x = _operand(ops, phase, middle, s.gate_up, s.middle if s.o is None else None, s.order)
    h = ops.gate_up(phase, x, middle.sumsq, weights.gate_up[phase], scale=s.gate_up, fp8=s.h)
    return ops.down(phase, h, weights.down[phase], middle.residual, scale=s.down, fp8=s.end, gain=gains.end)


def _operand(
    ops: Ops, phase: Phase, stream: Stream, scale: Tensor | None, gathered: Fp8Output | None, order: Tensor | None
) -> Tensor:
    """x as the next projection reads it, whose sums are worth ``scale``."""
    if phase == "prefill" and scale is None:
        return stream.residual  # x itself, unless what wrote x wrote codes
    if gathered is None:
        return stream.x
    assert order is not None
    return ops.gather_rows(phase, stream.residual, order[: len(stream.residual)], fp8=gathered).x
