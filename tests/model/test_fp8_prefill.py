"""A model whose prefill is FP8, on the reference: its error, its scales in use, and decode after it."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from futransformer import model as model_module
from futransformer.checkpoint import load_checkpoint
from futransformer.driver import hopper_problem
from futransformer.fp8_scaling import ActivationScales, Fp8Scaling
from futransformer.generator.config import CONFIGS, load_config
from futransformer.generator.errors import CheckpointError, InputError
from futransformer.generator.precision import Precision, get_precision
from futransformer.layer_parts import Part, Parts, all_parts, parse_parts
from futransformer.memory import plan_memory
from futransformer.model import Llama
from futransformer.perplexity import score
from futransformer.quantize.calibrate import Calibration, calibrate
from futransformer.quantize.recipe import Fp8Recipe
from futransformer.reference import ReferenceOps, largest_error
from futransformer.tokenizer import Tokenizer

FP8 = get_precision("fp8")
# E4M3 keeps 3 bits of mantissa where BF16 keeps 7, so one rounding is 2^4 times as large; and beside activations the
# weights are rounded, which are as many operands again.
COARSER = 2**4 * math.sqrt(2)
TOKENS = torch.randint(256, (400,), generator=torch.Generator().manual_seed(2)).tolist()
PROMPTS = [TOKENS[start : start + length] for start, length in ((0, 70), (100, 3), (120, 64))]


def load(folder: Path, scales: ActivationScales | None = None, bf16: Parts = frozenset(), **options: Any) -> Llama:
    """The model with FP8 prefill; without scales, with those of nothing."""
    recipe = None if scales is None else Fp8Recipe(scales, bf16)
    return Llama.from_pretrained(
        folder,
        **{
            "precision": "fp8",
            "device": "cpu",
            "cache_tokens": 2048,
            "recipe": recipe or Fp8Recipe.unknown(load_config(folder).num_hidden_layers, bf16),
            **options,
        },
    )


@pytest.fixture(scope="module")
def scales(tiny_model: Path) -> ActivationScales:
    """Those of the tiny model for TOKENS."""
    return calibrate(load(tiny_model), TOKENS, context=100, samples=4).scales


@torch.inference_mode()
def transformers_logits(folder: Path, prompts: list[list[int]], dtype: torch.dtype = torch.float32) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return torch.cat([model(torch.tensor([prompt])).logits[0].float() for prompt in prompts])


@pytest.mark.parametrize("granularity", ["tensor", "channel"])
def test_the_error_is_that_of_fp8(tiny_model: Path, scales: ActivationScales, granularity: Any) -> None:
    """Two-times rule of the whole model, by the size of one rounding; and so far off that FP8 must have been read."""
    precision: Precision = replace(FP8, weight_scales=granularity)
    exact = transformers_logits(tiny_model, PROMPTS)
    theirs = largest_error(transformers_logits(tiny_model, PROMPTS, torch.bfloat16), exact)
    model = load(tiny_model, scales, precision=precision)
    error = largest_error(model.prefill(PROMPTS, rows="all"), exact)
    assert error <= 2 * COARSER * theirs
    assert error > 2 * theirs
    last = model.prefill(PROMPTS)
    ends = torch.tensor([len(prompt) for prompt in PROMPTS]).cumsum(0) - 1
    # collected rows are scaled by the sums of squares of the rounded stream
    torch.testing.assert_close(last, model.prefill(PROMPTS, rows="all")[ends], rtol=2.0**-8, atol=0)


def test_decode_goes_on_in_bf16_from_what_an_fp8_prefill_wrote(tiny_model: Path, scales: ActivationScales) -> None:
    """Only the cache is FP8's work: a token's error is at most a prefilled one's, and BF16's without a prefill."""
    model, plain = load(tiny_model, scales), Llama.from_pretrained(tiny_model, device="cpu", cache_tokens=2048)
    model.prefill([prompt[:-1] for prompt in PROMPTS])
    decoded = model.decode([prompt[-1] for prompt in PROMPTS])
    exact = transformers_logits(tiny_model, PROMPTS)
    ends = torch.tensor([len(prompt) for prompt in PROMPTS]).cumsum(0) - 1
    theirs = largest_error(transformers_logits(tiny_model, PROMPTS, torch.bfloat16), exact)
    assert largest_error(decoded, exact[ends]) <= 2 * COARSER * theirs
    for each in (model, plain):
        each.start(2)
    assert torch.equal(model.decode([5, 6]), plain.decode([5, 6]))
    generated = model.generate(PROMPTS, 4, eos_token_ids=[])
    assert generated == model.generate(PROMPTS, 4, eos_token_ids=[])
    assert model.cache.pool.dtype == torch.bfloat16


def test_frozen_logits_do_not_depend_on_earlier_requests(tiny_model: Path, scales: ActivationScales) -> None:
    model = load(tiny_model, scales)
    before = model.prefill(PROMPTS, rows="all")
    model.generate([TOKENS[200:330], [3]], 5)
    model.prefill([[256] * 40])
    assert torch.equal(model.prefill(PROMPTS, rows="all"), before)


def test_running_scales_are_those_of_what_was_read(tiny_model: Path, scales: ActivationScales) -> None:
    """Made for a magnitude 64 times as large, they come down to what is read once the history has passed."""
    assert scales.amax.min() > 0
    large = ActivationScales.from_amax(64 * scales.amax)
    running, frozen = load(tiny_model, large, fp8_scales="running"), load(tiny_model, large)
    assert running.scaling is not None
    assert frozen.scaling is not None
    frozen.prefill(PROMPTS)
    first = running.prefill(PROMPTS)
    assert torch.equal(running.scaling.scale(), large.scale)
    for _ in range(15):
        running.prefill(PROMPTS)
    assert (running.scaling.scale() < large.scale / 8).all()
    last = running.prefill(PROMPTS)
    assert not torch.equal(first, last)
    # x is read from the table: its maximum is the table's, whatever the scale
    ids = torch.tensor([token for prompt in PROMPTS for token in prompt])
    table = running.weights.embedding[ids].float().abs().amax()
    torch.testing.assert_close(
        running.scaling.scale()[0], ActivationScales.from_amax(table).scale, rtol=2.0**-20, atol=0
    )


def test_running_scales_remember_how_sequences_begin(tiny_model: Path, scales: ActivationScales) -> None:
    """However many passes continue one: a long prompt's, or short turns."""
    model = load(tiny_model, scales, fp8_scales="running", max_rows=4)
    model.weights.embedding[7] = 50
    assert model.scaling is not None
    quiet = [token for token in TOKENS if token != 7]
    model.prefill([[7, *quiet[:99]]])
    for token in quiet[:20]:
        model.extend([[token]])
    torch.testing.assert_close(
        model.scaling.scale()[0], ActivationScales.from_amax(torch.tensor(50.0)).scale, rtol=2.0**-20, atol=0
    )
    model.scaling.mode = "frozen"  # counts alone
    model.prefill([[7]])
    assert "layer 0, x before qkv" in model.scaling.saturated()


