"""prefill_block/{8b,70b}/{bf16,fp8}/{1x512,1x2048,4x2048,1x8192,ragged}: a layer of a prefill, launched from the host.

``torch-bf16`` and ``torch-fp8`` are compiled code with the faster of SDPA's cuDNN and flash backends on these lengths;
they keep K and V in contiguous tensors. Prompts of several lengths are given to them twice: concatenated, with
FlashAttention-4's attention between two compiled parts, and (``-padded``) as a batch, padded to the longest.

Every contender walks over several layers' weights in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from futransformer.bench.case import COMPUTE_BOUND, Case, Contender, Expected, Problem
from futransformer.bench.fp8 import Fp8Layer, LayerResults, fp8_output, references, scale_of
from futransformer.bench.graphs import rotating
from futransformer.bench.llama import NaturalBlock, Prompts, device_rope_table, natural_rope, random_tensor
from futransformer.bench.rivals import attention, torch_bf16, torch_fp8
from futransformer.bench.runner import Bench
from futransformer.bench.shapes import RAGGED, block_gemm_work, prefill_attention_work, shape_config
from futransformer.blocks import UNSCALED, BlockScales, LayerWeights, llama_block
from futransformer.generator.config import LlamaConfig
from futransformer.generator.precision import E4M3, Precision, get_precision
from futransformer.ops.interface import Ops, Stream
from futransformer.quantize.fp8 import codes_of
from futransformer.reference import ReferenceOps, row_sumsq

PROMPTS = {"1x512": (512,), "1x2048": (2048,), "4x2048": (2048,) * 4, "1x8192": (8192,), "ragged": RAGGED}
REFRESH = 32  # layers that add to a residual stream before it starts anew, so that its values stay those of a model
LAYERS = 2  # one layer of an 8B model is seven times what L2 holds
ROOM = 16  # how far the values of REFRESH layers may outgrow those of the first: h has 0.6 of the deviation of x

Layer = tuple[LayerWeights, BlockScales]
RivalLayer = tuple[Callable[[Any], Tensor], Callable[[Tensor], Tensor]]  # a layer's call, and what picks our rows of it


def cases() -> Sequence[Case]:
    """See futransformer.bench.subjects."""
    return [
        Case(
            f"prefill_block/{shape}/{precision}/{name}",
            "ms",
            COMPUTE_BOUND,
            partial(open_case, shape, lengths, precision=precision),
            default=shape == "8b" or (precision, name) == ("fp8", "4x2048"),
            precision=precision,
        )
        for precision in ("bf16", "fp8")
        for shape in ("8b", "70b")
        for name, lengths in PROMPTS.items()
    ]


class Inputs:
    """Layers in natural order, the prompts' rows, and pages to fill."""

    def __init__(self, config: LlamaConfig, lengths: Sequence[int], device: torch.device, precision: Precision) -> None:
        self.config, self.device, self.precision = config, device, precision
        self.prompts = Prompts(lengths, device)
        self.layers = [NaturalBlock.random(config, device) for _ in range(LAYERS)]
        self.x = random_tensor(self.prompts.rows, config.hidden_size, device=device)
        self.sumsq = row_sumsq(self.x)
        self.rope_table = device_rope_table(config, max(lengths), device)
        self.rows = self.prompts.prefill_pass()
        self.k_pages, self.v_pages = (self.prompts.empty_pages(config) for _ in range(2))

    def packed(self, ops: Ops) -> list[Layer]:
        """The layers as ``ops`` reads them."""
        return [(layer.packed(self.config, ops, "prefill"), UNSCALED) for layer in self.layers]

    def begun(self, residual: Tensor) -> Stream:
        """The stream of a residual that holds the rows."""
        return Stream(residual, self.sumsq, residual)

    def stream(self, dtype: torch.dtype = torch.bfloat16) -> Stream:
        """A copy of the rows, with their sums of squares."""
        return self.begun(self.x.to(dtype, copy=True))

    def run_layer(self, ops: Ops, layer: Layer, stream: Stream) -> Stream:
        """One layer of ours; the stream is overwritten."""
        weights, scales = layer
        return llama_block(ops, weights, stream, self.rows, self.rope_table, self.k_pages, self.v_pages, scales)

    def written(self, end: Stream) -> Sequence[Tensor]:
        """What a layer wrote that the next reads, the residual stream first."""
        return [end.x]

    def outputs(self, ops: Ops, layer: Layer) -> Sequence[Tensor]:
        """One checked call of ours: only what it writes can make the pages finite."""
        for pages in (self.k_pages, self.v_pages):
            pages.fill_(torch.nan)
        return self.written(self.run_layer(ops, layer, self.stream()))

    def reference_layer(self, reference: ReferenceOps) -> Layer:
        """The first layer as a reference reads it."""
        return self.layers[0].packed(self.config, reference, "prefill"), UNSCALED

    def expected(self) -> Sequence[Expected]:
        """The references' answers for the first layer, on pages of their own."""
        answers = []
        for reference in references(self.config, self.precision, self.device):
            k_pages, v_pages = (self.prompts.empty_pages(self.config).to(reference.dtype) for _ in range(2))
            weights, scales = self.reference_layer(reference)
            stream = self.stream(reference.dtype)
            end = llama_block(reference, weights, stream, self.rows, self.rope_table, k_pages, v_pages, scales)
            answers.append(self.written(end))
        return [Expected(exact, same) for exact, same in zip(*answers, strict=True)]

    def torch_layers(self) -> Sequence[Any]:
        """The layers as the compiled rival reads them."""
        return self.layers


