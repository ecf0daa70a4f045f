"""What requests may ask and how answers look, over an engine that writes "abc..." to everyone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest

from futransformer.serve.protocol import UNSERVED
from futransformer.tokenizer import Tokenizer
from tests.serve.serving import Address, ScriptedEngine, serving

HELLO: Any = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def address(tokenizer: Tokenizer) -> Iterator[Address]:
    sampling = {"temperature": 0.5}
    with serving(ScriptedEngine, tokenizer, max_tokens_limit=100, sampling=sampling) as running:
        yield running


@pytest.fixture(scope="module")
def client(address: Address) -> openai.OpenAI:
    return address.client()


def post(address: Address, path: str, **content: Any) -> httpx2.Response:
    """A request as it stands, of a type that the client would not let pass."""
    headers = {"Content-Type": "application/json", **content.pop("headers", {})}
    return address.post(f"/v1/{path}", headers=headers, **content)


def error_of(response: httpx2.Response, status: int) -> dict[str, Any]:
    """What an error in OpenAI's form says."""
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


# Answers


def test_a_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="Hello", max_tokens=5)
    assert (answer.object, answer.model) == ("text_completion", "tiny")
    assert [(c.index, c.text, c.finish_reason) for c in answer.choices] == [(0, "abcde", "length")]
    assert answer.usage is not None
    counts = (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens)
    assert counts == (5, 5, 10)
    assert client.completions.create(model="other", prompt=[1, 2], max_tokens=1).choices[0].text == "a"


def test_a_completion_has_sixteen_tokens_unless_told(client: openai.OpenAI) -> None:
    assert client.completions.create(model="tiny", prompt="Hello").choices[0].text == "abcdefghijklmnop"


def test_several_prompts_and_texts_are_numbered_prompt_by_prompt(client: openai.OpenAI) -> None:
    for prompt in (["Hi", "Hello"], [[1, 2], [3, 4, 5, 6, 7]]):
        answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=3, n=2)
        assert [(choice.index, choice.text) for choice in answer.choices] == [(i, "abc") for i in range(4)]
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (7, 12)


def test_an_answer_of_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=4)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "abcd", "length")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len("_u:Hello;a:")  # the template, with <s> as one token


def test_chat_answers_at_the_limits_length_unless_told(client: openai.OpenAI) -> None:
    """The context of 128 has room for more than the server's limit of 100, or for less."""
    assert len(client.chat.completions.create(model="tiny", messages=HELLO).choices[0].message.content or "") == 100
    long: Any = [{"role": "user", "content": "x" * 50}]
    content = client.chat.completions.create(model="tiny", messages=long).choices[0].message.content
    assert len(content or "") == 128 - len("_u:;a:") - 50


def test_the_newer_name_of_chats_limit_comes_first(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=4, max_completion_tokens=2)
    assert answer.choices[0].message.content == "ab"


def test_parts_of_text_are_one_text_and_a_developer_is_the_system(client: openai.OpenAI) -> None:
    parts: Any = [{"type": "text", "text": "He"}, {"type": "text", "text": "llo"}]
    one = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "developer", "content": "Be."}, {"role": "user", "content": parts}],
        max_tokens=1,
    )
    assert one.usage is not None
    assert one.usage.prompt_tokens == len("_s:Be.;u:Hello;a:")


def test_a_stream_of_chat(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=HELLO, max_tokens=30, n=2, stream=True, stream_options=options
        )
    )
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    assert [chunk.choices[0].delta.role for chunk in chunks[:2]] == ["assistant"] * 2
    for index in range(2):
        choices = [chunk.choices[0] for chunk in chunks[:-1] if chunk.choices[0].index == index]
        assert "".join(choice.delta.content or "" for choice in choices) == "abcdefghijklmnopqrstuvwxyzabcd"
        assert [choice.finish_reason for choice in choices] == [None] * (len(choices) - 1) + ["length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 60
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_a_stream_of_completions_ends_with_done(address: Address) -> None:
    request = {"prompt": "Hello", "max_tokens": 3, "stream": True}
    response = post(address, "completions", json=request)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert '"usage"' not in response.text
    assert all(event.startswith("data: {") for event in events[:-2])


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "other"]
    assert client.models.retrieve("other").owned_by == "futransformer"
    with pytest.raises(openai.NotFoundError, match="ask for tiny, other"):
        client.models.retrieve("gpt")


