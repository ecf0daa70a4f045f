"""Weights to INT4 codes with a scale for each group of a row, and back.

    W[n, k] = scales[n, k // g] * (codes[n, k] - zeros[n, k // g])

with codes 0 .. 15 and g the group size; symmetric weights have no zeros, and 8 in their place. The last group of a row
is shorter where K is no multiple of g.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from futransformer.generator.errors import CheckpointError, InputError
from futransformer.generator.precision import CHANNEL, GROUP_SIZES

CODES = 16
MIDDLE = 8  # the zero point of symmetric codes
SMALLEST_SCALE = 2.0**-24  # of float16; a group that would need less becomes zeros, and is off by at most half of it


@dataclass(frozen=True)
class Int4Weight:
    """A logical weight [N, K] as INT4 codes; G = ceil(K / group size) groups a row."""

    codes: Tensor  # uint8 [N, K], 0 .. 15
    scales: Tensor  # float16 [N, G]
    zeros: Tensor | None  # uint8 [N, G], 0 .. 15; None: 8
    group_size: int  # one of GROUP_SIZES, or CHANNEL

    def __post_init__(self) -> None:
        if self.group_size not in (*GROUP_SIZES, CHANNEL):
            raise InputError(f"groups of INT4 weights have {_SIZES} of a row's values, not {self.group_size}")
        shape = self.codes.shape[0], -(-self.codes.shape[1] // self.row_group)
        for name, tensor, dtype, wanted in (
            ("codes", self.codes, torch.uint8, tuple(self.codes.shape)),
            ("scales", self.scales, torch.float16, shape),
            ("zeros", self.zeros, torch.uint8, shape),
        ):
            if tensor is not None and (tensor.dtype != dtype or tensor.shape != wanted):
                raise InputError(
                    f"{name} of an INT4 weight {list(self.codes.shape)} in groups of {self.row_group} are {dtype} "
                    f"{list(wanted)}, not {tensor.dtype} {list(tensor.shape)}"
                )

    @property
    def row_group(self) -> int:
        """Values of a row that share a scale."""
        return self.codes.shape[1] if self.group_size == CHANNEL else self.group_size

    def to(self, device: torch.device) -> Int4Weight:
        """The same weight on this device."""
        zeros = None if self.zeros is None else self.zeros.to(device)
        return Int4Weight(self.codes.to(device), self.scales.to(device), zeros, self.group_size)

    def map_rows(self, order: Callable[[Tensor], Tensor]) -> Int4Weight:
        """The weight whose rows are those that ``order`` makes of a tensor [N, ...]."""
        zeros = None if self.zeros is None else order(self.zeros)
        return Int4Weight(order(self.codes), order(self.scales), zeros, self.group_size)

    @staticmethod
    def cat(weights: Iterable[Int4Weight]) -> Int4Weight:
        """The rows of several weights of the same groups, one after another."""
        first, *others = weights
        every = [first, *others]
        zeros = [weight.zeros for weight in every if weight.zeros is not None]
        return Int4Weight(
            torch.cat([weight.codes for weight in every]),
            torch.cat([weight.scales for weight in every]),
            torch.cat(zeros) if zeros else None,
            first.group_size,
        )

    def dequantise(self) -> Tensor:
        """W in float32, exactly: a scale has 11 bits and a code less its zero point four."""
        zeros = MIDDLE if self.zeros is None else self._of_each_value(self.zeros).float()
        return (self.codes.float() - zeros).mul_(self._of_each_value(self.scales))

    def _of_each_value(self, groups: Tensor) -> Tensor:
        return groups.repeat_interleave(self.row_group, 1)[:, : self.codes.shape[1]]


def round_to_nearest(name: str, weight: Tensor, group_size: int, *, zero_points: bool = False) -> Int4Weight:
    """Codes = round(W / scale) + zero point, cut off at 0 and 15; the scale is rounded to float16 first.

    Symmetric: scale = max|W| / 7.5 of the group, so that neither end is off by more than half a scale. With zero
    points: scale = (max - min) / 15 of the group and zero, zero point = round(-min / scale). Of nothing but zeros a
    scale is 1. ``name`` is what a refusal calls the weight: one that is not finite, or beyond float16's scales.
    """
    n, k = weight.shape
    group = k if group_size == CHANNEL else group_size
    values = F.pad(weight.float(), (0, -k % group)).view(n, -1, group)  # zeros change no group's range
    low, high = values.amin(2).clamp_max_(0), values.amax(2).clamp_min_(0)
    if not (low.isfinite() & high.isfinite()).all():
        raise CheckpointError(
            f"{name} holds {int((~values.isfinite()).sum())} values that are not finite, so it has no INT4 scales; "
            "fetch the checkpoint again"
        )
    span = (high - low) / (CODES - 1) if zero_points else torch.maximum(-low, high) / ((CODES - 1) / 2)
    scales = torch.where(span > 0, span.clamp_min(SMALLEST_SCALE), 1.0).half()
    if scales.isinf().any():
        raise CheckpointError(
            f"{name} has magnitudes up to {values.abs().amax():.4g}, whose INT4 scale no float16 holds; "
            "use a precision without INT4"
        )
    unit = scales.float()[..., None]
    zeros = (-low / unit[..., 0]).round_().clamp_(0, CODES - 1) if zero_points else torch.full_like(low, MIDDLE)
    codes = (values / unit).round_().add_(zeros[..., None]).clamp_(0, CODES - 1)
    return Int4Weight(
        codes.to(torch.uint8).view(n, -1)[:, :k].contiguous(),
        scales,
        zeros.to(torch.uint8) if zero_points else None,
        group_size,
    )


_SIZES = f"{', '.join(map(str, GROUP_SIZES))}, or all ({CHANNEL})"
