"""The key, sizes, queues, and clients that are slow or leave."""

from __future__ import annotations

import asyncio
import math
import socket
import threading
from types import SimpleNamespace
from typing import Any

import httpx2
import openai
import pytest

from futransformer.generator.errors import InputError
from futransformer.serve.server import bind
from futransformer.serve.settings import ServeSettings
from futransformer.tokenizer import Tokenizer
from tests.conftest import PATIENCE
from tests.serve.serving import Address, ScriptedEngine, Watch, eventually, serving


def held(**options: Any) -> ScriptedEngine:
    """An engine that does not step until it is allowed to."""
    engine = ScriptedEngine(**options)
    engine.hold()
    return engine


def begin(address: Address, **request: Any) -> Any:
    """A stream whose answer has begun, by its status."""
    content = {"model": "tiny", "prompt": "Hello", "max_tokens": 20, "stream": True, **request}
    return address.client().completions.create(**content)


def connect(address: Address) -> socket.socket:
    """A plain connection."""
    return socket.create_connection(address.server._listener.getsockname(), timeout=PATIENCE)


# The key


def test_the_key_opens_what_answers(tokenizer: Tokenizer) -> None:
    with serving(ScriptedEngine, tokenizer, api_key="s3cret") as running:
        right = running.client(api_key="s3cret")
        assert right.completions.create(model="tiny", prompt="Hello", max_tokens=1).choices[0].text == "a"
        assert len(right.models.list().data) == 2
        for key in ("none", "s3cre", "s3cret2"):
            with pytest.raises(openai.AuthenticationError, match="API key") as caught:
                running.client(api_key=key).models.list()
            assert caught.value.code == "invalid_api_key"
        assert running.post("/v1/completions", json={"prompt": "a"}).status_code == 401
        assert running.get("/v1/models", headers={"Authorization": "Basic s3cret"}).status_code == 401
        for path in ("health", "metrics"):  # for what watches the server
            assert running.get(f"/{path}").status_code == 200


def test_the_key_is_not_shown() -> None:
    assert "s3cret" not in repr(ServeSettings(("tiny",), api_key="s3cret"))


@pytest.mark.parametrize(
    "wrong",
    [
        *({"api_key": ""}, {"api_key": "schlüssel"}, {"names": ()}, {"names": ("",)}, {"max_queue": -1}),
        *({"grace_seconds": math.nan}, {"grace_seconds": math.inf}),
    ],
)
def test_settings_that_cannot_be_kept_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        ServeSettings(**{"names": ("tiny",), **wrong})


# Sizes


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("times", [2, 40])
def test_a_body_beyond_the_limit_is_refused_and_the_next_is_served(
    tokenizer: Tokenizer, chunked: bool, times: int
) -> None:
    """A little beyond it is read to its end, for the client to read why; far beyond it is cut off."""
    with serving(ScriptedEngine, tokenizer, max_body_bytes=50_000) as running:
        content = b'{"prompt":"' + b"x" * 50_000 * times + b'"}'
        pieces = (content[start : start + 10_000] for start in range(0, len(content), 10_000))
        try:
            response = running.post(
                "/v1/completions",
                content=pieces if chunked else content,
                headers={"Content-Type": "application/json"},
            )
        except httpx2.TransportError:
            assert times == 40
        else:
            assert response.status_code == 413
            assert response.json()["error"]["code"] == "request_too_large"
        assert running.client().completions.create(model="tiny", prompt="Hello", max_tokens=1).choices[0].text == "a"


