"""The scales and zero points of groups of INT4 weights: by the largest value, or by a search for the least error.

    W = scale * (code - zero point)        codes 0 .. 15; without zero points 8 in their place

A scale is rounded to float16 before anything is made of it. Of nothing but zeros it is 1.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from futransformer.generator.errors import CheckpointError

CODES = 16
MIDDLE = 8  # the zero point of symmetric codes
SMALLEST_SCALE = 2.0**-24  # of float16; a group that would need less becomes zeros, and is off by at most half of it

ScaleSearch = Literal["max", "mse"]
# Ranges that a search tries, of the largest value's. Normally distributed weights want 0.95 of it in groups of 128;
# what lies beyond a range is cut off. 7.5 / 7 is the range that cuts nothing off.
SHRINKS = tuple(step / 50 for step in range(25, 55))


class GroupScales(NamedTuple):
    """Of a weight's groups, [N, G]."""

    scales: Tensor  # float16
    zeros: Tensor  # float32: whole numbers 0 .. 15


def in_groups(values: Tensor, row_group: int) -> Tensor:
    """[N, K] as [N, G, group], the last group filled up with zeros, which change no range and no error."""
    return F.pad(values, (0, -values.shape[1] % row_group)).view(len(values), -1, row_group)


def nearest_codes(values: Tensor, chosen: GroupScales) -> Tensor:
    """Codes, float32 0 .. 15, of values [N, G, group]."""
    zeros = chosen.zeros[..., None]
    return (values / chosen.scales.float()[..., None]).round_().add_(zeros).clamp_(0, CODES - 1)


def choose_scales(
    name: str,
    values: Tensor,
    *,
    zero_points: bool,
    search: ScaleSearch = "max",
    importance: Tensor | None = None,
) -> GroupScales:
    """The scales of ``values``, float32 [N, G, group]; ``name`` is what a refusal calls the weight.

    By "max", symmetric: scale = max|W| / 7.5, so that neither end is off by more than half a scale. With zero points:
    scale = (max - min) / 15 of the group and zero, zero point = round(-min / scale).
    By "mse" ranges are shrunk as long as the sum of ``importance`` (of each column, [G, group]; None: one) x error^2
    falls. Symmetric scales may be negative there: there is one code more below zero than above it.
    """
    low, high = values.amin(2).clamp_max_(0), values.amax(2).clamp_min_(0)
    if not (low.isfinite() & high.isfinite()).all():
        raise CheckpointError(
            f"{name} holds {int((~values.isfinite()).sum())} values that are not finite, so it has no INT4 scales; "
            "fetch the checkpoint again"
        )
    best = _ranged(low, high, zero_points)
    if best.scales.isinf().any():
        raise CheckpointError(
            f"{name} has magnitudes up to {values.abs().amax():.4g}, whose INT4 scale no float16 holds; "
            "use a precision without INT4"
        )
    if search == "max":
        return best
    least = _error(values, best, importance)
    for shrink in SHRINKS:
        for sign in (1,) if zero_points else (1, -1):
            tried = _ranged(shrink * low, shrink * high, zero_points, sign)
            error = _error(values, tried, importance)
            less = error < least
            least = torch.where(less, error, least)
            best = GroupScales(*(torch.where(less, *pair) for pair in zip(tried, best, strict=True)))
    return best


def _ranged(low: Tensor, high: Tensor, zero_points: bool, sign: int = 1) -> GroupScales:
    span = (high - low) / (CODES - 1) if zero_points else torch.maximum(-low, high) / ((CODES - 1) / 2)
    scales = torch.where(span > 0, span.clamp_min(SMALLEST_SCALE), 1.0).half()
    if not zero_points:
        return GroupScales(sign * scales, torch.full_like(low, MIDDLE))
    return GroupScales(scales, (-low / scales.float()).round_().clamp_(0, CODES - 1))


def _error(values: Tensor, chosen: GroupScales, importance: Tensor | None) -> Tensor:
    """Of each group, [N, G]; one that float16's scales do not hold is infinitely bad."""
    worth = nearest_codes(values, chosen).sub_(chosen.zeros[..., None]).mul_(chosen.scales.float()[..., None])
    errors = worth.sub_(values).square_()
    if importance is not None:
        errors.mul_(importance)
    return errors.sum(2).nan_to_num_(nan=torch.inf)
