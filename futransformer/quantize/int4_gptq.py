"""INT4 weights by GPTQ: in the format of rounding to nearest, and never worse than it for the operands it is made for.

Rows of a weight err apart from one another, so each row keeps whichever codes cost it least: those of GPTQ, or the
nearest ones. ``refine`` then takes what that leaves and, group by group, moves the scale and one column's codes after
another to where the error is least while all else stays; no step makes it larger.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from futransformer.formats.codes import Groups
from futransformer.quantize.gptq import BLOCK, damp, gptq, squared_errors
from futransformer.quantize.gram import float32_products
from futransformer.quantize.int4 import Int4Weight, round_to_nearest
from futransformer.quantize.int4_scales import CODES, MIDDLE, ScaleSearch, choose_scales


@dataclass(frozen=True)
class Int4Method:
    """How weights become INT4 codes, beside their groups."""

    groups: Groups
    search: ScaleSearch = "max"
    # GPTQ takes the columns of the largest operands first, by the scales of rounding to nearest
    act_order: bool = False
    sweeps: int = 0  # of ``refine``, behind GPTQ


class RoundingErrors(NamedTuple):
    """Of each row of a weight, float32 [N], squared; X are its operands, dampened as GPTQ's are."""

    output: Tensor  # |X (w - q)^T|^2
    nearest: Tensor  # the same of the nearest codes
    whole: Tensor  # |X w^T|^2

    def of_rows(self, rows: slice) -> tuple[float, float]:
        """Of some rows together the relative errors |X (W - Q)^T| / |X W^T|, of their codes and of the nearest ones."""
        output, nearest, whole = (part[rows].double().sum() for part in self)
        return (output / whole).sqrt().nan_to_num().item(), (nearest / whole).sqrt().nan_to_num().item()


