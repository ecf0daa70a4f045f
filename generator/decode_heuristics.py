"""Shape and precision -> row tiles, split, stages of decode's kernels: one rule a kind of kernel, with its reason.

Prefill's are in heuristics.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from .errors import UnsupportedError
from .int4 import ROW_TILE, packed_group
from .kv_format import KvFormat
from .precision import BF16, E4M3, INT4, Element, Precision
from .schedules import MULTIPROCESSORS as _MULTIPROCESSORS
from .schedules import written_copy, written_kv
from .specs import (
    AttentionDecodeSpec,
    DecodeGemmSpec,
    DecodeLayersSpec,
    Heads,
    copy_blocks,
)
from .specs.base import BLOCK_RESERVED_BYTES, MAX_SHARED_BYTES, SM_SHARED_BYTES, shared_share
from .specs.decode_gemm import SCHEDULER_REGISTERS, SCHEDULERS, inbox_bytes
from .specs.decode_layers import SLOT_K

BATCH_TILES = (8, 16, 32, 64)  # sequences that a decode kernel multiplies together: wgmma/mma.sync n is 8 a step
INT4_BATCH_TILES = (4, *BATCH_TILES)  # up to four as integers
E4M3_BATCH_TILES = BATCH_TILES[1:]  # but for the head: see batch_tiles


class _Shape(NamedTuple):
    """Of a decode GEMM that writes an INT4 copy."""

    row_tiles: int
    split_k: int
    copy: KvFormat


# Decode GEMMs; docs/notebook/decode_gemm.md has the measurements.
MIN_BLOCKS = 120  # nine in ten multiprocessors: each takes in up to twice its share of the memory's bandwidth
MIN_ROW_TILES = 4  # of a cluster: x from L2 is then at most as many bytes as the weights, up to 64 sequences
MIN_STAGES = 3  # one being read, two on their way
MAX_STAGES = 8
MAX_STAGE_K = 512
COPY_BYTES = 4_096  # of a row tile in a stage: long enough (8B, gate_up: of 2 KB 64.1 us, 4 KB 57.6, 8 KB 57.8)
LONG_SLICE = 4096  # of K, from which a block that has a multiprocessor to itself has a ring of more than half of it
DEEP_STAGES = 6  # of such a ring
LANES_SUMS = 192  # row tiles times sequences that the lanes of a cluster, which load their own x, have registers for
LANES_AHEAD = 2  # stages of x that lanes load ahead in a cluster; one shows the latency of each (8B, a layer: + 0.6 us)
BESIDE_BYTES = 111_000  # of another kernel's block (8B at 32 sequences: at most 110,640)
COPY_BYTES_AHEAD = 204_800  # of INT4 pages on their way to a multiprocessor, in two blocks
ATTENTION_REGISTERS = 104  # that a thread of attention_decode takes on its scheduler (8B: 98, in steps of 8)
WGMMA_ROW_TILES = 4  # that a warpgroup multiplies together
WGMMA_GROUPS = 2  # four are slower (8B, gate_up at 32 sequences: 28.1 us, of two 26.2)
WGMMA_K = 256  # of a stage; of four stages instead of three gate_up takes 26.5 us
WGMMA_SPLIT_STAGES = 5  # where warpgroups share K
FEW_STAGE_BYTES = 16_384  # up to eight sequences; four stages of weights alone let three blocks share a multiprocessor
FEW_STAGES = 4
FEW_STAGE_K = 128  # at least
BLOCK_BYTES = 65_536  # what a multiprocessor takes in while a block starts and ends: about 2 us
# Stages of INT4 weights under way, by sequences, where lanes load x and all blocks run at once: more only delay the x
# that the kernel before waits for (8B, a layer's four projections at 1, 8 and 16 sequences: unbounded 35.0, 43.5 and
# 50.2 us, two stages 34.7, 43.1 and 49.4, one 35.1, 40.4 and 47.4; o alone at 32: 7.9, two 7.4). One was measured
# where a slice has at most eight stages; 70B's have more.
INT4_IN_FLIGHT = {4: 2, 8: 1, 16: 1, 32: 2}
ONE_IN_FLIGHT_STAGES = 8
# What follows is by projection and sequences, each as it was measured with 8B (us a layer of the chain of four).
# The same where x comes by the ring to warps; nothing is bounded elsewhere (46.9, so 46.6; of one stage 49.5).
INT4_RING_IN_FLIGHT = {("gate_up", 16): 2}
# Stages behind the first fill that are asked into L2 before the kernel before is done (37.26, so 36.91; of five 39.1).
INT4_FETCHED = {("gate_up", 8): 2}
# Stages under way in blocks of clusters of two that are alone of their kind on a multiprocessor: two would be placed on
# one while another has none (40.3; qkv so, by lanes, 38.9; down so, and not in a cluster of four, 37.8; o of 16
# sequences 46.5, so 46.1). Not all places for clusters of four of whole multiprocessors exist (o of eight: 43.7).
INT4_ALONE = {("qkv", 8): 2, ("down", 8): 2, ("o", 16): 1}
LONG_STAGES = 4  # of a ring with x of 32 sequences (8B, down in the chain: of three 59.5 us a layer, of four 58.7)
WGMMA_COPY_BLOCKS = 96  # at least, of those that write a copy
FEW_BLOCKS = 3 * _MULTIPROCESSORS
FEW_MAX_K = 4096  # to which one row tile a block was measured to be best
# Of the launch for all layers (docs/notebook/decode_layers.md, "What is served").
LAYERS_MOST_GROUP = 8  # query heads a key/value head: of more attention spills
LAYERS_LEAST_WEIGHTS = 50_000_000  # of a layer: of 44 million single kernels are 4 % faster, of 61 million 9 % slower
LAYERS_STAGED_K = 16_384  # k whose activations are in shared memory together: 32 KB
LAYERS_LEAST_SLOTS, LAYERS_MOST_SLOTS = 6, 32  # of its ring


def decode_element(op: str, precision: Precision) -> Element:
    """What the decode GEMM of a projection reads as its weight."""
    return precision.head if op == "lm_head" else precision.decode


def batch_tiles(op: str, precision: Precision) -> tuple[int, ...]:
    """The most sequences of each of a projection's decode GEMMs.

    E4M3 kernels for 16 serve fewer as well (8B, the four projections: at one sequence 62 us, of kernels for eight
    65, at eight 62 and 73). A head's were not measured.
    """
    element = decode_element(op, precision)
    if element == E4M3 and op != "lm_head":
        return E4M3_BATCH_TILES
    return INT4_BATCH_TILES if element == INT4 else BATCH_TILES


def decode_gemm_spec(
    op: str,
    n: int,
    k: int,
    batch_tile: int,
    precision: Precision,
    heads: Heads | None = None,
    vocab_size: int | None = None,
) -> DecodeGemmSpec:
    """The decode GEMM of one projection for up to ``batch_tile`` sequences; ``vocab_size`` is of lm_head, by default n.

    Up to 8 sequences see ``_few``. With more, where N is small, a cluster of two or four blocks shares at least four
    row tiles and splits K, and so reads less of x: see ``_clustered``; where N is large, see ``_wide``. A cluster that
    writes an INT4 copy has whole units of its columns: see ``_of_units``.
    """
    element, copy = decode_element(op, precision), written_copy(op, precision)

    def shaped(shape: _Shape | None) -> DecodeGemmSpec:
        if element == INT4:
            return _int4(op, n, k, batch_tile, precision, heads, shape)
        return _whole(op, n, k, batch_tile, element, heads, shape)

    spec = shaped(None)
    if copy is not None and heads is not None:
        spec = _of_units(spec, copy, copy.unit(heads.head_dim) // ROW_TILE, shaped)
    gain_in_x = precision.gain_in_x and element == INT4 and op in ("o", "down")
    padded_from = 0 if vocab_size in (None, n) else vocab_size
    return replace(
        spec,
        kv=written_kv(op, precision),
        copy=written_copy(op, precision),
        gain_in_x=gain_in_x,
        vocab_size=padded_from,
    )


def _of_units(
    plain: DecodeGemmSpec, copy: KvFormat, unit: int, shaped: Callable[[_Shape], DecodeGemmSpec]
) -> DecodeGemmSpec:
    """The shape for clusters of whole units of row tiles: that of a plain kernel if it has them.

    Else that whose blocks run all at once and, as far as the plain kernel's do, are enough for every multiprocessor;
    then that whose busiest multiprocessor is done first. Of equals few row tiles, but many of INT4, where x is most of
    the traffic. 8B: four in clusters of four up to 8 sequences and of two above, in place of one and six; INT4 eight in
    clusters of four, in place of six. Chosen by this arithmetic, not by measurement, but for INT4 of 16 sequences,
    where shapes whose lanes load x come first (8B, a layer: 60.7 us, so 57.4), and of 32 (see _warpgroups).
    """
    if plain.row_tiles % unit == 0 and plain.batch_tile % plain.split_k == 0:
        return shaped(_Shape(plain.row_tiles, plain.split_k, copy))
    int4 = plain.element == INT4
    most = {4: 12, 16: 12, 32: 12}.get(plain.batch_tile, 8) if int4 else 8 if plain.batch_tile > 8 else 4
    most = max(most, unit)
    shapes = product(range(unit, most + 1, unit), (1, 2, 4))
    tiles, steps = plain.n // ROW_TILE, plain.k // plain.step_k

    def cost(spec: DecodeGemmSpec) -> tuple[bool, bool, bool, int, int]:
        whole = spec.split_k == 4 and spec.blocks_per_sm == 1  # see _int4
        crowded = whole or spec.blocks > spec.blocks_per_sm * _MULTIPROCESSORS
        own_bytes = spec.row_tiles * spec.weight_bytes(spec.k // spec.split_k)
        busiest = -(-spec.blocks // _MULTIPROCESSORS) * (own_bytes + BLOCK_BYTES)
        too_few = spec.blocks < min(WGMMA_COPY_BLOCKS if spec.wgmma else MIN_BLOCKS, plain.blocks)
        late = int4 and plain.batch_tile == 16 and spec.x_in_ring
        return crowded, too_few, late, busiest, -spec.row_tiles if int4 else spec.row_tiles

    legal = [_Shape(rows, split, copy) for rows, split in shapes if tiles % rows == 0 and steps % split == 0]
    return min(map(shaped, legal), key=cost)


def _whole(
    op: str, n: int, k: int, batch_tile: int, element: Element, heads: Heads | None, shape: _Shape | None
) -> DecodeGemmSpec:
    """Weights that are an MMA's operand, or codes that become one, whose rows have one scale if any.

    The rules are BF16's, which were measured. Of E4M3 x is twice as large beside the weights: a block that may have
    more row tiles has those of twice as many sequences.
    """
    if batch_tile == 8:
        return _few(op, n, k, element, heads, shape)
    copy = None if shape is None else shape.copy
    tiles, split_k = n // ROW_TILE, 1
    narrow = max(r for r in (1, 2, 3) if r == 1 or (tiles % r == 0 and tiles // r >= MIN_BLOCKS))
    row_tiles = _wide(tiles, batch_tile * BF16.bits // element.bits) or narrow
    if row_tiles < MIN_ROW_TILES:
        blocks = 2 if 2 * row_tiles >= MIN_ROW_TILES else 4
        if tiles % (blocks * row_tiles) == 0 and k % (blocks * 128) == 0:
            split_k, row_tiles = blocks, blocks * row_tiles
    if shape is not None:
        row_tiles, split_k = shape[:2]
    if split_k > 1 and row_tiles * batch_tile <= LANES_SUMS:
        return _clustered(op, n, k, batch_tile, element, heads, row_tiles, split_k, copy)
    # A warp has two row tiles, whose sums fit its registers at any batch; few tiles are shared by splitting k.
    warp_rows = row_tiles // 2 if row_tiles % 2 == 0 else row_tiles
    if row_tiles <= 3 and batch_tile == 16:
        warp_rows = 1
    warps = 8 if batch_tile <= 32 else 6  # fewer leave each warp more steps of a stage
    warp_split = 1 << max(warps // warp_rows, 1).bit_length() - 1
    while shape is not None and 32 * warp_rows * warp_split * split_k < 4 * batch_tile:
        warp_split *= 2
    half = shared_share(2) - inbox_bytes(batch_tile, row_tiles, split_k)
    # 8B at 32 sequences, gate_up alone: 57.9 us; without rotation 61.0, and the next kernel at the end 62.3.
    waves = n // (ROW_TILE * row_tiles) * split_k > _MULTIPROCESSORS
    stages, stage_k = _decode_ring(k // split_k, row_tiles, warp_split, batch_tile, element.bits, half)
    spec = DecodeGemmSpec(
        op,
        element,
        n,
        k,
        batch_tile,
        row_tiles,
        warp_rows,
        warp_split,
        split_k,
        stages,
        stage_k,
        heads,
        next_at="lead" if waves else "end",
        rotate=waves,
        copy=copy,
    )
    return spec if waves or shape is not None else _deepened(spec)


def _deepened(spec: DecodeGemmSpec) -> DecodeGemmSpec:
    """More stages than leave the next kernel's block room, where all of a multiprocessor is the block's and K is long.

    8B, the four projections, of E4M3: gate_up at 32 sequences with four stages or six 75 us, with three 93; down at
    64 with six 108, with four 119. Of BF16: down at 64 with six 135, with three 145; gate_up, of a block and not a
    cluster, gains nothing, nor do qkv and o, whose slices of K are 2048, of either.
    """
    if spec.k // spec.split_k < LONG_SLICE or (spec.element == BF16 and spec.split_k == 1):
        return spec
    room = shared_share(1) - inbox_bytes(spec.batch_tile, spec.row_tiles, spec.split_k)
    return replace(spec, stages=max(spec.stages, min(DEEP_STAGES, room // (spec.stage_bytes + 16))))


def _clustered(
    op: str,
    n: int,
    k: int,
    batch_tile: int,
    element: Element,
    heads: Heads | None,
    row_tiles: int,
    split_k: int,
    copy: KvFormat | None,
) -> DecodeGemmSpec:
    """A cluster, for 9 to 32 sequences: x by lanes.

    Four warps of all row tiles load their own x, each element once, and the ring holds weights alone, which are there
    before the previous kernel is done. If all blocks run at once, the next kernel starts with this one; after qkv comes
    attention, whose blocks would take the places of the last, and it waits until a ring is left to load (8B at 32
    sequences, a layer: 1 us). Then blocks of attention start beside them, if they leave it registers (with one row of
    warps instead of two: 1.5 us). Where there is a multiprocessor for every block, a ring of more than half of one
    keeps two from sharing it while another has none, and leaves the next kernel's its place: 4 us for seven stages in
    down instead of six. Where N is large x by lanes costs more than it saves (gate_up 62.5 us, in the ring 60.3).
    """
    bits = element.bits
    warps = 4
    stage_k = COPY_BYTES * 8 // (ROW_TILE * bits)
    if bits < BF16.bits and row_tiles * batch_tile > MIN_ROW_TILES * 32:
        stage_k //= 2  # a lane's x of two stages, beside more sums than this, is more than its registers hold
    alone = n // (ROW_TILE * row_tiles) * split_k <= _MULTIPROCESSORS
    room = SM_SHARED_BYTES - 2 * BLOCK_RESERVED_BYTES - BESIDE_BYTES if alone else shared_share(2)
    fit = (room - inbox_bytes(batch_tile, row_tiles, split_k)) // (stage_k * ROW_TILE * row_tiles * bits // 8 + 16)
    stages = max(2, min(fit, -(-k // (split_k * stage_k))))
    spec = DecodeGemmSpec(
        op,
        element,
        n,
        k,
        batch_tile,
        row_tiles,
        1,
        warps,
        split_k,
        stages,
        stage_k,
        heads,
        LANES_AHEAD,
        next_at="lead" if op == "qkv" else "start",
        copy=copy,
    )
    if spec.blocks > spec.blocks_per_sm * _MULTIPROCESSORS:  # wide blocks, of which two take too many registers
        spec = replace(spec, next_at="lead")
    if op != "qkv" or spec.blocks_per_sm > 1:
        return spec
    on_scheduler = -(-(warps + 1) // SCHEDULERS)  # of a block's warps
    return replace(spec, max_registers=(SCHEDULER_REGISTERS - ATTENTION_REGISTERS) // on_scheduler // 8 * 8)


def _few(op: str, n: int, k: int, element: Element, heads: Heads | None, shape: _Shape | None) -> DecodeGemmSpec:
    """Up to 8 sequences: small blocks, of which three share a multiprocessor, so that one starts while another ends.

    One row tile where all blocks run at once and K is short: a block is then little more than its start and end, and
    more of them hide more (8B at one sequence: o 8.7 us, of two tiles 9.3; qkv 12.6 and 12.8). Else two, which read
    half as much of x (down 28.6 us, of one tile 32.1; in a block of eight sequences gate_up costs 6 us more of one).
    Where all blocks run at once the next kernel starts with this one; it would otherwise take the places of the last
    blocks, and has to wait until a ring is left to load (8B, a layer at eight sequences: 117.8 us, at once 120.0).
    """
    tiles = n // ROW_TILE
    one = tiles <= FEW_BLOCKS and k <= FEW_MAX_K
    row_tiles, split_k, copy = shape or (1 if one or tiles % 2 or tiles // 2 < MIN_BLOCKS else 2, 1, None)
    twice = row_tiles * BF16.bits // element.bits
    if shape is None and tiles % twice == 0 and tiles // twice >= MIN_BLOCKS:  # x of as many bytes beside the weights
        row_tiles = twice
    stage_k = FEW_STAGE_BYTES * 8 // (ROW_TILE * row_tiles * element.bits)
    stage_k = min(max(stage_k, FEW_STAGE_K), MAX_STAGE_K)  # of longer ones x takes more registers than there are
    ring = FEW_STAGES * FEW_STAGE_BYTES * 8 // (ROW_TILE * row_tiles * stage_k * element.bits)
    stages = max(2, min(ring, -(-k // (split_k * stage_k))))
    warps = min(8, stage_k // 32)
    x_ahead = max(1, 128 * warps // stage_k) if element == BF16 else LANES_AHEAD  # four loads a lane in BF16
    waves = tiles // row_tiles * split_k > FEW_BLOCKS  # gate_up: rotated 54.6 and 55.4 us, else 55.1 and 56.3
    next_at = "lead" if waves else "start"
    return DecodeGemmSpec(
        op,
        element,
        n,
        k,
        8,
        row_tiles,
        1,
        warps,
        split_k,
        stages,
        stage_k,
        heads,
        x_ahead,
        next_at,
        rotate=waves,
        copy=copy,
    )


def _int4(
    op: str, n: int, k: int, batch_tile: int, precision: Precision, heads: Heads | None, shape: _Shape | None
) -> DecodeGemmSpec:
    """INT4 weights: as many row tiles a block as leave no multiprocessor without one, and where they are few a cluster.

    Up to eight sequences a warp has all row tiles and a K of its own, so that it makes integers of its x once: eight
    tiles and more, of which registers hold 12 for four sequences (8B, o: 4.6 us; of four tiles 5.1, of two 5.9). A
    cluster of four needs half a multiprocessor at most: not all places for 32 of whole ones exist (qkv at 32
    sequences: 21 us, in clusters of two 10.6). x comes by lanes as long as registers hold it.
    """
    group_k = packed_group(k, precision.group_size)
    tiles, units = n // ROW_TILE, k // group_k
    row_tiles, split_k = _wide(tiles, batch_tile, 1, most=14 if batch_tile >= 32 else 8) or 1, 1
    most = {4: 12, 8: 8}.get(batch_tile, 6)
    pairs = row_tiles < MIN_ROW_TILES <= 2 * row_tiles <= most and tiles % (2 * row_tiles) == units % 2 == 0
    alone = pairs and shape is None and (op, batch_tile) in INT4_ALONE and tiles // row_tiles <= _MULTIPROCESSORS
    for blocks in () if row_tiles >= MIN_ROW_TILES else (2,) if alone else (4, 2):
        if blocks * row_tiles <= most and tiles % (blocks * row_tiles) == 0 and units % blocks == 0:
            row_tiles, split_k = blocks * row_tiles, blocks
            break
    if shape is not None:
        row_tiles, split_k = shape[:2]
    # Of units of less than 128 k lanes have several at a time, whose scales and sums spill beside x of more than eight
    # sequences.
    by_lanes = batch_tile <= 8 or (row_tiles <= {16: 6, 32: 4}.get(batch_tile, 0) and group_k >= 128)
    alone = alone and by_lanes
    long = row_tiles <= MIN_ROW_TILES and k // split_k > FEW_MAX_K
    least_stages = MIN_STAGES  # a multiprocessor to itself, before too short a ring
    if by_lanes and batch_tile == 32 and long and row_tiles % 2 == 0 and shape is None:
        # Of 32 sequences lanes hold one stage of x, which comes too late (8B, down: 19.0 us, through the ring 16.9).
        by_lanes = False
        warp_rows, warp_split = 2, 4
        least_stages = LONG_STAGES if split_k > 1 else MIN_STAGES  # 70B's, in no cluster, were not measured
        steps = max(1, MAX_STAGE_K // (warp_split * group_k))
    elif by_lanes:
        warp_rows, warp_split = 1, 8 if batch_tile == 16 and long else 4
        steps = max(1, MAX_STAGE_K // (warp_split * group_k))
    else:
        warp_rows = row_tiles // 2 if batch_tile <= 32 and row_tiles % 2 == 0 else row_tiles
        room = shared_share(1 if batch_tile > 32 or row_tiles > 8 else 2) - inbox_bytes(batch_tile, row_tiles, split_k)
        step_bytes = group_k * (ROW_TILE * row_tiles * 5 // 8 + 2 * batch_tile)  # at least, of each warp of a row
        fit = min(8 // warp_rows, units // split_k, room // (MIN_STAGES * step_bytes))
        lanes = batch_tile if shape is None else 4 * batch_tile // split_k
        least = -(-lanes // (32 * warp_rows))  # a lane for every sequence
        warp_split = max(least, 1 << max(fit, 1).bit_length() - 1)
        steps = max(1, 256 // (warp_split * group_k)) if batch_tile <= 32 or (split_k > 1 and row_tiles < 8) else 1

    def spec(stages: int, x_ahead: int) -> DecodeGemmSpec:
        return DecodeGemmSpec(
            op,
            INT4,
            n,
            k,
            batch_tile,
            row_tiles,
            warp_rows,
            warp_split,
            split_k,
            stages,
            steps * warp_split * group_k,
            heads,
            x_ahead,
            group_k=group_k,
            zero_points=precision.zero_points,
            copy=None if shape is None else shape.copy,
        )

    two = spec(2, int(by_lanes))
    of_slice = -(-k // (split_k * two.stage_k))
    inbox = inbox_bytes(batch_tile, row_tiles, split_k)
    fit = (shared_share(2) - inbox) // (two.stage_bytes + 16)
    # Of eight sequences two stages ahead take more registers than there are beside several units or zero points at a
    # time, and of an odd number of stages; where blocks are alone they gain nothing (8B, qkv: 37.5 us a layer
    # either way).
    lean = group_k >= 128 and not precision.zero_points and not alone
    ahead = 2 if batch_tile == 4 or (batch_tile == 8 and lean and of_slice % 2 == 0) else 1
    # 8B, qkv: 7.6 us, by lanes 8.1, unless blocks are alone.
    ring = not by_lanes or (batch_tile == 8 and split_k == 2 and row_tiles > MIN_ROW_TILES and not alone)
    if ring:
        stage_bytes = spec(2, 0).stage_bytes + 16
        fit, whole = ((shared_share(blocks) - inbox) // stage_bytes for blocks in (2, 1))
        fit = max(fit, min(whole, least_stages))
    chosen = spec(max(2, min(fit, MAX_STAGES, of_slice)), 0 if ring else ahead)
    if groups := _warpgroups(chosen):
        return _by_warpgroups(chosen, *groups)
    waves = chosen.blocks > chosen.blocks_per_sm * _MULTIPROCESSORS
    short = k <= ONE_IN_FLIGHT_STAGES * split_k * chosen.stage_k
    bound = INT4_RING_IN_FLIGHT.get((op, batch_tile), 0) if chosen.x_in_ring else INT4_IN_FLIGHT[batch_tile]
    in_flight = INT4_ALONE[op, batch_tile] if alone else bound and max(bound, 1 if short else 2)
    return replace(
        chosen,
        next_at="lead" if waves else "start",
        rotate=waves,
        in_flight=in_flight if in_flight < chosen.stages and not waves else 0,
        fetched=0 if waves else INT4_FETCHED.get((op, batch_tile), 0),
        alone=alone,
    )


def _warpgroups(spec: DecodeGemmSpec) -> tuple[int, int] | None:
    """Two warpgroups by row tiles or by K, where they multiply what warps would: from 32 sequences on.

    One warpgroup alone makes operands and multiplies by turns. Two share the row tiles, where a block has enough: a
    product of 64 rows takes as long as of fewer, so at most a quarter of what they multiply may be repeats (8B at 32
    and 64 sequences: gate_up of 14 row tiles 26.2 and 34.0 us, by warps 28.7 and 52.8; qkv of six 10.4 and 14.3, and
    10.7 and 16.6). Shapes that write an INT4 copy were measured in 96 blocks that run all at once (a layer: 75.2 us, by
    warps 76.4; at 64 115.6 and 120.5). A head, whose blocks come in eight waves, was not.
    Else each has all 64 rows and every other unit of K, at 64 sequences, and at 32 where lanes would load x (o: 9.8 and
    7.0 us, by warps 10.5 and 7.4; down at 64 25.4 and 28.2, but at 32, where x comes by the ring, 16.9 and 16.6).
    """
    if spec.op == "lm_head" or spec.batch_tile < 32 or spec.k % (spec.split_k * WGMMA_K) != 0:
        return None
    at_once = WGMMA_ROW_TILES * WGMMA_GROUPS
    multiplied = -(-spec.row_tiles // at_once) * at_once
    measured = spec.copy is None or WGMMA_COPY_BLOCKS <= spec.blocks <= _MULTIPROCESSORS
    if spec.x_in_ring and 4 * spec.row_tiles >= 3 * multiplied and measured:
        return WGMMA_GROUPS, 1
    pairs = spec.row_tiles == WGMMA_ROW_TILES and spec.split_k == 2 and spec.blocks <= _MULTIPROCESSORS
    if pairs and spec.copy is None and (spec.batch_tile == 64 or not spec.x_in_ring):
        return 1, WGMMA_GROUPS
    return None


def _by_warpgroups(spec: DecodeGemmSpec, rows: int, split: int) -> DecodeGemmSpec:
    """The same by ``rows`` x ``split`` warpgroups.

    If all blocks run at once, a stage of the ring is not under way, but of qkv's; and where three stages are more than
    half of a multiprocessor's shared memory, so that no other block would start beside this one, there are four if
    there is room (8B, gate_up in the chain at 32 sequences: 60.6 us a layer, of three with two under way 59.6, of four
    with three 59.3; at 64 83.5, of three with two 82.0; qkv gains nothing by either). By K five, four under way.
    """
    stages = MIN_STAGES if split == 1 else WGMMA_SPLIT_STAGES
    spec = replace(
        spec, warp_rows=rows, warp_split=split, wgmma=True, x_ahead=0, stages=stages, stage_k=WGMMA_K, next_at="start"
    )
    if spec.blocks > _MULTIPROCESSORS:
        return replace(spec, next_at="lead", rotate=True)
    if split > 1:
        return replace(spec, in_flight=stages - 1)
    if spec.op != "gate_up" and spec.copy is None:
        return spec
    room = shared_share(1) - inbox_bytes(spec.batch_tile, spec.row_tiles, spec.split_k)
    longer = spec.shared_bytes > shared_share(2) and room >= (stages + 1) * (spec.stage_bytes + 32)
    return replace(spec, stages=stages + longer, in_flight=stages + longer - 1)


def _wide(tiles: int, batch_tile: int, least: int = MIN_ROW_TILES, most: int | None = None) -> int | None:
    """Row tiles of a block where N is large: the most of those that give every multiprocessor as much as any other
    does, to a twentieth; None where N is small.

    Many tiles share x, but one thread issues a copy in about 48 ns, in which a multiprocessor takes in 1.6 KB: up to 32
    sequences, more than 8 tiles would leave copies of 2 KB.
    """
    most = most or (8 if batch_tile <= 32 else 14)
    fitting = [r for r in range(least, most + 1) if tiles % r == 0 and tiles // r >= MIN_BLOCKS]

    def busiest(row_tiles: int) -> int:
        """Row tiles of the multiprocessor that has most."""
        return -(-(tiles // row_tiles) // _MULTIPROCESSORS) * row_tiles

    evenest = min(map(busiest, fitting), default=0)
    return max((r for r in fitting if 20 * busiest(r) <= 21 * evenest), default=None)


def _decode_ring(k: int, row_tiles: int, warp_split: int, batch_tile: int, bits: int, half: int) -> tuple[int, int]:
    """Stages and their k: the longest of which three fit into half a multiprocessor, and as many as do.

    At 64 sequences a warp that has one step of a stage shows the latency of each (8B, down: 70 us, with two 40), so two
    are the least there, and the kernel may then have the multiprocessor to itself.
    """
    step_k = max(32, 256 // bits) * warp_split
    step_bytes = step_k * (ROW_TILE * row_tiles * bits + 16 * batch_tile) // 8 + 16
    least = 1 if batch_tile <= 32 else 2
    steps = max(least, min(half // (MIN_STAGES * step_bytes), MAX_STAGE_K // step_k))
    steps = 1 << steps.bit_length() - 1
    fit = min(max(half // (steps * step_bytes), MIN_STAGES), MAX_STAGES)
    return max(2, min(fit, -(-k // (steps * step_k)))), steps * step_k


def attention_decode_spec(heads: Heads, precision: Precision) -> AttentionDecodeSpec:
    """Four warps share a page of 64 tokens, sixteen each; three stages of K and V keep the memory pipe full.

    Of E4M3 four: a multiprocessor then has as many bytes on their way (192 KB of 8B), by one block more. Of INT4 as
    many as that takes in two blocks (8B at 32 x 4096: 38.3 us, of three blocks 43.0; at 8 x 1024 6.4 and 7.4; but at
    64 x 32768 649 and 619).
    The next kernel starts with it (8B, a layer: 0.4 us less at 32 sequences and 0.8 at eight, the same at one).
    """
    if precision.copy is not None:
        form = replace(precision.copy, hadamard=0)  # q is rotated when it is read
        stages = COPY_BYTES_AHEAD // (min(2, copy_blocks(heads, form)) * form.page_bytes(heads.head_dim))
        return AttentionDecodeSpec(INT4, heads, warps=4, stages=stages, early_next=True, copy=form)
    stages = 4 if precision.kv == E4M3 else 3
    return AttentionDecodeSpec(precision.kv, heads, warps=4, stages=stages, early_next=True)


def decode_layers_spec(
    heads: Heads,
    hidden_size: int,
    intermediate_size: int,
    precision: Precision,
    *,
    least_weights: int = LAYERS_LEAST_WEIGHTS,
) -> DecodeLayersSpec | None:
    """All layers of one sequence's step in one launch, where that is there and pays: from so many weights a layer on.

    INT4 weights over an INT4 copy without minima, beside main pages of BF16. More than two slots under way delay what
    blocks send one another, unless the ring is nearly empty; then it takes four (8B, one sequence, a layer: 35.8 us of
    two, so 35.5).
    """
    ks = (hidden_size, heads.q_features, intermediate_size)
    if precision.decode != INT4 or precision.copy is None or precision.kv != BF16 or precision.gain_in_x:
        return None
    groups = {packed_group(k, precision.group_size) for k in ks}
    # every block has a share of gate_up, and every head a block
    shared_out = 2 * intermediate_size // ROW_TILE >= _MULTIPROCESSORS >= heads.num_key_value_heads
    fits = shared_out and heads.group <= LAYERS_MOST_GROUP and not precision.copy.minimum
    weights = hidden_size * (heads.qkv_features + heads.q_features + 3 * intermediate_size)
    if len(groups) > 1 or not fits or weights < least_weights:
        return None
    (group,) = groups
    try:
        least = DecodeLayersSpec(
            heads=heads,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            group_k=group,
            zero_points=precision.zero_points,
            copy=precision.copy,
            blocks=_MULTIPROCESSORS,
            slots=LAYERS_LEAST_SLOTS,
            in_flight=2,
            window_k=min(-(-max(ks) // SLOT_K) * SLOT_K, LAYERS_STAGED_K),
        )
    except UnsupportedError:  # no room for a ring beside what else is in shared memory
        return None
    slots = (MAX_SHARED_BYTES - least.shared_bytes) // (least.slot_bytes + 16) + least.slots
    return replace(least, slots=min(slots, LAYERS_MOST_SLOTS))
