"""The Ops protocol over PyTorch's custom operators (torch_ops.py): what a function calls that ``torch.compile`` traces.

    ops = traceable(load_kernels("llama-3.1-8b"))
    block = torch.compile(functools.partial(llama_block, ops), fullgraph=True)

Results are those of the operations, bit for bit. Operators are opaque: a compiler fuses around them, never into them.
``pack``, ``sample``, ``begin_step`` and ``end_step`` are called as they are, outside of what is traced, and so is
``chain``: what a compiler puts between two operations would not wait for the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from futransformer import torch_ops
from futransformer.blocks import LayerWeights
from futransformer.ops.interface import (
    DecodeWeight,
    Fp8Output,
    LayerPages,
    NextTokens,
    Ops,
    Phase,
    Projection,
    StepRows,
    Stops,
    Stream,
)
from futransformer.sampling import SamplingRows

_NO_FP8 = (None, None, None)


def traceable(ops: Ops) -> TraceableOps:
    """The same operations for a function that is compiled; keep what is returned for as long as that is called."""
    return TraceableOps(ops)


class TraceableOps:
    """Implements futransformer.ops.interface.Ops on ``torch.ops.futransformer``."""

    def __init__(self, ops: Ops) -> None:
        """Register ``ops`` under a name of its own."""
        self.ops = ops
        self.name = torch_ops.register(ops)
        self.config, self.device, self.capturable = ops.config, ops.device, ops.capturable

    def describe(self) -> str:
        """See Ops.describe."""
        return self.ops.describe()

    def chain(self) -> AbstractContextManager[None]:
        """See Ops.chain; not traced."""
        return self.ops.chain()

    def pack(self, op: Projection, phase: Phase, logical: DecodeWeight) -> Tensor:
        """See Ops.pack; not traced."""
        return self.ops.pack(op, phase, logical)

    def pack_scale(self, op: Projection, logical: Tensor) -> Tensor:
        """See Ops.pack_scale; not traced."""
        return self.ops.pack_scale(op, logical)

    def bind_layers(self, layers: Sequence[LayerWeights], cache: LayerPages) -> None:
        """See Ops.bind_layers: there is none, for its arguments are no tensors."""

    def sumsq_parts(self, phase: Phase, op: Projection, operand: torch.dtype, rows: int) -> int:
        """See Ops.sumsq_parts."""
        return self.ops.sumsq_parts(phase, op, operand, rows)

    def gather_rows(
        self,
        phase: Phase,
        table: Tensor,
        indices: Tensor,
        *,
        fp8: Fp8Output | None = None,
        gain: Tensor | None = None,
    ) -> Stream:
        """See Ops.gather_rows."""
        x, sumsq, residual = torch_ops.gather_rows(self.name, phase, table, indices, *(fp8 or _NO_FP8), gain)
        return Stream(x, sumsq, x if phase == "prefill" and fp8 is None else residual)

    def qkv(
        self,
        phase: Phase,
        x: Tensor,
        sumsq: Tensor,
        weight: Tensor,
        rope_table: Tensor,
        positions: Tensor,
        slots: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        *,
        scale: Tensor | None = None,
        kv_scale: Tensor | None = None,
        kv_copy: Tensor | None = None,
    ) -> Tensor:
        """See Ops.qkv."""
        state = (rope_table, positions, slots, k_pages, v_pages)
        q: Tensor = torch_ops.qkv(self.name, phase, x, sumsq, weight, *state, scale, kv_scale, kv_copy)
        return q

    def attention_prefill(
        self,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        block_table: Tensor,
        cu_seqlens_q: Tensor,
        seqlens_k: Tensor,
        *,
        max_seqlen_q: int,
        out: Tensor | None = None,
        fp8: Fp8Output | None = None,
        kv_scale: Tensor | None = None,
    ) -> Tensor:
        """See Ops.attention_prefill; ``out`` costs a copy."""
        state = (q, k_pages, v_pages, block_table, cu_seqlens_q, seqlens_k, max_seqlen_q)
        attended: Tensor
        if fp8 is None:
            attended = torch_ops.attention_prefill(self.name, *state, kv_scale)
        else:
            attended = torch_ops.attention_prefill_fp8(self.name, *state, *fp8, kv_scale)
        return attended if out is None else out.copy_(attended)

    def attention_decode(
        self,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        block_table: Tensor,
        seqlens_k: Tensor,
        *,
        max_seqlen_k: int,
        out: Tensor | None = None,
        kv_scale: Tensor | None = None,
        kv_copy: Tensor | None = None,
    ) -> Tensor:
        """See Ops.attention_decode; ``out`` costs a copy."""
        state = (q, k_pages, v_pages, block_table, seqlens_k, max_seqlen_k)
        attended: Tensor = torch_ops.attention_decode(self.name, *state, kv_scale, kv_copy)
        return attended if out is None else out.copy_(attended)

    def o(
        self,
        phase: Phase,
        x: Tensor,
        weight: Tensor,
        residual: Tensor,
        *,
        scale: Tensor | None = None,
        fp8: Fp8Output | None = None,
        gain: Tensor | None = None,
    ) -> Stream:
        """See Ops.o."""
        return self._add("o", phase, x, weight, residual, scale, fp8, gain)

    def gate_up(
        self,
        phase: Phase,
        x: Tensor,
        sumsq: Tensor,
        weight: Tensor,
        *,
        scale: Tensor | None = None,
        fp8: Fp8Output | None = None,
    ) -> Tensor:
        """See Ops.gate_up."""
        h: Tensor
        if fp8 is None:
            h = torch_ops.gate_up(self.name, phase, x, sumsq, weight, scale)
        else:
            h = torch_ops.gate_up_fp8(self.name, phase, x, sumsq, weight, scale, *fp8)
        return h

    def down(
        self,
        phase: Phase,
        x: Tensor,
        weight: Tensor,
        residual: Tensor,
        *,
        scale: Tensor | None = None,
        fp8: Fp8Output | None = None,
        gain: Tensor | None = None,
    ) -> Stream:
        """See Ops.down."""
        return self._add("down", phase, x, weight, residual, scale, fp8, gain)

    def _add(
        self,
        op: Projection,
        phase: Phase,
        x: Tensor,
        weight: Tensor,
        residual: Tensor,
        scale: Tensor | None,
        fp8: Fp8Output | None,
        gain: Tensor | None,
    ) -> Stream:
        """Add in place; x is the residual stream itself where no rows of it come back."""
        written = fp8 or _NO_FP8
        read, sumsq = torch_ops.add_to_residual(self.name, op, phase, x, weight, residual, scale, *written, gain)
        return Stream(residual if len(read) != len(residual) else read, sumsq, residual)

    def lm_head(self, phase: Phase, x: Tensor, sumsq: Tensor, weight: Tensor) -> Tensor:
        """See Ops.lm_head."""
        logits: Tensor = torch_ops.lm_head(self.name, phase, x, sumsq, weight)
        return logits

    def next_tokens(
        self, x: Tensor, sumsq: Tensor, weight: Tensor, *, logits: bool = False, out: Tensor | None = None
    ) -> NextTokens:
        """See Ops.next_tokens; ``out`` costs a copy."""
        tokens, found = torch_ops.next_tokens(self.name, x, sumsq, weight, logits)
        return NextTokens(tokens if out is None else out.copy_(tokens), found if logits else None)

    def argmax(self, logits: Tensor, *, out: Tensor | None = None) -> Tensor:
        """See Ops.argmax; ``out`` costs a copy."""
        tokens: Tensor = torch_ops.argmax(self.name, logits)
        return tokens if out is None else out.copy_(tokens)

    def sample(self, logits: Tensor, rows: SamplingRows, *, out: Tensor | None = None) -> Tensor:
        """See Ops.sample; not traced."""
        return self.ops.sample(logits, rows, out=out)

    def begin_step(self, rows: StepRows) -> None:
        """See Ops.begin_step; not traced."""
        self.ops.begin_step(rows)

    def end_step(self, tokens: Tensor, lengths: Tensor, stops: Stops) -> None:
        """See Ops.end_step; not traced."""
        self.ops.end_step(tokens, lengths, stops)
