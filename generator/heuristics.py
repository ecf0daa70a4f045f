"""Shape and precision -> tile, cluster, stages. One rule a kind of kernel, with the reason beside it."""

from __future__ import annotations

from .precision import Precision
from .specs import AttentionDecodeSpec, AttentionPrefillSpec, DecodeGemmSpec, GemmSpec, Heads, Tile
from .specs.base import HALF_SHARED_BYTES, MAX_SHARED_BYTES
from .specs.decode_gemm import ROW_TILE

BATCH_TILES = (8, 16, 32, 64)  # sequences that a decode kernel multiplies together: wgmma/mma.sync n is 8 a step

# Decode GEMMs.
MAX_ROW_TILES = 16  # of a cluster: eight warps with the sums of two each
MIN_BLOCKS = 120  # nine in ten multiprocessors: each takes in up to twice its share of the memory's bandwidth
MIN_STAGES = 3  # one being read, two on their way
MAX_STAGES = 8
MAX_STAGE_K = 512

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

    As many row tiles a block as leave one block a multiprocessor: each reads x once, and all end together. From 32
    sequences on x outweighs the weights of two or three row tiles, so four blocks share four times the tiles and split
    K. Two kernels fit a multiprocessor together, so that the next one's weights arrive while this one ends.
    """
    tiles = n // ROW_TILE
    row_tiles = max(r for r in range(1, MAX_ROW_TILES + 1) if tiles % r == 0 and (tiles // r >= MIN_BLOCKS or r == 1))
    split_k = 1
    if batch_tile >= 32 and row_tiles <= 3 and tiles % (4 * row_tiles) == 0 and k % 512 == 0:
        split_k, row_tiles = 4, 4 * row_tiles
    # A warp has two row tiles, whose sums fit its registers at any batch; few tiles are shared by splitting k.
    warp_rows = row_tiles // 2 if row_tiles % 2 == 0 else row_tiles
    if row_tiles <= 3 and batch_tile <= 16:
        warp_rows = 1
    warp_split = 1 << max(8 // warp_rows, 1).bit_length() - 1
    stages, stage_k = _decode_ring(k // split_k, row_tiles, warp_split, batch_tile, precision.decode.bits)
    return DecodeGemmSpec(
        op, precision.decode, n, k, batch_tile, row_tiles, warp_rows, warp_split, split_k, stages, stage_k, heads
    )


def _decode_ring(k: int, row_tiles: int, warp_split: int, batch_tile: int, bits: int) -> tuple[int, int]:
    """Stages and their k: the longest of which three fit into half a multiprocessor, and as many as do."""
    step_k = max(32, 256 // bits) * warp_split
    step_bytes = step_k * (ROW_TILE * row_tiles * bits + 16 * batch_tile) // 8 + 16
    room = HALF_SHARED_BYTES - 32 * batch_tile
    steps = max(1, min(room // (MIN_STAGES * step_bytes), MAX_STAGE_K // step_k))
    steps = 1 << steps.bit_length() - 1
    fit = min(room // (steps * step_bytes), MAX_STAGES)
    return max(2, min(fit, -(-k // (steps * step_k)))), steps * step_k


def attention_prefill_spec(heads: Heads, precision: Precision) -> AttentionPrefillSpec:
    """128 queries by 128 keys (two pages): the FlashAttention-3 tile that fits two stages at head_dim 128."""
    return AttentionPrefillSpec(precision.kv, heads, tile_m=128, tile_n=128, stages=2)


def attention_decode_spec(heads: Heads, precision: Precision) -> AttentionDecodeSpec:
    """Four warps share a page of 64 tokens, sixteen each; three stages of K and V keep the memory pipe full."""
    return AttentionDecodeSpec(precision.kv, heads, warps=4, stages=3)
