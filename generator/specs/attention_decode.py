"""Decode attention: one query token a sequence over paged K and V, split over the sequence, combined in the kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..precision import Element
from .base import MAX_SHARED_BYTES, PAGE_SIZE, Heads, KernelSpec, Param, pointer


@dataclass(frozen=True)
class AttentionDecodeSpec(KernelSpec):
    """Blocks are (split, key/value head, sequence); the last split to finish combines all in split order."""

    template: ClassVar[str] = "attention_decode_sm90.cu.jinja"
    instructions: ClassVar[tuple[str, ...]] = ("HMMA.16816.F32.BF16",)

    element: Element
    heads: Heads
    warps: int
    stages: int

    def __post_init__(self) -> None:
        self.require(self.heads.head_dim in (64, 128), "head_dim must be 64 or 128")
        self.require(self.heads.num_attention_heads % self.heads.num_key_value_heads == 0, "heads must divide evenly")
        self.require(self.heads.group <= 16, "at most 16 query heads a key/value head")
        self.require(self.shared_bytes <= MAX_SHARED_BYTES, f"shared memory must not exceed {MAX_SHARED_BYTES} bytes")

    @property
    def name(self) -> str:
        """See KernelSpec.name."""
        return (
            f"attention_decode_sm90_{self.element.name}_{self.heads}_p{PAGE_SIZE}_w{self.warps}_s{self.stages}_splitkv"
        )

    @property
    def params(self) -> tuple[Param, ...]:
        """See KernelSpec.params."""
        return (
            pointer("q", "const cutlass::bfloat16_t"),
            pointer("k_pages", "const cutlass::bfloat16_t"),
            pointer("v_pages", "const cutlass::bfloat16_t"),
            pointer("out", "cutlass::bfloat16_t"),
            pointer("block_table", "const int"),
            Param("block_table_stride", "int32"),
            pointer("seqlens_k", "const int"),
            Param("softmax_scale", "float32"),
            Param("pages_per_split", "int32"),
            pointer("partial_out", "float"),  # [B, num_key_value_heads, splits, group, head_dim]
            pointer("partial_max_sum", "float"),  # [B, num_key_value_heads, splits, group, 2]
            pointer("arrivals", "int"),  # [B, num_key_value_heads], zero before and after every launch
        )

    @property
    def threads(self) -> int:
        """See KernelSpec.threads."""
        return 32 * self.warps

    @property
    def shared_bytes(self) -> int:
        """A ring of K and V pages."""
        return self.stages * 2 * PAGE_SIZE * self.heads.head_dim * self.element.bits // 8
