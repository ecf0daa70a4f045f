"""What comes out of the engine: of a step what is new, put together whole texts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from futransformer.generator.errors import FuTransformerError

# "stop": EOS, a stop token or a stop string; "length": max_tokens, or the longest that the engine serves
FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """One candidate for a token."""

    logprob: float  # natural, of the distribution before penalty, temperature and cuts
    rank: int  # 1: the likeliest
    decoded_token: str


@dataclass(slots=True)
class CompletionOutput:
    """One text of a request: the whole so far, or, as a step yields it, what is new."""

    index: int  # 0 .. n - 1
    text: str  # without the stop string, or what might become one
    token_ids: list[int]  # with the token that ended it
    logprobs: list[dict[int, Logprob]] | None  # of each token: the chosen one and the likeliest; None: not asked for
    finish_reason: FinishReason | None = None  # None: goes on
    stop_reason: str | int | None = None  # the stop string or stop token that ended it; None of EOS

    @property
    def finished(self) -> bool:
        """Whether nothing follows."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Seconds of time.monotonic(), and counts."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    cached_tokens: int = 0  # of the prompt, read from shared pages when it was first scheduled
    evictions: int = 0


@dataclass(slots=True)
class RequestOutput:
    """A request's texts.

    Those that ``Engine.step`` yields are deltas: only the texts that advanced, of each only what is new. ``add`` puts
    them together; ``LLM.generate`` gives whole ones.
    """

    request_id: str
    prompt: str | None  # None if it came as token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool  # all n texts
    metrics: RequestMetrics
    error: FuTransformerError | None = field(default=None, repr=False)  # why the engine gave the request up

    def add(self, delta: RequestOutput) -> None:
        """Append what a later step yielded for the same request."""
        known = {output.index: output for output in self.outputs}
        for new in delta.outputs:
            output = known.get(new.index)
            if output is None:
                self.outputs.append(
                    CompletionOutput(
                        new.index,
                        new.text,
                        list(new.token_ids),
                        None if new.logprobs is None else list(new.logprobs),
                        new.finish_reason,
                        new.stop_reason,
                    )
                )
                continue
            output.text += new.text
            output.token_ids += new.token_ids
            if output.logprobs is not None and new.logprobs is not None:
                output.logprobs += new.logprobs
            output.finish_reason, output.stop_reason = new.finish_reason, new.stop_reason
        self.outputs.sort(key=lambda output: output.index)
        self.finished, self.error = delta.finished, delta.error