def test_what_goes_beyond_the_calibration_saturates_and_is_counted(tiny_model: Path, scales: ActivationScales) -> None:
    model = load(tiny_model, scales)
    assert model.scaling is not None
    before = model.prefill(PROMPTS)
    assert "layer 0, x before qkv" not in model.scaling.saturated()
    model.weights.embedding.mul_(3)
    ids = torch.tensor([token for prompt in PROMPTS for token in prompt])
    x = model.weights.embedding[ids].float()
    logits = model.prefill(PROMPTS)
    assert model.scaling.saturated()["layer 0, x before qkv"] == (x.abs() * (1 / scales.scale[0]) > 448).sum() > 0
    torch.testing.assert_close(model.scaling.largest()[0], x.abs().max(), rtol=2.0**-20, atol=0)
    assert logits.isfinite().all()
    assert not torch.equal(logits, before)


def test_passes_that_end_no_prompt_are_taken_in_too(tiny_model: Path, scales: ActivationScales) -> None:
    model, whole = load(tiny_model, scales, max_rows=16), load(tiny_model, scales)
    for each in (model, whole):
        each.prefill([TOKENS[:70]])
    assert model.scaling is not None
    assert whole.scaling is not None
    torch.testing.assert_close(model.scaling.largest()[0], whole.scaling.largest()[0], rtol=0, atol=0)
    assert (model.scaling.largest() > 0).all()


