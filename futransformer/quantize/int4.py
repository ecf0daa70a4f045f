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

from futransformer.generator.errors import InputError
from futransformer.generator.precision import CHANNEL, GROUP_SIZES
from futransformer.quantize.int4_scales import MIDDLE, ScaleSearch, choose_scales, in_groups, nearest_codes


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


def round_to_nearest(
    name: str,
    weight: Tensor,
    group_size: int,
    *,
    zero_points: bool = False,
    search: ScaleSearch = "max",
    importance: Tensor | None = None,
) -> Int4Weight:
    """Codes = round(W / scale) + zero point, cut off at 0 and 15, by the scales of ``choose_scales``.

    ``importance`` of columns, float32 [K], is of a search for scales. ``name`` is what a refusal calls the weight: one
    that is not finite, or beyond float16's scales.
    """
    k = weight.shape[1]
    group = k if group_size == CHANNEL else group_size
    values = in_groups(weight.float(), group)
    columns = None if importance is None else in_groups(importance[None], group)[0]
    chosen = choose_scales(name, values, zero_points=zero_points, search=search, importance=columns)
    codes = nearest_codes(values, chosen)
    return Int4Weight(
        codes.to(torch.uint8).flatten(1)[:, :k].contiguous(),
        chosen.scales,
        chosen.zeros.to(torch.uint8) if zero_points else None,
        group_size,
    )


_SIZES = f"{', '.join(map(str, GROUP_SIZES))}, or all ({CHANNEL})"
