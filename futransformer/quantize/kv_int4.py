"""K and V to INT4 codes with scales, and back; rotations, and how V's is folded into weights.

The format is generator/kv_format.py's. Everything here is in the natural order of a head's features, on any device, and
is to the bit what kernels do: float32, every operation rounded by itself, none of them fused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

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

    def map(self, change: Callable[[Tensor], Tensor]) -> Int4Kv:
        """The same change of every tensor, of what stands before its last dimension."""
        return Int4Kv(change(self.codes), change(self.scales), None if self.minima is None else change(self.minima))

    def multiples(self) -> Tensor:
        """What scales multiply, float32 [..., G, D / G]: integers."""
        codes = _in_groups(self.codes.float(), self.scales.shape[-1])
        return codes + LOWEST if self.minima is None else codes

    def worth(self) -> Tensor:
        """What attention must find, float32 [..., D], rotated as it was stored."""
        scaled = self.multiples() * self.scales.float().unsqueeze(-1)
        if self.minima is not None:
            scaled += self.minima.float().unsqueeze(-1)
        return scaled.flatten(-2)


def quantise_kv(values: Tensor, kv_format: KvFormat) -> Int4Kv:
    """Round ``values`` [..., D], rotated already, to the nearest codes; scales are rounded to float16 first.

    Values are multiplied by the scale's reciprocal, itself rounded, and ties go to even. Of two values that are the
    largest in magnitude the positive one takes the code -8. A group of one value throughout has scale 0 and is worth it
    (with a minimum), or zero. A group that holds NaN or leaves float16's range is worth NaN or infinities, and its
    codes are any.
    """
    grouped = _in_groups(values.float(), kv_format.groups(values.shape[-1]))
    low, high = grouped.amin(-1), grouped.amax(-1)
    if kv_format.minimum:
        minima: Tensor | None = low.half()
        # by a tensor: PyTorch on a GPU multiplies by the reciprocal of a number
        scales = ((high - low) / torch.full_like(high, CODES - 1)).half()
        codes = (grouped - low.half().float().unsqueeze(-1)) * _reciprocal(scales)
        lowest = 0
    else:
        minima, lowest = None, LOWEST
        largest = torch.where(high >= -low, high, low)
        scales = (largest / LOWEST).half()
        codes = grouped * _reciprocal(scales)
    stored = codes.nan_to_num(0).round().clamp(lowest, lowest + CODES - 1) - lowest
    return Int4Kv(stored.flatten(-2).to(torch.uint8), scales, minima)


def quantise_keys(keys: Tensor, kv_format: KvFormat) -> Int4Kv:
    """As `quantise_kv`; then the scale that suits the codes best is stored, sum x q / sum q q (least squares).

    Of a format with minima, or where either scale is zero or not finite, the one that made the codes stays. The sum of
    squares is exact, its reciprocal rounded; the other sum is added as a quad of lanes adds it.
    """
    made = quantise_kv(keys, kv_format)
    if kv_format.minimum:
        return made
    grouped, codes = _in_groups(keys.float(), made.scales.shape[-1]), made.multiples()
    refitted = (_sum_of_lanes(grouped * codes) * (1 / (codes * codes).sum(-1))).half()
    usable = [(scales != 0) & scales.isfinite() for scales in (made.scales, refitted)]
    return replace(made, scales=torch.where(usable[0] & usable[1], refitted, made.scales))


def _sum_of_lanes(products: Tensor) -> Tensor:
    """Sums over the last dimension: of each 32 features lane t of four adds 4 t + 0 .. 3 and those 16 further on."""
    *before, features = products.shape
    of_lanes = products.reshape(*before, features // 32, 2, 4, 4).movedim(-2, -4).flatten(-3)  # [..., 4, D / 4]
    sums = of_lanes[..., 0]
    for turn in range(1, of_lanes.shape[-1]):
        sums = sums + of_lanes[..., turn]
    return (sums[..., 0] + sums[..., 1]) + (sums[..., 2] + sums[..., 3])


def _in_groups(features: Tensor, groups: int) -> Tensor:
    """[..., D] as [..., groups, D / groups]."""
    return features.reshape(*features.shape[:-1], groups, features.shape[-1] // groups)


def _reciprocal(scales: Tensor) -> Tensor:
    """1 / scale of each group; 0 where it is 0."""
    wide = scales.float().unsqueeze(-1)
    return torch.where(wide == 0, 0, 1 / wide)


def rotate(features: Tensor, block: int) -> Tensor:
    """Multiply each block of [..., D] by H / sqrt(block), in float32. Of block 0, ``features`` itself.

    What is rotated twice is what it was, but for roundings. Butterflies a + b, a - b over the bits of a feature's
    index, the lowest first; then one multiplication.
    """
    if block == 0:
        return features.float()
    if block < 1 or block & (block - 1):
        raise InputError(f"a Hadamard block is a power of two, not {block}")
    rotated, apart = features.float(), 1
    while apart < block:
        a, b = rotated.reshape(*features.shape[:-1], features.shape[-1] // (2 * apart), 2, apart).unbind(-2)
        rotated = torch.stack((a + b, a - b), -2)
        apart *= 2
    factor: float = block**-0.5
    return rotated.view(features.shape) * factor


def fold_value_rotation(qkv: Tensor, o: Tensor, heads: Heads, block: int) -> tuple[Tensor, Tensor]:
    """Logical weights, float32, of a layer whose V comes out rotated and whose o takes it back.

    V's rows of ``qkv`` [N, K] and the columns of ``o`` [H, q features] stand in natural order.
    """
    first = heads.q_features + heads.kv_features
    values = rotate(qkv[first:].float().T, block).T
    return torch.cat((qkv[:first].float(), values)), rotate(o, block)
