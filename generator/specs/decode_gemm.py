"""The decode GEMMs: out = epilogue(x W^T) for a few sequences, weights in Tensor Core fragment order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..int4 import ROW_TILE, unit_bytes
from ..kv_format import KvFormat
from ..packed import e4m3_bytes
from ..precision import BF16, E4M3, INT4, Element
from .base import (
    DECODE_EPILOGUES,
    MAX_SHARED_BYTES,
    Heads,
    KernelSpec,
    Param,
    copy_name,
    epilogue_params,
    pointer,
    shared_share,
    with_kv,
)

LANE_BYTES = 16  # of packed weights that a lane loads at once
_LANES = 32
_GROUP_K = 32  # k that 16 bytes of activations a lane cover: the least a warp advances by
_ACTIVATION_BYTES = 2
SCHEDULERS = 4  # of a multiprocessor, each with registers of its own
SCHEDULER_REGISTERS = 16_384 // _LANES  # of a scheduler, a lane
_BOX_ALIGNMENT = 128  # bytes, of where a box lands
_GROUP_WARPS = 4  # of a warpgroup
_MAX_BOX = 256  # elements of a tensor map's box along one dimension


def inbox_bytes(batch_tile: int, row_tiles: int, split_k: int) -> int:
    """Shared bytes of the sums that the other blocks of a cluster send, and of their barrier, in whole 16 bytes."""
    sums = (split_k - 1) * batch_tile * row_tiles * ROW_TILE // split_k * 4
    return sums + 16 * (split_k > 1)


@dataclass(frozen=True)
class DecodeGemmSpec(KernelSpec):
    """One decode GEMM for up to ``batch_tile`` sequences; ``n`` and ``k`` as in GemmSpec.

    A cluster of ``split_k`` blocks owns ``row_tiles`` tiles of 16 output columns, each block an equal slice of K. One
    warp streams weights through a ring of ``stages`` stages of ``stage_k`` k; ``warp_rows`` x ``warp_split`` more warps
    share a stage by row tiles and by k. Each lane loads its activations ``x_ahead`` stages ahead; if that is 0, they
    travel in the ring instead. The sums of all warps and blocks are added in a fixed order. ``next_at`` says when the
    next kernel may start: at this one's ``start``, at its ``end`` (with the last load), or with a ring of stages to go
    (``lead``). With ``rotate`` clusters begin at different stages of k and walk around. Where ``max_registers`` is not
    0, a thread takes no more, so that another kernel's blocks may start beside the one that a multiprocessor holds.
    With ``in_flight`` weights of at most so many stages are under way; 0 leaves it to the ring. So many stages as are
    ``fetched``, behind those that the ring takes first, are asked into L2 while the kernel before is not done.
    A block that is ``alone`` shares a multiprocessor with other kernels' blocks only: it is given shared memory that it
    does not use, and the code is the same.

    E4M3 weights have a scale a row, behind all codes, which the epilogue begins with.
    INT4 weights are units of ``group_k`` of K with scales of their own, and with ``zero_points``, if they have any
    (generator/int4.py); a warp advances by whole units. Of up to eight sequences they are multiplied as integers.
    With ``wgmma``, for INT4 weights and x in the ring, the warps that share a stage are warpgroups of four, among which
    row tiles need not divide evenly, and three more warps bring x into the order of wgmma's operands.
    With a ``copy`` a block finishes whole units of columns: all of its cluster's, of every split_k-th sequence.
    The head's columns from ``vocab_size`` on, if that is not 0, are padding, which is never the likeliest token.
    ``gain_in_x``: o and down write the next x times the gain of its norm, which the next weight's codes cannot hold.
    """

    template: ClassVar[str] = "decode_gemm_sm90.cu.jinja"
    dependent_launch: ClassVar[bool] = True
    copies_q: ClassVar[bool] = True  # where K and V are copied, q is stored with the copy, rotated as its K is

    op: str
    element: Element
    n: int
    k: int
    batch_tile: int
    row_tiles: int
    warp_rows: int
    warp_split: int
    split_k: int
    stages: int
    stage_k: int
    heads: Heads | None = None
    x_ahead: int = 0
    next_at: str = "end"
    rotate: bool = False
    max_registers: int = 0
    in_flight: int = 0
    fetched: int = 0
    alone: bool = False
    group_k: int = 0
    zero_points: bool = False
    gain_in_x: bool = False
    kv: Element = BF16  # what qkv writes to the pages
    copy: KvFormat | None = None  # the form of the INT4 copy that qkv writes beside them
    vocab_size: int = 0
    wgmma: bool = False

    def __post_init__(self) -> None:
        self.require(
            self.group_k in ((32, 64, 128) if self.element == INT4 else (0,)),
            "INT4 weights have a group_k of 32, 64 or 128, others of 0",
        )
        self.require(self.element == INT4 or not self.zero_points, "zero_points belong to INT4 weights")
        self.require(not self.gain_in_x or self.op in ("o", "down"), "gain_in_x belongs to o and down, which write x")
        step = self.warp_split * self.step_k
        self.require(self.op in DECODE_EPILOGUES, f"op must be one of {', '.join(DECODE_EPILOGUES)}")
        self.require((self.heads is not None) == (self.op == "qkv"), "heads belong to qkv, and only to it")
        self.require((self.kv == BF16 and self.copy is None) or self.op == "qkv", "pages are written by qkv alone")
        head_columns = self.n if self.op == "lm_head" else 1
        self.require(self.vocab_size in range(head_columns), "vocab_size belongs to lm_head, and is less than its n")
        integers = self.batch_tile == 4 and self.element == INT4
        self.require(
            self.batch_tile in (8, 16, 32, 64) or integers,
            "batch_tile must be 8, 16, 32 or 64, or 4 for INT4 weights",
        )
        self.require(self.split_k in (1, 2, 4, 8), "split_k must be 1, 2, 4 or 8: blocks of a portable cluster")
        self.require(
            (self.wgmma or self.row_tiles % self.warp_rows == 0) and self.row_tiles % self.split_k == 0,
            "row_tiles must divide among warp_rows warps and split_k blocks",
        )
        self.require(
            self.batch_tile <= _LANES * self.warps <= 512, "1 to 16 warps must multiply, with a lane for every sequence"
        )
        if self.copy is not None and self.heads is not None:
            unit = self.copy.unit(self.heads.head_dim)
            whole = self.block_rows % unit == 0
            self.require(whole, f"row_tiles must hold whole units of {unit} rows to write a copy of {self.copy}")
            self.require(
                4 * self.batch_tile <= _LANES * self.warps * self.split_k and self.batch_tile % self.split_k == 0,
                "split_k must divide batch_tile, and leave four lanes for each of a block's sequences, to write a copy",
            )
        self.require(self.n % self.block_rows == 0, f"out_features must be a multiple of {self.block_rows}")
        slices = self.split_k * self.step_k
        self.require(self.k % slices == 0, f"in_features must be a multiple of {slices}")
        self.require(self.stage_k % step == 0, f"stage_k must be a multiple of {step}, one step of every warp")
        self.require(self.stage_k <= _MAX_BOX * _GROUP_K, f"stage_k must not exceed {_MAX_BOX * _GROUP_K}")
        if self.wgmma:
            self._require_wgmma()
        self.require(self.stages >= 2, "a ring needs two stages")
        self.require(
            0 <= self.in_flight <= self.stages,
            "in_flight is a number of stages of the ring, or 0",
        )
        self.require(self.fetched >= 0, "fetched is a number of stages")
        self.require(self.x_ahead >= 0, "x_ahead is a number of stages, or 0 for x in the ring")
        self.require(self.next_at in ("start", "lead", "end"), "next_at must be start, lead or end")
        self.require(self.max_registers % 8 == 0, "max_registers must be a multiple of 8: so they are handed out")
        self.require(
            self.max_registers == 0 or self.blocks_per_sm == 1,
            "max_registers belong to a block that has no second of its kind on a multiprocessor",
        )
        self.require(self.shared_bytes <= MAX_SHARED_BYTES, f"shared memory must not exceed {MAX_SHARED_BYTES} bytes")

    def _require_wgmma(self) -> None:
        self.require(
            self.element == INT4 and self.batch_tile >= 8 and self.x_in_ring,
            "wgmma is for INT4 weights, at least 8 sequences and x in the ring",
        )
        self.require(self.k % (self.split_k * self.stage_k) == 0, "with wgmma a slice of K must be whole stages")
        units = self.stage_k // (self.warp_split * self.group_k) * self.warpgroup_tiles
        self.require(
            self.group_k == 128 or units % 2 == 0,
            "with wgmma a warpgroup must take an even number of short units",
        )

    @property
    def step_k(self) -> int:
        """K that a warp advances by: whole loads of weights and of activations, whole units of INT4."""
        return self.group_k or max(_GROUP_K, _LANES * LANE_BYTES * 8 // (ROW_TILE * self.element.bits))

    @property
    def weight_type(self) -> str:
        """The C++ type that says how weights are read."""
        if self.element != INT4:
            return self.element.cutlass
        return f"futransformer::Int4<{self.group_k}, {str(self.zero_points).lower()}>"

    def weight_bytes(self, k: int) -> int:
        """Bytes of one row tile's weights for this much of K."""
        if self.element == INT4:
            return k // self.group_k * unit_bytes(self.group_k, self.zero_points)
        return k * ROW_TILE * self.element.bits // 8

    @property
    def warps(self) -> int:
        """Warps that multiply."""
        return self.warp_rows * self.warp_split * (_GROUP_WARPS if self.wgmma else 1)

    @property
    def warpgroup_tiles(self) -> int:
        """With wgmma: tiles of 64 rows that a warpgroup multiplies, the last of which may repeat rows."""
        return -(-self.row_tiles // (_GROUP_WARPS * self.warp_rows))

    @property
    def block_rows(self) -> int:
        """Rows of the weight that a cluster multiplies."""
        return ROW_TILE * self.row_tiles

    @property
    def blocks(self) -> int:
        """Blocks of the launch."""
        return self.n // self.block_rows * self.split_k

    @property
    def cluster(self) -> tuple[int, int, int]:
        """The blocks that share row tiles."""
        return (self.split_k, 1, 1)

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """Shape of the packed weight: row tiles, warp loads along K, lanes, elements; INT4: tiles, units, bytes; E4M3:
        bytes.
        """
        if self.element == INT4:
            return (self.n // ROW_TILE, self.k // self.group_k, unit_bytes(self.group_k, self.zero_points))
        if self.element == E4M3:
            return (e4m3_bytes(self.n, self.k),)
        elements = LANE_BYTES * 8 // self.element.bits
        return (self.n // ROW_TILE, self.k * ROW_TILE // (_LANES * elements), _LANES, elements)

    @property
    def x_in_ring(self) -> bool:
        """Whether x comes through a tensor map and the ring, not straight from memory to each lane."""
        return self.x_ahead == 0

    @property
    def x_box(self) -> tuple[int, int, int]:
        """Box of the tensor map of x, seen as [K / 32, rows, 32]."""
        return (self.stage_k // _GROUP_K, self.batch_tile, _GROUP_K)

    @property
    def instructions(self) -> tuple[str, ...]:
        """See KernelSpec.instructions."""
        multiply = "IMMA.16832.U8.S8" if self.element == INT4 and self.batch_tile <= 8 else "HMMA.16816.F32.BF16"
        if self.wgmma:
            multiply = f"HGMMA.64x{self.batch_tile}x16.F32.BF16"
        return (multiply, "UBLKCP", *["UBLKPF"] * (self.fetched > 0), "LDS.128", "ACQBULK")

    @property
    def epilogue(self) -> tuple[str, ...]:
        """The operations applied to the complete sums, in order: prefill's, but for a residual stream in float32, and
        scales that lie behind the weight.
        """
        if self.gain_in_x:
            return ("residual_f32_gain",)
        scaled = ("weightscale",) if self.element == E4M3 else ()
        return (*scaled, *with_kv(DECODE_EPILOGUES[self.op], self.kv, self.copy))

    @property
    def name(self) -> str:
        """See KernelSpec.name."""
        shape = f"n{self.n}_k{self.k}" + (f"_{self.heads}" if self.heads else "")
        shape += f"_v{self.vocab_size}" if self.vocab_size else ""
        groups = f"g{self.group_k}" + "z" * self.zero_points if self.group_k else ""
        under_way = f"_f{self.in_flight}" if self.in_flight else ""
        under_way += f"_p{self.fetched}" if self.fetched else ""
        under_way += "_alone" * self.alone
        return (
            f"decode_gemm_{self.op}_sm90_{self.element.name}{groups}_{shape}_b{self.batch_tile}_r{self.row_tiles}"
            f"x{self.stage_k}_c{self.split_k}_w{self.warp_rows}x{self.warp_split}_s{self.stages}_x{self.x_ahead}"
            f"{under_way}_{self.next_at}{'_rotate' * self.rotate}{'_wgmma' * self.wgmma}"
            f"{f'_m{self.max_registers}' * (self.max_registers > 0)}_{'_'.join(self.epilogue)}{copy_name(self.copy)}"
        )

    @property
    def params(self) -> tuple[Param, ...]:
        """See KernelSpec.params."""
        return (
            Param("x", "tensor_map") if self.x_in_ring else pointer("x", "const cutlass::bfloat16_t"),
            pointer("weight", "const void"),
            Param("m", "int32"),
            *epilogue_params(self.epilogue),
        )

    @property
    def threads(self) -> int:
        """The warps that multiply, and one that streams; with wgmma three more, which bring x into order."""
        return _LANES * (self.warps + (_GROUP_WARPS if self.wgmma else 1))

    @property
    def stage_bytes(self) -> int:
        """Shared bytes of a stage: weights, and a box of x if it travels with them."""
        weights = self.row_tiles * self.weight_bytes(self.stage_k)
        if self.wgmma:
            return weights + self.stage_k * self.batch_tile * _ACTIVATION_BYTES
        if not self.x_in_ring:
            return weights
        return -(-weights // _BOX_ALIGNMENT) * _BOX_ALIGNMENT + self.stage_k * self.batch_tile * _ACTIVATION_BYTES

    @property
    def shared_bytes(self) -> int:
        """What is used; of a block that is alone more than half of a multiprocessor's."""
        return max(self.used_bytes, shared_share(2) + 16) if self.alone else self.used_bytes

    @property
    def used_bytes(self) -> int:
        """The ring, later the partial sums (four floats of padding a row); barriers; a cluster's sums."""
        ring = self.stages * self.stage_bytes
        partial = self.warp_split * self.batch_tile * (self.block_rows + 4) * 4
        inbox = inbox_bytes(self.batch_tile, self.row_tiles, self.split_k)
        apart = self.x_in_ring and 0 < self.in_flight < self.stages  # x has barriers of its own
        barriers = 32 if self.wgmma else 24 if apart else 16
        return max(ring, partial) + -(-self.stages * barriers // 16) * 16 + inbox

    @property
    def blocks_per_sm(self) -> int:
        """Two where they fit, up to eight sequences three: one fills its ring while another ends. With wgmma one."""
        # Lanes are done with x when a copy is made, which takes its registers (8B at 16 sequences: 147, without 141).
        return 1 if self.alone else self._fitting(copy_registers=16 * (self.x_in_ring or self.batch_tile <= 8))

    def _fitting(self, copy_registers: int = 16) -> int:
        """Blocks that fit if none is alone; registers of a thread are bounded by it, with what a copy may take."""
        if self.wgmma:
            return 1
        sums = self.row_tiles // self.warp_rows * self.batch_tile // 2
        held_k = max(min(self.step_k, 64), self.x_ahead * self.stage_k // self.warp_split)
        activations = max(self.batch_tile // 8, 1) * held_k // 8
        if self.element != INT4:
            weights = self.row_tiles // self.warp_rows * self.step_k // 8
        elif self.batch_tile <= 8:
            weights = 24 + self.batch_tile // 4 * self.group_k // 16  # codes and their products; x in bytes
            weights += 16 * (self.group_k == 64) + 8 * self.gain_in_x  # two units at a time; gains of x
        else:
            sums += min(self.row_tiles // self.warp_rows, 2) * self.batch_tile // 2  # of two units
            weights = (44 if self.x_ahead else 12) + 4 * self.zero_points + 8 * (self.group_k < 64)
        # what a copy takes, as far as sums that are done with do not cover it
        copied = self.copy is not None and (self.batch_tile <= 8 or self.element == INT4)
        rest = 32 + copied * copy_registers
        registers = -(-(sums + activations + weights + rest) // 8) * 8  # a thread, about what ptxas needs

        def fit(blocks: int) -> bool:
            warps = -(-blocks * (self.warps + 1) // SCHEDULERS)  # on the fullest scheduler
            return warps * registers <= SCHEDULER_REGISTERS and self.used_bytes <= shared_share(blocks)

        return next((blocks for blocks in ((3, 2) if self.batch_tile == 8 else (2,)) if fit(blocks)), 1)

    @property
    def bounds(self) -> str:
        """See KernelSpec.bounds; the compiler takes one of the two."""
        if self.max_registers:
            return f"__maxnreg__({self.max_registers})"
        return f"__launch_bounds__({self.threads}, {self._fitting()})"

    @property
    def sumsq_parts(self) -> int:
        """Columns of sumsq_out, or of best: one partial result a sequence and block."""
        return self.blocks
