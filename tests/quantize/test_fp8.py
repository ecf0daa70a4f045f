"""Weights as FP8 codes: every code the nearest, every scale by the rule, and what has no scale refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from futransformer.generator.errors import CheckpointError
from futransformer.quantize.fp8 import codes_of, quantize_weight, scale_of


def every_code() -> Tensor:
    """The finite values of E4M3, ascending, float64."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    return codes[codes.isfinite()].sort().values


def weight(rows: int = 48, columns: int = 64) -> Tensor:
    """BF16 rows of very different sizes."""
    generator = torch.Generator().manual_seed(3)
    sizes = 2.0 ** torch.randint(-12, 3, (rows, 1), generator=generator)
    return (torch.randn(rows, columns, generator=generator) * sizes).bfloat16()


@pytest.mark.parametrize("granularity", ["tensor", "channel"])
def test_every_code_is_the_nearest(granularity: str) -> None:
    original = weight()
    codes, scale = quantize_weight("w", original, granularity)  # type: ignore[arg-type]
    assert codes.dtype == torch.float8_e4m3fn
    assert scale.shape == ((48,) if granularity == "channel" else (1,))
    scaled = original.double() / scale.double().view(-1, 1)
    nearest = (scaled.flatten()[:, None] - every_code()).abs().amin(1)
    distance = (scaled - codes.double()).abs().flatten()
    assert (distance <= nearest + 2.0**-24 * scaled.abs().flatten()).all()  # the division is float32's


def test_the_weight_stays_as_it_is() -> None:
    original = weight().float()
    before = original.clone()
    quantize_weight("w", original, "tensor")
    assert torch.equal(original, before)


@pytest.mark.parametrize("granularity", ["tensor", "channel"])
def test_the_largest_magnitude_takes_the_largest_code(granularity: str) -> None:
    codes, scale = quantize_weight("w", weight(), granularity)  # type: ignore[arg-type]
    largest = codes.float().abs().amax(1) if granularity == "channel" else codes.float().abs().amax().view(1)
    assert (largest == 448).all()
    assert (scale > 0).all()


def test_what_is_zero_stays_zero_and_has_a_scale() -> None:
    rows = weight()
    rows[5] = 0
    codes, scale = quantize_weight("w", rows, "channel")
    assert (codes[5].float() == 0).all()
    assert scale[5] == 1
    codes, scale = quantize_weight("w", torch.zeros(8, 16, dtype=torch.bfloat16), "tensor")
    assert scale.tolist() == [1]
    assert (codes.float() == 0).all()


def test_the_smallest_and_largest_of_bf16_are_finite() -> None:
    for value in (2.0**-133, torch.finfo(torch.bfloat16).max):
        codes, scale = quantize_weight("w", torch.full((2, 2), value, dtype=torch.bfloat16), "tensor")
        assert codes.float().isfinite().all()
        assert (1 / scale).isfinite().all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("granularity", ["tensor", "channel"])
def test_a_weight_that_is_not_finite_is_refused(value: float, granularity: str) -> None:
    rows = weight()
    rows[3, 4] = rows[7, 1] = value
    with pytest.raises(CheckpointError, match=r"layer 1, down holds 2 values that are not finite.*fetch"):
        quantize_weight("layer 1, down", rows, granularity)  # type: ignore[arg-type]


def test_the_largest_magnitude_does_not_count_as_saturated() -> None:
    """A kernel multiplies by the rounded reciprocal: over many maxima none may come out beyond 448."""
    amax = 10 ** (12 * torch.rand(100_000, generator=torch.Generator().manual_seed(1)) - 6)
    scale = scale_of(amax)
    assert (amax * (1 / scale) <= 448).all()
    assert (amax / scale > 448 * (1 - 2.0**-19)).all()


def test_codes_saturate_where_a_plain_conversion_gives_nan() -> None:
    values = torch.tensor([1.0, -3.5, 7.0, 21.0, -torch.inf, torch.nan], dtype=torch.bfloat16)
    codes = codes_of(values, torch.tensor([7.0 / 448]))
    assert codes[:5].float().tolist() == [64, -224, 448, 448, -448]
    assert codes[5].isnan()
