"""Numbers to FP8 (E4M3): the scale of a tensor, and weights as codes.

A code c stands for c x scale. E4M3 has three bits of mantissa, normal codes from 2^-6 to 448 and multiples of 2^-9
below; what lies beyond 448 saturates.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from futransformer.generator.errors import CheckpointError
from futransformer.generator.precision import E4M3_MAX, Granularity

# A value is multiplied by the rounded reciprocal of a rounded scale: without this the largest one could come out beyond
# 448 by three roundings of float32, and be counted as saturated.
ROUNDINGS = 1 + 2.0**-21
SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # whose reciprocal is finite


class Fp8Weight(NamedTuple):
    """A weight [N, K]: E4M3 codes, and what a code of 1 is worth, float32 [1] or, a row its own, [N]."""

    codes: Tensor
    scale: Tensor

    def to(self, device: torch.device) -> Fp8Weight:
        """The same weight on this device."""
        return Fp8Weight(self.codes.to(device), self.scale.to(device))

    def dequantise(self) -> Tensor:
        """W in float32: one rounding of it, for a scale has as many digits as that."""
        return self.codes.float().mul_(self.scale[:, None])


def scale_of(amax: Tensor) -> Tensor:
    """The scale by which this magnitude takes the largest code, float32. Of nothing but zeros it is 1."""
    fitting = (amax.float() * (ROUNDINGS / E4M3_MAX)).clamp_min(SMALLEST_SCALE)
    return torch.where(amax > 0, fitting, 1.0)


def codes_of(values: Tensor, scale: Tensor) -> Tensor:
    """E4M3 codes of values / scale: rounded to nearest even, saturated."""
    return (values.float() / scale).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def quantize_weight(name: str, weight: Tensor, granularity: Granularity) -> Fp8Weight:
    """Codes = round(W / scale) to nearest even, scale = ``scale_of`` max|W|, of the tensor or of each row.

    ``weight`` is logical, the gain of its norm folded in; ``name`` is what a refusal calls it.
    """
    amax = weight.abs().amax(1) if granularity == "channel" else weight.abs().amax().view(1)
    if not amax.isfinite().all():
        raise CheckpointError(
            f"{name} holds {int((~weight.isfinite()).sum())} values that are not finite, so it has no FP8 scale; "
            "fetch the checkpoint again"
        )
    scale = scale_of(amax)
    return Fp8Weight(codes_of(weight, scale[:, None]), scale)
