"""How far a result is off where a maximum over everything would not notice; how far rounding takes an FP8 code."""

from __future__ import annotations

import torch
from torch import Tensor


def worst_block(actual: Tensor, want: Tensor) -> float:
    """The largest relative error of sixteen consecutive columns of a row; columns that fill no block are left out.

    Errors in stripes hide behind one absolute tolerance. A block of almost nothing is held to the mean block's size.
    """
    blocks, expected = (_blocks(tensor) for tensor in (actual, want))
    size = expected.norm(dim=1)
    relative = (blocks - expected).norm(dim=1) / size.clamp_min(1e-3 * size.mean())
    return float(relative.max())


def e4m3_step(codes: Tensor) -> Tensor:
    """The distance of the E4M3 codes on both sides of ``codes`` (float32, not rounded): 2^-3 of the power of two below,
    2^-9 from 2^-6 down.
    """
    exponent = torch.frexp(codes).exponent - 1
    return torch.ldexp(torch.ones_like(codes), exponent.clamp_min(-6) - 3)


def _blocks(tensor: Tensor) -> Tensor:
    rows = tensor.flatten(0, -2)
    return rows[:, : rows.shape[1] // 16 * 16].reshape(-1, 16)
