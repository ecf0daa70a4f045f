"""From what a caller asks to a request that can be served, or the reason why it cannot."""

from __future__ import annotations

import time
from collections.abc import Sequence
from hashlib import blake2b

from futransformer.engine.outputs import RequestMetrics
from futransformer.engine.params import SEEDS, SamplingParams
from futransformer.engine.sequence import EngineSequence, Request
from futransformer.engine.text import TextBuilder
from futransformer.generator.errors import InputError
from futransformer.model import Llama
from futransformer.tokenizer import TextStream, Tokenizer


class Intake:
    """Makes the requests of one engine, in the order of arrival."""

    def __init__(self, model: Llama, tokenizer: Tokenizer | None, max_model_len: int | None, seed: int) -> None:
        """Check how long a sequence may be; see Engine."""
        longest = min(model.config.max_position_embeddings, model.cache.capacity)
        self.max_model_len = longest if max_model_len is None else max_model_len
        if not 2 <= self.max_model_len <= longest:
            raise InputError(
                f"max_model_len must be 2 .. {longest}, not {max_model_len}: {model.config.name} is made for "
                f"{model.config.max_position_embeddings} tokens (max_position_embeddings), and the cache holds "
                f"{model.cache.capacity}; use a larger cache for more"
            )
        self._model = model
        self._tokenizer = tokenizer
        self._seed = seed
        self._arrivals = 0

    def request(self, request_id: str, prompt: str | Sequence[int], params: SamplingParams) -> Request:
        """A request and its texts, none of them begun; InputError if it cannot be served."""
        tokens = self._tokens(prompt)
        if self._tokenizer is None and params.stop:
            raise InputError("stop strings need a tokenizer: give the engine one, or stop_token_ids")
        ends = frozenset(self._model.token_ids("stop_token_ids", params.stop_token_ids))
        if not params.ignore_eos:
            ends |= frozenset(self._model.config.eos_token_ids)
        text = prompt if isinstance(prompt, str) else None
        request = Request(request_id, text, tokens, params, RequestMetrics(time.monotonic()))
        self._arrivals += 1
        most = self.max_model_len
        if params.max_tokens is not None:
            most = min(most, len(tokens) + params.max_tokens)
        seed = drawn(self._seed, self._arrivals) if params.seed is None else params.seed
        request.sequences = [
            EngineSequence(
                request,
                index,
                (self._arrivals, index),
                most=most,
                ends=ends,
                seed=drawn(seed, index) if index else seed,
                text=TextBuilder(self._stream(tokens, params), params.stop),
            )
            for index in range(params.n)
        ]
        return request

    def _stream(self, prompt: list[int], params: SamplingParams) -> TextStream | None:
        if self._tokenizer is None:
            return None
        return TextStream(self._tokenizer, context=prompt, skip_special_tokens=params.skip_special_tokens)

    def _tokens(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise InputError("a prompt of text needs a tokenizer: give the engine one, or token ids")
            tokens = self._tokenizer.encode_prompt(prompt)
        else:
            tokens = self._model.token_ids("prompt", prompt)
        if not tokens:
            raise InputError("the prompt is empty: give at least one token (the model's BOS, for example)")
        if len(tokens) >= self.max_model_len:
            raise InputError(
                f"the prompt has {len(tokens)} tokens, and this engine serves {self.max_model_len} with the first new "
                f"one (max_model_len; the cache holds {self._model.cache.capacity}): shorten it, or use a larger cache"
            )
        return tokens


def drawn(seed: int, count: int) -> int:
    """The seed that is drawn from another one, ``count`` times on."""
    digest = blake2b(f"{seed}/{count}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % SEEDS
