"""The INT4 KV format: names, sizes, and what is refused."""

from __future__ import annotations

from itertools import product

import pytest

from futransformer.generator.errors import UnsupportedError
from futransformer.generator.kv_format import BLOCKS, DEFAULT, GROUPS, HEAD, KvFormat

EVERY = tuple(KvFormat(*fields) for fields in product(GROUPS, (False, True), BLOCKS))


def test_every_form_has_a_name_of_its_own() -> None:
    assert len({str(kv_format) for kv_format in EVERY}) == len(EVERY) == 16
    assert str(DEFAULT) == "int4-g32-h32"
    assert str(KvFormat(HEAD, minimum=True, hadamard=0)) == "int4-head-min"


@pytest.mark.parametrize(
    ("kv_format", "head_dim", "bits"),
    [
        (DEFAULT, 128, 4.5),
        (DEFAULT, 64, 4.5),
        (KvFormat(minimum=True), 128, 5),
        (KvFormat(HEAD, hadamard=64), 64, 4.25),
        (KvFormat(HEAD, hadamard=128), 128, 4.125),
    ],
)
def test_bits_of_an_element(kv_format: KvFormat, head_dim: int, bits: float) -> None:
    assert kv_format.bits(head_dim) == bits
    assert kv_format.page_bytes(head_dim) == 2 * 64 * head_dim * bits / 8
    assert kv_format.part_bytes(head_dim) % 16 == 0, "one bulk copy"


@pytest.mark.parametrize(
    ("kv_format", "units"),
    [
        (DEFAULT, {64: 64, 128: 64}),
        (KvFormat(minimum=True, hadamard=0), {64: 64, 128: 64}),
        (KvFormat(hadamard=64), {64: 64, 128: 128}),
        (KvFormat(HEAD, hadamard=0), {64: 64, 128: 128}),
    ],
)
def test_columns_that_are_finished_together(kv_format: KvFormat, units: dict[int, int]) -> None:
    assert {head_dim: kv_format.unit(head_dim) for head_dim in units} == units


def test_what_is_no_form_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="a group of INT4 K and V is 32 features or a head"):
        KvFormat(64)
    with pytest.raises(UnsupportedError, match="a Hadamard block has one of"):
        KvFormat(hadamard=16)
    with pytest.raises(UnsupportedError, match="int4-g32-h128: heads of 64 features are no whole Hadamard blocks"):
        KvFormat(hadamard=128).groups(64)
    with pytest.raises(UnsupportedError, match="heads of 96 features"):
        DEFAULT.page_bytes(96)
