"""INT4 K and V: what codes are worth, rotations, and a float model whose V is rotated by its weights."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from futransformer.generator.config import CONFIGS
from futransformer.generator.errors import InputError
from futransformer.generator.kv_format import DEFAULT, GROUPS, HEAD, KvFormat
from futransformer.generator.specs import PAGE_SIZE
from futransformer.quantize.kv_int4 import fold_value_rotation, quantise_keys, quantise_kv, rotate
from futransformer.reference import ReferenceOps, row_sumsq

FORMS = [KvFormat(group, minimum=minimum) for group, minimum in product(GROUPS, (False, True))]


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kv_format", FORMS, ids=str)
def test_codes_are_the_nearest(kv_format: KvFormat, head_dim: int) -> None:
    """Half a step at most, but for what a rounded scale leaves beyond the last code: a value near the largest
    magnitude and of the other sign is a step off, for codes end at 7.
    """
    kv = values(5, 3, head_dim)
    stored = quantise_kv(kv, kv_format)
    groups = kv_format.groups(head_dim)
    assert (stored.codes.dtype, stored.scales.shape) == (torch.uint8, (5, 3, groups))
    assert (stored.minima is not None) == kv_format.minimum
    step = stored.scales.float().abs().repeat_interleave(head_dim // groups, -1)
    error = (stored.worth() - kv).abs()
    assert (error <= (1 + 2.0**-6) * step).all()
    inside = (stored.codes > 0) & (stored.codes < 15)
    assert (error <= (0.5 + 2.0**-6) * step)[inside].all()
    first = (stored.codes == 0).reshape(5, 3, groups, -1)
    assert first.any(-1).all(), "every group uses its first code"


def test_the_largest_magnitude_is_code_minus_eight_of_either_sign() -> None:
    kv = values(7, 64)
    kv[:, 5], kv[:, 40] = 20, -20
    stored = quantise_kv(kv, DEFAULT)
    assert (stored.codes[:, [5, 40]] == 0).all()
    assert (stored.scales[:, 0] == -2.5).all()
    assert (stored.scales[:, 1] == 2.5).all()
    torch.testing.assert_close(stored.worth()[:, [5, 40]], kv[:, [5, 40]])


@pytest.mark.parametrize("kv_format", FORMS, ids=str)
def test_one_value_throughout(kv_format: KvFormat) -> None:
    assert torch.equal(quantise_kv(torch.zeros(2, 64), kv_format).worth(), torch.zeros(2, 64))
    constant = quantise_kv(torch.full((2, 64), -1.5), kv_format).worth()
    torch.testing.assert_close(constant, torch.full((2, 64), -1.5))


@pytest.mark.parametrize("block", [1, 32, 64, 128])
def test_a_rotation_is_its_own_inverse(block: int) -> None:
    matrix = rotate(torch.eye(block), block)
    torch.testing.assert_close(matrix @ matrix, torch.eye(block), rtol=0, atol=1e-6)
    assert torch.equal(matrix, matrix.T)
    x = values(3, 256)
    torch.testing.assert_close(rotate(rotate(x, block), block), x, rtol=0, atol=1e-5)
    torch.testing.assert_close(
        (rotate(x, block) * rotate(2 * x, block)).sum(-1), (2 * x * x).sum(-1), rtol=1e-5, atol=0
    )


@pytest.mark.parametrize("block", [32, 64, 128])
def test_a_rotation_is_to_the_bit_what_kernels_do(block: int) -> None:
    """One float32 operation after another, of the lowest bit of the index first; numpy fuses and reorders none."""
    x = values(2, 128)
    want = x.numpy().copy()
    apart = 1
    while apart < block:
        for first in (i for i in range(128) if not i & apart):
            a, b = want[:, first].copy(), want[:, first + apart].copy()
            want[:, first], want[:, first + apart] = a + b, a - b
        apart *= 2
    want *= np.float32(1 / math.sqrt(block))
    assert torch.equal(rotate(x, block), torch.from_numpy(want))


@pytest.mark.parametrize("minimum", [False, True])
def test_codes_are_to_the_bit_what_kernels_do(minimum: bool) -> None:
    kv = values(64, 32) * torch.logspace(-9, 3, 64)[:, None]  # scales down to subnormal halves
    kv[0] = torch.tensor([-4.0, 4.0]).repeat(16)  # of two largest the positive one has the code -8
    kv[1, :2] = torch.tensor([-8.0, 2.5])  # a tie, to even
    stored = quantise_kv(kv.repeat(1, 2), KvFormat(minimum=minimum))
    for row, token in enumerate(kv.numpy()):
        low, high = token.min(), token.max()
        if minimum:
            least = np.float16(low)
            scale = np.float16((high - low) / np.float32(15))
            reciprocal = np.float32(0) if scale == 0 else np.float32(1) / np.float32(scale)
            codes = np.clip(np.rint((token - np.float32(least)) * reciprocal), 0, 15)
            assert stored.minima is not None
            assert float(stored.minima[row, 0]) == least
        else:
            scale = np.float16((high if high >= -low else low) * np.float32(-0.125))
            reciprocal = np.float32(0) if scale == 0 else np.float32(1) / np.float32(scale)
            codes = np.clip(np.rint(token * reciprocal), -8, 7) + 8
        assert float(stored.scales[row, 1]) == scale
        assert stored.codes[row].tolist() == [*codes, *codes]


@pytest.mark.parametrize("kv_format", FORMS, ids=str)
def test_keys_have_the_same_codes_and_a_scale_that_suits_them_better(kv_format: KvFormat) -> None:
    keys = values(200, 128)
    stored, plain = quantise_keys(keys, kv_format), quantise_kv(keys, kv_format)
    assert torch.equal(stored.codes, plain.codes)
    if kv_format.minimum:
        assert torch.equal(stored.scales, plain.scales)
        return
    groups = (200, kv_format.groups(128), -1)
    error, before = ((each.worth() - keys).reshape(groups).square().sum(-1) for each in (stored, plain))
    assert (error <= before * (1 + 2.0**-9)).all(), "float16's rounding is all that least squares may lose by"
    assert error.sum() < 0.99 * before.sum()
    assert (stored.scales.sign() == plain.scales.sign()).all()


@pytest.mark.parametrize("kv_format", [DEFAULT, KvFormat(HEAD)], ids=str)
def test_refitted_scales_are_to_the_bit_what_kernels_do(kv_format: KvFormat) -> None:
    keys = values(64, 64) * torch.logspace(-9, 3, 64)[:, None]
    stored, plain = quantise_keys(keys, kv_format), quantise_kv(keys, kv_format)
    size = 64 // kv_format.groups(64)
    codes = plain.codes.numpy().astype(np.float32) - np.float32(8)
    for row, group in product(range(64), range(64 // size)):
        lanes = np.zeros(4, np.float32)
        for first, n, lane in product(range(group * size, (group + 1) * size, 32), range(8), range(4)):
            feature = first + 16 * (n // 4) + 4 * lane + n % 4
            lanes[lane] += keys[row, feature].numpy() * codes[row, feature]
        squares = np.square(codes[row, group * size : (group + 1) * size]).sum(dtype=np.float32)
        with np.errstate(divide="ignore", invalid="ignore"):
            scale = np.float16(((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) * (np.float32(1) / squares))
        before = plain.scales[row, group].numpy()
        assert stored.scales[row, group].numpy() == (scale if before and scale else before)


@pytest.mark.parametrize("kv_format", FORMS, ids=str)
def test_no_tokens_have_no_codes(kv_format: KvFormat) -> None:
    assert quantise_keys(torch.empty(0, 2, 64), kv_format).codes.shape == (0, 2, 64)


def test_a_scale_that_cannot_be_refitted_stays() -> None:
    keys = torch.zeros(4, 64)
    keys[1, :2] = torch.tensor([-8 * 65504.0, 8 * 65504.0 - 2.0**10])  # 7 is worth less than the second: beyond float16
    keys[2, 3] = math.nan
    keys[3, 4] = 1e9
    stored, plain = (quantise(keys, DEFAULT).scales for quantise in (quantise_keys, quantise_kv))
    assert torch.equal(stored[[0, 1, 3]], plain[[0, 1, 3]])
    assert stored[1].isfinite().all()
    assert stored[2, 0].isnan()


@pytest.mark.parametrize("minimum", [False, True])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_spoils_its_own_group(value: float, minimum: bool) -> None:
    kv = values(3, 64)
    kv[1, 40] = value
    stored, plain = (quantise_kv(each, KvFormat(minimum=minimum)) for each in (kv, values(3, 64)))
    assert not stored.worth()[1, 32:].isfinite().any()
    assert stored.codes.max() <= 15
    for row, part in ((0, slice(None)), (1, slice(32)), (2, slice(None))):
        assert torch.equal(stored.worth()[row, part], plain.worth()[row, part])


def test_no_rotation_and_no_power_of_two() -> None:
    x = values(3, 64)
    assert torch.equal(rotate(x, 0), x)
    with pytest.raises(InputError, match="a power of two, not 48"):
        rotate(x, 48)


def test_a_rotation_spreads_an_outlier() -> None:
    """What rotation is for: one large channel costs the others of its group their steps."""
    k = values(100, 64)
    k[:, 7] *= 10
    plain = quantise_kv(k, DEFAULT).worth() - k
    rotated = rotate(quantise_kv(rotate(k, 32), DEFAULT).worth(), 32) - k
    assert rotated.square().mean() < 0.5 * plain.square().mean()


@pytest.mark.parametrize("block", [32, 64])
def test_a_folded_rotation_changes_no_output(block: int) -> None:
    """V comes out rotated, and what o gives is what it was."""
    config = replace(CONFIGS["smollm2-135m"], num_hidden_layers=1)
    heads, ops = config.heads, ReferenceOps(config, dtype=torch.float32)
    qkv, o = values(heads.qkv_features, config.hidden_size) / 24, values(config.hidden_size, heads.q_features) / 24
    x, rows = values(9, config.hidden_size), torch.arange(9, dtype=torch.int32)
    table = torch.stack((torch.ones(9, 32), torch.zeros(9, 32)), -1)
    results, pages = [], []
    for w_qkv, w_o in ((qkv, o), fold_value_rotation(qkv, o, heads, block)):
        k_pages, v_pages = (torch.zeros(1, 3, PAGE_SIZE, 64) for _ in range(2))
        q = ops.qkv("prefill", x, row_sumsq(x), w_qkv, table, rows, rows.long(), k_pages, v_pages)
        offsets, lengths = (torch.tensor(t, dtype=torch.int32) for t in ([0, 9], [9]))
        block_table = torch.zeros(1, 1, dtype=torch.int32)
        attended = ops.attention_prefill(q, k_pages, v_pages, block_table, offsets, lengths, max_seqlen_q=9)
        results.append(ops.o("prefill", attended, w_o, torch.zeros(9, config.hidden_size)).x)
        pages.append((k_pages, v_pages))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=1e-4 * float(results[0].abs().max()))
    assert torch.equal(pages[1][0], pages[0][0])
    torch.testing.assert_close(pages[1][1], rotate(pages[0][1], block), rtol=0, atol=1e-4)


def test_a_head_as_a_group_has_one_scale() -> None:
    assert quantise_kv(values(4, 128), KvFormat(HEAD)).scales.shape == (4, 1)
