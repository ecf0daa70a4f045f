"""INT4 pages: round trips, what an append writes, and operands of mma.sync as the manual has them."""

from __future__ import annotations

import random
from itertools import product

import pytest
import torch
from torch import Tensor

from futransformer.generator.kv_format import GROUPS, KvFormat
from futransformer.generator.specs import PAGE_SIZE
from futransformer.kv_packing import key_nibbles, pack_page, store_tokens, token_bytes, unpack_pages, value_nibbles
from futransformer.quantize.kv_int4 import Int4Kv, quantise_kv

FORMS = [KvFormat(group, minimum=minimum) for group, minimum in product(GROUPS, (False, True))]
HEAD_DIMS = [64, 128]


def random_kv(head_dim: int, kv_format: KvFormat, seed: int) -> Int4Kv:
    generator = torch.Generator().manual_seed(seed)
    return quantise_kv(torch.randn(PAGE_SIZE, head_dim, generator=generator), kv_format)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("kv_format", FORMS, ids=str)
def test_a_page_comes_back(kv_format: KvFormat, head_dim: int) -> None:
    keys, values = random_kv(head_dim, kv_format, 1), random_kv(head_dim, kv_format, 2)
    page = pack_page(keys, values, kv_format)
    assert page.shape == (kv_format.page_bytes(head_dim),)
    for want, read in zip((keys, values), unpack_pages(page, head_dim, kv_format), strict=True):
        assert torch.equal(read.codes, want.codes)
        assert torch.equal(read.scales, want.scales)
        assert (read.minima is None) == (want.minima is None)
        assert read.minima is None or want.minima is None or torch.equal(read.minima, want.minima)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_nibble_has_one_code(head_dim: int) -> None:
    for nibbles in (key_nibbles(head_dim), value_nibbles(head_dim)):
        assert torch.equal(nibbles.flatten().sort().values, torch.arange(PAGE_SIZE * head_dim))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_tokens_share_no_byte(head_dim: int) -> None:
    """An append writes whole words of K and whole bytes of V: no thread reads what another may be writing."""
    for nibbles, per_unit in ((key_nibbles(head_dim), 8), (value_nibbles(head_dim), 2)):
        units = nibbles // per_unit
        owners = torch.full((PAGE_SIZE * head_dim // per_unit,), -1)
        for token in range(PAGE_SIZE):
            mine = torch.unique(units[token])
            assert len(mine) == head_dim // per_unit
            assert (owners[mine] == -1).all()
            owners[mine] = token


def quantised_rows(kv: Int4Kv) -> list[Int4Kv]:
    """Each token by itself, of two heads alike."""
    parts = (kv.codes, kv.scales, kv.minima)
    split = [[None] * PAGE_SIZE if part is None else part[:, None, None].expand(-1, -1, 2, -1) for part in parts]
    return [Int4Kv(*token) for token in zip(*split, strict=True)]


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("kv_format", FORMS, ids=str)
def test_an_append_leaves_all_other_bytes(kv_format: KvFormat, head_dim: int) -> None:
    """Token after token, in any order, into pages of any content: what comes of it is the page packed at once."""
    keys, values = random_kv(head_dim, kv_format, 5), random_kv(head_dim, kv_format, 6)
    tokens = zip(*(quantised_rows(kv) for kv in (keys, values)), strict=True)
    pages = torch.randint(256, (3, 2, kv_format.page_bytes(head_dim)), dtype=torch.uint8)
    before = pages.clone()
    for token, (key, value) in random.Random(1).sample(list(enumerate(tokens)), PAGE_SIZE):
        store_tokens(pages, torch.tensor([PAGE_SIZE + token]), key, value, kv_format)
        mine = token_bytes(head_dim, kv_format)[token]
        before[1][:, mine] = pages[1][:, mine]
        assert torch.equal(pages, before)
    assert torch.equal(pages[1], pack_page(keys, values, kv_format).expand(2, -1))


def lane_words(page: Tensor, tile: int, load: int, head_dim: int) -> Tensor:
    """What each lane loads at once: int64 [32, 4]."""
    words = page.clone().view(torch.int32).long() & 0xFFFFFFFF
    return words.view(PAGE_SIZE // 16, head_dim // 64, 32, 4)[tile, load]


def halves(words: Tensor, shift: int) -> Tensor:
    """The two codes of a register: (word >> shift) & 0x000f000f, int64 [lanes, 2]."""
    return torch.stack((words >> shift & 15, words >> shift >> 16 & 15), -1)


def operand(registers: list[Tensor]) -> Tensor:
    """A [16, 16] of mma.sync.m16n8k16 from a0 .. a3 of all lanes, by the PTX manual's table."""
    a = torch.zeros(16, 16, dtype=torch.int64)
    for lane in range(32):
        g, t = lane // 4, lane % 4
        for register, (row, column) in enumerate(((g, 2 * t), (g + 8, 2 * t), (g, 2 * t + 8), (g + 8, 2 * t + 8))):
            a[row, column : column + 2] = registers[register][lane]
    return a


# what rows g and g + 8 of an operand are: tokens 2 g and 2 g + 1 of K, features of V
OF_ROW = [2 * row if row < 8 else 2 * (row - 8) + 1 for row in range(16)]


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_words_of_k_are_operands(head_dim: int) -> None:
    """Two MMAs of 32 features, sixteen each: lane t reads q's features 4 t .. 4 t + 3 of them as its operand B."""
    keys, values = random_kv(head_dim, FORMS[0], 3), random_kv(head_dim, FORMS[0], 4)
    page = pack_page(keys, values, FORMS[0])[: PAGE_SIZE * head_dim // 2]
    for tile, group in product(range(4), range(head_dim // 32)):
        words = lane_words(page, tile, group // 2, head_dim)[:, group % 2 * 2 : group % 2 * 2 + 2]
        for j in range(2):
            g, g8 = words[:, 0], words[:, 1]
            a = operand([halves(g, 8 * j), halves(g8, 8 * j), halves(g, 8 * j + 4), halves(g8, 8 * j + 4)])
            # lane t's columns 2 t, 2 t + 1, 2 t + 8, 2 t + 9 are features 16 j + 4 t + {0, 1, 2, 3}
            features = [16 * j + 4 * (c % 8 // 2) + c % 2 + c // 8 * 2 for c in range(16)]
            want = keys.codes.long()[16 * tile : 16 * tile + 16, 32 * group : 32 * group + 32]
            assert torch.equal(a, want[OF_ROW][:, features])


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_words_of_v_are_operands_in_the_order_of_p(head_dim: int) -> None:
    """O^T = V^T P: rows g and g + 8 are neighbouring features, columns the tokens that P has after movmatrix."""
    keys, values = random_kv(head_dim, FORMS[0], 3), random_kv(head_dim, FORMS[0], 4)
    part = FORMS[0].part_bytes(head_dim)
    page = pack_page(keys, values, FORMS[0])[part : part + PAGE_SIZE * head_dim // 2]
    # movmatrix makes rows of S columns of P's operand: rows 0 .. 7 the first register's, 8 .. 15 the second's
    for tile, step in product(range(4), range(head_dim // 16)):
        words = lane_words(page, tile, step // 4, head_dim)[:, step % 4]
        a = operand([halves(words, shift) for shift in (0, 4, 8, 12)])
        want = values.codes.long()[16 * tile : 16 * tile + 16, 16 * step : 16 * step + 16].T
        assert torch.equal(a, want[OF_ROW][:, OF_ROW])
