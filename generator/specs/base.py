"""Kernel specifications: what each generated kernel computes, how it is tiled, and its launch ABI.

A spec is a frozen dataclass. Everything else is derived from it: the kernel's name (also its ``extern "C"`` entry and
its file name), the template that renders it, the parameter list that the signature is rendered from and that the
manifest records, threads per block, cluster and dynamic shared memory. The template asserts the same shared memory at
compile time, so Python and CUDA cannot drift apart.

Shapes: T tokens of all prompts concatenated, B sequences, H hidden_size, N out_features, K in_features.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from ..errors import UnsupportedError
from ..kv_format import PAGE_SIZE, KvFormat
from ..precision import E4M3, Element

MAX_SHARED_BYTES = 232_448  # what one sm_90 block may use (227 KiB)
SM_SHARED_BYTES = 233_472  # shared memory of an sm_90 multiprocessor (228 KiB)
BLOCK_RESERVED_BYTES = 1024  # of which the system takes this for every block
ABI_VERSION = 2  # raised whenever the meaning of a parameter or a packed layout changes


def shared_share(blocks: int) -> int:
    """Bytes of shared memory with which this many blocks share a multiprocessor."""
    return SM_SHARED_BYTES // blocks - BLOCK_RESERVED_BYTES


@dataclass(frozen=True)
class Param:
    """One kernel parameter: ``kind`` is pointer, int32, float32 or tensor_map; ``ctype`` the pointee of a pointer."""

    name: str
    kind: str
    ctype: str = ""

    @property
    def declaration(self) -> str:
        """The parameter as it stands in the CUDA signature."""
        if self.kind == "pointer":
            return f"{self.ctype}* {self.name}"
        if self.kind == "tensor_map":
            return f"const __grid_constant__ CUtensorMap {self.name}"
        return f"{ {'int32': 'int', 'float32': 'float'}[self.kind] } {self.name}"


def pointer(name: str, ctype: str) -> Param:
    """A device pointer parameter."""
    return Param(name, "pointer", ctype)


@dataclass(frozen=True)
class Tile:
    """CUTLASS's tile_shape_mnk."""

    m: int
    n: int
    k: int

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k}"


@dataclass(frozen=True)
class Heads:
    """Attention geometry: query heads, key/value heads, features a head."""

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_attention_heads // self.num_key_value_heads

    @property
    def q_features(self) -> int:
        """Width of Q in the fused projection."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_features(self) -> int:
        """Width of K (or V) in the fused projection."""
        return self.num_key_value_heads * self.head_dim

    @property
    def qkv_features(self) -> int:
        """Rows of the fused q, k, v projection."""
        return self.q_features + 2 * self.kv_features

    def __str__(self) -> str:
        return f"h{self.num_attention_heads}kv{self.num_key_value_heads}d{self.head_dim}"


# rstd, from the partial sums of squares of the row that the GEMM reads: [rows, sumsq_parts]
_ROWSCALE = (
    pointer("sumsq", "const float"),
    Param("sumsq_parts", "int32"),
    Param("rms_norm_eps", "float32"),
)
_SCALE = pointer("scale", "const float")
KV_SCALE = pointer("kv_scale", "const float")

# An epilogue is a chain of operations applied to eight consecutive output columns of one row at a time; each
# operation brings its own kernel parameters. The same structs (include/futransformer/epilogue.cuh) serve prefill,
# where a row is a prompt token, and decode, where it is a sequence.
EPILOGUE_PARAMS: dict[str, tuple[Param, ...]] = {
    # x rstd
    "rowscale": _ROWSCALE,
    # rotate Q and K; rope_table [positions, head_dim / 2, (cos, sin)], positions [rows]
    "rope": (pointer("rope_table", "const float"), pointer("positions", "const int")),
    # Q to q [rows, q_features]; K and V to their cache slots; slots [rows], negative: write nothing
    "scatter_kv": (
        pointer("q", "cutlass::bfloat16_t"),
        pointer("k_pages", "cutlass::bfloat16_t"),
        pointer("v_pages", "cutlass::bfloat16_t"),
        pointer("slots", "const long long"),
    ),
    # the same in E4M3: a code of 1 is worth kv_scale [2], of K and of V
    "scatter_kv_fp8": (
        pointer("q", "cutlass::bfloat16_t"),
        pointer("k_pages", "cutlass::float_e4m3_t"),
        pointer("v_pages", "cutlass::float_e4m3_t"),
        pointer("slots", "const long long"),
        KV_SCALE,
    ),
    # the INT4 copy of K and V of the same slots, [num_pages, heads, page bytes]; in decode q is rotated as K is
    "copy_kv": (pointer("kv_copy", "unsigned char"),),
    # FP8 operands: x the sums' scale (x's times the weight's), scale [1]; with the row's rstd
    "scaled_rowscale": (*_ROWSCALE, _SCALE),
    # that and silu(gate) * up, in units of the result's scale (store_fp8's out_scale)
    "scaled_swiglu": (*_ROWSCALE, _SCALE),
    # FP8 operands whose weight has a scale a row: scale [N], in the order of the chain's columns
    "channelscale": (_SCALE,),
    # the same where the scales lie behind the packed codes of a decode weight
    "weightscale": (),
    # x scale [1], + residual
    "scaled_residual": (_SCALE, pointer("residual", "const cutlass::bfloat16_t")),
    # + residual [rows, N]; may alias out
    "residual": (pointer("residual", "const cutlass::bfloat16_t"),),
    # float32 residual [rows, N] += the sums; BF16 out [rows, N] of it, and partial sums of squares of the residual
    "residual_f32": (
        pointer("residual", "float"),
        pointer("out", "cutlass::bfloat16_t"),
        pointer("sumsq_out", "float"),
    ),
    # the same, but out is gain [N] x the residual
    "residual_f32_gain": (
        pointer("residual", "float"),
        pointer("out", "cutlass::bfloat16_t"),
        pointer("sumsq_out", "float"),
        pointer("gain", "const float"),
    ),
    # silu(gate) * up, halving the columns
    "swiglu": (),
    # BF16 out [rows, columns]
    "store": (pointer("out", "cutlass::bfloat16_t"),),
    # BF16 out and the partial sums of squares of what was rounded for it, sumsq_out [rows, parts]
    "store_sumsq": (pointer("out", "cutlass::bfloat16_t"), pointer("sumsq_out", "float")),
    # FP8 out [rows, columns] of values / out_scale [1]; amax [1] is raised to the largest magnitude, saturated [1]
    # counts the values beyond the largest code
    "store_fp8": (
        pointer("out_fp8", "cutlass::float_e4m3_t"),
        pointer("out_scale", "const float"),
        pointer("amax", "float"),
        pointer("saturated", "unsigned int"),
    ),
    # float32 out [rows, N]
    "store_f32": (pointer("out", "float"),),
    # the same unless out is null, and best [rows, parts], the largest of each block's columns and where it is
    "store_logits": (pointer("out", "float"), pointer("best", "futransformer::Candidate")),
}

EPILOGUES: dict[str, tuple[str, ...]] = {
    "qkv": ("rowscale", "rope", "scatter_kv"),
    "o": ("residual", "store_sumsq"),
    "gate_up": ("rowscale", "swiglu", "store"),
    "down": ("residual", "store_sumsq"),
    "lm_head": ("rowscale", "store_f32"),
}

# The same chains where the GEMM reads FP8, by the granularity of the weight's scales. lm_head stays in the head's type.
FP8_EPILOGUES: dict[str, dict[str, tuple[str, ...]]] = {
    "tensor": {
        "qkv": ("scaled_rowscale", "rope", "scatter_kv"),
        "o": ("scaled_residual", "store_sumsq", "store_fp8"),
        "gate_up": ("scaled_swiglu", "store_fp8"),
        "down": ("scaled_residual", "store_sumsq", "store_fp8"),
    },
    "channel": {
        "qkv": ("channelscale", "rowscale", "rope", "scatter_kv"),
        "o": ("channelscale", "residual", "store_sumsq", "store_fp8"),
        "gate_up": ("channelscale", "rowscale", "swiglu", "store_fp8"),
        "down": ("channelscale", "residual", "store_sumsq", "store_fp8"),
    },
}

# A token's residual stream is a few kilobytes: decode keeps it in float32, beside the BF16 copy that GEMMs read. Its
# head finds the likeliest tokens on the way.
DECODE_EPILOGUES = {
    **EPILOGUES,
    "o": ("residual_f32",),
    "down": ("residual_f32",),
    "lm_head": ("rowscale", "store_logits"),
}


def with_kv(epilogue: tuple[str, ...], kv: Element, copy: KvFormat | None) -> tuple[str, ...]:
    """A chain whose K and V go to pages of this element, and to an INT4 copy if there is one."""
    stored = tuple("scatter_kv_fp8" if op == "scatter_kv" and kv == E4M3 else op for op in epilogue)
    return (*stored, "copy_kv") if copy is not None else stored


def copy_name(copy: KvFormat | None) -> str:
    """The last part of a kernel's name: the form of the copy that it writes or reads."""
    return "" if copy is None else f"_{copy}".replace("-", "_")


