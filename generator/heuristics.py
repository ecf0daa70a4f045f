"""Shape and precision -> tile, cluster, stages. One rule a kind of kernel, with the reason beside it."""

from __future__ import annotations

from .precision import Precision
from .specs import AttentionDecodeSpec, AttentionPrefillSpec, DecodeGemmSpec, GemmSpec, Heads, Tile
from .specs.base import MAX_SHARED_BYTES

BATCH_TILES = (8, 16, 32, 64)  # sequences that a decode kernel multiplies together: wgmma/mma.sync n is 8 a step

# Shared memory that a GEMM's ring leaves free: barriers, and alignment of the driver's own.
_RING_BYTES = MAX_SHARED_BYTES - 1024


def padded_vocab(vocab_size: int) -> int:
    """Rows of the packed lm_head: whole groups of 64, so that every epilogue vector is full."""
    return -(-vocab_size // 64) * 64


def gemm_spec(op: str, n: int, k: int, precision: Precision, heads: Heads | None = None) -> GemmSpec:
    """The prefill GEMM of one projection.

    128x256 gives the most arithmetic a byte of shared memory (two operands of 128 + 256 rows for 128 x 256 products);
    narrower tiles are taken where 256 would leave much of the last tile empty. A cluster of two blocks halves the
    weight traffic from L2, and pays only where there are several waves of tiles.
    """
    widths = (256, 192, 128, 64) if op == "gate_up" else (256, 192, 128, 96, 64)
    tile_n = min(widths, key=lambda width: (-(-n // width) * (width + 32), -width))  # + 32: a tile's fixed cost
    tile = Tile(128, tile_n, 64)
    stage_bytes = (tile.m + tile.n) * tile.k * precision.prefill.bits // 8 + 16
    cluster_m = 2 if n * k >= 4096 * 4096 else 1
    return GemmSpec(op, precision.prefill, n, k, tile, cluster_m, min(_RING_BYTES // stage_bytes, 8), heads)


def decode_gemm_spec(
    op: str, n: int, k: int, batch_tile: int, precision: Precision, heads: Heads | None = None
) -> DecodeGemmSpec:
    """The decode GEMM of one projection for up to ``batch_tile`` sequences.

    One row tile a block gives the most blocks (256 for the smallest projection of an 8B model), two of which share a
    multiprocessor; six stages of 16 KB hold more than the 34-67 KB a multiprocessor must have in flight.
    """
    return DecodeGemmSpec(
        op, precision.decode, n, k, batch_tile, row_tiles=1, warps=8, stages=6, stage_k=512, heads=heads
    )


def attention_prefill_spec(heads: Heads, precision: Precision) -> AttentionPrefillSpec:
    """128 queries by 128 keys (two pages): the FlashAttention-3 tile that fits two stages at head_dim 128."""
    return AttentionPrefillSpec(precision.kv, heads, tile_m=128, tile_n=128, stages=2)


def attention_decode_spec(heads: Heads, precision: Precision) -> AttentionDecodeSpec:
    """Four warps share a page of 64 tokens, sixteen each; three stages of K and V keep the memory pipe full."""
    return AttentionDecodeSpec(precision.kv, heads, warps=4, stages=3)
