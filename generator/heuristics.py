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

    Two blocks share a multiprocessor, so that one's start and end hide behind the other's stream. Up to 16 sequences
    the ring is 64 KB: 128 KB a multiprocessor in flight saturate the memory, and the rest is L1 for x. From 32 on the
    blocks' reads of x outweigh the weights: two row tiles a block halve them where that leaves two blocks each, and
    shorter stages keep the operands of a stage in registers. A short K is split over fewer warps.
    """
    warps, row_tiles, stage_k, stages = 8, 1, 512, 4
    if batch_tile == 32 and n // 32 >= 264 and n % 32 == 0:
        row_tiles, stage_k = 2, 256
    if batch_tile == 64:
        stage_k, stages = 256, 6
    if k < 2048:
        warps, row_tiles, stage_k = 4, 1, 128 if batch_tile == 64 else 256
        stages = min(6, max(2, -(-k // stage_k)))
    return DecodeGemmSpec(op, precision.decode, n, k, batch_tile, row_tiles, warps, stages, stage_k, heads)


def attention_prefill_spec(heads: Heads, precision: Precision) -> AttentionPrefillSpec:
    """128 queries by 128 keys (two pages): the FlashAttention-3 tile that fits two stages at head_dim 128."""
    return AttentionPrefillSpec(precision.kv, heads, tile_m=128, tile_n=128, stages=2, turns=True, rescale_threshold=8)


def attention_decode_spec(heads: Heads, precision: Precision) -> AttentionDecodeSpec:
    """Four warps share a page of 64 tokens, sixteen each; three stages of K and V keep the memory pipe full."""
    return AttentionDecodeSpec(precision.kv, heads, warps=4, stages=3)
