"""The prefill GEMMs: out = epilogue(x W^T) over all prompt tokens, wgmma and TMA, persistent and warp-specialised."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..kv_format import KvFormat
from ..precision import BF16, E4M3, Accumulation, Element, Granularity
from .base import (
    EPILOGUES,
    FP8_EPILOGUES,
    MAX_SHARED_BYTES,
    Heads,
    KernelSpec,
    Param,
    Tile,
    copy_name,
    epilogue_params,
    with_kv,
)

SCHEDULES = ("cooperative", "pingpong")
_MAX_ACCUMULATORS = 208  # float32 a consumer thread, of its 232 or 240 registers


def tile_k(element: Element) -> int:
    """Columns of K of a stage: one 128-byte swizzle atom."""
    return 1024 // element.bits


@dataclass(frozen=True)
class GemmSpec(KernelSpec):
    """One prefill GEMM. ``n`` counts the weight's rows (for gate_up both halves), ``k`` its columns.

    x [T, k] and the packed weight [n, k] arrive as tensor maps with boxes of tile.m (tile.n) rows by tile.k columns,
    divided along the rows by the cluster's blocks in the other dimension (multicast), 128-byte swizzle; that of x has
    no more rows than x, rounded up to eight (``box_rows``).

    A cluster is one block or a pair: two along M share a weight tile, two along N a tile of x, and ``splits`` of 2
    halves K. ``schedule``: the consumer warpgroups share a tile (cooperative), or each has its own (pingpong).
    ``raster``: rows of (cluster) tiles that are walked together, so that the tiles in flight share x and weights in L2.

    Of FP8 GEMMs, ``weight_scales``: one scale a tensor, or one a row of the weight; ``accumulation``: over the whole of
    K in the tensor cores, or "promoted" to float32 registers every stage of K.
    """

    template: ClassVar[str] = "gemm_sm90.cu.jinja"
    instructions: ClassVar[tuple[str, ...]] = ("UTMALDG",)  # and ``wgmma``
    dependent_launch: ClassVar[bool] = True
    copies_q: ClassVar[bool] = False

    op: str
    element: Element
    n: int
    k: int
    tile: Tile
    cluster_m: int
    cluster_n: int
    splits: int
    stages: int
    schedule: str = "cooperative"
    raster: int = 8
    heads: Heads | None = None
    weight_scales: Granularity = "tensor"
    accumulation: Accumulation = "fast"
    kv: Element = BF16  # what qkv writes to the pages
    copy: KvFormat | None = None  # the form of the INT4 copy that qkv writes beside them

    def __post_init__(self) -> None:
        group = 64 if self.op == "gate_up" else 32
        ops = FP8_EPILOGUES["tensor"] if self.element == E4M3 else EPILOGUES
        self.require(self.op in ops, f"op must be one of {', '.join(ops)}")
        self.require(self.n > 0 and self.n % group == 0, f"out_features must be a positive multiple of {group}")
        vector = 128 // self.element.bits
        self.require(
            self.k > 0 and self.k % vector == 0,
            f"in_features must be a positive multiple of {vector} (16-byte rows for TMA)",
        )
        self.require(self.schedule in SCHEDULES, f"schedule must be one of {', '.join(SCHEDULES)}")
        rows = (128, 192) if self.schedule == "pingpong" else (64, 128, 256)
        self.require(self.tile.m in rows, f"tile.m must be one of {rows} where the schedule is {self.schedule}")
        self.require(self.tile.n in range(32, 257, 32), "tile.n must be a multiple of 32 up to 256")
        self.require(self.tile.n % group == 0, f"tile.n must be a multiple of {group}")
        self.require(
            self.tile.k == tile_k(self.element), f"tile.k must be {tile_k(self.element)} (a 128-byte swizzle atom)"
        )
        fast = self.accumulation == "fast"
        sums = self.accumulators * (1 if fast else 2)
        self.require(
            sums <= _MAX_ACCUMULATORS,
            f"a consumer thread must not hold more than {_MAX_ACCUMULATORS} sums, and tile {self.tile} makes it {sums}",
        )
        bf16 = self.element == BF16
        self.require(fast or not bf16, "BF16 products are summed in float32: there is nothing to promote")
        self.require(self.weight_scales == "tensor" or not bf16, "BF16 weights have no scales")
        self.require(
            sorted(self.cluster) in ([1, 1, 1], [1, 1, 2]), "a cluster is one block, or two along M, along N or over K"
        )
        self.require(self.splits == 1 or self.schedule == "cooperative", "only the cooperative schedule can split K")
        self.require((self.heads is not None) == (self.op == "qkv"), "heads belong to qkv, and only to it")
        self.require((self.kv == BF16 and self.copy is None) or self.op == "qkv", "pages are written by qkv alone")
        if self.copy is not None and self.heads is not None:
            unit = self.copy.unit(self.heads.head_dim)
            self.require(self.tile.n % unit == 0, f"tile.n must be a multiple of {unit} to write a copy of {self.copy}")
        self.require(self.stages >= 2, "a pipeline needs two stages")
        self.require(self.raster >= 1, "raster must be positive")
        self.require(self.shared_bytes <= MAX_SHARED_BYTES, f"shared memory must not exceed {MAX_SHARED_BYTES} bytes")

    @property
    def epilogue(self) -> tuple[str, ...]:
        """The operations applied to the accumulators, in order."""
        ops = FP8_EPILOGUES[self.weight_scales] if self.element == E4M3 else EPILOGUES
        return with_kv(ops[self.op], self.kv, self.copy)

    @property
    def name(self) -> str:
        """See KernelSpec.name."""
        shape = f"n{self.n}_k{self.k}" + (f"_{self.heads}" if self.heads else "")
        cluster = f"c{self.cluster_m}x{self.cluster_n}" + (f"k{self.splits}" if self.splits > 1 else "")
        schedule = f"{cluster}_s{self.stages}_r{self.raster}_{self.schedule}"
        if self.accumulation == "promoted":
            schedule += "_promoted"
        chain = "_".join(self.epilogue) + copy_name(self.copy)
        return f"gemm_{self.op}_sm90_{self.element.name}_{shape}_{self.tile}_{schedule}_{chain}"

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
    def wgmma(self) -> str:
        """The mnemonic that multiplies: 64 rows by a tile's width by 32 bytes of K."""
        of_type = {BF16: "HGMMA.64x{}x16.F32.BF16", E4M3: "QGMMA.64x{}x32.F32.E4M3.E4M3"}
        return of_type[self.element].format(self.tile.n)

    @property
    def consumers(self) -> int:
        """Warpgroups that multiply: one for 64 rows, else two."""
        return 1 if self.tile.m == 64 else 2

    @property
    def accumulators(self) -> int:
        """Float32 sums that a consumer thread holds."""
        sharing = 1 if self.schedule == "pingpong" else self.consumers
        return self.tile.m * self.tile.n // (128 * sharing)

    @property
    def threads(self) -> int:
        """A producer warpgroup and the consumers."""
        return 128 * (1 + self.consumers)

    @property
    def blocks_per_sm(self) -> int:
        """Two blocks of 64-row tiles where their shared memory fits: one starts or ends while the other streams."""
        fits_twice = 2 * (self.shared_bytes + 1024) <= MAX_SHARED_BYTES + 1024  # the driver takes 1 KiB a block
        return 2 if self.consumers == 1 and fits_twice and self.accumulators <= 64 else 1

    @property
    def cluster(self) -> tuple[int, int, int]:
        """Blocks that share weight tiles, blocks that share tiles of x, or blocks that split K."""
        return (self.cluster_m, self.cluster_n, self.splits)

    def box_rows(self, rows: int) -> int:
        """Rows of the boxes that x comes in, where it has ``rows``: the kernel counts on their bytes."""
        return min(self.tile.m // self.cluster_n, -(-rows // 8) * 8)

    @property
    def shared_bytes(self) -> int:
        """The ring of x and weight tiles; where K is split, what the peer sends; two barriers for each."""
        stage = (self.tile.m + self.tile.n) * self.tile.k * self.element.bits // 8 + 16
        exchange = 4 * self.tile.m * self.tile.n // 2 + 16 if self.splits == 2 else 0
        return self.stages * stage + exchange

    @property
    def sumsq_parts(self) -> int:
        """Columns of sumsq_out: one partial sum a row and tile."""
        return -(-self.n // self.tile.n)
