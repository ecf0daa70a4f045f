"""The paged cache: pages given and taken back, slots and block tables against plain Python, and what does not fit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from futransformer.generator.config import CONFIGS
from futransformer.generator.errors import InputError, OutOfMemoryError
from futransformer.generator.kv_format import KvFormat
from futransformer.generator.precision import get_precision
from futransformer.kv_cache import CachedSequence, KVCache, page_bytes, pages_for, token_slots
from futransformer.memory import plan_memory

CONFIG = replace(CONFIGS["smollm2-135m"], num_hidden_layers=2)


def make_cache(num_pages: int, page_order: list[int] | None = None) -> KVCache:
    return KVCache(CONFIG, num_pages, page_order=page_order)


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (63, 1), (64, 1), (65, 2), (1024, 16)])
def test_pages_for(tokens: int, pages: int) -> None:
    assert pages_for(tokens) == pages


def test_layers_are_contiguous_parts_of_one_pool() -> None:
    cache = make_cache(3)
    parts = [part for index in range(2) for part in cache.layer(index)]
    for number, part in enumerate(parts):
        assert part.shape == (3, 3, 64, 64)
        assert part.is_contiguous()
        part.fill_(number)
    assert [sorted(set(part.flatten().tolist())) for part in parts] == [[0], [1], [2], [3]]
    assert cache.pool.nbytes == 3 * page_bytes(CONFIG, torch.bfloat16)


def test_a_copy_has_the_pages_of_the_pool() -> None:
    copy = KvFormat(minimum=True)
    cache = KVCache(CONFIG, 3, copy=copy)
    assert cache.copy is not None
    for index in range(2):
        layer = cache.copy_layer(index)
        assert layer is not None
        assert (layer.dtype, layer.shape) == (torch.uint8, (3, 3, 2 * 64 * 64 * 5 // 8))
        assert layer.is_contiguous()
    assert cache.pool.nbytes + cache.copy.nbytes == 3 * page_bytes(CONFIG, torch.bfloat16, copy)
    row = replace(get_precision("bf16"), copy=copy)
    plan = plan_memory(CONFIG, row, cache_tokens=3 * 64, rows=10)
    assert plan.kv_cache == cache.pool.nbytes + cache.copy.nbytes
    assert make_cache(3).copy_layer(0) is None


def test_sequences_grow_by_whole_pages_in_the_given_order() -> None:
    cache = make_cache(5, page_order=[3, 0, 4, 1, 2])
    first, second = CachedSequence(), CachedSequence()
    assert cache.reserve([first, second], [64, 65])
    assert (first.pages, second.pages) == ([3], [0, 4])
    assert not cache.reserve([first, second], [64, 128])
    assert cache.reserve([first], [65])
    assert first.pages == [3, 1]
    assert cache.free_pages == 1


def test_released_pages_serve_again() -> None:
    cache = make_cache(2)
    sequence = CachedSequence()
    cache.reserve([sequence], [128])
    sequence.length = 100
    cache.release([sequence])
    assert (sequence.pages, sequence.length, cache.free_pages) == ([], 0, 2)
    assert cache.reserve([CachedSequence(), CachedSequence()], [1, 1])


def test_no_page_has_two_owners() -> None:
    cache = make_cache(50, page_order=torch.randperm(50).tolist())
    sequences = [CachedSequence() for _ in range(6)]
    for step in range(1, 7):
        cache.reserve(sequences, [(index + step) * 50 for index in range(6)])
        cache.release(sequences[step % 6 : step % 6 + 1])
        pages = [page for sequence in sequences for page in sequence.pages]
        assert len(set(pages)) == len(pages) == 50 - cache.free_pages


def test_a_full_cache_refuses_with_numbers_and_changes_nothing() -> None:
    cache = make_cache(3)
    first, second = CachedSequence(), CachedSequence()
    cache.reserve([first], [64])
    with pytest.raises(
        InputError, match=r"need 3 more pages.*2 of the KV cache's 3 \(192 tokens\) are free.*cache_tokens"
    ):
        cache.reserve([first, second], [65, 128])
    assert (len(first.pages), second.pages, cache.free_pages) == (1, [], 2)
    assert cache.reserve([second], [128])


def test_a_pool_larger_than_memory_is_refused_with_numbers() -> None:
    with pytest.raises(OutOfMemoryError, match=r"1099511627776 pages.*needs \d+\.\d\d GiB on cpu.*fewer cache tokens"):
        make_cache(2**40)


def test_a_cache_of_no_pages_is_refused() -> None:
    with pytest.raises(InputError, match="at least one page"):
        make_cache(0)


def test_slots_are_those_of_plain_python() -> None:
    cache = make_cache(9, page_order=[7, 2, 5, 0, 8, 1, 3, 6, 4])
    sequences = [CachedSequence(), CachedSequence(), CachedSequence()]
    lengths = [130, 1, 64]
    cache.reserve(sequences, lengths)
    owners = [row for row, length in enumerate(lengths) for _ in range(length)]
    positions = [position for length in lengths for position in range(length)]
    slots = token_slots(cache.block_table(sequences), torch.tensor(owners), torch.tensor(positions, dtype=torch.int32))
    expected = [
        sequences[owner].pages[position // 64] * 64 + position % 64
        for owner, position in zip(owners, positions, strict=True)
    ]
    assert slots.dtype == torch.int64
    assert slots.tolist() == expected
    assert len(set(expected)) == sum(lengths)


def test_block_tables_are_ragged_int32() -> None:
    cache = make_cache(4)
    sequences = [CachedSequence(), CachedSequence(), CachedSequence()]
    cache.reserve(sequences, [129, 0, 1])
    table = cache.block_table(sequences)
    assert table.dtype == torch.int32
    assert table.is_contiguous()
    assert table.tolist() == [[0, 1, 2], [-1, -1, -1], [3, -1, -1]]
    assert cache.block_table(sequences[1:2]).shape == (1, 1)
