"""The two ends of a decode step: where its tokens stand, before the first layer; whether they end, behind the head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .base import KernelSpec, Param, pointer

THREADS = 256  # of the one block, which takes rows by turns: a batch is hundreds at most


@dataclass(frozen=True)
class StepBeginSpec(KernelSpec):
    """Each row's new length, its token's position and slot; nothing moves where there is no sequence (length -1)."""

    template: ClassVar[str] = "step_begin_sm90.cu.jinja"
    instructions: ClassVar[tuple[str, ...]] = ("ACQBULK",)  # the wait for what earlier kernels have written
    dependent_launch: ClassVar[bool] = True

    @property
    def name(self) -> str:
        """See KernelSpec.name."""
        return f"step_begin_sm90_p{self.page_size}_t{THREADS}"

    @property
    def params(self) -> tuple[Param, ...]:
        """See KernelSpec.params."""
        return (
            pointer("lengths", "int"),
            pointer("block_table", "const int"),
            Param("block_table_stride", "int32"),
            pointer("positions", "int"),
            pointer("slots", "long long"),
            pointer("seqlens_k", "int"),
            Param("rows", "int32"),
        )

    @property
    def threads(self) -> int:
        """See KernelSpec.threads."""
        return THREADS


@dataclass(frozen=True)
class StepEndSpec(KernelSpec):
    """Note each row's token, and leave rows without a sequence whose token ends the text or is the last asked for."""

    template: ClassVar[str] = "step_end_sm90.cu.jinja"
    instructions: ClassVar[tuple[str, ...]] = ("ACQBULK",)  # the wait for what earlier kernels have written
    dependent_launch: ClassVar[bool] = True

    vocab_size: int

    def __post_init__(self) -> None:
        self.require(self.vocab_size > 0, "vocab_size must be positive")

    @property
    def name(self) -> str:
        """See KernelSpec.name."""
        return f"step_end_sm90_v{self.vocab_size}_t{THREADS}"

    @property
    def params(self) -> tuple[Param, ...]:
        """See KernelSpec.params."""
        return (
            pointer("tokens", "const int"),
            pointer("lengths", "int"),
            pointer("left", "int"),
            pointer("ends", "const unsigned"),
            pointer("log", "int"),
            Param("log_steps", "int32"),
            pointer("steps", "int"),
            Param("rows", "int32"),
        )

    @property
    def threads(self) -> int:
        """See KernelSpec.threads."""
        return THREADS
