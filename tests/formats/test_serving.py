"""Models of quantised checkpoints: the float model of their dequantised weights, through codes and without them.

Gains are random float32 here, so that one in the wrong place, or rounded, shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from futransformer.driver import hopper_problem
from futransformer.formats.codes import Groups
from futransformer.formats.compressed_tensors import packed_config, packed_tensors
from futransformer.generator.config import load_config
from futransformer.generator.errors import InputError, UnsupportedError
from futransformer.generator.precision import get_precision
from futransformer.model import Llama
from futransformer.ops.interface import Ops
from futransformer.quantize.int4 import round_to_nearest
from futransformer.quantize.recipe import Fp8Recipe
from futransformer.reference import ReferenceOps, allowed_error, largest_error
from tests.formats.test_formats import FP8_SCALES
from tests.formats.writers import KINDS, Drawn, Kind, edit, quantise, set_config, shapes_of, with_section
from tests.ops.stand_in import stand_in_library

FLOAT32_NOISE = 2e-5  # of the largest logit: two layers of float32 sums in another order
TOKENS = torch.randint(256, (3, 12), generator=torch.Generator().manual_seed(4))
CODED = [name for name, kind in KINDS.items() if kind.precision]

Written = Callable[[Kind], tuple[Path, LlamaForCausalLM]]


@pytest.fixture
def written(tiny_base_model: Path, tmp_path: Path) -> Written:
    """Writes a checkpoint with random gains; gives its folder, and the model that it is to transformers in float32."""

    def write(kind: Kind) -> tuple[Path, LlamaForCausalLM]:
        folder = tmp_path / "quantised"
        drawn = quantise(tiny_base_model, folder, kind)
        edit(folder, new_gains)
        return folder, dequantised(tiny_base_model, drawn)

    return write


def gains() -> dict[str, Tensor]:
    """Of the layers' norms float32, of all its bits; the last norm's is folded into the head, and so a power of two."""
    generator = torch.Generator().manual_seed(5)
    names = [f"model.layers.{index}.{norm}_layernorm" for index in range(2) for norm in ("input", "post_attention")]
    layers = {f"{name}.weight": torch.rand(128, generator=generator) + 0.5 for name in names}
    return {**layers, "model.norm.weight": 2.0 ** torch.randint(-1, 2, (128,), generator=generator)}


def new_gains(weights: dict[str, Tensor]) -> None:
    weights.update(gains())


def dequantised(plain: Path, drawn: dict[str, Drawn]) -> LlamaForCausalLM:
    model = AutoModelForCausalLM.from_pretrained(plain).float()
    parameters = dict(model.named_parameters())
    for name, gain in gains().items():
        parameters[name].data = gain.float()
    for module, weight in drawn.items():
        parameters[f"{module}.weight"].data = weight.weight().float()
    return model


@torch.inference_mode()
def logits_of(model: LlamaForCausalLM) -> Tensor:
    logits: Tensor = model(TOKENS).logits
    return logits.float()


def load(folder: Path, precision: str, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Llama:
    ops: Ops = ReferenceOps(load_config(folder), dtype=dtype)
    return Llama.from_pretrained(folder, **{"ops": ops, "precision": precision, "cache_tokens": 1024, **options})


def load_on_stand_ins(folder: Path, precision: str, kernels: str, monkeypatch: pytest.MonkeyPatch) -> Llama:
    """Packing, arguments and launches are the real ones, a kernel is answered by PyTorch."""
    model = load(folder, precision, ops=stand_in_library(load_config(folder), monkeypatch, precision=kernels))
    # on the CPU it lies where it lies in the file, at any multiple of 8 bytes
    model.weights = replace(model.weights, embedding=model.weights.embedding.clone())
    return model


@torch.inference_mode()
def decoded(model: Llama) -> Tensor:
    """Logits of every token, each decoded: float32 [B, T, vocab_size]."""
    model.start(len(TOKENS))
    return torch.stack([model.decode(column) for column in TOKENS.T.int()], 1)


def prefilled(model: Llama) -> Tensor:
    prompts: list[list[int]] = TOKENS.tolist()
    return model.prefill(prompts, rows="all").view(*TOKENS.shape, -1)


@pytest.mark.parametrize("name", CODED)
def test_decode_keeps_the_codes(name: str, written: Written) -> None:
    """The exact reference to float32's noise: neither gain nor scale is rounded. The rounding one by the rule."""
    precision = KINDS[name].precision
    assert precision is not None
    folder, theirs = written(KINDS[name])
    exact = logits_of(theirs)
    ours = decoded(load(folder, precision, torch.float32))
    assert largest_error(ours, exact) <= FLOAT32_NOISE * exact.abs().max().item()
    rounding = load(folder, precision)
    limit = allowed_error(logits_of(theirs.bfloat16()), exact, get_precision("int4"))
    assert largest_error(decoded(rounding), exact) <= limit
    assert largest_error(prefilled(rounding), exact) <= limit


