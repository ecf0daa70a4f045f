"""decode_host/8b/{bf16,int4-kv4/head=fp8}/{greedy,sampled}/B=...: what a token of generation costs the host, in us.

The time of ``Generation`` less what it waits for the device, over the tokens of a sequence: launches, looks, lists of
tokens. The model is random. Checked: every text has its tokens, all within the vocabulary, and each run gives the same.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import torch

from futransformer.bench.case import HostCase, Row
from futransformer.bench.decoder import random_decoder
from futransformer.bench.harness import Timing
from futransformer.bench.runner import Bench, host_row
from futransformer.bench.shapes import shape_config
from futransformer.generation import Generation
from futransformer.generator.precision import get_precision
from futransformer.sampling import Sampling

BATCHES = (1, 8, 32)
PRECISIONS = {"bf16": "bf16", "int4-kv4/head=fp8": "int4-head8-kv4"}
SAMPLINGS = {"greedy": None, "sampled": Sampling(top_k=50, top_p=0.95, repetition_penalty=1.1)}
CONTEXT = 1024
NEW_TOKENS = 256
RUNS = 9
WARM_UP_SECONDS = 3.0


def cases() -> Sequence[HostCase]:
    """See futransformer.bench.subjects."""
    found = []
    for read, precision in PRECISIONS.items():
        for choice, sampling in SAMPLINGS.items():
            for batch in BATCHES:
                name = f"decode_host/8b/{read}/{choice}/B={batch}"
                run = partial(measure, name, "8b", precision, sampling, batch, CONTEXT, NEW_TOKENS)
                default = precision != "bf16" and batch in (1, 8)
                found.append(HostCase(name, run, default=default, precision=precision))
    return found


def measure(
    name: str,
    shape: str,
    precision: str,
    sampling: Sampling | None,
    batch: int,
    context: int,
    new_tokens: int,
    bench: Bench,
) -> Sequence[Row]:
    """Generate several times. What comes before is not counted: graphs are captured, and a process's first runs of all
    took the host twice as long (39 us a token, where the same runs later took 20).
    """
    config, row = shape_config(shape), get_precision(precision)
    model = random_decoder(config, bench.library(shape, precision), row, batch, context, new_tokens, bench.device)
    logits = torch.zeros(batch, config.vocab_size, device=bench.device)
    prompts = [[0] * context] * batch
    settings = None if sampling is None else [sampling] * batch
    samples: list[float] = []
    found = []
    counted_from, begin = 2, time.perf_counter()
    while len(samples) < counted_from + RUNS:
        if time.perf_counter() - begin < WARM_UP_SECONDS:
            counted_from = len(samples) + 1
        model.keep(range(batch))  # what it has on the device is of the run before
        generation = Generation(model, prompts, new_tokens, [], settings, None)
        start = time.perf_counter()
        found.append(generation.run(logits))
        samples.append((time.perf_counter() - start - generation.waited) / new_tokens)
    wrong = sum(text != found[0] for text in found)
    for text in found[0]:
        wrong += len(text) != new_tokens or not all(0 <= token < config.vocab_size for token in text)
    return [host_row(name, Timing.of(samples[counted_from:]), error=wrong, unit="us")]
