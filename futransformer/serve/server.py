"""Listen, serve, and end in order.

The engine stays in the thread that made it, the main one of the command: its kernels' context, and an interrupt while a
model is loaded, belong there. HTTP has a thread of its own. SIGTERM or SIGINT stops listening and lets answers under
way finish for ``grace_seconds``; those that take longer end with an error; a second signal ends at once.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn

from futransformer.engine import Engine
from futransformer.generator.errors import InputError
from futransformer.serve.app import create_app
from futransformer.serve.connections import Heads
from futransformer.serve.metrics import Metrics
from futransformer.serve.runner import Runner
from futransformer.serve.service import Service
from futransformer.serve.settings import ServeSettings
from futransformer.tokenizer import Tokenizer

# Python's default of 5 ms is a whole step of a model: so long would the engine wait for an event loop that is busy.
SWITCH_SECONDS = 0.0005
BACKLOG = 2048  # connections that the system holds while the event loop is busy
FLUSH_SECONDS = 5.0  # that ended answers have to reach their clients


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to an address, before the model is loaded; not yet listening. Port 0: any that is free."""
    if not 0 <= port < 65536:
        raise InputError(f"--port is 0 .. 65535, not {port}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        raise InputError(f"cannot listen on {host}, port {port}: {error}; choose others by --host and --port") from None
    return bound


class HttpServer:
    """HTTP on a socket, before an engine; ``run`` is of the engine's thread."""

    def __init__(
        self,
        settings: ServeSettings,
        engine: Engine,
        tokenizer: Tokenizer,
        listener: socket.socket,
        *,
        max_model_len: int,
        access_log: bool = False,
    ) -> None:
        """Put the parts together; ``access_log`` prints a line a request."""
        metrics = Metrics()
        self.runner = Runner(engine, capacity=settings.capacity, metrics=metrics)
        metrics.watch(lambda: self.runner.stats, lambda: self.runner.in_flight)
        self._service = Service(settings, self.runner, tokenizer, max_model_len)
        self._app = create_app(self._service, metrics)
        self._settings = settings
        self._listener = listener
        self._access_log = access_log
        self._server = _Uvicorn(self._config(), self.runner, settings)
        self._error: BaseException | None = None

    def _config(self) -> uvicorn.Config:
        return uvicorn.Config(
            self._app,
            lifespan="off",
            ws="none",
            log_level="info" if self._access_log else "warning",
            access_log=self._access_log,
            server_header=False,
            backlog=BACKLOG,
            timeout_graceful_shutdown=int(self._settings.grace_seconds + FLUSH_SECONDS),
        )

    def run(self, ready: Callable[[], object] = lambda: None) -> None:
        """Serve until ``end`` or a signal; ``ready`` is called when connections are taken."""
        http = threading.Thread(target=self._serve, args=(ready,), name="http", daemon=True)
        with _signals(self.end), _switch_interval(SWITCH_SECONDS):
            http.start()
            try:
                self.runner.run()
            finally:
                self.end()
                http.join()
        if self._error is not None:
            raise self._error

    def end(self) -> None:
        """Begin to end, or, the second time, end at once; from any thread."""
        if self._server.should_exit:
            self._server.force_exit = True
        self._server.should_exit = True

    def _serve(self, ready: Callable[[], object]) -> None:
        """The HTTP thread."""

        async def serve() -> None:
            self.runner.attach()
            serving = asyncio.ensure_future(self._server.serve([self._listener]))
            while not self._server.started and not serving.done():
                await asyncio.sleep(0.005)
            if self._server.started:
                ready()
            await serving

        try:
            asyncio.run(serve())
        except BaseException as error:
            self._error = error
        finally:
            self._service.close()
            self.runner.stop()


class _Uvicorn(uvicorn.Server):
    """uvicorn's server, which lets answers finish first, and closes connections that send no request."""

    def __init__(self, config: uvicorn.Config, runner: Runner, settings: ServeSettings) -> None:
        super().__init__(config)
        self._runner = runner
        self._grace_seconds = settings.grace_seconds
        self._heads = Heads(settings.read_seconds)

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second."""
        self._heads.sweep(self.server_state.connections, time.monotonic())
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no more requests, and end with an error what is not finished after the grace."""
        self._runner.drain()
        last = asyncio.get_running_loop().call_later(self._grace_seconds, self._runner.give_up)
        await super().shutdown(sockets)
        last.cancel()
        self._runner.give_up()


@contextmanager
def _signals(end: Callable[[], None]) -> Iterator[None]:
    """Within it SIGINT and SIGTERM call ``end``."""
    if threading.current_thread() is not threading.main_thread():  # which alone may set handlers
        yield
        return

    def handle(_: int, __: FrameType | None) -> None:
        end()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _switch_interval(seconds: float) -> Iterator[None]:
    """Within it threads hand the interpreter over this often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
