"""What a model loses against another over the same windows: likelihood, KL divergence, agreement of the top token.

Both models read the same windows in the same way, a batch at a time, and every token is compared in place: differences
are paired. KL is that of the baseline's distribution p from the model's q, the sum of p log(p / q), in nats a token.
Standard errors are those of the mean over windows, whose tokens are not independent of each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from futransformer.generator.errors import InputError
from futransformer.model import Llama, check_numbers
from futransformer.perplexity import PerplexityResult, Progress, Through, choose, negative_log_likelihood, targets_of


@dataclass(frozen=True)
class Comparison:
    """Two models' results, and how far their predictions are apart; of each scored token, in the text's order."""

    result: PerplexityResult
    baseline: PerplexityResult
    kl: Tensor  # float32 [tokens scored], nats
    same_top: Tensor  # bool [tokens scored]: both find the same token likeliest

    def figures(self) -> dict[str, Any]:
        """The comparison in JSON's types; a standard error of one window is None."""
        windows = self.result.windows
        return {
            "baseline_perplexity": self.baseline.perplexity,
            "percent_over_baseline": 100 * (self.result.perplexity / self.baseline.perplexity - 1),
            "nll_difference": mean_over(self.result.nll - self.baseline.nll, windows),
            "kl_divergence": mean_over(self.kl, windows),
            "top1_agreement": mean_over(self.same_top, windows),
        }


def compare(
    model: Llama,
    baseline: Llama,
    tokens: Sequence[int],
    *,
    context: int = 1024,
    windows: int | None = None,
    batch: int = 1,
    through: Through = "prefill",
    progress: Progress | None = None,
) -> Comparison:
    """Score a text's tokens by both; arguments are those of ``futransformer.perplexity.score``."""
    if model.config.vocab_size != baseline.config.vocab_size:
        raise InputError(
            f"{baseline.config.name} has a vocabulary of {baseline.config.vocab_size}, {model.config.name} one of "
            f"{model.config.vocab_size}: predictions compare between models of one tokenizer"
        )
    chosen, read = choose(tokens, context, windows, batch, through)
    parts: list[tuple[Tensor, ...]] = []
    for first in range(0, len(chosen), batch):
        group = chosen[first : first + batch]
        targets = targets_of(group, model)
        # nll, the baseline's nll, kl, same top
        found = torch.empty(4, *targets.shape, device=targets.device)
        for (rows, positions, q), (_, _, p) in zip(read(model, group), read(baseline, group), strict=True):
            target = targets[rows, positions]
            figures = compare_logits(q, p.to(q.device), target.flatten())
            found[:, rows, positions] = figures.view(4, *target.shape)
        check_numbers(model.config.name, found[0])
        check_numbers(baseline.config.name, found[1])
        parts.append(tuple(part.flatten().cpu() for part in found))
        if progress is not None:
            so_far = torch.cat([part[0] for part in parts]).double().mean().exp().item()
            progress(min(first + batch, len(chosen)), len(chosen), so_far)
    for used in (model, baseline):
        used.keep([])
    left_out = len(tokens) - sum(len(window) for window in chosen)
    nll, their_nll, kl, same = (torch.cat(part) for part in zip(*parts, strict=True))
    ours, theirs = (PerplexityResult(context, len(chosen), left_out, scored) for scored in (nll, their_nll))
    return Comparison(ours, theirs, kl, same.bool())


@torch.inference_mode()
def compare_logits(ours: Tensor, theirs: Tensor, targets: Tensor) -> Tensor:
    """Float32 [4, T]: -log p of ours and theirs, KL of theirs from ours, 1 where the largest logit is the same's."""
    kl = F.kl_div(ours.log_softmax(1), theirs.log_softmax(1), reduction="none", log_target=True).sum(1)
    same = (ours.argmax(1) == theirs.argmax(1)).float()
    return torch.stack([negative_log_likelihood(ours, targets), negative_log_likelihood(theirs, targets), kl, same])


def mean_over(values: Tensor, windows: int) -> dict[str, float | None]:
    """The mean of all values, and its standard error by the means of ``windows`` equal parts."""
    means = values.double().view(windows, -1).mean(1)
    error = means.std().item() / math.sqrt(windows) if windows > 1 else None
    return {"mean": means.mean().item(), "standard_error": error}
