"""All layers of a decode step in one persistent launch: INT4 weights, attention over the INT4 copy of the cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..int4 import ROW_TILE, unit_bytes
from ..kv_format import KvFormat
from .base import EPILOGUE_PARAMS, MAX_SHARED_BYTES, Heads, KernelSpec, Param, pointer

_LANES = 32
_PART_K = 128  # k of activations that are staged together
SETS = 4  # of warps, which take slots in turn
_SET_WARPS = 4
_PAGE_SETS = 2  # of the sets, that attend to pages
_STREAM_WARPS = 4  # of which one thread streams
_WARP_K = 256  # k of a warp in a slot
_PAIR_TILES = 2  # row tiles of a slot
SLOT_K = _SET_WARPS * _WARP_K


@dataclass(frozen=True)
class LayerProjection:
    """One projection [n, k] of a layer."""

    op: str
    n: int
    k: int
    group_tiles: int  # row tiles that a block finishes together
    blocks: int

    @property
    def cpp(self) -> str:
        """The C++ alias."""
        return {"qkv": "Qkv", "o": "O", "gate_up": "GateUp", "down": "Down"}[self.op]

    @property
    def most_tiles(self) -> int:
        """Row tiles of the block that has most."""
        groups = self.n // (ROW_TILE * self.group_tiles)
        return -(-groups // self.blocks) * self.group_tiles


@dataclass(frozen=True)
class DecodeLayersSpec(KernelSpec):
    """Every layer for one sequence, by ``blocks`` blocks that run at once, one a multiprocessor.

    A thread streams weights and pages through ``slots`` slots of shared memory, at most ``in_flight`` of them under
    way, of a ring that is mostly empty twice as many. Activations of ``window_k`` k are in shared memory at a time.
    ``clocked``: a build for profiling, which says how long copies were under way.
    """

    template: ClassVar[str] = "decode_layers_sm90.cu.jinja"
    cooperative: ClassVar[bool] = True

    heads: Heads
    hidden_size: int
    intermediate_size: int
    group_k: int
    zero_points: bool
    copy: KvFormat
    blocks: int
    slots: int
    in_flight: int
    window_k: int
    clocked: bool = False

    def __post_init__(self) -> None:
        self.require(self.window_k % SLOT_K == 0, f"window_k must be a multiple of {SLOT_K}")
        self.require(
            2 * self.intermediate_size // ROW_TILE >= self.blocks,
            f"gate_up must have a row tile for each of {self.blocks} blocks, lest one without could be a layer ahead",
        )
        self.require(
            1 <= self.in_flight <= self.slots - SETS,
            f"in_flight must be 1 to {self.slots - SETS}, slots less {SETS}: a set may be a pass ahead of another",
        )
        self.require(self.shared_bytes <= MAX_SHARED_BYTES, f"shared memory must not exceed {MAX_SHARED_BYTES} bytes")

    @property
    def projections(self) -> tuple[LayerProjection, ...]:
        """In the order of a layer."""
        heads, hidden = self.heads, self.hidden_size
        shapes = {
            "qkv": (heads.qkv_features, hidden, self.copy.unit(heads.head_dim) // ROW_TILE),
            "o": (hidden, heads.q_features, 1),
            "gate_up": (2 * self.intermediate_size, hidden, 1),
            "down": (hidden, self.intermediate_size, 1),
        }
        return tuple(LayerProjection(op, n, k, group_tiles, self.blocks) for op, (n, k, group_tiles) in shapes.items())

    @property
    def sumsq_parts(self) -> int:
        """Sums of squares of what the last layer leaves: one of each block that has a share of it."""
        return min(self.hidden_size // ROW_TILE, self.blocks)

    @property
    def weight_type(self) -> str:
        """The C++ type that says how weights are read."""
        return f"futransformer::Int4<{self.group_k}, {str(self.zero_points).lower()}>"

    @property
    def name(self) -> str:
        """See KernelSpec.name."""
        form = f"{self.copy}".replace("-", "_")
        return (
            f"decode_layers_sm90_int4g{self.group_k}{'z' * self.zero_points}_{self.heads}_n{self.hidden_size}"
            f"_i{self.intermediate_size}_s{self.slots}x{self.in_flight}_k{self.window_k}_t{self.blocks}_{form}"
            f"{'_clocked' * self.clocked}"
        )

    @property
    def params(self) -> tuple[Param, ...]:
        """See KernelSpec.params."""
        return (
            pointer("layers", "const void"),  # [num_layers, 7] addresses: the kernel's Layer
            Param("num_layers", "int32"),
            pointer("x", "cutlass::bfloat16_t"),
            pointer("residual", "float"),
            Param("rms_norm_eps", "float32"),
            *EPILOGUE_PARAMS["rope"],
            pointer("slots", "const long long"),
            pointer("sumsq_out", "float"),  # [writers of down]
            pointer("block_table", "const int"),
            Param("block_table_stride", "int32"),
            pointer("seqlens_k", "const int"),
            Param("softmax_scale", "float32"),
            Param("splits", "int32"),
            Param("pages_per_split", "int32"),
            *(pointer(f"{name}_sent", "void") for name in self.exchanged(1)),
            pointer("epoch", "unsigned"),
            *([pointer("clocks", "void")] if self.clocked else []),  # [blocks] of the kernel's BlockClocks
        )

    def exchanged(self, splits: int) -> dict[str, tuple[int, ...]]:
        """What blocks send one another, in words of eight bytes: two BF16 or one float32, and a tag."""
        heads, hidden, dim = self.heads, self.hidden_size, self.heads.head_dim
        scales = self.copy.groups(dim)
        return {
            "q": (heads.q_features // 2,),
            "codes": (heads.num_key_value_heads, dim // 4 + 2 * scales),  # of the new token's K and V
            "partial": (heads.num_attention_heads, splits, dim),
            "max_sum": (heads.num_attention_heads, splits, 2),
            "attended": (heads.q_features // 2,),
            "x_middle": (hidden // 2,),
            "h": (self.intermediate_size // 2,),
            "x_end": (hidden // 2,),
        }

    @property
    def instructions(self) -> tuple[str, ...]:
        """See KernelSpec.instructions."""
        return ("IMMA.16832.U8.S8", "HMMA.16816.F32.BF16", "UBLKCP", "LDS.128", "USETMAXREG")

    @property
    def threads(self) -> int:
        """The warps that multiply, and those of the one that streams."""
        return _LANES * (SETS * _SET_WARPS + _STREAM_WARPS)

    @property
    def slot_bytes(self) -> int:
        """Two row tiles of SLOT_K k, or a page."""
        part = _WARP_K // self.group_k * unit_bytes(self.group_k, self.zero_points)
        weights = _PAIR_TILES * _SET_WARPS * part
        return max(weights, self.copy.page_bytes(self.heads.head_dim))

    @property
    def shared_bytes(self) -> int:
        """The ring; activations, or attention's results and the newest page; sums of the warps; barriers."""
        heads, projections = self.heads, self.projections
        window = max(min(projection.k, self.window_k) for projection in projections)
        staged = -(-window // _PART_K) * 256 + -(-window // self.group_k) * 8
        warps = SETS * _SET_WARPS
        results = _PAGE_SETS * _SET_WARPS * heads.group * 4 * (heads.head_dim + 4 + 2)
        most_splits = max(self.blocks // heads.num_key_value_heads, 1)
        splits = 16 * (heads.group * heads.head_dim // 4 + most_splits) + 8 * most_splits * heads.group
        splits = -(-splits // 16) * 16
        q = heads.group * heads.head_dim * 2
        attended = self.copy.page_bytes(heads.head_dim) + q + max(results, splits)
        columns = ROW_TILE * max(projection.most_tiles for projection in projections)
        partial = SETS * _SET_WARPS * (columns + 4) * 4
        parts = (
            self.slots * self.slot_bytes,
            max(staged, attended),
            partial,
            4 * (warps + 2 + 4 * 3 + 6),
            16 * self.slots,
        )
        return -(-sum(-(-part // 16) * 16 for part in parts) // 128) * 128
