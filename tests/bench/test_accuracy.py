"""The accuracy subject: what it compares and counts, on the reference in the place of the kernels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from futransformer.bench import accuracy
from futransformer.generator.config import load_config
from futransformer.model import Llama
from futransformer.perplexity import score
from futransformer.reference import ReferenceOps

CONTEXT, NEW_TOKENS = 8, 4
TOKENS: list[int] = torch.randint(256, (33 * CONTEXT + 3,), generator=torch.Generator().manual_seed(3)).tolist()
PROMPTS = [[1, 2, 3], [7], [5, 4, 3, 2, 1]]


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy, "CONTEXT", CONTEXT)
    monkeypatch.setattr(accuracy, "NEW_TOKENS", NEW_TOKENS)


def load(folder: Path, dtype: torch.dtype) -> Llama:
    ops = ReferenceOps(load_config(folder), dtype=dtype)
    return Llama.from_pretrained(folder, ops=ops, cache_tokens=64 * 64)


def test_pieces_of_a_text_are_spread_over_all_of_it() -> None:
    pieces = accuracy.text_prompts(list(range(6438)))
    assert [piece[0] for piece in pieces] == [100 * index for index in range(64)]
    assert {len(piece) for piece in pieces} == set(range(32, 39))
    assert all(piece == list(range(piece[0], piece[-1] + 1)) for piece in pieces)


@pytest.fixture
def rounding(tiny_base_model: Path) -> Llama:
    return load(tiny_base_model, torch.bfloat16)


@pytest.fixture
def exact(tiny_base_model: Path) -> Llama:
    return load(tiny_base_model, torch.float32)


def test_each_row_compares_the_same_windows(rounding: Llama, exact: Llama) -> None:
    rows = accuracy.perplexity_rows(exact, rounding, exact, TOKENS, "tiny")
    assert rows[0]["case"] == f"perplexity/tiny/bf16/through=prefill/ctx={CONTEXT}/windows=33"
    counts = [(33, 8), (33, 64), (16, 1), (16, 4), (16, 8), (32, 32)]
    decode = f"perplexity/tiny/bf16/through=decode/ctx={CONTEXT}"
    assert [row["case"] for row in rows[1:]] == [f"{decode}/windows={count}/B={batch}" for count, batch in counts]
    for row, (windows, _) in zip(rows, [(33, 0), *counts], strict=True):
        own = score(exact, TOKENS, context=CONTEXT, windows=windows)
        assert row["tokens"] == windows * (CONTEXT - 1)
        assert row["ours"] == pytest.approx(own.perplexity, rel=1e-4)

    # ours is the exact reference here: nothing is rounded, so its two ways agree, and only BF16 stands off
    assert abs(rows[0]["nll_minus_reference-float32"]["mean"]) == 0
    for row in rows[1:]:
        assert row["rivals"]["prefill"] == pytest.approx(row["ours"], rel=1e-4)
        assert row["nll_minus_prefill"]["deviation"] < 1e-3
    four = score(exact, TOKENS, context=CONTEXT, windows=4).perplexity
    for row in rows[3:]:
        assert row["first_four_windows"] == {name: pytest.approx(four, rel=1e-4) for name in ("ours", "prefill")}
    floor, off = rows[0]["noise_floor_reference_minus_float32"], rows[0]["nll_minus_reference"]
    assert off["mean"] == pytest.approx(-floor["mean"])
    assert off["deviation"] == pytest.approx(floor["deviation"])
    assert off["deviation"] > 1e-3


@pytest.mark.parametrize("batch", [1, 3])
def test_a_model_agrees_with_itself(rounding: Llama, tiny_base_model: Path, batch: int) -> None:
    same = (load(tiny_base_model, torch.bfloat16) for _ in range(2))
    row = accuracy.agreement_row(next(same), rounding, next(same), PROMPTS, batch, "tiny")
    assert row["differing_from_float32"] == {"ours": 0, "reference": 0}
    assert row["case"] == f"generate/tiny/bf16/prompts=3/new={NEW_TOKENS}/B={batch}"
    assert (row["ours"], row["differing_outside_near_ties"], row["identical_free_texts"]) == (0, 0, "3 of 3")
    assert row["unit"].startswith(f"differing argmax of {3 * NEW_TOKENS}, ")


@pytest.mark.parametrize("batch", [1, 3])
def test_every_difference_is_counted_and_near_ties_apart(
    rounding: Llama, exact: Llama, tiny_base_model: Path, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model whose logits are another's, moved by one token, never agrees with it."""
    moved = load(tiny_base_model, torch.bfloat16)
    head = {phase: weight.roll(1, 0) for phase, weight in moved.weights.lm_head.items()}
    moved.weights = replace(moved.weights, lm_head=head)
    row = accuracy.agreement_row(moved, rounding, exact, PROMPTS, batch, "tiny")
    assert (row["ours"], row["identical_free_texts"]) == (3 * NEW_TOKENS, "0 of 3")
    same = load(tiny_base_model, torch.bfloat16)
    from_moved = accuracy.agreement_row(same, rounding, moved, PROMPTS, batch, "tiny")["differing_from_float32"]
    assert from_moved == {"ours": 3 * NEW_TOKENS, "reference": 3 * NEW_TOKENS}
    from_same = accuracy.agreement_row(moved, rounding, same, PROMPTS, batch, "tiny")["differing_from_float32"]
    assert from_same == {"ours": 3 * NEW_TOKENS, "reference": 0}
    ties = 0
    for prompt, text in zip(PROMPTS, rounding.generate(PROMPTS, NEW_TOKENS, eos_token_ids=[]), strict=True):
        for step in range(NEW_TOKENS):
            first, second = rounding.prefill([prompt + text[:step]])[0].sort(descending=True).values[:2].tolist()
            ties += first - second < abs(first) / 128
    assert row["differing_outside_near_ties"] == 3 * NEW_TOKENS - ties

    # a tie is the reference's, whose choice is its text
    asked: list[int] = []

    def always(logits: Tensor) -> bool:
        asked.append(int(logits.argmax()))
        return True

    monkeypatch.setattr(accuracy, "near_tie", always)
    assert accuracy.agreement_row(moved, rounding, exact, PROMPTS, batch, "tiny")["differing_outside_near_ties"] == 0
    texts = rounding.generate(PROMPTS, NEW_TOKENS, eos_token_ids=[])
    assert sorted(asked) == sorted(token for text in texts for token in text)


def test_a_near_tie_is_relative_to_the_largest() -> None:
    assert accuracy.near_tie(torch.tensor([1.0, 128.0, 127.5]))
    assert not accuracy.near_tie(torch.tensor([1.0, 128.0, 127.0]))
    assert not accuracy.near_tie(torch.tensor([-128.0, -129.0]))
    assert accuracy.near_tie(torch.tensor([-128.0, -128.5]))