# Parts in BF16


def test_a_model_whose_every_part_is_in_bf16_is_that_of_bf16(tiny_model: Path, scales: ActivationScales) -> None:
    plain = Llama.from_pretrained(tiny_model, device="cpu", cache_tokens=2048)
    model = load(tiny_model, scales, frozenset(all_parts(2)))
    assert torch.equal(model.prefill(PROMPTS, rows="all"), plain.prefill(PROMPTS, rows="all"))
    assert model.scaling is not None
    assert (model.scaling.largest() == 0).all()


def test_a_part_in_bf16_adds_no_error(tiny_model: Path, scales: ActivationScales) -> None:
    """Nested sets of parts come nearer to BF16, and what was in FP8 alone writes codes."""
    plain = Llama.from_pretrained(tiny_model, device="cpu", cache_tokens=2048).prefill(PROMPTS, rows="all")
    errors = []
    for text in ("", "0.mlp", "0", "0, 1.mlp"):
        model = load(tiny_model, scales, parse_parts(text, 2) if text else frozenset())
        errors.append((model.prefill(PROMPTS, rows="all") - plain).square().mean())
    assert errors == sorted(errors, reverse=True)
    assert errors[3] < errors[0] / 2
    assert model.scaling is not None
    assert (model.scaling.largest() > 0).nonzero().flatten().tolist() == [4, 5, 6]
    assert model.prefill(PROMPTS).shape == (3, 258)


@pytest.mark.parametrize("parts", ["0.attention", "0.mlp, 1.attention"])
def test_passes_of_a_long_prompt_mix_as_one_does(tiny_model: Path, scales: ActivationScales, parts: str) -> None:
    models = [load(tiny_model, scales, parse_parts(parts, 2), max_rows=rows) for rows in (16, 8192)]
    several, whole = (model.prefill([TOKENS[:70]]) for model in models)
    torch.testing.assert_close(several, whole, rtol=0, atol=2.0**-8 * whole.abs().max().item())


def test_parts_in_bf16_keep_the_calibration_of_the_others(tiny_model: Path, scales: ActivationScales) -> None:
    """What no part in FP8 writes or reads was never seen, and keeps a scale of 1."""
    model = load(tiny_model, None, parse_parts("0.attention", 2))
    found = calibrate(model, TOKENS, context=100, samples=4).scales
    assert found.scale[:2].tolist() == [1, 1]
    ratio = found.amax[2:] / scales.amax[2:]
    assert ratio.min() > 1 / 2
    assert ratio.max() < 2


def test_parts_that_the_model_lacks_are_refused(tiny_base_model: Path, scales: ActivationScales) -> None:
    with pytest.raises(InputError, match=r"layers 0 to 1, none that is BF16's 2.mlp"):
        load(tiny_base_model, scales, frozenset([Part(2, "mlp")]))


# Calibration


def observed(model: Llama) -> Tensor:
    """The largest magnitudes of TOKENS' windows, by the scales that the model has."""
    assert model.scaling is not None
    model.scaling.reset()
    for start in range(0, 400, 100):
        model.prefill([TOKENS[start : start + 100]])
    return model.scaling.largest()


def test_calibration_finds_the_maxima_of_the_text(tiny_model: Path, scales: ActivationScales) -> None:
    """From scales of any kind, the same; what the text reaches then is what they are made for, within a rounding."""
    amax = observed(load(tiny_model, scales))
    assert (amax <= scales.amax * (1 + 2.0**-4)).all()
    assert (amax >= scales.amax * (1 - 2.0**-3)).all()
    model = load(tiny_model, ActivationScales.from_amax(torch.full_like(amax, 1e-3)))
    again: Calibration = calibrate(model, TOKENS, context=100, samples=4)
    assert torch.equal(again.scales.amax, scales.amax)
    assert torch.equal(again.scales.scale, ActivationScales.from_amax(scales.amax).scale)
    assert model.scaling is not None
    assert torch.equal(model.scaling.scale(), again.scales.scale)
    assert (again.windows, again.context) == (4, 100)
    assert model.cache.free_pages == model.cache.num_pages


