"""A KV cache of E4M3 codes under the model: its error, its size, later turns, and what it costs the real model."""

from __future__ import annotations

import math
import shutil
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from futransformer.generator.config import load_config
from futransformer.generator.errors import CheckpointError, InputError
from futransformer.generator.precision import get_precision
from futransformer.kv_cache import page_bytes
from futransformer.memory import plan_memory
from futransformer.model import Llama
from futransformer.perplexity import score
from futransformer.quantize.kv import calibrate_kv
from futransformer.reference import ReferenceOps, largest_error
from futransformer.tokenizer import Tokenizer

# E4M3 keeps 3 bits of mantissa where BF16 keeps 7: one rounding is 2^4 times as large, and is of K and of V.
COARSER = 2**4 * math.sqrt(2)
TOKENS = torch.randint(256, (300,), generator=torch.Generator().manual_seed(4)).tolist()
PROMPTS = [TOKENS[start : start + length] for start, length in ((0, 70), (100, 3), (120, 64))]


def load(folder: Path, precision: str = "bf16-kv8", **options: Any) -> Llama:
    return Llama.from_pretrained(folder, **{"precision": precision, "device": "cpu", "cache_tokens": 2048, **options})


def exact(folder: Path, precision: str) -> Llama:
    """Nothing rounded."""
    ops = ReferenceOps(load_config(folder), dtype=torch.float32)
    return load(folder, precision, device=None, ops=ops)


def test_the_error_is_that_of_rounding_k_and_v(tiny_model: Path) -> None:
    want = exact(tiny_model, "bf16").prefill(PROMPTS, rows="all")
    in_bf16 = largest_error(load(tiny_model, "bf16").prefill(PROMPTS, rows="all"), want)
    in_codes = largest_error(load(tiny_model).prefill(PROMPTS, rows="all"), want)
    assert in_bf16 < in_codes <= COARSER * in_bf16


def test_the_exact_reference_rounds_no_code(tiny_model: Path) -> None:
    """Scales cancel: what is left of the cache is the order in which float32 multiplies."""
    plain, scaled = exact(tiny_model, "bf16"), exact(tiny_model, "bf16-kv8")
    assert scaled.cache.scales is not None
    scaled.cache.scales.copy_(torch.tensor([0.7, 0.3]))
    want = plain.prefill(PROMPTS, rows="all")
    torch.testing.assert_close(scaled.prefill(PROMPTS, rows="all"), want, rtol=0, atol=2e-5 * float(want.abs().max()))


def test_a_page_takes_half(tiny_model: Path) -> None:
    model, plain = load(tiny_model), load(tiny_model, "bf16")
    assert model.cache.pool.dtype == torch.float8_e4m3fn
    assert 2 * model.cache.pool.nbytes == plain.cache.pool.nbytes
    assert model.cache.pool.nbytes == model.cache.num_pages * page_bytes(model.config, torch.float8_e4m3fn)
    row = get_precision("bf16-kv8")
    plan = plan_memory(model.config, row, cache_tokens=2048, rows=10, reference=True)
    assert plan.kv_cache == model.cache.pool.nbytes


def test_int4_weights_decode_over_codes_as_well(tiny_model: Path) -> None:
    """Prefill is that of bf16-kv8, bit for bit; decode reads and writes the same pages."""
    model, plain = load(tiny_model, "int4-g32-kv8"), load(tiny_model)
    assert torch.equal(model.prefill(PROMPTS), plain.prefill(PROMPTS))
    assert model.cache.pool.dtype == torch.float8_e4m3fn
    tokens = [5, 6, 7]
    assert model.decode(tokens).isfinite().all()
    assert not torch.equal(model.decode(tokens), plain.decode(tokens)), "INT4 weights changed nothing"


