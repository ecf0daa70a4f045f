"""A real model and real text through the kernels, against the reference with the same rounding points.

    futransformer bench accuracy --model MODEL --text FILE [--kernels DIR] [--commit SHA] [--output FOLDER]

Perplexity through prefill on the whole text; through decode, token by token, on the whole text (8 and 64 windows
abreast) and on the first sixteen windows or more at batches of 1, 4, 8 and 32, the first four told apart; generation of
64 tokens for 16 prompts, alone and in one batch, and for 64 pieces of the text, 16 in a batch; teacher-forced on the
reference's text. Runs on a Hopper GPU.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from futransformer.generator.config import load_config
from futransformer.model import Llama
from futransformer.perplexity import PerplexityResult, score
from futransformer.reference import ReferenceOps
from futransformer.tokenizer import Tokenizer

CONTEXT = 1024
NEW_TOKENS = 64
TEXT_PROMPTS = 64  # a count of near ties among 16 prompts' 1,024 tokens is known to a third of itself
PROMPTS = (
    "The capital of France is",
    "Water boils at a lower temperature on a mountain because",
    "def fibonacci(n):",
    "Once upon a time, in a village by the sea, there lived a clockmaker who",
    "The three primary colours are",
    "To bake bread you need",
    "In 1969 the first people",
    "List four prime numbers greater than 10:",
    "The difference between a list and a tuple in Python is that",
    "A haiku about winter:\n",
    "Photosynthesis turns",
    "Dear Ms. Alvarez,\n\nThank you for your letter of 3 May. I am writing to",
    "Q: What is 17 times 23?\nA:",
    "The quick brown fox jumps over the lazy dog. This sentence is remarkable because it",
    "Matrix multiplication is not commutative, which means that",
    "If all roses are flowers and some flowers fade quickly, then",
)


def perplexity_row(
    case: str, ours: PerplexityResult, rivals: dict[str, PerplexityResult], seconds: float
) -> dict[str, Any]:
    """One row: perplexities, and the paired difference of the tokens' likelihoods to each rival."""
    row: dict[str, Any] = {
        "case": case,
        "ours": round(ours.perplexity, 4),
        "unit": "perplexity",
        "rivals": {name: round(rival.perplexity, 4) for name, rival in rivals.items()},
        "tokens": ours.tokens_scored,
        "seconds": round(seconds, 1),
    }
    for name, rival in rivals.items():
        difference = (ours.nll - rival.nll).double()
        row[f"nll_minus_{name}"] = {
            "mean": float(difference.mean()),
            "standard_error": float(difference.std() / math.sqrt(difference.numel())),
            "deviation": float(difference.std()),
        }
    return row


def timed_score(model: Llama, tokens: list[int], **options: Any) -> tuple[PerplexityResult, float]:
    """Score and say how long it took."""
    start = time.perf_counter()
    result = score(model, tokens, context=CONTEXT, **options)
    return result, time.perf_counter() - start


def first(result: PerplexityResult, windows: int) -> PerplexityResult:
    """The same result over its first windows alone."""
    return PerplexityResult(result.context, windows, 0, result.nll[: windows * (result.context - 1)])


def perplexity_rows(ours: Llama, reference: Llama, exact: Llama, tokens: list[int], name: str) -> list[dict[str, Any]]:
    """Every perplexity case of the module's docstring."""
    prefill, seconds = timed_score(ours, tokens, batch=8)
    rounding, _ = timed_score(reference, tokens)
    unrounded, _ = timed_score(exact, tokens)
    base, windows = f"perplexity/{name}/bf16/through", prefill.windows
    rivals = {"reference": rounding, "reference-float32": unrounded}
    rows = [perplexity_row(f"{base}=prefill/ctx={CONTEXT}/windows={windows}", prefill, rivals, seconds)]
    noise = perplexity_row("", rounding, {"float32": unrounded}, 0)["nll_minus_float32"]
    rows[0]["noise_floor_reference_minus_float32"] = noise
    # The kernels for at most 8 and at most 64 sequences, over the whole text: a bias of any would show here.
    for batch in (8, 64):
        decode, seconds = timed_score(ours, tokens, batch=batch, through="decode")
        case = f"{base}=decode/ctx={CONTEXT}/windows={windows}/B={batch}"
        rows.append(perplexity_row(case, decode, {"prefill": prefill, "reference-float32": unrounded}, seconds))
    for batch in (1, 4, 8, 32):
        # Rounding alone parts prefill's and decode's likelihood of a token by 0.035 (one deviation): 0.055 % of the
        # perplexity on four windows, 0.027 % on sixteen, where a bar of 0.1 % is more than three of them.
        count = max(16, batch)
        part, seconds = timed_score(ours, tokens, windows=count, batch=batch, through="decode")
        case = f"{base}=decode/ctx={CONTEXT}/windows={count}/B={batch}"
        same = {"prefill": first(prefill, count), "reference-float32": first(unrounded, count)}
        row = perplexity_row(case, part, same, seconds)
        four = {"ours": first(part, 4).perplexity, "prefill": first(prefill, 4).perplexity}
        rows.append(row | {"first_four_windows": {name: round(value, 4) for name, value in four.items()}})
    return rows


