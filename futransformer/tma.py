"""TMA tensor maps of 2-D BF16 and FP8 tensors: zero fill outside, 128-byte swizzle where matrices are loaded.

Source: CUDA driver API, cuTensorMapEncodeTiled. A map depends on the address, the extents and the box alone, so it is
memoised; a tensor that moves gets another map.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from futransformer.generator.errors import DeviceError, InputError

SWIZZLE_BYTES = 128
MAX_BOX = 256  # elements along one dimension
ELEMENT_BYTES = {torch.bfloat16: 2, torch.float8_e4m3fn: 1}


@dataclass(frozen=True)
class TensorMap:
    """An encoded CUtensorMap and the host address of its 128 bytes."""

    encoded: Any  # cuda.bindings.driver.CUtensorMap, kept alive
    address: int


def tensor_map_2d(tensor: Tensor, box_rows: int, box_columns: int) -> TensorMap:
    """Describe ``tensor`` [rows, columns], contiguous, for swizzled copies of box_rows x box_columns elements."""
    rows, columns, width = _extents(tensor)
    if box_columns * width != SWIZZLE_BYTES or not 1 <= box_rows <= MAX_BOX:
        raise InputError(f"a box of {box_rows} x {box_columns} is not 1-{MAX_BOX} rows of {SWIZZLE_BYTES} bytes")
    return _encode(
        tensor.data_ptr(), width, (rows, columns), (columns * width,), (box_rows, box_columns), swizzled=True
    )


def tensor_map_column_groups(tensor: Tensor, box: tuple[int, int, int]) -> TensorMap:
    """Describe ``tensor`` [rows, columns] as [groups, rows, columns of a group], for dense copies of a ``box``.

    A single row is told as two at one place, for boxes of more: alone it comes slower (8B, gate_up of E4M3 for up to 16
    sequences, at one: 38.6 us, told as two 29.9).
    """
    rows, columns, width = _extents(tensor)
    group = box[2]
    if columns % group or any(not 1 <= extent <= MAX_BOX for extent in box):
        raise InputError(f"a box of {list(box)} does not fit groups of a tensor of {columns} columns")
    twice = rows == 1 and box[1] > 1
    strides = (group * width, 0 if twice else columns * width)
    extents = (columns // group, 2 if twice else rows, group)
    return _encode(tensor.data_ptr(), width, extents, strides, box, swizzled=False)


def _extents(tensor: Tensor) -> tuple[int, int, int]:
    """Rows, columns, and the bytes of an element."""
    if tensor.dim() != 2 or tensor.dtype not in ELEMENT_BYTES or not tensor.is_contiguous():
        raise InputError(
            f"a tensor map needs a contiguous 2-D bfloat16 or float8_e4m3fn tensor, not {tensor.dtype} "
            f"{list(tensor.shape)}"
        )
    rows, columns = tensor.shape
    return rows, columns, ELEMENT_BYTES[tensor.dtype]


@lru_cache(maxsize=8192)
def _encode(
    address: int,
    width: int,
    extents: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    *,
    swizzled: bool,
) -> TensorMap:
    """Encode a map of elements of ``width`` bytes; extents and box from the slowest dimension on, strides in bytes of
    all but the last.
    """
    from cuda.bindings import driver  # noqa: PLC0415

    if any(offset % 16 for offset in (address, *strides)):
        raise InputError(f"TMA needs 16-byte aligned rows: address {address:#x}, strides of {list(strides)} bytes")
    swizzle, types = driver.CUtensorMapSwizzle, driver.CUtensorMapDataType
    status, encoded = driver.cuTensorMapEncodeTiled(
        types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 if width == 2 else types.CU_TENSOR_MAP_DATA_TYPE_UINT8,
        len(extents),
        address,
        [driver.cuuint64_t(extent) for extent in reversed(extents)],
        [driver.cuuint64_t(stride) for stride in reversed(strides)],
        [driver.cuuint32_t(extent) for extent in reversed(box)],
        [driver.cuuint32_t(1)] * len(extents),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        swizzle.CU_TENSOR_MAP_SWIZZLE_128B if swizzled else swizzle.CU_TENSOR_MAP_SWIZZLE_NONE,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if status != driver.CUresult.CUDA_SUCCESS:
        raise DeviceError(
            f"cuTensorMapEncodeTiled: {status.name} for {list(extents)} with strides {list(strides)}, box {list(box)}"
        )
    return TensorMap(encoded, int(encoded.getPtr()))
