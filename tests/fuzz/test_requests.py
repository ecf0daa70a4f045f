"""Bodies of requests: an answer, or a refusal in OpenAI's form; the server goes on in either case."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from futransformer.serve.protocol import UNSERVED
from futransformer.tokenizer import Tokenizer
from tests.conftest import PATIENCE, make_tiny_model
from tests.fuzz.damage import MOST_MESSAGE, edited, json_text
from tests.serve.serving import ScriptedEngine, serving

COMMON = {
    "model": "tiny",
    "max_tokens": 3,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "seed": 1,
    "stop": ["z"],
    "stop_token_ids": [7],
    "n": 1,
}
CONTENT = [{"role": "system", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": "b"}]}]
BODIES: dict[str, list[Any]] = {
    "completions": [{**COMMON, "prompt": prompt} for prompt in ("Hi", ["a", "b"], [1, 2], [[1, 2], [3]])],
    "chat/completions": [
        {**COMMON, "messages": CONTENT},
        {"messages": CONTENT, "max_completion_tokens": 2, "logprobs": False},
        {**COMMON, "messages": CONTENT, "stream": True, "stream_options": {"include_usage": True}},
    ],
}
MORE = (*UNSERVED, "logprobs", "best_of", "ignore_eos", "stream", "stream_options", "min_p", "top_logprobs", "name")


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx2.Client]:
    template = "{% for message in messages %}{{ message.role[0] }}:{{ message.content }};{% endfor %}a:"
    folder = make_tiny_model(tmp_path_factory.mktemp("served") / "tiny", tied=False, chat_template=template)
    with (
        serving(ScriptedEngine, Tokenizer(folder), max_tokens_limit=20, max_body_bytes=200_000) as address,
        httpx2.Client(base_url=address.url, verify=False, timeout=PATIENCE) as connected,
    ):
        yield connected


@given(data=st.data())
@pytest.mark.parametrize("path", BODIES)
def test_a_body_is_answered_or_refused(client: httpx2.Client, path: str, data: st.DataObject) -> None:
    content = st.sampled_from(BODIES[path]).flatmap(lambda body: edited(body, MORE))
    body = data.draw(json_text(content), label="body")
    response = client.post(f"/v1/{path}", content=body, headers={"Content-Type": "application/json"})
    if response.status_code == 200:
        if response.headers["content-type"].startswith("text/event-stream"):
            assert response.text.endswith("data: [DONE]\n\n")
        else:
            choices = response.json()["choices"]
            assert [choice["index"] for choice in choices] == list(range(len(choices)))
            assert choices
    else:
        assert 400 <= response.status_code < 500, response.text
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert len(error["message"]) < MOST_MESSAGE
    assert client.get("/health").json() == {"status": "ok"}