def test_a_body_that_does_not_come_is_given_up(tokenizer: Tokenizer) -> None:
    with serving(ScriptedEngine, tokenizer, read_seconds=0.2) as running:
        Watch().give_to(running)  # the head may take longer
        with connect(running) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{")
            answer = b"".join(iter(lambda: connection.recv(4096), b""))
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"request_timeout" in answer


def test_a_request_that_breaks_off_does_no_harm(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine()
    with serving(lambda: engine, tokenizer) as running:
        with connect(running) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{")
        assert running.client().completions.create(model="tiny", prompt="Hello", max_tokens=1).choices[0].text == "a"
        assert engine.added == 1


# Queues


def test_the_queue_has_an_end_and_the_client_comes_again(tokenizer: Tokenizer) -> None:
    """Four run and two wait; a seventh is sent away until one of them has finished."""
    engine = held()
    with serving(lambda: engine, tokenizer, max_queue=2) as running:
        streams = [begin(running) for _ in range(6)]
        with pytest.raises(openai.RateLimitError, match="the queue is full") as caught:
            begin(running)
        assert caught.value.response.headers["retry-after"] == "1"
        assert (engine.stats().running, engine.stats().waiting) == (4, 2)
        # The engine's thread counts what it has taken when it has said so.
        eventually(lambda: "futransformer_waiting_sequences 2.0" in running.get("/metrics").text)
        refused = 'futransformer_http_responses_total{path="/v1/completions",status="429"} 1.0'
        assert refused in running.get("/metrics").text
        seventh: list[str] = []

        def insist() -> None:
            client = running.client(max_retries=5)
            seventh.append(client.completions.create(model="tiny", prompt="Hello", max_tokens=2).choices[0].text)

        insisting = threading.Thread(target=insist)
        insisting.start()
        engine.allow()
        assert ["".join(chunk.choices[0].text for chunk in stream) for stream in streams] == [TWENTY] * 6
        insisting.join(PATIENCE)
        assert seventh == ["ab"]
        eventually(lambda: running.server.runner.in_flight == 0)  # a stream gives its places back behind its end


TWENTY = "abcdefghijklmnopqrst"


def test_places_are_counted_by_texts(tokenizer: Tokenizer) -> None:
    engine = held()
    with serving(lambda: engine, tokenizer, max_queue=2) as running:
        stream = begin(running, prompt=["a", "b"], n=2)
        with pytest.raises(openai.RateLimitError):
            begin(running, n=3)
        other = begin(running, n=2)
        engine.allow()
        assert len(list(stream)) >= 4
        assert len(list(other)) >= 2


def test_a_refused_request_gives_its_places_back(tokenizer: Tokenizer) -> None:
    with serving(ScriptedEngine, tokenizer, max_queue=0) as running:
        client = running.client()
        for _ in range(5):
            with pytest.raises(openai.BadRequestError, match="vocabulary"):
                client.completions.create(model="tiny", prompt=[[1], [2], [3], [1000]])
        assert running.server.runner.in_flight == 0
        assert len(client.completions.create(model="tiny", prompt=[[1], [2], [3], [4]]).choices) == 4


# Clients that leave, and slow ones


async def ask_and_leave(address: Address, engine: ScriptedEngine) -> None:
    """Give up an answer that comes whole, when the engine has the request."""
    transport = openai.DefaultAsyncHttpxClient(verify=False)
    async with openai.AsyncOpenAI(base_url=f"{address.url}/v1", api_key="none", http_client=transport) as client:
        asking = asyncio.ensure_future(client.completions.create(model="tiny", prompt="Hello"))
        await asyncio.to_thread(eventually, lambda: bool(engine.requests))
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_pages(tokenizer: Tokenizer, stream: bool) -> None:
    engine = held()
    with serving(lambda: engine, tokenizer) as running:
        if stream:
            answer = begin(running, n=2)
            engine.allow(3)
            assert next(iter(answer)).choices[0].text
            answer.close()
        else:
            asyncio.run(ask_and_leave(running, engine))
        eventually(lambda: running.server.runner.in_flight == 0)
        eventually(lambda: engine.aborted == 1)
        assert engine.stats().free_pages == engine.stats().num_pages
        assert 'futransformer_finished_texts_total{reason="abort"}' in running.get("/metrics").text
        engine.allow()
        assert running.client().completions.create(model="tiny", prompt="Hello", max_tokens=1).choices[0].text == "a"


def test_one_prompt_of_several_that_is_refused_aborts_the_others(tokenizer: Tokenizer) -> None:
    engine = held()
    with serving(lambda: engine, tokenizer) as running:
        with pytest.raises(openai.BadRequestError, match="vocabulary"):
            begin(running, prompt=[[1], [1000], [2]])
        eventually(lambda: engine.aborted == 1)
        assert engine.requests == {}


def test_what_a_slow_client_did_not_take_is_joined(tokenizer: Tokenizer) -> None:
    engine = held(max_model_len=5000)
    with serving(lambda: engine, tokenizer, max_model_len=5000) as running:
        stream = begin(running, max_tokens=4000)
        job = next(iter(running.server.runner._held))
        started = threading.Event()
        blocked = threading.Event()

        def block() -> None:  # the event loop, as a busy one is
            started.set()
            blocked.wait(PATIENCE)

        loop = running.server.runner._loop
        assert loop is not None
        loop.call_soon_threadsafe(block)
        started.wait(PATIENCE)
        engine.allow()
        eventually(lambda: not engine.requests)
        blocked.set()
        chunks = [chunk.choices[0].text for chunk in stream]
        assert "".join(chunks) == "".join(chr(ord("a") + index % 26) for index in range(4000))
        assert len(chunks) < 100
        assert job._pending == {}


def test_a_client_that_never_reads_is_given_up(tokenizer: Tokenizer) -> None:
    """More than both sockets hold is written to it; its neighbour's answer does not wait.

    64 texts of 2000 characters: 128 kB even if they come in one piece. An engine that went on meanwhile would take the
    processor from the thread that has to give the client up.
    """
    engine = held()
    answers: list[str] = []

    def ask() -> None:
        answer = running.client().completions.create(model="tiny", prompt="Hello", max_tokens=2)
        answers.append(answer.choices[0].text)

    with serving(lambda: engine, tokenizer, max_model_len=10**6, write_seconds=0.3) as running:
        running.server._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with connect(running) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            body = b'{"prompt":"a","max_tokens":900000,"n":64,"stream":true}'
            kind = b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n" + kind + body)
            eventually(lambda: engine.added == 1)
            engine.allow(2000)
            eventually(lambda: engine.steps == 2000)
            asking = threading.Thread(target=ask)
            asking.start()
            eventually(lambda: engine.added == 2)
            engine.allow(2)
            asking.join(PATIENCE)
            assert answers == ["ab"]
            eventually(lambda: running.server.runner.in_flight == 0)
            eventually(lambda: engine.aborted == 1)


# Addresses


def test_an_address_that_is_taken_is_refused_before_a_model_is_loaded() -> None:
    with bind("127.0.0.1", 0) as first:
        first.listen()
        with pytest.raises(InputError, match="choose others by --host and --port"):
            bind("127.0.0.1", first.getsockname()[1])
    with pytest.raises(InputError, match="cannot listen on"):
        bind("no.such.host.invalid", 8000)
    with pytest.raises(InputError, match=r"--port is 0 \.\. 65535"):
        bind("127.0.0.1", 99999)


def test_time_is_not_lost_between_requests(tokenizer: Tokenizer) -> None:
    """An idle engine's thread wakes by the command, not by a clock; one that has work waits for none."""
    engine = ScriptedEngine()
    with serving(lambda: engine, tokenizer) as running:
        runner: Any = running.server.runner
        inbox = runner._inbox
        waits: set[tuple[bool, bool, float | None]] = set()

        def get(block: bool = True, timeout: float | None = None) -> Any:
            waits.add((engine.has_unfinished(), block, timeout))
            return inbox.get(block, timeout)

        runner._inbox = SimpleNamespace(put=inbox.put, get=get)
        client = running.client()
        for _ in range(20):
            client.completions.create(model="tiny", prompt="Hello", max_tokens=1)
        assert waits == {(False, True, None), (True, False, None)}
