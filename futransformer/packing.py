"""Logical weights [N, K] -> what the GEMM kernels read, and back. docs/architecture.md, "Packed weights".

*Prefill* keeps rows of K and permutes the rows into store order: the wgmma accumulator gives lane t of a quad the
columns 8 j + 2 t + e, and the order makes those a run of consecutive output columns (SwiGLU: of gate and up pairs).

*Decode* is fragment order [N / 16, K / 16, 32 lanes, 8]: a lane's 16 bytes are the A operand of one
``mma.sync.m16n8k16``. Lane l = 4 g + t holds rows g and g + 8; MMA j of each 32 k takes k = 8 t + 4 j + {0, 1, 2, 3}
from it, so that the lane's activations for both MMAs are 16 consecutive bytes (include/futransformer/fragment.cuh).
SwiGLU's rows alternate gate, up.

*E4M3* is uint8 [N (K + 4)]: codes in the same order [N / 16, K / 32, 32 lanes, 16 bytes], and behind all of them
float32 [N], what a code of each row is worth. A lane's words are rows g and g + 8 of MMA 0, then of MMA 1; the bits of
a word's four codes are mixed (``_MIXED``), so that few operations make operands of them.

*INT4* has the same rows and the same k, in units of 16 rows x one packed group of K that hold their own scales and
zero points (generator/int4.py): uint8 [N / 16, K / group, unit bytes]. A 32-bit word holds k = 8 t .. 8 t + 7 of a row
and 32 k: nibble i the k 2 i, nibble i + 4 the k 2 i + 1, so that a shift by 4 i leaves a pair in the low nibbles of its
halves. A lane's words are rows g and g + 8 of one 32 k, then of the next; 32 lanes x 16 bytes are 64 k. Then come 16
scales and 16 zero points, of rows g, g + 8 for g = 0 .. 7.

Packing is a permutation (and, for lm_head, zero rows up to the padded vocabulary), so it works on any element type and
device, and unpacking is exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

from futransformer.generator.errors import InputError
from futransformer.generator.heuristics import padded_vocab
from futransformer.generator.int4 import ROW_TILE, packed_group, unit_bytes
from futransformer.generator.packed import SCALE_BYTES
from futransformer.generator.precision import CHANNEL
from futransformer.ops.interface import Projection
from futransformer.quantize.fp8 import Fp8Weight
from futransformer.quantize.int4 import Int4Weight

GROUP_K = 32  # two MMAs, whose k a lane holds eight of

# Of the two E4M3 codes in half a word, of k e and k 2 + e of a lane's four: which, which of its bits, and how far up.
_MIXED = ((0, 0x80, 8), (0, 0x7F, 4), (1, 0x80, 4), (1, 0x70, 8), (1, 0x0F, 0))


def pack_prefill(op: Projection, logical: Tensor) -> Tensor:
    """Store order [N padded, K]; packed row 8 j + 2 t + e of a group holds the row that lane t stores there."""
    rows = _padded(op, logical, row_multiple=64 if op == "gate_up" else 32, column_multiple=8)
    k = rows.shape[1]
    if op == "gate_up":
        return rows.view(2, -1, 4, 8, k).permute(1, 3, 2, 0, 4).reshape(-1, k)
    return rows.view(-1, 4, 4, 2, k).transpose(1, 2).reshape(-1, k)


def unpack_prefill(op: Projection, packed: Tensor, rows: int) -> Tensor:
    """Return the logical [rows, K] of a weight in store order."""
    k = packed.shape[1]
    if op == "gate_up":
        logical = packed.view(-1, 8, 4, 2, k).permute(3, 0, 2, 1, 4)
    else:
        logical = packed.view(-1, 4, 4, 2, k).transpose(1, 2)
    return logical.reshape(-1, k)[:rows].contiguous()


def pack_scale(op: Projection, logical: Tensor) -> Tensor:
    """Scales of an FP8 weight, [1] or [N] for its rows, in the order of the epilogue's columns: gate, up, gate, ..."""
    if op == "gate_up" and logical.numel() > 1:
        return logical.view(2, -1).T.reshape(-1)
    return logical.contiguous()


