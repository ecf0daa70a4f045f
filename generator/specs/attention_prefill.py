"""Prefill attention: varlen, causal, grouped-query, over paged K and V; wgmma and TMA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..kv_format import PAGE_SIZE
from ..precision import BF16, E4M3, Element
from .base import EPILOGUE_PARAMS, KV_SCALE, MAX_SHARED_BYTES, Heads, KernelSpec, Param, pointer

Q_STAGES = 2  # the next item's Q arrives while this one's is read
WORK_SLOTS, WORK_BYTES = 4, 32  # descriptions of items, in shared memory
CODE_STAGES = 2  # tiles of E4M3 that arrive while others are converted


@dataclass(frozen=True)
class AttentionPrefillSpec(KernelSpec):
    """An item is tile_m queries of one head; its keys arrive tile_n (one or two pages) at a time.

    The grid is one-dimensional and persistent: at most one block a multiprocessor, each with its share of the items.
    Boxes of the tensor maps are 64 columns (128 bytes, swizzled) by tile_m rows of Q, by one page of K and V. Pages of
    E4M3 arrive whole, in rows of 128 bytes, and become BF16 in shared memory.
    """

    template: ClassVar[str] = "attention_prefill_sm90.cu.jinja"
    instructions: ClassVar[tuple[str, ...]] = ("HGMMA", "UTMALDG")
    dependent_launch: ClassVar[bool] = True

    element: Element  # of the pages
    heads: Heads
    tile_m: int
    tile_n: int
    stages: int  # of K, and of V
    fp8_out: bool = False  # at a delayed scale, for an FP8 projection

    def __post_init__(self) -> None:
        self.require(self.element in (BF16, E4M3), "pages hold BF16 or E4M3")
        self.require(self.heads.head_dim in (64, 128), "head_dim must be 64 or 128")
        self.require(self.heads.num_attention_heads % self.heads.num_key_value_heads == 0, "heads must divide evenly")
        self.require(self.tile_m == 128, "tile_m must be 128: two consumer warpgroups of 64 queries")
        self.require(
            self.tile_n in (PAGE_SIZE, 2 * PAGE_SIZE),
            f"tile_n must be {PAGE_SIZE} or {2 * PAGE_SIZE}: whole pages whose scores fit in registers",
        )
        self.require(
            self.stages >= 2, "stages must be at least 2: the next tile's K arrives while this one's V is read"
        )
        self.require(self.shared_bytes <= MAX_SHARED_BYTES, f"shared memory must not exceed {MAX_SHARED_BYTES} bytes")

    @property
    def name(self) -> str:
        """See KernelSpec.name."""
        return (
            f"attention_prefill_sm90_{self.element.name}_{self.heads}_p{PAGE_SIZE}"
            f"_{self.tile_m}x{self.tile_n}_s{self.stages}_causal{'_store_fp8' if self.fp8_out else ''}"
        )

    @property
    def params(self) -> tuple[Param, ...]:
        """See KernelSpec.params."""
        return (
            Param("q", "tensor_map"),  # [T, num_attention_heads * head_dim]
            # [num_pages * num_key_value_heads * 64, head_dim], E4M3: [the same * head_dim / 128, 128]
            Param("k_pages", "tensor_map"),
            Param("v_pages", "tensor_map"),
            *(EPILOGUE_PARAMS["store_fp8"] if self.fp8_out else (pointer("out", "cutlass::bfloat16_t"),)),
            pointer("block_table", "const int"),
            Param("block_table_stride", "int32"),
            pointer("cu_seqlens_q", "const int"),
            pointer("seqlens_k", "const int"),
            Param("sequences", "int32"),
            pointer("tickets", "int"),  # [1]: zero before and after
            Param("softmax_scale", "float32"),
            *((KV_SCALE,) if self.element == E4M3 else ()),  # [2]: what a code of K and of V is worth
        )

    @property
    def threads(self) -> int:
        """A producer warpgroup and two consumer warpgroups of 64 queries."""
        return 384

    @property
    def shared_bytes(self) -> int:
        """The rings of Q, K and V tiles, descriptions of items, a full and an empty barrier a stage of each ring.

        Of E4M3 pages a ring of codes behind that, which begins at a multiple of 1 KiB, with what its tiles are.
        """
        tiles = Q_STAGES * self.tile_m + 2 * self.stages * self.tile_n
        plain = 2 * tiles * self.heads.head_dim + WORK_SLOTS * WORK_BYTES + 16 * (Q_STAGES + 2 * self.stages)
        if self.element == BF16:
            return plain
        return -(-plain // 1024) * 1024 + CODE_STAGES * (self.tile_n * self.heads.head_dim + 16 + 4)
