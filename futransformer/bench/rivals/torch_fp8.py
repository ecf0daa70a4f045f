"""PyTorch in FP8 on its usual terms: ``torch._scaled_mm`` with static scales, the rest fused by ``torch.compile``.

One scale a tensor, fast accumulation, results in BF16; what comes between two products (norm and gain, RoPE, cache
writes, SwiGLU, residuals) is left to the compiler together with the quantisation of what the next product reads, which
saturates. Attention is SDPA's in BF16. Weights are natural (futransformer.bench.llama), scales float32 of no dimension.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from futransformer.bench.llama import NaturalBlock
from futransformer.bench.rivals.torch_bf16 import Shape, attend_prompts, rms_norm, rotate, swiglu
from futransformer.generator.precision import E4M3_MAX
from futransformer.quantize.fp8 import quantize_weight


class Weight(NamedTuple):
    """Codes [N, K] and what a code of 1 is worth."""

    codes: Tensor
    scale: Tensor

    @classmethod
    def of(cls, natural: Tensor) -> Weight:
        """Quantise a BF16 weight."""
        weight = quantize_weight("weight", natural, "tensor")
        return cls(weight.codes, weight.scale.view(()))


class BlockScales(NamedTuple):
    """Of what the four products of a layer read."""

    x: Tensor  # both normalised rows
    attended: Tensor
    h: Tensor


class Block(NamedTuple):
    """The weights of one layer, the gain that both norms multiply with, and the scales."""

    qkv: Weight
    o: Weight
    gate_up: Weight
    down: Weight
    gain: Tensor
    scales: BlockScales

    @classmethod
    def of(cls, block: NaturalBlock, scales: BlockScales) -> Block:
        """Quantise a layer."""
        qkv, o, gate_up, down = (Weight.of(w) for w in (block.qkv, block.o, block.gate_up, block.down))
        return cls(qkv, o, gate_up, down, block.gain, scales)


def quantise(values: Tensor, scale: Tensor) -> Tensor:
    """E4M3 codes, saturated."""
    return (values.float() * (1.0 / scale)).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def product(x: Tensor, scale: Tensor, weight: Weight) -> Tensor:
    """BF16 x W^T of codes."""
    return torch._scaled_mm(
        x,
        weight.codes.t(),
        scale_a=scale,
        scale_b=weight.scale,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )


def gated_product(x: Tensor, scale: Tensor, weight: Weight, h_scale: Tensor) -> Tensor:
    """The gate and up projections of normalised codes, and their SwiGLU in codes."""
    return quantise(swiglu(product(x, scale, weight)), h_scale)


def project_qkv(
    x: Tensor, scale: Tensor, weight: Weight, shape: Shape, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Project normalised codes and rotate: q [T, heads, D], k and v [T, kv heads, D]; cos and sin [T, 1, D]."""
    features = [shape.q_features, shape.kv_features, shape.kv_features]
    projected = torch.split(product(x, scale, weight), features, -1)
    q, k, v = (part.view(x.shape[0], -1, shape.head_dim) for part in projected)
    return rotate(q, cos, sin), rotate(k, cos, sin), v


def qkv_into_cache(
    x: Tensor, scale: Tensor, weight: Weight, shape: Shape, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor
) -> Tensor:
    """The same with K and V [T, kv heads, D] stored; returns q [T, heads x D]."""
    q, k, v = project_qkv(x, scale, weight, shape, cos[:, None], sin[:, None])
    k_cache.copy_(k)
    v_cache.copy_(v)
    return q.flatten(1)


def added_product(
    x: Tensor, scale: Tensor, weight: Weight, residual: Tensor, gain: Tensor, eps: float, next_scale: Tensor
) -> tuple[Tensor, Tensor]:
    """A projection onto the residual stream: that, and its rows normalised, in codes."""
    added = residual + product(x, scale, weight)
    return added, quantise(rms_norm(added, gain, eps), next_scale)


def begin_block(
    x: Tensor, block: Block, shape: Shape, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor
) -> Tensor:
    """See torch_bf16.begin_block."""
    q, k, v = normalise_and_project(x, block, shape, cos, sin)
    k_cache.copy_(k)
    v_cache.copy_(v)
    return q


def normalise_and_project(
    x: Tensor, block: Block, shape: Shape, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """From the residual stream to q, k and v."""
    scale = block.scales.x
    codes = quantise(rms_norm(x, block.gain, shape.eps), scale)
    return project_qkv(codes, scale, block.qkv, shape, cos[:, None], sin[:, None])


def finish_block(x: Tensor, attended: Tensor, block: Block, shape: Shape) -> Tensor:
    """Output projection, residual, MLP."""
    scales = block.scales
    codes = quantise(attended, scales.attended)
    x, codes = added_product(codes, scales.attended, block.o, x, block.gain, shape.eps, scales.x)
    h = gated_product(codes, scales.x, block.gate_up, scales.h)
    return x + product(h, scales.h, block.down)


def prefill_block(
    x: Tensor,
    block: Block,
    shape: Shape,
    cos: Tensor,
    sin: Tensor,
    lengths: tuple[int, ...],
    k_cache: Tensor,
    v_cache: Tensor,
) -> Tensor:
    """All prompts, x [T, H] concatenated; K and V are stored as [T, kv heads, D]."""
    q, k, v = normalise_and_project(x, block, shape, cos, sin)
    k_cache.copy_(k)
    v_cache.copy_(v)
    return finish_block(x, attend_prompts(q, k, v, lengths), block, shape)
