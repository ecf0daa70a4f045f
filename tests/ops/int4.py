"""What the kernels of INT4 weights for up to eight sequences make of x before they multiply."""

from __future__ import annotations

import torch
from torch import Tensor

SPLIT_BATCH = 8  # sequences of the kernels that multiply integers
INTEGER_BITS = 13  # the largest x of a group lies in [2^13, 2^14) integers
SMALLEST_POWER = 2.0**-113  # of two, that a group's largest x is taken for


def as_integers(x: Tensor, group_k: int) -> Tensor:
    """x [rows, K], each group of a row rounded to integers times a power of two: float32.

    Values above a 64th of the group's largest keep all eight bits of BF16; the others are off by at most 2^-14 of it.
    """
    groups = x.float().view(x.shape[0], -1, group_k)
    largest = groups.abs().amax(2, keepdim=True)
    power = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent - 1).clamp_min(SMALLEST_POWER)
    unit = power * 2.0**-INTEGER_BITS
    return ((groups / unit).round() * unit).view(x.shape)
