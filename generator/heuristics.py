"""Shape and precision -> tile, cluster, stages of prefill's kernels: one rule a kind of kernel, with its reason.

Decode's are in decode_heuristics.py.
"""

from __future__ import annotations

from .precision import BF16, E4M3, Element, Precision
from .schedules import FEW_ROWS, Place, ScheduleTable, deepest, shipped_table, spec_of, written_copy
from .schedules import Schedule as _Schedule
from .specs import (
    AttentionPrefillSpec,
    GemmSpec,
    Heads,
    Tile,
)
from .specs.gemm import tile_k

MAX_ROWS = 2**31 - 1  # the most rows of a prefill GEMM that serves any number

WIDE = 16_384  # output features from which more rows of tiles are walked together


def padded_vocab(vocab_size: int) -> int:
    """Rows of the packed lm_head: whole groups of 64, so that every epilogue vector is full."""
    return -(-vocab_size // 64) * 64


def gemm_specs(
    op: str, n: int, k: int, precision: Precision, heads: Heads | None = None, table: ScheduleTable | None = None
) -> dict[int, GemmSpec]:
    """The prefill GEMMs of one projection, by the largest number of rows that each serves.

    Up to 64 rows the weights' stream is the floor, and up to 256 it is close: there a tile is as tall as the rows, or
    half, and as wide as makes one even wave of blocks, of half of K each where that takes fewer bytes. Above,
    ``_large``. A row of the table (default: the shipped one) for the shape and number of rows comes before any rule,
    unless sums are promoted, or its tile does not end where an INT4 copy needs it.
    """
    table = table or shipped_table()
    element = BF16 if op == "lm_head" else precision.prefill
    copy = written_copy(op, precision)
    group = 64 if op == "gate_up" else 32 if copy is None or heads is None else copy.unit(heads.head_dim)

    def spec(schedule: _Schedule) -> GemmSpec:
        return spec_of(Place(op, element.name, n, k, None), schedule, heads, precision)

    # Sums that are promoted are held twice. Of 128 rows, 128 columns are then the most that do not spill; the table's
    # tiles are those of sums that are not.
    promoted = element == E4M3 and precision.accumulation == "promoted"
    widest = 128 if promoted else 256
    found = {} if promoted else table.find(op, element.name, n, k)
    tuned = {rows: schedule for rows, schedule in found.items() if schedule["tile"].n % group == 0}
    # A page's place where heads of K are no power of two is a register more than 192 sums leave (13B spilled 4 bytes).
    crowded = (
        copy is not None and heads is not None and heads.head_dim > 64 and heads.num_key_value_heads.bit_count() > 1
    )
    fitting = 128 if crowded and element == E4M3 else widest
    large = spec(tuned.get(None) or _large(op, n, k, element, fitting, group, promoted=promoted))
    specs = {}
    for rows in FEW_ROWS:
        few = spec(tuned.get(rows) or _few_rows(n, k, element, widest, group, table.multiprocessors, rows))
        specs[rows] = few
        tiles_m = -(-rows // few.tile.m)
        waves = -(-n // few.tile.n) * tiles_m * few.splits / table.multiprocessors
        same = (few.tile, few.splits) == (large.tile, 1)
        if rows > 64 and rows not in tuned and (waves > 4 or same):
            specs[rows] = large  # with so many waves the last one matters little
    return {**specs, MAX_ROWS: large}


def _few_rows(n: int, k: int, element: Element, widest: int, group: int, multiprocessors: int, rows: int) -> _Schedule:
    """The tile width and split of K that give the shortest waves of blocks; a tile has 64 rows, or up to 128.

    A block's time a column of K is that of its products (2048 multiply-adds a clock in BF16, twice as many in FP8) or
    of its operands' way into shared memory (64 bytes a clock), whichever is longer. To exchange the sums of a split
    takes about 3000 clocks.
    """
    tile_m, stage = min(rows, 128), tile_k(element)
    tiles_m = -(-rows // tile_m)

    def clocks(choice: tuple[int, int]) -> tuple[float, int, int]:
        width, splits = choice
        blocks = -(-n // width) * tiles_m * splits
        column = max(tile_m * width * element.bits / 32768, (tile_m + width) * element.bits / 8 / 64)
        block = column * -(-k // (stage * splits)) * stage + (3000 if splits > 1 else 0)
        return -(-blocks // multiprocessors) * block, splits, -width

    width, splits = min(((w, s) for w in range(group, widest + 1, group) for s in (1, 2)), key=clocks)
    return deepest(element, Tile(tile_m, width, stage), (1, 1, splits), "cooperative")


def _large(op: str, n: int, k: int, element: Element, widest: int, group: int, *, promoted: bool) -> _Schedule:
    """Any number of rows: 128x256 cooperative, or narrower pingpong tiles where 256 leaves much of the last tile empty.

    128x256 gives the most arithmetic a byte of shared memory. A cluster of two blocks along M halves the weight traffic
    from L2, and pays only where there are several waves of tiles. In FP8 a tile is multiplied in half the time, so that
    its end weighs twice as much: gate_up and qkv hide theirs behind the other consumer's tile (8B, of _scaled_mm in a
    burst: gate_up 1.06, 128x256 1.03; qkv 0.94 and 0.92). o and down, whose ends move the most memory, gain nothing
    by it (o 0.87, 128x256 0.89).
    """
    fp8, hidden = element == E4M3, op in ("qkv", "gate_up")
    widest = min(widest, 192 if fp8 and hidden else 256)
    fixed = 32  # columns that a tile's fixed cost is worth
    widths = (width for width in (256, 192, 160, 128, 96, 64) if width <= widest and width % group == 0)
    width = min(widths, key=lambda width: (-(-n // width) * (width + fixed), -width))
    cluster_m = 2 if n * k >= 4096 * 4096 else 1
    schedule = "cooperative" if width == 256 or promoted else "pingpong"
    chosen = deepest(element, Tile(128, width, tile_k(element)), (cluster_m, 1, 1), schedule)
    if fp8 and n >= WIDE:
        chosen["raster"] = 16  # 8B, gate_up at 8192 rows: 1 to 2 % faster than of 8, 6 % than of 32
    return chosen


def attention_prefill_spec(heads: Heads, precision: Precision) -> AttentionPrefillSpec:
    """128 queries by 128 keys (two pages): the FlashAttention-3 tile that fits two stages at head_dim 128."""
    fp8_out = precision.prefill == E4M3
    return AttentionPrefillSpec(precision.kv, heads, tile_m=128, tile_n=128, stages=2, fp8_out=fp8_out)
