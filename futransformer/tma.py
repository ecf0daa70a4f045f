"""TMA tensor maps of two-dimensional BF16 tensors: 128-byte swizzle, zero fill outside.

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


@dataclass(frozen=True)
class TensorMap:
    """An encoded CUtensorMap and the host address of its 128 bytes."""

    encoded: Any  # cuda.bindings.driver.CUtensorMap, kept alive
    address: int


def tensor_map_2d(tensor: Tensor, box_rows: int, box_columns: int) -> TensorMap:
    """Describe ``tensor`` [rows, columns] (BF16, contiguous) for copies of box_rows x box_columns elements."""
    if tensor.dim() != 2 or tensor.dtype != torch.bfloat16 or not tensor.is_contiguous():
        raise InputError(
            f"a tensor map needs a contiguous 2-D bfloat16 tensor, not {tensor.dtype} {list(tensor.shape)}"
        )
    rows, columns = tensor.shape
    return _encode(tensor.data_ptr(), rows, columns, box_rows, box_columns)


@lru_cache(maxsize=8192)
def _encode(address: int, rows: int, columns: int, box_rows: int, box_columns: int) -> TensorMap:
    from cuda.bindings import driver  # noqa: PLC0415

    element_bytes = 2
    if box_columns * element_bytes != SWIZZLE_BYTES or not 1 <= box_rows <= 256:
        raise InputError(f"a box of {box_rows} x {box_columns} is not 1-256 rows of {SWIZZLE_BYTES} bytes")
    if address % 16 or columns * element_bytes % 16:
        raise InputError(
            f"TMA needs 16-byte aligned rows: address {address:#x}, row of {columns * element_bytes} bytes"
        )
    size, stride = driver.cuuint64_t, columns * element_bytes
    status, encoded = driver.cuTensorMapEncodeTiled(
        driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        2,
        address,
        [size(columns), size(rows)],
        [size(stride)],
        [driver.cuuint32_t(box_columns), driver.cuuint32_t(box_rows)],
        [driver.cuuint32_t(1), driver.cuuint32_t(1)],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if status != driver.CUresult.CUDA_SUCCESS:
        raise DeviceError(
            f"cuTensorMapEncodeTiled: {status.name} for [{rows}, {columns}], box {box_rows} x {box_columns}"
        )
    return TensorMap(encoded, int(encoded.getPtr()))
