"""The operations of a Llama step, as the generated kernels and the reference both offer them.

``model.py`` is written against this protocol alone. docs/architecture.md gives the layout of every tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from futransformer.generator.config import LlamaConfig
from futransformer.quantize.fp8 import Fp8Weight
from futransformer.quantize.int4 import Int4Weight
from futransformer.sampling import SamplingRows

if TYPE_CHECKING:
    from futransformer.blocks import DecodePass, LayerWeights

Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, ...] = ("prefill", "decode")
Projection = Literal["qkv", "o", "gate_up", "down", "lm_head"]
PROJECTIONS: tuple[Projection, ...] = ("qkv", "o", "gate_up", "down", "lm_head")
DecodeWeight = Tensor | Fp8Weight | Int4Weight  # a logical weight in any of the types that decode reads


class Stream(NamedTuple):
    """The residual stream of T rows, as one operation hands it to the next."""

    x: Tensor  # [T, H] in the type that the phase's GEMMs read
    sumsq: Tensor  # float32 [T, parts]: partial sums of squares of each row
    residual: Tensor  # [T, H], what o and down add to: BF16 in prefill (x itself, unless x is FP8), float32 in decode


class Fp8Output(NamedTuple):
    """How an operation writes an FP8 result, and what it leaves behind; each is one element on the device.

    A value v becomes the code v / scale, rounded to nearest even, saturated at 448.
    """

    scale: Tensor  # float32 [1]: what a code of 1 is worth
    amax: Tensor  # float32 [1]: raised to the largest magnitude of a value
    saturated: Tensor  # int32 [1]: raised by the number of values beyond 448 scales


class NextTokens(NamedTuple):
    """The likeliest next token of T sequences, and the logits by which they were chosen, if these were asked for."""

    tokens: Tensor  # int32 [T]
    logits: Tensor | None  # as Ops.lm_head gives them


class StepRows(NamedTuple):
    """Where the tokens of a decode step of B rows stand."""

    lengths: Tensor  # int32 [B]: tokens in the cache; -1: the row has no sequence, or none any more
    block_table: Tensor  # int32 [B, W]
    positions: Tensor  # int32 [B]
    slots: Tensor  # int64 [B]
    seqlens_k: Tensor  # int32 [B]: lengths as attention reads them, 0 of no sequence


class Stops(NamedTuple):
    """When the texts of B rows end, and what they were given."""

    left: Tensor  # int32 [B]: tokens that a row may still be given
    ends: Tensor  # int32 [ceil(vocab_size / 32)]: a bit for every token that ends a text (sampling.pack_seen)
    log: Tensor  # int32 [L, B]: the tokens of step s in row s % L, -1 of no sequence
    steps: Tensor  # int32 [1]: steps so far


class LayerPages(Protocol):
    """The pages of every layer: a KVCache, or as much of one."""

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """K and V pages of one layer."""
        ...

    def copy_layer(self, index: int) -> Tensor | None:
        """Their INT4 copy, if there is one."""
        ...


class WalkLayers(Protocol):
    """All layers of a decode step in one operation."""

    def serves(self, rows: int, most_keys: int) -> bool:
        """Whether it takes so many sequences, of at most so many tokens each, and is the faster way."""
        ...

    def __call__(self, stream: Stream, rows: DecodePass, rope_table: Tensor) -> Stream:
        """As llama_block after llama_block; x and residual are overwritten."""
        ...


class Ops(Protocol):
    """One model shape and precision on one device. ``out`` arguments are written and returned; None allocates.

    Where a phase's GEMMs read FP8, ``scale`` is what their sums are multiplied by, the scale of x times that of the
    weight: float32 [1], or [N] where every row of the weight has its own; and ``fp8``
    says how the result that the next GEMM reads is written. In BF16 both are None.

    Where pages hold E4M3 codes, ``kv_scale`` float32 [2] is what a code of K and a code of V is worth, else None: qkv
    writes K / kv_scale[0] and V / kv_scale[1], rounded to nearest even, saturated at 448.

    Where the cache has an INT4 copy (Precision.copy), ``kv_copy`` is that of the layer, uint8 [num_pages,
    num_key_value_heads, page bytes], else None. qkv writes K and V to it as well, in either phase, and attention_decode
    reads it alone: q of decode's qkv is what it needs, with features in natural order, rotated as the copy's K.

    Where decode's weights keep the codes of a checkpoint (Precision.gain_in_x), ``gain`` is float32 [H], that of the
    norm before whatever reads the stream next: x is the residual times it, rounded. Elsewhere it is None, and the gain
    lies in the next weight.
    """

    config: LlamaConfig
    device: torch.device
    capturable: bool  # whether operations may be captured in a CUDA graph

    def describe(self) -> str:
        """Say in one line what computes: the card and its kernels, or the CPU reference."""
        ...

    def chain(self) -> AbstractContextManager[None]:
        """A context whose operations may overlap. Inside it only activations and its own tokens' slots are written:
        weights, tables, lengths and keys of earlier tokens are read ahead of their turn. ``sample`` and ``end_step``,
        which write more, come last. Chains do not nest.
        """
        ...

    def pack(self, op: Projection, phase: Phase, logical: DecodeWeight) -> Tensor:
        """Turn a logical weight [N, K] into what this backend's GEMM reads: BF16; where prefill reads FP8, E4M3 codes;
        where decode reads FP8 or INT4, an Fp8Weight or an Int4Weight, whose scales are inside what comes out.
        """
        ...

    def pack_scale(self, op: Projection, logical: Tensor) -> Tensor:
        """Turn the scales of an FP8 weight, [1] or [N] for its logical rows, into what this backend's GEMM reads."""
        ...

    def bind_layers(self, layers: Sequence[LayerWeights], cache: LayerPages) -> WalkLayers | None:
        """Decode's layers with their weights and pages, which must stay where they are, as one operation; None where
        there is none, or none that is faster.
        """
        ...

    def sumsq_parts(self, phase: Phase, op: Projection, operand: torch.dtype, rows: int) -> int:
        """Columns of the sumsq that o or down gives for this many rows of this type."""
        ...

    def gather_rows(
        self,
        phase: Phase,
        table: Tensor,
        indices: Tensor,
        *,
        fp8: Fp8Output | None = None,
        gain: Tensor | None = None,
    ) -> Stream:
        """Return a stream that begins with rows ``indices`` [T] of ``table`` [R, H] (BF16); sumsq is [T, 1]."""
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
        *,
        scale: Tensor | None = None,
        kv_scale: Tensor | None = None,
        kv_copy: Tensor | None = None,
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
        fp8: Fp8Output | None = None,
        kv_scale: Tensor | None = None,
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
        kv_scale: Tensor | None = None,
        kv_copy: Tensor | None = None,
    ) -> Tensor:
        """Attention of one query a sequence over its pages; a sequence of length 0 gives zeros."""
        ...

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
        """Add x W^T to ``residual`` in place: BF16 in prefill, float32 in decode; return the stream."""
        ...

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
        """Return h = silu(gate) * up [T, intermediate_size]."""
        ...

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
        """Add x W^T to ``residual`` in place: BF16 in prefill, float32 in decode; return the stream."""
        ...

    def lm_head(self, phase: Phase, x: Tensor, sumsq: Tensor, weight: Tensor) -> Tensor:
        """Return float32 logits [T, vocab_size]; a view of a padded row when the vocabulary is not a multiple of 64."""
        ...

    def next_tokens(
        self, x: Tensor, sumsq: Tensor, weight: Tensor, *, logits: bool = False, out: Tensor | None = None
    ) -> NextTokens:
        """Decode's ``lm_head`` and the ``argmax`` of its logits in one; logits are written if they are asked for."""
        ...

    def argmax(self, logits: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return the index of each row's largest logit, the lowest among equals; int32 [T]."""
        ...

    def sample(self, logits: Tensor, rows: SamplingRows, *, out: Tensor | None = None) -> Tensor:
        """Choose each row's token as futransformer.sampling does; int32 [T]. ``rows.seen`` has it from then on."""
        ...

    def begin_step(self, rows: StepRows) -> None:
        """Before a chain: add one to each sequence's length; write its new token's position and slot, and seqlens_k.

        A row of no sequence keeps its length of -1, and gets position 0 and a negative slot.
        """
        ...

    def end_step(self, tokens: Tensor, lengths: Tensor, stops: Stops) -> None:
        """Note the tokens that each sequence was given; of those that end, leave the row without one (length -1)."""
        ...
