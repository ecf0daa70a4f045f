"""What a client reads: OpenAI's objects of completions and chat, whole and in chunks.

Choices are numbered prompt by prompt: ``prompt * n + index``. ``stop_reason`` of a choice is vLLM's addition.
"""

from __future__ import annotations

import time
import uuid
from typing import Any, Protocol

from futransformer.engine import CompletionOutput, Logprob, RequestOutput

Json = dict[str, Any]


class Answer(Protocol):
    """The form of one endpoint's answers."""

    def opening(self, index: int) -> Json | None:
        """The choice that a stream's text begins with, before there is any."""

    def piece(self, index: int, delta: CompletionOutput) -> Json:
        """The choice of a chunk."""

    def whole(self, index: int, output: CompletionOutput) -> Json:
        """The choice of a whole answer."""

    def envelope(self, choices: list[Json], *, chunk: bool) -> Json:
        """The object around choices."""


class CompletionAnswer:
    """``text_completion`` objects."""

    def __init__(self, model: str, top_logprobs: int | None) -> None:
        """``top_logprobs``: alternatives of each token; None: no log-probabilities."""
        self._head = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", **_created(model)}
        self._top = top_logprobs
        self._offsets: dict[int, int] = {}  # characters of each choice so far

    def opening(self, index: int) -> Json | None:
        """A completion begins with its text."""
        return None

    def piece(self, index: int, delta: CompletionOutput) -> Json:
        """Text, with what it ended by."""
        return self.whole(index, delta)

    def whole(self, index: int, output: CompletionOutput) -> Json:
        """Text, with what it ended by."""
        return {
            "index": index,
            "text": output.text,
            "logprobs": self._logprobs(index, output),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }

    def envelope(self, choices: list[Json], *, chunk: bool) -> Json:
        """Chunk and whole are the same object here."""
        return {**self._head, "choices": choices}

    def _logprobs(self, index: int, output: CompletionOutput) -> Json | None:
        """Lists in step, one entry a token; the chosen one is among the alternatives, likely or not."""
        if self._top is None or output.logprobs is None:
            return None
        chosen = [candidates[token] for token, candidates in zip(output.token_ids, output.logprobs, strict=True)]
        offsets = []
        for entry in chosen:
            offsets.append(self._offsets.setdefault(index, 0))
            self._offsets[index] += len(entry.decoded_token)
        return {
            "tokens": [entry.decoded_token for entry in chosen],
            "token_logprobs": [entry.logprob for entry in chosen],
            "top_logprobs": [
                {entry.decoded_token: entry.logprob for entry in _by_rank(candidates)} for candidates in output.logprobs
            ],
            "text_offset": offsets,
        }


class ChatAnswer:
    """``chat.completion`` and ``chat.completion.chunk`` objects."""

    def __init__(self, model: str, top_logprobs: int | None) -> None:
        """``top_logprobs``: alternatives of each token; None: no log-probabilities."""
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex}", **_created(model)}
        self._top = top_logprobs

    def opening(self, index: int) -> Json | None:
        """Who speaks."""
        return self._choice("delta", {"role": "assistant", "content": ""}, index, None)

    def piece(self, index: int, delta: CompletionOutput) -> Json:
        """What is said next."""
        return self._choice("delta", {"content": delta.text} if delta.text else {}, index, delta)

    def whole(self, index: int, output: CompletionOutput) -> Json:
        """Who has said what."""
        return self._choice("message", {"role": "assistant", "content": output.text, "refusal": None}, index, output)

    def envelope(self, choices: list[Json], *, chunk: bool) -> Json:
        """The object says whether it is a chunk."""
        return {**self._head, "object": "chat.completion.chunk" if chunk else "chat.completion", "choices": choices}

    def _choice(self, key: str, said: Json, index: int, output: CompletionOutput | None) -> Json:
        return {
            "index": index,
            key: said,
            "logprobs": None if output is None else self._logprobs(output),
            "finish_reason": None if output is None else output.finish_reason,
            "stop_reason": None if output is None else output.stop_reason,
        }

    def _logprobs(self, output: CompletionOutput) -> Json | None:
        if self._top is None or output.logprobs is None:
            return None
        content = []
        for token, candidates in zip(output.token_ids, output.logprobs, strict=True):
            top = [_candidate(entry) for entry in _by_rank(candidates) if entry.rank <= self._top]
            content.append({**_candidate(candidates[token]), "top_logprobs": top})
        return {"content": content, "refusal": None}


def usage(outputs: list[RequestOutput]) -> Json:
    """Counts of whole outputs; a prompt counts once, however many texts continue it."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    written = sum(len(text.token_ids) for output in outputs for text in output.outputs)
    cached = sum(output.metrics.cached_tokens for output in outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _created(model: str) -> Json:
    return {"created": int(time.time()), "model": model}


def _by_rank(candidates: dict[int, Logprob]) -> list[Logprob]:
    return sorted(candidates.values(), key=lambda entry: entry.rank)


def _candidate(entry: Logprob) -> Json:
    """A token as chat reports it; one that is a part of a character has no bytes here, for its text has lost them."""
    token = entry.decoded_token
    whole = "\N{REPLACEMENT CHARACTER}" not in token
    return {"token": token, "logprob": entry.logprob, "bytes": list(token.encode()) if whole else None}
