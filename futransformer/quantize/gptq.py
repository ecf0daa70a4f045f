"""GPTQ: round a weight column by column, and let the columns that are left make up for the error of each.

Of operands X [samples, K] it minimises |X (W - Q)^T|^2 over weights Q of a grid, which needs nothing of X but its Gram
matrix X^T X [K, K] (Frantar et al., arXiv 2210.17323). What a grid is, E4M3 or integers with scales of groups, is the
grid's business.

The Gram matrix is float32, of products that are not rounded to TF32; its inverse is factorised in float64.
"""

from __future__ import annotations

import warnings
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from futransformer.quantize.fp8 import codes_of

BLOCK = 128  # columns that are finished before the columns behind them hear of their errors, by one product
# Added to the diagonal, of its mean; what a column must make up for is limited by it. The first at which the matrix can
# be factorised is taken.
DAMPENING = (0.01, 0.03, 0.1, 0.3, 1.0)


class Grid(Protocol):
    """Numbers that a weight [N, K] may take, some of which may depend on the columns before."""

    @property
    def group(self) -> int | None:
        """Columns that share scales, which are chosen when the first of them is reached; None: scales are fixed."""
        ...

    def begin(self, columns: Tensor) -> None:
        """Choose the scales of the next group from its columns [group, N], as earlier errors have changed them."""
        ...

    def round(self, column: Tensor) -> Tensor:
        """The nearest numbers to one column [N], float32."""
        ...


class Fp8Grid(NamedTuple):
    """E4M3 codes times a scale, [1] or, a row of the weight its own, [N]."""

    scale: Tensor
    group: int | None = None

    def begin(self, columns: Tensor) -> None:
        """Nothing: the scale is fixed."""

    def round(self, column: Tensor) -> Tensor:
        """See Grid.round."""
        return codes_of(column, self.scale).float().mul_(self.scale)


def gptq(weight: Tensor, gram: Tensor, grid: Grid, *, act_order: bool = False) -> Tensor:
    """Weights of the grid, float32 [N, K], for a weight [N, K] and the Gram matrix of its operands, float32 [K, K].

    ``act_order``: columns of the largest operands come first, and so are made up for by most others; of grids without
    groups. A column whose operands are all zero is rounded to nearest. Warns if the Gram matrix cannot be factorised
    at any dampening, and then rounds all to nearest.
    """
    assert not act_order or grid.group is None
    columns = weight.float().T.contiguous()  # [K, N]: a column is contiguous
    order = gram.diagonal().argsort(descending=True) if act_order else None
    if order is not None:
        columns, gram = columns[order], gram[order][:, order]
    factor = _factor(gram)
    if factor is None:
        warnings.warn("the Gram matrix of a weight's operands cannot be factorised: rounding to nearest", stacklevel=2)
        factor = torch.eye(len(gram), device=gram.device)
    rounded = _round_columns(columns, factor, grid)
    if order is not None:
        rounded = rounded[order.argsort()]
    return rounded.T.contiguous()


def _round_columns(columns: Tensor, factor: Tensor, grid: Grid) -> Tensor:
    """Round [K, N] in order, by the upper factor of the inverse; ``columns`` is overwritten."""
    rounded = torch.empty_like(columns)
    group, count = grid.group, len(columns)
    block = BLOCK if group is None else max(1, BLOCK // group) * group
    pivots: list[float] = factor.diagonal().tolist()
    for start in range(0, count, block):
        stop = min(start + block, count)
        errors = torch.empty_like(columns[start:stop])
        for index in range(start, stop):
            if group is not None and index % group == 0:
                grid.begin(columns[index : min(index + group, count)])
            rounded[index] = grid.round(columns[index])
            torch.sub(columns[index], rounded[index], out=errors[index - start])
            errors[index - start].div_(pivots[index])
            columns[index + 1 : stop].addr_(factor[index, index + 1 : stop], errors[index - start], alpha=-1)
        columns[stop:].addmm_(factor[start:stop, stop:].T, errors, alpha=-1)
    return rounded


def _factor(gram: Tensor) -> Tensor | None:
    """The upper Cholesky factor of the dampened matrix's inverse, float32; None if there is none."""
    diagonal = gram.diagonal()
    dead = diagonal == 0
    for share in DAMPENING:
        damped = gram.double()
        damped.diagonal().add_(share * diagonal.mean()).masked_fill_(dead, 1)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if failed:
            continue
        factor: Tensor
        factor, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
        if not failed and factor.isfinite().all():
            return factor.float()
    return None
