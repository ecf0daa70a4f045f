"""LLM on the reference: its texts are those of the model alone, streamed or not, evicted or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from futransformer import LLM, Llama, SamplingParams
from futransformer.engine import Engine, RequestOutput
from futransformer.generator.config import CONFIGS, load_config
from futransformer.generator.errors import CheckpointError, InputError, OutOfMemoryError
from futransformer.generator.precision import get_precision
from futransformer.kv_cache import page_bytes
from futransformer.memory import pages_that_fit, plan_memory
from futransformer.quantize.recipe import Fp8Recipe
from futransformer.reference import ReferenceOps
from futransformer.tokenizer import Message, Tokenizer

PROMPTS = ["Hello", "a" * 70, "The quick brown fox", "x", "0123456789" * 13]
GREEDY = SamplingParams(temperature=0, max_tokens=24)


def load(folder: Path, **options: Any) -> LLM:
    """On the exact reference, whose sums are close enough in any order to give one text."""
    return LLM(folder, ops=ReferenceOps(load_config(folder), dtype=torch.float32), **options)


def alone(folder: Path, prompts: list[str], count: int = 24) -> list[list[int]]:
    """Each prompt's text by Llama.generate, by itself."""
    tokenizer = Tokenizer(folder)
    model = Llama.from_pretrained(folder, ops=ReferenceOps(load_config(folder), dtype=torch.float32))
    return [model.generate([tokenizer.encode_prompt(prompt)], count)[0] for prompt in prompts]


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 16},
        {"max_num_seqs": 2},
        {"num_pages": 5},
        {"num_pages": 5, "enable_prefix_caching": False},
    ],
)
def test_texts_are_those_of_the_model_alone(tiny_model: Path, options: Any) -> None:
    llm = load(tiny_model, **options)
    outputs = llm.generate(PROMPTS, GREEDY)
    assert tokens_of(outputs) == alone(tiny_model, PROMPTS)
    for output, prompt in zip(outputs, PROMPTS, strict=True):
        (text,) = output.outputs
        assert output.prompt == prompt
        ends = text.token_ids[-1] in (257, 10)
        assert text.finish_reason == ("stop" if ends else "length")
        shown = text.token_ids[:-1] if ends else text.token_ids
        assert text.text == llm.tokenizer.decode(shown)
    stats = llm.engine.stats()
    assert stats.free_pages == stats.num_pages


def test_an_int4_copy_is_shared_with_its_page(tiny_base_model: Path) -> None:
    """Decode reads the copy alone: were it not there, or another's, no text would be the same."""
    config, row = load_config(tiny_base_model), get_precision("bf16-kv4")
    prefix = "0123456789" * 20
    prompts = [f"{prefix} {text}" for text in PROMPTS if len(text) < 20]
    texts = {}
    for caching in (False, True):
        ops = ReferenceOps(config, dtype=torch.float32, copy=row.copy)
        llm = LLM(tiny_base_model, ops=ops, precision=row, enable_prefix_caching=caching)
        copy = llm.engine.model.cache.copy
        assert copy is not None
        copy.fill_(255)
        texts[caching] = tokens_of(llm.generate(prompts, GREEDY))
        assert llm.engine.stats().prefix_hit_tokens == (caching and 2 * 192)
    assert texts[True] == texts[False]


def test_prompts_are_read_in_fp8_by_frozen_scales_alone(tiny_base_model: Path) -> None:
    """A prompt's codes do not depend on what was read before; running scales would make them."""
    recipe = Fp8Recipe.unknown(load_config(tiny_base_model).num_hidden_layers)
    options: dict[str, Any] = {"precision": "fp8", "device": "cpu", "recipe": recipe}
    llm = LLM(tiny_base_model, **options)
    first = tokens_of(llm.generate(PROMPTS[:1], GREEDY))
    llm.generate(PROMPTS[1:], GREEDY)
    assert tokens_of(llm.generate(PROMPTS[:1], GREEDY)) == first
    model = Llama.from_pretrained(tiny_base_model, **options)
    assert model.generate([llm.tokenizer.encode_prompt(PROMPTS[0])], 24) == first
    with pytest.raises(InputError, match="needs frozen FP8 scales"):
        LLM(tiny_base_model, fp8_scales="running", **options)


