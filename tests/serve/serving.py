"""A server in threads of this process, and an engine whose steps a test allows one by one."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx2
from openai import DefaultHttpxClient, OpenAI

from futransformer.engine import CompletionOutput, Engine, EngineStats, RequestMetrics, RequestOutput, SamplingParams
from futransformer.generator.errors import InputError
from futransformer.serve.server import HttpServer, bind
from futransformer.serve.settings import ServeSettings
from futransformer.tokenizer import Tokenizer
from tests.conftest import PATIENCE

PAGES = 100


@dataclass
class Scripted:
    """A request of the scripted engine."""

    prompt: list[int]
    params: SamplingParams
    metrics: RequestMetrics
    written: int = 0


@dataclass
class ScriptedEngine(Engine):
    """Writes "abc..." to every request, a character a step and text; a page a text. It waits for ``allow``."""

    max_num_seqs: int = 4
    max_model_len: int = 128
    allowed: float = math.inf  # steps
    breaks_at: int | None = None  # the step that raises
    requests: dict[str, Scripted] = field(default_factory=dict)
    steps: int = 0
    added: int = 0
    aborted: int = 0

    def hold(self) -> None:
        """No step from now on, but those that are allowed."""
        self.allowed = 0

    def allow(self, steps: float = math.inf) -> None:
        """Let it step so many times, when all that were allowed before are done."""
        self.allowed = steps

    def add_request(self, request_id: str, prompt: str | Sequence[int], params: SamplingParams | None = None) -> None:
        """Take some token ids below 1000."""
        assert not isinstance(prompt, str)
        assert params is not None
        if not prompt:
            raise InputError("the prompt is empty: give at least one token")
        if max(prompt) >= 1000:
            raise InputError(f"token {max(prompt)} is outside the vocabulary of 1000")
        self.added += 1
        self.requests[request_id] = Scripted(list(prompt), params, RequestMetrics(time.monotonic()))

    def abort(self, request_id: str) -> bool:
        """Forget it."""
        known = self.requests.pop(request_id, None) is not None
        self.aborted += known
        return known

    def has_unfinished(self) -> bool:
        """Whether a request is left."""
        return bool(self.requests)

    def step(self) -> list[RequestOutput]:
        """A character to each text of those that run, if a step is allowed."""
        if not self.allowed:
            time.sleep(0.002)
            return []
        self.allowed -= 1
        self.steps += 1
        if self.steps == self.breaks_at:
            raise RuntimeError("a planted fault")
        return [self._write(request_id) for request_id in list(self.requests)[: self.max_num_seqs]]

    def _write(self, request_id: str) -> RequestOutput:
        request = self.requests[request_id]
        character = chr(ord("a") + request.written % 26)
        request.written += 1
        ends = request.written == request.params.max_tokens
        if ends:
            del self.requests[request_id]
        texts = [
            CompletionOutput(index, character, [ord(character)], None, "length" if ends else None)
            for index in range(request.params.n)
        ]
        return RequestOutput(request_id, None, request.prompt, texts, ends, request.metrics)

    def stats(self) -> EngineStats:
        """Counts of what runs."""
        running = min(len(self.requests), self.max_num_seqs)
        waiting = len(self.requests) - running
        return EngineStats(running, waiting, PAGES, PAGES - running, 0, 0, 0, 0, 0, self.aborted, 0, self.steps, 0.0)


@dataclass(frozen=True)
class Address:
    """A server that runs, and its clients; they read no certificates, which would take most of their time."""

    url: str
    server: HttpServer
    ended: threading.Event

    def client(self, **options: Any) -> OpenAI:
        """OpenAI's own client, which here does not try again."""
        usual = {
            "api_key": "none",
            "max_retries": 0,
            "timeout": PATIENCE,
            "http_client": DefaultHttpxClient(verify=False),
        }
        return OpenAI(base_url=f"{self.url}/v1", **{**usual, **options})

    def get(self, path: str, **options: Any) -> httpx2.Response:
        """A plain request, on a connection of its own."""
        return httpx2.get(f"{self.url}{path}", verify=False, timeout=PATIENCE, **options)

    def post(self, path: str, **options: Any) -> httpx2.Response:
        """A plain request, on a connection of its own."""
        return httpx2.post(f"{self.url}{path}", verify=False, timeout=PATIENCE, **options)


@dataclass
class Watch:
    """A server's time for heads: it stands, and so none is given up, but by ``step`` each time it is looked at."""

    step: float = 0.0
    now: float = 0.0

    def give_to(self, address: Address) -> None:
        """Take the place of the system's time there."""
        heads = address.server._server._heads
        sweep = heads.sweep

        def look(connections: Iterable[Any], now: float) -> None:
            del now
            self.now += self.step
            sweep(connections, self.now)

        heads.sweep = look  # type: ignore[method-assign]


@contextmanager
def serving(
    make: Callable[[], Engine], tokenizer: Tokenizer, *, max_model_len: int = 128, **settings: Any
) -> Iterator[Address]:
    """Serve what ``make`` gives, in a thread that also made it, until the end of the block."""
    ready, ended = threading.Event(), threading.Event()
    listener = bind("127.0.0.1", 0)
    made: list[HttpServer] = []

    def serve() -> None:
        try:
            options = ServeSettings(**{"names": ("tiny", "other"), "max_num_seqs": 4, "grace_seconds": 0, **settings})
            made.append(HttpServer(options, make(), tokenizer, listener, max_model_len=max_model_len))
            made[0].run(ready.set)
        finally:
            ended.set()
            ready.set()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    assert ready.wait(PATIENCE)
    assert not ended.is_set()
    try:
        yield Address(f"http://127.0.0.1:{listener.getsockname()[1]}", made[0], ended)
    finally:
        made[0].end()
        thread.join(PATIENCE)
        assert not thread.is_alive()


def eventually(holds: Callable[[], bool], seconds: float = PATIENCE) -> None:
    """Wait until it holds, or fail."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it does not come to hold"
        time.sleep(0.005)
