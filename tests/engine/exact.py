"""A model whose text is known without it: the next token is a hash of all that came before, read from the cache.

It takes the place of a Llama's layers and of nothing else. Passes, steps, pages, slots and block tables are the real
ones: the cache's slots hold token ids, and whoever reads a page that is not its sequence's, or no longer, or not yet,
gets another text. All of it is exact in float32, so that no order of reading changes anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from futransformer.blocks import DecodePass, PrefillPass
from futransformer.generator.config import CONFIGS
from futransformer.generator.specs import PAGE_SIZE
from futransformer.kv_cache import KVCache
from futransformer.model import Llama
from futransformer.prefill_step import PassInputs
from futransformer.reference import ReferenceOps
from futransformer.sampling import SamplingRows

VOCABULARY = 101
EOS = 100
CONFIG = replace(
    CONFIGS["smollm2-135m"],
    name="exact",
    num_hidden_layers=1,
    num_attention_heads=1,
    num_key_value_heads=1,
    hidden_size=64,
    vocab_size=VOCABULARY,
    max_position_embeddings=1024,
    bos_token_id=1,
    eos_token_ids=(EOS,),
)
MODULUS = 65521


def next_token(tokens: Sequence[int]) -> int:
    """What the model says after these tokens. EOS about once in a hundred."""
    state = 1
    for token in tokens:
        state = (state * 31 + token + 7) % MODULUS
    return state % VOCABULARY


def text_after(prompt: Sequence[int], count: int, ends: Sequence[int] = (EOS,)) -> list[int]:
    """The text that must come, the token that ends it included."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count:
        tokens.append(next_token(tokens))
        if tokens[-1] in ends:
            break
    return tokens[len(prompt) :]


class ExactLlama(Llama):
    """The model, with a cache of its own; ``cost`` counts the rows of all passes and steps."""

    def __init__(self, num_pages: int, *, page_order: list[int] | None = None, max_rows: int = 8192) -> None:
        cache = KVCache(CONFIG, num_pages, dtype=torch.float32, page_order=page_order)
        cache.pool.fill_(torch.nan)  # what nobody has written makes no text
        weights: Any = None
        super().__init__(CONFIG, ReferenceOps(CONFIG), weights, cache, max_rows=max_rows)
        self.read_rows = 0
        self.steps = 0

    def _store(self, tokens: Tensor, slots: Tensor) -> None:
        written = slots >= 0
        pages = self.cache.pool[0, 0, :, 0, :, 0]
        pages[slots[written] // PAGE_SIZE, slots[written] % PAGE_SIZE] = tokens[written].float()

    def _logits(self, pages: Tensor, length: int) -> Tensor:
        """After a sequence's first ``length`` tokens."""
        count = -(-length // PAGE_SIZE)
        tokens = self.cache.pool[0, 0, pages[:count].long(), 0, :, 0].flatten()[:length]
        logits = torch.zeros(VOCABULARY)
        if tokens.isnan().any():
            return logits.fill_(torch.nan)
        logits[next_token(tokens.long().tolist())] = 8
        return logits

    def _prefill_logits(
        self, inputs: PassInputs, rows_of_pass: PrefillPass, rows: Literal["last", "all"] = "last"
    ) -> Tensor:
        self.read_rows += len(inputs.tokens)
        self._store(inputs.tokens, inputs.slots)
        owners = torch.bucketize(inputs.ends, inputs.cu_seqlens_q, right=True) - 1
        found = [self._logits(inputs.block_table[o], int(inputs.seqlens_k[o])) for o in owners.tolist()]
        return torch.stack(found) if found else torch.empty(0, VOCABULARY)

    def _decode_tokens(
        self, tokens: Tensor, rows: DecodePass, logits: bool, sampling: SamplingRows | None = None
    ) -> Tensor | None:
        self.steps += 1
        self._store(tokens, rows.slots)
        found = torch.stack(
            [
                self._logits(table, int(length)) if length else torch.zeros(VOCABULARY)
                for table, length in zip(rows.block_table, rows.seqlens_k, strict=True)
            ]
        )
        tokens.copy_(found.nan_to_num().argmax(1))
        return found if logits else None
