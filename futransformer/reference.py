"""The operations of a Llama step in PyTorch: what the kernels must compute, and how the model runs without a GPU.

Layouts are those of docs/architecture.md, at any row count. Every operation computes in float32 and rounds to
``dtype`` exactly where a kernel stores BF16 (x, q, K, V, attention output, h); logits and decode's residual stream stay
float32. Attention rounds P where a kernel does: P = exp(s - row maximum) is rounded before P V, its sum is taken in
float32 of the unrounded values, and the division comes last. A kernel rounds P relative to a *running* maximum, so the
two may differ in the last place of P.

Of an INT4 copy of the cache, what is rounded to codes is K and V as ``dtype`` has them, and decode rounds P times V's
scale of each group in place of P; decode's q is rotated in float32, and rounded after that.

``dtype=torch.float32`` gives the exact reference: the same formulas, nothing rounded. Both work on the CPU and on a
CUDA device. Phases compute the same thing here; they exist because kernels read a weight in two packings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from futransformer.generator.config import LlamaConfig
from futransformer.generator.errors import InputError
from futransformer.generator.kv_format import PAGE_SIZE, KvFormat
from futransformer.generator.precision import E4M3_MAX, Accumulation, Precision
from futransformer.kv_packing import store_tokens, unpack_pages
from futransformer.ops.interface import (
    DecodeWeight,
    Fp8Output,
    LayerPages,
    NextTokens,
    Phase,
    Projection,
    StepRows,
    Stops,
    Stream,
)
from futransformer.quantize.kv_int4 import Int4Kv, quantise_keys, quantise_kv, rotate
from futransformer.sampling import SamplingRows, choose, mark_seen, unpack_seen

if TYPE_CHECKING:
    from futransformer.blocks import LayerWeights


class ReferenceOps:
    """The Ops protocol in plain PyTorch for one model shape."""

    # Scores are computed for this many queries at a time: a causal block then reads only the keys it can see.
    query_block = 256

    def __init__(
        self,
        config: LlamaConfig,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
        copy: KvFormat | None = None,
    ) -> None:
        """Serve ``config``'s shape; ``dtype`` is what stored tensors are rounded to, float32 for no rounding.

        ``copy`` is the form of the INT4 copy of a cache that has one.
        """
        self.config = config
        self.device = torch.device(device)
        self.dtype = dtype
        self.copy = copy
        self.capturable = False  # attention asks for the lengths on the host
        self.heads = config.heads
        self.vocab_size = config.vocab_size
        self.rms_norm_eps = config.rms_norm_eps
        self._packed: tuple[Tensor, Tensor] | None = None

    def describe(self) -> str:
        """See Ops.describe."""
        rounding = "no rounding" if self.dtype == torch.float32 else "rounding where the kernels round"
        where = "CPU" if self.device.type == "cpu" else str(self.device)
        return f"{where} reference (PyTorch {torch.__version__.split('+')[0]}, float32 inside, {rounding})"

    def chain(self) -> AbstractContextManager[None]:
        """See Ops.chain; nothing overlaps here."""
        return nullcontext()

    def pack(self, op: Projection, phase: Phase, logical: DecodeWeight) -> Tensor:
        """Return the logical weight in float32, converted once; both phases share it.

        INT4 is dequantised, which loses nothing: a product of its values with BF16 fits float32 as well, so sums differ
        from those of codes by group, times the scale, in the order of their additions alone. So is an Fp8Weight, whose
        values float32 rounds once more.
        """
        if not isinstance(logical, Tensor):
            return logical.to(self.device).dequantise()
        if self._packed is None or self._packed[0] is not logical:
            self._packed = (logical, logical.to(self.device, torch.float32))
        return self._packed[1]

    def pack_scale(self, op: Projection, logical: Tensor) -> Tensor:
        """See Ops.pack_scale: logical order."""
        return logical.to(self.device, torch.float32)

    def bind_layers(self, layers: Sequence[LayerWeights], cache: LayerPages) -> None:
        """See Ops.bind_layers: there is none."""

    def sumsq_parts(self, phase: Phase, op: Projection, operand: torch.dtype, rows: int) -> int:
        """See Ops.sumsq_parts: that of ``row_sumsq``."""
        return 1

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
        inside = (indices >= 0) & (indices < table.shape[0])
        rows = table[torch.where(inside, indices, 0).long()]
        x = torch.where(inside[:, None], rows, torch.nan).to(self.dtype)
        residual = x if phase == "prefill" else x.to(torch.float32, copy=True)
        return Stream(self._stored(with_gain(x, gain), fp8), row_sumsq(x), residual)

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
        projected = self._normalised_linear(x, sumsq, weight, scale)
        natural = projected.view(x.shape[0], -1, self.heads.head_dim)
        q_heads, kv_heads = self.heads.num_attention_heads, self.heads.num_key_value_heads
        rotated = rotate_pairs(natural[:, : q_heads + kv_heads], rope_table[positions.long()])
        q, k, v = rotated[:, :q_heads], rotated[:, q_heads:], natural[:, q_heads + kv_heads :]

        written = slots >= 0
        page, offset = slots[written] // PAGE_SIZE, slots[written] % PAGE_SIZE
        for part, (rows, pages) in enumerate(((k, k_pages), (v, v_pages))):
            if kv_scale is None:
                stored = rows[written].to(self.dtype).to(pages.dtype)
            else:
                stored = (rows[written] * (1 / kv_scale[part])).clamp(-E4M3_MAX, E4M3_MAX).to(pages.dtype)
            as_bytes(pages)[page, :, offset] = as_bytes(stored)
        if kv_copy is not None:
            form = self._form_of_copy()
            keys = rotate(natural_order(k[written].to(self.dtype)), form.hadamard)
            values = v[written].to(self.dtype)
            store_tokens(kv_copy, slots[written], quantise_keys(keys, form), quantise_kv(values, form), form)
            if phase == "decode":
                q = rotate(natural_order(q), form.hadamard)
        return q.to(self.dtype).reshape(x.shape[0], -1).contiguous()

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
        """See Ops.attention_prefill. A query that sees no key (fewer keys than queries) gives zeros; one of no
        sequence, NaN, which a kernel leaves unwritten.
        """
        attended = torch.full_like(q, torch.nan, dtype=self.dtype if fp8 is None else torch.float32)
        offsets, lengths = cu_seqlens_q.tolist(), seqlens_k.tolist()
        for sequence, (start, stop, length) in enumerate(zip(offsets[:-1], offsets[1:], lengths, strict=True)):
            seeing = max(start, stop - length)
            attended[start:seeing] = 0
            attend = self._attention_to(k_pages, v_pages, kv_scale, None, block_table[sequence], length)
            for first in range(seeing, stop, self.query_block):
                last = min(first + self.query_block, stop)
                attended[first:last] = attend(q[first:last], length - (stop - last))
        stored = attended if fp8 is None else self._stored(attended, fp8)
        return stored if out is None else out.copy_(stored)

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
        """See Ops.attention_decode."""
        out = torch.empty_like(q, dtype=self.dtype) if out is None else out
        for row, length in enumerate(seqlens_k.tolist()):
            if length == 0:
                out[row] = 0
                continue
            attend = self._attention_to(k_pages, v_pages, kv_scale, kv_copy, block_table[row], length)
            out[row] = attend(q[row : row + 1], length)[0].to(self.dtype)
        return out

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
        return self._add_linear(phase, x, weight, residual, scale, fp8, gain)

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
        gate, up = self._normalised_linear(x, sumsq, weight, scale).chunk(2, 1)
        return self._stored(F.silu(gate) * up, fp8)

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
        return self._add_linear(phase, x, weight, residual, scale, fp8, gain)

    def lm_head(self, phase: Phase, x: Tensor, sumsq: Tensor, weight: Tensor) -> Tensor:
        """See Ops.lm_head. Padding columns hold NaN, so that a caller who reads them notices."""
        logits = self._normalised_linear(x, sumsq, weight)
        return F.pad(logits, (0, -self.vocab_size % 64), value=torch.nan)[:, : self.vocab_size]

    def next_tokens(
        self, x: Tensor, sumsq: Tensor, weight: Tensor, *, logits: bool = False, out: Tensor | None = None
    ) -> NextTokens:
        """See Ops.next_tokens."""
        all_logits = self.lm_head("decode", x, sumsq, weight)
        return NextTokens(self.argmax(all_logits, out=out), all_logits if logits else None)

    def argmax(self, logits: Tensor, *, out: Tensor | None = None) -> Tensor:
        """See Ops.argmax. NaN never wins over a number."""
        largest = logits.masked_fill(logits.isnan(), -torch.inf).amax(1, keepdim=True)
        chosen = (logits == largest).int().argmax(1).int()
        return chosen if out is None else out.copy_(chosen)

    def sample(self, logits: Tensor, rows: SamplingRows, *, out: Tensor | None = None) -> Tensor:
        """See Ops.sample."""
        chosen = choose(logits, rows).int()
        if rows.seen is not None:
            mark_seen(rows.seen, chosen)
        return chosen if out is None else out.copy_(chosen)

    def begin_step(self, rows: StepRows) -> None:
        """See Ops.begin_step."""
        position, width = rows.lengths.clone(), rows.block_table.shape[1]
        rows.seqlens_k.copy_(position + 1)
        rows.positions.copy_(position.clamp(min=0))
        entry = rows.positions.long() // PAGE_SIZE
        page = rows.block_table.gather(1, entry.clamp(max=width - 1)[:, None])[:, 0].long()
        has_page = (position >= 0) & (entry < width) & (page >= 0)
        rows.slots.copy_(torch.where(has_page, page * PAGE_SIZE + rows.positions % PAGE_SIZE, -1))
        rows.lengths.add_(position >= 0)

    def end_step(self, tokens: Tensor, lengths: Tensor, stops: Stops) -> None:
        """See Ops.end_step."""
        going = lengths >= 0
        stops.log[stops.steps.long() % stops.log.shape[0]] = torch.where(going, tokens, -1)
        stops.steps.add_(1)
        stops.left.sub_(going.int())
        known = (tokens >= 0) & (tokens < self.vocab_size)
        ends = unpack_seen(stops.ends[None], self.vocab_size)[0][torch.where(known, tokens, 0).long()] & known
        lengths.masked_fill_(going & (ends | (stops.left <= 0)), -1)

    def _linear(self, x: Tensor, weight: Tensor, scale: Tensor | None) -> Tensor:
        """See scaled_linear."""
        return scaled_linear(x, weight, scale)

    def _normalised_linear(self, x: Tensor, sumsq: Tensor, weight: Tensor, scale: Tensor | None = None) -> Tensor:
        """RMSNorm(x) W^T in float32; the norm's gain lies in W, and its rstd is applied to the finished sums."""
        rstd = torch.rsqrt(sumsq.sum(1, keepdim=True) / x.shape[1] + self.rms_norm_eps)
        return self._linear(x, weight, scale).mul_(rstd)

    def _add_linear(
        self,
        phase: Phase,
        x: Tensor,
        weight: Tensor,
        residual: Tensor,
        scale: Tensor | None,
        fp8: Fp8Output | None,
        gain: Tensor | None,
    ) -> Stream:
        """Residual + x W^T in place of ``residual``: float32 in decode; in prefill our type, or a copy of that type."""
        added = self._linear(x, weight, scale).add_(residual)
        stored = residual.to(torch.float32 if phase == "decode" else self.dtype).copy_(added)
        read = with_gain(stored if fp8 is None else added, gain)
        return Stream(self._stored(read, fp8), row_sumsq(added), stored)

    def _stored(self, values: Tensor, fp8: Fp8Output | None) -> Tensor:
        """Values as the next GEMM reads them: in our type, or as FP8 codes (of float32, codes that are not rounded)."""
        if fp8 is None:
            return values.to(self.dtype)
        codes = quantize_fp8(values, fp8)
        return codes if self.dtype == torch.float32 else codes.to(torch.float8_e4m3fn)

    def _gather_pages(
        self, k_pages: Tensor, v_pages: Tensor, kv_scale: Tensor | None, block_row: Tensor, length: int
    ) -> tuple[Tensor, Tensor]:
        """K and V of the first ``length`` tokens of one sequence, [kv heads, length, D] float32; no other is read."""
        used = block_row[: -(-length // PAGE_SIZE)].long()
        k, v = (
            as_bytes(pages)[used].view(pages.dtype).transpose(0, 1).flatten(1, 2)[:, :length].float()
            for pages in (k_pages, v_pages)
        )
        return (k, v) if kv_scale is None else (k * kv_scale[0], v * kv_scale[1])

    def _form_of_copy(self) -> KvFormat:
        if self.copy is None:
            raise InputError("this reference knows no form of an INT4 copy: make it with copy=, or leave kv_copy out")
        return self.copy

    def _gather_copy(self, kv_copy: Tensor, block_row: Tensor, length: int) -> tuple[Int4Kv, Int4Kv]:
        """The same of a copy: codes [kv heads, length, D]."""
        used = kv_copy[block_row[: -(-length // PAGE_SIZE)].long()].transpose(0, 1)
        keys, values = unpack_pages(used, self.heads.head_dim, self._form_of_copy())

        def tokens(pages: Tensor) -> Tensor:
            return pages.flatten(1, 2)[:, :length]

        return keys.map(tokens), values.map(tokens)

    def _attention_to(
        self,
        k_pages: Tensor,
        v_pages: Tensor,
        kv_scale: Tensor | None,
        kv_copy: Tensor | None,
        block_row: Tensor,
        length: int,
    ) -> Callable[[Tensor, int], Tensor]:
        """What attends one sequence's pages, or their copy: of its last queries and the keys that they see, float32."""
        if kv_copy is None:
            k, v = self._gather_pages(k_pages, v_pages, kv_scale, block_row, length)
            return lambda q, visible: self._attend(q, k[:, :visible], v[:, :visible])
        keys, values = self._gather_copy(kv_copy, block_row, length)

        def attend(q: Tensor, visible: int) -> Tensor:
            seen = (part.map(lambda tokens: tokens[:, :visible]) for part in (keys, values))
            return self._attend_codes(q, *seen)

        return attend

    def _attend_codes(self, q: Tensor, keys: Int4Kv, values: Int4Kv) -> Tensor:
        """The same as ``_attend`` over codes [kv heads, length, D].

        V's codes are multiplied as they are, by P times their scales; P times minima is added in float32.
        """
        p = self._weights(q, keys.worth())
        scaled = torch.einsum("hgqk,hks->hgqks", p, values.scales.float()).to(self.dtype).float()
        attended = torch.einsum("hgqks,hksd->hgqsd", scaled, values.multiples())
        if values.minima is not None:
            attended += torch.einsum("hgqk,hks->hgqs", p, values.minima.float()).unsqueeze(-1)
        return attended.div_(p.sum(-1)[..., None, None]).flatten(3).permute(2, 0, 1, 3).flatten(1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention of a sequence's last queries [Q, heads * D] over k and v [kv heads, length, D]; float32."""
        p = self._weights(q, k)
        attended = torch.einsum("hgqk,hkd->hgqd", p.to(self.dtype).float(), v) / p.sum(-1, keepdim=True)
        return attended.permute(2, 0, 1, 3).flatten(1)

    def _weights(self, q: Tensor, k: Tensor) -> Tensor:
        """exp(score - the largest) of a sequence's last queries, float32 [kv heads, group, Q, length]."""
        queries, length = q.shape[0], k.shape[1]
        grouped = q.float().view(queries, self.heads.num_key_value_heads, self.heads.group, -1).permute(1, 2, 0, 3)
        scores = torch.einsum("hgqd,hkd->hgqk", grouped, k) * self.heads.head_dim**-0.5
        if queries > 1:
            future = torch.ones(queries, length, dtype=torch.bool, device=q.device).triu_(length - queries + 1)
            scores.masked_fill_(future, -torch.inf)
        weights: Tensor = scores.sub_(scores.amax(-1, keepdim=True)).exp_()
        return weights


def with_gain(x: Tensor, gain: Tensor | None) -> Tensor:
    """What the next GEMM reads of the residual stream before it is rounded: its columns times the gain, if given."""
    return x if gain is None else x.float() * gain


def as_bytes(codes: Tensor) -> Tensor:
    """FP8 codes as bytes, which PyTorch can index; anything else as it is."""
    return codes.view(torch.uint8) if codes.element_size() == 1 else codes


def scaled_linear(x: Tensor, weight: Tensor, scale: Tensor | None) -> Tensor:
    """x W^T in float32, of operands as they are stored; ``scale`` [1] or [N] is what the sums are worth."""
    sums = F.linear(x.float(), weight.float())
    return sums if scale is None else sums.mul_(scale)


def quantize_fp8(values: Tensor, fp8: Fp8Output) -> Tensor:
    """Codes of ``values`` before they are rounded, float32 within -448 .. 448; raises ``fp8``'s maximum and count."""
    codes = values.float() * (1 / fp8.scale)
    magnitude = codes.abs()
    if codes.numel():
        torch.maximum(fp8.amax, magnitude.nan_to_num(0, torch.inf).amax() * fp8.scale, out=fp8.amax)
    fp8.saturated.add_((magnitude > E4M3_MAX).sum())
    return codes.clamp(-E4M3_MAX, E4M3_MAX)


def natural_order(features: Tensor) -> Tensor:
    """Features of heads [..., D] from pair order."""
    return torch.cat((features[..., 0::2], features[..., 1::2]), -1)


def rotate_pairs(features: Tensor, cos_sin: Tensor) -> Tensor:
    """RoPE in pair order: features [T, heads, D] with pairs side by side, cos_sin [T, D / 2, 2]."""
    first, second = features[..., 0::2], features[..., 1::2]
    cos, sin = cos_sin[:, None, :, 0], cos_sin[:, None, :, 1]
    return torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2)


def row_sumsq(x: Tensor) -> Tensor:
    """Sum of squares of each row, in one part: float32 [T, 1]."""
    return x.float().square().sum(1, keepdim=True)


def allowed_error(same_dtype: Tensor, exact: Tensor, precision: Precision) -> float:
    """The tolerance rule: ``rtol_factor`` times PyTorch's own error in this type, plus ``atol`` of the largest value.

    ``exact`` is the float32 reference; ``same_dtype`` what PyTorch makes of it in the storage type, for example a
    ReferenceOps that rounds.
    """
    own = (same_dtype.float() - exact.float()).abs().max().item()
    return precision.rtol_factor * own + precision.atol * exact.float().abs().max().item()


def sums_error(k: int, accumulation: Accumulation) -> float:
    """What FP8 tensor cores may lose of a sum of ``k`` products, relative to its size; docs/numerics.md derives it.

    "fast" adds it to the rule, of the largest value; "promoted" loses less than BF16's rounding, and adds nothing.
    """
    return 2.0**-13 * math.sqrt((k if accumulation == "fast" else min(k, 128)) / 3)


def largest_error(actual: Tensor, exact: Tensor) -> float:
    """max|actual - exact|; infinite where one is not finite and the other differs, so that NaN never passes a test."""
    error = (actual.float() - exact.float()).abs()
    same = actual.float() == exact.float()
    return torch.where(same, 0.0, torch.where(error.isfinite(), error, torch.inf)).max().item()
