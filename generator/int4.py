"""The geometry of packed INT4 weights, which specs, packing and memory counts share.

A packed weight is [N / 16, K / packed group, unit bytes]. A *unit* is a row tile (16 output columns) x one packed group
of K, contiguous, with the scales and zero points that it needs (docs/decode.md has the picture). The packed group is
the kernels' own: scales of a longer logical group are repeated, and so one kernel serves groups of any length, whole
rows, and a last group that is shorter.
"""

from __future__ import annotations

from math import gcd

from .errors import UnsupportedError
from .precision import CHANNEL

ROW_TILE = 16  # rows of a unit
SCALE_BYTES = 2  # of a row: float16
MAX_PACKED_GROUP = 128  # longer ones save half of 3 % of the bytes, and would be one more kernel
MIN_PACKED_GROUP = 32  # what one 32-bit word of each of a row's four lanes holds


def packed_group(k: int, group_size: int) -> int:
    """K of a unit: the largest of 128, 64 and 32 that divides the group and ``k``."""
    group = gcd(k, k if group_size == CHANNEL else group_size, MAX_PACKED_GROUP)
    if group < MIN_PACKED_GROUP:
        raise UnsupportedError(
            f"INT4 weights have in_features that are a multiple of {MIN_PACKED_GROUP}, not {k}: pad them with zeros"
        )
    return group


def unit_bytes(group_k: int, zero_points: bool) -> int:
    """Bytes of a unit: codes, 16 float16 scales, and 16 zero points of a byte each if there are any."""
    return ROW_TILE * group_k // 2 + ROW_TILE * SCALE_BYTES + ROW_TILE * zero_points


def packed_bytes(n: int, k: int, group_size: int, zero_points: bool) -> int:
    """Bytes of a packed weight [n, k]."""
    group = packed_group(k, group_size)
    return n * k // (ROW_TILE * group) * unit_bytes(group, zero_points)
