"""The precisions that kernels are generated for: one row each, read by specs, ops and tests.

A precision names four things: what the prefill GEMMs read, what the decode GEMMs read, what the KV cache holds,
and what the head reads; of FP8 also how weights are scaled and how products are summed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .errors import UnsupportedError


@dataclass(frozen=True)
class Element:
    """A storage type: its CUTLASS name, and the bits of one element."""

    name: str  # as in kernel names
    cutlass: str  # C++ type
    bits: int


BF16 = Element("bf16", "cutlass::bfloat16_t", 16)
E4M3 = Element("e4m3", "cutlass::float_e4m3_t", 8)

E4M3_MAX = 448.0  # conversions saturate here

# One scale for a whole weight, or one for each of its rows (output channels).
Granularity = Literal["tensor", "channel"]
# FP8 wgmma adds its products to about 14 bits. "fast" leaves a whole row of K to it; "promoted" adds up every 128 of K
# in float32 registers.
Accumulation = Literal["fast", "promoted"]


@dataclass(frozen=True)
class Precision:
    """Which element each phase of the model reads; ``weight_scales`` and ``accumulation`` are of FP8 GEMMs.

    ``atol`` and ``rtol_factor`` are the tolerance rule of the kernels' tests: the error against a float32 reference
    may be at most ``rtol_factor`` times that of PyTorch in the same element type, plus ``atol`` times the largest
    reference value (one unit in the last place of the output element).
    """

    name: str
    prefill: Element
    decode: Element
    kv: Element
    head: Element
    rtol_factor: float
    atol: float
    weight_scales: Granularity = "tensor"
    accumulation: Accumulation = "fast"


PRECISIONS: dict[str, Precision] = {
    "bf16": Precision("bf16", prefill=BF16, decode=BF16, kv=BF16, head=BF16, rtol_factor=2.0, atol=2.0**-8),
    # FP8 where a prompt is read, BF16 where tokens are generated.
    "fp8": Precision("fp8", prefill=E4M3, decode=BF16, kv=BF16, head=BF16, rtol_factor=2.0, atol=2.0**-8),
    # The same two over a KV cache of half the bytes (docs/notebook/kv_cache.md).
    "bf16-kv8": Precision("bf16-kv8", prefill=BF16, decode=BF16, kv=E4M3, head=BF16, rtol_factor=2.0, atol=2.0**-8),
    "fp8-kv8": Precision("fp8-kv8", prefill=E4M3, decode=BF16, kv=E4M3, head=BF16, rtol_factor=2.0, atol=2.0**-8),
    # FP8 prefill, slower by a fifth: its sums lose no more than float32's do, and every output channel has a scale.
    "fp8-promoted": Precision(
        "fp8-promoted",
        prefill=E4M3,
        decode=BF16,
        kv=BF16,
        head=BF16,
        rtol_factor=2.0,
        atol=2.0**-8,
        weight_scales="channel",
        accumulation="promoted",
    ),
}


def get_precision(name: str | Precision) -> Precision:
    """Look a precision up by name; UnsupportedError lists the rows that exist."""
    if isinstance(name, Precision):
        return name
    if name not in PRECISIONS:
        raise UnsupportedError(f"precision {name!r} is not implemented; choose one of: {', '.join(PRECISIONS)}")
    return PRECISIONS[name]
