"""Sampling: next tokens of logits, by penalty, temperature, top-k, top-p, min-p and a seeded draw."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .base import BLOCK_RESERVED_BYTES, MAX_SHARED_BYTES, SM_SHARED_BYTES, KernelSpec, Param, pointer

BINS = 256  # of a histogram
HISTOGRAMS = 5  # of all tokens by the first digit of their steps; two more digits for top-k, and for top-p


@dataclass(frozen=True)
class SampleSpec(KernelSpec):
    """out[i] = a token of logits[i, :vocab_size], drawn by what row i asks for (futransformer/sampling.py).

    A cluster of ``blocks`` has a row, a block a slice of it in shared memory.
    """

    template: ClassVar[str] = "sample_sm90.cu.jinja"
    instructions: ClassVar[tuple[str, ...]] = ("LDG.E.128", "ATOMS")
    dependent_launch: ClassVar[bool] = True

    vocab_size: int
    blocks: int = 8
    block_threads: int = 512

    def __post_init__(self) -> None:
        self.require(self.vocab_size > 0, "vocab_size must be positive")
        self.require(self.blocks in (1, 2, 4, 8), "a cluster has 1, 2, 4 or 8 blocks")
        self.require(
            BINS <= self.block_threads <= 1024 and self.block_threads % 32 == 0,
            "block_threads must be a multiple of 32, from 256 (a thread a bin) to 1024",
        )
        self.require(
            self.slice_tokens <= 1 << 16 and self.shared_bytes <= MAX_SHARED_BYTES,
            "a block's slice of the vocabulary must fit shared memory",
        )

    @property
    def slice_tokens(self) -> int:
        """Tokens that a block keeps: whole fours, as random bits come."""
        quads = -(-self.vocab_size // 4)
        return 4 * -(-quads // self.blocks)

    @property
    def name(self) -> str:
        """See KernelSpec.name."""
        return f"sample_sm90_f32_v{self.vocab_size}_c{self.blocks}_t{self.block_threads}"

    @property
    def params(self) -> tuple[Param, ...]:
        """See KernelSpec.params."""
        return (
            pointer("logits", "const float"),
            Param("logits_stride", "int32"),
            pointer("temperature", "const float"),
            pointer("top_k", "const int"),
            pointer("top_p", "const float"),
            pointer("min_p", "const float"),
            pointer("repetition_penalty", "const float"),
            pointer("seed", "const long long"),
            pointer("position", "const int"),
            pointer("seen", "unsigned"),
            pointer("out", "int"),
        )

    @property
    def threads(self) -> int:
        """See KernelSpec.threads."""
        return self.block_threads

    @property
    def blocks_per_sm(self) -> int:
        """Two, if shared memory allows: 32 clusters of eight then find room at once."""
        return min(2, SM_SHARED_BYTES // (self.shared_bytes + BLOCK_RESERVED_BYTES), 2048 // self.threads)

    @property
    def cluster(self) -> tuple[int, int, int]:
        """See KernelSpec.cluster."""
        return (self.blocks, 1, 1)

    @property
    def shared_bytes(self) -> int:
        """The slice, the histograms, each warp's candidate and sums, and what they find."""
        warps = self.block_threads // 32
        of_warps = warps * 8 + 2 * 8 + warps * 16 + 40
        total = 4 * self.slice_tokens + HISTOGRAMS * 3 * BINS * 4 + of_warps
        return -(-total // 16) * 16
