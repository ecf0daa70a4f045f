"""From what the device found to the log-probabilities that a request is shown."""

from __future__ import annotations

from collections.abc import Sequence

from futransformer.engine.outputs import Logprob
from futransformer.engine.runner import Launched
from futransformer.tokenizer import Tokenizer


def logprobs_of(
    launched: Launched, tokens: Sequence[int], tokenizer: Tokenizer | None
) -> dict[int, dict[int, Logprob]]:
    """By the rows that asked: the chosen token's, and those of the likeliest."""
    found = launched.alternatives()
    if found is None:
        return {}
    decode = (lambda _: "") if tokenizer is None else tokenizer.decode_token
    chosen, ranks, top_tokens, top = (tensor.tolist() for tensor in found)
    logprobs = {}
    for place, row in enumerate(launched.rows):
        count = launched.sequences[row].request.params.logprobs
        if count is None:
            continue
        each = {tokens[row]: Logprob(chosen[place], ranks[place], decode(tokens[row]))}
        for rank, (token, logprob) in enumerate(zip(top_tokens[place][:count], top[place], strict=False), 1):
            each.setdefault(token, Logprob(logprob, rank, decode(token)))
        logprobs[row] = each
    return logprobs
