"""Correctness before timing: the two-times rule of the kernels' tests, told relative to the largest reference value.

allowed = rtol_factor x (what PyTorch in the storage type errs) + atol x max|reference|. A rival is held only to
``rival_tolerance``: enough to know that it computes the same function, whatever it rounds on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from futransformer.bench.case import Expected
from futransformer.generator.precision import E4M3, Precision
from futransformer.reference import allowed_error, largest_error

RIVAL_TOLERANCE = 0.05
E4M3_ROUNDING = 2.0**-4  # of one value


@dataclass(frozen=True)
class Verdict:
    """The output that came closest to its tolerance, or passed it; both relative to its largest reference value."""

    error: float
    tolerance: float

    @property
    def passed(self) -> bool:
        """Whether every output was within its tolerance; NaN is not."""
        return self.error <= self.tolerance


def judge(outputs: Sequence[Tensor], expected: Sequence[Expected], precision: Precision) -> Verdict:
    """Compare what ours wrote."""
    verdicts = []
    for actual, want in zip(outputs, expected, strict=True):
        scale = want.exact.float().abs().max().item()
        allowed = allowed_error(want.same_dtype, want.exact, precision)
        verdicts.append(Verdict(largest_error(actual, want.exact) / scale, allowed / scale))
    return max(verdicts, key=lambda verdict: verdict.error / verdict.tolerance)


def rival_tolerance(precision: Precision) -> float:
    """Of the largest reference value; in FP8 the rival rounds what it reads, for itself, and what it writes."""
    return RIVAL_TOLERANCE + (2 * E4M3_ROUNDING if precision.prefill == E4M3 else 0.0)


def judge_rival(outputs: Sequence[Tensor], expected: Sequence[Expected], precision: Precision) -> Verdict:
    """Compare what a rival wrote: as many of the outputs, in order, as it makes."""
    errors = [
        largest_error(actual, want.exact) / want.exact.float().abs().max().item()
        for actual, want in zip(outputs, expected, strict=False)
    ]
    return Verdict(max(errors), rival_tolerance(precision))


def poison(device: torch.device, *outputs: tuple[tuple[int, ...], torch.dtype]) -> None:
    """Leave NaN in freed memory of these shapes, which the allocator then gives to an op that makes its own outputs."""
    blocks = [torch.full(shape, torch.nan, dtype=dtype, device=device) for shape, dtype in outputs]
    del blocks
