"""PyTorch in BF16 on its usual terms: ``torch.compile`` around plain code, cuBLAS products, SDPA attention.

Weights are natural (futransformer.bench.llama). Functions take their weights as arguments, so one compiled function
serves every layer. The RMSNorms and their gains, RoPE, cache writes, SwiGLU and residuals are left to the compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from futransformer.bench.llama import NaturalBlock
from futransformer.generator.config import LlamaConfig

Function = TypeVar("Function", bound=Callable[..., Any])

BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


class Shape(NamedTuple):
    """What the compiled functions need to know of a config: constants to the compiler."""

    q_features: int
    kv_features: int
    head_dim: int
    eps: float

    @classmethod
    def of(cls, config: LlamaConfig) -> Shape:
        """Read a config."""
        heads = config.heads
        return cls(heads.q_features, heads.kv_features, heads.head_dim, config.rms_norm_eps)


def compiled(function: Function) -> Function:
    """Compile for static shapes; products stay with cuBLAS.

    With max-autotune the SwiGLU projection of an 8B model took what cuBLAS's product and a pass over its result take
    together (767 TFLOP/s at 8192 rows on an H200): the compiler's own products were tried, for minutes, and not chosen.
    """
    return cast("Function", torch.compile(function, dynamic=False))


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """Llama's RMSNorm."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * gain


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on natural features: x [..., T, D], cos and sin [T, D]."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up of [T, 2 I]."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def gated_product(x: Tensor, weight: Tensor) -> Tensor:
    """The gate and up projections with their SwiGLU."""
    return swiglu(F.linear(x, weight))


def normalised_gated_product(x: Tensor, weight: Tensor, gain: Tensor, eps: float) -> Tensor:
    """The same behind its norm."""
    return gated_product(rms_norm(x, gain, eps), weight)


def qkv_into_cache(
    x: Tensor,
    weight: Tensor,
    gain: Tensor,
    shape: Shape,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
) -> Tensor:
    """Everything that ours does around the qkv product: norm, RoPE, K and V [T, kv heads, D] stored; returns q."""
    q, k, v = project_qkv(x, weight, gain, shape, cos[:, None], sin[:, None])
    k_cache.copy_(k)
    v_cache.copy_(v)
    return q.flatten(1)


def begin_block(
    x: Tensor, block: NaturalBlock, shape: Shape, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor
) -> Tensor:
    """All of a prefill layer that comes before attention: q [T, heads, D]; K and V are stored as [T, kv heads, D]."""
    q, k, v = project_qkv(x, block.qkv, block.gain, shape, cos[:, None], sin[:, None])
    k_cache.copy_(k)
    v_cache.copy_(v)
    return q


def added_product(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    """A projection onto the residual stream."""
    return residual + F.linear(x, weight)


def project_qkv(
    x: Tensor, weight: Tensor, gain: Tensor, shape: Shape, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Norm, project, rotate: q [T, heads, D], k and v [T, kv heads, D]; cos and sin [T, 1, D]."""
    features = [shape.q_features, shape.kv_features, shape.kv_features]
    projected = F.linear(rms_norm(x, gain, shape.eps), weight)
    q, k, v = (part.view(x.shape[0], -1, shape.head_dim) for part in torch.split(projected, features, -1))
    return rotate(q, cos, sin), rotate(k, cos, sin), v


def finish_block(x: Tensor, attended: Tensor, block: NaturalBlock, shape: Shape) -> Tensor:
    """Output projection, residual, MLP."""
    x = added_product(attended, block.o, x)
    return added_product(normalised_gated_product(x, block.gate_up, block.gain, shape.eps), block.down, x)


def decode_block(
    x: Tensor,
    block: NaturalBlock,
    shape: Shape,
    cos: Tensor,
    sin: Tensor,
    position: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
) -> Tensor:
    """One token of each sequence, x [B, H], appended at ``position`` [1] of a full cache [B, kv heads, T, D]."""
    q, k, v = project_qkv(x, block.qkv, block.gain, shape, cos[:, None], sin[:, None])
    k_cache.index_copy_(2, position, k[:, :, None])
    v_cache.index_copy_(2, position, v[:, :, None])
    attended = F.scaled_dot_product_attention(q[:, :, None], k_cache, v_cache, enable_gqa=True)
    return finish_block(x, attended.flatten(1), block, shape)


def prefill_block(
    x: Tensor,
    block: NaturalBlock,
    shape: Shape,
    cos: Tensor,
    sin: Tensor,
    lengths: tuple[int, ...],
    k_cache: Tensor,
    v_cache: Tensor,
) -> Tensor:
    """All prompts, x [T, H] concatenated; K and V are stored as [T, kv heads, D]."""
    q, k, v = project_qkv(x, block.qkv, block.gain, shape, cos[:, None], sin[:, None])
    k_cache.copy_(k)
    v_cache.copy_(v)
    return finish_block(x, attend_prompts(q, k, v, lengths), block, shape)


def attend_prompts(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """Causal attention of all prompts.

    Those of one length attend as a batch; of several, one after the other, so that nobody computes padding.
    """
    if len(set(lengths)) == 1:
        return causal_attention(q, k, v, len(lengths))
    each = list(lengths)
    parts = zip(torch.split(q, each), torch.split(k, each), torch.split(v, each), strict=True)
    return torch.cat([causal_attention(q_part, k_part, v_part, 1) for q_part, k_part, v_part in parts])


def causal_attention(q: Tensor, k: Tensor, v: Tensor, sequences: int) -> Tensor:
    """Attention of prompts of equal length: [T, heads, D] -> [T, heads x D]."""
    q, k, v = (part.view(sequences, -1, *part.shape[1:]).transpose(1, 2) for part in (q, k, v))
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return attended.transpose(1, 2).flatten(0, 1).flatten(1)


def with_backend(backend: str, function: Function) -> Function:
    """Return the function under one SDPA backend; others may step in where it cannot serve a shape."""

    def run(*args: Any) -> Any:
        with sdpa_kernel([BACKENDS[backend], SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True):
            return function(*args)

    return cast("Function", run)


def fastest_backend(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...]) -> str:
    """Name the SDPA backend that is faster on these prompts; one that fails on any of them is not."""
    seconds = {name: _seconds(with_backend(name, attend_prompts), q, k, v, lengths) for name in BACKENDS}
    return min(seconds, key=lambda name: seconds[name])


def _seconds(function: Callable[..., object], *args: Any) -> float:
    try:
        for _ in range(2):
            function(*args)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(5):
            function(*args)
        end.record()
        end.synchronize()
    except RuntimeError:
        return float("inf")
    return float(start.elapsed_time(end))
