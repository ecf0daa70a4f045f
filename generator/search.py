"""Which schedules of a prefill GEMM are worth compiling and timing: legal ones, the likeliest first.

A model orders them, and only orders them: a tile's time is that of its products or of its operands' way into shared
memory, whichever is longer, a part of the latter in any case, and what its end costs; times the waves of tiles that the
card needs. It knows nothing of clocks and power, so the best few are timed: `futransformer tune`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import product

from .errors import UnsupportedError
from .precision import Precision
from .schedules import Place, deepest, spec_of
from .specs import GemmSpec, Heads, Tile
from .specs.gemm import SCHEDULES, tile_k

BUCKETS: dict[
    int | None, tuple[int, ...]
] = {  # most rows that a kernel serves (None: any) -> the numbers to time it at
    64: (16, 64),
    128: (128,),
    256: (256,),
    None: (2048, 8192),
}

_TILE_ROWS = (64, 128, 192, 256)
_TILE_COLUMNS = range(32, 257, 32)
_CLUSTERS = ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2))
_FEWEST_STAGES = 3  # which a deep K needs

# Clocks of one multiprocessor: dense BF16 multiply-adds (in FP8 twice as many), bytes into shared memory, and what a
# tile's end takes where nothing hides it (two pingpong warpgroups hide each other's) or where two blocks exchange the
# halves of a split K.
_MULTIPLY_ADDS = 2048
_BYTES = 64
_TILE_END = 1500
_EXCHANGE = 3000
# Of tiles whose products take longer, those that copy more are slower all the same: on an H200 128x128 in pairs, with 6
# clocks of copies to 8 of products, reached 0.91 of torch.mm where 128x256, with 8 to 16, reached 0.97.
_COPIES_FELT = 0.25


def candidates(
    op: str, precision: Precision, n: int, k: int, heads: Heads | None, rows: int, multiprocessors: int, count: int
) -> tuple[GemmSpec, ...]:
    """The ``count`` likeliest schedules for ``rows`` rows of x, best first by the model, then by name."""
    legal = _legal(op, precision, n, k, heads)
    return tuple(sorted(legal, key=lambda spec: (clocks(spec, rows, multiprocessors), spec.name))[:count])


def clocks(spec: GemmSpec, rows: int, multiprocessors: int) -> float:
    """What the model thinks of a schedule."""
    tile, (cluster_m, cluster_n, splits) = spec.tile, spec.cluster
    tiles = -(-rows // (tile.m * cluster_m)) * -(-spec.n // (tile.n * cluster_n))
    at_once = multiprocessors * spec.blocks_per_sm // (cluster_m * cluster_n * splits)
    # Blocks on one multiprocessor share its units.
    products = spec.blocks_per_sm * tile.m * tile.n * spec.element.bits / 16 / _MULTIPLY_ADDS
    copied = tile.m / cluster_n + tile.n / cluster_m  # a tile that two blocks share comes from L2 once
    operands = spec.blocks_per_sm * copied * spec.element.bits / 8 / _BYTES
    depth = -(-spec.k // (tile.k * splits)) * tile.k
    end = 0 if spec.schedule == "pingpong" else _TILE_END
    column = max(products, operands) + _COPIES_FELT * operands
    return -(-tiles // at_once) * (column * depth + end + (_EXCHANGE if splits == 2 else 0))


def _legal(op: str, precision: Precision, n: int, k: int, heads: Heads | None) -> Iterator[GemmSpec]:
    """Every schedule that a spec takes, each with as many stages as fit; none whose tile is mostly outside N."""
    element = precision.prefill
    place = Place(op, element.name, n, k, None)
    for schedule, cluster, tile_m, tile_n in product(SCHEDULES, _CLUSTERS, _TILE_ROWS, _TILE_COLUMNS):
        if tile_n >= 2 * max(n, 32):
            continue
        choice = deepest(element, Tile(tile_m, tile_n, tile_k(element)), cluster, schedule)
        if choice["stages"] >= _FEWEST_STAGES:
            with suppress(UnsupportedError):
                yield spec_of(place, choice, heads, precision)
