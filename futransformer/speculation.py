"""Speculation by prompt lookup: several tokens of one text in one decode step, and the same text as without.

What came after the last few tokens when they stood in the text before is a *draft* of what comes now. One step reads
the newest token and the draft as rows of one sequence: row j at the j-th position from the newest, its own length, the
same pages. Each row's choice is what a step of its own would choose if all drafts before it are right; so they are
compared from the front, and the first that is not takes the place of its draft. Sampled tokens are a function of
logits, seed and position (futransformer.sampling), so they are speculated in the same way.

A row has the bits of a step of its own where rows do not depend on their batch (``batch_invariant``, up to eight rows):
then texts are the same. Otherwise, and on the CPU reference, whose products PyTorch may add up in another order for
another number of rows, they may part where two tokens are nearly tied.

A draft ends with the page of the newest token: attention reads the pages before a row's last ahead of its turn
(docs/notebook/decode_chain.md), so nothing there may be written in the same step. What wrong drafts have left in the
cache lies beyond every length until it is overwritten.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from futransformer.decode_step import DecodeStep
from futransformer.generator.errors import InputError
from futransformer.generator.specs import PAGE_SIZE
from futransformer.kv_cache import page_bucket, upload
from futransformer.sampling import Sampling, pack_seen

if TYPE_CHECKING:
    from futransformer.model import Llama

MOST_DRAFTS = 7  # with the newest token as many rows as have the same bits together
NGRAMS = (3, 2)  # tokens that must have stood together before, the longer first


def check_drafts(drafts: int, settings: Sequence[Sampling | None]) -> None:
    """Refuse what no step can verify."""
    if not 1 <= drafts <= MOST_DRAFTS:
        raise InputError(f"speculate takes 1 to {MOST_DRAFTS} tokens ahead, or 0 for none, not {drafts}")
    if any(sampling is not None and sampling.repetition_penalty != 1 for sampling in settings):
        raise InputError(
            "speculate cannot penalise repetition, for what is penalised changes within a step: leave one of them out"
        )


class PromptLookup:
    """A text, and where each of its n-grams stood last."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens: list[int] = []
        self._behind: dict[tuple[int, ...], int] = {}
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens. An n-gram counts when something stands behind it."""
        for token in tokens:
            for n in NGRAMS:
                if len(self.tokens) >= n:
                    self._behind[tuple(self.tokens[-n:])] = len(self.tokens)
            self.tokens.append(token)

    def draft(self, most: int) -> list[int]:
        """At most so many tokens that may come next."""
        for n in NGRAMS:
            behind = self._behind.get(tuple(self.tokens[-n:]))
            if behind is not None:
                return self.tokens[behind : behind + most]
        return []


class Speculation:
    """The continuation of one prompt, whose sequence the model holds alone, with room for all new tokens."""

    def __init__(self, model: Llama, prompt: Sequence[int], drafts: int, sampling: Sampling | None) -> None:
        """``drafts``: at most so many tokens beside the newest in a step."""
        self.model = model
        self.drafts = drafts
        self.lookup = PromptLookup(prompt)
        self.sampling = sampling

    @torch.inference_mode()
    def run(
        self, logits: Tensor, max_new_tokens: int, ends: frozenset[int], on_token: Callable[[int], None] | None
    ) -> list[int]:
        """The new tokens, from the logits [1, vocab_size] of the prompt's last; see ``Llama.generate``."""
        text: list[int] = []
        step = self._begin()
        chosen = self._first(step, logits)
        while True:
            for token in chosen:
                text.append(token)
                if on_token is not None:
                    on_token(token)
                if token in ends or len(text) == max_new_tokens:
                    return text
            self.lookup.extend(chosen)
            chosen = self._next(step, max_new_tokens - len(text) - 1)

    def _begin(self) -> DecodeStep:
        """The step whose rows all are of the one sequence."""
        model, rows = self.model, self.drafts + 1
        (sequence,) = model.sequences
        step = model.decode_step(rows, page_bucket(len(sequence.pages)))
        step.block_table.copy_(model.cache.block_table([sequence] * rows, step.block_table.shape[1]))
        nothing = pack_seen([[]], model.config.vocab_size)
        settings = None if self.sampling is None else [self.sampling] * rows
        seen = None if self.sampling is None else nothing.expand(rows, -1)
        step.begin_generation([1] * rows, nothing[0], settings, seen)
        return step

    def _first(self, step: DecodeStep, logits: Tensor) -> list[int]:
        if step.sampling is None:
            likeliest: list[int] = self.model.ops.argmax(logits).tolist()
            return likeliest
        position = upload([len(self.lookup.tokens)], torch.int32, self.model.cache.device)
        row = step.sampling.keep(torch.zeros(1, dtype=torch.int64, device=position.device))
        drawn: list[int] = self.model.ops.sample(logits, replace(row, position=position)).tolist()
        return drawn

    def _next(self, step: DecodeStep, most: int) -> list[int]:
        """The tokens of one step: as many as its drafts were right, and one."""
        cached, rows = len(self.lookup.tokens) - 1, self.drafts + 1
        room = PAGE_SIZE - 1 - cached % PAGE_SIZE
        draft = self.lookup.draft(min(self.drafts, most, room))
        read = [self.lookup.tokens[-1], *draft]
        empty = rows - len(read)
        lengths = [*range(cached, cached + len(read)), *[-1] * empty]
        state = upload([[*read, *[0] * empty], lengths], torch.int32, step.tokens.device)
        step.tokens.copy_(state[0])
        step.lengths.copy_(state[1])
        if step.sampling is None:
            step.run(cached + len(read), logits=False)
        else:
            step.run_generation(cached + len(read))
        chosen: list[int] = step.tokens.tolist()
        right = next((place for place, token in enumerate(draft) if token != chosen[place]), len(draft))
        return chosen[: right + 1]
