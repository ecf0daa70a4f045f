"""A device without memory for a step or a pass: who fails, with what, and that the engine goes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from futransformer.engine import Engine, RequestOutput, SamplingParams
from futransformer.generator.errors import OutOfMemoryError
from tests.engine.exact import ExactLlama, text_after
from tests.engine.test_scheduling import assert_empty, check_pages, make_prompt

PARAMS = SamplingParams(temperature=0, max_tokens=70, ignore_eos=True)


class Short(ExactLlama):
    """The exact model on a device that has no memory for some of its launches."""

    def __init__(self, num_pages: int) -> None:
        super().__init__(num_pages)
        self.lacking: set[str] = set()  # "step", "pass"

    def _check(self, what: str) -> None:
        if what in self.lacking:
            self.lacking.remove(what)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nAnd much more.")

    def _prefill_logits(self, *arguments: Any, **options: Any) -> Tensor:
        self._check("pass")
        return super()._prefill_logits(*arguments, **options)

    def _decode_tokens(self, *arguments: Any, **options: Any) -> Tensor | None:
        self._check("step")
        return super()._decode_tokens(*arguments, **options)


def run(engine: Engine, steps: int) -> dict[str, RequestOutput]:
    """Whole outputs of a few steps."""
    whole: dict[str, RequestOutput] = {}
    for _ in range(steps):
        if not engine.has_unfinished():
            break
        for delta in engine.step():
            if delta.request_id in whole:
                whole[delta.request_id].add(delta)
            else:
                whole[delta.request_id] = delta
        check_pages(engine)
    return whole


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("chunk", [2048, 50])
def test_a_pass_without_memory_fails_those_it_reads(ahead: int, chunk: int) -> None:
    """Those who decode go on, and whoever comes later is served."""
    model = Short(40)
    engine = Engine(model, None, max_num_batched_tokens=chunk)
    engine._ahead = ahead
    engine.add_request("old", make_prompt(30), PARAMS)
    old = run(engine, 10)["old"]
    model.lacking = {"pass"}
    engine.add_request("new", make_prompt(130, 1), SamplingParams(n=3, max_tokens=5))
    engine.add_request("other", make_prompt(60, 2), PARAMS)
    whole = run(engine, 1000)
    failed = {name for name, output in whole.items() if output.error is not None}
    assert failed == ({"new", "other"} if chunk == 2048 else {"new"})
    for name in failed:
        assert isinstance(whole[name].error, OutOfMemoryError)
        assert whole[name].finished
        assert str(whole[name].error) == (
            f"reading {190 if chunk == 2048 else 50} tokens: CUDA out of memory. Tried to allocate 2.00 GiB. "
            "Serve fewer at a time (max_num_seqs, max_num_batched_tokens), "
            "or a smaller cache (num_pages, gpu_memory_utilization)"
        )
    old.add(whole["old"])
    assert old.outputs[0].token_ids == text_after(make_prompt(30), 70, ends=())
    engine.add_request("again", make_prompt(130, 1), PARAMS)
    assert run(engine, 1000)["again"].outputs[0].token_ids == text_after(make_prompt(130, 1), 70, ends=())
    assert_empty(engine)


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_step_without_memory_fails_all_that_it_decodes(ahead: int) -> None:
    model = Short(40)
    engine = Engine(model, None)
    engine._ahead = ahead
    for index in range(3):
        engine.add_request(str(index), make_prompt(30, index), PARAMS)
    run(engine, 10)
    model.lacking = {"step"}
    engine.add_request("new", make_prompt(30), PARAMS)
    whole = run(engine, 1000)
    assert {name for name, output in whole.items() if output.error is not None} == {"0", "1", "2"}
    assert str(whole["1"].error).startswith("a step of 3 sequences: CUDA out of memory. Tried")
    assert whole["new"].outputs[0].token_ids == text_after(make_prompt(30), 70, ends=())
    assert_empty(engine)


def test_neither_memory_for_a_step_nor_for_a_pass() -> None:
    """Of one request, too: one text decodes while the others are still to be read."""
    model = Short(40)
    engine = Engine(model, None, max_num_batched_tokens=20, enable_prefix_caching=False)
    engine.add_request("a", make_prompt(20), SamplingParams(n=4, max_tokens=60, ignore_eos=True))
    run(engine, 3)
    model.lacking = {"step", "pass"}
    (output,) = engine.step()
    assert isinstance(output.error, OutOfMemoryError)
    assert not engine.has_unfinished()
    assert model.lacking == {"pass"}, "what has failed is read"
    model.lacking = set()
    assert_empty(engine)
    engine.add_request("a", make_prompt(20), PARAMS)
    assert run(engine, 1000)["a"].outputs[0].token_ids == text_after(make_prompt(20), 70, ends=())
