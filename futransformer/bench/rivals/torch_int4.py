"""PyTorch's INT4 weights on their usual terms: ``_weight_int4pack_mm`` in BF16, the rest left to ``torch.compile``.

The kernel, tinygemm, is the one that gpt-fast and torchao decode with. Its weights stand for (code - 8) x scale + zero,
with scale and zero in BF16 [K / g, N, 2], groups of 32, 64, 128 or 256 that divide K. It is given the codes that ours
has, in natural order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from futransformer.bench.case import RivalMissingError
from futransformer.bench.coded import CodedBlock
from futransformer.bench.rivals.torch_bf16 import Shape, rms_norm, rotate, swiglu
from futransformer.generator.precision import CHANNEL
from futransformer.ops.interface import DecodeWeight
from futransformer.quantize.int4 import Int4Weight
from futransformer.quantize.int4_scales import MIDDLE

INNER_K_TILES = 8  # what gpt-fast packs with; 4 and 2 are for K that this does not divide


class Weight(NamedTuple):
    """A packed weight, its scales and zeros, and the group that they are of."""

    packed: Tensor
    scales_and_zeros: Tensor
    group_size: int

    @classmethod
    def of(cls, weight: DecodeWeight) -> Weight:
        """Pack a natural weight."""
        assert isinstance(weight, Int4Weight)
        if weight.group_size == CHANNEL or weight.codes.shape[1] % weight.group_size:
            raise RivalMissingError(f"its groups divide K, and {weight.group_size} does not")
        scales = weight.scales.float()
        zeros = torch.zeros_like(scales) if weight.zeros is None else (MIDDLE - weight.zeros.float()) * scales
        both = torch.stack((scales, zeros), -1).bfloat16().transpose(0, 1).contiguous()
        return cls(pack(weight.codes), both, weight.group_size)

    def copy(self) -> Weight:
        """Another place in memory."""
        return Weight(self.packed.clone(), self.scales_and_zeros.clone(), self.group_size)


class Block(NamedTuple):
    """The weights of one layer, and the gain that both norms multiply with."""

    qkv: Weight
    o: Weight
    gate_up: Weight
    down: Weight
    gain: Tensor

    @classmethod
    def of(cls, block: CodedBlock, gain: Tensor) -> Block:
        """Pack a layer."""
        qkv, o, gate_up, down = (Weight.of(weight) for weight in block)
        return cls(qkv, o, gate_up, down, gain)


def pack(codes: Tensor) -> Tensor:
    """Codes [N, K], two a byte, in the order of the kernel's fragments."""
    packed: Tensor = torch.ops.aten._convert_weight_to_int4pack(
        (codes[:, ::2] << 4 | codes[:, 1::2]).contiguous(), INNER_K_TILES
    )
    return packed


def product(x: Tensor, weight: Weight) -> Tensor:
    """BF16 x W^T."""
    packed, both, group_size = weight
    result: Tensor = torch.ops.aten._weight_int4pack_mm(x, packed, group_size, both)
    return result


def decode_block(
    x: Tensor,
    block: Block,
    shape: Shape,
    cos: Tensor,
    sin: Tensor,
    position: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
) -> Tensor:
    """See torch_bf16.decode_block."""
    features = [shape.q_features, shape.kv_features, shape.kv_features]
    projected = product(rms_norm(x, block.gain, shape.eps), block.qkv)
    q, k, v = (part.view(x.shape[0], -1, shape.head_dim) for part in torch.split(projected, features, -1))
    q, k = (rotate(part, cos[:, None], sin[:, None]) for part in (q, k))
    k_cache.index_copy_(2, position, k[:, :, None])
    v_cache.index_copy_(2, position, v[:, :, None])
    attended = F.scaled_dot_product_attention(q[:, :, None], k_cache, v_cache, enable_gqa=True)
    x = x + product(attended.flatten(1), block.o)
    return x + product(swiglu(product(rms_norm(x, block.gain, shape.eps), block.gate_up)), block.down)
