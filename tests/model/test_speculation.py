"""Speculation: drafts from the text itself, and the same text as without them in fewer steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from futransformer.decode_step import DecodeStep
from futransformer.driver import hopper_problem
from futransformer.generator.config import load_config
from futransformer.generator.errors import InputError
from futransformer.kv_cache import KVCache
from futransformer.model import Llama
from futransformer.reference import ReferenceOps
from futransformer.sampling import Sampling
from futransformer.speculation import PromptLookup, Speculation

REPEATS = [5, 6, 7, 8, 9, 10, 11, 12] * 9
PROMPTS = [[7, 30, 200], REPEATS, [1, 2] * 40, [250]]


def test_a_draft_is_what_came_behind_the_last_such_tokens() -> None:
    lookup = PromptLookup([1, 2, 3, 4, 9, 2, 3, 5])
    assert lookup.draft(4) == []
    lookup.extend([2, 3])
    assert lookup.draft(4) == [5, 2, 3], "the last two, where they stood last; no further than the text"
    lookup.extend([4])
    assert lookup.draft(2) == [9, 2], "three in a row before two"
    assert lookup.draft(0) == []
    same = PromptLookup([8])
    assert same.draft(3) == []
    same.extend([8, 8, 8])
    assert same.draft(3) == [8]


@pytest.fixture
def model(tiny_base_model: Path) -> Llama:
    config = load_config(tiny_base_model)
    ops = ReferenceOps(config, dtype=torch.float32)
    weights = Llama.from_pretrained(tiny_base_model, ops=ops, cache_tokens=64).weights
    cache = KVCache(config, 12, page_order=[5, 2, 7, 0, 1, 11, 6, 3, 9, 4, 8, 10], dtype=torch.float32)
    cache.pool.fill_(torch.nan)
    return Llama(config, ops, weights, cache)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each verifying step gave."""
    counts: list[int] = []
    real = Speculation._next

    def counted(self: Speculation, step: DecodeStep, most: int) -> list[int]:
        found = real(self, step, most)
        counts.append(len(found))
        return found

    monkeypatch.setattr(Speculation, "_next", counted)
    return counts


@pytest.mark.parametrize("drafts", [1, 3, 7])
@pytest.mark.parametrize("sampling", [None, Sampling(0.4, seed=3), Sampling(0.7, top_k=5, top_p=0.9, seed=9)])
def test_texts_are_those_without(model: Llama, steps: list[int], drafts: int, sampling: Sampling | None) -> None:
    """Through page boundaries, one prompt after the other, greedy and sampled; some steps give several tokens."""
    heard: list[tuple[int, int]] = []
    expected = model.generate(PROMPTS, 70, eos_token_ids=[], sampling=sampling)
    texts = model.generate(
        PROMPTS, 70, eos_token_ids=[], sampling=sampling, speculate=drafts, on_token=lambda i, t: heard.append((i, t))
    )
    assert texts == expected
    assert heard == [(index, token) for index, text in enumerate(texts) for token in text]
    assert sum(steps) >= 69 * len(PROMPTS)
    assert max(steps) <= drafts + 1
    assert model.cache.free_pages == model.cache.num_pages
    if sampling is None:
        assert max(steps) > 1, "no draft was right"


def test_a_text_ends_within_a_step(model: Llama, steps: list[int]) -> None:
    free = model.generate(PROMPTS[:2], 60, eos_token_ids=[])
    for count in range(1, 12):
        assert model.generate(PROMPTS[:2], count, eos_token_ids=[], speculate=7) == [text[:count] for text in free]
    for end in {free[0][9], free[1][20], free[1][0]}:
        assert model.generate(PROMPTS[:2], 60, eos_token_ids=[end], speculate=7) == model.generate(
            PROMPTS[:2], 60, eos_token_ids=[end]
        )


def test_the_last_slot_is_enough(model: Llama) -> None:
    """No draft asks for a page that the text will not need."""
    config, prompt = model.config, REPEATS[:70]
    small = Llama(config, model.ops, model.weights, KVCache(config, 2, dtype=torch.float32))
    count = 128 - len(prompt) + 1
    assert small.generate([prompt], count, eos_token_ids=[], speculate=7) == model.generate(
        [prompt], count, eos_token_ids=[]
    )
    with pytest.raises(InputError, match=r"need \d more pages"):
        small.generate([[1], prompt], count + 1, speculate=7)
    assert small.sequences == []


@pytest.mark.parametrize("drafts", [-1, 8])
def test_drafts_that_no_step_verifies_are_refused(model: Llama, drafts: int) -> None:
    with pytest.raises(InputError, match=f"speculate takes 1 to 7 tokens ahead, or 0 for none, not {drafts}"):
        model.generate(PROMPTS, 4, speculate=drafts)
    with pytest.raises(InputError, match="speculate cannot penalise repetition"):
        model.generate(PROMPTS, 4, speculate=2, sampling=Sampling(repetition_penalty=1.1))


@pytest.mark.gpu
@pytest.mark.model
def test_two_thousand_speculated_tokens(small_model: Path, request: pytest.FixtureRequest, steps: list[int]) -> None:
    """Greedy text of the real model, which soon repeats itself, and sampled text: the same tokens in fewer steps."""
    problem = hopper_problem()
    if problem is not None:
        pytest.skip(problem)
    exports: Path | None = request.config.getoption("--kernels")
    kernels = exports / "smollm2-135m" if exports else None
    model = Llama.from_pretrained(small_model, device="cuda", kernels=kernels, cache_tokens=8192, batch_invariant=True)
    prompt = [1, 504, 253, 9, 77]
    expected = model.generate([prompt], 2000, eos_token_ids=[])
    for drafts in (7, 3):
        steps.clear()
        assert model.generate([prompt], 2000, eos_token_ids=[], speculate=drafts) == expected
        assert len(steps) < 1800, "drafts save no steps"
    sampling = Sampling(0.5, top_p=0.9, seed=1)
    sampled = model.generate([prompt], 500, eos_token_ids=[], sampling=sampling)
    assert model.generate([prompt], 500, eos_token_ids=[], sampling=sampling, speculate=7) == sampled
