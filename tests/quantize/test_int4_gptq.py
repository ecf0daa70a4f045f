"""INT4 by GPTQ: the textbook's codes, never a larger error than the nearest ones', and what sweeps leave of it."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

from futransformer.formats.codes import Groups
from futransformer.generator.errors import CheckpointError
from futransformer.generator.precision import CHANNEL, GROUP_SIZES
from futransformer.quantize.gptq import DAMPENING, damp, gptq
from futransformer.quantize.int4 import Int4Weight, round_to_nearest
from futransformer.quantize.int4_gptq import Int4Grid, Int4Method, refine, round_by_gptq
from futransformer.quantize.int4_scales import ScaleSearch

N, K, SAMPLES = 24, 200, 500  # 200 columns: a last group that is shorter, whatever its size
KINDS = [Groups(size, zero_points) for size in (*GROUP_SIZES, CHANNEL) for zero_points in (False, True)]
KINDS_BY_NAME = pytest.mark.parametrize("groups", KINDS, ids=str)


@pytest.fixture(scope="module")
def weight() -> Tensor:
    return torch.randn(N, K, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def gram() -> Tensor:
    """Of columns that have much in common, as those of a residual stream do."""
    generator = torch.Generator().manual_seed(1)
    few = torch.randn(SAMPLES, 20, generator=generator) @ torch.randn(20, K, generator=generator)
    operands = few + torch.randn(SAMPLES, K, generator=generator)
    return operands.T @ operands


def error(weight: Tensor, coded: Int4Weight, gram: Tensor) -> float:
    """|X (W - Q)^T|^2, in float64."""
    difference = (weight - coded.dequantise()).double()
    return (difference @ gram.double() * difference).sum().item()


def by_the_textbook(weight: Tensor, gram: Tensor, groups: Groups) -> Tensor:
    """Float64, a column at a time, what is left inverted anew each time, a group's scale from its updated columns."""
    left, rounded = weight.double(), torch.empty_like(weight)
    damped = gram.double() + DAMPENING[0] * gram.diagonal().double().mean() * torch.eye(K)
    size = K if groups.group_size == CHANNEL else groups.group_size
    for index in range(K):
        if index % size == 0:
            values = left[:, index : index + size].float()
            low, high = values.amin(1).clamp(max=0), values.amax(1).clamp(min=0)
            scale = ((high - low) / 15 if groups.zero_points else torch.maximum(-low, high) / 7.5).half().double()
            zero = (-low / scale).round().clamp(0, 15) if groups.zero_points else torch.full((N,), 8.0)
        code = ((left[:, index] / scale).round() + zero).clamp(0, 15)
        rounded[:, index] = (code - zero) * scale
        inverse = damped[index:, index:].inverse()
        step = (left[:, index] - rounded[:, index].double()) / inverse[0, 0]
        left[:, index:] -= torch.outer(step, inverse[0])
    return rounded


@KINDS_BY_NAME
def test_it_is_the_textbooks(weight: Tensor, gram: Tensor, groups: Groups) -> None:
    """But for sums in another order, which now and then fall on another side of the middle of two codes.

    From there on the row's columns differ, and with them a scale by a rounding of float16: by less than half a step.
    """
    damped = damp(gram)
    like = round_to_nearest("w", weight, groups.group_size, zero_points=groups.zero_points)
    grid = Int4Grid("w", like, "max", damped.gram.diagonal(), chosen=False)
    ours = grid.weight(gptq(weight, damped, grid))
    theirs = by_the_textbook(weight, gram, groups)
    step = ours.scales.float().repeat_interleave(ours.row_group, 1)[:, :K]
    assert ((ours.dequantise() - theirs).abs() > step / 2).float().mean() < 0.02
    difference = (weight - theirs).double()
    expected = (difference @ damped.gram.double() * difference).sum().item()
    assert error(weight, ours, damped.gram) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("search", ["max", "mse"])
@KINDS_BY_NAME
def test_no_row_errs_more_than_rounded_to_nearest(
    weight: Tensor, gram: Tensor, groups: Groups, search: ScaleSearch, act_order: bool
) -> None:
    """And all of them together far less: twenty directions hold nearly all of the operands."""
    coded, errors = round_by_gptq("w", weight, gram, Int4Method(groups, search, act_order))
    damped = damp(gram).gram
    nearest = round_to_nearest(
        "w", weight, groups.group_size, zero_points=groups.zero_points, search=search, importance=damped.diagonal()
    )
    assert coded.scales.shape == nearest.scales.shape
    assert (coded.zeros is not None) == groups.zero_points
    ours, theirs = ((weight - each.dequantise()).double() for each in (coded, nearest))
    by_row = [(each @ damped.double() * each).sum(1) for each in (ours, theirs)]
    assert (by_row[0] <= by_row[1] * (1 + 1e-5)).all()  # which is larger is decided in float32
    assert by_row[0].sum() < by_row[1].sum() / 4
    whole = (weight.double() @ damped.double() * weight).sum()
    relative = [(each.sum() / whole).sqrt().item() for each in by_row]
    assert errors.of_rows(slice(None)) == pytest.approx(relative, rel=1e-4)


def test_a_row_that_gptq_makes_worse_keeps_the_nearest_codes() -> None:
    """Operands that have nothing in common leave nothing to make up for; a last group of one column has no other."""
    weight = torch.randn(N, 65, generator=torch.Generator().manual_seed(2))
    gram = torch.diag(torch.linspace(1, 2, 65))
    coded, errors = round_by_gptq("w", weight, gram, Int4Method(Groups(64, zero_points=False)))
    nearest = round_to_nearest("w", weight, 64)
    assert torch.equal(coded.codes, nearest.codes)
    assert torch.equal(coded.scales, nearest.scales)
    assert torch.equal(errors.output, errors.nearest)