@pytest.mark.parametrize("name", KINDS)
def test_any_checkpoint_runs_in_bf16(name: str, written: Written) -> None:
    folder, theirs = written(KINDS[name])
    exact = logits_of(theirs)
    said: list[str] = []
    model = load(folder, "bf16", progress=said.append)
    limit = allowed_error(logits_of(theirs.bfloat16()), exact, get_precision("bf16"))
    assert largest_error(decoded(model), exact) <= limit
    assert largest_error(prefilled(model), exact) <= limit
    (note,) = said
    assert "dequantised, and served as bf16" in note
    assert ("decode keeps the codes with precision int4" in note) == (not KINDS[name].act_order)


@pytest.mark.parametrize("name", ["gptq-v1", "awq"])
def test_kernels_take_codes_and_gains(name: str, written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    precision = KINDS[name].precision
    assert precision is not None
    folder, theirs = written(KINDS[name])
    exact = logits_of(theirs)
    model = load_on_stand_ins(folder, precision, f"{precision}-gain", monkeypatch)
    limit = allowed_error(logits_of(theirs.bfloat16()), exact, get_precision("int4"))
    assert largest_error(decoded(model), exact) <= limit
    assert largest_error(prefilled(model), exact) <= limit


def test_kernels_without_gains_refuse_them(written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = written(KINDS["gptq-v1"])
    model = load_on_stand_ins(folder, "int4", "int4", monkeypatch)
    with pytest.raises(InputError, match="gather_rows: the kernel takes no gain"):
        decoded(model)
    ops = stand_in_library(load_config(folder), monkeypatch, precision="int4-gain")
    x, weight = torch.zeros(1, 256).bfloat16(), model.weights.layers[0].o["decode"]
    with pytest.raises(InputError, match="o: the kernel needs the gain of the next norm"):
        ops.o("decode", x, weight, torch.zeros(1, 128))
    with pytest.raises(InputError, match=r"o: gain must have shape \[128\], not \[64\]"):
        ops.o("decode", x, weight, torch.zeros(1, 128), gain=torch.ones(64))


def test_gains_of_one_need_no_kernels_of_their_own(tiny_base_model: Path, tmp_path: Path) -> None:
    quantise(tiny_base_model, tmp_path / "quantised", KINDS["packed"])

    def ones(weights: dict[str, Tensor]) -> None:
        weights.update({name: torch.ones(128).bfloat16() for name in gains() if name != "model.norm.weight"})

    edit(tmp_path / "quantised", ones)
    assert load(tmp_path / "quantised", "int4").weights.gains == ()


@pytest.mark.parametrize(
    ("name", "precision", "words"),
    [
        ("gptq-v1", "int4-g32", "GPTQ, groups of 128, and precision int4-g32 has other groups; use int4, which keeps"),
        ("awq", "int4", "AWQ, groups of 64 with zero points, and precision int4 has other groups; use int4-g64-asym"),
        ("packed-channel", "fp8-int4", "compressed-tensors .INT4, a scale a row., and precision fp8-int4 has other"),
        ("packed", "fp8-int4-g32-kv8", "has other groups; use fp8-int4-kv8, which keeps its codes, or fp8-kv8$"),
        ("gptq-act-order", "int4-g32", "has act-order, whose groups are no runs of columns"),
    ],
)
def test_precisions_that_cannot_keep_the_codes(name: str, precision: str, words: str, written: Written) -> None:
    folder, _ = written(KINDS[name])
    with pytest.raises(UnsupportedError, match=words):
        load(folder, precision, recipe=Fp8Recipe.unknown(2) if "fp8" in precision else None)


@pytest.mark.parametrize("name", ["gptq-act-order", "packed-act-order", "packed"])
def test_no_precision_is_advised_that_would_be_refused(name: str, written: Written) -> None:
    """Act-order; or one projection that is not quantised."""
    folder, _ = written(KINDS[name])
    if name == "packed":
        module = "model.layers.0.mlp.up_proj"

        def replace_codes(weights: dict[str, Tensor]) -> None:
            for part in ("packed", "scale", "shape"):
                del weights[f"{module}.weight_{part}"]
            weights[f"{module}.weight"] = torch.ones(192, 128)

        edit(folder, replace_codes)
    heard: list[str] = []
    load(folder, "bf16", progress=heard.append)
    assert heard[0].endswith("dequantised, and served as bf16")
    for precision in ("int4", "int4-g64"):
        with pytest.raises(UnsupportedError, match="bf16") as refusal:
            load(folder, precision)
        assert "use int4" not in str(refusal.value)


def test_codes_of_several_groups_are_not_rounded_again(written: Written) -> None:
    kind = KINDS["packed"]
    group = kind.section["config_groups"]["group_0"]
    small = {**group, "targets": ["re:nothing"], "weights": {**group["weights"], "group_size": 32}}
    folder, _ = written(with_section(kind, config_groups={"all": group, "none": small}))
    for precision in ("int4", "int4-gain"):
        with pytest.raises(UnsupportedError, match=r"codes of several kinds, which INT4 .* use bf16$"):
            load(folder, precision)
    assert prefilled(load(folder, "bf16")).isfinite().all()


def test_gains_in_x_are_of_codes(tiny_base_model: Path) -> None:
    with pytest.raises(UnsupportedError, match="has no INT4 codes of its own, for which int4-gain is; use int4"):
        load(tiny_base_model, "int4-gain")


def test_an_fp8_prefill_reads_the_dequantised_weights(written: Written) -> None:
    folder, _ = written(KINDS["gptq-v1"])
    unknown = Fp8Recipe.unknown(2)
    model = load(folder, "fp8-int4", recipe=unknown)
    assert torch.equal(decoded(model), decoded(load(folder, "int4")))
    assert torch.equal(prefilled(model), prefilled(load(folder, "fp8", recipe=unknown)))


def test_fp8_weights_are_rounded_as_others_are(written: Written) -> None:
    section, _, _ = FP8_SCALES["one"]

    def write(module: str, drawn: Drawn) -> dict[str, Tensor]:
        codes = drawn.codes.float().to(torch.float8_e4m3fn)
        return {f"{module}.weight": codes, f"{module}.weight_scale": torch.tensor([2.0**-7])}

    folder, _ = written(Kind(section, write, 128, True))
    said: list[str] = []
    model = load(folder, "int4", progress=said.append)
    assert said == ["quantised: FP8: dequantised, and served as bf16 and int4"]
    assert decoded(model).isfinite().all()
    assert model.weights.gains == ()


@pytest.mark.gpu
@pytest.mark.model
def test_kernels_decode_through_codes_and_gains(
    small_model: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The real model, quantised without folding its gains: the two-times rule on a GPU."""
    problem = hopper_problem()
    if problem is not None:
        pytest.skip(problem)
    folder = quantised_beside_gains(small_model, tmp_path / "quantised")
    exports: Path | None = request.config.getoption("--kernels")
    kernels = exports / "smollm2-135m-int4-gain" if exports else None
    said: list[str] = []
    ours = Llama.from_pretrained(folder, precision="int4", kernels=kernels, cache_tokens=1024, progress=said.append)
    assert "int4-gain" in ours.ops.describe()
    assert any("decode keeps the codes" in line for line in said)
    device = ours.ops.device
    exact, rounding = (
        decoded(load(folder, "int4", ops=ReferenceOps(ours.config, device=device, dtype=dtype)))
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert largest_error(decoded(ours), exact) <= allowed_error(rounding, exact, get_precision("int4"))


def quantised_beside_gains(plain: Path, folder: Path) -> Path:
    """A pack-quantized checkpoint, rounded to nearest, whose norms are as they were."""
    folder.mkdir()
    for file in plain.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    weights = load_file(plain / "model.safetensors")
    for module in shapes_of(weights, load_config(plain).num_hidden_layers):
        weight = weights.pop(f"{module}.weight")
        weights.update(packed_tensors(module, round_to_nearest(module, weight, 128)))
    save_file(weights, folder / "model.safetensors")
    set_config(folder, quantization_config=packed_config(Groups(128, zero_points=False)))
    return folder


@pytest.mark.model
def test_the_real_model_keeps_its_gains(small_model: Path, tmp_path: Path) -> None:
    """Gains of 0.02 to 3: what is dequantised and folded for prefill predicts as what decode multiplies x by."""
    folder = quantised_beside_gains(small_model, tmp_path / "quantised")
    model = load(folder, "int4", cache_tokens=256)
    assert len(model.weights.gains) == 2 * model.config.num_hidden_layers + 1
    ours, plain = decoded(model).log_softmax(-1), decoded(load(folder, "bf16", cache_tokens=256)).log_softmax(-1)
    assert (ours - plain).abs().max() < 0.05 * plain.abs().max()