def test_the_model_may_be_left_out(address: Address) -> None:
    assert post(address, "completions", json={"prompt": "Hello", "max_tokens": 1}).json()["model"] == "tiny"


# What the engine is asked for


def test_sampling_reaches_the_engine(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine()
    engine.hold()
    extra = {
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.5,
        "ignore_eos": True,
        "stop_token_ids": [3],
        "min_tokens": 1,
        "skip_special_tokens": False,
        "user": "someone",
        "no_such_field": 1,
        "frequency_penalty": 0.0,
    }
    with (
        serving(lambda: engine, tokenizer, sampling={"temperature": 0.5, "top_p": 0.25}) as running,
        running.client().chat.completions.with_streaming_response.create(
            model="tiny",
            messages=HELLO,
            max_tokens=9,
            n=2,
            seed=5,
            stop="x",
            temperature=0.75,
            logprobs=True,
            top_logprobs=2,
            stream=True,
            extra_body=extra,
        ),
    ):
        (request,) = engine.requests.values()
        params = request.params
    assert (params.n, params.seed, params.stop, params.stop_token_ids, params.logprobs) == (2, 5, ("x",), (3,), 2)
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.75, 0.25, 7, 0.1)
    assert (params.repetition_penalty, params.ignore_eos, params.min_tokens, params.max_tokens) == (1.5, True, 1, 9)
    assert params.skip_special_tokens is False
    assert tokenizer.decode(request.prompt) == "u:Hello;a:"


# Refusals


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({}, "prompt", "Field required"),
        ({"prompt": {}}, "prompt", "a valid string or a valid list"),
        ({"prompt": [1.5]}, "prompt", "a valid integer"),
        ({"prompt": []}, "prompt", "empty list"),
        ({"prompt": [[]]}, None, "the prompt is empty"),
        ({"prompt": "a", "temperature": "0"}, "temperature", "a valid number"),
        ({"prompt": "a", "temperature": -1}, "temperature", "at least 0"),
        ({"prompt": "a", "top_p": 0}, "top_p", "above 0"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens", "at least 1"),
        ({"prompt": "a", "max_tokens": 1.0}, "max_tokens", "a valid integer"),
        ({"prompt": "a", "max_tokens": True}, "max_tokens", "a valid integer"),
        ({"prompt": "a", "max_tokens": 101}, "max_tokens", "at most 100"),
        ({"prompt": "a", "n": 0}, "n", "at least 1"),
        ({"prompt": "a", "n": 1000}, None, "at most 260"),
        ({"prompt": "a", "stop": [""]}, "stop", "empty string"),
        ({"prompt": "a", "stop": [1]}, "stop", "valid string"),
        ({"prompt": "a", "stop": ["a"] * 65}, "stop", "at most 64"),
        ({"prompt": "a" * (128 * 256 + 1)}, "prompt", "does not fit"),
        ({"prompt": "a", "logprobs": 21}, "logprobs", "less than or equal to 20"),
        ({"prompt": "a", "seed": 2**63}, "seed", "9223372036854775807"),
        ({"prompt": "a", "seed": 10**400}, "seed", "9223372036854775807"),
        ({"prompt": "a", "stop_token_ids": [10**400]}, "stop_token_ids[0]", "9223372036854775807"),
        ({"prompt": [10**400]}, "prompt", "prompt"),
        ({"prompt": "a", "best_of": 2}, "best_of", "not served"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options", "of a stream"),
        ({"prompt": [5, 1000]}, None, "outside the vocabulary"),
        ([1], None, "JSON object"),
    ],
)
def test_a_completion_is_refused_by_the_field(address: Address, body: Any, param: str | None, says: str) -> None:
    error = error_of(post(address, "completions", json=body), 400)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert says in error["message"]