def test_streams_are_the_text_in_pieces(tiny_model: Path) -> None:
    llm = load(tiny_model)
    whole = llm.generate(PROMPTS, GREEDY)
    pieces: dict[str, list[str]] = {}
    for delta in llm.stream(PROMPTS, GREEDY):
        assert all(len(output.token_ids) == 1 for output in delta.outputs)
        pieces.setdefault(delta.request_id, []).append(delta.outputs[0].text)
    assert ["".join(pieces[str(index)]) for index in range(len(PROMPTS))] == [each.outputs[0].text for each in whole]


@pytest.mark.parametrize("how", ["closed", "left", "forgotten", "never read"])
def test_a_stream_that_is_given_up_gives_its_pages_back(tiny_model: Path, how: str) -> None:
    llm = load(tiny_model)
    stream = llm.stream(PROMPTS, GREEDY)
    if how != "never read":
        next(stream)
    with pytest.raises(InputError, match="another stream of this LLM is open"):
        llm.generate("Hello", GREEDY)
    if how == "closed":
        stream.close()
        assert list(stream) == []
    if how == "left":
        with stream:
            next(stream)
    del stream
    stats = llm.engine.stats()
    assert (stats.running, stats.free_pages) == (0, stats.num_pages)
    assert tokens_of(llm.generate(PROMPTS[:1], GREEDY)) == alone(tiny_model, PROMPTS[:1])


def test_samples_do_not_depend_on_neighbours(tiny_base_model: Path) -> None:
    """Sampled with a seed, penalised and cut; alone, among others, in chunks and after evictions."""
    params = [
        SamplingParams(temperature=0.9, seed=11, max_tokens=70, ignore_eos=True),
        SamplingParams(temperature=1.3, top_k=20, top_p=0.9, seed=12, max_tokens=70, ignore_eos=True),
        SamplingParams(temperature=0.8, min_p=0.05, repetition_penalty=1.2, seed=13, max_tokens=70, ignore_eos=True),
        SamplingParams(temperature=0, repetition_penalty=1.5, max_tokens=70, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=70, ignore_eos=True),
    ]
    prompts = [f"{prompt:-<60}"[:60] for prompt in PROMPTS]
    llm = load(tiny_base_model)
    apart = [llm.generate(prompt, each)[0] for prompt, each in zip(prompts, params, strict=True)]
    for options in ({}, {"max_num_batched_tokens": 7}, {"num_pages": 4}, {"max_num_seqs": 3}):
        llm = load(tiny_base_model, **options)
        assert tokens_of(llm.generate(prompts, params)) == tokens_of(apart), options
        assert (llm.engine.stats().evictions > 0) == ("num_pages" in options)
    assert len({tuple(tokens) for tokens in tokens_of(apart)}) == len(apart)


def test_texts_of_one_prompt_differ_and_come_again(tiny_model: Path) -> None:
    params = SamplingParams(n=3, temperature=1, max_tokens=20, seed=5, ignore_eos=True)
    first, again, other = (
        [text.token_ids for text in load(tiny_model).generate("Hello", each)[0].outputs]
        for each in (params, params, SamplingParams(n=3, temperature=1, max_tokens=20, seed=6, ignore_eos=True))
    )
    assert first == again
    assert len({tuple(tokens) for tokens in [*first, *other]}) == 6


def test_requests_without_a_seed_draw_from_the_engines(tiny_model: Path) -> None:
    params = SamplingParams(temperature=1, max_tokens=20, ignore_eos=True)
    texts = [tokens_of(load(tiny_model, seed=seed).generate(["Hello", "Hello"], params)) for seed in (1, 1, 2)]
    assert texts[0] == texts[1]
    assert texts[0][0] != texts[0][1]
    assert texts[0] != texts[2]


def test_a_stop_string_ends_a_text_before_it(tiny_model: Path) -> None:
    llm = load(tiny_model)
    free = llm.generate("Hello", SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))[0].outputs[0]
    stop = free.text[20:24]
    at = free.text.index(stop)
    shown = ""
    for delta in llm.stream("Hello", SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, stop=stop)):
        shown += delta.outputs[0].text
        assert free.text.startswith(shown)
        assert len(shown) <= at
    assert shown == free.text[:at]
    assert (delta.outputs[0].finish_reason, delta.outputs[0].stop_reason) == ("stop", stop)


