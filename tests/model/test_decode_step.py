"""The decode step as a replayed graph: what is captured and when, and that a replay depends on device state alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from futransformer.decode_step import DecodeStep, Kind
from futransformer.driver import LaunchChain, hopper_problem
from futransformer.generator.config import load_config
from futransformer.kv_cache import KVCache, page_bucket
from futransformer.model import Llama
from futransformer.reference import ReferenceOps, largest_error

START = (5, 1, 64)  # lengths before the first step: page boundaries fall on different steps


class RecordedGraph:
    """Stands in for a CUDA graph: a replay runs what was captured, with the arguments of its capture."""

    def __init__(self, step: DecodeStep, pages: int, kind: Kind, logits: Tensor | None) -> None:
        self.step, self.pages, self.kind, self.logits = step, pages, kind, logits
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        found = self.step._run(self.pages, self.kind)
        assert (found is None) == (self.logits is None), "logits are given where they are asked for"
        if self.logits is not None and found is not None:
            self.logits.copy_(found)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[RecordedGraph]:
    """The graphs that are captured, in order."""
    captured: list[RecordedGraph] = []

    def capture(step: DecodeStep, pages: int, kind: Kind) -> Any:
        logits = torch.empty(step.tokens.shape[0], 258) if kind == "logits" else None
        captured.append(RecordedGraph(step, pages, kind, logits))
        return captured[-1], captured[-1].logits

    monkeypatch.setattr(DecodeStep, "_capture", capture)
    return captured


def begin(folder: Path, *, capturable: bool, dtype: torch.dtype = torch.bfloat16) -> Llama:
    config = load_config(folder)
    ops = ReferenceOps(config, dtype=dtype)
    ops.capturable = capturable
    model = Llama.from_pretrained(folder, ops=ops, cache_tokens=64 * 40)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1)).tolist()
    model = Llama(config, ops, model.weights, KVCache(config, 40, page_order=order, dtype=dtype))
    model.cache.pool.fill_(torch.nan)
    model.prefill([[7] * length for length in START])
    return model


def test_replays_equal_eager_steps_past_page_boundaries(tiny_base_model: Path, graphs: list[RecordedGraph]) -> None:
    eager = begin(tiny_base_model, capturable=False)
    steps = 140
    expected = [eager.decode([step % 200, step % 7, 3]) for step in range(steps)]
    assert not graphs
    replayed = begin(tiny_base_model, capturable=True)
    for step in range(steps):
        assert torch.equal(replayed.decode([step % 200, step % 7, 3]), expected[step]), f"step {step}"
    assert sum(graph.replays for graph in graphs) >= steps - 12, "most steps are replays"
    assert len(graphs) <= 8, "few shapes are captured"


def test_greedy_tokens_feed_the_next_step(tiny_base_model: Path, graphs: list[RecordedGraph]) -> None:
    eager, replayed = (begin(tiny_base_model, capturable=capturable) for capturable in (False, True))
    expected = torch.tensor([1, 2, 3], dtype=torch.int32)
    tokens = expected.clone()
    for _ in range(20):
        expected = eager.ops.argmax(eager.decode(expected))
        tokens = replayed.decode_greedily(tokens)
        assert torch.equal(tokens, expected)
    assert {graph.logits for graph in graphs} == {None}, "a greedy step asked for logits"


def test_steps_with_and_without_logits_take_turns(tiny_base_model: Path, graphs: list[RecordedGraph]) -> None:
    """Each kind of step has graphs of its own, over the same state."""
    eager, replayed = (begin(tiny_base_model, capturable=capturable) for capturable in (False, True))
    tokens = torch.tensor([1, 2, 3], dtype=torch.int32)
    for step in range(12):
        expected = eager.decode(tokens)
        if step % 3:
            tokens = replayed.decode_greedily(tokens).clone()
        else:
            assert torch.equal(replayed.decode(tokens), expected)
            tokens = eager.ops.argmax(expected)
        assert torch.equal(tokens, eager.ops.argmax(expected))
    assert len({graph.logits is None for graph in graphs}) == 2


def test_a_step_without_memory_for_a_graph_runs_eagerly(
    tiny_base_model: Path, graphs: list[RecordedGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = begin(tiny_base_model, capturable=False)
    model = begin(tiny_base_model, capturable=True)
    monkeypatch.setattr(DecodeStep, "_capture", lambda step, pages, kind: None)
    for _ in range(4):
        assert torch.equal(model.decode([3] * len(START)), expected.decode([3] * len(START)))
    assert not graphs


def test_logits_outlive_the_next_step(tiny_base_model: Path, graphs: list[RecordedGraph]) -> None:
    model = begin(tiny_base_model, capturable=True)
    model.decode([1, 2, 3])
    first = model.decode([4, 5, 6])
    kept = first.clone()
    model.decode([9, 9, 9])
    assert graphs[0].replays == 2
    assert torch.equal(first, kept)


def test_a_batch_that_shrinks_takes_its_state_along(tiny_base_model: Path, graphs: list[RecordedGraph]) -> None:
    alone, together = (begin(tiny_base_model, capturable=True) for _ in range(2))
    alone.keep([2])
    for step in range(4):
        together.decode([1, 2, step])
    together.keep([2])
    for step in range(4):
        expected = alone.decode([step])
    for step in range(4, 70):
        expected = alone.decode([step])
        assert torch.equal(together.decode([step]), expected), f"step {step}"


def test_pages_are_reserved_ahead_while_there_are_some(tiny_base_model: Path) -> None:
    model = begin(tiny_base_model, capturable=False)
    model.decode([1, 2, 3])
    assert [len(sequence.pages) for sequence in model.sequences] == [3, 3, 3]
    tight = Llama(model.config, model.ops, model.weights, KVCache(model.config, 4))
    tight.prefill([[7] * length for length in START])
    tight.decode([1, 2, 3])
    assert [len(sequence.pages) for sequence in tight.sequences] == [1, 1, 2]
    for _ in range(58):  # to the end of the first one's page
        tight.decode([1, 2, 3])


def test_a_row_of_no_sequence_changes_nothing(tiny_base_model: Path) -> None:
    plain, padded = (begin(tiny_base_model, capturable=False, dtype=torch.float32) for _ in range(2))
    expected = plain.decode([1, 2, 3])
    padded.reserve([1] * 3)
    before = padded.cache.pool.clone()
    step = padded.decode_step(4, 3)
    step.lengths.copy_(torch.tensor([*START, -1]))
    step.block_table.fill_(-1)
    step.block_table[:3, :2] = padded.cache.block_table(padded.sequences, 2)
    step.tokens.copy_(torch.tensor([1, 2, 3, 0]))
    with torch.inference_mode():
        logits = step.run(65, logits=True)
    assert logits is not None
    noise = 2e-5 * expected.abs().max().item()  # four rows are multiplied in another order than three
    assert largest_error(logits[:3], expected) <= noise
    written = (padded.cache.pool != before) & ~(padded.cache.pool.isnan() & before.isnan())
    assert written[0, 0, :, 0].any(2).sum() == 3, "as many slots are written as there are sequences"


@pytest.mark.parametrize(
    ("pages", "bucket"), [(1, 1), (2, 2), (3, 3), (4, 4), (5, 6), (6, 6), (7, 8), (9, 12), (13, 16), (17, 24), (65, 96)]
)
def test_page_buckets(pages: int, bucket: int) -> None:
    assert page_bucket(pages) == bucket


def test_a_chain_overlaps_all_launches_but_its_first() -> None:
    chain = LaunchChain()
    assert not chain.link(), "outside a chain nothing overlaps"
    for _ in range(2):
        with chain:
            assert [chain.link() for _ in range(3)] == [False, True, True]
        assert not chain.link()
    chain.enabled = False
    with chain:
        assert [chain.link() for _ in range(2)] == [False, False]


# On generated kernels


@pytest.fixture(scope="module")
def on_kernels(small_model: Path, request: pytest.FixtureRequest) -> Llama:
    """The real model on the generated kernels; a sequence decodes to the same bits at any small batch."""
    problem = hopper_problem()
    if problem is not None:
        pytest.skip(problem)
    exports: Path | None = request.config.getoption("--kernels")
    kernels = exports / "smollm2-135m" if exports else None
    return Llama.from_pretrained(small_model, device="cuda", kernels=kernels, cache_tokens=8192, batch_invariant=True)


def decode_from_nothing(model: Llama, texts: list[list[int]]) -> Tensor:
    """Logits [steps, sequences, vocabulary] of texts of one length, token by token."""
    model.start(len(texts))
    return torch.stack([model.decode(list(tokens)) for tokens in zip(*texts, strict=True)])


@pytest.mark.gpu
@pytest.mark.model
def test_graphs_and_overlap_change_no_bit(on_kernels: Llama) -> None:
    """300 steps past page boundaries: replayed, eager, and with ordinary launches."""
    ops: Any = on_kernels.ops
    texts = [[(step * step + row) % 40_000 for step in range(300)] for row in range(3)]
    results = []
    try:
        for ops.capturable, ops.launch_chain.enabled in ((False, False), (False, True), (True, True), (True, True)):
            on_kernels.cache.pool.fill_(torch.nan)
            results.append(decode_from_nothing(on_kernels, texts))
    finally:
        ops.capturable = ops.launch_chain.enabled = True
    assert results[0].isfinite().all()
    for other, name in zip(results[1:], ("eager, overlapping", "captured", "replayed"), strict=True):
        assert torch.equal(results[0], other), name


@pytest.mark.gpu
@pytest.mark.model
def test_a_sequence_decodes_to_the_same_bits_at_any_small_batch(on_kernels: Llama) -> None:
    texts = [[(step * 31 + row * 7) % 40_000 for step in range(140)] for row in range(8)]
    together = decode_from_nothing(on_kernels, texts)
    for batch in (1, 2, 5, 7):
        assert torch.equal(decode_from_nothing(on_kernels, texts[:batch]), together[:, :batch]), f"batch {batch}"
