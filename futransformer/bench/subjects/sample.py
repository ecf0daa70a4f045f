"""sample/8b/{top-p,top-k,all}/B=...: from logits to tokens, as the end of a decode step.

Logits are those that the head has just written, in L2. ``torch-sort`` is what PyTorch code does, in a CUDA graph: sort,
softmax, running sums, mask, and a draw by exponential noise. The check: our tokens are those of futransformer.sampling,
as rows of zeros with a one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from futransformer.bench.case import MEMORY_BOUND, Case, Contender, Expected, Problem, Work
from futransformer.bench.graphs import graphed
from futransformer.bench.runner import Bench
from futransformer.bench.shapes import shape_config
from futransformer.sampling import Sampling, SamplingRows, choose

BATCHES = (1, 8, 32, 64)
DEFAULT = (1, 32)
SETTINGS = {"top-p": Sampling(top_p=0.95), "top-k": Sampling(top_k=50, top_p=0.95), "all": Sampling()}
SPREAD = 3.0  # standard deviation of random logits: some 1000 of 128k tokens hold 95 % of the probability
CALLS = 16  # one after the other in a graph


def cases() -> Sequence[Case]:
    """See futransformer.bench.subjects."""
    return [
        Case(
            f"sample/8b/{name}/B={batch}",
            "us",
            MEMORY_BOUND,
            partial(open_case, "8b", batch, sampling),
            default=batch in DEFAULT,
        )
        for name, sampling in SETTINGS.items()
        for batch in BATCHES
    ]


def open_case(shape: str, batch: int, sampling: Sampling, bench: Bench) -> Problem:
    """Draw logits."""
    ops, config, device = bench.library(shape), shape_config(shape), bench.device
    logits = torch.randn(batch, config.vocab_size, device=device) * SPREAD
    position = torch.arange(batch, dtype=torch.int32, device=device)
    rows = SamplingRows.of([sampling] * batch, position)
    work = Work(bytes=4.0 * logits.numel())
    floor = work.floor_seconds(bench.ceilings)

    def one_hot(tokens: Tensor) -> Tensor:
        return F.one_hot(tokens.long(), config.vocab_size).float()

    def expected() -> Sequence[Expected]:
        exact = one_hot(choose(logits, rows))
        return [Expected(exact, exact)]

    def sort() -> Contender:
        return graphed([lambda: by_sorting(logits, sampling)] * CALLS, tuple, floor)

    return Problem(
        work=work,
        ours=graphed([lambda: ops.sample(logits, rows)] * CALLS, lambda: [one_hot(ops.sample(logits, rows))], floor),
        rivals={"torch-sort": sort},
        expected=expected,
    )


def by_sorting(logits: Tensor, sampling: Sampling) -> Tensor:
    """Tokens [B], drawn by PyTorch's own generator."""
    ordered, tokens = (logits / sampling.temperature).sort(dim=1, descending=True)
    if sampling.top_k > 0:
        ordered[:, sampling.top_k :] = -torch.inf
    probabilities = ordered.softmax(1)
    if sampling.top_p < 1:
        behind = probabilities.cumsum(1) - probabilities
        probabilities = probabilities.masked_fill(behind > sampling.top_p, 0.0)
    chosen = (probabilities / torch.empty_like(probabilities).exponential_()).argmax(1, keepdim=True)
    return tokens.gather(1, chosen)[:, 0]
