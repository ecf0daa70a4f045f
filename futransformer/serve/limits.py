"""What stands before the routes: the key, the size of a body, and clients that are slow or break off.

A plain ASGI wrapper. It reads a body whole, within its time and its size, before anything is parsed, and hands it on in
one piece; what the client does afterwards (``http.disconnect``) passes through.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable
from typing import TypeVar

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from futransformer.serve.errors import ApiError, too_large, wrong_key
from futransformer.serve.metrics import Metrics
from futransformer.serve.settings import ServeSettings

T = TypeVar("T")

PROTECTED = "/v1/"
# A client that is still sending when its connection is closed may never read why: so much of a body beyond the limit is
# read and dropped first.
DROPPED = 4  # limits


class SlowClientError(Exception):
    """A client has not sent its request, or not taken its answer, in time."""


async def within(seconds: float, work: Awaitable[T]) -> T:
    """The result of ``work``, or SlowClientError after so many seconds.

    asyncio's wait_for may lose a cancellation that meets the result (before Python 3.12); anyio's timeouts take 12 us,
    a sixth of all that is done for an event.
    """
    task = asyncio.current_task()
    assert task is not None
    late = False

    def give_up() -> None:
        nonlocal late
        late = True
        task.cancel()

    timer = asyncio.get_running_loop().call_later(seconds, give_up)
    try:
        return await work
    except asyncio.CancelledError:
        if late:
            raise SlowClientError from None
        raise
    finally:
        timer.cancel()


class Limits:
    """The application within its limits; counts responses."""

    def __init__(self, app: ASGIApp, settings: ServeSettings, metrics: Metrics, paths: frozenset[str]) -> None:
        """``paths`` are counted by name, all others as one."""
        self._app = app
        self._settings = settings
        self._metrics = metrics
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in self._paths else "other"

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.response(path, message["status"])
            await within(self._settings.write_seconds, send(message))

        try:
            await self._serve(scope, receive, counted)
        except SlowClientError:
            return  # an answer that ends early: the server closes the connection

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        try:
            self._check_key(scope["path"], headers.get(b"authorization", b""))
            body = await self._read(headers.get(b"content-length"), receive)
        except ApiError as error:
            await JSONResponse(error.body(), error.status, error.headers)(scope, receive, send)
            return
        if body is None:  # the client has gone
            return
        pieces: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return pieces.pop() if pieces else await receive()

        await self._app(scope, replay, send)

    def _check_key(self, path: str, header: bytes) -> None:
        key = self._settings.api_key
        if key is None or not path.startswith(PROTECTED):
            return
        scheme, _, given = header.partition(b" ")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(given.strip(), key.encode()):
            raise wrong_key()

    async def _read(self, announced: bytes | None, receive: Receive) -> bytes | None:
        """The body; None if the client breaks off."""
        limit, seconds = self._settings.max_body_bytes, self._settings.read_seconds
        if announced is not None and announced.isdigit() and int(announced) > DROPPED * limit:
            raise too_large(limit)
        try:
            return await within(seconds, _read_body(receive, limit))
        except SlowClientError:
            message = f"the request's body did not arrive within {seconds:g} s"
            raise ApiError(408, message, code="request_timeout", headers={"Connection": "close"}) from None


async def _read_body(receive: Receive, limit: int) -> bytes | None:
    body = bytearray()
    length, more = 0, True
    while more and length <= DROPPED * limit:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        piece = message.get("body", b"")
        more = message.get("more_body", False)
        length += len(piece)
        if length <= limit:
            body += piece
    if length > limit:
        raise too_large(limit)
    return bytes(body)
