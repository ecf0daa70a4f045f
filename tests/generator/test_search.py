"""The search space of `futransformer tune`: legal, deterministic, and likely things first."""

from __future__ import annotations

import pytest

from futransformer.generator.config import CONFIGS, LlamaConfig, load_config
from futransformer.generator.plan import make_plan, projections
from futransformer.generator.precision import BF16
from futransformer.generator.search import BUCKETS, candidates
from futransformer.generator.specs import GemmSpec
from futransformer.generator.specs.base import MAX_SHARED_BYTES

CONFIG = load_config("llama-3.1-8b")


def search(op: str, rows: int, count: int = 8, multiprocessors: int = 132) -> tuple[GemmSpec, ...]:
    n, k = projections(CONFIG)[op]
    return candidates(op, BF16, n, k, CONFIG.heads if op == "qkv" else None, rows, multiprocessors, count)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_every_model_has_candidates(config: LlamaConfig) -> None:
    for op, (n, k) in projections(config).items():
        heads = config.heads if op == "qkv" else None
        for numbers in BUCKETS.values():
            found = candidates(op, BF16, n, k, heads, numbers[-1], 132, 8)
            assert len({spec.name for spec in found}) == len(found) == 8
            assert all((spec.n, spec.k, spec.heads) == (n, k, heads) for spec in found)


def test_stages_fill_the_shared_memory() -> None:
    """One more would not fit, unless there are as many as anybody uses."""
    for spec in search("o", 8192, count=200):
        a_stage = (spec.tile.m + spec.tile.n) * spec.tile.k * 2 + 16
        assert spec.stages == 12 or spec.shared_bytes + a_stage > MAX_SHARED_BYTES - 1024
        assert spec.stages >= 3


@pytest.mark.parametrize("op", ["qkv", "o", "gate_up", "down"])
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


@pytest.mark.parametrize("op", ["qkv", "o", "gate_up", "down"])
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
