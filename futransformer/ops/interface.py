"""The operations of a Llama step, as the generated kernels and the reference both offer them.

``model.py`` is written against this protocol alone. docs/architecture.md gives the layout of every tensor.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

Phase = Literal["prefill", "decode"]
Projection = Literal["qkv", "o", "gate_up", "down", "lm_head"]
PROJECTIONS: tuple[Projection, ...] = ("qkv", "o", "gate_up", "down", "lm_head")


class Stream(NamedTuple):
    """The residual stream of T rows, as one operation hands it to the next."""

    x: Tensor  # [T, H] in the storage type: what GEMMs read
    sumsq: Tensor  # float32 [T, parts]: partial sums of squares of each row
    residual: Tensor  # what o and down add to: x itself in prefill, float32 [T, H] in decode


class Ops(Protocol):
    """One model shape and precision on one device. ``out`` arguments are written and returned; None allocates."""

    device: torch.device
    capturable: bool  # whether decode operations may be captured in a CUDA graph

    def describe(self) -> str:
        """Say in one line what computes: the card and its kernels, or the CPU reference."""
        ...

    def chain(self) -> AbstractContextManager[None]:
        """A context whose operations may overlap. Inside it only activations and its own tokens' slots are written:
        weights, tables, lengths and keys of earlier tokens are read ahead of their turn. Chains do not nest.
        """
        ...

    def pack(self, op: Projection, phase: Phase, logical: Tensor) -> Tensor:
        """Turn a logical weight [N, K] into what this backend's GEMM reads."""
        ...

    def gather_rows(self, phase: Phase, table: Tensor, indices: Tensor) -> Stream:
        """Return a stream that begins with rows ``indices`` [T] of ``table`` [R, H]; sumsq is [T, 1]."""
        ...

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
    ) -> Tensor:
        """Project, rotate, write K and V to their slots; return q [T, num_attention_heads * head_dim]."""
        ...

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
    ) -> Tensor:
        """Causal attention of each sequence's queries (its last rows) over its pages; [T, heads * head_dim]."""
        ...

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
    ) -> Tensor:
        """Attention of one query a sequence over its pages; a sequence of length 0 gives zeros."""
        ...

    def o(self, phase: Phase, x: Tensor, weight: Tensor, residual: Tensor) -> Stream:
        """Add x W^T to ``residual`` in place: BF16 in prefill, float32 in decode; return the stream."""
        ...

    def gate_up(self, phase: Phase, x: Tensor, sumsq: Tensor, weight: Tensor) -> Tensor:
        """Return h = silu(gate) * up [T, intermediate_size]."""
        ...

    def down(self, phase: Phase, x: Tensor, weight: Tensor, residual: Tensor) -> Stream:
        """Add x W^T to ``residual`` in place: BF16 in prefill, float32 in decode; return the stream."""
        ...

    def lm_head(self, phase: Phase, x: Tensor, sumsq: Tensor, weight: Tensor) -> Tensor:
        """Return float32 logits [T, vocab_size]; a view of a padded row when the vocabulary is not a multiple of 64."""
        ...

    def argmax(self, logits: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return the index of each row's largest logit, the lowest among equals; int32 [T]."""
        ...
