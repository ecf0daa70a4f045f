"""The prefill GEMMs: out = epilogue(x W^T) over all prompt tokens, wgmma and TMA, persistent and warp-specialised."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..precision import Element
from .base import EPILOGUES, MAX_SHARED_BYTES, Heads, KernelSpec, Param, Tile, epilogue_params


@dataclass(frozen=True)
class GemmSpec(KernelSpec):
    """One prefill GEMM. ``n`` counts the weight's rows (for gate_up both halves), ``k`` its columns.

    x [T, k] and the packed weight [n, k] arrive as tensor maps with boxes of tile.m (tile.n) rows by tile.k columns,
    divided along the rows by the cluster size of the other dimension (multicast), 128-byte swizzle.
    """

    template: ClassVar[str] = "gemm_sm90.cu.jinja"
    instructions: ClassVar[tuple[str, ...]] = ("HGMMA", "UTMALDG")

    op: str
    element: Element
    n: int
    k: int
    tile: Tile
    cluster_m: int
    stages: int
    heads: Heads | None = None

    def __post_init__(self) -> None:
        group = 64 if self.op == "gate_up" else 32
        self.require(self.op in EPILOGUES, f"op must be one of {', '.join(EPILOGUES)}")
        self.require(self.n % group == 0, f"out_features must be a multiple of {group}")
        self.require(self.k % 8 == 0, "in_features must be a multiple of 8 (16-byte rows for TMA)")
        self.require(self.tile.m == 128, "tile.m must be 128: two consumer warpgroups of 64 rows")
        self.require(self.tile.n in (64, 96, 128, 192, 256), "tile.n must be 64, 96, 128, 192 or 256")
        self.require(self.tile.n % group == 0, f"tile.n must be a multiple of {group}")
        self.require(self.tile.k == 64, "tile.k must be 64 (one 128-byte swizzle atom of BF16)")
        self.require(self.cluster_m in (1, 2), "cluster_m must be 1 or 2")
        self.require((self.heads is not None) == (self.op == "qkv"), "heads belong to qkv, and only to it")
        self.require(self.stages >= 2, "a pipeline needs two stages")
        self.require(self.shared_bytes <= MAX_SHARED_BYTES, f"shared memory must not exceed {MAX_SHARED_BYTES} bytes")

    @property
    def epilogue(self) -> tuple[str, ...]:
        """The operations applied to the accumulators, in order."""
        return EPILOGUES[self.op]

    @property
    def name(self) -> str:
        """See KernelSpec.name."""
        shape = f"n{self.n}_k{self.k}" + (f"_{self.heads}" if self.heads else "")
        schedule = f"c{self.cluster_m}x1_s{self.stages}_coop"
        return f"gemm_{self.op}_sm90_{self.element.name}_{shape}_{self.tile}_{schedule}_{'_'.join(self.epilogue)}"

    @property
    def params(self) -> tuple[Param, ...]:
        """See KernelSpec.params."""
        return (
            Param("x", "tensor_map"),
            Param("weight", "tensor_map"),
            Param("m", "int32"),
            *epilogue_params(self.epilogue),
        )

    @property
    def threads(self) -> int:
        """A producer warpgroup and two consumer warpgroups."""
        return 384

    @property
    def cluster(self) -> tuple[int, int, int]:
        """Blocks stacked along M share the weight tile by multicast."""
        return (self.cluster_m, 1, 1)

    @property
    def shared_bytes(self) -> int:
        """The ring of x and weight tiles, and a full and an empty barrier a stage."""
        stage = (self.tile.m + self.tile.n) * self.tile.k * self.element.bits // 8
        return self.stages * (stage + 16)

    @property
    def sumsq_parts(self) -> int:
        """Columns of sumsq_out: one partial sum a row and tile."""
        return -(-self.n // self.tile.n)