def test_calibration_takes_windows_from_all_of_the_text(tiny_base_model: Path) -> None:
    """The middle of the text is loudest, and one of two windows must meet it."""
    model = load(tiny_base_model)
    model.weights.embedding[7] = 50
    text = [*TOKENS[:100], *[7] * 20, *TOKENS[100:180]]
    assert calibrate(model, [t for t in text[:100] if t != 7], context=50, samples=2).scales.amax[0] < 50
    assert calibrate(model, text, context=50, samples=2).scales.amax[0] == pytest.approx(50, rel=2.0**-20)


def test_calibration_of_running_scales_is_that_of_frozen_ones(tiny_base_model: Path) -> None:
    """Scales that ran during its second reading would round otherwise than those that come out."""
    text = torch.randint(256, (600,), generator=torch.Generator().manual_seed(5)).tolist()
    models = [load(tiny_base_model, fp8_scales=mode) for mode in ("frozen", "running")]
    frozen, running = (calibrate(model, text, context=20, samples=30).scales for model in models)
    assert torch.equal(frozen.amax, running.amax)
    assert models[1].scaling is not None
    assert models[1].scaling.mode == "running"


def test_scales_of_either_fp8_precision_serve_the_other(tiny_model: Path, scales: ActivationScales) -> None:
    """They are of activations, which the rounding of weights moves by far less than the room above them."""
    model = load(tiny_model, precision="fp8-promoted")
    promoted = calibrate(model, TOKENS, context=100, samples=4).scales
    ratio = promoted.amax / scales.amax
    assert ratio.min() > 1 / 2
    assert ratio.max() < 2
    model = load(tiny_model, scales, precision="fp8-promoted")
    model.prefill(PROMPTS)
    assert model.scaling is not None
    assert model.scaling.saturated() == {}


def test_calibration_refuses(tiny_base_model: Path) -> None:
    with pytest.raises(InputError, match="at least 1 window, not 0"):
        calibrate(load(tiny_base_model), TOKENS, samples=0)
    with pytest.raises(InputError, match="load the model with precision fp8"):
        calibrate(Llama.from_pretrained(tiny_base_model, device="cpu"), TOKENS)
    model = load(tiny_base_model)
    model.weights.embedding[TOKENS[0], 3] = torch.inf
    with pytest.raises(CheckpointError, match=r"(before qkv: values that are not finite|logits that are not numbers)"):
        calibrate(model, TOKENS, context=100)


def test_a_weight_without_a_scale_is_refused_by_name(tiny_base_model: Path, tmp_path: Path) -> None:
    for file in tiny_base_model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][3, 5] = torch.nan
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="layer 1, down holds 1 values that are not finite"):
        load(tmp_path)


