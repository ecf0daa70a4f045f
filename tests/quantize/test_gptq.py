"""GPTQ against the textbook's way, on grids of codes and of groups; and all weights of a model in one reading."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from futransformer.quantize.fp8 import codes_of, quantize_weight, scale_of
from futransformer.quantize.gptq import DAMPENING, Fp8Grid, Grid, damp, gptq

N, K, SAMPLES = 24, 200, 500  # two blocks, the second one short


@pytest.fixture(scope="module")
def weight() -> Tensor:
    return torch.randn(N, K, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def operands() -> Tensor:
    """Columns that have much in common, as those of a residual stream do."""
    generator = torch.Generator().manual_seed(1)
    few = torch.randn(SAMPLES, 20, generator=generator) @ torch.randn(20, K, generator=generator)
    return few + torch.randn(SAMPLES, K, generator=generator)


def fp8_grid(weight: Tensor) -> Fp8Grid:
    return Fp8Grid(scale_of(weight.abs().amax()).view(1))


def to_nearest(weight: Tensor, grid: Grid) -> Tensor:
    return torch.stack([grid.round(column, index) for index, column in enumerate(weight.T)], 1)


def textbook(weight: Tensor, gram: Tensor, grid: Grid) -> Tensor:
    """One column at a time, and the inverse of what is left anew each time; float64."""
    left, rounded = weight.double(), []
    damped = gram.double() + DAMPENING[0] * gram.diagonal().double().mean() * torch.eye(len(gram))
    for index in range(len(gram)):
        inverse = damped[index:, index:].inverse()
        nearest = grid.round(left[:, index].float(), index).double()
        error = (left[:, index] - nearest) / inverse[0, 0]
        left[:, index:] -= torch.outer(error, inverse[0])
        rounded.append(nearest.float())
    return torch.stack(rounded, 1)


def output_error(weight: Tensor, rounded: Tensor, operands: Tensor) -> float:
    return (operands @ (weight - rounded).T).square().mean().item()


def test_it_is_the_textbooks(weight: Tensor, operands: Tensor) -> None:
    """But for sums in another order, which now and then fall on another side of the middle of two codes."""
    grid, gram = fp8_grid(weight), operands.T @ operands
    ours, theirs = gptq(weight, damp(gram), grid), textbook(weight, gram, grid)
    assert (ours != theirs).float().mean() < 0.02
    assert output_error(weight, ours, operands) == pytest.approx(output_error(weight, theirs, operands), rel=0.02)


def test_it_errs_less_than_rounding_to_nearest(weight: Tensor, operands: Tensor) -> None:
    """Twenty directions hold nearly all of the operands, and 200 columns can spare them."""
    grid, gram = fp8_grid(weight), operands.T @ operands
    nearest = output_error(weight, to_nearest(weight, grid), operands)
    by_gptq = gptq(weight, damp(gram), grid)
    assert output_error(weight, by_gptq, operands) < nearest / 4
    codes = codes_of(by_gptq, grid.scale)
    assert torch.equal(codes.float() * grid.scale, by_gptq), "what comes out must be codes times the scale"
    ordered = gptq(weight, damp(gram, act_order=True), grid)
    assert output_error(weight, ordered, operands) < nearest / 4
    assert not torch.equal(ordered, by_gptq)


def test_columns_that_have_nothing_in_common_are_rounded_to_nearest(weight: Tensor) -> None:
    grid = fp8_grid(weight)
    assert torch.equal(gptq(weight, damp(torch.eye(K)), grid), to_nearest(weight, grid))


def test_a_column_without_operands_is_rounded_to_nearest(weight: Tensor, operands: Tensor) -> None:
    silent = operands.clone()
    silent[:, [3, 150]] = 0
    grid = fp8_grid(weight)
    rounded = gptq(weight, damp(silent.T @ silent), grid)
    assert torch.equal(rounded[:, [3, 150]], to_nearest(weight, grid)[:, [3, 150]])
    others = [column for column in range(K) if column not in (3, 150)]
    smaller = gptq(weight[:, others], damp(operands[:, others].T @ operands[:, others]), grid)
    assert output_error(weight[:, others], rounded[:, others], operands[:, others]) == pytest.approx(
        output_error(weight[:, others], smaller, operands[:, others]), rel=0.2
    )


def test_fewer_samples_than_columns_will_do(weight: Tensor, operands: Tensor) -> None:
    few = operands[:50]
    grid = fp8_grid(weight)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rounded = gptq(weight, damp(few.T @ few), grid)
    assert output_error(weight, rounded, few) < output_error(weight, to_nearest(weight, grid), few)


def test_a_matrix_that_has_no_factor_is_warned_about(weight: Tensor) -> None:
    grid = fp8_grid(weight)
    with pytest.warns(UserWarning, match="cannot be factorised: rounding to nearest"):
        rounded = gptq(weight, damp(torch.full((K, K), torch.nan)), grid)
    assert torch.equal(rounded, to_nearest(weight, grid))


def test_a_matrix_that_rounding_made_indefinite_is_dampened_more(weight: Tensor, operands: Tensor) -> None:
    gram = operands.T @ operands
    gram -= 0.02 * gram.diagonal().mean() * torch.eye(K)
    smallest = torch.linalg.eigvalsh(gram.double())[0] / gram.diagonal().mean()
    assert -DAMPENING[1] < smallest < -DAMPENING[0], "the first dampening must not do, and the second must"
    grid = fp8_grid(weight)
    rounded = gptq(weight, damp(gram), grid)
    assert output_error(weight, rounded, operands) < output_error(weight, to_nearest(weight, grid), operands)


@dataclass
class FourBits:
    """Sixteen values with a scale for each row and group."""

    group: int = 48  # of which two are a block of 96
    scales: list[Tensor] = field(default_factory=list)
    seen: list[Tensor] = field(default_factory=list)

    def begin(self, columns: Tensor, first: int) -> None:
        self.seen.append(columns.clone())
        self.scales.append(columns.abs().amax(0) / 7)

    def round(self, column: Tensor, index: int) -> Tensor:
        scale = self.scales[-1]
        return (column / scale).round().clamp(-8, 7) * scale


def test_groups_take_their_scales_from_columns_as_they_have_become(weight: Tensor, operands: Tensor) -> None:
    grid = FourBits()
    rounded = gptq(weight, damp(operands.T @ operands), grid)
    assert [len(columns) for columns in grid.seen] == [48, 48, 48, 48, 8]
    assert torch.equal(grid.seen[0], weight.T[:48])
    for index, columns in enumerate(grid.seen[1:], 1):
        assert not torch.equal(columns, weight.T[48 * index : 48 * index + 48])
    nearest = torch.empty_like(weight)
    for start in range(0, K, 48):
        group = FourBits()
        group.begin(weight.T[start : start + 48], start)
        nearest[:, start : start + 48] = to_nearest(weight[:, start : start + 48], group)
    assert output_error(weight, rounded, operands) < output_error(weight, nearest, operands) / 4


@pytest.mark.parametrize("granularity", ["tensor", "channel"])
def test_scales_of_rows_are_served(weight: Tensor, operands: Tensor, granularity: str) -> None:
    rows = weight * torch.logspace(-3, 3, N)[:, None]
    scale = quantize_weight("w", rows, granularity).scale  # type: ignore[arg-type]
    rounded = gptq(rows, damp(operands.T @ operands), Fp8Grid(scale))
    assert torch.equal(codes_of(rounded, scale[:, None]).float() * scale[:, None], rounded)
    errors = (operands @ (rows - rounded).T).square().mean(0).sqrt() / (operands @ rows.T).square().mean(0).sqrt()
    assert (errors < 0.02).all() == (granularity == "channel")
