"""The engine: requests come and go between steps, and every step advances all that are running.

One thread makes an engine and calls it; nothing here is asynchronous. On a GPU the host is a step behind: while the
device computes a step, it decodes the text of the one before and decides the next. A sequence whose text has ended
may so be computed once more, for nothing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import torch

from futransformer.engine.chooser import NOT_A_NUMBER
from futransformer.engine.intake import Intake
from futransformer.engine.logprobs import logprobs_of
from futransformer.engine.outputs import CompletionOutput, FinishReason, RequestOutput
from futransformer.engine.pages import PagePool
from futransformer.engine.params import SamplingParams
from futransformer.engine.runner import Launched, Runner
from futransformer.engine.scheduler import Chunk, Scheduler
from futransformer.engine.sequence import EngineSequence, Request
from futransformer.engine.stats import EngineStats, Rate
from futransformer.engine.warmup import WarmedUp, warm_up
from futransformer.generator.errors import FuTransformerError, InputError, OutOfMemoryError
from futransformer.generator.specs import PAGE_SIZE
from futransformer.model import Llama, not_a_number
from futransformer.tokenizer import Tokenizer


class Engine:
    """Continuous batching over one model and its cache."""

    def __init__(
        self,
        model: Llama,
        tokenizer: Tokenizer | None,
        *,
        max_num_seqs: int = 64,
        max_model_len: int | None = None,
        max_num_batched_tokens: int = 2048,
        enable_prefix_caching: bool = True,
        seed: int = 0,
    ) -> None:
        """Take the model's cache over, until ``close``: ``model.generate`` and the like find no free page meanwhile.

        ``max_num_seqs``: sequences that run at a time. ``max_model_len``: the most tokens of a sequence, prompt and
        text (default: what the model is made for, or the whole cache if that is less). ``max_num_batched_tokens``: rows
        of prompts that a step reads. ``seed``: requests without one draw theirs from it, by arrival. Without a
        tokenizer prompts are token ids, texts stay empty, and stop strings are refused.
        """
        for name, value in (("max_num_seqs", max_num_seqs), ("max_num_batched_tokens", max_num_batched_tokens)):
            if value < 1:
                raise InputError(f"{name} must be at least 1, not {value}")
        if model.scaling is not None and model.scaling.mode != "frozen":
            raise InputError(
                f"an engine needs frozen FP8 scales: by {model.scaling.mode} ones a text would depend on what was read "
                "before it"
            )
        model.keep([])
        self.model = model
        self.tokenizer = tokenizer
        self._intake = Intake(model, tokenizer, max_model_len, seed)
        self.max_model_len = self._intake.max_model_len
        pool = PagePool(model.cache, keep=enable_prefix_caching)
        self._scheduler = Scheduler(
            pool, max_num_seqs=max_num_seqs, max_num_batched_tokens=min(max_num_batched_tokens, model.max_rows)
        )
        self._runner = Runner(model, max_num_seqs, self.max_model_len)
        self._ahead = 1 if model.cache.device.type == "cuda" else 0  # steps that are launched before one is looked at
        self._launched: deque[list[Launched]] = deque()
        self._requests: dict[str, Request] = {}
        self._rate = Rate()
        self.waited = 0.0  # seconds of the last step that the host spent waiting for the device
        self._unfinished = 0  # sequences
        self._prompt_tokens = self._read_tokens = self._generated = self._finished = self._aborted = self._steps = 0

    def warm_up(self, seconds: float, progress: Callable[[str], None] | None = None) -> WarmedUp:
        """Capture the graphs that requests will need, for so many seconds at most; on a CPU there are none.

        Before the first request; ``progress`` hears how far it is.
        """
        if self._requests:
            raise InputError("an engine warms up before its first request: finish or abort what it has")
        return warm_up(self.model, self._runner.shapes(self._scheduler.max_num_batched_tokens), seconds, progress)

    def add_request(self, request_id: str, prompt: str | Sequence[int], params: SamplingParams | None = None) -> None:
        """Queue a request. InputError, and nothing has changed: an id in use, a prompt that is empty, no text of this
        tokenizer or longer than ``max_model_len`` allows, or parameters that this engine cannot serve.
        """
        params = SamplingParams() if params is None else params
        if request_id in self._requests:
            raise InputError(f"request {request_id!r} is not finished: give another an id of its own")
        request = self._intake.request(request_id, prompt, params)
        self._requests[request_id] = request
        self._unfinished += params.n
        self._prompt_tokens += len(request.prompt_token_ids)
        self._scheduler.add(request.sequences[0])  # the others wait until its pages can be shared

    def abort(self, request_id: str) -> bool:
        """Give a request up: its pages are free again, nothing more of it comes out of ``step``. False: unknown."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return False
        for sequence in request.sequences:
            if not sequence.finished:
                self._end(sequence)
        self._aborted += 1
        return True

    def close(self) -> None:
        """Give every request up, and the cache back to the model. Nothing may be asked of the engine afterwards."""
        for request_id in list(self._requests):
            self.abort(request_id)
        self._launched.clear()
        self._scheduler.pool.close()

    def has_unfinished(self) -> bool:
        """Whether ``step`` has anything to do."""
        return bool(self._requests)

    def step(self) -> list[RequestOutput]:
        """Advance: deltas of the requests that did, those that finished or failed (``error``) for the last time.

        A request's own failure ends it alone, and a lack of memory those whose step or pass it was. Any other exception
        leaves the engine unusable: ``abort`` what is left.
        """
        self._steps += 1
        in_flight, self.waited = bool(self._launched), 0.0
        outputs: dict[str, RequestOutput] = {}
        launched = self._launch(outputs)
        while len(self._launched) > (self._ahead if launched else 0):
            for each in self._launched.popleft():
                self._look_at(each, outputs)
        assert launched or in_flight or not self._requests, "nothing to do for unfinished requests"
        return list(outputs.values())

    def stats(self) -> EngineStats:
        """What is running, and what has been done."""
        scheduler = self._scheduler
        return EngineStats(
            running=len(scheduler.running),
            waiting=self._unfinished - len(scheduler.running),
            num_pages=scheduler.pool.num_pages,
            free_pages=scheduler.pool.free_pages,
            prompt_tokens=self._prompt_tokens,
            prefilled_tokens=self._read_tokens,
            prefix_hit_tokens=scheduler.hit_tokens,
            generated_tokens=self._generated,
            finished_requests=self._finished,
            aborted_requests=self._aborted,
            evictions=scheduler.evictions,
            steps=self._steps,
            tokens_per_second=self._rate.per_second(),
        )

    # What a step launches

    def _launch(self, outputs: dict[str, RequestOutput]) -> bool:
        """Launch what the scheduler decides; whether there is anything. Who fails by it is among the outputs."""
        schedule = self._scheduler.schedule()
        for sequence in schedule.admitted:
            self._runner.begin(sequence)
            metrics = sequence.request.metrics
            if metrics.first_scheduled_time is None:
                metrics.first_scheduled_time = time.monotonic()
                metrics.cached_tokens = sequence.cached.length
        for sequence in schedule.grown:
            self._runner.grow(sequence)
        launched = []
        if schedule.decode:
            try:
                launched.append(self._runner.decode(schedule.decode))
            except torch.OutOfMemoryError as error:
                self._give_up(f"a step of {len(schedule.decode)} sequences", schedule.decode, error, outputs)
        chunks = [chunk for chunk in schedule.read if not chunk.sequence.finished]
        if chunks:
            try:
                launched += self._read(chunks)
            except torch.OutOfMemoryError as error:
                rows = sum(chunk.stop - chunk.start for chunk in chunks)
                self._give_up(f"reading {rows} tokens", [chunk.sequence for chunk in chunks], error, outputs)
        if schedule.decode or schedule.read:
            self._launched.append(launched)
            return True
        return False

    def _read(self, chunks: Sequence[Chunk]) -> list[Launched]:
        """Launch a pass: the first tokens of those that it reads to the end, if there are any."""
        read = self._runner.read(chunks)
        for sequence, start, stop in chunks:
            self._read_tokens += stop - start
            self._scheduler.share(sequence)
            if sequence.index == 0 and not sequence.prefilling:
                self._add_siblings(sequence.request)
        return [] if read is None else [read]

    def _give_up(
        self, what: str, sequences: Sequence[EngineSequence], error: Exception, outputs: dict[str, RequestOutput]
    ) -> None:
        """End the requests of these sequences, for whose launch the device had no memory."""
        found = OutOfMemoryError(
            f"{what}: {str(error).partition(chr(10))[0]} Serve fewer at a time (max_num_seqs, max_num_batched_tokens), "
            "or a smaller cache (num_pages, gpu_memory_utilization)"
        )
        for request in dict.fromkeys(sequence.request for sequence in sequences):
            output = outputs[request.request_id] = request.output()
            self._fail(request, output, found)
        if self.model.cache.device.type == "cuda":
            torch.cuda.empty_cache()  # what is left may be in pieces

    def _add_siblings(self, request: Request) -> None:
        """Queue the other texts of a prompt that has been read, unless they are."""
        if not request.siblings_queued:
            request.siblings_queued = True
            for sequence in request.sequences[1:]:
                self._scheduler.add(sequence)

    # What comes back

    def _look_at(self, launched: Launched, outputs: dict[str, RequestOutput]) -> None:
        begin = time.monotonic()
        tokens, now = launched.tokens(), time.monotonic()
        self.waited += now - begin
        logprobs = logprobs_of(launched, tokens, self.tokenizer) if launched.rows else {}
        for row, (sequence, token) in enumerate(zip(launched.sequences, tokens, strict=True)):
            if sequence.finished:
                continue  # before this token was known
            sequence.in_flight -= 1
            request = sequence.request
            output = outputs.get(request.request_id)
            if output is None:
                output = outputs[request.request_id] = request.output()
                if request.metrics.first_token_time is None:
                    request.metrics.first_token_time = now
            if token == NOT_A_NUMBER:
                self._fail(request, output, not_a_number(self.model.config.name))
                continue
            delta = self._advance(sequence, token)
            if logprobs and request.params.logprobs is not None:
                delta.logprobs = [logprobs[row]]
            output.outputs.append(delta)
            if request.unfinished == 0:
                output.finished = True
                request.metrics.finished_time = now
                self._finished += 1
                del self._requests[request.request_id]
        self._rate.add(len(tokens))

    def _advance(self, sequence: EngineSequence, token: int) -> CompletionOutput:
        """Append a token: what is new of the text, and whether it ends."""
        tokens, builder = sequence.tokens, sequence.text
        tokens.append(token)
        self._generated += 1
        reason: FinishReason | None = None
        stop_reason: str | int | None = None
        text = ""
        if token in sequence.ends:
            reason = "stop"
            stop_reason = token if token in sequence.request.params.stop_token_ids else None
        else:
            text = builder.add(token, look_for_stop=not sequence.least or sequence.generated >= sequence.least)
            if builder.stopped_by is not None:
                reason, stop_reason = "stop", builder.stopped_by
            elif len(tokens) >= sequence.most:
                reason = "length"
        if reason is not None:
            text += builder.rest()
            self._scheduler.share(sequence)
            self._end(sequence)
        elif len(tokens) % PAGE_SIZE <= 1:  # the last of a page is known, and its K and V are launched
            self._scheduler.share(sequence)
        return CompletionOutput(sequence.index, text, [token], None, reason, stop_reason)

    def _end(self, sequence: EngineSequence) -> None:
        """Take a sequence out; what is in flight of it is not looked at."""
        sequence.finished = True
        sequence.request.unfinished -= 1
        self._unfinished -= 1
        if sequence.index == 0 or sequence.request.siblings_queued:
            self._scheduler.remove(sequence)

    def _fail(self, request: Request, output: RequestOutput, error: FuTransformerError) -> None:
        output.error, output.finished = error, True
        request.metrics.finished_time = time.monotonic()
        self.abort(request.request_id)