@KINDS_BY_NAME
def test_a_sweep_lessens_the_error(weight: Tensor, gram: Tensor, groups: Groups) -> None:
    """Every row's, or leaves it; what one more sweep finds is less, and in the end there is nothing to find."""
    damped = damp(gram).gram
    method = Int4Method(groups)
    coded, _ = round_by_gptq("w", weight, gram, method)
    errors = [error(weight, coded, damped)]
    for _ in range(3):
        again = refine(weight, damped, coded)
        rows = [((weight - each.dequantise()).double() @ damped.double() * (weight - each.dequantise())).sum(1)
                for each in (coded, again)]  # fmt: skip
        assert (rows[1] <= rows[0] * (1 + 1e-5)).all()
        coded = again
        errors.append(error(weight, coded, damped))
    assert errors[1] < 0.97 * errors[0]
    assert errors[0] - errors[1] > errors[2] - errors[3] >= 0
    swept, _ = round_by_gptq("w", weight, gram, Int4Method(groups, sweeps=3))
    assert torch.equal(swept.codes, coded.codes)
    assert torch.equal(swept.scales, coded.scales)


def test_act_order_takes_the_largest_operands_first(weight: Tensor, gram: Tensor) -> None:
    """Its scales are those of the weight as it was, so nothing changes at run time: groups are runs of columns."""
    sizes = torch.logspace(0, 2, K)[torch.randperm(K, generator=torch.Generator().manual_seed(3))]
    uneven = gram * sizes[:, None] * sizes
    errors = {}
    for act_order in (False, True):
        coded, errors[act_order] = round_by_gptq(
            "w", weight, uneven, Int4Method(Groups(64, False), act_order=act_order)
        )
        fixed = torch.equal(coded.scales, round_to_nearest("w", weight, 64).scales)
        assert fixed == act_order
    assert errors[True].output.sum() < errors[False].output.sum()


def test_columns_without_operands_are_rounded_to_nearest(weight: Tensor, gram: Tensor) -> None:
    """Whatever they are: the text says nothing of them."""
    silent = gram.clone()
    silent[[3, 150]] = 0
    silent[:, [3, 150]] = 0
    coded, _ = round_by_gptq("w", weight, silent, Int4Method(Groups(CHANNEL, False), act_order=True))
    nearest = round_to_nearest("w", weight, CHANNEL)
    assert torch.equal(coded.codes[:, [3, 150]], nearest.codes[:, [3, 150]])


def test_fewer_rows_than_columns_will_do(weight: Tensor) -> None:
    operands = torch.randn(10, K, generator=torch.Generator().manual_seed(4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, errors = round_by_gptq("w", weight, operands.T @ operands, Int4Method(Groups(64, False), sweeps=1))
    assert errors.output.sum() < errors.nearest.sum() / 4


def test_a_matrix_that_has_no_factor_is_warned_about(weight: Tensor) -> None:
    with pytest.warns(UserWarning, match="layer 0, o: the Gram matrix of its operands cannot be factorised"):
        coded, _ = round_by_gptq("layer 0, o", weight, torch.full((K, K), torch.nan), Int4Method(Groups(64, False)))
    assert torch.equal(coded.codes, round_to_nearest("w", weight, 64).codes)


def test_a_weight_that_is_not_finite_is_refused(weight: Tensor, gram: Tensor) -> None:
    broken = weight.clone()
    broken[2, 5] = torch.nan
    with pytest.raises(CheckpointError, match="layer 0, o holds 1 values that are not finite"):
        round_by_gptq("layer 0, o", broken, gram, Int4Method(Groups(64, False)))


@pytest.mark.parametrize("zero_points", [False, True])
def test_a_search_finds_scales_of_less_error(zero_points: bool) -> None:
    """Of no group a larger one; and less where it matters, if some columns matter and others do not."""
    weight = torch.randn(N, 256, generator=torch.Generator().manual_seed(5))
    weight[:, 7] *= 8
    importance = torch.ones(256)
    importance[7] = 1e-3
    searches: list[tuple[ScaleSearch, Tensor | None]] = [("max", None), ("mse", None), ("mse", importance)]
    by_max, by_mse, weighted = (
        (weight - each.dequantise()).square()
        for each in (
            round_to_nearest("w", weight, 128, zero_points=zero_points, search=search, importance=given)
            for search, given in searches
        )
    )
    groups = [errors.view(N, 2, 128).sum(2) for errors in (by_max, by_mse)]
    assert (groups[1] <= groups[0]).all()
    assert by_mse.sum() < 0.95 * by_max.sum()
    assert (weighted * importance).sum() < 0.9 * (by_mse * importance).sum()


def test_a_symmetric_search_may_turn_the_scale_around() -> None:
    """There is a code for -8 and none for 8: a group whose largest value is positive wants it negative."""
    weight = torch.arange(-7.0, 9.0).repeat(1, 4)
    coded = round_to_nearest("w", torch.cat((weight, -weight)), 64, search="mse")
    assert (coded.scales[0] < 0).all()
    assert (coded.scales[1] > 0).all()
    assert (coded.dequantise() - torch.cat((weight, -weight))).abs().max() < 0.03  # a range of 8.04 is nearest to 8
