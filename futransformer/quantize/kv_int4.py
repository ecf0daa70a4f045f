"""K and V to INT4 codes with scales, and back; rotations, and how V's is folded into weights.

The format is generator/kv_format.py's. Everything here is in the natural order of a head's features, on any device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from futransformer.generator.errors import InputError
from futransformer.generator.kv_format import KvFormat
from futransformer.generator.specs import Heads

LOWEST, CODES = -8, 16


@dataclass(frozen=True)
class Int4Kv:
    """K or V of some tokens and heads, [..., D], in G groups of features."""

    codes: Tensor  # uint8 [..., D], 0 .. 15: what is stored; of a signed scale the code + 8
    scales: Tensor  # float16 [..., G]
    minima: Tensor | None  # float16 [..., G]

    def worth(self) -> Tensor:
        """What attention must find, float32 [..., D], rotated as it was stored."""
        codes = _in_groups(self.codes.float(), self.scales.shape[-1])
        scale = self.scales.float().unsqueeze(-1)
        if self.minima is None:
            return ((codes + LOWEST) * scale).flatten(-2)
        return (codes * scale + self.minima.float().unsqueeze(-1)).flatten(-2)


def quantise_kv(values: Tensor, kv_format: KvFormat) -> Int4Kv:
    """Round ``values`` [..., D], rotated already, to the nearest codes; scales are rounded to float16 first.

    A group of one value throughout has scale 0 and is worth it (with a minimum), or zero.
    """
    grouped = _in_groups(values.float(), kv_format.groups(values.shape[-1]))
    if kv_format.minimum:
        low, high = grouped.amin(-1), grouped.amax(-1)
        minima: Tensor | None = low.half()
        scales = ((high - low) / (CODES - 1)).half()
        codes = (grouped - low.half().float().unsqueeze(-1)) * _reciprocal(scales)
        lowest = 0
    else:
        minima, lowest = None, LOWEST
        largest = grouped.gather(-1, grouped.abs().argmax(-1, keepdim=True)).squeeze(-1)
        scales = (largest / LOWEST).half()
        codes = grouped * _reciprocal(scales)
    stored = codes.round().clamp(lowest, lowest + CODES - 1) - lowest
    return Int4Kv(stored.flatten(-2).to(torch.uint8), scales, minima)


def _in_groups(features: Tensor, groups: int) -> Tensor:
    """[..., D] as [..., groups, D / groups]."""
    return features.reshape(*features.shape[:-1], groups, -1)


def _reciprocal(scales: Tensor) -> Tensor:
    """1 / scale of each group; 0 where it is 0."""
    wide = scales.float().unsqueeze(-1)
    return torch.where(wide == 0, 0, 1 / wide)


def hadamard(block: int) -> Tensor:
    """H / sqrt(block), float32 [block, block]: symmetric, and its own inverse."""
    if block < 1 or block & (block - 1):
        raise InputError(f"a Hadamard block is a power of two, not {block}")
    matrix = torch.ones(1, 1)
    while len(matrix) < block:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix / math.sqrt(block)


def rotate(features: Tensor, block: int) -> Tensor:
    """Rotate [..., D] in blocks, in float32; what is rotated twice is what it was. Of block 0, ``features`` itself."""
    if block == 0:
        return features.float()
    matrix = hadamard(block).to(features.device)
    return (_in_groups(features.float(), features.shape[-1] // block) @ matrix).flatten(-2)


def fold_value_rotation(qkv: Tensor, o: Tensor, heads: Heads, block: int) -> tuple[Tensor, Tensor]:
    """Logical weights, float32, of a layer whose V comes out rotated and whose o takes it back.

    V's rows of ``qkv`` [N, K] and the columns of ``o`` [H, q features] stand in natural order.
    """
    first = heads.q_features + heads.kv_features
    values = rotate(qkv[first:].float().T, block).T
    return torch.cat((qkv[:first].float(), values)), rotate(o, block)