@pytest.mark.parametrize(
    ("messages", "param", "says"),
    [
        ([], "messages", "empty"),
        ("Hello", "messages", "a valid list"),
        ([{"role": "user", "content": 5}], "messages[0].content", "a valid string or a valid list"),
        ([{"role": "robot", "content": "a"}], "messages[0].role", "'assistant'"),
        ([*HELLO, {"role": "user", "content": [{"type": "image_url"}]}], "messages[1].content", "'image_url'"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls", "tools are not served"),
        ([*HELLO, {"role": "system", "content": "a"}], "messages", "system comes first"),
    ],
)
def test_messages_are_refused_by_their_place(address: Address, messages: Any, param: str, says: str) -> None:
    error = error_of(post(address, "chat/completions", json={"messages": messages}), 400)
    assert error["param"] == param
    assert says in error["message"]


@pytest.mark.parametrize("name", sorted(UNSERVED))
def test_what_would_change_the_answer_is_refused_by_name_and_only_that(address: Address, name: str) -> None:
    request = {"messages": HELLO, "max_tokens": 1}
    error = error_of(post(address, "chat/completions", json={**request, name: ["something"]}), 400)
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")
    for neutral in (None, *UNSERVED[name]):
        assert post(address, "chat/completions", json={**request, name: neutral}).status_code == 200


def test_alternatives_need_log_probabilities(address: Address) -> None:
    error = error_of(post(address, "chat/completions", json={"messages": HELLO, "top_logprobs": 2}), 400)
    assert error["param"] == "top_logprobs"


def test_a_context_that_is_too_long_has_openais_code(address: Address, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="the prompt has 128 and leaves no room") as caught:
        client.completions.create(model="tiny", prompt="x" * 128)
    assert caught.value.code == "context_length_exceeded"
    error = error_of(post(address, "completions", json={"prompt": "x" * 60, "max_tokens": 69}), 400)
    assert error["code"] == "context_length_exceeded"
    assert post(address, "completions", json={"prompt": "x" * 60, "max_tokens": 68}).status_code == 200


def test_another_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no model 'gpt' here") as caught:
        client.completions.create(model="gpt", prompt="Hello")
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize("content", [b'{"prompt":', b"\xff\xfe", b"[" * 100_000, b""])
def test_what_is_no_json_is_refused(address: Address, content: bytes) -> None:
    error_of(post(address, "completions", content=content), 400)


def test_numbers_and_texts_that_are_none_are_refused(address: Address) -> None:
    error = error_of(post(address, "completions", content=b'{"prompt":"a","temperature":NaN}'), 400)
    assert "finite" in error["message"]
    error = error_of(post(address, "completions", content=b'{"prompt":"\\ud800"}'), 400)
    assert "not UTF-8" in error["message"]


def test_a_body_that_does_not_call_itself_json_is_refused(address: Address) -> None:
    """A page of a browser may send text/plain to another origin unasked, but not this."""
    response = post(address, "completions", content=b'{"prompt":"a"}', headers={"Content-Type": "text/plain"})
    assert "Content-Type: application/json" in error_of(response, 400)["message"]


def test_other_paths_and_methods_have_errors_of_the_same_form(address: Address) -> None:
    error_of(address.get("/v1/completions"), 405)
    error_of(address.get("/v1/embeddings"), 404)


def test_a_base_model_does_not_chat(tiny_base_model: Any) -> None:
    with serving(ScriptedEngine, Tokenizer(tiny_base_model)) as running:
        client = running.client()
        with pytest.raises(openai.BadRequestError, match=r"base model.*no chat template.*/v1/completions"):
            client.chat.completions.create(model="tiny", messages=HELLO)
        assert client.completions.create(model="tiny", prompt="Hello", max_tokens=2).choices[0].text == "ab"
