"""Graphs that are captured before the first request: which, for how long, and that nothing else changes."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
import torch

from futransformer.decode_step import DecodeStep, Kind
from futransformer.engine import Engine, SamplingParams
from futransformer.engine.warmup import WarmedUp, buckets, warm_up
from futransformer.generator.errors import InputError
from futransformer.prefill_step import PassShape, PrefillGraphs
from tests.engine.exact import VOCABULARY, ExactLlama, text_after


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is captured, in order: (sequences, pages, kind) of a step, the shape of a pass."""
    found: list[Any] = []

    class Replay:
        """Runs what was captured, into the logits of its capture."""

        def __init__(self, run: Any, logits: torch.Tensor | None) -> None:
            self.run, self.logits = run, logits

        def replay(self) -> None:
            written = self.run()
            if self.logits is not None:
                self.logits.copy_(written)

    def of_step(step: DecodeStep, pages: int, kind: Kind) -> Any:
        batch = len(step.tokens)
        found.append((batch, pages, kind))
        logits = torch.empty(batch, VOCABULARY) if kind == "logits" else None
        return Replay(lambda: step._run(pages, kind), logits), logits

    def of_pass(graphs: PrefillGraphs, shape: PassShape) -> Any:
        found.append(shape)
        logits = torch.empty(shape.ends, VOCABULARY)
        return Replay(lambda: graphs._run(shape), logits), logits

    monkeypatch.setattr(DecodeStep, "_capture", of_step)
    monkeypatch.setattr(PrefillGraphs, "_capture", of_pass)
    return found


def make_engine(**options: Any) -> Engine:
    model = ExactLlama(24)
    model.ops.capturable = True
    return Engine(model, None, **options)


def test_requests_find_their_graphs(captured: list[Any]) -> None:
    """Of steps and short passes, whatever they ask for; and their texts are what they would be without."""
    engine = make_engine(max_num_seqs=3, max_model_len=300)
    before = engine.model.cache.pool.clone()
    warmed = engine.warm_up(60)
    assert torch.equal(engine.model.cache.pool.nan_to_num(7), before.nan_to_num(7)), "a page was written"
    assert warmed.captured == warmed.shapes == len(captured) == 5 * 3 + 5 * 3 * 2
    known = set(captured)
    assert len(known) == len(captured)
    assert {each[:2] for each in known if not isinstance(each, PassShape)} == {
        (batch, pages) for batch in (1, 2, 3) for pages in (1, 2, 3, 4, 6)
    }
    prompts = [[5, 6, 7], list(range(90)), [1] * 64]
    for index, prompt in enumerate(prompts):
        temperature = 0 if index < 2 else 1e-3
        engine.add_request(str(index), prompt, SamplingParams(temperature=temperature, max_tokens=80, ignore_eos=True))
    texts: dict[str, list[int]] = {str(index): [] for index in range(3)}
    while engine.has_unfinished():
        for delta in engine.step():
            texts[delta.request_id] += delta.outputs[0].token_ids
    assert set(captured) == known, "a request captured a graph"
    for index, prompt in enumerate(prompts):
        assert texts[str(index)] == text_after(prompt, 80, ends=())


def test_time_bounds_it_and_progress_is_told() -> None:
    engine = make_engine()
    done: list[int] = []
    told: list[str] = []
    clock = count()
    captures = [lambda index=index: done.append(index) for index in range(100)]
    found = warm_up(engine.model, iter(captures), 30, told.append, now=lambda: next(clock))
    assert found.captured == len(done) < 100
    assert found.shapes == 100
    assert 30 <= found.seconds <= 32
    assert told[0] == "captured 1 of 100 shapes of steps and passes"
    assert len(told) == pytest.approx(len(done) / 2, abs=len(done) / 2)


def test_memory_bounds_it() -> None:
    engine = make_engine()

    def capture() -> None:
        engine.model.graph_pool.full = True

    assert warm_up(engine.model, iter([capture] * 5), 30)[:2] == (0, 5)


def test_without_graphs_there_is_nothing_to_do(captured: list[Any]) -> None:
    assert Engine(ExactLlama(24), None).warm_up(60)[:2] == (0, 0)
    assert not captured
    assert isinstance(make_engine().warm_up(0), WarmedUp)
    assert not captured


def test_an_engine_with_requests_does_not_warm_up() -> None:
    engine = make_engine()
    engine.add_request("a", [1, 2])
    with pytest.raises(InputError, match="before its first request"):
        engine.warm_up(1)


def test_buckets_are_what_batches_are_padded_to() -> None:
    assert buckets(1) == [1]
    assert buckets(64) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]
    assert buckets(5) == [1, 2, 3, 4, 6]
