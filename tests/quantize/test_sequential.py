"""All weights of a model by GPTQ in one reading: better for what they read, kept, and served as they were found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from futransformer.checkpoint import load_checkpoint
from futransformer.driver import hopper_problem
from futransformer.fp8_scaling import READERS
from futransformer.generator.config import load_config
from futransformer.generator.errors import InputError
from futransformer.layer_parts import HALF_OF, Part, parse_parts
from futransformer.model import Llama
from futransformer.quantize.calibrate import Calibration, calibrate
from futransformer.quantize.fp8 import quantize_weight
from futransformer.quantize.gram import LOUDEST, counted, gram_of
from futransformer.quantize.recipe import Fp8Recipe

TOKENS = torch.randint(256, (600,), generator=torch.Generator().manual_seed(2)).tolist()


def load(folder: Path, recipe: Fp8Recipe, **options: Any) -> Llama:
    return Llama.from_pretrained(
        folder, **{"precision": "fp8", "device": "cpu", "cache_tokens": 2048, "recipe": recipe, **options}
    )


def by_gptq(folder: Path, model: Llama, **options: Any) -> Calibration:
    checkpoint = load_checkpoint(folder, load_config(folder))
    return calibrate(model, TOKENS, context=100, samples=6, gptq=(checkpoint, "tensor"), **options)


@pytest.mark.parametrize("parts", ["", "0.mlp, 1.attention"])
def test_every_fp8_weight_is_rounded_and_used(tiny_model: Path, parts: str) -> None:
    bf16 = parse_parts(parts, 2) if parts else frozenset()
    model = load(tiny_model, Fp8Recipe.unknown(2, bf16))
    lines: list[str] = []
    found = by_gptq(tiny_model, model, progress=lines.append)
    expected = [(layer, op) for layer in range(2) for op in READERS if Part(layer, HALF_OF[op]) not in bf16]
    assert list(found.recipe.weights) == expected
    assert [line for line in lines if "rounded" in line] == [
        f"rounded the weights of layer {layer}, {op}" for layer, op in expected
    ]
    assert found.recipe.bf16 == bf16
    logits = model.prefill([TOKENS[:50]], rows="all")
    again = load(tiny_model, found.recipe)
    assert torch.equal(again.prefill([TOKENS[:50]], rows="all"), logits)
    nearest = load(tiny_model, Fp8Recipe(found.scales, bf16))
    assert not torch.equal(nearest.prefill([TOKENS[:50]], rows="all"), logits)


def test_scales_are_those_of_rounding_to_nearest(tiny_base_model: Path) -> None:
    found = by_gptq(tiny_base_model, load(tiny_base_model, Fp8Recipe.unknown(2)))
    checkpoint = load_checkpoint(tiny_base_model, load_config(tiny_base_model))
    moved = 0
    for (layer, op), weight in found.recipe.weights.items():
        nearest = quantize_weight(op, getattr(checkpoint.layer(layer), op), "tensor")
        assert torch.equal(weight.scale, nearest.scale)
        moved += int((weight.codes.float() != nearest.codes.float()).sum())
    assert moved > 1000


def test_the_model_comes_nearer_to_bf16(tiny_base_model: Path) -> None:
    """Of the text that it was rounded for, whose windows give 600 rows for at most 256 columns."""
    plain = Llama.from_pretrained(tiny_base_model, device="cpu", cache_tokens=2048)
    model = load(tiny_base_model, Fp8Recipe.unknown(2))
    found = by_gptq(tiny_base_model, model)
    windows = [TOKENS[start : start + 100] for start in range(0, 600, 100)]
    exact = plain.prefill(windows, rows="all")
    nearest = load(tiny_base_model, Fp8Recipe(found.scales))
    ours, theirs = ((each.prefill(windows, rows="all") - exact).square().mean() for each in (model, nearest))
    assert ours < 0.9 * theirs


def test_codes_with_a_scale_a_row(tiny_base_model: Path) -> None:
    model = load(tiny_base_model, Fp8Recipe.unknown(2), precision="fp8-promoted")
    checkpoint = load_checkpoint(tiny_base_model, load_config(tiny_base_model))
    found = calibrate(model, TOKENS, context=100, samples=6, gptq=(checkpoint, "channel"))
    assert found.recipe.weights[0, "o"].scale.shape == (128,)
    logits = model.prefill([TOKENS[:50]])
    assert torch.equal(load(tiny_base_model, found.recipe, precision="fp8-promoted").prefill([TOKENS[:50]]), logits)
    with pytest.raises(
        InputError, match="a scale a row, which fp8 does not read: calibrate again with --precision fp8"
    ):
        load(tiny_base_model, found.recipe)


def test_a_reading_that_takes_several_passes_is_refused(tiny_base_model: Path) -> None:
    model = load(tiny_base_model, Fp8Recipe.unknown(2), max_rows=599)
    with pytest.raises(InputError, match="in one pass: 600 tokens, and this model takes at most 599"):
        by_gptq(tiny_base_model, model)
    model = load(tiny_base_model, Fp8Recipe.unknown(2), max_rows=600)
    by_gptq(tiny_base_model, model)


def test_the_gram_matrix_is_of_weighted_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces, whatever the type of the operands; whether TF32 may be used is left as it was."""
    monkeypatch.setattr("futransformer.quantize.gram.ROWS", 30)
    x = torch.randn(100, 40, generator=torch.Generator().manual_seed(3)).to(torch.float8_e4m3fn)
    weights = torch.rand(100, 1, generator=torch.Generator().manual_seed(4))
    rows: Tensor = x.double() * weights
    allowed = torch.backends.cuda.matmul.allow_tf32
    try:
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.testing.assert_close(gram_of(x, weights), (rows.T @ rows).float(), rtol=1e-5, atol=1e-4)
        assert torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_operand_of_a_gram_matrix_is_rounded(device: str, dtype: torch.dtype) -> None:
    """Each of 64 sums may lose an ulp of what it has come to; an operand that TF32 rounded would be off by 2^-11."""
    if device == "cuda" and (problem := hopper_problem()) is not None:
        pytest.skip(problem)
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(5)).to(device, dtype)
    exact = x.double().T @ x.double()
    size = x.double().norm(dim=0)
    assert ((gram_of(x).double() - exact).abs() / torch.outer(size, size)).max() < 64 * 2**-23


def test_no_row_counts_for_many() -> None:
    operands = torch.ones(9, 4)
    operands[3] *= 100
    operands[5] = 0
    weights = counted(operands, torch.full((9, 1), 0.5))
    assert (weights[[0, 1, 2, 4, 5, 6, 7, 8]] == 0.5).all()
    assert (operands[3] * weights[3]).square().sum().item() == pytest.approx(LOUDEST * 4 * 0.25)
