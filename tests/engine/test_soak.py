"""Random traffic over the CPU reference, for three seconds or ``--soak-seconds``.

Run by hand for longer: pytest tests/engine/test_soak.py --soak-seconds 1200
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from futransformer import SamplingParams
from tests.engine.soak import Soak, kinds_of
from tests.engine.test_llm import load

PREFIX = "the same beginning of several prompts, longer than a page of 64 tokens: " * 2
PROMPTS = ["Hello", "a" * 70, "The quick brown fox", "x", "0123456789" * 13, PREFIX + "one", PREFIX + "two"]


def params_of(index: int, draw: random.Random, longest: int) -> SamplingParams:
    """Greedy every third; else sampled, cut and penalised in several ways."""
    return SamplingParams(
        temperature=0 if index % 3 == 0 else 0.8,
        top_k=draw.choice((-1, 20)),
        top_p=draw.choice((1, 0.9)),
        min_p=draw.choice((0, 0.05)),
        repetition_penalty=draw.choice((1, 1.2)),
        seed=draw.randrange(1000),
        max_tokens=draw.randrange(1, longest),
        ignore_eos=True,
    )


@pytest.mark.parametrize("ahead", [0, 1])
def test_soak(tiny_base_model: Path, ahead: int, request: pytest.FixtureRequest) -> None:
    """On the exact reference, whose sums are close enough in any order to give one text, evicted or not."""
    draw = random.Random(1)
    params = [params_of(index, draw, 200) for index in range(len(PROMPTS))]
    kinds = kinds_of(load(tiny_base_model, num_pages=16), PROMPTS, params)
    engine = load(tiny_base_model, num_pages=9, max_num_seqs=6, max_num_batched_tokens=100).engine
    engine._ahead = ahead
    soak = Soak(engine, kinds, at_once=12, exact_after_eviction=True)

    def seen() -> bool:
        return min(soak.ended, soak.cancelled, soak.evicted, engine.stats().prefix_hit_tokens) > 0

    soak.run(max(3.0, request.config.getoption("--soak-seconds") / 2), seen)
    assert seen(), "it tests nothing"
    print(f"\n{soak.ended} texts, {soak.cancelled} cancelled, {soak.evicted} evicted; {soak.memory[-1]}")
