"""All layers of a decode step in one launch, beside the same layers by single kernels and by the reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

from futransformer.bench.llama import Cache, Paging, copy_of
from futransformer.blocks import DecodePass, llama_block
from futransformer.generator.config import CONFIGS, load_config
from futransformer.generator.decode_heuristics import decode_layers_spec
from futransformer.generator.errors import UnsupportedError
from futransformer.generator.int4 import ROW_TILE
from futransformer.generator.plan import make_plan, profiling_specs
from futransformer.generator.precision import get_precision
from futransformer.generator.render import render
from futransformer.generator.specs import PAGE_SIZE
from futransformer.library import KernelLibrary
from futransformer.ops.decode_layers import PAGES_AT_ONCE, DecodeLayers
from futransformer.ops.interface import Ops, Stream
from futransformer.reference import ReferenceOps, allowed_error, largest_error
from futransformer.weights import LlamaWeights
from tests.ops import models
from tests.ops.test_two_layers import STEPS, RandomModel, check_logits

MODELS = models.LAYERS
LENGTHS = (1, 63, 64, 65, 300)
CONTEXTS = (1, 64, 129, 1000)
LAYERS = 2
RUNS = 20

GpuOps = Callable[[str], KernelLibrary]


class Pages:
    """As much of a cache as layers read."""

    def __init__(self, caches: list[Cache], copies: list[Tensor]) -> None:
        self.caches, self.copies = caches, copies

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        return self.caches[index].k_pages, self.caches[index].v_pages

    def copy_layer(self, index: int) -> Tensor:
        return self.copies[index]


class Layers:
    """Two random layers, a row at the end of a text of ``context`` tokens, and what they hold."""

    def __init__(self, ops: KernelLibrary, context: int) -> None:
        self.ops = ops
        self.random = RandomModel(ops.config, ops.device, ops.precision)
        self.weights = self.random.weights(ops)
        self.tokens = torch.full((1,), 7, dtype=torch.int32, device=ops.device)
        self.begin(context)

    def begin(self, context: int) -> None:
        """Another text."""
        ops = self.ops
        torch.manual_seed(4)
        paging = Paging(1, context, ops.device)
        form = ops.precision.copy
        assert form is not None
        caches = [paging.coded_cache(ops.config, form) for _ in range(LAYERS)]
        self.pages = Pages(caches, [copy_of(cache, form) for cache in caches])
        self.before = [tensor.clone() for tensor in self.written()]
        self.rows = paging.decode_pass()

    @cached_property
    def of_references(self) -> LlamaWeights:
        """The weights in float32, whatever a reference rounds."""
        return self.random.weights(ReferenceOps(self.ops.config, device=self.ops.device, copy=self.ops.precision.copy))

    def written(self) -> list[Tensor]:
        """Everything in memory that a step writes to, as bytes."""
        tensors = [*(page for index in range(LAYERS) for page in self.pages.layer(index)), *self.pages.copies]
        return [tensor.view(torch.uint8) for tensor in tensors]

    def restore(self) -> None:
        for tensor, before in zip(self.written(), self.before, strict=True):
            tensor.copy_(before)

    def bound(self) -> DecodeLayers:
        bound = self.ops.bind_layers(self.weights.layers, self.pages)
        assert bound is not None
        assert bound.serves(len(self.tokens), 1)
        return bound

    def walk(self, ops: Ops, rows: DecodePass | None = None) -> Stream:
        """Layer by layer."""
        weights = self.weights if ops is self.ops else self.of_references
        stream = ops.gather_rows("decode", weights.embedding, self.tokens)
        for index, layer in enumerate(weights.layers):
            pages = self.pages.layer(index)
            kv_copy = self.pages.copy_layer(index)
            stream = llama_block(ops, layer, stream, rows or self.rows, weights.rope_table, *pages, kv_copy=kv_copy)
        return stream

    def launch(self, bound: DecodeLayers, rows: DecodePass | None = None) -> Stream:
        """In one launch."""
        stream = self.ops.gather_rows("decode", self.weights.embedding, self.tokens)
        x, sumsq, residual = bound(stream, rows or self.rows, self.weights.rope_table)
        return Stream(x.clone(), sumsq.clone(), residual.clone())


def check_against_the_reference(layers: Layers, ours: Stream) -> None:
    """What one launch left, by the two-times rule; the cache is then the references'."""
    layers.restore()
    exact, rounded = (
        layers.walk(
            ReferenceOps(layers.ops.config, device=layers.ops.device, dtype=dtype, copy=layers.ops.precision.copy)
        )
        for dtype in (torch.float32, torch.bfloat16)
    )
    for name in ("x", "residual"):
        want, same_type = getattr(exact, name), getattr(rounded, name)
        allowed = allowed_error(same_type, want, get_precision("bf16"))
        error = largest_error(getattr(ours, name), want)
        assert error <= allowed, f"{name}: error {error:.3e}, allowed {allowed:.3e}"
    # Of terms that are not negative a sum of depth d loses at most d roundings; either sum is less than 80 deep.
    torch.testing.assert_close(ours.sumsq.sum(1), ours.residual.square().sum(1), rtol=2 * 80 * 2**-24, atol=0)


