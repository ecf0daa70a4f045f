"""From a checked request to its answer: places, tokens, the engine, and JSON or a stream of events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import fields
from typing import Any, TypeVar, cast

from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from futransformer.engine import RequestOutput, SamplingParams
from futransformer.generator.errors import CheckpointError, InputError
from futransformer.serve.answers import Answer, ChatAnswer, CompletionAnswer, Json, usage
from futransformer.serve.errors import ApiError, refused, unknown_model
from futransformer.serve.protocol import ChatRequest, CompletionRequest, Request
from futransformer.serve.runner import Deltas, Job, Runner
from futransformer.serve.settings import ServeSettings
from futransformer.tokenizer import Message, Tokenizer

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
CLOSED = 499  # nginx's status for a client that did not wait; nobody reads it but the metrics
# A text of more cannot fit, which is known before minutes go into encoding it: Llama 3's longest token has 128.
CHARACTERS_PER_TOKEN = 256
SAMPLING = tuple(field.name for field in fields(SamplingParams))


class Service:
    """What the routes call."""

    def __init__(self, settings: ServeSettings, runner: Runner, tokenizer: Tokenizer, max_model_len: int) -> None:
        """``max_model_len``: tokens of a prompt and its text, at most. One thread of its own turns text into tokens."""
        self.settings = settings
        self.runner = runner
        self.max_model_len = max_model_len
        self._tokenizer = tokenizer
        self._encoding = ThreadPoolExecutor(1, "tokenizer")

    def close(self) -> None:
        """End the thread."""
        self._encoding.shutdown(cancel_futures=True)

    async def complete(self, request: CompletionRequest, receive: Receive) -> Response:
        """Continue one prompt or several."""
        self._check(request)
        prompts = request.prompts
        self._check_length([len(prompt) for prompt in prompts if isinstance(prompt, str)], "prompt")

        def encode() -> list[list[int]]:
            return [self._tokenizer.encode_prompt(p) if isinstance(p, str) else p for p in prompts]

        answer = CompletionAnswer(self.settings.names[0], request.logprobs)
        most = request.max_tokens, SamplingParams().max_tokens
        return await self._answer(request, len(prompts), encode, most, answer, request.logprobs, receive)

    async def chat(self, request: ChatRequest, receive: Receive) -> Response:
        """Answer a conversation."""
        self._check(request)
        if not self._tokenizer.can_chat:
            name = self.settings.names[0]
            raise refused(f"{name} is a base model: it has no chat template; use /v1/completions", "model")
        turns = cast("list[Message]", request.turns)
        self._check_length([sum(len(turn["content"]) for turn in turns)], "messages")

        def encode() -> list[list[int]]:
            try:
                return [self._tokenizer.encode_messages(turns)]
            except CheckpointError as error:
                raise refused(f"the chat template refuses these messages: {error.__cause__}", "messages") from error

        top = (request.top_logprobs or 0) if request.logprobs else None
        answer = ChatAnswer(self.settings.names[0], top)
        asked = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
        return await self._answer(request, 1, encode, (asked, None), answer, top, receive)

    def _check(self, request: Request) -> None:
        if request.model is not None and request.model not in self.settings.names:
            raise unknown_model(request.model, self.settings.names)
        request.check_served()

    def _check_length(self, characters: list[int], param: str) -> None:
        longest = max(characters, default=0)
        if longest > self.max_model_len * CHARACTERS_PER_TOKEN:
            raise refused(
                f"the context is at most {self.max_model_len} tokens; {param} of {longest} characters does not fit",
                param,
                "context_length_exceeded",
            )

    async def _answer(
        self,
        request: Request,
        count: int,
        encode: Callable[[], list[list[int]]],
        most: tuple[int | None, int | None],
        answer: Answer,
        logprobs: int | None,
        receive: Receive,
    ) -> Response:
        """Encode and run ``count`` prompts. ``most``: new tokens asked for, and otherwise (None: what fits)."""
        params = self._params(request, max_tokens=most[0], logprobs=logprobs)
        with ExitStack() as held:
            job = held.enter_context(self.runner.open(count * params.n))
            prompts = await self._encode(encode)
            max_tokens = self._max_tokens(max(map(len, prompts)), *most)
            params = self._params(request, max_tokens=max_tokens, logprobs=logprobs)
            try:
                await until_disconnect(receive, job.begin(prompts, params))
                if request.stream:
                    events = _events(job, answer, params.n, include_usage=request.include_usage)
                    return EventStream(events, held.pop_all())
                outputs = await until_disconnect(receive, _collect(job))
            except ClientDisconnect:
                return Response(status_code=CLOSED)
        choices = [
            answer.whole(prompt * params.n + text.index, text)
            for prompt, output in enumerate(outputs)
            for text in output.outputs
        ]
        return JSONResponse({**answer.envelope(choices, chunk=False), "usage": usage(outputs)})

    async def _encode(self, encode: Callable[[], list[list[int]]]) -> list[list[int]]:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._encoding, encode)
        except InputError as error:
            raise refused(str(error)) from error

    def _params(self, request: Request, **ours: int | None) -> SamplingParams:
        """The request's fields over the model's own defaults; an InputError of them names its field."""
        asked = {name: getattr(request, name) for name in SAMPLING if name in Request.model_fields}
        given = {name: value for name, value in asked.items() if value is not None}
        try:
            return SamplingParams(**{**self.settings.sampling, **given, **ours})
        except InputError as error:
            first = str(error).split()[0].rstrip(":")
            raise refused(str(error), first if first in SAMPLING else None) from error

    def _max_tokens(self, prompt: int, asked: int | None, otherwise: int | None) -> int:
        """New tokens for a prompt of this many, within the context and the server's limit."""
        limit, room = self.settings.max_tokens_limit, self.max_model_len - prompt
        if asked is not None and limit is not None and asked > limit:
            raise refused(f"max_tokens is at most {limit} here, not {asked}", "max_tokens")
        if (asked or 1) > room:
            new = f" and {asked} new ones were asked for" if asked is not None else " and leaves no room for an answer"
            raise refused(
                f"the context is at most {self.max_model_len} tokens; the prompt has {prompt}{new}: shorten either",
                code="context_length_exceeded",
            )
        return asked if asked is not None else min(otherwise or room, limit or room, room)


