"""Bytes of a decode weight as kernels read it, its scales included."""

from __future__ import annotations

from . import int4
from .precision import E4M3, INT4, Element, Precision

SCALE_BYTES = 4  # of a row of E4M3 codes: float32


def e4m3_bytes(n: int, k: int) -> int:
    """Of E4M3 codes [n, k], and the scale of every row behind all of them."""
    return n * (k + SCALE_BYTES)


def decode_bytes(element: Element, n: int, k: int, precision: Precision) -> int:
    """Of a weight [n, k] of this element; INT4 in the precision's groups."""
    if element == INT4:
        return int4.packed_bytes(n, k, precision.group_size, precision.zero_points)
    return e4m3_bytes(n, k) if element == E4M3 else n * k * element.bits // 8
