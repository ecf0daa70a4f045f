"""GPTQ: round a weight column by column, and let the columns that are left make up for the error of each.

Of operands X [samples, K] it minimises |X (W - Q)^T|^2 over weights Q of a grid, which needs nothing of X but its Gram
matrix X^T X [K, K] (Frantar et al., arXiv 2210.17323). What a grid is, E4M3 or integers with scales of groups, is the
grid's business.

The Gram matrix is float32, of products whose operands are not rounded; its inverse is factorised in float64.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
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

    def begin(self, columns: Tensor, first: int) -> None:
        """Choose the scales of the group from column ``first`` on, [group, N], as earlier errors have changed it."""
        ...

    def round(self, column: Tensor, index: int) -> Tensor:
        """The nearest numbers to column ``index`` of the weight, float32 [N]."""
        ...


class Fp8Grid(NamedTuple):
    """E4M3 codes times a scale, [1] or, a row of the weight its own, [N]."""

    scale: Tensor
    group: int | None = None

    def begin(self, columns: Tensor, first: int) -> None:
        """Nothing: the scale is fixed."""

    def round(self, column: Tensor, index: int) -> Tensor:
        """See Grid.round."""
        return codes_of(column, self.scale).float().mul_(self.scale)


class Damped(NamedTuple):
    """A Gram matrix that can be factorised, and how: what GPTQ goes by."""

    gram: Tensor  # float32 [K, K], in the order of the weight's columns
    factor: Tensor  # float32 [K, K]: the upper Cholesky factor of its inverse, in the order of rounding
    order: Tensor | None  # int64 [K]: the column that is rounded first, and so on; None: as they stand


def damp(gram: Tensor, *, act_order: bool = False, name: str = "a weight") -> Damped:
    """Add the least of ``DAMPENING`` with which ``gram`` can be factorised; columns without operands get 1.

    ``act_order``: columns of the largest operands are to come first, and so are made up for by most others. Where no
    dampening does it warns, of ``name``, and gives the identity, by which GPTQ rounds to nearest.
    """
    diagonal = gram.diagonal()
    order = diagonal.argsort(descending=True, stable=True) if act_order else None
    for share in DAMPENING:
        damped = gram.double()
        damped.diagonal().add_(share * diagonal.mean()).masked_fill_(diagonal == 0, 1)
        # Turned around it is L L^T, and its inverse's upper factor L^-1 turned around: no inverse is factorised again.
        lower, failed = torch.linalg.cholesky_ex((damped if order is None else damped[order][:, order]).flip(0, 1))
        if failed:
            continue
        identity = torch.eye(len(gram), dtype=torch.float64, device=gram.device)
        factor = torch.linalg.solve_triangular(lower, identity, upper=False).flip(0, 1)
        if factor.isfinite().all():
            return Damped(damped.float(), factor.float(), order)
    warnings.warn(f"{name}: the Gram matrix of its operands cannot be factorised: rounding to nearest", stacklevel=2)
    identity = torch.eye(len(gram), device=gram.device)
    return Damped(identity, identity, None)


def gptq(weight: Tensor, damped: Damped, grid: Grid) -> Tensor:
    """Weights of the grid, float32 [N, K], for a weight [N, K]. A grid of groups needs the columns as they stand.

    A column whose operands are all zero is rounded to nearest.
    """
    assert damped.order is None or grid.group is None
    columns = weight.float().T.contiguous()  # [K, N]: a column is contiguous
    if damped.order is None:
        return _round_columns(columns, damped.factor, grid, range(len(columns))).T.contiguous()
    rounded = _round_columns(columns[damped.order], damped.factor, grid, damped.order.tolist())
    return rounded[damped.order.argsort()].T.contiguous()


def _round_columns(columns: Tensor, factor: Tensor, grid: Grid, names: Sequence[int]) -> Tensor:
    """Round [K, N], overwritten, in order by the upper factor of the inverse; ``names``: columns of the weight."""
    rounded = torch.empty_like(columns)
    group, count = grid.group, len(columns)
    # A group begins where a block does, unless a block holds whole ones: its columns must have heard of all before it.
    aligned = group is None or group % BLOCK == 0 or group >= count
    block = BLOCK if group is None or aligned else max(1, BLOCK // group) * group
    pivots: list[float] = factor.diagonal().tolist()
    for start in range(0, count, block):
        stop = min(start + block, count)
        errors = torch.empty_like(columns[start:stop])
        for index in range(start, stop):
            if group is not None and index % group == 0:
                grid.begin(columns[index : min(index + group, count)], index)
            rounded[index] = grid.round(columns[index], names[index])
            torch.sub(columns[index], rounded[index], out=errors[index - start])
            errors[index - start].div_(pivots[index])
            columns[index + 1 : stop].addr_(factor[index, index + 1 : stop], errors[index - start], alpha=-1)
        columns[stop:].addmm_(factor[start:stop, stop:].T, errors, alpha=-1)
    return rounded


def squared_errors(difference: Tensor, gram: Tensor) -> Tensor:
    """|X d^T|^2 of each row d of [N, K], from the Gram matrix of X; float32 [N]."""
    return (difference @ gram).mul_(difference).sum(1)
