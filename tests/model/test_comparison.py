"""A model beside another: paired likelihoods, KL divergence and agreement, against what transformers' logits give."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from futransformer.comparison import Comparison, compare, mean_over
from futransformer.generator.config import load_config
from futransformer.generator.errors import CheckpointError, InputError
from futransformer.model import Llama
from futransformer.perplexity import PerplexityResult, score
from futransformer.reference import ReferenceOps
from tests.conftest import make_tiny_model

TOKENS = torch.randint(256, (70,), generator=torch.Generator().manual_seed(5)).tolist()
CONTEXT, WINDOWS = 20, 3


def load(folder: Path) -> Llama:
    ops = ReferenceOps(load_config(folder), dtype=torch.float32)
    return Llama.from_pretrained(folder, ops=ops, cache_tokens=1024)


@pytest.fixture(scope="module")
def noisy_model(tiny_base_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model, whose matrices are off by a tenth of their size."""
    folder = make_tiny_model(tmp_path_factory.mktemp("models") / "noisy", tied=False, chat_template=None)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name:
                weight.add_(torch.randn(weight.shape, generator=generator) * weight.std() / 10)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


@torch.inference_mode()
def log_probabilities(folder: Path) -> Tensor:
    """[tokens scored, vocabulary], float64."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    windows = torch.tensor(TOKENS[: CONTEXT * WINDOWS]).view(WINDOWS, CONTEXT)
    logits: Tensor = model(windows).logits[:, :-1].flatten(0, 1)
    return logits.double().log_softmax(1)


@pytest.mark.parametrize("through", ["prefill", "decode", "turns"])
@pytest.mark.parametrize("batch", [1, 2])
def test_figures_are_those_of_transformers_logits(
    tiny_base_model: Path, noisy_model: Path, through: Any, batch: int
) -> None:
    """Our float32 logits differ from theirs by 2e-5 of the largest, which is below 10: KL sums over what that moves."""
    heard: list[int] = []
    model, baseline = load(noisy_model), load(tiny_base_model)
    options: dict[str, Any] = {"context": CONTEXT, "batch": batch, "through": through}
    found = compare(model, baseline, TOKENS, progress=lambda done, *_: heard.append(done), **options)
    q, p = log_probabilities(noisy_model), log_probabilities(tiny_base_model)
    expected = (p.exp() * (p - q)).sum(1)
    assert expected.mean() > 0.01
    assert (found.kl - expected).abs().max() <= 4e-4 * expected.max()
    assert torch.equal(found.same_top, q.argmax(1) == p.argmax(1))
    assert 0 < found.same_top.float().mean() < 1
    for result, of in ((found.result, model), (found.baseline, baseline)):
        alone = score(of, TOKENS, **options)
        assert (result.windows, result.tokens_left_out) == (alone.windows, alone.tokens_left_out) == (WINDOWS, 10)
        assert torch.equal(result.nll, alone.nll)
        assert of.cache.free_pages == of.cache.num_pages
    assert heard[-1] == WINDOWS


def test_a_model_beside_itself_loses_nothing(tiny_base_model: Path) -> None:
    found = compare(load(tiny_base_model), load(tiny_base_model), TOKENS, context=CONTEXT)
    figures = found.figures()
    assert figures["percent_over_baseline"] == 0
    assert figures["nll_difference"] == figures["kl_divergence"] == {"mean": 0, "standard_error": 0}
    assert figures["top1_agreement"] == {"mean": 1, "standard_error": 0}


def test_errors_are_over_windows() -> None:
    """Two windows whose tokens go together: four values, but two independent ones."""
    assert mean_over(torch.tensor([1.0, 1.0, 3.0, 3.0]), 2) == {"mean": 2, "standard_error": pytest.approx(1)}
    assert mean_over(torch.tensor([True, False]), 1) == {"mean": 0.5, "standard_error": None}


def test_figures_are_paired() -> None:
    nll = torch.tensor([1.0, 5.0, 2.0, 8.0])
    ours, theirs = (PerplexityResult(3, 2, 0, part) for part in (nll + 0.25, nll))
    figures = Comparison(ours, theirs, kl=torch.zeros(4), same_top=torch.ones(4, dtype=torch.bool)).figures()
    assert figures["nll_difference"] == {"mean": 0.25, "standard_error": 0}
    assert figures["baseline_perplexity"] == pytest.approx(math.exp(4))
    assert figures["percent_over_baseline"] == pytest.approx(100 * (math.exp(0.25) - 1))


def test_what_does_not_compare_is_refused(tiny_base_model: Path, tmp_path: Path) -> None:
    model = load(tiny_base_model)
    other = load(make_tiny_model(tmp_path / "other", tied=False))
    other.config = load_config(tiny_base_model)
    object.__setattr__(other.config, "vocab_size", 300)
    with pytest.raises(InputError, match="a vocabulary of 300, tiny-base one of 258"):
        compare(model, other, TOKENS, context=CONTEXT)
    with pytest.raises(InputError, match="batch must be at least 1 window, not 0"):
        compare(model, model, TOKENS, batch=0)


def test_numbers_that_are_none_are_refused_by_name(tiny_base_model: Path, noisy_model: Path) -> None:
    model, baseline = load(noisy_model), load(tiny_base_model)
    baseline.weights.embedding.fill_(math.nan)
    with pytest.raises(CheckpointError, match="tiny-base gives logits that are not numbers"):
        compare(model, baseline, TOKENS, context=CONTEXT)
