"""Weights as INT4 codes: every code the nearest, every scale by the rule, dequantised exactly, and refusals."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from futransformer.generator.errors import CheckpointError, InputError
from futransformer.generator.precision import CHANNEL, GROUP_SIZES
from futransformer.quantize.int4 import Int4Weight, round_to_nearest
from futransformer.quantize.int4_scales import SMALLEST_SCALE

GROUPS = [*GROUP_SIZES, CHANNEL]


def weight(rows: int = 48, columns: int = 576) -> Tensor:
    """BF16 rows of very different sizes; 576 columns are no multiple of 128, nor of 256."""
    generator = torch.Generator().manual_seed(3)
    sizes = 2.0 ** torch.randint(-12, 3, (rows, 1), generator=generator)
    return (torch.randn(rows, columns, generator=generator) * sizes).bfloat16()


def groups_of(values: Tensor, group_size: int) -> list[Tensor]:
    """The groups of a row, the last one shorter."""
    return list(torch.split(values, values.shape[1] if group_size == CHANNEL else group_size, 1))


@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize("group_size", GROUPS)
def test_every_code_is_the_nearest(group_size: int, zero_points: bool) -> None:
    original = weight()
    quantised = round_to_nearest("w", original, group_size, zero_points=zero_points)
    assert (quantised.zeros is None) == (not zero_points)
    restored = groups_of(quantised.dequantise().double(), group_size)
    for index, (values, ours) in enumerate(zip(groups_of(original.double(), group_size), restored, strict=True)):
        zeros = 8 if quantised.zeros is None else quantised.zeros[:, index, None, None].double()
        grid = (torch.arange(16.0, dtype=torch.float64) - zeros) * quantised.scales[:, index, None, None].double()
        nearest = (values[..., None] - grid).abs().amin(2)
        assert ((values - ours).abs() <= nearest + 2.0**-22 * values.abs()).all()  # the division is float32's


@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize("group_size", GROUPS)
def test_no_value_is_off_by_more_than_half_a_scale(group_size: int, zero_points: bool) -> None:
    """But for the rounding of the scale: 2^-11 of up to 15 of them at the end of the grid."""
    original = weight()
    quantised = round_to_nearest("w", original, group_size, zero_points=zero_points)
    errors = groups_of((original.float() - quantised.dequantise()).abs(), group_size)
    for index, error in enumerate(errors):
        assert (error <= quantised.scales[:, index, None].float() * (0.5 + 15 * 2.0**-11)).all()


@pytest.mark.parametrize("zero_points", [False, True])
def test_values_of_the_grid_come_back_as_they_are(zero_points: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    codes = torch.randint(0, 16, (16, 64), generator=generator)
    codes[:, ::32], codes[:, 1::32] = 0, 15  # every group has both ends
    zeros = torch.randint(0, 16, (16, 2), generator=generator) if zero_points else torch.full((16, 2), 8)
    scales = 2.0 ** torch.randint(-9, 2, (16, 2), generator=generator)
    spread = [tensor.repeat_interleave(32, 1) for tensor in (zeros, scales)]
    values = (codes - spread[0]) * spread[1]
    quantised = round_to_nearest("w", values, 32, zero_points=zero_points)
    if zero_points:
        assert torch.equal(quantised.dequantise(), values.float())
        assert torch.equal(quantised.codes, codes.to(torch.uint8))
    else:  # the scale is 8 / 7.5 of it: both ends of a symmetric grid are half a scale off
        assert torch.equal(quantised.scales.float(), (8 / 7.5 * scales).half().float())


def test_a_group_of_zeros_stays_zero_and_a_tiny_one_becomes_zero() -> None:
    values = torch.zeros(3, 64)
    values[1, 3], values[2] = SMALLEST_SCALE / 4, 1
    for zero_points in (False, True):
        quantised = round_to_nearest("w", values, 32, zero_points=zero_points)
        assert torch.equal(quantised.dequantise()[:2], torch.zeros(2, 64))
        assert quantised.scales[0].tolist() == [1, 1]
        assert (quantised.scales > 0).all()


def test_the_weight_stays_as_it_is() -> None:
    original = weight(columns=512).float()
    before = original.clone()
    round_to_nearest("w", original, 128)
    assert torch.equal(original, before)


def test_dequantised_weights_are_exact() -> None:
    quantised = round_to_nearest("w", weight(), 64, zero_points=True)
    assert quantised.zeros is not None
    zeros, scales = (tensor.double().repeat_interleave(64, 1) for tensor in (quantised.zeros, quantised.scales))
    assert torch.equal(quantised.dequantise().double(), (quantised.codes.double() - zeros) * scales)


def test_what_has_no_scale_is_refused_by_name() -> None:
    values = weight()
    values[3, 7], values[4, 1] = torch.nan, torch.inf
    with pytest.raises(CheckpointError, match="layer 3, o holds 2 values that are not finite"):
        round_to_nearest("layer 3, o", values, 128)
    values = torch.full((16, 64), 2.0**20).bfloat16()
    with pytest.raises(CheckpointError, match=r"layer 3, o has magnitudes up to 1\.049e\+06, whose INT4 scale"):
        round_to_nearest("layer 3, o", values, 128)


def test_parts_that_do_not_fit_are_refused() -> None:
    codes, scales = torch.zeros(16, 576, dtype=torch.uint8), torch.ones(16, 5, dtype=torch.float16)
    Int4Weight(codes, scales, None, 128)
    with pytest.raises(InputError, match=r"scales of an INT4 weight \[16, 576\] in groups of 64 .* \[16, 9\]"):
        Int4Weight(codes, scales, None, 64)
    with pytest.raises(InputError, match=r"zeros .* are torch.uint8 \[16, 5\], not torch.float16"):
        Int4Weight(codes, scales, scales, 128)
    with pytest.raises(InputError, match="32, 64, 128, 256, or all"):
        Int4Weight(codes, scales, None, 96)
