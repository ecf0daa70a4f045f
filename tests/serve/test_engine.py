"""The server before the real engine, on the exact reference: its answers are those of LLM."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from futransformer import LLM, SamplingParams
from futransformer.engine import Engine, RequestOutput
from futransformer.generator.config import load_config
from futransformer.reference import ReferenceOps
from futransformer.tokenizer import Tokenizer
from tests.serve.serving import Address, eventually, serving

HELLO: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
PROMPTS = [chr(ord("a") + index) * (1 + 7 * index) for index in range(16)]  # 1 .. 106 tokens


def load(folder: Path, **options: Any) -> LLM:
    """On the exact reference, whose sums are close enough in any order to give one text."""
    options = {"num_pages": 64, **options}
    return LLM(folder, ops=ReferenceOps(load_config(folder), dtype=torch.float32), **options)


@pytest.fixture(scope="module")
def llm(chat_model: Path) -> LLM:
    """What is expected."""
    return load(chat_model)


@pytest.fixture(scope="module")
def address(chat_model: Path, tokenizer: Tokenizer) -> Iterator[Address]:
    def make() -> Engine:
        return load(chat_model, max_num_seqs=8).engine

    with serving(make, tokenizer, max_model_len=512, max_num_seqs=8) as running:
        yield running


@pytest.fixture(scope="module")
def client(address: Address) -> openai.OpenAI:
    return address.client()


def lasting(**options: Any) -> dict[str, Any]:
    """A text that no EOS ends, and vLLM's name for that."""
    return {"max_tokens": 24, "temperature": 0, "extra_body": {"ignore_eos": True}, **options}


