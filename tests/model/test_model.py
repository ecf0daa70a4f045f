"""The model on the reference: against transformers, and every way of feeding it against every other.

On the tiny models nothing rounds when gains are folded, so the exact reference must give transformers' float32 logits.
The real model is held to the two-times rule: our BF16 error may be at most twice that of transformers in BF16.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from futransformer import model as model_module
from futransformer.driver import hopper_problem
from futransformer.generator.config import CONFIGS, load_config
from futransformer.generator.errors import CheckpointError, ConfigError, DeviceError, InputError, OutOfMemoryError
from futransformer.generator.precision import get_precision
from futransformer.kv_cache import KVCache
from futransformer.memory import check_memory, plan_memory
from futransformer.model import Chunk, Llama, split_into_passes
from futransformer.perplexity import score
from futransformer.reference import ReferenceOps, allowed_error, largest_error
from futransformer.tokenizer import Tokenizer

FLOAT32_NOISE = 2e-5  # of the largest logit: two layers of float32 sums in another order
LENGTHS = (1, 150, 2, 64, 65)
VOCABULARY = 256  # the tiny model's tokens that are not special
Make = Callable[..., Llama]


def make_prompts(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def load(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Llama:
    return Llama.from_pretrained(folder, ops=ReferenceOps(load_config(folder), dtype=dtype), **options)


@torch.inference_mode()
def transformers_logits(folder: Path, prompts: list[list[int]], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Logits of every token, a prompt at a time: no padding, no cache."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return [model(torch.tensor([prompt])).logits[0].float() for prompt in prompts]


def assert_same(actual: Tensor, expected: Tensor, relative: float = FLOAT32_NOISE) -> None:
    assert actual.shape == expected.shape
    assert largest_error(actual, expected) <= relative * expected.abs().max().item()


# Against transformers


def test_prefill_gives_transformers_logits(tiny_model: Path) -> None:
    prompts = make_prompts()
    expected = transformers_logits(tiny_model, prompts)
    model = load(tiny_model)
    assert_same(model.prefill(prompts, rows="all"), torch.cat(expected))
    assert_same(model.prefill(prompts), torch.stack([logits[-1] for logits in expected]))


def test_decode_gives_transformers_logits(tiny_model: Path) -> None:
    prompts = make_prompts((70, 3, 64))
    expected = transformers_logits(tiny_model, prompts)
    model = load(tiny_model)
    model.start(len(prompts))
    for step in range(3):
        assert_same(
            model.decode([prompt[step] for prompt in prompts]), torch.stack([logits[step] for logits in expected])
        )
    model.keep([2, 0])
    for step in range(3, 64):
        logits = model.decode([prompts[2][step], prompts[0][step]])
    assert_same(logits, torch.stack([expected[2][63], expected[0][63]]))


def test_the_rounding_reference_obeys_the_two_times_rule(tiny_model: Path) -> None:
    prompts = make_prompts()
    exact = torch.cat(transformers_logits(tiny_model, prompts))
    theirs = torch.cat(transformers_logits(tiny_model, prompts, torch.bfloat16))
    ours = load(tiny_model, torch.bfloat16).prefill(prompts, rows="all")
    assert largest_error(ours, exact) <= allowed_error(theirs, exact, get_precision("bf16"))
    assert largest_error(ours, exact) > FLOAT32_NOISE * exact.abs().max().item(), "nothing was rounded"


# Every way of feeding tokens gives the same


def test_prompts_do_not_see_each_other(tiny_model: Path) -> None:
    prompts = make_prompts()
    model = load(tiny_model)
    alone = torch.cat([model.prefill([prompt]) for prompt in prompts])
    assert_same(model.prefill(prompts), alone)


@pytest.mark.parametrize("max_rows", [1, 7, 64])
@pytest.mark.parametrize("rows", ["last", "all"])
def test_many_passes_equal_one(tiny_model: Path, max_rows: int, rows: Any) -> None:
    prompts = make_prompts((1, 15, 2) if max_rows == 1 else LENGTHS)
    passes = load(tiny_model, max_rows=max_rows)
    assert_same(passes.prefill(prompts, rows=rows), load(tiny_model).prefill(prompts, rows=rows))


def test_extend_continues_where_prefill_and_decode_stopped(tiny_model: Path) -> None:
    prompts = make_prompts((90, 40))
    model = load(tiny_model)
    whole = model.prefill(prompts)
    model.prefill([prompt[:30] for prompt in prompts])
    model.decode([prompt[30] for prompt in prompts])
    assert_same(model.extend([prompt[31:] for prompt in prompts]), whole)
    after = model.decode([1, 2])
    assert_same(after, torch.cat([model.prefill([[*prompts[row], row + 1]]) for row in range(2)]))


def test_where_pages_lie_and_what_unused_slots_hold_changes_nothing(tiny_model: Path) -> None:
    prompts = make_prompts()
    plain = load(tiny_model, torch.bfloat16, cache_tokens=64 * 20)
    plain.cache.pool.zero_()
    order = torch.randperm(20, generator=torch.Generator().manual_seed(3)).tolist()
    shuffled = KVCache(plain.config, 20, page_order=order)
    shuffled.pool.fill_(torch.nan)
    poisoned = Llama(plain.config, plain.ops, plain.weights, shuffled)
    assert torch.equal(plain.prefill(prompts), poisoned.prefill(prompts))
    for step in range(70):
        tokens = [(step * 7 + row) % VOCABULARY for row in range(len(prompts))]
        assert torch.equal(plain.decode(tokens), poisoned.decode(tokens))


def test_running_twice_gives_the_same_bits(tiny_model: Path) -> None:
    prompts = make_prompts()
    model = load(tiny_model, torch.bfloat16)
    assert torch.equal(model.prefill(prompts, rows="all"), model.prefill(prompts, rows="all"))


# Generation


def greedy_by_prefill(model: Llama, prompt: list[int], count: int) -> list[int]:
    """Greedy text with no cache: every step reads the whole text again."""
    text = list(prompt)
    for _ in range(count):
        text.append(int(model.prefill([text])[0].argmax()))
    return text[len(prompt) :]


def test_generate_is_the_argmax_of_each_step(tiny_model: Path) -> None:
    prompts, count = make_prompts((5, 1, 64, 33)), 6
    model = load(tiny_model)
    expected = [greedy_by_prefill(model, prompt, count) for prompt in prompts]
    heard: list[list[int]] = [[] for _ in prompts]
    assert model.generate(prompts, count, eos_token_ids=[], on_token=lambda i, t: heard[i].append(t)) == expected
    assert heard == expected
    assert model.cache.free_pages == model.cache.num_pages


def test_any_of_several_eos_tokens_ends_its_own_sequence_alone(tiny_model: Path) -> None:
    prompts, count = make_prompts((5, 1, 64, 33), seed=1), 6
    model = load(tiny_model)
    free = [greedy_by_prefill(model, prompt, count) for prompt in prompts]
    ends = [free[0][3], free[2][0]]

    def until_end(text: list[int]) -> list[int]:
        stops = [position for position, token in enumerate(text) if token in ends]
        return text[: stops[0] + 1] if stops else text

    ended = [until_end(text) for text in free]
    assert len({len(text) for text in ended}) > 1
    assert model.generate(prompts, count, eos_token_ids=ends) == ended


def test_the_models_own_eos_tokens_are_the_default(tiny_model: Path) -> None:
    model = load(tiny_model)
    prompt = make_prompts((8,))[0]
    first = greedy_by_prefill(model, prompt, 1)
    model.config = replace(model.config, eos_token_ids=(257, first[0]))
    assert model.generate([prompt], 5) == [first]


@pytest.mark.parametrize("ends", [3, [1.5], ["</s>"], [-1]])
def test_eos_tokens_that_are_none_are_refused(tiny_model: Path, ends: Any) -> None:
    model = load(tiny_model)
    with pytest.raises(InputError, match=r"eos_token_ids: .*(is not a list of token ids|outside the vocabulary)"):
        model.generate(make_prompts((5,)), 2, eos_token_ids=ends)
    assert model.sequences == []


def test_generation_fills_the_cache_to_its_last_slot(tiny_model: Path) -> None:
    prompt = make_prompts((60,))[0]
    model = load(tiny_model, cache_tokens=64)
    assert model.generate([prompt], 5, eos_token_ids=[]) == [greedy_by_prefill(load(tiny_model), prompt, 5)]
    with pytest.raises(InputError, match=r"need 2 more pages of 64 tokens.*KV cache's 1 \(64 tokens\)"):
        model.generate([prompt], 6)


# Passes


def test_passes_cut_prompts_in_order() -> None:
    assert list(split_into_passes([3, 5, 1], 4)) == [
        [Chunk(0, 0, 3), Chunk(1, 0, 1)],
        [Chunk(1, 1, 5)],
        [Chunk(2, 0, 1)],
    ]
    assert list(split_into_passes([4, 4], 8)) == [[Chunk(0, 0, 4), Chunk(1, 0, 4)]]


# What bad input gets


@pytest.fixture(scope="module")
def ready(tiny_base_model: Path) -> Llama:
    return load(tiny_base_model, cache_tokens=256)


BAD_PROMPTS = {
    "no prompt": ([], "batch is empty"),
    "an empty prompt": ([[1], []], "prompt 1 is empty"),
    "no batch at all": (3, "prompts are lists of token ids, one a sequence, not 3"),
    "text": (["Hello"], "prompt 0: 'Hello' is not a list of token ids.*Tokenizer"),
    "one prompt, not a batch": ([1, 2, 3], "prompt 0: 1 is not a list of token ids"),
    "nothing": ([[1], None], "prompt 1: None is not a list of token ids"),
    "floats": ([[1.7, 2.2]], r"prompt 0: \[1\.7, 2\.2\] is not a list of token ids"),
    "a tensor of floats": ([torch.tensor([1.5])], r"prompt 0: \[1\.5\] is not a list of token ids"),
    "NaN": ([[1, float("nan")]], r"prompt 0: \[1, nan\] is not a list of token ids"),
    "a list too deep": ([[[1, 2]]], r"prompt 0: \[\[1, 2\]\] is not a list of token ids"),
    "a scalar": ([torch.tensor(3)], "prompt 0: 3 is not a list of token ids"),
    "a token too large": ([[1], [5, 258]], "prompt 1: token 258 is outside the vocabulary of 258"),
    "a negative token": ([[-1]], "prompt 0: token -1 is outside"),
    "a prompt longer than the cache": ([[1] * 257], r"need 5 more pages.*KV cache's 4 \(256 tokens\)"),
    "prompts longer than the cache together": ([[1] * 129, [1] * 65], r"194 tokens in 2 sequences need 5 more pages"),
    "a prompt longer than the model": ([[1] * 513], r"513 tokens.*at most 512 \(max_position_embeddings\)"),
}


@pytest.mark.parametrize("case", BAD_PROMPTS)
def test_a_bad_batch_is_refused_and_the_model_goes_on(ready: Llama, case: str) -> None:
    prompts: Any
    prompts, message = BAD_PROMPTS[case]
    good = make_prompts((20,))
    before = ready.prefill(good)
    for feed in (ready.prefill, ready.extend, lambda bad: ready.generate(bad, 1)):
        with pytest.raises(InputError, match=message):
            feed(prompts)
    assert torch.equal(ready.prefill(good), before)


def test_prompts_may_be_tensors_and_arrays(ready: Llama) -> None:
    rows = [[1, 2, 3], [4, 5, 6]]
    expected = ready.prefill(rows)
    for prompts in (torch.tensor(rows), np.array(rows), [torch.tensor(row) for row in rows], [*map(np.array, rows)]):
        assert torch.equal(ready.prefill(prompts), expected)  # type: ignore[arg-type]


def test_a_refused_extend_leaves_the_batch_as_it_was(ready: Llama) -> None:
    prompt = make_prompts((40,))[0]
    ready.prefill([prompt[:39]])
    with pytest.raises(InputError, match="need 4 more pages"):
        ready.extend([[1] * 256])
    with pytest.raises(InputError, match="2 prompts for a batch of 1"):
        ready.extend([[1], [2]])
    assert_same(ready.decode(prompt[39:]), ready.prefill([prompt]))


def test_a_prompt_as_long_as_the_cache_is_read(ready: Llama) -> None:
    ready.prefill([[1] * 256])
    with pytest.raises(InputError, match="need 1 more pages of 64 tokens, but 0"):
        ready.decode([1])


def test_decode_stops_at_the_models_last_position_though_the_page_goes_on(tiny_base_model: Path) -> None:
    config = replace(load_config(tiny_base_model), max_position_embeddings=70)
    model = load(tiny_base_model, cache_tokens=256)
    short = Llama(config, model.ops, model.weights, model.cache)
    prompt = make_prompts((67,))[0]
    short.prefill([prompt])
    for token in (1, 2, 3):
        short.decode([token])
    with pytest.raises(InputError, match=r"sequence 0 would have 71 tokens.*at most 70 \(max_position_embeddings\)"):
        short.decode([4])


def test_decode_refuses_what_does_not_fit(ready: Llama) -> None:
    ready.prefill([[1], [2]])
    with pytest.raises(InputError, match="one token a sequence, 2; the tokens' shape is"):
        ready.decode([1])
    with pytest.raises(InputError, match="decode: token 300 is outside the vocabulary"):
        ready.decode([1, 300])
    with pytest.raises(InputError, match="decode: token -3 is outside the vocabulary"):
        ready.decode(torch.tensor([1, -3]))
    for tokens in ([1.7, 2.0], torch.tensor([1.7, 2.0]), torch.tensor([[1], [2]]), [[1], [2]], ["a", "b"], None, 3):
        with pytest.raises(InputError, match=r"decode: .* is not a list of token ids"):
            ready.decode(tokens)  # type: ignore[arg-type]
    assert [sequence.length for sequence in ready.sequences] == [1, 1]
    ready.keep([])
    with pytest.raises(InputError, match="begin with prefill"):
        ready.decode([])


@pytest.mark.parametrize("rows", [[0, 0], [2], [-1]])
def test_keep_takes_rows_of_the_batch_once(ready: Llama, rows: list[int]) -> None:
    """A sequence kept twice would write its tokens to one slot twice."""
    ready.prefill([[1], [2]])
    with pytest.raises(InputError, match="keep takes different rows of a batch of 2, not"):
        ready.keep(rows)
    assert len(ready.sequences) == 2


@pytest.mark.parametrize("tokens", [[1], [1, 2, 3], [5, -1]])
def test_reserve_takes_a_count_a_sequence(ready: Llama, tokens: list[int]) -> None:
    ready.start(2)
    with pytest.raises(InputError, match="reserve takes a count for each of 2 sequences, not"):
        ready.reserve(tokens)


def test_weights_that_are_not_numbers_give_no_text(tiny_base_model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_base_model, tmp_path / "damaged"))
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][3, 5] = torch.nan
    save_file(weights, folder / "model.safetensors")
    model = load(folder)
    with pytest.raises(CheckpointError, match="damaged gives logits that are not numbers"):
        model.generate([[1, 2, 3]], 4)
    assert model.sequences == []
    through: Any
    for through in ("prefill", "decode"):
        with pytest.raises(CheckpointError, match="damaged gives logits that are not numbers"):
            score(model, [1, 2, 3, 4, 5], context=4, through=through)


def test_generate_refuses_too_few_and_too_many_tokens(ready: Llama) -> None:
    with pytest.raises(InputError, match="max_new_tokens must be at least 1, not 0"):
        ready.generate([[1]], 0)
    with pytest.raises(InputError, match=r"sequence 0 would have 513 tokens.*fewer new tokens"):
        ready.generate([[1]], 513)


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises((CheckpointError, ConfigError), match="nowhere"):
        Llama.from_pretrained(tmp_path / "nowhere")


# Where it runs, and whether it fits


def test_the_choice_of_backend_is_said(tiny_base_model: Path) -> None:
    model = Llama.from_pretrained(tiny_base_model, device="cpu")
    assert model.ops.describe().startswith("CPU reference (PyTorch ")


@pytest.mark.skipif(hopper_problem() is None, reason="this machine has a Hopper GPU")
def test_without_a_hopper_gpu_the_reference_serves_and_cuda_is_refused(tiny_base_model: Path) -> None:
    assert isinstance(Llama.from_pretrained(tiny_base_model).ops, ReferenceOps)
    with pytest.raises(DeviceError, match="no Hopper GPU"):
        Llama.from_pretrained(tiny_base_model, device="cuda")


def test_devices_that_will_not_do(tiny_base_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="there is no device 'gpu': give cpu or cuda"):
        Llama.from_pretrained(tiny_base_model, device="gpu")
    with pytest.raises(InputError, match="runs on cpu or cuda, not on mps"):
        Llama.from_pretrained(tiny_base_model, device="mps")
    monkeypatch.setattr(model_module, "require_hopper", lambda: torch.device("cuda", 0))
    with pytest.raises(InputError, match=r"current GPU, cuda:0, not on cuda:1.*set_device\(1\)"):
        Llama.from_pretrained(tiny_base_model, device="cuda:1")


def test_kernels_ask_for_a_gpu(tiny_base_model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Never the reference in their place: whoever names kernels means them."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="no Hopper GPU"):
        Llama.from_pretrained(tiny_base_model, kernels=tmp_path)
    with pytest.raises(InputError, match="are for a GPU"):
        Llama.from_pretrained(tiny_base_model, kernels=tmp_path, device="cpu")
    with pytest.raises(InputError, match="are for a GPU"):
        load(tiny_base_model, kernels=tmp_path)


def test_an_allocation_that_fails_is_no_traceback(tiny_base_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory was counted, and another process took it."""

    def refuse(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nAnd much more.")

    model = load(tiny_base_model)
    with monkeypatch.context() as patch:
        patch.setattr(model_module, "load_weights", refuse)
        with pytest.raises(
            OutOfMemoryError, match=r"loading tiny-base, which needs .*GiB.*Tried to allocate 2.00 GiB\. u"
        ):
            load(tiny_base_model)
    monkeypatch.setattr(model.ops, "gate_up", refuse)
    with pytest.raises(OutOfMemoryError, match=r"reading prompts: CUDA out of memory.*fewer or shorter ones"):
        model.prefill([[1, 2, 3]])


def test_passes_and_rows_that_mean_nothing(ready: Llama) -> None:
    with pytest.raises(InputError, match="max_rows must not be 0"):
        Llama(ready.config, ready.ops, ready.weights, ready.cache, max_rows=0)
    with pytest.raises(InputError, match="not of 'first'"):
        ready.prefill([[1]], rows="first")  # type: ignore[arg-type]


def test_a_config_of_endless_layers_is_refused_at_once(tiny_base_model: Path, tmp_path: Path) -> None:
    """Before the names of its tensors are listed: of 10^8 layers, for minutes, in more memory than there is."""
    folder = Path(shutil.copytree(tiny_base_model, tmp_path / "deep"))
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_hidden_layers": 10**8}))
    with pytest.raises(ConfigError, match="num_hidden_layers must not exceed 4096"):
        Llama.from_pretrained(folder, device="cpu")


def test_a_model_that_does_not_fit_is_refused_before_its_weights_are_read(
    tiny_base_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_module, "load_weights", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(
        OutOfMemoryError, match=r"needs \d+\.\d\d GiB \(prefill weights .*kv cache \d+.*but this machine"
    ):
        Llama.from_pretrained(tiny_base_model, device="cpu", cache_tokens=2**40)


def test_the_memory_plan_counts_what_the_reference_holds(tiny_model: Path) -> None:
    model = load(tiny_model, torch.bfloat16, cache_tokens=1000)
    plan = plan_memory(model.config, get_precision("bf16"), cache_tokens=1000, rows=10, reference=True)
    weights = model.weights
    packed = [weights.lm_head, *(getattr(layer, part.name) for layer in weights.layers for part in fields(layer))]
    assert plan.prefill_weights == sum(weight["prefill"].nbytes for weight in packed)
    assert all(weight["prefill"] is weight["decode"] for weight in packed)
    assert plan.decode_weights == 0
    assert plan.embedding == weights.embedding.nbytes + weights.rope_table.nbytes
    assert plan.kv_cache == model.cache.pool.nbytes
    assert plan.total == sum(getattr(plan, part.name) for part in fields(plan))


def test_the_memory_plan_of_an_8b_model_on_kernels() -> None:
    """Two packings of 7.5e9 BF16 weights, an embedding, and 128 KiB of cache a token."""
    plan = plan_memory(CONFIGS["llama-3.1-8b"], get_precision("bf16"), cache_tokens=16384, rows=8192)
    weights = 2 * (32 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336) + 128256 * 4096)
    assert plan.prefill_weights == plan.decode_weights == weights
    assert plan.kv_cache == 16384 * 128 * 1024
    with pytest.raises(OutOfMemoryError, match=r"llama-3.1-405b needs 15\d\d\.\d\d GiB .*smaller model"):
        check_memory(
            "llama-3.1-405b",
            plan_memory(CONFIGS["llama-3.1-405b"], get_precision("bf16"), cache_tokens=16384, rows=8192),
            torch.device("cpu"),
        )


# The real model


@pytest.fixture(scope="module")
def real_prompts(small_model: Path) -> list[list[int]]:
    tokenizer = Tokenizer(small_model)
    chats = ("What is the capital of France?", "Write one sentence about the sea.")
    texts = (
        "def fibonacci(n):\n    ",
        "In 1969 the first people",
        "The difference between a list and a tuple in Python is",
    )
    return [*map(tokenizer.encode_chat, chats), *map(tokenizer.encode, texts)]


@pytest.mark.model
def test_the_real_model_agrees_with_transformers(small_model: Path, real_prompts: list[list[int]]) -> None:
    """Teacher-forced on our own text: logits and argmax by the two-times rule.

    The argmax may differ only where the top two logits lie within 2^-7 of the top one, one unit in the last place of
    BF16 at its size, and at most twice as often as that of transformers in BF16.
    """
    model = Llama.from_pretrained(small_model, device="cpu", cache_tokens=2048)
    texts = model.generate(real_prompts, 24, eos_token_ids=[])
    whole = [prompt + text for prompt, text in zip(real_prompts, texts, strict=True)]
    ours = model.prefill(whole, rows="all")
    exact = torch.cat(transformers_logits(small_model, whole))
    theirs = torch.cat(transformers_logits(small_model, whole, torch.bfloat16))
    assert largest_error(ours, exact) <= allowed_error(theirs, exact, get_precision("bf16"))

    top = exact.topk(2)
    near_tie = top.values[:, 0] - top.values[:, 1] < 2.0**-7 * top.values[:, 0].abs()
    differs, differs_in_theirs = (logits.argmax(1) != top.indices[:, 0] for logits in (ours, theirs))
    assert not (differs & ~near_tie).any()
    assert differs.sum() <= 2 * differs_in_theirs.sum()

    # what decode chose, against the row of the token before it
    ends = torch.tensor([len(text) for text in whole]).cumsum(0).tolist()
    for text, end in zip(texts, ends, strict=True):
        rows = range(end - len(text) - 1, end - 1)
        assert all(exact[row].argmax() == token or near_tie[row] for row, token in zip(rows, text, strict=True))


@pytest.mark.model
def test_the_real_model_answers(small_model: Path, real_prompts: list[list[int]]) -> None:
    model = Llama.from_pretrained(small_model, device="cpu", cache_tokens=256)
    (answer,) = model.generate(real_prompts[:1], 32)
    assert answer[-1] in model.config.eos_token_ids
    assert "Paris" in Tokenizer(small_model).decode(answer)


# The real model on generated kernels


@pytest.fixture(scope="module")
def on_kernels(small_model: Path, request: pytest.FixtureRequest) -> Llama:
    """The real model on the generated kernels."""
    problem = hopper_problem()
    if problem is not None:
        pytest.skip(problem)
    exports: Path | None = request.config.getoption("--kernels")
    kernels = exports / "smollm2-135m" if exports else None
    return Llama.from_pretrained(small_model, device="cuda", kernels=kernels, cache_tokens=4096)


@pytest.mark.gpu
@pytest.mark.model
def test_kernels_obey_the_two_times_rule(on_kernels: Llama, small_model: Path, real_prompts: list[list[int]]) -> None:
    """Prefill in one go, in many passes, and token by token; prompts together."""
    exact = load(small_model, cache_tokens=4096).prefill(real_prompts, rows="all")
    same_type = load(small_model, torch.bfloat16, cache_tokens=4096).prefill(real_prompts, rows="all")
    allowed = allowed_error(same_type, exact, get_precision("bf16"))
    assert largest_error(on_kernels.prefill(real_prompts, rows="all").cpu(), exact) <= allowed

    in_passes = Llama(on_kernels.config, on_kernels.ops, on_kernels.weights, on_kernels.cache, max_rows=13)
    assert largest_error(in_passes.prefill(real_prompts, rows="all").cpu(), exact) <= allowed
    in_passes.keep([])

    starts = torch.tensor([0, *(len(prompt) for prompt in real_prompts)]).cumsum(0).tolist()[:-1]
    on_kernels.start(len(real_prompts))
    for step in range(min(len(prompt) for prompt in real_prompts)):
        logits = on_kernels.decode([prompt[step] for prompt in real_prompts])
        assert largest_error(logits.cpu(), exact[[start + step for start in starts]]) <= allowed


@pytest.mark.gpu
@pytest.mark.model
def test_kernels_read_no_unused_slot_and_give_the_same_bits(on_kernels: Llama, real_prompts: list[list[int]]) -> None:
    on_kernels.cache.pool.zero_()
    pages = on_kernels.cache.num_pages
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(3)).tolist()
    shuffled = KVCache(on_kernels.config, pages, device=on_kernels.ops.device, page_order=order)
    shuffled.pool.fill_(torch.nan)
    poisoned = Llama(on_kernels.config, on_kernels.ops, on_kernels.weights, shuffled)
    assert torch.equal(on_kernels.prefill(real_prompts, rows="all"), poisoned.prefill(real_prompts, rows="all"))
    for step in range(70):
        tokens = [step * 7 + row for row in range(len(real_prompts))]
        assert torch.equal(on_kernels.decode(tokens), poisoned.decode(tokens))


@pytest.mark.gpu
@pytest.mark.model
def test_a_decode_step_on_kernels_does_not_synchronise(on_kernels: Llama, real_prompts: list[list[int]]) -> None:
    for mode in ("default", "error"):  # the first time, workspaces are allocated and graphs captured
        tokens = on_kernels.ops.argmax(on_kernels.prefill(real_prompts))
        torch.cuda.set_sync_debug_mode(mode)
        try:
            for _ in range(70):  # far enough for new pages
                tokens = on_kernels.decode_greedily(tokens)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert tokens.shape == (len(real_prompts),)


@pytest.mark.gpu
@pytest.mark.model
def test_kernels_answer_alone_as_in_a_batch(
    on_kernels: Llama, small_model: Path, real_prompts: list[list[int]]
) -> None:
    together = on_kernels.generate(real_prompts, 32)
    assert "Paris" in Tokenizer(small_model).decode(together[0])
    assert together[0][-1] in on_kernels.config.eos_token_ids
    assert on_kernels.generate(real_prompts[:1], 32) == together[:1]
