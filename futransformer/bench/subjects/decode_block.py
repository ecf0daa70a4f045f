"""decode_block/{8b,70b}/{bf16,int4,fp8,bf16-kv4,int4-kv4}/B=.../ctx=...: one layer of a decode step, graphed.

Every layer has its own weights and cache, so both come from memory. ``torch-bf16`` is compiled code, graphed as well,
and so is ``torch-int4``, of the same codes as ours. Their caches are BF16, as ours are but for ``-kv4``: there
attention reads an INT4 copy, of the same values, and beside it runs ours without one. Where all layers are one launch,
``ours-chained`` beside it are the single kernels.

decode_block/8b/bf16/batch_invariant/B=.../ctx=...: the same where a row has the same bits at any batch of 1 to 8,
beside ``ours-default``, where it has not. What the ratio lacks to 1 is the price.

decode_block/8b/int4-kv4/own/B=.../ctx=...: INT4 over an INT4 copy beside ``ours-bf16``, our own BF16 over BF16 pages
of the same values. 64 sequences of 131,072 tokens take 79 GB.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle, islice

import torch
from torch import Tensor

from futransformer.bench.case import MEMORY_BOUND, Case, Contender, Expected, Problem
from futransformer.bench.coded import CodedBlock
from futransformer.bench.graphs import graphed
from futransformer.bench.llama import (
    Cache,
    NaturalBlock,
    Paging,
    copy_of,
    device_rope_table,
    natural_rope,
    random_tensor,
    sets_for,
)
from futransformer.bench.rivals import torch_bf16, torch_int4
from futransformer.bench.runner import Bench
from futransformer.bench.shapes import DECODE_PRECISIONS, decode_block_work, shape_config
from futransformer.blocks import LayerWeights, llama_block
from futransformer.generator.config import LlamaConfig
from futransformer.generator.precision import INT4, get_precision
from futransformer.generator.specs import PAGE_SIZE
from futransformer.kv_packing import token_bytes
from futransformer.ops.interface import Ops, Stream, WalkLayers
from futransformer.reference import ReferenceOps, row_sumsq

BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (512, 1024, 4096, 32768, 131072)
DEFAULT = {
    ("8b", "bf16"): {(1, 1024), (8, 1024), (32, 1024), (1, 4096), (32, 4096)},
    ("70b", "bf16"): {(1, 1024), (32, 1024)},
    ("8b", "int4"): {*((batch, 1024) for batch in BATCHES[:-1]), (1, 4096), (32, 4096)},
    ("70b", "int4"): {(batch, 1024) for batch in BATCHES[:-1]},
    ("8b", "fp8"): {*((batch, 1024) for batch in BATCHES[:-1]), (1, 4096), (32, 4096)},
    ("70b", "fp8"): {(1, 1024), (32, 1024)},
    ("8b", "bf16-kv4"): {(1, 1024), (8, 1024), (32, 1024), (32, 4096)},
    ("70b", "bf16-kv4"): set(),
    ("8b", "int4-kv4"): {(1, 1024), (8, 1024), (16, 1024), (32, 1024), (1, 4096), (32, 4096)},
    ("70b", "int4-kv4"): {(1, 1024), (32, 1024)},
}
COPIES = {"bf16-kv4": "bf16-kv4", "int4-kv4": "int4-kv4"}
INVARIANT_BATCHES = (1, 4, 8)
INVARIANT_CONTEXTS = (1024, 4096)
OWN_BATCHES, OWN_CONTEXTS = (1, 8, 64), (512, 4096, 32768, 131072)


def cases() -> Sequence[Case]:
    """See futransformer.bench.subjects."""
    return [
        *(
            Case(
                f"decode_block/{shape}/{read}/B={batch}/ctx={context}",
                "us",
                MEMORY_BOUND,
                partial(open_case, shape, batch, context, precision=precision),
                default=(batch, context) in DEFAULT[shape, read],
                precision=precision,
            )
            for read, precision in {**DECODE_PRECISIONS, **COPIES}.items()
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
        *(
            Case(
                f"decode_block/8b/int4-kv4/own/B={batch}/ctx={context}",
                "us",
                MEMORY_BOUND,
                partial(open_own_case, "8b", batch, context, precision="int4-kv4"),
                precision="int4-kv4",
            )
            for batch in OWN_BATCHES
            for context in OWN_CONTEXTS
        ),
    ]


class DecodeInputs:
    """Layers with their caches, and one new row a sequence; where decode reads codes, the layers hold their values.

    A walk over more layers than there are begins anew with the first.
    """

    def __init__(
        self,
        config: LlamaConfig,
        batch: int,
        context: int,
        layers: int,
        device: torch.device,
        precision: str = "bf16",
    ) -> None:
        self.config, self.device = config, device
        self.paging = Paging(batch, context, device)
        self.rows = self.paging.decode_pass()
        self.layers: list[NaturalBlock] = []
        self.read: list[CodedBlock] = []  # the same as ours and the references read them
        row = get_precision(precision)
        for _ in range(layers):
            layer = NaturalBlock.random(config, device)
            self.read.append(CodedBlock.of(layer, row))
            self.layers.append(self.read[-1].natural(layer.gain))
        self.form = form = row.copy
        draw = partial(self.paging.cache, config) if form is None else partial(self.paging.coded_cache, config, form)
        self.caches = [draw() for _ in range(layers)]
        self.copies = [None if form is None else copy_of(cache, form) for cache in self.caches]
        self.x = random_tensor(batch, config.hidden_size, device=device)
        self.rope_table = device_rope_table(config, context, device)
        self._bound: dict[tuple[int, int, int], WalkLayers | None] = {}

    def stream(self) -> Stream:
        """The rows as the first layer meets them."""
        return Stream(self.x.clone(), row_sumsq(self.x), self.x.float())

    def walk(
        self,
        ops: Ops,
        packed: Sequence[LayerWeights],
        stream: Stream,
        *,
        plain: bool = False,
        chained: bool = False,
    ) -> Stream:
        """Layers of ours from the first on; the stream's residual is overwritten. ``plain``: they have no INT4 copy.

        In one launch where that is there, unless ``chained`` asks for single kernels.
        """
        bound = None if plain or chained else self.bound(ops, packed)
        if bound is not None:
            return bound(stream, self.rows, self.rope_table)
        for weights, cache, kv_copy in zip(packed, cycle(self.caches), cycle(self.copies), strict=False):
            pages = cache.k_pages, cache.v_pages
            copied = None if plain else kv_copy
            stream = llama_block(ops, weights, stream, self.rows, self.rope_table, *pages, kv_copy=copied)
        return stream

    def bound(self, ops: Ops, packed: Sequence[LayerWeights]) -> WalkLayers | None:
        """The layers as one operation, if there is one for so many rows; the same for the same layers."""
        key = (id(ops), packed[0].qkv["decode"].data_ptr(), len(packed))
        if key not in self._bound:
            bound = ops.bind_layers(packed, self)
            self._bound[key] = (
                bound if bound is not None and bound.serves(len(self.x), self.rows.max_seqlen_k) else None
            )
        return self._bound[key]

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """See LayerPages.layer."""
        cache = self.caches[index % len(self.caches)]
        return cache.k_pages, cache.v_pages

    def copy_layer(self, index: int) -> Tensor | None:
        """See LayerPages.copy_layer."""
        return self.copies[index % len(self.copies)]

    def packed(self, ops: Ops) -> list[LayerWeights]:
        """All layers as ops read them."""
        return [layer.packed(self.config, ops, "decode") for layer in self.read]

    def torch_layers(self, rival: str) -> list[Callable[[Tensor], Tensor]]:
        """Compiled PyTorch, ``torch-bf16`` or ``torch-int4``: x after each layer."""
        cos, sin = natural_rope(self.rope_table, self.rows.positions)
        state = torch_bf16.Shape.of(self.config), cos, sin, self.rows.positions[:1].long()
        functions: dict[str, Callable[..., Tensor]] = {
            "torch-bf16": torch_bf16.decode_block,
            "torch-int4": torch_int4.decode_block,
        }
        function = torch_bf16.compiled(functions[rival])
        weights: Sequence[NaturalBlock | torch_int4.Block] = self.layers
        if rival == "torch-int4":
            layers = zip(self.read, self.layers, strict=True)
            weights = [torch_int4.Block.of(codes, layer.gain) for codes, layer in layers]

        def call(layer: NaturalBlock | torch_int4.Block, cache: Cache, x: Tensor) -> Tensor:
            return function(x, layer, *state, cache.k, cache.v)

        return [partial(call, layer, cache) for layer, cache in zip(weights, self.caches, strict=True)]

    def poison(self, layers: int) -> None:
        """Put NaN where the new tokens' K and V belong: only what a call stores can make its result finite."""
        slots = self.rows.slots
        for cache, kv_copy in zip(self.caches[:layers], self.copies, strict=False):
            for pages in (cache.k_pages, cache.v_pages):
                pages[slots // PAGE_SIZE, :, slots % PAGE_SIZE] = torch.nan
            if kv_copy is not None and self.form is not None:
                places = token_bytes(self.config.head_dim, self.form).to(self.device)[slots % PAGE_SIZE]
                heads = torch.arange(kv_copy.shape[1], device=self.device)[:, None]
                kv_copy[(slots // PAGE_SIZE)[:, None, None], heads, places[:, None]] = 255  # scales of NaN

    def reference_walk(self, ops: ReferenceOps, stream: Stream, layers: int) -> Stream:
        """``layers`` layers by the reference, on the pages themselves: caches can be too large to copy.

        It stores the new tokens' K and V there, rounded to BF16, as every call does.
        """
        every = zip(self.read, self.caches, self.copies, strict=True)
        for layer, cache, kv_copy in islice(cycle(every), layers):
            weights = layer.packed(self.config, ops, "decode")
            pages = cache.k_pages, cache.v_pages
            stream = llama_block(ops, weights, stream, self.rows, self.rope_table, *pages, kv_copy=kv_copy)
        return stream


class DecodeProblem:
    """Layers of one shape in memory, and the contenders that walk over them: a call is one layer."""

    def __init__(self, shape: str, batch: int, context: int, bench: Bench, precision: str = "bf16") -> None:
        self.config = config = shape_config(shape)
        self.work = decode_block_work(config, batch, context, precision)
        self.inputs = DecodeInputs(config, batch, context, sets_for(self.work.bytes), bench.device, precision)
        self.packed = self.inputs.packed(bench.library(shape, precision))
        self.floor = self.work.floor_seconds(bench.ceilings)

    def ours(
        self,
        ops: Ops,
        *,
        plain: bool = False,
        chained: bool = False,
        packed: list[LayerWeights] | None = None,
    ) -> Contender:
        """Our kernels, ``plain`` without an INT4 copy: a walk over all layers is a chain, a replay several walks.

        A walk is one launch where that is there, unless ``chained`` asks for single kernels.

        ``packed`` are the layers as these kernels read them, if not as the case's own.
        """
        inputs, packed, stream = self.inputs, packed or self.packed, self.inputs.stream()

        def walk() -> None:
            stream.residual.copy_(inputs.x)
            stream.x.copy_(inputs.x)  # one launch leaves its end there
            with ops.chain():
                inputs.walk(ops, packed, stream, plain=plain, chained=chained)

        def outputs() -> Sequence[Tensor]:
            inputs.poison(1)
            return [inputs.walk(ops, packed[:1], inputs.stream(), plain=plain, chained=chained).x]

        return self._per_layer(walk, outputs)

    def compiled_torch(self, rival: str) -> Contender:
        """Compiled PyTorch."""
        x, layers = self.inputs.x, self.inputs.torch_layers(rival)
        return self._per_layer(partial(in_turn, layers, x), lambda: [layers[0](x)])

    def expected(self) -> Sequence[Expected]:
        """The references' answers for the first layer."""
        inputs, answers = self.inputs, []
        for dtype in (torch.float32, torch.bfloat16):
            reference = ReferenceOps(self.config, device=inputs.device, dtype=dtype, copy=inputs.form)
            answers.append(inputs.reference_walk(reference, inputs.stream(), 1).x)
        return [Expected(answers[0], answers[1])]

    def _per_layer(self, walk: Callable[[], object], outputs: Callable[[], Sequence[Tensor]]) -> Contender:
        layers = len(self.packed)
        contender = graphed([walk], outputs, self.floor * layers)
        return Contender(contender.run, contender.outputs, contender.calls * layers)


def in_turn(layers: Sequence[Callable[[Tensor], Tensor]], x: Tensor) -> Tensor:
    """Go through all layers of a rival."""
    for layer in layers:
        x = layer(x)
    return x


def rivals(precision: str) -> tuple[str, ...]:
    """Whom ours is compared with."""
    return ("torch-bf16", "torch-int4") if get_precision(precision).decode == INT4 else ("torch-bf16",)


def open_case(shape: str, batch: int, context: int, bench: Bench, *, precision: str = "bf16") -> Problem:
    """Ours beside compiled PyTorch."""
    problem = DecodeProblem(shape, batch, context, bench, precision)
    form = get_precision(precision).copy
    without = "" if form is None else get_precision(precision).name.removesuffix(form.suffix)

    def without_copy() -> Contender:
        return problem.ours(bench.library(shape, without), plain=True)

    ops = bench.library(shape, precision)
    beside = {f"ours-{without}": without_copy} if without else {}
    if problem.inputs.bound(ops, problem.packed) is not None:
        beside["ours-chained"] = lambda: problem.ours(ops, chained=True)
    return Problem(
        work=problem.work,
        ours=problem.ours(ops),
        rivals={rival: partial(problem.compiled_torch, rival) for rival in rivals(precision)},
        expected=problem.expected,
        beside=beside,
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


def open_own_case(shape: str, batch: int, context: int, bench: Bench, *, precision: str) -> Problem:
    """Codes beside our own BF16 of what they are worth."""
    problem = DecodeProblem(shape, batch, context, bench, precision)

    def in_bf16() -> Contender:
        ops = bench.library(shape)
        packed = [layer.packed(problem.config, ops, "decode") for layer in problem.inputs.layers]
        return problem.ours(ops, plain=True, packed=packed)

    return Problem(
        work=problem.work,
        ours=problem.ours(bench.library(shape, precision)),
        rivals={"ours-bf16": in_bf16},
        expected=problem.expected,
    )
