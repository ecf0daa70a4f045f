"""What a step costs on the host, beside what the device computes."""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from futransformer.engine import Engine, SamplingParams
from futransformer.engine.runner import FEW_PAGES
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


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """PyTorch's operations within it: how many, and the largest tensor that one of them gave."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = self.largest = self.numbers_copied = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        self.count += 1
        self.numbers_copied += function is torch.ops.aten.copy_.default and args[0].dim() == 0
        self.largest = max(self.largest, found.numel() if isinstance(found, Tensor) else 0)
        return found


def work_of(engine: Engine) -> tuple[int, int, int]:
    """Of one step: calls of Python functions, PyTorch's operations, and elements of the largest of their results."""
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    with Operations() as operations:
        engine.step()
    sys.setprofile(count)
    try:
        engine.step()
    finally:
        sys.setprofile(None)
    return calls, operations.count, operations.largest


def test_the_work_of_a_step_is_bounded(tiny_base_model: Path) -> None:
    """A few calls a sequence; operations that neither sequences nor texts multiply; no copy of what has not changed."""
    found = {}
    for batch in (8, 64):
        engine = Engine(Idle(1200), Tokenizer(tiny_base_model))
        params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
        for index in range(batch):
            engine.add_request(str(index), [7] * (500 - index % 32), params)  # not all take a page at once
        while len(engine.step()) < batch:
            pass
        for tokens in (10, 300):
            while len(engine._scheduler.running[0].tokens) < 500 + tokens:
                engine.step()
            found[batch, tokens] = work_of(engine)
    calls = {key: each[0] for key, each in found.items()}
    # 8 a sequence: prefilling; output, RequestOutput; _advance, generated, CompletionOutput; the two of its text
    assert calls[64, 10] <= calls[8, 10] + 8 * 56
    assert max(calls.values()) <= 8 * 64 + 150
    assert abs(calls[64, 300] - calls[64, 10]) <= 64, "a long text takes more calls"
    operations = [each[1] for each in found.values()]
    # what the reference's begin_step takes, a page or two, the tokens to the host
    assert max(operations) <= min(operations) + 3 * FEW_PAGES
    assert max(operations) <= 48
    assert max(each[2] for each in found.values()) <= 64 * 16, "a step copies more than its block table"


def test_a_page_more_is_written_without_waiting_for_the_device(tiny_base_model: Path) -> None:
    """A number that is assigned to a place of a tensor of a GPU is copied from memory that is not pinned: the host then
    waits for all that it has launched (an H200, 64 sequences: 4.5 ms of every fourth step).
    """
    engine = Engine(Idle(40), Tokenizer(tiny_base_model))
    engine.add_request("a", [7] * 310, SamplingParams(temperature=0, max_tokens=80, ignore_eos=True))
    while not engine.step():
        pass
    pages = []
    with Operations() as operations:
        for _ in range(20):
            engine.step()
            pages.append(engine.stats().free_pages)
    assert pages[0] > pages[-1], "it tests nothing"
    assert operations.numbers_copied == 0


def test_a_long_text_costs_no_more_a_token_than_a_short_one(tiny_base_model: Path) -> None:
    """Nothing in a step grows with the text: tokens are not joined, texts not decoded again.

    Steps of the two take turns, for a machine that is busy now and idle then to make both as slow.
    """
    engines = {length: Engine(Idle(20), Tokenizer(tiny_base_model)) for length in (100, 800)}
    seconds: dict[int, list[float]] = {length: [] for length in engines}
    params = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True, stop=["never"])
    for length, engine in engines.items():
        engine.add_request("a", [7], params)
        for _ in range(length):
            engine.step()
    for _ in range(200):
        for length, engine in engines.items():
            begin = time.perf_counter()
            (output,) = engine.step()
            seconds[length].append(time.perf_counter() - begin)
            assert output.finished is (len(seconds[length]) + length == 1000)
    assert statistics.median(seconds[800]) < 2 * statistics.median(seconds[100])
