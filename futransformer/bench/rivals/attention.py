"""Attention by others: FlashAttention-4's package (CuTe DSL), cuDNN through SDPA. Natural order, contiguous K and V."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from futransformer.bench.rivals import require
from futransformer.bench.rivals.torch_bf16 import causal_attention


def flash_attention_varlen(cu_seqlens: Tensor, longest: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Causal attention of concatenated prompts: q, k, v [T, heads, D] -> [T, heads x D]."""
    interface = require("flash_attn.cute", "flash-attn-4")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = interface.flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_k=cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            causal=True,
        )
        attended: Tensor = out[0] if isinstance(out, tuple) else out
        return attended.flatten(1)

    return attend


def cudnn_prefill(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Callable[[], Tensor]:
    """The same through SDPA with cuDNN alone; prompts of equal length."""

    def run() -> Tensor:
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
            return causal_attention(q, k, v, len(lengths))

    return run


def sdpa_decode(q: Tensor, k: Tensor, v: Tensor, backend: SDPBackend | None = None) -> Callable[[], Tensor]:
    """One query a sequence, q [B, heads, D], over a contiguous cache [B, kv heads, T, D]; PyTorch picks a backend."""
    query = q[:, :, None]

    def run() -> Tensor:
        if backend is None:
            return F.scaled_dot_product_attention(query, k, v, enable_gqa=True).flatten(1)
        with sdpa_kernel([backend]):
            return F.scaled_dot_product_attention(query, k, v, enable_gqa=True).flatten(1)

    return run


def flash_attention_decode(q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    """The same through FlashAttention-4's package, which reads [B, T, kv heads, D] and chooses its own splits."""
    interface = require("flash_attn.cute", "flash-attn-4")
    keys, values = (cache.transpose(1, 2).contiguous() for cache in (k, v))
    query = q[:, None]

    def run() -> Tensor:
        out = interface.flash_attn_func(query, keys, values, causal=False, num_splits=0)
        attended: Tensor = out[0] if isinstance(out, tuple) else out
        return attended.flatten(1)

    return run
