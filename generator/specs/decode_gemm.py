"""The decode GEMMs: out = epilogue(x W^T) for a few sequences, weights in Tensor Core fragment order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..precision import Element
from .base import EPILOGUES, Heads, KernelSpec, Param, epilogue_params, pointer


@dataclass(frozen=True)
class DecodeGemmSpec(KernelSpec):
    """One decode GEMM for up to ``batch_tile`` sequences; ``n`` and ``k`` as in GemmSpec.

    A block owns ``row_tiles`` tiles of 16 output columns; its warps split K and are summed in a fixed order.
    """

    template: ClassVar[str] = "decode_gemm_sm90.cu.jinja"
    instructions: ClassVar[tuple[str, ...]] = ("HMMA.16816.F32.BF16",)

    op: str
    element: Element
    n: int
    k: int
    batch_tile: int
    row_tiles: int
    warps: int
    heads: Heads | None = None

    def __post_init__(self) -> None:
        self.require(self.op in EPILOGUES, f"op must be one of {', '.join(EPILOGUES)}")
        self.require(self.n % (16 * self.row_tiles) == 0, f"out_features must be a multiple of {16 * self.row_tiles}")
        self.require(self.k % 16 == 0, "in_features must be a multiple of 16 (one MMA step)")
        self.require(self.batch_tile in (8, 16, 32, 64), "batch_tile must be 8, 16, 32 or 64")
        self.require((self.heads is not None) == (self.op == "qkv"), "heads belong to qkv, and only to it")

    @property
    def epilogue(self) -> tuple[str, ...]:
        """The operations applied to the complete sums, in order: the same chain as in prefill."""
        return EPILOGUES[self.op]

    @property
    def name(self) -> str:
        """See KernelSpec.name."""
        shape = f"n{self.n}_k{self.k}" + (f"_{self.heads}" if self.heads else "")
        chain = "_".join(self.epilogue)
        return (
            f"decode_gemm_{self.op}_sm90_{self.element.name}_{shape}_b{self.batch_tile}_r{self.row_tiles}"
            f"_w{self.warps}_{chain}"
        )

    @property
    def params(self) -> tuple[Param, ...]:
        """See KernelSpec.params."""
        return (
            pointer("x", "const cutlass::bfloat16_t"),
            pointer("weight", "const void"),
            Param("m", "int32"),
            *epilogue_params(self.epilogue),
        )

    @property
    def threads(self) -> int:
        """See KernelSpec.threads."""
        return 32 * self.warps

    @property
    def sumsq_parts(self) -> int:
        """Columns of sumsq_out: one partial sum a sequence and tile of 16 output columns."""
        return self.n // 16
