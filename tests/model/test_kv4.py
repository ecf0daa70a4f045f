"""An INT4 copy of the KV cache under the model: its bytes however written, who reads it, and what it costs."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from futransformer.bench.accuracy_fp8 import DoubleOps
from futransformer.driver import hopper_problem
from futransformer.generator.config import load_config
from futransformer.generator.errors import InputError
from futransformer.generator.kv_format import DEFAULT, HEAD, PAGE_SIZE, KvFormat
from futransformer.generator.precision import get_precision
from futransformer.memory import plan_memory
from futransformer.model import Llama
from futransformer.ops.interface import PHASES
from futransformer.perplexity import Through, score
from futransformer.quantize.kv_int4 import fold_value_rotation
from futransformer.reference import ReferenceOps, largest_error
from futransformer.tokenizer import Tokenizer
from tests.ops.kv4 import copied

FORMS = [
    DEFAULT,
    KvFormat(minimum=True),
    KvFormat(hadamard=0),
    KvFormat(minimum=True, hadamard=64),
    KvFormat(HEAD, hadamard=64),
]
ON_KERNELS = ("bf16-kv4", "int4-g32-asym-kv4")
TOKENS = torch.randint(256, (512,), generator=torch.Generator().manual_seed(4)).tolist()
PROMPTS = [TOKENS[start : start + length] for start, length in ((0, 70), (100, 3), (120, 64))]


def named(form: KvFormat, base: str = "bf16") -> str:
    return base + form.suffix


def load(folder: Path, precision: str = "bf16-kv4", **options: Any) -> Llama:
    return Llama.from_pretrained(folder, **{"precision": precision, "device": "cpu", "cache_tokens": 4096, **options})


def exact(folder: Path, precision: str) -> Llama:
    """Nothing rounded."""
    ops = ReferenceOps(load_config(folder), dtype=torch.float32)
    return load(folder, precision, device=None, ops=ops)


def copy_of_the_pool(model: Llama, before: Tensor, form: KvFormat) -> Tensor:
    """What the copy must hold, to the byte: codes of every written token, as the BF16 pool has it, over ``before``."""
    want = before.clone()
    for sequence in model.sequences:
        positions = torch.arange(sequence.length)
        pages = torch.tensor(sequence.pages)[positions // PAGE_SIZE]
        for layer in range(model.config.num_hidden_layers):
            slots = pages * PAGE_SIZE + positions % PAGE_SIZE
            want[layer] = copied(want[layer], *model.cache.layer(layer), slots, form)
    return want


def check_copies(model: Llama, form: KvFormat) -> None:
    """Prefill, decode, prefill again, decode; sequences go on at every row of a tile; nothing else changes."""
    copy = model.cache.copy
    assert copy is not None
    copy.copy_(torch.randint(256, copy.shape, generator=torch.Generator().manual_seed(1), dtype=torch.uint8))
    before = copy.clone()

    def check() -> None:
        assert torch.equal(copy, copy_of_the_pool(model, before, form))

    model.prefill([TOKENS[row : 2 * row + 1] for row in range(20)])
    check()
    for token in range(3):
        model.decode([token] * 20)
    check()
    model.extend([TOKENS[row : row + 17] for row in range(20)])
    check()
    model.decode([5] * 20)
    check()


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_copy_is_that_of_the_pool_however_it_was_written(tiny_base_model: Path, form: KvFormat) -> None:
    check_copies(load(tiny_base_model, named(form)), form)


def test_a_copy_beside_codes_is_of_what_they_were_made_from(tiny_base_model: Path) -> None:
    """Main pages of E4M3 round K and V by themselves: the copy is that beside BF16 pages."""
    model, plain = load(tiny_base_model, "bf16-kv8-kv4"), load(tiny_base_model)
    model.prefill(PROMPTS[:1])
    plain.prefill(PROMPTS[:1])
    assert model.cache.pool.dtype == torch.float8_e4m3fn
    assert model.sequences[0].pages == plain.sequences[0].pages
    page = plain.sequences[0].pages[0]  # full
    copies = [each.cache.copy_layer(0) for each in (model, plain)]
    first, second = (copy[page] for copy in copies if copy is not None)
    assert torch.equal(first, second)


def test_prefill_reads_the_pool_and_decode_the_copy(tiny_base_model: Path) -> None:
    model = load(tiny_base_model, "bf16-kv4-h0")
    plain = load(tiny_base_model, "bf16")
    assert torch.equal(model.prefill(PROMPTS, rows="all"), plain.prefill(PROMPTS, rows="all")), "V is not rotated"
    want = model.decode([1, 2, 3])
    assert not torch.equal(want, plain.decode([1, 2, 3]))
    again = load(tiny_base_model, "bf16-kv4-h0")
    again.prefill(PROMPTS)
    assert again.cache.copy is not None
    again.cache.pool.fill_(torch.nan)
    assert torch.equal(again.decode([1, 2, 3]), want)
    again.cache.copy.fill_(255)  # scales that are not numbers
    assert again.decode([1, 2, 3]).isnan().all()


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_later_turns_read_what_decode_wrote(tiny_base_model: Path, form: KvFormat) -> None:
    """What decode has appended, prefill reads from the pool: apart from the copy's roundings it is the whole prompt."""
    want = exact(tiny_base_model, "bf16").prefill([TOKENS[:100]])
    model = load(tiny_base_model, named(form))
    model.prefill([TOKENS[:37]])
    for token in TOKENS[37:60]:
        model.decode([token])
    turns = model.extend([TOKENS[60:100]])
    # 23 of the tokens were read through the copy: their error is a part of that of reading all through it
    model.start(1)
    model.reserve([100])
    for token in TOKENS[:100]:
        decoded = model.decode([token])
    size = want.abs().max()
    assert 0.002 * size < largest_error(decoded, want) < 0.5 * size
    assert largest_error(turns, want) < largest_error(decoded, want)