class Fp8Inputs(Inputs):
    """The same in FP8: one scale for x before every layer, and one of each kind of result for all layers."""

    def __init__(self, config: LlamaConfig, lengths: Sequence[int], ops: Ops, precision: Precision) -> None:
        """Choose the scales by what one call of the first layer finds, with room for all that follow."""
        super().__init__(config, lengths, ops.device, precision)
        self.x_scale = scale_of(self.x)
        self.codes = codes_of(self.x, self.x_scale)
        self.results = LayerResults.unscaled(self.device)
        self.run_layer(ops, self._layer(ops, self.layers[0]), self.stream())
        found = self.results
        largest = torch.maximum(scale_of(found.end.amax), torch.maximum(scale_of(found.middle.amax), self.x_scale))
        self.x_scale = ROOM * largest
        self.codes = codes_of(self.x, self.x_scale)
        self.results = LayerResults(
            attended=fp8_output(scale_of(found.attended.amax, ROOM)),
            middle=fp8_output(self.x_scale),
            h=fp8_output(scale_of(found.h.amax, ROOM)),
            end=fp8_output(self.x_scale),
        )

    def packed(self, ops: Ops) -> list[Layer]:
        """See Inputs.packed."""
        return [self._layer(ops, block) for block in self.layers]

    def _layer(self, ops: Ops, block: NaturalBlock) -> Layer:
        layer = Fp8Layer.of(block, self.config, self.precision.weight_scales)
        return layer.packed(ops), layer.scales(ops, self.x_scale, self.results)

    def begun(self, residual: Tensor) -> Stream:
        """See Inputs.begun."""
        return Stream(self.codes, self.sumsq, residual)

    def written(self, end: Stream) -> Sequence[Tensor]:
        """See Inputs.written."""
        return [end.residual, end.x]

    def reference_layer(self, reference: ReferenceOps) -> Layer:
        """See Inputs.reference_layer."""
        return self._layer(reference, self.layers[0])

    def torch_layers(self) -> Sequence[Any]:
        """See Inputs.torch_layers."""
        ones = torch.ones(self.config.hidden_size, dtype=torch.bfloat16, device=self.device)
        normalised = torch_bf16.rms_norm(self.x, ones, self.config.rms_norm_eps)
        attended, h = (result.scale.view(()) for result in (self.results.attended, self.results.h))
        scales = torch_fp8.BlockScales(scale_of(normalised, ROOM).view(()), attended, h)
        return [torch_fp8.Block.of(layer, scales) for layer in self.layers]