def check_runs(layers: Layers, bound: DecodeLayers, runs: int) -> Stream:
    """One launch, and the same bits of ``runs`` others."""
    layers.restore()
    first = layers.launch(bound)
    stored = [tensor.clone() for tensor in layers.written()]
    for _ in range(runs):
        layers.restore()
        again = layers.launch(bound)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(layers.written(), stored, strict=True))
    return first


def check_no_sequence_and_beyond(layers: Layers, bound: DecodeLayers) -> None:
    """A row whose text is longer than its pages is NaN; one without a sequence is none, and leaves the cache alone."""
    layers.restore()
    rows = layers.rows
    beyond = torch.full_like(rows.seqlens_k, rows.block_table.shape[1] * PAGE_SIZE + 1)
    found = layers.launch(bound, DecodePass(rows.positions, rows.slots, rows.block_table, beyond, rows.max_seqlen_k))
    assert found.x.isnan().all()
    layers.restore()
    none, no_slot = torch.zeros_like(rows.seqlens_k), torch.full_like(rows.slots, -1)
    found = layers.launch(bound, DecodePass(rows.positions, no_slot, rows.block_table, none, rows.max_seqlen_k))
    assert found.residual.isfinite().all()
    assert all(torch.equal(now, before) for now, before in zip(layers.written(), layers.before, strict=True))


def check_layers(ops: KernelLibrary, contexts: Sequence[int]) -> None:
    """All of these, of one set of weights."""
    layers = Layers(ops, contexts[0])
    check_no_sequence_and_beyond(layers, layers.bound())
    for context in contexts:
        layers.begin(context)
        ours = check_runs(layers, layers.bound(), 1)
        check_new_token(layers)
        check_against_the_reference(layers, ours)


def check_new_token(layers: Layers) -> None:
    """Of a cache that a launch has written: K and V of the newest token are there, and no other's have changed."""
    page, token = divmod(int(layers.rows.slots), PAGE_SIZE)
    written, before = layers.written(), layers.before
    for index, (now, then) in enumerate(zip(written, before, strict=True)):
        pages = index < 2 * LAYERS
        changed = (now != then).flatten(2)  # [page, head, byte]
        assert changed[page].any()
        changed[page] = False
        assert not changed.any()
        if pages:
            of_token = now[page].clone()
            of_token[:, token] = then[page, :, token]
            assert torch.equal(of_token, then[page])
            assert now[page, :, token].contiguous().view(torch.bfloat16).isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("context", CONTEXTS)
def test_against_the_reference_and_single_kernels(gpu_ops: GpuOps, model: str, context: int) -> None:
    layers = Layers(gpu_ops(model), context)
    chained = layers.walk(layers.ops)
    stored = [tensor.clone() for tensor in layers.written()]
    layers.restore()
    ours = layers.launch(layers.bound())
    # of the first layer nothing but the order of sums differs, of the second what was rounded of it as well
    for tensor, by_chain in list(zip(layers.written(), stored, strict=True))[:2]:
        assert (tensor != by_chain).sum() <= 0.02 * (by_chain != 0).sum()
    check_against_the_reference(layers, ours)
    assert chained.x.isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("model", MODELS)
def test_every_run_gives_the_same_bits(gpu_ops: GpuOps, model: str) -> None:
    layers = Layers(gpu_ops(model), 700)
    check_runs(layers, layers.bound(), RUNS)


@pytest.mark.gpu
@pytest.mark.parametrize("model", MODELS)
def test_a_row_without_a_sequence_or_beyond_its_pages(gpu_ops: GpuOps, model: str) -> None:
    layers = Layers(gpu_ops(model), 130)
    check_no_sequence_and_beyond(layers, layers.bound())


@pytest.mark.gpu
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("length", LENGTHS)
def test_logits_of_one_sequence(gpu_ops: GpuOps, model: str, length: int) -> None:
    """A prompt, three steps, another turn and a step, by the model: the two-times rule against the exact reference."""
    check_logits(gpu_ops(model), (length,))