def text_prompts(tokens: list[int]) -> list[list[int]]:
    """Pieces of 32 to 38 tokens, evenly spread over a text."""
    begins = [index * (len(tokens) - 38) // TEXT_PROMPTS for index in range(TEXT_PROMPTS)]
    return [tokens[begin : begin + 32 + index % 7] for index, begin in enumerate(begins)]


def near_tie(logits: Tensor) -> bool:
    """Whether the two largest logits are closer than 2^-7 of the largest."""
    top = logits.topk(2).values
    return bool(top[0] - top[1] < 2.0**-7 * top[0].abs())


def agreement_row(
    ours: Llama, reference: Llama, exact: Llama, prompts: list[list[int]], batch: int, name: str
) -> dict[str, Any]:
    """Generation by ours, ``batch`` prompts at a time, and ours teacher-forced on the reference's text.

    What the float32 reference would have chosen there tells how often rounding alone decides.
    """
    groups = [prompts[i : i + batch] for i in range(0, len(prompts), batch)]
    differing = outside = same_text = compared = ours_not_exact = reference_not_exact = 0
    for group in groups:
        texts = reference.generate(group, NEW_TOKENS, eos_token_ids=[])
        free = ours.generate(group, NEW_TOKENS, eos_token_ids=[])
        same_text += sum(a == b for a, b in zip(texts, free, strict=True))
        our_logits, their_logits, exact_logits = (model.prefill(group) for model in (ours, reference, exact))
        for step in range(NEW_TOKENS):
            for row, text in enumerate(texts):
                compared += 1
                chosen, unrounded = int(our_logits[row].argmax()), int(exact_logits[row].argmax())
                ours_not_exact += chosen != unrounded
                reference_not_exact += text[step] != unrounded
                if chosen != text[step]:
                    differing += 1
                    outside += not near_tie(their_logits[row])
            if step + 1 < NEW_TOKENS:
                column = [text[step] for text in texts]
                our_logits, their_logits, exact_logits = (model.decode(column) for model in (ours, reference, exact))
        for model in (ours, reference, exact):
            model.keep([])
    return {
        "case": f"generate/{name}/bf16/prompts={len(prompts)}/new={NEW_TOKENS}/B={batch}",
        "ours": differing,
        "unit": f"differing argmax of {compared}, teacher-forced on the reference's text",
        "differing_outside_near_ties": outside,
        "differing_from_float32": {"ours": ours_not_exact, "reference": reference_not_exact},
        "identical_free_texts": f"{same_text} of {len(prompts)}",
    }


def rows(model: Path, text: str, kernels: Path | None) -> list[dict[str, Any]]:
    """Measure a Hugging Face folder on a text; ``kernels`` is a folder of exports, one a config's name."""
    name = load_config(model).name
    cache = 64 * (CONTEXT + 64)
    folder = kernels / name.lower().removesuffix("-instruct") if kernels else None
    ours = Llama.from_pretrained(model, precision="bf16", kernels=folder, device="cuda", cache_tokens=cache)

    def reference(dtype: torch.dtype) -> Llama:
        ops = ReferenceOps(ours.config, device=ours.ops.device, dtype=dtype)
        return Llama.from_pretrained(model, precision="bf16", ops=ops, cache_tokens=cache)

    rounding, exact = reference(torch.bfloat16), reference(torch.float32)
    torch.backends.cuda.matmul.allow_tf32 = False
    tokenizer = Tokenizer(model)
    tokens = tokenizer.encode(text)
    name = name.lower().removesuffix("-instruct")
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    return [
        *perplexity_rows(ours, rounding, exact, tokens, name),
        *(agreement_row(ours, rounding, exact, prompts, batch, name) for batch in (1, len(prompts))),
        agreement_row(ours, rounding, exact, text_prompts(tokens), len(prompts), name),
    ]