class Int4Grid:
    """INT4 codes of a weight [N, K]: scales of groups that are given, or chosen as GPTQ reaches them."""

    def __init__(self, name: str, like: Int4Weight, search: ScaleSearch, importance: Tensor, *, chosen: bool) -> None:
        """With the groups of ``like``, and, where they are ``chosen``, its scales.

        ``importance`` of columns, float32 [K], is of a search for scales; ``name`` is what a refusal calls the weight.
        """
        self.group = None if chosen else like.row_group
        self.scales = like.scales.T.contiguous()  # [G, N]: those of a group are contiguous
        self.zeros = None if like.zeros is None else like.zeros.T.contiguous()
        self._like = like
        self._name = name
        self._search = search
        self._importance = importance
        self._bounds: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def begin(self, columns: Tensor, first: int) -> None:
        """See Grid.begin."""
        importance = self._importance[None, first : first + len(columns)]
        values = columns.T[:, None].contiguous()
        chosen = choose_scales(
            self._name, values, zero_points=self.zeros is not None, search=self._search, importance=importance
        )
        index = first // self._like.row_group
        self.scales[index] = chosen.scales[:, 0]
        if self.zeros is not None:
            self.zeros[index] = chosen.zeros[:, 0].to(torch.uint8)
        self._bounds.pop(index, None)

    def round(self, column: Tensor, index: int) -> Tensor:
        """See Grid.round."""
        unit, low, high = self.bounds(index // self._like.row_group)
        return column.div(unit).round_().clamp_(low, high).mul_(unit)

    def bounds(self, group: int) -> tuple[Tensor, Tensor, Tensor]:
        """What a code of a group is worth, and the least and the greatest code less the zero point; float32 [N]."""
        if group not in self._bounds:
            unit = self.scales[group].float()
            zeros = torch.full_like(unit, MIDDLE) if self.zeros is None else self.zeros[group].float()
            self._bounds[group] = unit, -zeros, CODES - 1 - zeros
        return self._bounds[group]

    def rescale(self, group: int, scales: Tensor) -> None:
        """Give a group other scales, float16 [N]."""
        self.scales[group] = scales
        self._bounds.pop(group, None)

    def weight(self, values: Tensor) -> Int4Weight:
        """Values [N, K] of the grid as codes."""
        units, lows = (
            torch.stack([self.bounds(group)[part] for group in range(len(self.scales))], 1) for part in (0, 1)
        )
        like = self._like
        spread = [part.repeat_interleave(like.row_group, 1)[:, : values.shape[1]] for part in (units, lows)]
        codes = values.div(spread[0]).round_().sub_(spread[1]).to(torch.uint8)
        zeros = None if self.zeros is None else self.zeros.T.contiguous()
        return Int4Weight(codes, self.scales.T.contiguous(), zeros, like.group_size)


@float32_products()
def round_by_gptq(name: str, weight: Tensor, gram: Tensor, method: Int4Method) -> tuple[Int4Weight, RoundingErrors]:
    """Codes of a weight [N, K] for operands of this Gram matrix, float32 [K, K]; refusals call it ``name``."""
    weight = weight.float()
    damped = damp(gram, act_order=method.act_order, name=name)
    importance = damped.gram.diagonal()
    size, zero_points = method.groups
    nearest = round_to_nearest(name, weight, size, zero_points=zero_points, search=method.search, importance=importance)
    grid = Int4Grid(name, nearest, method.search, importance, chosen=method.act_order)
    found = grid.weight(gptq(weight, damped, grid))
    errors_of_nearest = squared_errors(weight - nearest.dequantise(), damped.gram)
    errors = squared_errors(weight - found.dequantise(), damped.gram)
    found = _rows_of(errors < errors_of_nearest, found, nearest)
    for _ in range(method.sweeps):
        found = refine(weight, damped.gram, found)
    final = squared_errors(weight - found.dequantise(), damped.gram)
    return found, RoundingErrors(final, errors_of_nearest, squared_errors(weight, damped.gram))


def refine(weight: Tensor, gram: Tensor, coded: Int4Weight) -> Int4Weight:
    """One sweep: of each group the scale, then the codes of its columns, to where the squared error is least.

    Q moves, column by column and while all others stay, to the value of the grid nearest to the minimum of a parabola,
    Q_k + (H (W - Q))_k / H_kk; a scale likewise, where float16 allows. Zero points stay.
    """
    grid = Int4Grid("", coded, "max", gram.diagonal(), chosen=True)
    columns, values = weight.T.contiguous(), coded.dequantise().T.contiguous()  # [K, N]
    slopes = gram @ (columns - values)
    curvatures: list[float] = gram.diagonal().tolist()
    for first in range(0, len(columns), coded.row_group):
        group = slice(first, min(first + coded.row_group, len(columns)))
        before = values[group].clone()
        among = gram[group, group]
        _move_scale(grid, first // coded.row_group, values[group], slopes[group], among)
        near = slopes[group] + among @ (before - values[group])
        for start in range(0, len(before), BLOCK):
            stop = min(start + BLOCK, len(before))
            moved = torch.empty_like(before[start:stop])
            for index in range(start, stop):
                column = values[first + index]
                rounded = grid.round(near[index].div(curvatures[first + index]).add_(column), first + index)
                torch.sub(column, rounded, out=moved[index - start])
                column.copy_(rounded)
                near[index + 1 : stop].addr_(among[index, index + 1 : stop], moved[index - start])
            near[stop:].addmm_(among[stop:, start:stop], moved)
        slopes.addmm_(gram[:, group], before - values[group])
    return grid.weight(values.T)


def _move_scale(grid: Int4Grid, group: int, values: Tensor, slopes: Tensor, gram: Tensor) -> None:
    """Move a group's scales to where the errors of rows are least, if float16 has a better one; ``values`` follow."""
    unit, _, _ = grid.bounds(group)
    codes = (values / unit).round_()
    slope, curvature = (codes * slopes).sum(0), (codes * (gram @ codes)).sum(0)
    scales = (unit + slope / curvature).half()
    step = scales.float() - unit
    better = (step * curvature - 2 * slope) * step < 0  # NaN, of codes that are all zero, is not; nor is infinity
    better &= scales != 0
    scales = torch.where(better, scales, unit.half())
    grid.rescale(group, scales)
    torch.mul(codes, scales.float(), out=values)


def _rows_of(these: Tensor, first: Int4Weight, second: Int4Weight) -> Int4Weight:
    """The rows of ``first`` where ``these``, bool [N], is true, and of ``second`` elsewhere."""
    pick = these[:, None]
    zeros = None
    if first.zeros is not None and second.zeros is not None:
        zeros = torch.where(pick, first.zeros, second.zeros)
    return Int4Weight(
        torch.where(pick, first.codes, second.codes),
        torch.where(pick, first.scales, second.scales),
        zeros,
        first.group_size,
    )
