"""Which parts stay in BF16: what each costs, measured by itself, and how many fit a budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from futransformer.checkpoint import load_checkpoint
from futransformer.fp8_scaling import ActivationScales
from futransformer.generator.config import load_config
from futransformer.generator.errors import InputError
from futransformer.generator.precision import get_precision
from futransformer.layer_parts import Part, all_parts, format_parts, parse_parts
from futransformer.memory import part_weights
from futransformer.model import Llama
from futransformer.quantize.calibrate import calibrate
from futransformer.quantize.choose import WINDOWS, choose_parts, measure_parts
from futransformer.quantize.make import Method, make_recipe, parse_bf16
from futransformer.quantize.recipe import Fp8Recipe

TOKENS = torch.randint(256, (300,), generator=torch.Generator().manual_seed(2)).tolist()
TEXT = [TOKENS[:100], TOKENS[100:200], TOKENS[200:300]]
EVERYTHING = frozenset(all_parts(2))


def load(folder: Path, recipe: Fp8Recipe | None, **options: Any) -> Llama:
    precision = "bf16" if recipe is None else "fp8"
    return Llama.from_pretrained(
        folder, **{"precision": precision, "device": "cpu", "cache_tokens": 1024, "recipe": recipe, **options}
    )


def test_a_parts_effect_is_the_divergence_of_a_model_with_it_alone_in_fp8(tiny_model: Path) -> None:
    model = load(tiny_model, Fp8Recipe.unknown(2, EVERYTHING))
    lines: list[str] = []
    effects = measure_parts(model, load_checkpoint(tiny_model, model.config), "tensor", TEXT, lines.append)
    assert list(effects) == all_parts(2)
    assert len(lines) == 4
    plain = load(tiny_model, None).prefill(TEXT, rows="all")
    assert torch.equal(model.prefill(TEXT, rows="all"), plain), "the model must be left as it was"
    assert model.scaling is not None
    assert model.scaling.bf16 == EVERYTHING
    for part in (Part(0, "mlp"), Part(1, "attention")):
        alone = load(tiny_model, Fp8Recipe.unknown(2, EVERYTHING - {part}))
        assert alone.scaling is not None
        for _ in range(2):  # learns the first result's scale, then the second's
            alone.prefill(TEXT)
            alone.scaling.use(ActivationScales.from_amax(alone.scaling.largest()))
        actual = alone.prefill(TEXT, rows="all")
        want = F.kl_div(actual.log_softmax(1), plain.log_softmax(1), log_target=True, reduction="batchmean").item()
        assert effects[part] == pytest.approx(want, rel=0.02)
        assert want > 1e-6


def test_parts_are_chosen_by_their_effect_a_weight() -> None:
    config = load_config("smollm2-135m")
    attention, mlp = part_weights(config).values()
    assert mlp == 3 * attention
    effects = dict.fromkeys(all_parts(4), 1.0)
    effects |= {Part(0, "mlp"): 10.0, Part(1, "attention"): 3.0, Part(3, "mlp"): 5.0, Part(0, "attention"): 2.2}
    # by effect a weight, 1 taken off: 0.mlp 9 of 3, 1.attention 2 of 1, 3.mlp 4 of 3, 0.attention 1.2, then in order
    for layers, expected in (
        (0.2, ""),
        (0.25, "1.attention"),
        (1, "0.mlp, 1.attention"),
        (1.3, "0.mlp, 0.attention, 1.attention"),
        (1.75, "0.mlp, 1.attention, 3.mlp"),
        (2, "0, 1.attention, 3.mlp"),
        (4, "0, 1, 2, 3"),
    ):
        assert format_parts(choose_parts(effects, config, layers)) == format_parts(
            parse_parts(expected, 4) if expected else []
        ), layers


def test_how_many_layers_is_said() -> None:
    assert parse_bf16(None, 4) == frozenset()
    assert parse_bf16("1.mlp", 4) == parse_parts("1.mlp", 4)
    assert parse_bf16("auto:2.5", 4) == 2.5
    for wrong in ("auto:", "auto:0", "auto:4.5", "auto:-1", "auto:nan", "auto:many"):
        with pytest.raises(InputError, match=f"{wrong}: give auto:N with N above 0 and at most 4 layers"):
            parse_bf16(wrong, 4)


@pytest.mark.parametrize("weights", ["rtn", "gptq"])
def test_a_whole_recipe(tiny_base_model: Path, weights: Any) -> None:
    """The costliest part in BF16, the others calibrated; it brings the model nearer to BF16."""
    config = load_config(tiny_base_model)
    loaded = []

    def load_with(recipe: Fp8Recipe, cache_tokens: int, max_rows: int) -> Llama:
        loaded.append((format_parts(recipe.bf16), cache_tokens, max_rows))
        return load(tiny_base_model, recipe, cache_tokens=cache_tokens, max_rows=max_rows)

    checkpoint = load_checkpoint(tiny_base_model, config)
    method = Method(bf16=1.0, weights=weights, context=100, samples=3)
    made = make_recipe(load_with, checkpoint, config, get_precision("fp8"), TOKENS, method)
    bf16 = format_parts(made.calibration.recipe.bf16)
    at_once = 3 if weights == "gptq" else 1
    assert loaded == [("0, 1", WINDOWS * 128, WINDOWS * 100), (bf16, at_once * 128, at_once * 100)]
    assert made.calibration.recipe.bf16 == choose_parts(made.effects, config, 1.0)
    assert 0 < len(made.calibration.recipe.bf16) < 4
    described = made.described()
    assert (described["weights"], described["windows"], set(described["effects"])) == (
        weights,
        3,
        {"0.attention", "0.mlp", "1.attention", "1.mlp"},
    )
    plain = load(tiny_base_model, None).prefill(TEXT, rows="all")
    fp8 = calibrate(load(tiny_base_model, Fp8Recipe.unknown(2)), TOKENS, context=100, samples=3).recipe
    ours, throughout = (
        (load(tiny_base_model, recipe).prefill(TEXT, rows="all") - plain).square().mean()
        for recipe in (made.calibration.recipe, fp8)
    )
    assert ours < throughout
