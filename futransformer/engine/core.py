"""The engine: requests come and go between steps, and every step advances all that are running.

One thread makes an engine and calls it; nothing here is asynchronous. A request's deltas come out of ``step``, in the
order of arrival.
"""

from __future__ import annotations

from collections.abc import Sequence

from futransformer.engine.outputs import RequestOutput
from futransformer.engine.params import SamplingParams
from futransformer.engine.stats import EngineStats
from futransformer.model import Llama
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
        """Take the model's cache over; ``model.generate`` and the like must not be called beside the engine.

        ``max_num_seqs``: sequences that run at a time. ``max_model_len``: the most tokens of a sequence, prompt and
        text (default: what the model is made for, or the whole cache if that is less). ``max_num_batched_tokens``: rows
        of prompts that a step reads. ``seed``: requests without one draw theirs from it, by arrival. Without a
        tokenizer prompts are token ids, texts stay empty, and stop strings are refused.
        """
        raise NotImplementedError

    def add_request(self, request_id: str, prompt: str | Sequence[int], params: SamplingParams | None = None) -> None:
        """Queue a request. InputError, and nothing has changed: an id in use, a prompt that is empty, no text of this
        tokenizer or longer than ``max_model_len`` allows, or parameters that this engine cannot serve.
        """
        raise NotImplementedError

    def abort(self, request_id: str) -> bool:
        """Give a request up: its pages are free again, nothing more of it comes out of ``step``. False: unknown."""
        raise NotImplementedError

    def has_unfinished(self) -> bool:
        """Whether ``step`` has anything to do."""
        raise NotImplementedError

    def step(self) -> list[RequestOutput]:
        """Advance: deltas of the requests that did, those that finished or failed (``error``) for the last time.

        A request's own failure ends it alone. Any other exception leaves the engine unusable: ``abort`` what is left.
        """
        raise NotImplementedError

    def stats(self) -> EngineStats:
        """What is running, and what has been done."""
        raise NotImplementedError
