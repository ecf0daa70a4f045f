"""Perplexity of a text, through the prefill or the decode kernels, or through both in turns.

The text is tokenised whole and as it stands, without BOS, and cut into windows of ``context`` tokens that do not
overlap (stride = context). Each window is read by itself; every token but a window's first is scored, given the
window's tokens before it: context - 1 a window. Perplexity is exp of the mean negative log-likelihood of all scored
tokens. A shorter rest at the end is left out, unless it is all there is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from futransformer.generator.errors import InputError
from futransformer.model import Llama, check_numbers

Through = Literal["prefill", "decode", "turns"]
Progress = Callable[[int, int, float], None]
# Of which windows of a batch and which of their tokens but the last, and float32 [windows x tokens, vocab_size].
Logits = Iterator[tuple[slice, slice, Tensor]]


@dataclass(frozen=True)
class PerplexityResult:
    """What was scored, and how well the model predicted it."""

    context: int
    windows: int
    tokens_left_out: int  # of the text, because they fill no window or --windows stopped earlier
    nll: Tensor  # float32 [tokens scored]: negative log-likelihood of each scored token, in the text's order

    @property
    def tokens_scored(self) -> int:
        """Tokens with a likelihood."""
        return self.nll.numel()

    @property
    def perplexity(self) -> float:
        """exp of the mean, both in float64."""
        return self.nll.double().mean().exp().item()


def split_windows(tokens: Sequence[int], context: int, windows: int | None = None) -> list[Sequence[int]]:
    """The text's full windows, at most ``windows`` of them; a text shorter than one window is one by itself."""
    if context < 2:
        raise InputError(f"a window must be at least 2 tokens, not {context}")
    if windows is not None and windows < 1:
        raise InputError(f"the number of windows must be at least 1, not {windows}")
    if len(tokens) < 2:
        raise InputError(f"the text has {len(tokens)} tokens; a window needs at least 2")
    starts = range(0, max(len(tokens) - context, 0) + 1, context)[:windows]
    return [tokens[start : start + context] for start in starts]


def score(
    model: Llama,
    tokens: Sequence[int],
    *,
    context: int = 1024,
    windows: int | None = None,
    batch: int = 1,
    through: Through = "prefill",
    progress: Progress | None = None,
) -> PerplexityResult:
    """Score a text's tokens; ``batch`` windows go through the model at a time.

    ``progress(done, all, perplexity so far)`` is called after every batch of windows.
    """
    chosen, read = choose(tokens, context, windows, batch, through)
    scored: list[Tensor] = []
    for first in range(0, len(chosen), batch):
        group = chosen[first : first + batch]
        targets = targets_of(group, model)
        nll = torch.empty(targets.shape, device=targets.device)
        for rows, positions, logits in read(model, group):
            target = targets[rows, positions]
            nll[rows, positions] = negative_log_likelihood(logits, target.flatten()).view(target.shape)
        scored += nll.cpu()
        check_numbers(model.config.name, nll)
        if progress is not None:
            progress(len(scored), len(chosen), torch.cat(scored).double().mean().exp().item())
    model.keep([])
    used = sum(len(window) for window in chosen)
    return PerplexityResult(context, len(chosen), len(tokens) - used, torch.cat(scored))


def choose(
    tokens: Sequence[int], context: int, windows: int | None, batch: int, through: Through
) -> tuple[list[Sequence[int]], Callable[[Llama, Sequence[Sequence[int]]], Logits]]:
    """The windows to score, and what reads them."""
    if batch < 1:
        raise InputError(f"the batch must be at least 1 window, not {batch}")
    if through not in READERS:
        raise InputError(f"perplexity goes through {', '.join(READERS)}, not {through!r}")
    return split_windows(tokens, context, windows), READERS[through]


def targets_of(windows: Sequence[Sequence[int]], model: Llama) -> Tensor:
    """What is to be predicted: int64 [windows, tokens - 1], on the model's device."""
    return torch.tensor(windows, device=model.ops.device)[:, 1:]


@torch.inference_mode()
def logits_by_prefill(model: Llama, windows: Sequence[Sequence[int]]) -> Logits:
    """Of each window, read in one go."""
    logits = model.prefill(windows, rows="all")
    length = len(windows[0])
    for index in range(len(windows)):
        yield slice(index, index + 1), slice(0, length - 1), logits[index * length : (index + 1) * length - 1]


@torch.inference_mode()
def logits_by_decode(model: Llama, windows: Sequence[Sequence[int]]) -> Logits:
    """The same, fed one token at a time to the decode kernels, all windows abreast; windows are equally long."""
    length = len(windows[0])
    columns = torch.tensor(windows, dtype=torch.int32, device=model.ops.device).T.contiguous()
    model.start(len(windows))
    model.reserve([length] * len(windows))
    for place, column in enumerate(columns[:-1]):
        yield slice(None), slice(place, place + 1), model.decode(column)


@torch.inference_mode()
def logits_by_turns(model: Llama, windows: Sequence[Sequence[int]]) -> Logits:
    """The same as a conversation: half of each window is read, three eighths are decoded, and the rest is read again.

    Every token's likelihood rests on a cache that both kinds of kernels have written.
    """
    length = len(windows[0])
    read, written = length // 2, length * 7 // 8
    columns = torch.tensor(windows, dtype=torch.int32, device=model.ops.device).T.contiguous()
    yield slice(None), slice(0, read), model.prefill([window[:read] for window in windows], rows="all")
    model.reserve([length - read] * len(windows))
    for place in range(read, written):
        yield slice(None), slice(place, place + 1), model.decode(columns[place])
    rest = model.extend([window[written:] for window in windows], rows="all")
    rest = rest.view(len(windows), length - written, -1)[:, :-1]
    yield slice(None), slice(written, length - 1), rest.flatten(0, 1)


READERS: dict[Through, Callable[[Llama, Sequence[Sequence[int]]], Logits]] = {
    "prefill": logits_by_prefill,
    "decode": logits_by_decode,
    "turns": logits_by_turns,
}


def negative_log_likelihood(logits: Tensor, targets: Tensor) -> Tensor:
    """-log softmax(logits)[target] of each row, float32 [T]."""
    return logits.logsumexp(1) - logits.gather(1, targets[:, None])[:, 0]