def test_whole_and_streamed_answers_are_the_models(llm: LLM, client: openai.OpenAI) -> None:
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    (expected,) = llm.chat(HELLO, params)
    request: Any = {"model": "tiny", "messages": HELLO, **lasting()}
    whole = client.chat.completions.create(**request)
    assert whole.choices[0].message.content == expected.outputs[0].text
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == len(expected.prompt_token_ids)
    pieces = [chunk.choices[0] for chunk in client.chat.completions.create(**request, stream=True)]
    assert "".join(piece.delta.content or "" for piece in pieces) == expected.outputs[0].text
    assert pieces[-1].finish_reason == expected.outputs[0].finish_reason

    (expected,) = llm.generate("Hello", params)
    completion: Any = {"model": "tiny", "prompt": "Hello", **lasting()}
    assert client.completions.create(**completion).choices[0].text == expected.outputs[0].text
    chunks = client.completions.create(**completion, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected.outputs[0].text


def test_samples_are_their_seeds(llm: LLM, client: openai.OpenAI) -> None:
    params = SamplingParams(n=3, max_tokens=12, temperature=1.5, seed=11, ignore_eos=True)
    (expected,) = llm.generate("Hello", params)
    request: Any = {"model": "tiny", "prompt": "Hello", "n": 3, "seed": 11, **lasting(max_tokens=12, temperature=1.5)}
    texts = [choice.text for choice in client.completions.create(**request).choices]
    assert texts == [output.text for output in expected.outputs]
    assert len(set(texts)) == 3
    streamed = ["", "", ""]
    for chunk in client.completions.create(**request, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == texts


def test_sixteen_clients_of_unequal_lengths_have_their_own_texts(llm: LLM, address: Address) -> None:
    """Eight run at a time; half of them stream."""
    lengths = [5 + 3 * (index * 7 % 16) for index in range(16)]
    params = [SamplingParams(max_tokens=length, temperature=0, ignore_eos=True) for length in lengths]
    expected = [output.outputs[0].text for output in llm.generate(PROMPTS, params)]

    async def ask(client: openai.AsyncOpenAI, index: int) -> str:
        request: Any = {"model": "tiny", "prompt": PROMPTS[index], **lasting(max_tokens=lengths[index])}
        if index % 2:
            chunks = await client.completions.create(**request, stream=True)
            return "".join([chunk.choices[0].text async for chunk in chunks])
        return (await client.completions.create(**request)).choices[0].text  # type: ignore[no-any-return]

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{address.url}/v1", api_key="none", max_retries=0) as client:
            return list(await asyncio.gather(*(ask(client, index) for index in range(16))))

    assert asyncio.run(ask_all()) == expected


def test_stop_strings_and_tokens_end_a_text(llm: LLM, client: openai.OpenAI) -> None:
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    (expected,) = llm.generate("Hello", params)
    text = expected.outputs[0].text
    stop = text[9:11]
    assert text.index(stop) > 0
    for stream in (False, True):
        answer: Any = client.completions.create(model="tiny", prompt="Hello", stop=[stop], stream=stream, **lasting())
        choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
        assert "".join(choice.text for choice in choices) == text[: text.index(stop)]
        assert (choices[-1].finish_reason, choices[-1].stop_reason) == ("stop", stop)
    token = expected.outputs[0].token_ids[6]
    body = {"ignore_eos": True, "stop_token_ids": [token]}
    answer = client.completions.create(model="tiny", prompt="Hello", **lasting(extra_body=body))
    assert answer.choices[0].stop_reason == token
    assert answer.usage.completion_tokens == expected.outputs[0].token_ids.index(token) + 1


def test_log_probabilities_of_both_forms(llm: LLM, client: openai.OpenAI) -> None:
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=2)
    (expected,) = llm.generate("Hello", params)
    output = expected.outputs[0]
    assert output.logprobs is not None
    chosen = [each[token] for token, each in zip(output.token_ids, output.logprobs, strict=True)]
    answer = client.completions.create(model="tiny", prompt="Hello", logprobs=2, **lasting(max_tokens=6))
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.tokens == [entry.decoded_token for entry in chosen]
    assert found.token_logprobs == pytest.approx([entry.logprob for entry in chosen], abs=1e-4)
    assert found.top_logprobs is not None
    assert all(1 <= len(top) <= 2 and max(top.values()) <= 0 for top in found.top_logprobs)
    assert found.text_offset == [sum(map(len, found.tokens[:index])) for index in range(6)]

    request: Any = {"model": "tiny", "messages": HELLO, "logprobs": True, "top_logprobs": 3, **lasting(max_tokens=6)}
    whole = client.chat.completions.create(**request).choices[0].logprobs.content
    assert [len(entry.top_logprobs) for entry in whole] == [3] * 6
    for entry in whole:
        best = entry.top_logprobs[0]
        assert (best.token, best.logprob) == (entry.token, entry.logprob)  # greedy: the chosen one is the likeliest
        assert [other.logprob for other in entry.top_logprobs] == sorted(
            (other.logprob for other in entry.top_logprobs), reverse=True
        )
        assert entry.bytes == (list(entry.token.encode()) if "\N{REPLACEMENT CHARACTER}" not in entry.token else None)
        assert math.exp(entry.logprob) <= 1
    streamed = []
    for chunk in client.chat.completions.create(**request, stream=True):
        if chunk.choices[0].logprobs is not None:
            streamed += chunk.choices[0].logprobs.content
    assert [entry.token for entry in streamed] == [entry.token for entry in whole]
    assert (
        client.chat.completions.create(**{**request, "logprobs": None, "top_logprobs": None}).choices[0].logprobs
        is None
    )


def test_a_prefix_that_is_shared_is_counted(client: openai.OpenAI) -> None:
    """Pages of 64 tokens; the last of the prompt is always read."""
    request: Any = {"model": "tiny", "prompt": "shared" * 25, **lasting(max_tokens=2)}
    counts = [client.completions.create(**request).usage.prompt_tokens_details.cached_tokens for _ in range(2)]
    assert counts == [0, 128]


def test_a_client_that_leaves_frees_its_pages(
    address: Address, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine stops behind a few steps: it might else end the text before the client has left."""
    stats, engine = address.server.runner.stats, address.server.runner._engine
    assert stats.free_pages == stats.num_pages
    step, steps = engine.step, count()

    def step_while_few() -> list[RequestOutput]:
        if next(steps) < 9:
            return step()
        time.sleep(0.002)
        return []

    monkeypatch.setattr(engine, "step", step_while_few)
    stream = client.completions.create(model="tiny", prompt="x" * 100, stream=True, **lasting(max_tokens=400))
    next(iter(stream))
    assert address.server.runner.stats.free_pages < stats.num_pages
    stream.close()
    eventually(lambda: address.server.runner.stats.free_pages == stats.num_pages)
    assert address.server.runner.stats.aborted_requests == stats.aborted_requests + 1
    assert address.server.runner.stats.generated_tokens < stats.generated_tokens + 400


def test_metrics_count_what_was_served(chat_model: Path, tokenizer: Tokenizer) -> None:
    with serving(lambda: load(chat_model).engine, tokenizer, max_model_len=512) as running:
        client = running.client()
        client.completions.create(model="tiny", prompt="Hello", **lasting(max_tokens=8))
        list(client.completions.create(model="tiny", prompt="Hello!", n=2, stream=True, **lasting(max_tokens=4)))
        eventually(lambda: running.server.runner.in_flight == 0)
        text = running.get("/metrics").text
    values = dict(re.findall(r"^futransformer_(\S+) (\S+)$", text, re.MULTILINE))
    for name, value in {
        'http_responses_total{path="/v1/completions",status="200"}': 2,
        'finished_texts_total{reason="length"}': 3,
        "prompt_tokens_total": 11,
        "generated_tokens_total": 16,
        "time_to_first_token_seconds_count": 3,
        "time_between_tokens_seconds_count": 13,
        "request_duration_seconds_count": 2,
        "running_sequences": 0,
        "waiting_sequences": 0,
        "in_flight_sequences": 0,
        "cache_pages": 64,
        "cache_usage_ratio": 0,
        "evictions_total": 0,
    }.items():
        assert float(values[name]) == value, name
    assert float(values["time_to_first_token_seconds_sum"]) > 0


def test_prompts_that_the_engine_refuses(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="outside the vocabulary of 258"):
        client.completions.create(model="tiny", prompt=[5, 258])
    with pytest.raises(openai.BadRequestError, match="the prompt is empty"):
        client.completions.create(model="tiny", prompt="")


@pytest.mark.parametrize(
    "extreme",
    [
        {"top_k": 10**30},
        {"temperature": 1e300},
        {"temperature": 1e-320},
        {"repetition_penalty": 1e300},
        {"repetition_penalty": 1e-320},
        {"top_p": 5e-324},
        {"min_p": 1},
        {"seed": 2**63 - 1},
        {"stop_token_ids": list(range(258))},
        {"logprobs": 20, "temperature": 1e300},
        {"stop": ["\x00", "x" * 10_000]},
        {"prompt": "\x00\N{PILE OF POO}"},
        {"prompt": [10**30]},
        {"prompt": [-1]},
        {"stop_token_ids": [2**40]},
        {"max_tokens": 10**30},
        {"min_tokens": 10**30},
        {"seed": 2**63},
    ],
)
def test_no_request_breaks_the_engine(address: Address, extreme: dict[str, Any]) -> None:
    """Each is served or refused; the engine serves the next."""
    request = {"prompt": "Hello", "max_tokens": 4, **extreme}
    response = address.post("/v1/completions", json=request)
    assert response.status_code in (200, 400), response.text
    assert address.get("/health").status_code == 200
