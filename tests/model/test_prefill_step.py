"""Short prefills as replayed graphs: how passes are padded, and that neither padding nor replaying changes a bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from futransformer.driver import hopper_problem
from futransformer.fp8_scaling import ActivationScales
from futransformer.generator.config import load_config
from futransformer.generator.schedules import FEW_ROWS
from futransformer.kv_cache import CachedSequence
from futransformer.layer_parts import parse_parts
from futransformer.model import Llama
from futransformer.prefill_step import CAPTURED_ROWS, HostPass, PassInputs, PassShape, PrefillGraphs
from futransformer.quantize.calibrate import calibrate
from futransformer.quantize.recipe import Fp8Recipe
from tests.ops.stand_in import stand_in_library

TOKENS = torch.randint(256, (400,), generator=torch.Generator().manual_seed(3)).tolist()
BATCHES = [[TOKENS[:40], TOKENS[50:51]], [TOKENS[9:10], TOKENS[100:163]], [TOKENS[200:230], TOKENS[7:9]]]


class RecordedGraph:
    """Stands in for a CUDA graph: a replay runs what was captured, into the logits of its capture."""

    def __init__(self, graphs: PrefillGraphs, shape: PassShape, logits: Tensor) -> None:
        self.graphs, self.shape, self.logits = graphs, shape, logits
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        self.logits.copy_(self.graphs._run(self.shape))


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[RecordedGraph]:
    """The graphs that are captured, in order."""
    recorded: list[RecordedGraph] = []

    def capture(graphs: PrefillGraphs, shape: PassShape) -> Any:
        recorded.append(RecordedGraph(graphs, shape, torch.empty(shape.ends, 258)))
        return recorded[-1], recorded[-1].logits

    monkeypatch.setattr(PrefillGraphs, "_capture", capture)
    return recorded


def load(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, precision: str, capturable: bool, parts: str = "", **options: Any
) -> Llama:
    """The tiny model on stand-ins, of which a row's bits depend on no other row."""
    config = load_config(folder)
    if precision == "fp8":
        results = 4 * config.num_hidden_layers + 1
        scales = ActivationScales(torch.full((results,), 2.0**-12), torch.ones(results))
        options["recipe"] = Fp8Recipe(scales, parse_parts(parts, 2) if parts else frozenset())
    ops = stand_in_library(config, monkeypatch, precision=precision, mixed=bool(parts))
    ops.capturable = capturable
    model = Llama.from_pretrained(folder, ops=ops, precision=precision, cache_tokens=1024, **options)
    # that of a file on the CPU stands anywhere
    model.weights = replace(model.weights, embedding=model.weights.embedding.clone())
    model.cache.pool.fill_(torch.nan)
    return model


def read_all(model: Llama) -> list[Tensor]:
    """Logits of prefills and of extensions, what is in the cache, and what an FP8 pass has recorded."""
    results = []
    for batch in BATCHES:
        results += [model.prefill(batch), model.extend(batch[::-1])]
        if model.scaling is not None:
            results += [model.scaling.largest(), model.scaling.scale(), model.scaling._total.clone()]
    return [*results, model.cache.pool.nan_to_num(7)]


@pytest.mark.parametrize(
    ("precision", "mode", "parts"),
    [
        ("bf16", "frozen", ""),
        ("fp8", "frozen", ""),
        ("fp8", "running", ""),
        ("fp8", "frozen", "0.attention, 1.attention"),
        ("fp8", "running", "0.mlp"),
    ],
)
def test_padding_and_replaying_change_no_bit(
    tiny_base_model: Path,
    captured: list[RecordedGraph],
    monkeypatch: pytest.MonkeyPatch,
    precision: str,
    mode: Any,
    parts: str,
) -> None:
    """Nor a maximum or a count of FP8: rows that stand for nothing leave no trace."""
    options = {"precision": precision, "parts": parts, "fp8_scales": mode, "max_rows": 60}  # padded to 64
    expected = read_all(load(tiny_base_model, monkeypatch, capturable=False, **options))
    assert not captured
    assert precision == "bf16" or expected[4].sum() > 0, "some values saturate, and are counted"
    actual = read_all(load(tiny_base_model, monkeypatch, capturable=True, **options))
    assert sum(graph.replays for graph in captured) >= 2
    assert len(captured) < len(BATCHES)
    for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
        assert torch.equal(one, other), index


