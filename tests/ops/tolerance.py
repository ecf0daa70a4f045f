"""How far a result is off where a maximum over everything would not notice."""

from __future__ import annotations

from torch import Tensor


def worst_block(actual: Tensor, want: Tensor) -> float:
    """The largest relative error of sixteen consecutive columns of a row; columns that fill no block are left out.

    Errors in stripes hide behind one absolute tolerance. A block of almost nothing is held to the mean block's size.
    """
    blocks, expected = (_blocks(tensor) for tensor in (actual, want))
    size = expected.norm(dim=1)
    relative = (blocks - expected).norm(dim=1) / size.clamp_min(1e-3 * size.mean())
    return float(relative.max())


def _blocks(tensor: Tensor) -> Tensor:
    rows = tensor.flatten(0, -2)
    return rows[:, : rows.shape[1] // 16 * 16].reshape(-1, 16)
