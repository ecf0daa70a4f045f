"""The decode GEMMs: out = epilogue(x W^T) for a few sequences, weights in Tensor Core fragment order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..precision import Element
from .base import EPILOGUES, MAX_SHARED_BYTES, Heads, KernelSpec, Param, epilogue_params, pointer

ROW_TILE = 16  # output columns that one MMA computes
LANE_BYTES = 16  # of packed weights that a lane loads at once
_LANES = 32
_GROUP_K = 32  # k that 16 bytes of activations a lane cover: the least a warp advances by
_SHARED_PER_SM = 228 * 1024  # of which each resident block costs a further KiB


@dataclass(frozen=True)
class DecodeGemmSpec(KernelSpec):
    """One decode GEMM for up to ``batch_tile`` sequences; ``n`` and ``k`` as in GemmSpec.

    A block owns ``row_tiles`` tiles of 16 output columns. One warp streams their weights through a ring of ``stages``
    stages of ``stage_k`` k; ``warps`` more warps split every stage's k and are summed in a fixed order.
    """

    template: ClassVar[str] = "decode_gemm_sm90.cu.jinja"
    instructions: ClassVar[tuple[str, ...]] = ("HMMA.16816.F32.BF16", "UBLKCP", "LDS.128")

    op: str
    element: Element
    n: int
    k: int
    batch_tile: int
    row_tiles: int
    warps: int
    stages: int
    stage_k: int
    heads: Heads | None = None

    def __post_init__(self) -> None:
        step = self.warps * self.step_k
        self.require(self.op in EPILOGUES, f"op must be one of {', '.join(EPILOGUES)}")
        self.require((self.heads is not None) == (self.op == "qkv"), "heads belong to qkv, and only to it")
        self.require(self.batch_tile in (8, 16, 32, 64), "batch_tile must be 8, 16, 32 or 64")
        self.require(self.warps in (4, 8, 16), "warps must be 4, 8 or 16")
        self.require(self.n % self.block_rows == 0, f"out_features must be a multiple of {self.block_rows}")
        self.require(self.k % self.step_k == 0, f"in_features must be a multiple of {self.step_k}")
        self.require(self.stage_k % step == 0, f"stage_k must be a multiple of {step}, one step of every warp")
        self.require(self.stages >= 2, "a ring needs two stages")
        self.require(self.shared_bytes <= MAX_SHARED_BYTES, f"shared memory must not exceed {MAX_SHARED_BYTES} bytes")

    @property
    def step_k(self) -> int:
        """K that a warp advances by: whole loads of weights and of activations."""
        return max(_GROUP_K, _LANES * LANE_BYTES * 8 // (ROW_TILE * self.element.bits))

    @property
    def block_rows(self) -> int:
        """Rows of the weight that a block multiplies."""
        return ROW_TILE * self.row_tiles

    @property
    def blocks(self) -> int:
        """Blocks of the launch."""
        return self.n // self.block_rows

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """Shape of the packed weight: row tiles, warp loads along K, lanes, elements a lane."""
        elements = LANE_BYTES * 8 // self.element.bits
        return (self.n // ROW_TILE, self.k * ROW_TILE // (_LANES * elements), _LANES, elements)

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
            f"x{self.stage_k}_w{self.warps}_s{self.stages}_{chain}"
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
        """The warps that multiply, and one that streams."""
        return _LANES * (self.warps + 1)

    @property
    def shared_bytes(self) -> int:
        """The ring, later the warps' partial sums (four floats of padding a row), and two barriers a stage."""
        ring = self.stages * self.stage_k * self.block_rows * self.element.bits // 8
        partial = self.warps * self.batch_tile * (self.block_rows + 4) * 4
        return max(ring, partial) + self.stages * 16

    @property
    def blocks_per_sm(self) -> int:
        """Two where they fit: one block's epilogue then hides behind the other's stream."""
        steps = self.stage_k // (self.warps * self.step_k)
        activations = self.batch_tile // 8 * steps * self.step_k // 8  # a stage's, held while its weights arrive
        sums = self.row_tiles * self.batch_tile // 2
        weights = self.row_tiles * 8
        registers = activations + sums + weights + 32  # a thread, somewhat more than ptxas needs
        fits = self.warps <= 8 and registers <= 104 and 2 * (self.shared_bytes + 1024) <= _SHARED_PER_SM
        return 2 if fits else 1

    @property
    def sumsq_parts(self) -> int:
        """Columns of sumsq_out: one partial sum a sequence and block."""
        return self.blocks
