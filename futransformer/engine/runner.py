"""The device side of a step: what the running sequences read and write there, updated in place.

Every running sequence has a slot, by which the host keeps its length and its row of the block table (numpy), and the
device its newest token. A decode step takes the rows of its sequences out of these: the tokens that it reads have never
left the device. Its shape is one of few, so that it is a replayed graph: batches are padded to 1, 2, 3, 4, 6, 8, 12,
16, ... rows by rows of no sequence, which have a slot of their own, the last. Where the same sequences take another
step, the device has all of it but a new page or two, and nothing is sent.

What is launched comes back as ``Launched``, whose tokens are on their way to the host. Nothing else waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from futransformer.decode_step import DecodeStep
from futransformer.engine import warmup
from futransformer.engine.chooser import Alternatives, Chooser, Chosen
from futransformer.engine.scheduler import Chunk
from futransformer.engine.sequence import EngineSequence
from futransformer.kv_cache import download, page_bucket, pages_for, upload
from futransformer.model import Llama
from futransformer.prefill_step import HostPass

FEW_PAGES = 4  # as many writes of single pages take the host less than all of a step's state anew
NOBODY = -1  # the length of a row of no sequence, and its pages (decode_step.py)


class Launched:
    """One token of each of some sequences, on its way to the host."""

    def __init__(self, sequences: Sequence[EngineSequence], chosen: Chosen) -> None:
        """Begin the copies; ``chosen`` may be overwritten by what is launched later."""
        self.sequences = sequences
        self.rows = chosen.rows
        self._host, self._event = download(chosen.tokens[: len(sequences)], *(chosen.alternatives or ()))

    def tokens(self) -> list[int]:
        """Wait for the tokens."""
        if self._event is not None:
            self._event.synchronize()
        found: list[int] = self._host[0].tolist()
        return found

    def alternatives(self) -> Alternatives | None:
        """Of ``rows``, on the host; ``tokens`` has waited."""
        return Alternatives(*self._host[1:]) if len(self._host) > 1 else None


class Runner:
    """Launches passes and steps of one model for at most ``slots`` sequences of at most ``max_model_len`` tokens."""

    def __init__(self, model: Llama, slots: int, max_model_len: int) -> None:
        """Allocate what all steps share."""
        self.model = model
        self.device = model.cache.device
        self._nobody = slots
        self._lengths = np.full(slots + 1, NOBODY, dtype=np.int32)
        self._table = np.full((slots + 1, page_bucket(pages_for(max_model_len))), NOBODY, dtype=np.int32)
        # Short passes have one width, so that they are few graphs; of longer sequences most passes are not short.
        self._width = min(self._table.shape[1], 32)
        self._newest = torch.zeros(slots + 1, dtype=torch.int32, device=self.device)
        self._chooser = Chooser(model.ops, model.config.vocab_size, slots)
        self._loaded: DecodeStep | None = None  # has the state of the last step's sequences, newest tokens included
        self._grown: list[tuple[int, int]] = []  # slots and places of pages that it does not have
        self._batch: list[int] = []  # slots of the last step, as the two below have them
        self._slots = np.zeros(0, dtype=np.int64)
        self._index = torch.zeros(0, dtype=torch.int64, device=self.device)

    def shapes(self, rows: int) -> Iterator[Callable[[], None]]:
        """What captures the graphs of this runner's steps, and of its passes of up to ``rows`` rows."""
        return warmup.shapes(self.model, self._nobody, self._table.shape[1], self._width, rows)

    def begin(self, sequence: EngineSequence) -> None:
        """A sequence has got its slot and its first pages."""
        pages = sequence.cached.pages
        self._table[sequence.slot, : len(pages)] = pages
        self._chooser.begin(sequence)

    def grow(self, sequence: EngineSequence) -> None:
        """A sequence has got another page."""
        pages = sequence.cached.pages
        self._table[sequence.slot, len(pages) - 1] = pages[-1]
        self._grown.append((sequence.slot, len(pages) - 1))

    @torch.inference_mode()
    def read(self, chunks: Sequence[Chunk]) -> Launched | None:
        """Launch one pass; the first tokens of the sequences that it reads to the end, None if there are none."""
        rows = HostPass(self._width)
        ended = []
        for sequence, start, stop in chunks:
            ends = stop == sequence.target
            rows.add(sequence.cached, sequence.tokens[start:stop], ends=ends)
            if ends:
                ended.append(sequence)
        logits = self.model.read(rows)
        if not ended:
            return None
        positions = upload([sequence.target for sequence in ended], torch.int32, self.device)
        chosen = self._chooser.choose(ended, self.model.ops.argmax(logits), logits, positions, decoding=False)
        for sequence in ended:
            self._lengths[sequence.slot] = sequence.cached.length
            sequence.in_flight += 1
        slots = upload([sequence.slot for sequence in ended], torch.int64, self.device)
        self._settle()  # before a slot has another sequence's token
        self._newest.index_copy_(0, slots, chosen.tokens)
        return Launched(ended, chosen)

    @torch.inference_mode()
    def decode(self, sequences: Sequence[EngineSequence]) -> Launched:
        """Launch one step: a token more of each sequence."""
        batch, longest, slots = len(sequences), 0, []
        for sequence in sequences:
            cached = sequence.cached
            cached.length += 1
            sequence.in_flight += 1
            longest = max(longest, cached.length)
            slots.append(sequence.slot)
        rows, width = page_bucket(batch), page_bucket(pages_for(longest))
        step = self.model.decode_step(rows, width)
        if step is self._loaded and slots == self._batch and len(self._grown) <= FEW_PAGES:
            for slot, place in self._grown:  # not by assignment, which copies a number from the host and waits for it
                step.block_table[slots.index(slot), place].fill_(int(self._table[slot, place]))
        else:
            self._settle()
            self._take(slots, rows)
            self._load(step, rows, width)
        self._grown.clear()
        self._loaded = None  # unless all goes well
        self._lengths[self._slots[:batch]] += 1
        logits = step.run(longest, logits=self._chooser.needs_logits(sequences))
        greedy = step.tokens[:batch]
        if logits is None:
            chosen = Chosen(greedy, [], None)
        else:  # of this step, lengths are the new tokens' places
            chosen = self._chooser.choose(sequences, greedy, logits[:batch], step.lengths[:batch], decoding=True)
            greedy.copy_(chosen.tokens)
        self._loaded = step
        return Launched(sequences, chosen)

    def _load(self, step: DecodeStep, rows: int, width: int) -> None:
        """Put the state of the batch's sequences into a step."""
        host = torch.empty(rows * (1 + width), dtype=torch.int32, pin_memory=self.device.type == "cuda")
        lengths, table = host[:rows], host[rows:].view(rows, width)
        np.take(self._lengths, self._slots, out=lengths.numpy(), mode="clip")
        np.take(self._table[:, :width], self._slots, axis=0, out=table.numpy(), mode="clip")
        step.lengths.copy_(lengths, non_blocking=True)
        step.block_table.copy_(table, non_blocking=True)
        torch.index_select(self._newest, 0, self._index, out=step.tokens)

    def _settle(self) -> None:
        """Note by slot the newest tokens that the last step has: what it is loaded with is about to change."""
        if self._loaded is not None:
            batch = len(self._batch)
            self._newest.index_copy_(0, self._index[:batch], self._loaded.tokens[:batch])
            self._loaded = None

    def _take(self, slots: list[int], rows: int) -> None:
        """Point at the slots of a step's rows, which are mostly those of the step before."""
        if slots != self._batch or len(self._slots) != rows:
            self._batch = slots
            self._slots = np.array(slots + [self._nobody] * (rows - len(slots)), dtype=np.int64)
            self._index = upload(self._slots.tolist(), torch.int64, self.device)
