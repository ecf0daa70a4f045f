"""How a server ends, and what an engine's failure does to it."""

from __future__ import annotations

import threading
import time
from typing import Any

import httpx2
import openai
import pytest

from futransformer.tokenizer import Tokenizer
from tests.conftest import PATIENCE
from tests.serve.serving import Address, ScriptedEngine, eventually, serving


def held(**options: Any) -> ScriptedEngine:
    """An engine that does not step until it is allowed to."""
    engine = ScriptedEngine(**options)
    engine.hold()
    return engine


def begin(address: Address, **request: Any) -> Any:
    """A stream whose answer has begun, by its status."""
    content = {"model": "tiny", "prompt": "Hello", "max_tokens": 20, "stream": True, **request}
    return address.client().completions.create(**content)


class Waiting:
    """A request whose answer comes whole, in a thread of its own."""

    def __init__(self, address: Address) -> None:
        """Send it."""
        self.answer: Any = None
        self._client = address.client()
        self._thread = threading.Thread(target=self._ask)
        self._thread.start()

    def _ask(self) -> None:
        try:
            self.answer = self._client.completions.create(model="tiny", prompt="Hello", max_tokens=20)
        except openai.OpenAIError as error:
            self.answer = error

    def result(self) -> Any:
        """The answer, or the error."""
        self._thread.join(PATIENCE)
        return self.answer


def text_of(stream: Any) -> str:
    """What a stream of completions says."""
    return "".join(chunk.choices[0].text for chunk in stream)


# Failure


def test_a_failed_engine_answers_500_and_then_503(tokenizer: Tokenizer) -> None:
    """The requests under way hear why, streams in their last event; /health turns, and nothing is taken any more."""
    engine = held(breaks_at=3)
    with serving(lambda: engine, tokenizer) as running:
        assert running.get("/health").json() == {"status": "ok"}
        stream, whole = begin(running), Waiting(running)
        eventually(lambda: len(engine.requests) == 2)
        engine.allow()
        said = []
        with pytest.raises(openai.APIError, match="the engine failed: RuntimeError: a planted fault"):
            said += [chunk.choices[0].text for chunk in stream]
        assert isinstance(whole.result(), openai.InternalServerError)
        assert whole.result().status_code == 500
        assert "a planted fault" in str(whole.result())
        response = running.get("/health")
        assert response.status_code == 503
        assert "a planted fault" in response.json()["error"]["message"]
        with pytest.raises(openai.InternalServerError) as caught:
            running.client().completions.create(model="tiny", prompt="Hello")
        assert caught.value.status_code == 503
        eventually(lambda: "futransformer_in_flight_sequences 0.0" in running.get("/metrics").text)


def test_an_engine_that_fails_while_it_takes_a_request_answers_it(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine()
    engine.add_request = None  # type: ignore[assignment, method-assign]  # a fault that is no refusal
    with serving(lambda: engine, tokenizer) as running:
        with pytest.raises(openai.InternalServerError, match="the engine failed: TypeError"):
            running.client().completions.create(model="tiny", prompt="Hello")
        assert running.get("/health").status_code == 503


# The end


def test_answers_under_way_are_finished_within_the_grace(tokenizer: Tokenizer) -> None:
    engine = held()
    with serving(lambda: engine, tokenizer, grace_seconds=PATIENCE) as running:
        stream, whole = begin(running), Waiting(running)
        eventually(lambda: len(engine.requests) == 2)
        running.server.end()
        eventually(lambda: running.server._listener.fileno() == -1)
        assert running.server.runner.draining
        with pytest.raises(httpx2.ConnectError):
            running.get("/health")
        engine.allow()
        assert text_of(stream) == "abcdefghijklmnopqrst"
        assert whole.result().choices[0].text == "abcdefghijklmnopqrst"
        assert running.ended.wait(PATIENCE)


def test_what_takes_longer_than_the_grace_ends_with_an_error(tokenizer: Tokenizer) -> None:
    engine = held()
    with serving(lambda: engine, tokenizer, grace_seconds=0.3) as running:
        stream, whole = begin(running), Waiting(running)
        eventually(lambda: len(engine.requests) == 2)
        running.server.end()
        with pytest.raises(openai.APIError, match="shutting down"):
            text_of(stream)
        assert whole.result().status_code == 503
        assert running.ended.wait(PATIENCE)
    assert engine.requests == {}
    assert engine.aborted == 2


def test_a_second_request_to_end_does_not_wait(tokenizer: Tokenizer) -> None:
    with serving(held, tokenizer, grace_seconds=600) as running:
        begin(running)
        start = time.monotonic()
        running.server.end()
        eventually(lambda: running.server.runner.draining)
        running.server.end()
        assert running.ended.wait(PATIENCE)
        assert time.monotonic() - start < 5


def test_a_server_that_drains_takes_nothing_more_on_old_connections(tokenizer: Tokenizer) -> None:
    engine = held()
    with serving(lambda: engine, tokenizer, grace_seconds=PATIENCE) as running:
        stream = begin(running)
        running.server.runner.draining = True
        with httpx2.Client(base_url=running.url, verify=False) as client:
            assert client.get("/health").status_code == 503
            assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 503
        running.server.end()
        engine.allow()
        assert text_of(stream) == "abcdefghijklmnopqrst"
