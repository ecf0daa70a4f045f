"""The accuracy of an FP8 prefill: what is compared with what, on the reference in the place of the kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from futransformer.bench import accuracy, accuracy_fp8
from futransformer.fp8_scaling import ActivationScales
from futransformer.generator.config import load_config
from futransformer.generator.errors import InputError
from futransformer.model import Llama
from futransformer.perplexity import score
from futransformer.quantize.calibrate import calibrate
from futransformer.quantize.recipe import Fp8Recipe
from futransformer.reference import ReferenceOps

CONTEXT = 8
CALIBRATION = {"text_sha256": "0" * 64, "windows": 2, "context": CONTEXT}
TOKENS: list[int] = torch.randint(256, (17 * CONTEXT + 3,), generator=torch.Generator().manual_seed(3)).tolist()


def load(folder: Path, scales: ActivationScales, ops: type[ReferenceOps] = ReferenceOps, **options: Any) -> Llama:
    config = load_config(folder)
    made = ops(config, **options)
    return Llama.from_pretrained(folder, ops=made, precision="fp8", recipe=Fp8Recipe(scales), cache_tokens=64 * 16)


@pytest.fixture
def rows(tiny_base_model: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    for module in (accuracy, accuracy_fp8):
        monkeypatch.setattr(module, "CONTEXT", CONTEXT)
    ours = load(tiny_base_model, ActivationScales.unknown(load_config(tiny_base_model).num_hidden_layers))
    found = calibrate(ours, TOKENS[: 2 * CONTEXT], context=CONTEXT).scales
    scales = ActivationScales(found.scale / 4, found.amax)  # which have no room: half of what was found saturates
    assert ours.scaling is not None
    ours.scaling.use(scales)
    references = {
        "float32": load(tiny_base_model, scales),
        "float64": load(tiny_base_model, scales, accuracy_fp8.DoubleOps),
    }
    bf16 = Llama.from_pretrained(tiny_base_model, ops=ReferenceOps(load_config(tiny_base_model)), cache_tokens=64 * 16)
    unquantised = score(bf16, TOKENS, context=CONTEXT)
    measured = accuracy_fp8.perplexity_rows(ours, references, unquantised, TOKENS, "tiny/fp8", CALIBRATION)
    whole = unquantised.perplexity
    assert all(row["rivals"]["reference-bf16"] == pytest.approx(whole, rel=1e-4) for row in measured)
    return measured


def test_frozen_and_running_scales_are_told_beside_bf16(rows: list[dict[str, Any]]) -> None:
    base = f"perplexity/tiny/fp8/through=prefill/ctx={CONTEXT}/windows=17"
    assert [row["case"] for row in rows] == [f"{base}/scales=frozen", f"{base}/scales=running"]
    for row in rows:
        assert row["tokens"] == 17 * (CONTEXT - 1)
        assert row["calibration"] == CALIBRATION
        apart = 100 * (row["ours"] / row["rivals"]["reference-bf16"] - 1)
        assert row["percent_over_bf16"] == pytest.approx(apart, abs=0.01)
        assert row["nll_minus_reference-bf16"]["deviation"] > 1e-3  # FP8 is not BF16
    assert rows[0]["ours"] != rows[1]["ours"]  # the calibration's windows are not these
    assert rows[0]["saturated"] > 0


def test_the_noise_floor_is_of_two_ways_to_accumulate(rows: list[dict[str, Any]]) -> None:
    # the reference in the place of the kernels is the reference
    assert rows[0]["nll_minus_reference"] == {"mean": 0, "standard_error": 0, "deviation": 0}
    assert "reference" not in rows[1]["rivals"]
    assert set(rows[0]["noise_floor_reference_float32_minus_float64"]) == {"mean", "standard_error", "deviation"}


def test_the_double_reference_sums_exactly(tiny_base_model: Path) -> None:
    config = load_config(tiny_base_model)
    x = torch.tensor([[1.0, 2.0**-30, -1.0]])
    weight = torch.tensor([[1.0, 1.0, 1.0]])
    scale = torch.tensor([2.0])
    assert accuracy_fp8.DoubleOps(config)._linear(x, weight, scale).item() == 2.0**-29


def test_recipes_are_made_and_measured_one_after_another(
    tiny_base_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (accuracy, accuracy_fp8):
        monkeypatch.setattr(module, "CONTEXT", CONTEXT)
    monkeypatch.setattr(accuracy_fp8, "pick_device", lambda _: torch.device("cpu"))
    recipes = ["rtn", "gptq+auto:0.5", "gptq+0.mlp, 1"]
    text, calibration = "some text that is long enough for windows " * 10, "another " * 40
    measured = accuracy_fp8.rows(tiny_base_model, text, calibration, None, recipes)
    cases = [row["case"] for row in measured]
    assert cases[0] == f"perplexity/tiny-base/fp8/through=prefill/ctx={CONTEXT}/windows=52/scales=frozen"
    assert cases[2] == cases[0].replace("/through", "/recipe=gptq+auto:0.5/through")
    assert cases[5] == cases[1].replace("/through", "/recipe=gptq+0.mlp, 1/through")
    assert [row["calibration"]["recipe"] for row in measured[::2]] == recipes
    assert measured[0]["calibration"]["bf16_layers"] == ""
    assert measured[4]["calibration"]["bf16_layers"] == "0.mlp, 1"
    assert ["reference" in row["rivals"] for row in measured] == [False] * 4 + [True, False]
    # the fewer parts are in FP8, the nearer to BF16
    apart = [row["nll_minus_reference-bf16"]["deviation"] for row in measured[::2]]
    assert apart[2] < apart[0]
    assert measured[4]["nll_minus_reference"]["deviation"] == 0


@pytest.mark.parametrize(
    ("recipe", "message"),
    [("nearest", "begin with rtn or gptq"), ("gptq+2", "'2' is none of the parts of 2"), ("rtn+auto:x", "give auto:N")],
)
def test_recipes_that_are_none_are_refused(tiny_base_model: Path, recipe: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        accuracy_fp8.rows(tiny_base_model, "text", "text", None, [recipe])
