"""The engine's thread, and what the event loop knows of it.

``Runner.run`` holds the thread that made the engine until ``stop``: it takes commands between steps and hands each
step's deltas to the event loop in one call. All else is called in the event loop alone. A ``Job`` is one HTTP request:
a reservation, the engine's requests of its prompts, and their deltas until they are taken; a client that is slow to
take them gets them joined, so what waits for it is at most its text.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import time
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType

from futransformer.engine import Engine, EngineStats, RequestOutput, SamplingParams
from futransformer.generator.errors import FuTransformerError, InputError
from futransformer.serve.errors import ApiError, failed, queue_full, refused, unavailable
from futransformer.serve.metrics import Metrics

logger = logging.getLogger("futransformer.serve")

Command = Callable[[Engine], None]
Deltas = list[tuple[int, RequestOutput]]


class Job:
    """One HTTP request's share of the engine; a context manager that gives it back."""

    def __init__(self, runner: Runner, number: int, sequences: int) -> None:
        """Hold ``sequences`` places of the runner's capacity."""
        self.sequences = sequences
        self._runner = runner
        self._number = number
        self._open: set[int] = set()  # prompts whose texts are not finished
        self._pending: dict[int, RequestOutput] = {}
        self._error: ApiError | None = None
        self._taken = False
        self._news = asyncio.Event()
        self._began = time.monotonic()
        self._last: dict[tuple[int, int], float] = {}  # when a text's latest token came

    def __enter__(self) -> Job:
        """Nothing more: ``Runner.open`` has reserved."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give up what is unfinished, and the places."""
        self._runner.close(self, [self.id_of(prompt) for prompt in sorted(self._open)])

    def id_of(self, prompt: int) -> str:
        """The engine's id of one of the prompts."""
        return f"{self._number}-{prompt}"

    async def begin(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> None:
        """Hand the prompts to the engine; returns when it has taken them, ApiError if it refuses one."""
        self._open = set(range(len(prompts)))
        self._runner.add([(self.id_of(index), prompt) for index, prompt in enumerate(prompts)], self, params)
        await self._until(lambda: self._taken)

    async def deltas(self) -> AsyncIterator[Deltas]:
        """Deltas by prompt as they come, joined where more than one waits, until all texts are finished."""
        while self._open or self._pending:
            await self._until(lambda: bool(self._pending))
            pending, self._pending = self._pending, {}
            yield sorted(pending.items())

    async def _until(self, holds: Callable[[], bool]) -> None:
        while self._error is None and not holds():
            self._news.clear()
            await self._news.wait()
        if self._error is not None:
            raise self._error

    def taken(self) -> None:
        """The engine has the prompts."""
        self._taken = True
        self._news.set()

    def put(self, prompt: int, delta: RequestOutput, metrics: Metrics) -> None:
        """Take a delta from the engine."""
        now = time.monotonic()
        for output in delta.outputs:
            if output.token_ids:
                before = self._last.get((prompt, output.index))
                metrics.tokens(len(output.token_ids), None if before is None else now - before, now - self._began)
                self._last[prompt, output.index] = now
            if output.finish_reason is not None:
                metrics.ended(output.finish_reason)
        if delta.finished:
            self._open.discard(prompt)
            metrics.finished(now - self._began)
        if delta.error is not None:
            self.fail(_as_api_error(delta.error))
        elif prompt in self._pending:
            self._pending[prompt].add(delta)
        else:
            self._pending[prompt] = delta
        self._news.set()

    def fail(self, error: ApiError) -> None:
        """End with an error whatever waits for this job."""
        self._error = error
        self._news.set()


class Runner:
    """Commands to the engine, and its deltas."""

    def __init__(self, engine: Engine, *, capacity: int, metrics: Metrics) -> None:
        """``capacity``: sequences that may be at work or waiting."""
        self.capacity = capacity
        self.in_flight = 0  # sequences
        self.failure: str | None = None
        self.draining = False
        self.stats: EngineStats = engine.stats()  # of the latest step
        self._engine = engine
        self._metrics = metrics
        self._loop: asyncio.AbstractEventLoop | None = None
        self._inbox: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._jobs: dict[str, tuple[Job, int]] = {}  # by the engine's ids
        self._held: set[Job] = set()
        self._numbers = itertools.count()

    # The engine's thread

    def run(self) -> None:
        """Run the engine until ``stop``. Its failure ends all jobs and refuses later ones; this returns at ``stop``."""
        try:
            while self._obey():
                if self._engine.has_unfinished():
                    outputs = self._engine.step()
                    self.stats = self._engine.stats()
                    if outputs:
                        self._call(self._deliver, outputs)
        except Exception as error:
            logger.exception("the engine failed")
            self._call(self._fail, f"the engine failed: {type(error).__name__}: {error}")
            while self._inbox.get() is not None:
                pass

    def _obey(self) -> bool:
        """Carry out what waits in the inbox, and wait for something if there is nothing else to do; False: stop."""
        try:
            while True:
                command = self._inbox.get(block=not self._engine.has_unfinished())
                if command is None:
                    return False
                command(self._engine)
                self.stats = self._engine.stats()
        except queue.Empty:
            return True

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        """Call in the event loop; not if it has ended, for then nobody waits."""
        assert self._loop is not None, "commands come from a loop that is attached"
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    # The event loop

    def attach(self) -> None:
        """Deliver to the running event loop."""
        self._loop = asyncio.get_running_loop()

    def stop(self) -> None:
        """Let ``run`` return; from any thread."""
        self._inbox.put(None)

    def drain(self) -> None:
        """Refuse jobs from now on; those under way go on."""
        self.draining = True

    def give_up(self) -> None:
        """End all jobs with an error."""
        for job in list(self._held):
            job.fail(unavailable("the server is shutting down"))

    def check(self) -> None:
        """Refuse if no job is taken now (503)."""
        if self.failure is not None:
            raise unavailable(self.failure)
        if self.draining:
            raise unavailable("the server is shutting down")

    def open(self, sequences: int) -> Job:
        """Reserve places for this many texts, or say why there are none."""
        self.check()
        if sequences > self.capacity:
            raise refused(
                f"a request for {sequences} texts; at most {self.capacity} are served at a time: send several"
            )
        if self.in_flight + sequences > self.capacity:
            raise queue_full(self.in_flight)
        job = Job(self, next(self._numbers), sequences)
        self.in_flight += sequences
        self._held.add(job)
        return job

    def close(self, job: Job, unfinished: Sequence[str]) -> None:
        """Abort these requests of a job, and free its places."""
        self._held.discard(job)
        self.in_flight -= job.sequences
        for _ in unfinished:
            self._metrics.ended("abort")
        for request_id in unfinished:
            self._jobs.pop(request_id, None)

        def abort(engine: Engine) -> None:
            for request_id in unfinished:
                engine.abort(request_id)

        if unfinished:
            self._inbox.put(abort)

    def add(self, requests: Sequence[tuple[str, Sequence[int]]], job: Job, params: SamplingParams) -> None:
        """Queue the requests of a job. It hears that they are taken, or that the engine has refused one."""
        self.check()
        for index, (request_id, _) in enumerate(requests):
            self._jobs[request_id] = job, index

        def add(engine: Engine) -> None:
            try:
                for request_id, prompt in requests:
                    engine.add_request(request_id, prompt, params)
            except FuTransformerError as error:
                self._call(job.fail, _as_api_error(error))  # closing the job aborts the others
            else:
                self._call(job.taken)

        self._inbox.put(add)

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            if output.request_id in self._jobs:  # else it has been given up
                job, prompt = self._jobs[output.request_id]
                if output.finished:
                    del self._jobs[output.request_id]
                job.put(prompt, output, self._metrics)

    def _fail(self, message: str) -> None:
        self.failure = message
        for job in list(self._held):
            job.fail(failed(message))


def _as_api_error(error: FuTransformerError) -> ApiError:
    """The client's fault (400) or the engine's (500)."""
    return refused(str(error)) if isinstance(error, InputError) else failed(str(error))