def test_logits_outlive_the_next_pass(
    tiny_base_model: Path, captured: list[RecordedGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(tiny_base_model, monkeypatch, precision="bf16", capturable=True)
    for _ in range(2):
        first = model.prefill([TOKENS[:5]])
    kept = first.clone()
    model.prefill([TOKENS[5:11]])
    assert captured[0].replays == 2
    assert torch.equal(first, kept)


def test_what_is_captured(
    tiny_base_model: Path, captured: list[RecordedGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short passes whose last rows' logits are wanted; neither all rows', nor a part of a prompt that goes on."""
    monkeypatch.setattr("futransformer.model.CAPTURED_ROWS", 20)
    model = load(tiny_base_model, monkeypatch, precision="bf16", capturable=True, max_rows=30)
    for _ in range(3):
        model.prefill([TOKENS[:21]])
        model.prefill([TOKENS[:20]], rows="all")
        model.prefill([TOKENS[:60]])  # two passes of 30, the first without logits
    assert not captured
    for _ in range(2):
        model.prefill([TOKENS[:20]])
    assert [graph.shape for graph in captured] == [PassShape(64, 1, 1, 1)]


def test_what_learns_scales_is_not_replayed(
    tiny_base_model: Path, captured: list[RecordedGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was captured before it would learn nothing, and what is captured in it would go on learning."""
    found = []
    for capturable in (False, True):
        model = load(tiny_base_model, monkeypatch, precision="fp8", capturable=capturable)
        for _ in range(2):
            model.prefill([TOKENS[:50]])
        before = [graph.replays for graph in captured]
        found.append(calibrate(model, TOKENS[:100], context=50, samples=2).scales)
        # of two readings of two windows the second, by the scales of the first
        assert [graph.replays for graph in captured] == [count + 2 for count in before]
        logits = model.prefill([TOKENS[:50]])
    assert captured
    assert torch.equal(found[0].amax, found[1].amax)
    model.ops.capturable = False
    assert torch.equal(model.prefill([TOKENS[:50]]), logits)


# Shapes


def test_padding_takes_no_row_to_another_kernel() -> None:
    """A row's bits depend on the GEMM that the number of rows chooses."""
    shapes = set()
    for rows in range(1, CAPTURED_ROWS + 1):
        padded = PassShape(rows, 1, 1, 1).padded()
        assert rows <= padded.rows <= CAPTURED_ROWS
        ends = PassShape(rows, rows, 1, rows).padded().ends
        for most in FEW_ROWS:
            assert (rows <= most) == (padded.rows <= most)
            assert (rows <= most) == (ends <= most)
        shapes.add(padded)
    assert len(shapes) == 6


def test_a_pass_in_one_buffer() -> None:
    rows = HostPass()
    first, second = CachedSequence([5], 0), CachedSequence([3, 9], 63)
    rows.add(first, [10, 11], ends=False)
    rows.add(second, [12, 13, 14], ends=True)
    assert (first.length, second.length) == (2, 66)
    assert rows.shape == (5, 2, 2, 1)
    assert rows.longest == 3
    shape = PassShape(7, 3, 3, 2)
    parts = PassInputs.of(rows.buffer(shape, pinned=False), shape)
    assert parts.slots.tolist() == [320, 321, 3 * 64 + 63, 9 * 64, 9 * 64 + 1, -1, -1]
    assert parts.tokens.tolist() == [10, 11, 12, 13, 14, -1, -1]
    assert parts.positions.tolist() == [0, 1, 63, 64, 65, 0, 0]
    assert parts.block_table.tolist() == [[5, -1, -1], [3, 9, -1], [-1, -1, -1]]
    assert parts.cu_seqlens_q.tolist() == [0, 2, 5, 5]
    assert parts.seqlens_k.tolist() == [2, 66, 0]
    assert parts.ends.tolist() == [4, 0]


# On generated kernels


@pytest.fixture(scope="module", params=["bf16", "fp8", "fp8-mixed"])
def on_kernels(small_model: Path, request: pytest.FixtureRequest) -> Llama:
    """The real model on the generated kernels."""
    problem = hopper_problem()
    if problem is not None:
        pytest.skip(problem)
    exports: Path | None = request.config.getoption("--kernels")
    options: dict[str, Any] = {}
    name = "smollm2-135m"
    precision = request.param.removesuffix("-mixed")
    if precision == "fp8":
        name, layers = f"{name}-fp8", load_config(small_model).num_hidden_layers
        bf16 = parse_parts("0.mlp, 3, 29.attention", layers) if request.param != precision else frozenset()
        options["recipe"] = Fp8Recipe.unknown(layers, bf16)
    kernels = exports / name if exports else None
    model = Llama.from_pretrained(
        small_model, device="cuda", precision=precision, kernels=kernels, cache_tokens=8192, **options
    )
    if model.scaling is not None:
        calibrate(model, TOKENS, context=100, samples=4)
    return model


@pytest.mark.gpu
@pytest.mark.model
@pytest.mark.parametrize("lengths", [(1,), (17,), (128,), (129,), (1, 70, 9), (300, 212)])
def test_eager_captured_and_replayed_passes_have_the_same_bits(on_kernels: Llama, lengths: tuple[int, ...]) -> None:
    """And record the same maxima: with ordinary launches, overlapping, padded, captured and replayed."""
    ops: Any = on_kernels.ops
    prompts = [[(row * row + 31 * index) % 40_000 for row in range(length)] for index, length in enumerate(lengths)]
    results = []
    try:
        for ops.capturable, ops.launch_chain.enabled in ((False, False), (False, True), *[(True, True)] * 4):
            on_kernels.start(1)
            on_kernels.cache.pool.fill_(torch.nan)
            if on_kernels.scaling is not None:
                on_kernels.scaling.reset()
            logits = on_kernels.prefill(prompts)
            recorded = [] if on_kernels.scaling is None else [on_kernels.scaling.largest(), on_kernels.scaling._total]
            results.append([logits, on_kernels.cache.pool.nan_to_num(7), *(tensor.clone() for tensor in recorded)])
    finally:
        ops.capturable = ops.launch_chain.enabled = True
    assert results[0][0].isfinite().all()
    for other in results[1:]:
        for one, expected in zip(other, results[0], strict=True):
            assert torch.equal(one, expected)


@pytest.mark.gpu
@pytest.mark.model
def test_a_replayed_prefill_does_not_synchronise(on_kernels: Llama) -> None:
    for _ in range(3):
        on_kernels.prefill([TOKENS[:100]])
    torch.cuda.set_sync_debug_mode("error")
    try:
        for start in range(10):
            on_kernels.prefill([TOKENS[start : start + 100]])
    finally:
        torch.cuda.set_sync_debug_mode("default")