def test_scales_that_mean_nothing_are_refused_before_weights_are_read(
    tiny_base_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_module, "load_weights", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(InputError, match="frozen or running, not 'live'"):
        load(tiny_base_model, fp8_scales="live")
    options: dict[str, Any]
    for scales, wrong in (
        (ActivationScales.unknown(3), "writes 9 FP8 results"),
        (ActivationScales(torch.zeros(9), torch.ones(9)), "scale holds values"),
    ):
        with pytest.raises(InputError, match=wrong):
            load(tiny_base_model, scales)
    for options in ({"fp8_scales": "running"}, {"recipe": Fp8Recipe.unknown(2)}):
        with pytest.raises(InputError, match="of an FP8 prefill, and bf16 has none"):
            Llama.from_pretrained(tiny_base_model, device="cpu", **options)


# Memory


def test_the_memory_plan_counts_what_the_reference_holds(tiny_model: Path) -> None:
    """One float32 copy a phase of a projection, one for both of the head."""
    model = load(tiny_model)
    plan = plan_memory(model.config, FP8, cache_tokens=2048, rows=10, reference=True)
    parts = [getattr(layer, part.name) for layer in model.weights.layers for part in fields(layer)]
    head = model.weights.lm_head
    assert head["prefill"] is head["decode"]
    assert plan.prefill_weights == sum(part["prefill"].nbytes for part in parts) + head["prefill"].nbytes
    assert plan.decode_weights == sum(part["decode"].nbytes for part in parts)
    assert all(part["prefill"] is not part["decode"] for part in parts)


def test_the_memory_plan_counts_parts_in_bf16(tiny_base_model: Path) -> None:
    """On the reference they are one copy for both phases; on kernels two bytes a weight."""
    bf16 = parse_parts("0.mlp, 1", 2)
    model = load(tiny_base_model, None, bf16)
    config = model.config
    plan = plan_memory(config, FP8, cache_tokens=2048, rows=10, reference=True, bf16=bf16)
    parts = [getattr(layer, part.name) for layer in model.weights.layers for part in fields(layer)]
    apart = [part["prefill"] is not part["decode"] for part in parts]
    assert apart == [True, True, False, False, False, False, False, False]
    assert plan.decode_weights == sum(part["decode"].nbytes for part in parts[:2])
    on_kernels, fp8, plain = (
        plan_memory(config, precision, cache_tokens=2048, rows=10, bf16=parts)
        for precision, parts in ((FP8, bf16), (FP8, frozenset()), (get_precision("bf16"), frozenset()))
    )
    assert on_kernels.prefill_weights == fp8.prefill_weights + 2 * 3 * 128 * 192 + 128 * (512 + 256)
    assert on_kernels.activations == plain.activations + 10 * 128  # the codes of x


def test_the_memory_plan_of_an_8b_model_on_kernels() -> None:
    """A byte a weight in prefill but for the head, which stays BF16; a token's x is there twice."""
    config = CONFIGS["llama-3.1-8b"]
    plan, plain = (plan_memory(config, p, cache_tokens=16384, rows=8192) for p in (FP8, get_precision("bf16")))
    projections, head = 32 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336), 128256 * 4096
    assert plan.prefill_weights == projections + 2 * head
    assert plan.decode_weights == plain.decode_weights == 2 * (projections + head)
    assert plan.activations == 8192 * (2 * (4096 + 4096) + 4096 + 4096 + 14336)
    assert plain.activations == 8192 * 2 * (4096 + 2 * 4096 + 14336)


# The real model


def page(folder: Path) -> list[int]:
    """The tokens of our page."""
    text = (resources.files("futransformer") / "data" / "sample.txt").read_text(encoding="utf-8")
    return Tokenizer(folder).encode(text)


@pytest.mark.model
def test_the_real_model_predicts_our_page_in_fp8_nearly_as_in_bf16(small_model: Path) -> None:
    """FP8 is larger noise of the same kind as BF16's, and costs what noise of its size must.

    Noise d on the logits changes a token's -log p by E_p[d] - d(token) + Var_p[d] / 2, to second order. Where tokens
    come as p says, the first part has the mean square Var_p[d], and no mean: the mean is half of the mean square.
    """
    tokens = page(small_model)
    plain = Llama.from_pretrained(small_model, device="cpu", cache_tokens=512)
    exact = Llama.from_pretrained(small_model, ops=ReferenceOps(plain.config, dtype=torch.float32), cache_tokens=512)
    model = load(small_model, cache_tokens=512)
    calibrate(model, tokens, context=128, samples=4)
    bf16, float32, fp8 = (score(each, tokens, context=128, windows=4, batch=4).nll for each in (plain, exact, model))
    noise = fp8 - float32
    assert (bf16 - float32).std() < noise.std() <= COARSER * (bf16 - float32).std()
    error = 4 * noise.std() / len(noise) ** 0.5
    assert -error <= noise.mean() <= noise.square().mean() / 2 + error
    (answer,) = model.generate([Tokenizer(small_model).encode_chat("What is the capital of France?")], 24)
    assert "Paris" in Tokenizer(small_model).decode(answer)


# The real model on generated kernels