def pack_decode(op: Projection, logical: Tensor) -> Tensor:
    """Fragment order [N padded / 16, K / 16, 32, 8]."""
    rows = _padded(op, logical, row_multiple=ROW_TILE, column_multiple=GROUP_K)
    rows = _paired(op, rows)
    n, k = rows.shape
    # [tile, half, g, group, t, j, pair, e] -> [tile, group, j, g, t, pair, half, e]: registers (a0 a1 a2 a3)
    fragments = rows.view(n // ROW_TILE, 2, 8, k // GROUP_K, 4, 2, 2, 2).permute(0, 3, 5, 2, 4, 6, 1, 7)
    return fragments.reshape(n // ROW_TILE, k // 16, 32, 8)


def unpack_decode(op: Projection, packed: Tensor, rows: int) -> Tensor:
    """Return the logical [rows, K] of a weight in fragment order."""
    tiles, steps = packed.shape[:2]
    fragments = packed.view(tiles, steps // 2, 2, 8, 4, 2, 2, 2)
    logical = fragments.permute(0, 6, 3, 1, 4, 2, 5, 7).reshape(tiles * ROW_TILE, steps * 16)
    return _unpaired(op, logical)[:rows].contiguous()


def pack_e4m3(op: Projection, weight: Fp8Weight) -> Tensor:
    """E4M3 fragment order and scales, uint8 [N padded (K + 4)]; ``weight`` has a scale a row."""
    if weight.codes.dtype != torch.float8_e4m3fn or weight.scale.shape != weight.codes.shape[:1]:
        raise InputError(
            f"{op}: FP8 weights of decode are torch.float8_e4m3fn [N, K] with a scale a row [N], not "
            f'{weight.codes.dtype} {list(weight.codes.shape)} with {list(weight.scale.shape)}; quantise with "channel"'
        )
    rows = _padded(op, weight.codes.view(torch.uint8), row_multiple=ROW_TILE, column_multiple=GROUP_K)
    codes = _paired(op, rows).short()
    scales = _paired(op, _padded(op, weight.scale.float()[:, None], row_multiple=ROW_TILE, column_multiple=1))
    n, k = codes.shape
    # [tile, half, g, group, t, j, pair, e] -> [tile, group, g, t, j, half, e, pair]: the two codes of half a word last
    pairs = codes.view(n // ROW_TILE, 2, 8, k // GROUP_K, 4, 2, 2, 2).permute(0, 3, 2, 4, 5, 1, 7, 6)
    words = torch.zeros_like(pairs[..., 0])
    for pair, bits, up in _MIXED:
        words |= (pairs[..., pair] & bits) << up
    return torch.cat([part.contiguous().view(torch.uint8).flatten() for part in (words, scales)])


def unpack_e4m3(op: Projection, packed: Tensor, rows: int) -> Fp8Weight:
    """Return the logical weight of ``rows`` rows from E4M3 fragment order."""
    n = padded_vocab(rows) if op == "lm_head" else rows
    k = packed.numel() // n - SCALE_BYTES
    words = packed[: n * k].view(torch.int16).view(n // ROW_TILE, k // GROUP_K, 8, 4, 2, 2, 2)
    pairs = torch.zeros(*words.shape, 2, dtype=torch.int16, device=packed.device)
    for pair, bits, up in _MIXED:
        pairs[..., pair] |= words >> up & bits
    codes = pairs.permute(0, 5, 2, 1, 3, 4, 7, 6).reshape(n, k).to(torch.uint8)
    scales = packed[n * k :].view(torch.float32)[:, None]
    return Fp8Weight(
        _unpaired(op, codes)[:rows].contiguous().view(torch.float8_e4m3fn), _unpaired(op, scales)[:rows, 0].contiguous()
    )


def pack_int4(op: Projection, weight: Int4Weight) -> Tensor:
    """INT4 fragment order, uint8 [N padded / 16, K / packed group, unit bytes]."""
    codes = _paired(op, _padded(op, weight.codes, row_multiple=ROW_TILE, column_multiple=GROUP_K))
    n, k = codes.shape
    group = packed_group(k, weight.group_size)
    tiles, units, pairs = n // ROW_TILE, k // group, -(-group // 64)
    # k is [unit, 64, 32, t, i, low, e], and a unit's bytes [64, g, t, 32, half, e, i, low]: low is a nibble of a byte
    nibbles = codes.view(tiles, 2, 8, units, pairs, -1, 4, 2, 2, 2).permute(0, 3, 4, 2, 6, 5, 1, 9, 7, 8)
    words = (nibbles[..., 0] | nibbles[..., 1] << 4).reshape(tiles, units, -1)

    def of_units(groups: Tensor) -> Tensor:
        """Values of logical groups [N, G] -> [tile, unit, g, half]."""
        rows = _paired(op, _padded(op, groups, row_multiple=ROW_TILE, column_multiple=1))
        first_k = torch.arange(0, k, group, device=rows.device)
        return rows[:, first_k // weight.row_group].view(tiles, 2, 8, units).permute(0, 3, 2, 1)

    parts = [words, of_units(weight.scales).contiguous().view(torch.uint8).view(tiles, units, -1)]
    if weight.zeros is not None:
        parts.append(of_units(weight.zeros).reshape(tiles, units, -1))
    packed = torch.cat(parts, 2)
    assert packed.shape[2] == unit_bytes(group, weight.zeros is not None)
    return packed


def unpack_int4(op: Projection, packed: Tensor, rows: int, group_size: int) -> Int4Weight:
    """Return the logical weight of ``rows`` rows, whose groups had this size, from INT4 fragment order."""
    tiles, units, size = packed.shape
    zero_points = size % (2 * ROW_TILE) > 0
    group = (size - unit_bytes(0, zero_points)) * 2 // ROW_TILE
    k = units * group
    words, scales, zeros = torch.split(packed, [group * ROW_TILE // 2, 2 * ROW_TILE, ROW_TILE * zero_points], 2)
    nibbles = torch.stack((words & 15, words >> 4), -1).view(tiles, units, -(-group // 64), 8, 4, -1, 2, 2, 2, 2)
    codes = nibbles.permute(0, 6, 3, 1, 2, 5, 4, 8, 9, 7).reshape(tiles * ROW_TILE, k)

    def of_groups(of_units: Tensor) -> Tensor:
        """[tile, unit, g, half] -> logical groups [N, G], from the first unit of each."""
        natural = of_units.reshape(tiles, units, 8, 2).permute(0, 3, 2, 1).reshape(-1, units)
        return _unpaired(op, natural)[:rows, :: row_group // group].contiguous()

    row_group = k if group_size == CHANNEL else group_size
    return Int4Weight(
        _unpaired(op, codes)[:rows].contiguous(),
        of_groups(scales.contiguous().view(torch.float16)),
        of_groups(zeros) if zero_points else None,
        group_size,
    )


def _paired(op: Projection, rows: Tensor) -> Tensor:
    """Rows as decode kernels order them: of gate_up gate, up, gate, up, ..."""
    return rows.view(2, -1, rows.shape[1]).transpose(0, 1).reshape(rows.shape) if op == "gate_up" else rows


def _unpaired(op: Projection, rows: Tensor) -> Tensor:
    """The inverse of ``_paired``."""
    return rows.view(-1, 2, rows.shape[1]).transpose(0, 1).reshape(rows.shape) if op == "gate_up" else rows


def _padded(op: Projection, logical: Tensor, *, row_multiple: int, column_multiple: int) -> Tensor:
    """Check the shape, and add the vocabulary's padding rows."""
    if logical.dim() != 2:
        raise InputError(f"{op}: a weight to pack must be [out_features, in_features], not {list(logical.shape)}")
    n, k = logical.shape
    rows = padded_vocab(n) if op == "lm_head" else n
    if rows == 0 or rows % row_multiple or k == 0 or k % column_multiple:
        raise InputError(
            f"{op}: cannot pack a weight of shape [{n}, {k}]: out_features must be a positive multiple of "
            f"{row_multiple} and in_features of {column_multiple}; pad the weight with zeros"
        )
    if rows == n:
        return logical.contiguous()
    return torch.cat([logical, logical.new_zeros(rows - n, k)])