def test_later_turns_read_the_codes_of_earlier_ones(tiny_model: Path) -> None:
    """K and V are attended as stored: a prompt in two turns is that prompt, and decode goes on from its codes."""
    model, (prompt, *_) = load(tiny_model), PROMPTS
    want, at_once = exact(tiny_model, "bf16").prefill([prompt]), model.prefill([prompt])
    model.prefill([prompt[:30]])
    torch.testing.assert_close(model.extend([prompt[30:]]), at_once, rtol=2.0**-8, atol=2.0**-8)
    model.prefill([prompt[:-3]])
    for token in prompt[-3:]:
        decoded = model.decode([token])
    assert largest_error(decoded, want) <= COARSER * largest_error(load(tiny_model, "bf16").prefill([prompt]), want)


def test_values_beyond_the_largest_code_saturate(tiny_model: Path) -> None:
    model = load(tiny_model)
    assert model.cache.scales is not None
    model.cache.scales.fill_(2.0**-12)
    logits = model.prefill(PROMPTS)
    assert logits.isfinite().all()
    codes = model.cache.pool[:, :, model.sequences[0].pages[0]].float()
    assert codes.abs().max() == 448


def test_scales_are_those_of_what_was_read(tiny_model: Path) -> None:
    """Twice the largest magnitude takes the code 448; the rest of a page, here NaN, says nothing."""
    plain = load(tiny_model, "bf16")
    plain.cache.pool.fill_(torch.nan)
    scales = calibrate_kv(plain, PROMPTS)
    largest = torch.zeros(scales.shape)
    for prompt in PROMPTS:
        plain.prefill([prompt])
        tokens = [plain.cache.pool[:, :, page].float() for page in plain.sequences[0].pages]
        largest = torch.maximum(largest, torch.cat(tokens, -2)[..., : len(prompt), :].abs().amax((2, 3, 4)).T)
    torch.testing.assert_close(scales, 2 * largest / 448)
    model = load(tiny_model, kv_scales=scales)
    want = exact(tiny_model, "bf16").prefill(PROMPTS, rows="all")
    in_bf16 = largest_error(plain.prefill(PROMPTS, rows="all"), want)
    assert largest_error(model.prefill(PROMPTS, rows="all"), want) <= COARSER * in_bf16
    again = calibrate_kv(model, PROMPTS)
    torch.testing.assert_close(again, scales, rtol=2.0**-3, atol=0)


@pytest.mark.parametrize(
    ("precision", "scales", "message"),
    [
        ("bf16", torch.ones(2, 2), "kv_scales are of a cache of E4M3, and that of bf16 is none"),
        ("bf16-kv8", torch.ones(2), r"kv_scales must be float32 \[\d+, 2\], not torch\.float32 \[2\]"),
        ("bf16-kv8", torch.zeros(2, 2), "kv_scales must lie within"),
        ("bf16-kv8", torch.full((2, 2), torch.nan), "kv_scales must lie within"),
    ],
)
def test_scales_that_mean_nothing_are_refused(
    tiny_base_model: Path, precision: str, scales: Tensor, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        load(tiny_base_model, precision, kv_scales=scales)


def test_weights_that_are_not_finite_are_refused(tiny_base_model: Path, tmp_path: Path) -> None:
    """On kernels a K that is not a number would become 480."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_base_model, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.self_attn.k_proj.weight"][3, 5] = torch.nan
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="layer 1, qkv: its weight is not finite"):
        load(folder)


@pytest.mark.model
def test_the_real_model_predicts_our_page_nearly_as_well(small_model: Path) -> None:
    """Noise costs half of its mean square where tokens come as predicted (tests/model/test_fp8_prefill.py)."""
    text = (resources.files("futransformer") / "data" / "sample.txt").read_text(encoding="utf-8")
    tokens = Tokenizer(small_model).encode(text)
    plain, model = (load(small_model, precision, cache_tokens=512) for precision in ("bf16", "bf16-kv8"))
    noise = torch.sub(*(score(each, tokens, context=128, windows=4, batch=4).nll for each in (model, plain)))
    error = 4 * float(noise.std()) / len(noise) ** 0.5
    assert 0.01 < noise.std() < 0.2
    assert abs(noise.mean()) <= noise.square().mean() / 2 + error
