"""The paged KV cache: one pool of pages, handed out to sequences as they grow.

Pool: [2 (K, V), layers, num_pages, num_key_value_heads, PAGE_SIZE, head_dim], so that one layer's K or V pages are
contiguous, as the kernels read them. A page number means the same slots in every layer. Pages are not cleared: what a
sequence has not written may hold anything, and nobody reads it.

Beside it, if the precision has one, an INT4 copy of the same slots, which decode attention reads in its place:
uint8 [layers, num_pages, num_key_value_heads, page bytes] (kv_packing.py).

Host state (lists of page numbers) decides; what kernels read (block tables, slots) is derived here as tensors on the
cache's device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from futransformer.generator.config import LlamaConfig
from futransformer.generator.errors import InputError, OutOfMemoryError
from futransformer.generator.kv_format import KvFormat
from futransformer.generator.specs import PAGE_SIZE

# Of what E4M3 codes are worth. Attention multiplies them by 2^120 in float32 (e4m3_operand.cuh).
SCALE_RANGE = (2.0**-40, 2.0**7)


@dataclass(eq=False)
class CachedSequence:
    """One sequence's pages, in order, and how many of its tokens are in them."""

    pages: list[int] = field(default_factory=list)
    length: int = 0


def pages_for(tokens: int) -> int:
    """Pages that hold this many tokens of one sequence."""
    return -(-tokens // PAGE_SIZE)


def page_bucket(pages: int) -> int:
    """Round up to 1, 2, 3, 4, 6, 8, 12, 16, ...: few sizes, none of them half as large again as what it is for."""
    power = 1 << max(pages - 1, 0).bit_length()  # the least power of two that holds them
    return power * 3 // 4 if pages <= power * 3 // 4 else power


def page_bytes(config: LlamaConfig, dtype: torch.dtype, copy: KvFormat | None = None) -> int:
    """Bytes of one page: K and V of PAGE_SIZE tokens in all layers, and their INT4 copy."""
    of_head = 2 * PAGE_SIZE * config.head_dim * dtype.itemsize
    of_copy = 0 if copy is None else copy.page_bytes(config.head_dim)
    return config.num_hidden_layers * config.num_key_value_heads * (of_head + of_copy)


class KVCache:
    """A fixed number of pages and the list of the free ones."""

    def __init__(
        self,
        config: LlamaConfig,
        num_pages: int,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
        page_order: Iterable[int] | None = None,
        scales: Tensor | None = None,
        copy: KvFormat | None = None,
    ) -> None:
        """Allocate the pool; ``page_order`` is the order in which pages are handed out (default: ascending).

        ``scales``, float32 [layers, 2], makes it a pool of E4M3 codes: what a code of K, and of V, is worth.
        ``copy`` is the form of an INT4 copy.
        """
        codes = dtype == torch.float8_e4m3fn
        if codes and scales is None:
            raise InputError("a KV cache of E4M3 codes needs scales, what a code of each layer's K and V is worth")
        if scales is not None:
            _check_scales(scales, config.num_hidden_layers)
        if num_pages < 1:
            raise InputError(f"a KV cache needs at least one page of {PAGE_SIZE} tokens, not {num_pages}")
        shape = (2, config.num_hidden_layers, num_pages, config.num_key_value_heads, PAGE_SIZE, config.head_dim)
        try:
            self.pool = torch.empty(shape, dtype=dtype, device=device)
            self.copy = None
            if copy is not None:
                copied = (*shape[1:4], copy.page_bytes(config.head_dim))
                self.copy = torch.empty(copied, dtype=torch.uint8, device=device)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            size = num_pages * page_bytes(config, dtype, copy)
            raise OutOfMemoryError(
                f"a KV cache of {num_pages} pages ({num_pages * PAGE_SIZE} tokens) needs {size / 2**30:.2f} GiB on "
                f"{device}, which has less; ask for fewer cache tokens"
            ) from error
        self.scales = None if scales is None else scales.to(device)
        self.num_pages = num_pages
        self.device = self.pool.device
        self._free = list(range(num_pages) if page_order is None else page_order)[::-1]
        assert sorted(self._free) == list(range(num_pages)), "page_order must name every page once"

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """K and V pages of one layer, each [num_pages, num_key_value_heads, PAGE_SIZE, head_dim]."""
        return self.pool[0, index], self.pool[1, index]

    def copy_layer(self, index: int) -> Tensor | None:
        """The INT4 copy of one layer's pages, [num_pages, num_key_value_heads, page bytes]; None without one."""
        return None if self.copy is None else self.copy[index]

    def scale(self, index: int) -> Tensor | None:
        """What codes of one layer are worth, float32 [2]; None where pages hold values."""
        return None if self.scales is None else self.scales[index]

    def largest(self, sequences: Iterable[CachedSequence]) -> Tensor:
        """The largest magnitude of each layer's K and V in these sequences: float32 [layers, 2] on the CPU."""
        largest = torch.zeros(self.pool.shape[1], 2)
        for sequence in sequences:
            for index, page in enumerate(sequence.pages):
                tokens = self.pool[:, :, page, :, : max(sequence.length - index * PAGE_SIZE, 0)].float().abs()
                if tokens.numel():
                    largest = torch.maximum(largest, tokens.amax((2, 3, 4)).T.cpu())
        return largest if self.scales is None else largest * self.scales.cpu()

    @property
    def capacity(self) -> int:
        """Tokens that all pages together hold."""
        return self.num_pages * PAGE_SIZE

    @property
    def free_pages(self) -> int:
        """Pages that no sequence holds."""
        return len(self._free)

    def missing_pages(self, sequences: Sequence[CachedSequence], tokens: Sequence[int]) -> int:
        """Pages that ``reserve`` would take."""
        return sum(_missing_pages(sequences, tokens))

    def reserve(self, sequences: Sequence[CachedSequence], tokens: Sequence[int]) -> bool:
        """Give each sequence pages for that many tokens in all; say whether any page was added.

        All or nothing: when the free pages do not suffice, InputError, and no sequence has changed.
        """
        missing = _missing_pages(sequences, tokens)
        if sum(missing) > self.free_pages:
            raise InputError(
                f"{sum(tokens)} tokens in {len(sequences)} sequences need {sum(missing)} more pages of {PAGE_SIZE} "
                f"tokens, but {self.free_pages} of the KV cache's {self.num_pages} ({self.capacity} tokens) are free; "
                "use a larger cache (cache_tokens), shorter prompts, or fewer of them"
            )
        for sequence, count in zip(sequences, missing, strict=True):
            sequence.pages += [self._free.pop() for _ in range(count)]
        return any(missing)

    def release(self, sequences: Iterable[CachedSequence]) -> None:
        """Take all pages back, to be handed out again in the same order; the sequences are empty afterwards."""
        for sequence in reversed(list(sequences)):
            self._free += reversed(sequence.pages)
            sequence.pages, sequence.length = [], 0

    def block_table(self, sequences: Sequence[CachedSequence], width: int | None = None) -> Tensor:
        """Page numbers, int32 [B, width] (default: most pages of any); short rows end in -1, which nobody reads."""
        if width is None:
            width = max([1, *(len(sequence.pages) for sequence in sequences)])
        rows = [sequence.pages + [-1] * (width - len(sequence.pages)) for sequence in sequences]
        return upload(rows, torch.int32, self.device)


def _check_scales(scales: Tensor, layers: int) -> None:
    if scales.dtype != torch.float32 or scales.shape != (layers, 2):
        raise InputError(f"kv_scales must be float32 [{layers}, 2], not {scales.dtype} {list(scales.shape)}")
    least, most = SCALE_RANGE
    if not ((scales >= least) & (scales <= most)).all():
        raise InputError(f"kv_scales must lie within {least:.3g} .. {most:.3g}: what a code of 1 is worth")


def _missing_pages(sequences: Sequence[CachedSequence], tokens: Sequence[int]) -> list[int]:
    return [max(0, pages_for(total) - len(sequence.pages)) for sequence, total in zip(sequences, tokens, strict=True)]


def upload(values: Sequence[int] | Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Put host integers on the device; from pinned memory on a GPU, so that nothing waits for the copy."""
    host = torch.tensor(values, dtype=dtype)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def download(*tensors: Tensor) -> tuple[list[Tensor], torch.cuda.Event | None]:
    """Send copies to the host without waiting: they are there when the event has happened; None: they are.

    From a GPU to pinned memory; all tensors are of one device.
    """
    on_gpu = tensors[0].is_cuda
    host = [torch.empty(t.shape, dtype=t.dtype, pin_memory=on_gpu).copy_(t, non_blocking=True) for t in tensors]
    return host, torch.cuda.current_stream().record_event() if on_gpu else None


def token_slots(block_table: Tensor, sequence: Tensor, position: Tensor) -> Tensor:
    """The slot of each (sequence, position) pair, int64: page x PAGE_SIZE + offset in the page. No synchronisation."""
    position = position.long()
    page = block_table[sequence.long(), position // PAGE_SIZE].long()
    return page * PAGE_SIZE + position % PAGE_SIZE