class EventStream(Response):
    """Server-sent events that end when the client goes; ``held`` is closed at the end, whichever it was."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], held: ExitStack) -> None:
        """Take the events, and what they need."""
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them as they come."""
        with self._held:
            try:
                await until_disconnect(receive, self._send(send))
            except ClientDisconnect:
                return

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``; cancels it and raises ClientDisconnect if the client goes before."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(receive))
    both: tuple[asyncio.Future[Any], ...] = (working, leaving)
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in both:
            task.cancel()
        await asyncio.gather(*both, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _collect(job: Job) -> list[RequestOutput]:
    """Whole texts of a job's prompts, in order."""
    outputs: dict[int, RequestOutput] = {}
    async for deltas in job.deltas():
        _join(outputs, deltas)
    return [outputs[prompt] for prompt in sorted(outputs)]


def _join(outputs: dict[int, RequestOutput], deltas: Deltas) -> None:
    for prompt, delta in deltas:
        if prompt not in outputs:
            outputs[prompt] = RequestOutput(
                delta.request_id, delta.prompt, delta.prompt_token_ids, [], False, delta.metrics
            )
        outputs[prompt].add(delta)


async def _events(job: Job, answer: Answer, n: int, *, include_usage: bool) -> AsyncIterator[bytes]:
    """Chunks of a job's texts, the counts if they are asked for, and the end; or an error as the last of them."""

    def event(choice: Json) -> bytes:
        counts = {"usage": None} if include_usage else {}
        return _event({**answer.envelope([choice], chunk=True), **counts})

    outputs: dict[int, RequestOutput] = {}
    try:
        for index in range(job.sequences):
            if (opening := answer.opening(index)) is not None:
                yield event(opening)
        async for deltas in job.deltas():
            for prompt, delta in deltas:
                for text in delta.outputs:
                    if text.text or text.finished or text.logprobs:
                        yield event(answer.piece(prompt * n + text.index, text))
            _join(outputs, deltas)
        if include_usage:
            counts = usage([outputs[prompt] for prompt in sorted(outputs)])
            yield _event({**answer.envelope([], chunk=True), "usage": counts})
        yield DONE
    except ApiError as error:
        yield _event(error.body())


def _event(content: Json) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
