"""What no client library sends: malformed, oversized, slow and cut-off requests, on plain sockets."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from futransformer.serve.connections import Heads
from futransformer.tokenizer import Tokenizer
from tests.conftest import PATIENCE
from tests.serve.serving import Address, ScriptedEngine, Watch, eventually, serving
from tests.serve.test_limits import connect, held

JSON = b"Content-Type: application/json\r\n"


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture(scope="module")
def watch() -> Watch:
    return Watch()


@pytest.fixture(scope="module")
def address(tokenizer: Tokenizer, engine: ScriptedEngine, watch: Watch) -> Iterator[Address]:
    with serving(lambda: engine, tokenizer, read_seconds=PATIENCE) as running:
        watch.give_to(running)
        yield running


@pytest.fixture(autouse=True)
def unharmed(address: Address, watch: Watch) -> Iterator[None]:
    """After each test the next client is served, and nothing is held."""
    yield
    watch.step = 0
    assert address.get("/health").status_code == 200
    with address.client() as client:
        assert client.completions.create(model="tiny", prompt="Hello", max_tokens=2).choices[0].text == "ab"
    runner = address.server.runner
    eventually(lambda: (runner.in_flight, runner._jobs, runner._held) == (0, {}, set()))
    eventually(lambda: not address.server._server.server_state.connections)


def request(body: bytes, head: bytes = JSON, *, path: bytes = b"/v1/completions") -> bytes:
    """A whole request whose connection is closed after it."""
    lines = b"POST " + path + b" HTTP/1.1\r\nHost: a\r\nConnection: close\r\n" + head
    return lines + b"Content-Length: %d\r\n\r\n" % len(body) + body


def rest(connection: socket.socket) -> bytes:
    """All that comes until the server closes; a reset is an end, too."""
    found = b""
    with suppress(ConnectionResetError):
        while piece := connection.recv(65536):
            found += piece
    return found


def exchange(address: Address, sent: bytes) -> bytes:
    """Send it and read to the end."""
    with connect(address) as connection:
        with suppress(BrokenPipeError, ConnectionResetError):  # refused before its end
            connection.sendall(sent)
        return rest(connection)


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n" + JSON
MALFORMED = {
    "no text": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 9 + b"\r\n\r\n",
    "no version": b"GET /health\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "a line without a colon": b"GET /health HTTP/1.1\r\nHost a\r\n\r\n",
    "a byte of zero": b"GET /health HTTP/1.1\r\nHost: a\x00b\r\n\r\n",
    "a long path": b"GET /" + b"x" * 200_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
    "many lines": b"GET /health HTTP/1.1\r\nHost: a\r\n" + b"X-A: b\r\n" * 20_000 + b"\r\n",
    "a negative length": HEAD + b"Content-Length: -1\r\n\r\n{}",
    "a length in words": HEAD + b"Content-Length: ten\r\n\r\n{}",
    "two lengths": HEAD + b"Content-Length: 2\r\nContent-Length: 30\r\n\r\n{}",
    "a piece of no size": HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    "an encoding of its own": HEAD + b"Transfer-Encoding: gzip\r\n\r\n{}",
}


@pytest.mark.parametrize("sent", MALFORMED.values(), ids=MALFORMED.keys())
def test_what_is_no_http_is_refused(address: Address, engine: ScriptedEngine, sent: bytes) -> None:
    before = engine.added
    answer = exchange(address, sent)
    assert answer[:12] in (b"HTTP/1.1 400", b"HTTP/1.1 501", b"HTTP/1.1 404", b"HTTP/1.1 431"), answer[:200]
    assert engine.added == before


BODIES = {
    "nothing": b"",
    "no JSON": b"prompt=Hello",
    "half of it": b'{"prompt": "Hel',
    "no text": b'{"prompt": "\xff\xfe"}',
    "half a character": b'{"prompt": "\\ud800"}',
    "a list": b"[1, 2, 3]",
    "null": b"null",
    "no number": b'{"prompt": "a", "temperature": NaN}',
    "a number beyond all": b'{"prompt": "a", "max_tokens": 1e999}',
    "a long number": b'{"prompt": "a", "max_tokens": ' + b"9" * 6000 + b"}",
    "deep": b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep objects": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    "a token of text": b'{"prompt": [1, "2"]}',
    "a token beyond int64": b'{"prompt": [%d]}' % 2**70,
    "an empty prompt": b'{"prompt": []}',
    "too many texts": b'{"prompt": "a", "n": 1000000000}',
    "messages of nothing": b'{"messages": [null]}',
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
@pytest.mark.parametrize("path", [b"/v1/completions", b"/v1/chat/completions"])
def test_what_is_no_request_is_refused_with_a_reason(address: Address, path: bytes, body: bytes) -> None:
    head, _, told = exchange(address, request(body, path=path)).partition(b"\r\n\r\n")
    assert head.startswith((b"HTTP/1.1 400", b"HTTP/1.1 422", b"HTTP/1.1 429")), head + told[:300]
    error = json.loads(told)["error"]
    assert error["message"]
    assert len(error["message"]) < 1000


def test_a_request_byte_by_byte_is_served(address: Address) -> None:
    with connect(address) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in request(b'{"prompt":"a","max_tokens":3}'):
            connection.sendall(bytes([byte]))
        answer = rest(connection)
    assert answer.startswith(b"HTTP/1.1 200")
    assert b'"abc"' in answer


def test_two_requests_at_once_are_answered_in_order(address: Address) -> None:
    ask = b"GET /v1/models/%s HTTP/1.1\r\nHost: a\r\n%s\r\n"
    answer = exchange(address, ask % (b"tiny", b"") + ask % (b"other", b"Connection: close\r\n"))
    assert answer.count(b"HTTP/1.1 200") == 2
    assert answer.index(b'"id":"tiny"') < answer.index(b'"id":"other"')


def test_a_client_that_waits_for_leave_to_send_gets_it(address: Address) -> None:
    body = b'{"prompt":"a","max_tokens":1}'
    with connect(address) as connection:
        head = request(body, JSON + b"Expect: 100-continue\r\n")
        connection.sendall(head.removesuffix(body))
        assert connection.recv(4096).startswith(b"HTTP/1.1 100")
        connection.sendall(body)
        assert rest(connection).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("sent", [b"", b"POST /v1/comp", HEAD, b"GET /health HTTP/1.1\r\nHost: a\r\n\r\nGET /he"])
def test_a_head_that_does_not_end_is_given_up(address: Address, watch: Watch, sent: bytes) -> None:
    """After as long as a body may take, whether or not an answer came before on this connection."""
    begin = watch.now
    with connect(address) as connection:
        connection.sendall(sent)
        answer = connection.recv(65536) if b"\r\n\r\n" in sent else b""
        watch.step = PATIENCE / 4
        answer += rest(connection)
    assert answer.count(b"HTTP/1.1") == sent.count(b"\r\n\r\n")
    assert watch.now - begin > PATIENCE


def test_a_head_that_trickles_is_given_up(address: Address, watch: Watch) -> None:
    """Bytes that keep coming are no request."""
    begin = watch.now
    with connect(address) as connection:
        sent = 0
        watch.step = PATIENCE / 4
        with suppress(BrokenPipeError, ConnectionResetError):
            while sent < 2000:
                connection.sendall(b"X-A: b\r\n" if sent else b"GET /health HTTP/1.1\r\n")
                time.sleep(0.05)
                sent += 1
        assert 0 < sent < 2000
    assert watch.now - begin > PATIENCE


@dataclass(eq=False)
class Connection:
    """What is read of uvicorn's."""

    cycle: Any
    transport: Any