def test_logprobs_are_the_models_own(tiny_model: Path) -> None:
    llm = load(tiny_model)
    params = SamplingParams(temperature=1.5, seed=3, max_tokens=12, logprobs=4, repetition_penalty=1.1, ignore_eos=True)
    quiet = SamplingParams(temperature=0, max_tokens=12, logprobs=0, ignore_eos=True)
    output, other = llm.generate(["Hello", "Hello"], [params, quiet])
    model = Llama.from_pretrained(tiny_model, ops=ReferenceOps(load_config(tiny_model), dtype=torch.float32))
    for each, count in ((output, 4), (other, 0)):
        (text,) = each.outputs
        tokens = [*each.prompt_token_ids, *text.token_ids]
        expected = model.prefill([tokens], rows="all").log_softmax(1)[len(each.prompt_token_ids) - 1 : -1]
        assert text.logprobs is not None
        assert len(text.logprobs) == 12
        for row, found, token in zip(expected, text.logprobs, text.token_ids, strict=True):
            best = row.topk(count).indices.tolist()
            assert set(found) == {token, *best}
            for candidate, logprob in found.items():
                assert logprob.logprob == pytest.approx(row[candidate].item(), abs=1e-4)
                assert logprob.rank == 1 + (row > row[candidate]).sum().item()
                assert logprob.decoded_token == llm.tokenizer.decode_token(candidate)


def test_chats_go_through_the_template(tiny_model: Path) -> None:
    llm = load(tiny_model)
    hello, there = ([Message(role="user", content=text)] for text in ("Hello", "there"))
    one = llm.chat(hello, GREEDY)
    two = llm.chat([hello, there], GREEDY)
    assert one[0].prompt_token_ids == llm.tokenizer.encode_chat("Hello")
    assert tokens_of(two)[0] == tokens_of(one)[0]
    assert two[1].prompt_token_ids == llm.tokenizer.encode_chat("there")


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "conversation is empty"),
        ([{"role": "user"}], "message 0 is"),
        ([[{"role": "user", "content": 3}]], "message 0 is"),
    ],
)
def test_messages_that_are_none_are_refused(tiny_model: Path, messages: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load(tiny_model).chat(messages)


def test_a_base_model_does_not_chat(tiny_base_model: Path) -> None:
    with pytest.raises(InputError, match="is a base model"):
        load(tiny_base_model).chat([Message(role="user", content="Hello")])


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ([], None, "batch is empty"),
        (None, None, "prompts are a text, token ids, or a list of them, not a NoneType"),
        (b"abc", None, "not a bytes"),
        ({"a": 1}, None, "not a dict"),
        (["a", ""], None, "prompt 1: the prompt is empty"),
        (["a", "b" * 512], None, "prompt 1: the prompt has 512 tokens"),
        (["a", "b"], [SamplingParams()], "1 sampling parameters for 2 prompts"),
        ([[1, 2], [999]], None, "prompt 1: prompt: token 999 is outside"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_begins(
    tiny_model: Path, prompts: Any, params: Any, message: str
) -> None:
    llm = load(tiny_model)
    with pytest.raises(InputError, match=message):
        llm.generate(prompts, params)
    assert not llm.engine.has_unfinished()
    assert tokens_of(llm.generate(PROMPTS[0], GREEDY)) == alone(tiny_model, PROMPTS[:1])


def test_weights_that_are_no_numbers_are_told(tiny_model: Path) -> None:
    llm = load(tiny_model)
    llm.engine.model.weights.embedding[ord("x")] = torch.nan
    with pytest.raises(CheckpointError, match="logits that are not numbers"):
        llm.generate([[ord("x")]], GREEDY)
    assert not llm.engine.has_unfinished()


def test_an_llm_warms_up_if_it_is_told_to(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    monkeypatch.setattr(Engine, "warm_up", lambda engine, *arguments: told.append(arguments))
    load(tiny_model)
    assert not told
    load(tiny_model, warm_up_seconds=2.5, progress=print)
    assert told == [(2.5, print)]


def test_pages_that_fit_a_gpu() -> None:
    config, precision = CONFIGS["llama-3.1-8b"], get_precision("fp8-int4")
    total, used = 140 * 2**30, 2**30
    pages = pages_that_fit(config, precision, rows=8192, memory=(total - used, total), utilization=0.9)
    plan = plan_memory(config, precision, cache_tokens=pages * 64, rows=8192)
    assert plan.total + used <= 0.9 * total < plan.total + used + page_bytes(config, torch.bfloat16)
    with pytest.raises(OutOfMemoryError, match="gpu_memory_utilization"):
        pages_that_fit(config, precision, rows=8192, memory=(total - used, total), utilization=0.01)


@pytest.mark.parametrize("utilization", [0, 1.1])
def test_a_part_of_the_memory_is_a_part(tiny_model: Path, utilization: float) -> None:
    with pytest.raises(InputError, match="gpu_memory_utilization"):
        load(tiny_model, gpu_memory_utilization=utilization)