def open_case(shape: str, lengths: tuple[int, ...], bench: Bench, precision: str = "bf16") -> Problem:
    """Draw layers and rows."""
    ops, config, row = bench.library(shape, precision), shape_config(shape), get_precision(precision)
    if row.prefill == E4M3:
        inputs: Inputs = Fp8Inputs(config, lengths, ops, row)
        rival: Any = torch_fp8
    else:
        inputs, rival = Inputs(config, lengths, bench.device, row), torch_bf16
    packed = inputs.packed(ops)

    def compiled_torch(make: Callable[[Inputs, Any], RivalLayer]) -> Contender:
        (call, picked), layers = make(inputs, rival), inputs.torch_layers()
        calls: list[Callable[[], object]] = [partial(call, layer) for layer in layers]
        return Contender(run=rotating(calls), outputs=lambda: [picked(call(layers[0]))])

    name = f"torch-{precision}"
    rivals = {name: partial(compiled_torch, torch_call)}
    if len(set(lengths)) > 1:
        rivals = {
            name: partial(compiled_torch, varlen_torch_call),
            f"{name}-padded": partial(compiled_torch, padded_torch_call),
        }
    return Problem(
        work=block_gemm_work(config, inputs.prompts.rows, precision) + prefill_attention_work(config, lengths),
        ours=Contender(run=our_stream(ops, inputs, packed), outputs=lambda: inputs.outputs(ops, packed[0])),
        rivals=rivals,
        expected=inputs.expected,
    )


def our_stream(ops: Ops, inputs: Inputs, packed: Sequence[Layer]) -> Callable[[], None]:
    """Layer after layer on one residual stream, which starts anew every REFRESH layers."""
    stream, turn = inputs.stream(), 0

    def run() -> None:
        nonlocal stream, turn
        if turn % REFRESH == 0:
            stream.residual.copy_(inputs.x)
            stream = inputs.begun(stream.residual)
        with ops.chain():
            stream = inputs.run_layer(ops, packed[turn % len(packed)], stream)
        turn += 1

    return run


def torch_call(inputs: Inputs, rival: Any) -> RivalLayer:
    """Compiled PyTorch for one layer; ``rival`` is the module that computes it."""
    prompts = inputs.prompts
    return _batched_call(inputs, rival, inputs.x, prompts.lengths, prompts.positions), lambda rows: rows


def padded_torch_call(inputs: Inputs, rival: Any) -> RivalLayer:
    """The same for a batch of prompts that are all as long as the longest: behind their ends stand random rows."""
    lengths, owners, device = inputs.prompts.lengths, inputs.prompts.owners, inputs.device
    longest, sequences = max(lengths), len(lengths)
    real = owners * longest + inputs.prompts.positions
    x = random_tensor(sequences * longest, inputs.config.hidden_size, device=device)
    x[real] = inputs.x
    positions = torch.arange(longest, device=device).repeat(sequences)
    return _batched_call(inputs, rival, x, (longest,) * sequences, positions), lambda rows: rows[real]


def varlen_torch_call(inputs: Inputs, rival: Any) -> RivalLayer:
    """Concatenated prompts: what comes before and after attention is compiled."""
    config, prompts = inputs.config, inputs.prompts
    shape, (k_cache, v_cache) = torch_bf16.Shape.of(config), caches(inputs, prompts.rows)
    cos, sin = natural_rope(inputs.rope_table, prompts.positions)
    attend = attention.flash_attention_varlen(prompts.cu_seqlens, max(prompts.lengths))
    begin, finish = torch_bf16.compiled(rival.begin_block), torch_bf16.compiled(rival.finish_block)

    def call(layer: Any) -> Tensor:
        q = begin(inputs.x, layer, shape, cos, sin, k_cache, v_cache)
        result: Tensor = finish(inputs.x, attend(q, k_cache, v_cache), layer, shape)
        return result

    return call, lambda rows: rows


def caches(inputs: Inputs, rows: int) -> tuple[Tensor, Tensor]:
    """K and V [T, kv heads, D] for a rival to fill."""
    shape = (rows, inputs.config.num_key_value_heads, inputs.config.head_dim)
    return inputs.x.new_empty(shape), inputs.x.new_empty(shape)


def _batched_call(
    inputs: Inputs, rival: Any, x: Tensor, lengths: tuple[int, ...], positions: Tensor
) -> Callable[[Any], Tensor]:
    shape, (k_cache, v_cache) = torch_bf16.Shape.of(inputs.config), caches(inputs, x.shape[0])
    cos, sin = natural_rope(inputs.rope_table, positions)
    query = random_tensor(x.shape[0], inputs.config.num_attention_heads, shape.head_dim, device=inputs.device)
    key = random_tensor(*k_cache.shape, device=inputs.device)
    backend = torch_bf16.fastest_backend(query, key, key, lengths)
    function = torch_bf16.with_backend(backend, torch_bf16.compiled(rival.prefill_block))
    return lambda layer: function(x, layer, shape, cos, sin, lengths, k_cache, v_cache)