@pytest.fixture(scope="module")
def gpu_options(request: pytest.FixtureRequest) -> dict[str, Any]:
    """How to load the real model on the generated kernels."""
    problem = hopper_problem()
    if problem is not None:
        pytest.skip(problem)
    exports: Path | None = request.config.getoption("--kernels")
    return {"device": "cuda", "kernels": exports / "smollm2-135m-fp8" if exports else None}


@pytest.fixture(scope="module")
def on_kernels(small_model: Path, gpu_options: dict[str, Any]) -> Llama:
    """The real model on the generated kernels, calibrated on our page."""
    model = load(small_model, **gpu_options)
    calibrate(model, page(small_model), context=128, samples=4)
    return model


@pytest.mark.gpu
@pytest.mark.model
def test_kernels_predict_our_page_as_the_reference_does(on_kernels: Llama, small_model: Path) -> None:
    """By the same scales: they differ where sums that are added in another order round to another code."""
    assert on_kernels.scaling is not None
    tokens = page(small_model)
    exact = Llama.from_pretrained(
        small_model, ops=ReferenceOps(on_kernels.config, dtype=torch.float32), cache_tokens=512
    )
    reference = load(small_model, on_kernels.scaling.calibrated)
    ours, theirs, float32 = (
        score(each, tokens, context=128, windows=4, batch=4).nll for each in (on_kernels, reference, exact)
    )
    noise, difference = ours - float32, ours - theirs
    assert noise.std() <= 2 * (theirs - float32).std()
    assert difference.std() <= 2 * (theirs - float32).std()
    assert difference.mean().abs() <= 4 * difference.std() / len(noise) ** 0.5
    (answer,) = on_kernels.generate([Tokenizer(small_model).encode_chat("What is the capital of France?")], 24)
    assert "Paris" in Tokenizer(small_model).decode(answer)


@pytest.mark.gpu
@pytest.mark.model
def test_a_recipe_made_on_kernels_serves_the_reference(
    on_kernels: Llama, small_model: Path, gpu_options: dict[str, Any]
) -> None:
    """Its weights rounded there and parts in BF16: the two differ as above, and by less, for there is less FP8."""
    tokens, config = page(small_model), on_kernels.config
    bf16 = parse_parts("0, 1.attention, 28.mlp, 29", config.num_hidden_layers)
    model = load(small_model, None, bf16, **gpu_options)
    checkpoint = load_checkpoint(small_model, config)
    recipe = calibrate(model, tokens, context=128, samples=4, gptq=(checkpoint, "tensor")).recipe
    assert len(recipe.weights) == 4 * 30 - 2 * len(bf16)
    exact = Llama.from_pretrained(small_model, ops=ReferenceOps(config, dtype=torch.float32), cache_tokens=512)
    reference = load(small_model, recipe=recipe, cache_tokens=512)
    plain, ours, theirs, float32 = (
        score(each, tokens, context=128, windows=4, batch=4).nll for each in (on_kernels, model, reference, exact)
    )
    assert (ours - float32).std() <= 2 * (theirs - float32).std()
    difference = ours - theirs
    assert difference.std() <= 2 * (theirs - float32).std()
    assert difference.mean().abs() <= 4 * difference.std() / len(difference) ** 0.5
    assert (ours - float32).std() < (plain - float32).std()


@pytest.mark.gpu
@pytest.mark.model
def test_calibration_on_kernels_gives_the_same_bits_twice(on_kernels: Llama, small_model: Path) -> None:
    assert on_kernels.scaling is not None
    before = on_kernels.scaling.calibrated
    again = calibrate(on_kernels, page(small_model), context=128, samples=4).scales
    assert torch.equal(again.amax, before.amax)
    assert torch.equal(again.scale, before.scale)


@pytest.mark.gpu
@pytest.mark.model
@pytest.mark.parametrize("mode", ["frozen", "running"])
def test_taking_in_a_pass_does_not_synchronise(on_kernels: Llama, mode: Any) -> None:
    assert on_kernels.scaling is not None
    scaling = Fp8Scaling(on_kernels.scaling.calibrated, on_kernels.weights.scales, mode=mode)
    scaling.finish_pass()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for index in range(20):
            scaling.finish_pass(begins=index % 2 == 0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
