"""The search space of `futransformer tune`: legal, deterministic, and likely things first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from futransformer.generator.config import CONFIGS, LlamaConfig, load_config
from futransformer.generator.plan import make_plan, projections
from futransformer.generator.precision import PRECISIONS, Precision, get_precision
from futransformer.generator.search import BUCKETS, candidates
from futransformer.generator.specs import GemmSpec
from futransformer.generator.specs.base import MAX_SHARED_BYTES

CONFIG = load_config("llama-3.1-8b")
OPS = ("qkv", "o", "gate_up", "down")


def search(
    op: str, rows: int, count: int = 8, multiprocessors: int = 132, precision: str = "bf16"
) -> tuple[GemmSpec, ...]:
    n, k = projections(CONFIG)[op]
    heads = CONFIG.heads if op == "qkv" else None
    return candidates(op, get_precision(precision), n, k, heads, rows, multiprocessors, count)


@pytest.mark.parametrize("precision", PRECISIONS.values(), ids=PRECISIONS)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_every_model_has_candidates(config: LlamaConfig, precision: Precision) -> None:
    for op in OPS:
        n, k = projections(config)[op]
        heads = config.heads if op == "qkv" else None
        for numbers in BUCKETS.values():
            found = candidates(op, precision, n, k, heads, numbers[-1], 132, 8)
            assert len({spec.name for spec in found}) == len(found) == 8
            assert all((spec.n, spec.k, spec.heads) == (n, k, heads) for spec in found)
            assert all(spec.element == precision.prefill for spec in found)


def test_fp8_candidates_scale_and_sum_as_the_precision_says() -> None:
    """Promoted sums take twice the registers: the widest tiles are none then."""
    n, k = projections(CONFIG)["gate_up"]
    promoted = replace(get_precision("fp8"), weight_scales="channel", accumulation="promoted")
    found = candidates("gate_up", promoted, n, k, None, 8192, 132, 1000)
    assert {(spec.weight_scales, spec.accumulation) for spec in found} == {("channel", "promoted")}
    assert max(spec.tile.m * spec.tile.n for spec in found) < 256 * 192
    assert any((spec.tile.m, spec.tile.n) == (256, 192) for spec in search("gate_up", 8192, 1000, precision="fp8"))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_stages_fill_the_shared_memory(precision: str) -> None:
    """One more would not fit, unless there are as many as anybody uses."""
    for spec in search("o", 8192, count=200, precision=precision):
        a_stage = (spec.tile.m + spec.tile.n) * 128 + 16
        assert spec.stages == 12 or spec.shared_bytes + a_stage > MAX_SHARED_BYTES - 1024
        assert spec.stages >= 3


@pytest.mark.parametrize("op", OPS)
def test_what_was_measured_to_win_is_among_the_first(op: str) -> None:
    """On an H200, at many rows: docs/notebook/gemm.md."""
    tiles = [(spec.tile.m, spec.tile.n, spec.cluster) for spec in search(op, 8192)]
    winner = {
        "qkv": (128, 256, (2, 1, 1)),
        "o": (128, 256, (2, 1, 1)),
        "gate_up": (256, 192, (1, 2, 1)),
        "down": (256, 128, (1, 2, 1)),
    }[op]
    assert winner in tiles


@pytest.mark.parametrize("op", OPS)
def test_the_rules_choice_for_few_rows_is_among_the_first(op: str) -> None:
    planned = make_plan(CONFIG, "bf16").prefill[op][64]
    assert (planned.tile, planned.cluster) in [(spec.tile, spec.cluster) for spec in search(op, 64)]


def test_the_space_holds_every_kind() -> None:
    found = search("down", 2048, count=1000)
    assert {spec.cluster for spec in found} == {(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2)}
    assert {spec.schedule for spec in found} == {"cooperative", "pingpong"}
    assert {spec.tile.m for spec in found} == {64, 128, 192, 256}
    assert found == search("down", 2048, count=1000)


def test_another_card_has_another_order() -> None:
    assert search("o", 64, multiprocessors=132) != search("o", 64, multiprocessors=78)