@pytest.mark.gpu
@pytest.mark.parametrize("model", MODELS)
def test_graphed_steps_have_the_bits_of_eager_ones(gpu_ops: GpuOps, model: str) -> None:
    """Over many pages: what blocks leave for one another must not be taken for another launch's."""
    ops = gpu_ops(model)
    random = RandomModel(ops.config, ops.device, ops.precision)
    weights, found = random.weights(ops), []
    for capturable in (True, False):
        ops.capturable = capturable
        try:
            llama = random.on(ops, weights)
            tokens = llama.prefill([[7, 3, 5]]).argmax(1).int()
            found.append(torch.stack([(tokens := llama.decode_greedily(tokens)).clone() for _ in range(STEPS)]))
        finally:
            ops.capturable = True
    assert torch.equal(*found)


@pytest.mark.parametrize(
    "precision",
    [
        "bf16-kv4",
        "int4",
        "int4-kv8-kv4",
        "int4-gain-kv4",
        "int4-kv4-min",
    ],
)
def test_who_has_no_such_kernel(precision: str) -> None:
    assert make_plan(load_config("llama-3.1-8b"), precision).decode_layers is None


def test_who_has_one() -> None:
    """All but 16 query heads a KV head, and layers so small that single kernels are faster."""
    plans = {name: make_plan(config, "int4-kv4") for name, config in CONFIGS.items()}
    without = {name for name, plan in plans.items() if not plan.decode_layers}
    assert without == {"llama-3.1-405b", "smollm2-135m", "smollm2-360m", "tinyllama-1.1b"}
    for plan in plans.values():
        if (spec := plan.decode_layers) is not None:
            tiles = {op.op: op.n // ROW_TILE for op in spec.projections}
            assert tiles["gate_up"] >= spec.blocks, "a block without a share of h could be a layer ahead"
            assert spec.heads.num_key_value_heads <= spec.blocks


def test_hidden_sizes_in_several_windows_are_served() -> None:
    """18,432 ends in a window of two slots, of which two sets have none."""
    config = replace(load_config("llama-3.1-8b"), name="wide", intermediate_size=49_152)
    for hidden, heads in ((16_384, 128), (18_432, 144), (20_480, 160)):
        wide = replace(config, hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=heads // 8)
        assert make_plan(wide, "int4-kv4").decode_layers is not None


def test_long_sequences_are_for_single_kernels() -> None:
    layers = DecodeLayers.__new__(DecodeLayers)
    assert [layers.serves(rows, keys) for rows, keys in ((1, 1), (1, 32_768), (1, 32_769), (2, 1), (0, 1))] == [
        *(True, True),
        *(False, False, False),
    ]


def test_a_build_for_profiling_is_another_kernel() -> None:
    plan = make_plan(load_config("llama-3.1-8b"), "int4-kv4")
    (clocked,) = profiling_specs(plan)
    assert plan.decode_layers is not None
    assert clocked.name == f"{plan.decode_layers.name}_clocked"
    assert [param.name for param in clocked.params] == [*(param.name for param in plan.decode_layers.params), "clocks"]
    assert "DecodeLayersTraits" in render(clocked)
    assert "clocks" not in render(plan.decode_layers).replace("_clocked", "")
    assert clocked not in plan.specs()
    assert profiling_specs(make_plan(load_config("llama-3.1-8b"), "int4")) == ()


def test_shapes_and_rings_that_are_refused() -> None:
    spec = make_plan(load_config("llama-3.1-8b"), "int4-kv4").decode_layers
    assert spec is not None
    with pytest.raises(UnsupportedError, match="a row tile for each of 132 blocks"):
        replace(spec, intermediate_size=512)
    with pytest.raises(UnsupportedError, match="in_flight must be 1 to 7"):
        replace(spec, slots=11, in_flight=8)
    small = replace(load_config("llama-3.1-8b"), intermediate_size=512)
    assert make_plan(small, "int4-kv4").decode_layers is None
    no_room = decode_layers_spec(spec.heads, spec.hidden_size, 16 * spec.intermediate_size, get_precision("int4-kv4"))
    assert no_room is None


@pytest.mark.parametrize("kv_heads", [1, 3, 8, 32])
def test_every_page_has_a_block_and_every_block_one_share(kv_heads: int) -> None:
    spec = SimpleNamespace(blocks=132, heads=SimpleNamespace(num_key_value_heads=kv_heads))
    for pages in (1, 2, 15, 16, 17, 64, 2048):
        splits, of_each = DecodeLayers.splits(cast(DecodeLayers, SimpleNamespace(spec=spec)), pages)
        assert splits * of_each >= pages > (splits - 1) * of_each
        assert splits * kv_heads <= spec.blocks
        assert of_each % PAGES_AT_ONCE == 0
