"""FP8 operands and results as the tests make and judge them."""

from __future__ import annotations

import torch
from torch import Tensor

from futransformer.generator.precision import E4M3_MAX
from futransformer.ops.interface import Fp8Output
from futransformer.quantize.fp8 import codes_of

E4M3_ROUNDING = 2.0**-4  # relative, of a code that is not below 2^-6
EARLIER_AMAX, EARLIER_COUNT = 2.0**-9, 7  # what calls before have left: results raise it
UNBOUNDED = 2.0**20


def quantised(values: Tensor, *, by_row: bool = False) -> tuple[Tensor, Tensor]:
    """E4M3 codes of ``values`` [N, K], and what a code of 1 is worth: float32 [1], or [N] for its rows."""
    largest = values.float().abs().amax(1) if by_row else values.float().abs().max()[None]
    scale = largest / E4M3_MAX
    return (values.float() / scale[:, None]).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale


# What codes of K and of V are worth: no power of two, and each its own; 448 of them are about 5 and 3.
KV_SCALE = (0.011, 0.007)


def stored_kv(values: Tensor, kv_scale: Tensor | None, part: int) -> Tensor:
    """K (part 0) or V (1) as pages hold them: BF16, or codes."""
    return values.bfloat16() if kv_scale is None else codes_of(values, kv_scale[part])


def worth_of_kv(pages: Tensor, kv_scale: Tensor | None, part: int) -> Tensor:
    """What stored K (part 0) or V (1) is worth."""
    return pages if kv_scale is None else pages.float() * kv_scale[part]


def fp8_output(scale: Tensor) -> Fp8Output:
    """How a result is written at ``scale`` [1], after calls that have written something small, and saturated it."""
    saturated = torch.full_like(scale, EARLIER_COUNT, dtype=torch.int32)
    return Fp8Output(scale, torch.full_like(scale, EARLIER_AMAX), saturated)


def unbounded(scale: Tensor) -> Tensor:
    """Where nothing saturates: the reference's codes at it, x UNBOUNDED, are those of ``scale``, not cut off."""
    return scale * UNBOUNDED


def check_fp8_statistics(fp8: Fp8Output, codes: Tensor, tolerance: float = 0.0) -> None:
    """Hold ``fp8``'s maximum to a relative ``tolerance``, and its count to the values farther than that from 448.

    ``codes`` are the exact ones, neither rounded nor cut off; of all that was written since ``fp8_output``.
    """
    magnitude = codes.abs().nan_to_num(0, torch.inf)
    amax, most = float(fp8.amax), max(float(magnitude.max() * fp8.scale), EARLIER_AMAX)
    assert abs(amax - most) <= tolerance * most, f"amax is {amax:.6e}, not {most:.6e}"
    least, highest = (int((magnitude > E4M3_MAX * (1 + sign * tolerance)).sum()) for sign in (1, -1))
    count = int(fp8.saturated) - EARLIER_COUNT
    assert least <= count <= highest, f"{count} values are counted as saturated, not {least} to {highest}"
