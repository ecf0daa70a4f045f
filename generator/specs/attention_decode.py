"""Decode attention: one query token a sequence over paged K and V, split over the sequence, combined in the kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..kv_format import HEAD, PAGE_SIZE, KvFormat
from ..precision import BF16, E4M3, INT4, Element
from .base import (
    BLOCK_RESERVED_BYTES,
    KV_SCALE,
    MAX_SHARED_BYTES,
    SM_SHARED_BYTES,
    Heads,
    KernelSpec,
    Param,
    pointer,
)


def copy_blocks(heads: Heads, copy: KvFormat) -> int:
    """Blocks over INT4 pages that a multiprocessor's registers hold without spilling any."""
    if heads.group <= 8:
        return 3
    return 1 if copy.minimum and copy.groups(heads.head_dim) > 2 else 2


@dataclass(frozen=True)
class AttentionDecodeSpec(KernelSpec):
    """Blocks are (split, key/value head, sequence); the last split to finish combines all in split order.

    A producer warp fetches pages of one key/value head by TMA into a ring of ``stages``: of BF16 in boxes of 64 tokens
    x 64 features, of E4M3 whole, in rows of 128 bytes, of INT4 in one bulk copy. ``warps`` consumer warps take sixteen
    of a page's tokens each. ``early_next`` lets the next kernel start when this one does, else when the last page has
    been asked for. ``copy`` is the form of INT4; its rotation is nothing to the kernel.
    """

    template: ClassVar[str] = "attention_decode_sm90.cu.jinja"
    dependent_launch: ClassVar[bool] = True

    element: Element  # of the pages
    heads: Heads
    warps: int
    stages: int
    early_next: bool = False
    copy: KvFormat | None = None

    def __post_init__(self) -> None:
        self.require(self.element in (BF16, E4M3, INT4), "pages hold BF16, E4M3 or INT4")
        self.require((self.copy is not None) == (self.element == INT4), "INT4 needs its form, and nothing else has one")
        self.require(self.heads.head_dim in (64, 128), "head_dim must be 64 or 128")
        self.require(self.heads.num_attention_heads % self.heads.num_key_value_heads == 0, "heads must divide evenly")
        self.require(1 <= self.heads.group <= 16, "at most 16 query heads a key/value head")
        self.require(16 * self.warps == PAGE_SIZE, f"warps must be {PAGE_SIZE // 16}: sixteen tokens of a page each")
        self.require(self.stages >= 2, "a ring needs two stages")
        self.require(self.stages * self._page_bytes >= self._result_bytes, "the warps' results must fit in the ring")
        self.require(self.shared_bytes <= MAX_SHARED_BYTES, f"shared memory must not exceed {MAX_SHARED_BYTES} bytes")

    @property
    def name(self) -> str:
        """See KernelSpec.name."""
        early = "_early" if self.early_next else ""
        shape = f"{self.element.name}{self._form}_{self.heads}_p{PAGE_SIZE}"
        return f"attention_decode_sm90_{shape}_w{self.warps}_s{self.stages}{early}_splitkv"

    @property
    def params(self) -> tuple[Param, ...]:
        """See KernelSpec.params."""
        return (
            pointer("q", "const cutlass::bfloat16_t"),
            *self._page_params,
            pointer("out", "cutlass::bfloat16_t"),
            pointer("block_table", "const int"),
            Param("block_table_stride", "int32"),
            pointer("seqlens_k", "const int"),
            Param("softmax_scale", "float32"),
            Param("pages_per_split", "int32"),
            pointer("partial_out", "float"),  # [B, num_key_value_heads, splits, group, head_dim]
            pointer("partial_max_sum", "float"),  # [B, num_key_value_heads, splits, group, 2]
            pointer("arrivals", "int"),  # [B, num_key_value_heads], zero before and after every launch
            *((KV_SCALE,) if self.element == E4M3 else ()),  # [2]: what a code of K and of V is worth
        )

    @property
    def _page_params(self) -> tuple[Param, ...]:
        if self.copy is not None:
            return (pointer("kv_copy", "const unsigned char"),)  # [num_pages, num_key_value_heads, page_bytes]
        # [num_pages * num_key_value_heads * 64, head_dim], E4M3: [the same * head_dim / 128, 128]
        return (Param("k_pages", "tensor_map"), Param("v_pages", "tensor_map"))

    @property
    def instructions(self) -> tuple[str, ...]:
        """See KernelSpec.instructions."""
        return ("HMMA.16816.F32.BF16", "UBLKCP" if self.copy else "UTMALDG.2D", "MOVM.16.MT88", "ACQBULK")

    @property
    def threads(self) -> int:
        """The consumer warps and a producer."""
        return 32 * (self.warps + 1)

    @property
    def blocks_per_sm(self) -> int:
        """What shared memory allows, up to three: four would leave 96 registers, and groups above eight spill.

        Of INT4 these have two, where a minimum of each of four groups does not leave them one.
        """
        most = 3 if self.copy is None else copy_blocks(self.heads, self.copy)
        return min(SM_SHARED_BYTES // (self.shared_bytes + BLOCK_RESERVED_BYTES), most)

    @property
    def shared_bytes(self) -> int:
        """The ring of K and V pages, two barriers a stage, and the flag of the block that combines the splits."""
        return self.stages * (self._page_bytes + 16) + 16

    @property
    def _page_bytes(self) -> int:
        """K and V of one page and key/value head."""
        if self.copy is not None:
            return self.copy.page_bytes(self.heads.head_dim)
        return 2 * PAGE_SIZE * self.heads.head_dim * self.element.bits // 8

    @property
    def _result_bytes(self) -> int:
        """What the warps leave for each other where the ring was: output, maximum and sum of each query head."""
        return self.warps * self.heads.group * 4 * (self.heads.head_dim + 4 + 2)

    @property
    def _form(self) -> str:
        """Of INT4, what the kernel sees of it."""
        if self.copy is None:
            return ""
        group = "head" if self.copy.group == HEAD else f"g{self.copy.group}"
        return f"_{group}{'_min' if self.copy.minimum else ''}"