def epilogue_params(epilogue: tuple[str, ...]) -> tuple[Param, ...]:
    """The parameters of a chain, in the order of its operations."""
    return tuple(param for op in epilogue for param in EPILOGUE_PARAMS[op])


@dataclass(frozen=True)
class KernelSpec:
    """What all specs share. Subclasses set ``template`` and derive the rest."""

    template: ClassVar[str]
    page_size: ClassVar[int] = PAGE_SIZE
    dependent_launch: ClassVar[bool] = False  # waits for its predecessor itself, so that it may start before its end
    cooperative: ClassVar[bool] = False  # its blocks wait for one another, so that all must run at once

    @property
    def instructions(self) -> tuple[str, ...]:
        """SASS mnemonics that the cubin must contain."""
        return ()

    @property
    def name(self) -> str:
        """Kernel name: op_arch_types_shape_tile_cluster_stages_schedule_epilogue; unique within a plan."""
        raise NotImplementedError

    @property
    def params(self) -> tuple[Param, ...]:
        """The launch ABI, in order."""
        raise NotImplementedError

    @property
    def threads(self) -> int:
        """Threads a block."""
        raise NotImplementedError

    @property
    def blocks_per_sm(self) -> int:
        """Blocks that must fit on a multiprocessor together: what the compiler bounds registers by."""
        return 1

    @property
    def bounds(self) -> str:
        """What the compiler derives the most registers of a thread from."""
        return f"__launch_bounds__({self.threads}, {self.blocks_per_sm})"

    @property
    def cluster(self) -> tuple[int, int, int]:
        """Blocks a cluster."""
        return (1, 1, 1)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory a block, in bytes."""
        return 0

    def context(self) -> dict[str, Any]:
        """What the template sees: the spec's fields and everything derived."""
        return {
            **{field.name: getattr(self, field.name) for field in fields(self)},
            "spec": self,
            "name": self.name,
            "params": self.params,
            "threads": self.threads,
            "cluster": self.cluster,
            "shared_bytes": self.shared_bytes,
        }

    def require(self, condition: bool, message: str) -> None:
        """Refuse a spec that no template serves: UnsupportedError with the request and what is supported."""
        if not condition:
            raise UnsupportedError(f"{type(self).__name__} {self}: {message}")
