"""futransformer.json and calibrated folders: a typed error, or the scales and weights that were calibrated."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from futransformer.fp8_scaling import ActivationScales
from futransformer.generator.plan import projections
from futransformer.quantize.description import check_sums, named_precision
from futransformer.quantize.folder import read_recipe
from tests.fuzz.damage import damaged, edited, json_text, unless_refused
from tests.fuzz.test_checkpoints import CONFIG

SCALES = ActivationScales.from_amax(torch.rand(5, generator=torch.Generator().manual_seed(0)) + 1)
QKV = projections(CONFIG)["qkv"]
MODEL = save({"x": torch.zeros(2)})
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": MODEL,
    "fp8_scales.safetensors": save({"scale": SCALES.scale, "amax": SCALES.amax}),
    "fp8_weights.safetensors": save(
        {
            "layers.0.qkv.codes": torch.ones(QKV).to(torch.float8_e4m3fn),
            "layers.0.qkv.scale": torch.ones(1),
        }
    ),
}
SUMS = {name: hashlib.sha256(content).hexdigest() for name, content in FILES.items()}
DESCRIPTION: dict[str, Any] = {
    "format": 3,
    "precision": {"name": "fp8", "prefill": "e4m3"},
    "bf16_layers": "0.mlp",
    "fp8_scales": {"file": "fp8_scales.safetensors", "text": "a.txt"},
    "fp8_weights": {"files": ["fp8_weights.safetensors"]},
    "sha256": SUMS,
}
MORE = ("int4_weights", "file", "../config.json", "/etc/x.json", "x" * 300 + ".json", "\0.json", "\ud800.json")
TYPES = (torch.float32, torch.float16, torch.float64, torch.int64, torch.float8_e4m3fn)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("calibrated")


def write(folder: Path, description: bytes, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).write_bytes(content)
    (folder / "futransformer.json").write_bytes(description)


@given(text=json_text(edited(DESCRIPTION, MORE)))
def test_a_description_is_refused_or_gives_the_calibrated_scales(folder: Path, text: bytes) -> None:
    write(folder, text, FILES)
    unless_refused(lambda: named_precision(folder))
    recipe = unless_refused(lambda: read_recipe(folder, CONFIG))
    if recipe is None:
        return
    assert torch.equal(recipe.scales.scale, SCALES.scale)
    assert torch.equal(recipe.scales.amax, SCALES.amax)
    assert all(part.layer == 0 for part in recipe.bf16)
    assert list(recipe.weights) in ([], [(0, "qkv")])
    assert all(bool((weight.codes.float() == 1).all()) for weight in recipe.weights.values())


QUANTISED = {"format": 3, "precision": {"name": "int4"}, "int4_weights": {"rounding": "gptq"}, "sha256": SUMS}


@given(
    text=json_text(edited(QUANTISED, MORE)),
    content=st.just(MODEL) | damaged(MODEL),
)
def test_a_quantised_models_files_are_refused_or_those_that_were_written(
    folder: Path, text: bytes, content: bytes
) -> None:
    write(folder, text, {**FILES, "model.safetensors": content})
    if unless_refused(lambda: [check_sums(folder)]):  # type: ignore[func-returns-value]
        said = json.loads(text)
        assert said.get("int4_weights") is None or content == FILES["model.safetensors"]


@st.composite
def scales(draw: st.DrawFn) -> bytes:
    """A file of scales whose tensors are of any type, length and value."""
    tensors = {}
    for name in draw(st.lists(st.sampled_from(("scale", "amax", "x")), unique=True)):
        length = draw(st.sampled_from((5, 5, 5, 0, 1, 4, 2000)))
        value = draw(st.sampled_from((1.0, 0.0, -1.0, 1e-45, 1e38, float("inf"), float("nan"))))
        tensors[name] = torch.full((length,), value).to(draw(st.sampled_from(TYPES)))
    return save(tensors)


@given(name=st.sampled_from(("fp8_scales.safetensors", "fp8_weights.safetensors")), data=st.data())
def test_files_that_are_signed_are_refused_or_sound(folder: Path, name: str, data: st.DataObject) -> None:
    """The sums are those of the damaged files: what is read is checked, not only whether it changed."""
    content = data.draw(damaged(FILES[name], within=300) | scales())
    sums = {**SUMS, name: hashlib.sha256(content).hexdigest()}
    write(folder, json.dumps({**DESCRIPTION, "sha256": sums}).encode(), {**FILES, name: content})
    read = unless_refused(lambda: (recipe := read_recipe(folder, CONFIG), dict(recipe.weights)))
    if read is None:
        return
    recipe, weights = read
    for tensor in (recipe.scales.scale, recipe.scales.amax):
        assert (tensor.dtype, tensor.shape) == (torch.float32, (5,))
        assert bool((tensor.isfinite() & (tensor >= 0)).all())
    assert bool(recipe.scales.scale.reciprocal().isfinite().all())
    for weight in weights.values():
        assert (weight.codes.shape, weight.codes.dtype) == (QKV, torch.float8_e4m3fn)
