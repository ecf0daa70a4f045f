"""Perplexity: which tokens are scored, and the figure itself against transformers."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from futransformer.generator.config import load_config
from futransformer.generator.errors import InputError
from futransformer.model import Llama
from futransformer.perplexity import PerplexityResult, score, split_windows
from futransformer.reference import ReferenceOps
from futransformer.tokenizer import Tokenizer

FLOAT32_NOISE = 2e-5  # of a negative log-likelihood
TOKENS = torch.randint(256, (107,), generator=torch.Generator().manual_seed(5)).tolist()


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Llama:
    return Llama.from_pretrained(folder, ops=ReferenceOps(load_config(folder), dtype=dtype), cache_tokens=1024)


@torch.inference_mode()
def transformers_nll(folder: Path, windows: list[list[int]], dtype: torch.dtype = torch.float32) -> Tensor:
    """-log p of every token but the first of each window."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return torch.cat(
        [
            F.cross_entropy(
                model(torch.tensor([window])).logits[0, :-1].float(), torch.tensor(window[1:]), reduction="none"
            )
            for window in windows
        ]
    )


# Windows


def test_windows_are_full_and_do_not_overlap() -> None:
    assert split_windows(list(range(10)), 3) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert split_windows(list(range(9)), 3, windows=2) == [[0, 1, 2], [3, 4, 5]]
    assert split_windows(list(range(9)), 3, windows=7) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


def test_a_text_shorter_than_a_window_is_one() -> None:
    assert split_windows([5, 6], 1024) == [[5, 6]]


@pytest.mark.parametrize(
    ("tokens", "context", "windows", "message"),
    [
        ([1, 2, 3], 1, None, "a window must be at least 2 tokens, not 1"),
        ([1, 2, 3], 2, 0, "windows must be at least 1, not 0"),
        ([1], 2, None, "text has 1 tokens"),
        ([], 2, None, "text has 0 tokens"),
    ],
)
def test_nothing_to_score(tokens: list[int], context: int, windows: int | None, message: str) -> None:
    with pytest.raises(InputError, match=message):
        split_windows(tokens, context, windows)


# The figure


@pytest.mark.parametrize("through", ["prefill", "decode", "turns"])
@pytest.mark.parametrize("batch", [1, 2, 9])
def test_scores_are_those_of_transformers(tiny_model: Path, through: Any, batch: int) -> None:
    heard: list[tuple[int, int]] = []
    model = load(tiny_model)
    result = score(
        model, TOKENS, context=20, batch=batch, through=through, progress=lambda done, of, _: heard.append((done, of))
    )
    expected = transformers_nll(tiny_model, [TOKENS[start : start + 20] for start in range(0, 100, 20)])
    assert (result.windows, result.tokens_scored, result.tokens_left_out) == (5, 95, 7)
    assert (result.nll - expected).abs().max() <= FLOAT32_NOISE * expected.max()
    assert result.perplexity == pytest.approx(expected.double().mean().exp().item(), rel=1e-5)
    assert heard[-1] == (5, 5)
    assert len(heard) == -(-5 // batch)
    assert model.cache.free_pages == model.cache.num_pages


def test_a_short_text_is_scored_whole(tiny_model: Path) -> None:
    model = load(tiny_model)
    result = score(model, TOKENS, context=512)
    assert (result.windows, result.tokens_scored, result.tokens_left_out) == (1, len(TOKENS) - 1, 0)
    assert result.perplexity == pytest.approx(transformers_nll(tiny_model, [TOKENS]).mean().exp().item(), rel=1e-5)


def test_perplexity_is_exp_of_the_mean() -> None:
    assert PerplexityResult(4, 1, 0, torch.tensor([1.0, 2.0, 6.0])).perplexity == pytest.approx(20.0855, rel=1e-5)


def test_unknown_ways_are_refused(tiny_base_model: Path) -> None:
    model = load(tiny_base_model)
    with pytest.raises(InputError, match="prefill, decode, turns, not 'both'"):
        score(model, TOKENS, through="both")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="batch must be at least 1 window, not 0"):
        score(model, TOKENS, batch=0)


def test_turns_read_write_and_read_again(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = load(tiny_model), list[tuple[str, int]]()
    for name, tokens in (
        ("prefill", lambda given: len(given[0])),
        ("decode", len),
        ("extend", lambda given: len(given[0])),
    ):
        real = getattr(model, name)

        def called(given: Any, name: str = name, tokens: Any = tokens, real: Any = real, **options: Any) -> Tensor:
            calls.append((name, tokens(given)))
            logits: Tensor = real(given, **options)
            return logits

        monkeypatch.setattr(model, name, called)
    score(model, TOKENS, context=32, windows=2, batch=2, through="turns")
    assert calls == [("prefill", 16), *[("decode", 2)] * 12, ("extend", 4)]


# The real model


@pytest.mark.model
def test_the_real_model_predicts_our_page_as_transformers_does(small_model: Path) -> None:
    """BF16 rounding is noise on each token's likelihood, and next to nothing on the mean of many.

    Two-times rule: our noise may be at most twice that of transformers in BF16; the means of paired differences may
    be off by four standard errors. Through decode the same sums are added in another order, so that other values
    round: that is noise of the same size.
    """
    text = (resources.files("futransformer") / "data" / "sample.txt").read_text(encoding="utf-8")
    tokens = Tokenizer(small_model).encode(text)
    context = 128
    windows = [tokens[start : start + context] for start in range(0, 4 * context, context)]
    exact, theirs = transformers_nll(small_model, windows), transformers_nll(small_model, windows, torch.bfloat16)
    model = load(small_model, torch.bfloat16)
    prefill = score(model, tokens, context=context, windows=4, batch=4).nll
    decode = score(model, tokens, context=context, windows=4, batch=4, through="decode").nll

    noise = (theirs - exact).std()
    for difference in (prefill - exact, decode - exact, decode - prefill):
        assert difference.std() <= 2 * noise
        assert difference.mean().abs() <= 4 * difference.std() / len(exact) ** 0.5
