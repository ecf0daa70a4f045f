"""Text from prompts, with the host out of the way: steps are queued ahead, and looked at a window later.

The device feeds tokens back, finds their slots, draws, and stops rows (decode_step.py); it notes the tokens of the
last LOG_STEPS steps. The host queues a *window* of steps and one copy of that note behind them, and only then waits for
the note of the window before. So the device never waits, and a token costs the host the launch of one graph. A row
that has stopped computes on without a sequence, for two windows at most or until fewer rows are worth a smaller
batch: when those that go on fit the next smaller of 1, 2, 3, 4, 6, 8, 12, 16, ...

When batches shrink depends on the texts alone, never on time: the same call gives the same bits.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from futransformer.decode_step import LOG_STEPS, DecodeStep
from futransformer.kv_cache import download, page_bucket, upload
from futransformer.sampling import Sampling, pack_seen

if TYPE_CHECKING:
    from futransformer.model import Llama

OnToken = Callable[[int, int], None]


class _Note(NamedTuple):
    """Tokens of steps first .. end - 1 on their way to the host: rows of the log, modulo its length."""

    tokens: Tensor  # int32 [LOG_STEPS, B]
    event: torch.cuda.Event | None
    first: int
    end: int

    def steps(self) -> list[list[int]]:
        """Each step's tokens, when they are there."""
        log = self.tokens.tolist()
        return [log[step % LOG_STEPS] for step in range(self.first, self.end)]


class Generation:
    """One call of ``Llama.generate``: the model holds the prompts' sequences, with room for all new tokens."""

    def __init__(
        self,
        model: Llama,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        ends: Sequence[int],
        settings: Sequence[Sampling] | None,
        on_token: OnToken | None,
    ) -> None:
        """``settings`` of each prompt; None: greedily."""
        self.model = model
        self.prompts = prompts
        self.max_new_tokens = max_new_tokens
        self.ends = frozenset(ends)
        self._end_bits = pack_seen([ends], model.config.vocab_size)[0]
        self.settings = settings
        self.on_token = on_token
        self.texts: list[list[int]] = [[] for _ in prompts]
        # of a window; where a step is no graph it takes long, and nothing is computed that may not be wanted
        ahead = model.ops.capturable
        self.window, self._in_flight = (LOG_STEPS, 1) if ahead else (1, 0)
        self._rows = list(range(len(prompts)))  # the prompts of the batch
        self.waited = 0.0  # seconds, for the device
        self._notes: deque[_Note] = deque()
        self._noted = 0  # steps of this batch
        self._given = 1  # tokens, of each text that goes on; those that are queued, too

    @torch.inference_mode()
    def run(self, logits: Tensor) -> list[list[int]]:
        """All texts, from the logits of the prompts' last tokens."""
        seen = None
        if self.settings is not None:
            seen = pack_seen(self.prompts, self.model.config.vocab_size, self.model.cache.device)
        step = self._begin(seen)
        if step.sampling is None:
            self.model.ops.argmax(logits, out=step.tokens)
        else:
            self.model.ops.sample(logits, step.sampling, out=step.tokens)
        step.end()
        self._note(step, 1)
        while True:
            self._look(self._in_flight if self._given < self.max_new_tokens else 0)
            going = self._going()
            if going and page_bucket(len(going)) < len(self._rows):
                self._look(0)
                going = self._going()
                if going:
                    step = self._shrink(step, going)
            if not going:
                return self.texts
            self._queue(step, min(self.window, self.max_new_tokens - self._given))

    def _begin(self, seen: Tensor | None) -> DecodeStep:
        """Put the batch on the device."""
        step = self.model.ready_step()
        settings = None if self.settings is None else [self.settings[index] for index in self._rows]
        left = self.max_new_tokens - len(self.texts[self._rows[0]])
        step.begin_generation([left] * len(self._rows), self._end_bits, settings, seen)
        self._noted = 0
        return step

    def _queue(self, step: DecodeStep, count: int) -> None:
        longest = max(len(self.prompts[index]) for index in self._rows)
        step.run_generation(longest + self._given, count)
        self._given += count
        self._note(step, count)

    def _note(self, step: DecodeStep, count: int) -> None:
        """Send the tokens of the last steps to the host."""
        (tokens,), event = download(step.stops.log)
        self._notes.append(_Note(tokens, event, self._noted, self._noted + count))
        self._noted += count

    def _look(self, in_flight: int) -> None:
        """Wait for all notes but the last ``in_flight``, and tell of their tokens."""
        while len(self._notes) > in_flight:
            note = self._notes.popleft()
            if note.event is not None:
                start = time.perf_counter()
                note.event.synchronize()
                self.waited += time.perf_counter() - start
            for tokens in note.steps():
                for index, token in zip(self._rows, tokens, strict=True):
                    if token >= 0:
                        self.texts[index].append(token)
                        if self.on_token is not None:
                            self.on_token(index, token)

    def _going(self) -> list[int]:
        """Rows whose texts go on, as far as the host knows."""
        texts = [self.texts[index] for index in self._rows]
        return [
            row
            for row, text in enumerate(texts)
            if not text or (len(text) < self.max_new_tokens and text[-1] not in self.ends)
        ]

    def _shrink(self, step: DecodeStep, going: list[int]) -> DecodeStep:
        """Make a batch of these rows; nothing is in flight."""
        for row in going:
            self.model.sequences[row].length = len(self.prompts[self._rows[row]]) + self._given - 1
        self.model.keep(going)
        self._rows = [self._rows[row] for row in going]
        newest = [self.texts[index][-1] for index in self._rows]
        seen = None
        if step.sampling is not None and step.sampling.seen is not None:
            seen = step.sampling.seen[upload(going, torch.int64, self.model.cache.device)]
        smaller = self._begin(seen)
        smaller.tokens.copy_(upload(newest, torch.int32, self.model.cache.device))
        return smaller