@pytest.mark.parametrize("block", [32, 64])
def test_a_model_whose_v_is_rotated_by_its_weights_is_that_model(tiny_model: Path, block: int) -> None:
    """In float32, through both phases: what V's rotation changes is rounded away nowhere."""
    plain, model = exact(tiny_model, "bf16"), exact(tiny_model, "bf16")
    for layer in model.weights.layers:
        qkv, o = fold_value_rotation(layer.qkv["decode"], layer.o["decode"], model.config.heads, block)
        for phase in PHASES:
            layer.qkv[phase], layer.o[phase] = qkv, o
    want = plain.prefill(PROMPTS, rows="all")
    torch.testing.assert_close(model.prefill(PROMPTS, rows="all"), want, rtol=0, atol=2e-5 * float(want.abs().max()))
    want = plain.decode([1, 2, 3])
    torch.testing.assert_close(model.decode([1, 2, 3]), want, rtol=0, atol=2e-5 * float(want.abs().max()))


def test_v_is_rotated_in_both_phases_weights(tiny_base_model: Path) -> None:
    plain, model = load(tiny_base_model, "int4-g32"), load(tiny_base_model, "int4-g32-kv4")
    heads = model.config.heads
    for rotated, layer in zip(model.weights.layers, plain.weights.layers, strict=True):
        qkv, o = fold_value_rotation(layer.qkv["prefill"], layer.o["prefill"], heads, 32)
        assert torch.equal(rotated.qkv["prefill"], qkv.bfloat16().float())
        assert torch.equal(rotated.o["prefill"], o.bfloat16().float())
        assert not torch.equal(rotated.o["decode"], layer.o["decode"])


