"""Gram matrices of what projections read, and how much each row counts in them.

Of FP8 weights rows count as they count in what follows: normalised ones alike, what o and down read times the rstd of
the stream that they have added to; and none for more than ``LOUDEST`` median rows. Else a first token's row, whose
values are the largest by far, would be all that there is to a matrix and its dampening. INT4 weights, which err far
more, are better off with every row as it is: KL divergence 0.060 and with rotations 0.046, for 0.068 and 0.050
(SmolLM2-135M, docs/quantize.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

ROWS = 4096  # of a Gram matrix's operands, in float32 at a time
LOUDEST = 4.0  # times the median of rows' sums of squares


def counted(operands: Tensor, row_weights: Tensor) -> Tensor:
    """``row_weights`` [T, 1] of operands [T, K], less where a row's is more than ``LOUDEST`` of the median's."""
    energy = (operands.float() * row_weights).square().sum(1, keepdim=True)
    quieter = (LOUDEST * energy.median() / energy).clamp_max_(1).sqrt_().nan_to_num_(1)  # a row of zeros is 0 / 0
    return row_weights * quieter


@contextmanager
def float32_products(*, by_tf32: bool = False) -> Iterator[None]:
    """Within it operands of float32 products are rounded to TF32, which is many times faster, or are not."""
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = by_tf32
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed


def gram_of(operands: Tensor, row_weights: Tensor | None = None, *, onto: Tensor | None = None) -> Tensor:
    """X^T X, float32 [K, K], of operands [T, K] whose rows are multiplied by ``row_weights`` [T, 1], if there are.

    ``onto``: added to it, in place. TF32 holds a BF16 number, so of those as they are it rounds nothing.
    """
    k = operands.shape[1]
    gram = torch.zeros(k, k, device=operands.device) if onto is None else onto
    with float32_products(by_tf32=operands.dtype == torch.bfloat16 and row_weights is None):
        for start in range(0, len(operands), ROWS):
            rows = operands[start : start + ROWS].float()
            if row_weights is not None:
                rows = rows * row_weights[start : start + ROWS]
            gram.addmm_(rows.T, rows)
    return gram
