"""The row kernels at the ends of the model: gather rows of a table, and argmax over logits, or over their parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..precision import Element
from .base import EPILOGUE_PARAMS, KernelSpec, Param, pointer


def legal_threads(threads: int) -> bool:
    """Whole warps, as the block reductions need."""
    return 0 < threads <= 1024 and threads % 32 == 0


@dataclass(frozen=True)
class GatherRowsSpec(KernelSpec):
    """out[i] = table[indices[i]] and its sum of squares: token embedding, and the last rows of a prefill.

    With ``residual`` the row is written in float32 as well: decode's residual stream begins with it. With ``gain`` out,
    and out alone, is the row times the gain of the first norm. With ``fp8`` the row is written in FP8 as well, at a
    delayed scale: what the first layer of an FP8 prefill reads.
    """

    template: ClassVar[str] = "gather_rows_sm90.cu.jinja"
    instructions: ClassVar[tuple[str, ...]] = ("LDG.E.128", "STG.E.128")
    dependent_launch: ClassVar[bool] = True

    element: Element
    k: int
    residual: bool = False
    fp8: bool = False
    threads_per_row: int = 128
    gain: bool = False

    def __post_init__(self) -> None:
        self.require(not (self.gain and self.fp8), "gain is of decode, whose GEMMs read BF16")
        self.require(self.k > 0 and self.k % 8 == 0, "hidden_size must be a multiple of 8")
        self.require(legal_threads(self.threads_per_row), "threads_per_row must be a multiple of 32, at most 1024")

    @property
    def name(self) -> str:
        """See KernelSpec.name."""
        written = "_residual_f32" * self.residual + "_gain" * self.gain + "_fp8" * self.fp8
        return f"gather_rows_sm90_{self.element.name}_k{self.k}_t{self.threads_per_row}{written}"

    @property
    def params(self) -> tuple[Param, ...]:
        """See KernelSpec.params."""
        return (
            pointer("table", "const cutlass::bfloat16_t"),
            Param("table_rows", "int32"),
            pointer("indices", "const int"),
            pointer("out", "cutlass::bfloat16_t"),
            pointer("sumsq_out", "float"),
            *((pointer("residual", "float"),) if self.residual else ()),
            *((pointer("gain", "const float"),) if self.gain else ()),
            *(EPILOGUE_PARAMS["store_fp8"] if self.fp8 else ()),
        )

    @property
    def threads(self) -> int:
        """See KernelSpec.threads."""
        return self.threads_per_row


@dataclass(frozen=True)
class ArgmaxSpec(KernelSpec):
    """out[i] = the lowest index of the largest of logits[i, :vocab_size]; NaN never wins over a number."""

    template: ClassVar[str] = "argmax_sm90.cu.jinja"
    instructions: ClassVar[tuple[str, ...]] = ("LDG.E.128",)
    dependent_launch: ClassVar[bool] = True

    vocab_size: int
    threads_per_row: int = 1024

    def __post_init__(self) -> None:
        self.require(self.vocab_size > 0, "vocab_size must be positive")
        self.require(legal_threads(self.threads_per_row), "threads_per_row must be a multiple of 32, at most 1024")

    @property
    def name(self) -> str:
        """See KernelSpec.name."""
        return f"argmax_sm90_f32_v{self.vocab_size}_t{self.threads_per_row}"

    @property
    def params(self) -> tuple[Param, ...]:
        """See KernelSpec.params."""
        return (
            pointer("logits", "const float"),
            Param("logits_stride", "int32"),
            pointer("out", "int"),
        )

    @property
    def threads(self) -> int:
        """See KernelSpec.threads."""
        return self.threads_per_row


@dataclass(frozen=True)
class ArgmaxPartsSpec(KernelSpec):
    """out[i] = the index of the best of best[i, :parts], which the blocks of decode's head have found."""

    template: ClassVar[str] = "argmax_parts_sm90.cu.jinja"
    instructions: ClassVar[tuple[str, ...]] = ("LDG.E.64",)
    dependent_launch: ClassVar[bool] = True

    threads_per_row: int = 512  # of 8B a row has 1002 or 2004 parts

    def __post_init__(self) -> None:
        self.require(legal_threads(self.threads_per_row), "threads_per_row must be a multiple of 32, at most 1024")

    @property
    def name(self) -> str:
        """See KernelSpec.name."""
        return f"argmax_parts_sm90_t{self.threads_per_row}"

    @property
    def params(self) -> tuple[Param, ...]:
        """See KernelSpec.params."""
        return (pointer("best", "const futransformer::Candidate"), Param("parts", "int32"), pointer("out", "int"))

    @property
    def threads(self) -> int:
        """See KernelSpec.threads."""
        return self.threads_per_row