def test_the_exact_reference_keeps_no_copy(tiny_base_model: Path) -> None:
    """Nothing is rounded there; a reference of another form is refused."""
    model, plain = exact(tiny_base_model, "bf16-kv4-h0"), exact(tiny_base_model, "bf16")
    assert model.cache.copy is None
    model.prefill(PROMPTS)
    plain.prefill(PROMPTS)
    assert torch.equal(model.decode([1, 2, 3]), plain.decode([1, 2, 3]))
    ops = ReferenceOps(load_config(tiny_base_model), copy=KvFormat(minimum=True))
    with pytest.raises(
        InputError, match="the reference has a copy of int4-g32-min-h32, and bf16-kv4 one of int4-g32-h32"
    ):
        load(tiny_base_model, device=None, ops=ops)


def test_bytes_are_counted(tiny_base_model: Path) -> None:
    model = load(tiny_base_model, "bf16-kv8-kv4-min", cache_tokens=2048)
    assert model.cache.copy is not None
    plan = plan_memory(model.config, get_precision("bf16-kv8-kv4-min"), cache_tokens=2048, rows=10, reference=True)
    assert plan.kv_cache == model.cache.pool.nbytes + model.cache.copy.nbytes
    assert model.cache.copy.nbytes * 8 == model.cache.pool.nbytes * 5


@pytest.mark.model
def test_the_real_model_predicts_our_page_nearly_as_well(small_model: Path) -> None:
    """Noise costs half of its mean square where tokens come as predicted (tests/model/test_fp8_prefill.py)."""
    text = (resources.files("futransformer") / "data" / "sample.txt").read_text(encoding="utf-8")
    tokens = Tokenizer(small_model).encode(text)
    plain, model = (load(small_model, precision, cache_tokens=512) for precision in ("bf16", "bf16-kv4"))
    scored = (score(each, tokens, context=64, windows=4, batch=4, through="decode").nll for each in (model, plain))
    noise = torch.sub(*scored)
    error = 4 * float(noise.std()) / len(noise) ** 0.5
    assert 0.05 < noise.std() < 0.6
    assert abs(noise.mean()) <= noise.square().mean() / 2 + error


def on_kernels(folder: Path, precision: str, request: pytest.FixtureRequest) -> Llama:
    problem = hopper_problem()
    if problem is not None:
        pytest.skip(problem)
    exports: Path | None = request.config.getoption("--kernels")
    kernels = exports / f"smollm2-135m-{precision.removeprefix('bf16-')}" if exports else None
    return Llama.from_pretrained(folder, precision=precision, kernels=kernels, cache_tokens=4096)


@pytest.mark.gpu
@pytest.mark.model
@pytest.mark.parametrize("precision", ON_KERNELS)
def test_kernels_write_the_copy_of_the_pool(small_model: Path, precision: str, request: pytest.FixtureRequest) -> None:
    check_copies(on_kernels(small_model, precision, request), DEFAULT)


@pytest.mark.gpu
@pytest.mark.model
@pytest.mark.parametrize("through", ["decode", "turns"])
@pytest.mark.parametrize("precision", ON_KERNELS)
def test_kernels_predict_our_page_as_the_reference_does(
    small_model: Path, precision: str, through: Through, request: pytest.FixtureRequest
) -> None:
    """Two references that add up in float32 and float64 differ, for codes near a boundary fall either way; kernels may
    differ from either by half as much again, and in the mean by chance alone.
    """
    ours = on_kernels(small_model, precision, request)
    text = (resources.files("futransformer") / "data" / "sample.txt").read_text(encoding="utf-8")
    tokens, config, device = Tokenizer(small_model).encode(text), ours.config, ours.ops.device
    references = [
        load(small_model, precision, device=None, ops=kind(config, device=device, copy=DEFAULT))
        for kind in (ReferenceOps, DoubleOps)
    ]
    nll = [
        score(model, tokens, context=64, windows=10, batch=10, through=through).nll.cpu()
        for model in (ours, *references)
    ]
    difference, noise = nll[0] - nll[1], nll[2] - nll[1]
    assert difference.std() <= 1.5 * noise.std()
    assert difference.mean().abs() <= 3 * difference.std() / len(difference) ** 0.5
