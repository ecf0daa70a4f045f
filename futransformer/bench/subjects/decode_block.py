"""decode_block/{8b,70b}/bf16/B=.../ctx=...: one layer of a decode step, in a graph over several layers.

Every layer has its own weights and cache, so both come from memory. ``torch-bf16`` is compiled code, graphed as well.

decode_block/8b/bf16/batch_invariant/B=.../ctx=...: the same where a row has the same bits at any batch of 1 to 8,
beside ``ours-default``, where it has not. What the ratio lacks to 1 is the price.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from futransformer.bench.case import MEMORY_BOUND, Case, Contender, Expected, Problem
from futransformer.bench.graphs import graphed
from futransformer.bench.llama import (
    Cache,
    NaturalBlock,
    Paging,
    device_rope_table,
    natural_rope,
    random_tensor,
    sets_for,
)
from futransformer.bench.rivals import torch_bf16
from futransformer.bench.runner import Bench
from futransformer.bench.shapes import decode_block_work, shape_config
from futransformer.blocks import LayerWeights, llama_block
from futransformer.generator.config import LlamaConfig
from futransformer.generator.specs import PAGE_SIZE
from futransformer.ops.interface import Ops, Stream
from futransformer.reference import ReferenceOps, row_sumsq

BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (512, 1024, 4096, 32768, 131072)
DEFAULT = {
    "8b": {(1, 1024), (8, 1024), (32, 1024), (1, 4096), (32, 4096)},
    "70b": {(1, 1024), (32, 1024)},
}
INVARIANT_BATCHES = (1, 4, 8)
INVARIANT_CONTEXTS = (1024, 4096)


def cases() -> Sequence[Case]:
    """See futransformer.bench.subjects."""
    return [
        *(
            Case(
                f"decode_block/{shape}/bf16/B={batch}/ctx={context}",
                "us",
                MEMORY_BOUND,
                partial(open_case, shape, batch, context),
                default=(batch, context) in DEFAULT[shape],
            )
            for shape in ("8b", "70b")
            for batch in BATCHES
            for context in CONTEXTS
        ),
        *(
            Case(
                f"decode_block/8b/bf16/batch_invariant/B={batch}/ctx={context}",
                "us",
                MEMORY_BOUND,
                partial(open_invariant_case, "8b", batch, context),
            )
            for batch in INVARIANT_BATCHES
            for context in INVARIANT_CONTEXTS
        ),
    ]


class DecodeInputs:
    """Layers with their caches, and one new row a sequence."""

    def __init__(self, config: LlamaConfig, batch: int, context: int, layers: int, device: torch.device) -> None:
        self.config, self.device = config, device
        self.paging = Paging(batch, context, device)
        self.rows = self.paging.decode_pass()
        self.layers = [NaturalBlock.random(config, device) for _ in range(layers)]
        self.caches = [self.paging.cache(config) for _ in range(layers)]
        self.x = random_tensor(batch, config.hidden_size, device=device)
        self.rope_table = device_rope_table(config, context, device)

    def stream(self) -> Stream:
        """The rows as the first layer meets them."""
        return Stream(self.x, row_sumsq(self.x), self.x.float())

    def walk(self, ops: Ops, packed: Sequence[LayerWeights], stream: Stream) -> Stream:
        """All layers of ours; the stream's residual is overwritten."""
        for weights, cache in zip(packed, self.caches, strict=True):
            stream = llama_block(ops, weights, stream, self.rows, self.rope_table, cache.k_pages, cache.v_pages)
        return stream

    def torch_call(self) -> Callable[[Tensor, NaturalBlock, Cache], Tensor]:
        """Compiled PyTorch for one layer."""
        function, shape = torch_bf16.compiled(torch_bf16.decode_block), torch_bf16.Shape.of(self.config)
        cos, sin = natural_rope(self.rope_table, self.rows.positions)
        position = self.rows.positions[:1].long()
        return lambda x, layer, cache: function(x, layer, shape, cos, sin, position, cache.k, cache.v)

    def torch_walk(self, call: Callable[[Tensor, NaturalBlock, Cache], Tensor], x: Tensor) -> Tensor:
        """All layers of the rival."""
        for layer, cache in zip(self.layers, self.caches, strict=True):
            x = call(x, layer, cache)
        return x

    def poison(self, layers: int) -> None:
        """Put NaN where the new tokens' K and V belong: only what a call stores can make its result finite."""
        slots = self.rows.slots
        for cache in self.caches[:layers]:
            for pages in (cache.k_pages, cache.v_pages):
                pages[slots // PAGE_SIZE, :, slots % PAGE_SIZE] = torch.nan

    def reference_walk(self, ops: ReferenceOps, stream: Stream, layers: int) -> Stream:
        """The first ``layers`` layers by the reference, on the pages themselves: caches can be too large to copy.

        It stores the new tokens' K and V there, rounded to BF16, as every call does.
        """
        for layer, cache in zip(self.layers[:layers], self.caches[:layers], strict=True):
            weights = layer.packed(self.config, ops, "decode")
            stream = llama_block(ops, weights, stream, self.rows, self.rope_table, cache.k_pages, cache.v_pages)
        return stream


class DecodeProblem:
    """Layers of one shape in memory, and the contenders that walk over them: a call is one layer."""

    def __init__(self, shape: str, batch: int, context: int, bench: Bench) -> None:
        self.config = config = shape_config(shape)
        self.work = decode_block_work(config, batch, context)
        self.inputs = DecodeInputs(config, batch, context, sets_for(self.work.bytes), bench.device)
        ops = bench.library(shape)
        self.packed = [layer.packed(config, ops, "decode") for layer in self.inputs.layers]
        self.floor = self.work.floor_seconds(bench.ceilings)

    def ours(self, ops: Ops) -> Contender:
        """Our kernels: a walk over all layers is a chain, a replay several walks."""
        inputs, packed, stream = self.inputs, self.packed, self.inputs.stream()

        def walk() -> None:
            stream.residual.copy_(inputs.x)
            with ops.chain():
                inputs.walk(ops, packed, stream)

        def outputs() -> Sequence[Tensor]:
            cache = inputs.caches[0]
            pages = cache.k_pages, cache.v_pages
            inputs.poison(1)
            return [llama_block(ops, packed[0], inputs.stream(), inputs.rows, inputs.rope_table, *pages).x]

        return self._per_layer(walk, outputs)

    def compiled_torch(self) -> Contender:
        """Compiled PyTorch."""
        inputs = self.inputs
        call = inputs.torch_call()

        def outputs() -> Sequence[Tensor]:
            return [call(inputs.x, inputs.layers[0], inputs.caches[0])]

        return self._per_layer(partial(inputs.torch_walk, call, inputs.x), outputs)

    def expected(self) -> Sequence[Expected]:
        """The references' answers for the first layer."""
        inputs, answers = self.inputs, []
        for dtype in (torch.float32, torch.bfloat16):
            reference = ReferenceOps(self.config, device=inputs.device, dtype=dtype)
            answers.append(inputs.reference_walk(reference, inputs.stream(), 1).x)
        return [Expected(answers[0], answers[1])]

    def _per_layer(self, walk: Callable[[], object], outputs: Callable[[], Sequence[Tensor]]) -> Contender:
        layers = len(self.packed)
        contender = graphed([walk], outputs, self.floor * layers)
        return Contender(contender.run, contender.outputs, contender.calls * layers)


def open_case(shape: str, batch: int, context: int, bench: Bench) -> Problem:
    """Ours beside compiled PyTorch."""
    problem = DecodeProblem(shape, batch, context, bench)
    return Problem(
        work=problem.work,
        ours=problem.ours(bench.library(shape)),
        rivals={"torch-bf16": problem.compiled_torch},
        expected=problem.expected,
    )


def open_invariant_case(shape: str, batch: int, context: int, bench: Bench) -> Problem:
    """Ours with the same bits at any small batch, beside ours."""
    problem = DecodeProblem(shape, batch, context, bench)
    return Problem(
        work=problem.work,
        ours=problem.ours(bench.library(shape, batch_invariant=True)),
        rivals={"ours-default": lambda: problem.ours(bench.library(shape))},
        expected=problem.expected,
    )
