"""Logical weights [N, K] -> what the GEMM kernels read, and back. docs/architecture.md, "Packed weights".

*Prefill* keeps rows of K and permutes the rows into store order: the wgmma accumulator gives lane t of a quad the
columns 8 j + 2 t + e, and the order makes those a run of consecutive output columns (SwiGLU: of gate and up pairs).

*Decode* is fragment order [N / 16, K / 16, 32 lanes, 8]: a lane's 16 bytes are the A operand of one
``mma.sync.m16n8k16``. Lane l = 4 g + t holds rows g and g + 8; MMA j of each 32 k takes k = 8 t + 4 j + {0, 1, 2, 3}
from it, so that the lane's activations for both MMAs are 16 consecutive bytes (include/futransformer/fragment.cuh).
SwiGLU's rows alternate gate, up.

Packing is a permutation (and, for lm_head, zero rows up to the padded vocabulary), so it works on any element type and
device, and unpacking is exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

from futransformer.generator.errors import InputError
from futransformer.generator.heuristics import padded_vocab
from futransformer.ops.interface import Projection

ROW_TILE = 16  # rows of an MMA's A operand
GROUP_K = 32  # two MMAs, whose k a lane holds eight of


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
    if op == "gate_up":
        rows = rows.view(2, -1, rows.shape[1]).transpose(0, 1).reshape(rows.shape)  # gate, up, gate, up, ...
    n, k = rows.shape
    # [tile, half, g, group, t, j, pair, e] -> [tile, group, j, g, t, pair, half, e]: registers (a0 a1 a2 a3)
    fragments = rows.view(n // ROW_TILE, 2, 8, k // GROUP_K, 4, 2, 2, 2).permute(0, 3, 5, 2, 4, 6, 1, 7)
    return fragments.reshape(n // ROW_TILE, k // 16, 32, 8)


def unpack_decode(op: Projection, packed: Tensor, rows: int) -> Tensor:
    """Return the logical [rows, K] of a weight in fragment order."""
    tiles, steps = packed.shape[:2]
    fragments = packed.view(tiles, steps // 2, 2, 8, 4, 2, 2, 2)
    logical = fragments.permute(0, 6, 3, 1, 4, 2, 5, 7).reshape(tiles * ROW_TILE, steps * 16)
    if op == "gate_up":
        logical = logical.view(-1, 2, steps * 16).transpose(0, 1).reshape(logical.shape)
    return logical[:rows].contiguous()


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