def test_connections_that_ask_again_and_again_stay() -> None:
    """However often they are seen between two requests."""
    closed: list[str] = []

    def connection(name: str) -> Any:
        return Connection(None, SimpleNamespace(close=lambda: closed.append(name)))

    heads, busy, silent, working = Heads(1.0), connection("busy"), connection("silent"), connection("working")
    working.cycle = SimpleNamespace(response_complete=False)
    for tenth in range(40):
        busy.cycle = SimpleNamespace(response_complete=True)
        heads.sweep([busy, silent, working] if tenth < 12 else [busy, working], tenth / 10)
    assert closed == ["silent"]


@pytest.mark.parametrize("kind", ["closed", "half closed", "reset"])
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_cut_off_frees_its_places(tokenizer: Tokenizer, kind: str, stream: bool) -> None:
    engine = held()
    with serving(lambda: engine, tokenizer) as running:
        connection = connect(running)
        connection.sendall(request(b'{"prompt":"a","max_tokens":20,"stream":%s}' % (b"true" if stream else b"false")))
        eventually(lambda: bool(engine.requests))
        engine.allow(2)
        eventually(lambda: engine.steps == 2)
        if kind == "half closed":
            connection.shutdown(socket.SHUT_WR)
        else:
            if kind == "reset":
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
        eventually(lambda: running.server.runner.in_flight == 0)
        eventually(lambda: engine.aborted == 1)
        connection.close()


def test_a_body_that_is_cut_off_reserves_nothing(address: Address, engine: ScriptedEngine) -> None:
    before = engine.added
    whole = request(b'{"prompt":"a","max_tokens":3}')
    for length in (10, len(whole) // 2, len(whole) - 1):
        with connect(address) as connection:
            connection.sendall(whole[:length])
    assert address.get("/health").status_code == 200
    assert engine.added == before
