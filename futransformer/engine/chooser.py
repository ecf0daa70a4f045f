"""How each running sequence's tokens are chosen, on the device: settings by slot, and what they need to know.

Greedy sequences take what ``Ops.argmax`` gives; the others, and those that want log-probabilities, go through
``Ops.sample``, whose choice depends on a sequence's logits, settings, seed and position alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from futransformer.engine.sequence import EngineSequence
from futransformer.kv_cache import upload
from futransformer.ops.interface import Ops
from futransformer.sampling import Sampling, SamplingRows, pack_seen, with_log_probs

NOT_A_NUMBER = -1  # the token of a row whose logits hold NaN


class Alternatives(NamedTuple):
    """Log-probabilities of R rows, on the device: of the chosen token, its rank, and of the n likeliest."""

    chosen: Tensor  # float32 [R]
    ranks: Tensor  # int64 [R]
    top_tokens: Tensor  # int64 [R, n]
    top: Tensor  # float32 [R, n]


class Chosen(NamedTuple):
    """Tokens of all sequences, int32 [B], and of which rows there are alternatives."""

    tokens: Tensor
    rows: list[int]
    alternatives: Alternatives | None


class _Batch(NamedTuple):
    """Settings of the rows that are sampled, kept as long as the same sequences come in the same order."""

    of: list[int]  # slots of all rows
    rows: list[int]
    at: Tensor  # int64 [R]: their rows
    slots: Tensor  # int64 [R]
    settings: SamplingRows  # their position is not of this step
    log_probs: int | None
    penalised: bool


class Chooser:
    """The settings of the sequences in ``slots`` slots."""

    def __init__(self, ops: Ops, vocab_size: int, slots: int) -> None:
        """Begin with empty slots."""
        self.vocab_size = vocab_size
        self.device = ops.device
        self._ops = ops
        self._slots = slots
        self._seen: Tensor | None = None  # int32 [slots, words], made when somebody is penalised
        self._batch: dict[bool, _Batch] = {}  # the last one that was decoded, or read

    def begin(self, sequence: EngineSequence) -> None:
        """A sequence has got its slot: note the tokens that it has."""
        self._batch.clear()
        if sequence.request.params.repetition_penalty != 1:
            if self._seen is None:
                words = -(-self.vocab_size // 32)
                self._seen = torch.zeros(self._slots, words, dtype=torch.int32, device=self.device)
            self._seen[sequence.slot] = pack_seen([sequence.tokens], self.vocab_size)[0].to(self.device)

    def needs_logits(self, sequences: Sequence[EngineSequence]) -> bool:
        """Whether any of them takes more than the likeliest token."""
        return not all(sequence.plain for sequence in sequences)

    def choose(
        self,
        sequences: Sequence[EngineSequence],
        greedy: Tensor,
        logits: Tensor | None,
        positions: Tensor,
        *,
        decoding: bool,
    ) -> Chosen:
        """The next token of each sequence.

        ``greedy``: the likeliest, int32 [B]. ``logits`` float32 [B, vocab_size] are written to; None: unneeded.
        ``positions`` int32 [B]: where in its sequence the token will stand.
        """
        if logits is None:
            return Chosen(greedy, [], None)
        broken = logits.isnan().any(1)
        batch = self._rows_of(sequences, decoding)
        tokens, alternatives = greedy, None
        if batch.rows:
            whole = len(batch.rows) == len(sequences)
            theirs = logits if whole else logits[batch.at]
            self._forbid_ends(sequences, batch.rows, theirs)
            seen = self._seen[batch.slots] if batch.penalised and self._seen is not None else None
            settings = replace(batch.settings, position=positions if whole else positions[batch.at], seen=seen)
            sampled = self._ops.sample(theirs, settings)
            if seen is not None and self._seen is not None:
                self._seen[batch.slots] = seen
            tokens = sampled if whole else tokens.index_copy(0, batch.at, sampled)
            if batch.log_probs is not None:
                found = with_log_probs(theirs, sampled.long(), batch.log_probs)
                ranks = (theirs > theirs.gather(1, found.tokens[:, None])).sum(1) + 1
                assert found.log_probs is not None
                assert found.top_tokens is not None
                assert found.top_log_probs is not None
                alternatives = Alternatives(found.log_probs, ranks, found.top_tokens, found.top_log_probs)
        return Chosen(torch.where(broken, NOT_A_NUMBER, tokens), batch.rows, alternatives)

    def _rows_of(self, sequences: Sequence[EngineSequence], decoding: bool) -> _Batch:
        slots = [sequence.slot for sequence in sequences]
        batch = self._batch.get(decoding)
        if batch is not None and batch.of == slots:
            return batch
        rows = [row for row, sequence in enumerate(sequences) if not sequence.plain]
        asked = [sequences[row].request.params for row in rows]
        wanted = [params.logprobs for params in asked if params.logprobs is not None]
        batch = _Batch(
            slots,
            rows,
            upload(rows, torch.int64, self.device),
            upload([slots[row] for row in rows], torch.int64, self.device),
            SamplingRows.of(
                [settings_of(sequences[row]) for row in rows], torch.zeros(0, dtype=torch.int32, device=self.device)
            ),
            max(wanted) if wanted else None,
            any(params.repetition_penalty != 1 for params in asked),
        )
        self._batch[decoding] = batch
        return batch

    def _forbid_ends(self, sequences: Sequence[EngineSequence], rows: list[int], logits: Tensor) -> None:
        """Make what would end a text impossible where it has fewer than ``min_tokens``."""
        pairs = [
            (row, token)
            for row, sequence in enumerate(sequences[index] for index in rows)
            if sequence.generated + sequence.in_flight < sequence.least
            for token in sequence.ends
        ]
        if pairs:
            index = upload(pairs, torch.int64, self.device)
            logits[index[:, 0], index[:, 1]] = -torch.inf


def settings_of(sequence: EngineSequence) -> Sampling:
    """A sequence's settings, as ``futransformer.sampling`` takes them."""
    params = sequence.request.params
    if params.greedy:
        return Sampling(temperature=0.0, repetition_penalty=params.repetition_penalty)
    return Sampling(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        seed=sequence.seed,
    )
