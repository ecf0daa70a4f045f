"""Tensor maps: what the driver is asked to encode, recorded by one that only looks like it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from futransformer import tma
from futransformer.generator.errors import DeviceError, InputError

driver = pytest.importorskip("cuda.bindings.driver")

OK, REFUSED = driver.CUresult.CUDA_SUCCESS, driver.CUresult.CUDA_ERROR_INVALID_VALUE


class Encoder:
    """cuTensorMapEncodeTiled without a GPU."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.status = OK

    def __call__(self, *arguments: Any) -> tuple[Any, Any]:
        self.calls.append(tuple([int(n) for n in a] if isinstance(a, list) else a for a in arguments))
        return self.status, driver.CUtensorMap()


@pytest.fixture
def encoder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Encoder]:
    encoder = Encoder()
    monkeypatch.setattr(driver, "cuTensorMapEncodeTiled", encoder)
    tma._encode.cache_clear()
    yield encoder
    tma._encode.cache_clear()  # no map of this driver's may serve another test


def matrix(rows: int, columns: int) -> Tensor:
    return torch.zeros(rows, columns, dtype=torch.bfloat16)


def codes(rows: int, columns: int) -> Tensor:
    return torch.zeros(rows, columns, dtype=torch.float8_e4m3fn)


COMMON = (
    driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
    driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
    driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,  # zeros: what a tail of K or of rows must add
)
BF16 = driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
BYTES = driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8  # TMA moves codes and does not read them


def test_a_matrix_is_described_from_its_fastest_dimension_on(encoder: Encoder) -> None:
    x = matrix(70, 192)
    tensor_map = tma.tensor_map_2d(x, 128, 64)
    ((*shape, interleave, swizzle, promotion, fill),) = encoder.calls
    assert shape == [BF16, 2, x.data_ptr(), [192, 70], [384], [64, 128], [1, 1]]
    assert swizzle == driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B
    assert (interleave, promotion, fill) == COMMON
    assert tensor_map.address == int(tensor_map.encoded.getPtr())


def test_a_matrix_of_fp8_is_one_of_bytes(encoder: Encoder) -> None:
    x = codes(70, 192)
    tma.tensor_map_2d(x, 64, 128)
    ((*shape, interleave, swizzle, promotion, fill),) = encoder.calls
    assert shape == [BYTES, 2, x.data_ptr(), [192, 70], [192], [128, 64], [1, 1]]
    assert swizzle == driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B
    assert (interleave, promotion, fill) == COMMON


def test_memory_seen_as_another_type_has_another_map(encoder: Encoder) -> None:
    x = matrix(16, 128)
    tma.tensor_map_2d(x, 16, 64)
    tma.tensor_map_2d(x.view(torch.float8_e4m3fn), 16, 128)
    assert [call[0] for call in encoder.calls] == [BF16, BYTES]


def test_groups_of_columns_lie_densely(encoder: Encoder) -> None:
    x = matrix(5, 96)
    tma.tensor_map_column_groups(x, (2, 8, 32))
    ((*shape, interleave, swizzle, promotion, fill),) = encoder.calls
    assert shape == [BF16, 3, x.data_ptr(), [32, 5, 3], [192, 64], [32, 8, 2], [1, 1, 1]]
    assert swizzle == driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_NONE
    assert (interleave, promotion, fill) == COMMON


def test_one_row_of_groups_is_told_as_two_at_its_place(encoder: Encoder) -> None:
    x = matrix(1, 96)
    tma.tensor_map_column_groups(x, (2, 8, 32))
    tma.tensor_map_column_groups(x, (2, 1, 32))
    extents, strides = [call[3] for call in encoder.calls], [call[4] for call in encoder.calls]
    assert extents == [[32, 2, 3], [32, 1, 3]]
    assert strides == [[0, 64], [192, 64]]


def test_a_map_is_encoded_once_for_an_address_shape_and_box(encoder: Encoder) -> None:
    x = matrix(16, 64)
    assert tma.tensor_map_2d(x, 16, 64) is tma.tensor_map_2d(x.view(16, 64), 16, 64)
    tma.tensor_map_2d(x, 8, 64)
    tma.tensor_map_2d(x[1:], 16, 64)
    assert len(encoder.calls) == 3


@pytest.mark.parametrize(
    ("tensor", "rows", "columns", "message"),
    [
        (matrix(4, 64).float(), 4, 64, "a contiguous 2-D bfloat16 or float8_e4m3fn tensor, not torch.float32"),
        (matrix(4, 64).view(torch.float8_e5m2), 4, 64, "a contiguous 2-D bfloat16 or float8_e4m3fn tensor"),
        (matrix(64, 4).T, 4, 64, "a contiguous 2-D bfloat16 or float8_e4m3fn tensor"),
        (matrix(4, 64)[None], 4, 64, "a contiguous 2-D bfloat16 or float8_e4m3fn tensor"),
        (matrix(4, 64), 0, 64, "a box of 0 x 64 is not 1-256 rows"),
        (matrix(4, 64), 257, 64, "a box of 257 x 64 is not 1-256 rows"),
        (matrix(4, 64), 4, 32, "a box of 4 x 32 is not 1-256 rows of 128 bytes"),
        (matrix(4, 60), 4, 64, "16-byte aligned rows"),
        (codes(4, 128), 4, 64, "a box of 4 x 64 is not 1-256 rows of 128 bytes"),
        (codes(4, 136), 4, 128, "16-byte aligned rows"),
        (matrix(1, 65)[0, 1:].view(1, 64), 1, 64, "16-byte aligned rows"),
    ],
)
def test_what_tma_cannot_copy_is_refused(
    encoder: Encoder, tensor: Tensor, rows: int, columns: int, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        tma.tensor_map_2d(tensor, rows, columns)
    assert encoder.calls == []


@pytest.mark.parametrize("box", [(2, 8, 40), (0, 8, 32), (2, 257, 32)])
def test_boxes_of_groups_that_do_not_fit(encoder: Encoder, box: tuple[int, int, int]) -> None:
    with pytest.raises(InputError, match="does not fit groups of a tensor of 96 columns"):
        tma.tensor_map_column_groups(matrix(5, 96), box)
    assert encoder.calls == []


def test_what_the_driver_refuses_is_named_and_asked_again(encoder: Encoder) -> None:
    x = matrix(16, 64)
    encoder.status = REFUSED
    with pytest.raises(
        DeviceError, match=r"CUDA_ERROR_INVALID_VALUE for \[16, 64\] with strides \[128\], box \[16, 64\]"
    ):
        tma.tensor_map_2d(x, 16, 64)
    encoder.status = OK
    tma.tensor_map_2d(x, 16, 64)
    assert len(encoder.calls) == 2
