"""What a step costs on the host, beside what the device computes."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from futransformer.engine import Engine, SamplingParams
from futransformer.tokenizer import Tokenizer
from tests.engine.exact import VOCABULARY, ExactLlama


class Idle(ExactLlama):
    """Computes nothing: the next token is the last one plus one."""

    def _prefill_logits(self, inputs: Any, rows_of_pass: Any, rows: Any = "last") -> Tensor:
        return torch.zeros(len(inputs.ends), VOCABULARY)

    def _decode_tokens(self, tokens: Tensor, rows: Any, logits: bool, sampling: Any = None) -> Tensor | None:
        tokens.add_(1).remainder_(90)
        return torch.zeros(len(tokens), VOCABULARY) if logits else None


def test_a_step_of_64_sequences_takes_the_host_little(tiny_base_model: Path) -> None:
    """0.27 ms on one core of a small machine that is busy besides; the bound is for any."""
    engine = Engine(Idle(1200), Tokenizer(tiny_base_model))
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    for index in range(64):
        engine.add_request(str(index), [7] * 512, params)
    while len(engine.step()) < 64:
        pass
    seconds = []
    for _ in range(100):
        begin = time.perf_counter()
        assert len(engine.step()) == 64
        seconds.append(time.perf_counter() - begin)
    assert statistics.median(seconds) < 3e-3


def test_a_long_text_costs_no_more_a_token_than_a_short_one(tiny_base_model: Path) -> None:
    """Nothing in a step grows with the text: tokens are not joined, texts not decoded again."""
    engine = Engine(Idle(20), Tokenizer(tiny_base_model))
    engine.add_request("a", [7], SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True, stop=["never"]))
    seconds = []
    while engine.has_unfinished():
        begin = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - begin)
    assert len(seconds) == 1000
    assert statistics.median(seconds[-200:]) < 2 * statistics.median(seconds[100:300])
