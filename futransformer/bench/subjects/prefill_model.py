"""prefill_model/8b/fp8/T=...: a whole prompt, from its tokens to the first token that follows.

Ours is launched from the host, as a model launches a prefill; ``torch-fp8`` (each layer compiled) is one CUDA graph,
which takes the host out of a short prompt's time. The check compares the logits that the first token comes from.

Random layers amplify each other's rounding: after 32 of them, FP8's would be an eighth of a logit. So what a layer adds
is scaled by 1 / sqrt(2 layers), as GPT-2 initialised it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from futransformer.bench.case import COMPUTE_BOUND, Case, Contender, Expected, Problem
from futransformer.bench.fp8 import Fp8Layer, LayerResults, fp8_output, references, scale_of
from futransformer.bench.graphs import graphed
from futransformer.bench.llama import (
    NaturalBlock,
    Prompts,
    device_rope_table,
    natural_rope,
    random_tensor,
    random_weight,
)
from futransformer.bench.rivals import torch_bf16, torch_fp8
from futransformer.bench.runner import Bench
from futransformer.bench.shapes import prefill_model_work, shape_config
from futransformer.blocks import BlockScales, LayerWeights, llama_block
from futransformer.generator.config import LlamaConfig
from futransformer.generator.precision import Precision, get_precision
from futransformer.ops.interface import Fp8Output, Ops
from futransformer.reference import ReferenceOps

ROWS = (128, 8192)

Layer = tuple[LayerWeights, BlockScales]


def cases() -> Sequence[Case]:
    """See futransformer.bench.subjects."""
    return [
        Case(
            f"prefill_model/8b/fp8/T={rows}",
            "ms",
            COMPUTE_BOUND,
            partial(open_case, "8b", rows),
            precision="fp8",
        )
        for rows in ROWS
    ]


class Inputs:
    """A random model in natural order, one prompt, and pages for every layer."""

    def __init__(self, config: LlamaConfig, rows: int, precision: Precision, device: torch.device) -> None:
        self.config, self.device, self.precision = config, device, precision
        self.prompts = Prompts((rows,), device)
        added = (2 * config.num_hidden_layers) ** -0.5
        count = range(config.num_hidden_layers)
        self.layers = [NaturalBlock.random(config, device, added=added) for _ in count]
        self.embedding = random_tensor(config.vocab_size, config.hidden_size, device=device)
        self.head = random_weight(config, "lm_head", device)
        self.tokens = torch.randint(config.vocab_size, (rows,), dtype=torch.int32, device=device)
        self.last = torch.tensor([rows - 1], dtype=torch.int32, device=device)
        self.rope_table = device_rope_table(config, rows, device)
        self.rows = self.prompts.prefill_pass()
        self.pages = [(self.prompts.empty_pages(config), self.prompts.empty_pages(config)) for _ in count]
        self.x_scale = scale_of(self.embedding)
        self.results = [LayerResults.unscaled(device) for _ in count]

    def quantised(self, index: int) -> Fp8Layer:
        """One layer in FP8, made anew: the references need one at a time."""
        return Fp8Layer.of(self.layers[index], self.config, self.precision.weight_scales)

    def scales(self, ops: Ops, index: int, layer: Fp8Layer) -> BlockScales:
        """The scales of one layer: its x is what the layer before wrote, or the embedding."""
        x_scale = self.results[index - 1].end.scale if index else self.x_scale
        return layer.scales(ops, x_scale, self.results[index])

    def calibrated(self, ops: Ops, start: Fp8Output, head: Tensor) -> list[Layer]:
        """The layers as ``ops`` reads them, at scales for what one pass at scales of 1 finds."""
        quantised = [self.quantised(index) for index in range(len(self.layers))]
        weights = [layer.packed(ops) for layer in quantised]

        def layers() -> list[Layer]:
            scales = (self.scales(ops, index, layer) for index, layer in enumerate(quantised))
            return list(zip(weights, scales, strict=True))

        self.logits(ops, layers().__getitem__, start, self.pages, head)
        self.results = [results.scaled() for results in self.results]
        return layers()

    def logits(
        self,
        ops: Ops,
        layer: Callable[[int], Layer],
        start: Fp8Output,
        pages: Sequence[tuple[Tensor, Tensor]],
        head: Tensor,
    ) -> Tensor:
        """What follows the prompt: float32 [1, vocabulary]."""
        stream = ops.gather_rows("prefill", self.embedding, self.tokens, fp8=start)
        for index, (k_pages, v_pages) in enumerate(pages):
            weights, scales = layer(index)
            stream = llama_block(ops, weights, stream, self.rows, self.rope_table, k_pages, v_pages, scales)
        end = ops.gather_rows("prefill", stream.residual, self.last)
        return ops.lm_head("prefill", end.x, end.sumsq, head)

    def expected(self) -> Sequence[Expected]:
        """The references' answers; each packs a layer when its turn comes, and has pages for one."""
        answers = []
        for reference in references(self.config, self.precision, self.device):

            def layer(index: int, reference: ReferenceOps = reference) -> Layer:
                quantised = self.quantised(index)
                return quantised.packed(reference), self.scales(reference, index, quantised)

            k_pages, v_pages = (self.prompts.empty_pages(self.config).to(reference.dtype) for _ in range(2))
            pages, start = [(k_pages, v_pages)] * len(self.layers), fp8_output(self.x_scale)
            answers.append(self.logits(reference, layer, start, pages, self.head))
        return [Expected(answers[0], answers[1])]


def open_case(shape: str, rows: int, bench: Bench) -> Problem:
    """Draw a model."""
    ops, config = bench.library(shape, "fp8"), shape_config(shape)
    inputs = Inputs(config, rows, get_precision("fp8"), bench.device)
    head, start = ops.pack("lm_head", "prefill", inputs.head), fp8_output(inputs.x_scale)
    layers = inputs.calibrated(ops, start, head)
    work = prefill_model_work(config, rows, "fp8")

    def our_logits() -> Tensor:
        return inputs.logits(ops, layers.__getitem__, start, inputs.pages, head)

    def our_prefill() -> Tensor:
        with ops.chain():
            return ops.argmax(our_logits())

    def our_outputs() -> Sequence[Tensor]:
        for pages in inputs.pages:
            for tensor in pages:
                tensor.fill_(torch.nan)
        with ops.chain():
            return [our_logits()]

    return Problem(
        work=work,
        ours=Contender(run=our_prefill, outputs=our_outputs),
        rivals={"torch-fp8": partial(compiled_torch, inputs, work.floor_seconds(bench.ceilings))},
        expected=inputs.expected,
    )


def compiled_torch(inputs: Inputs, floor_seconds: float) -> Contender:
    """Compiled PyTorch on the same layers, with the scales that ours has."""
    config, prompts, shape = inputs.config, inputs.prompts, torch_bf16.Shape.of(inputs.config)
    gain = inputs.layers[0].gain
    normalised = scale_of(torch_bf16.rms_norm(inputs.embedding, gain, shape.eps), room=2).view(())
    blocks = [
        torch_fp8.Block.of(
            layer, torch_fp8.BlockScales(normalised, results.attended.scale.view(()), results.h.scale.view(()))
        )
        for layer, results in zip(inputs.layers, inputs.results, strict=True)
    ]
    cos, sin = natural_rope(inputs.rope_table, prompts.positions)
    cache = (prompts.rows, config.num_key_value_heads, config.head_dim)
    caches = [(gain.new_empty(cache), gain.new_empty(cache)) for _ in blocks]
    query = random_tensor(prompts.rows, config.num_attention_heads, config.head_dim, device=inputs.device)
    key = random_tensor(*cache, device=inputs.device)
    backend = torch_bf16.fastest_backend(query, key, key, prompts.lengths)
    block = torch_bf16.with_backend(backend, torch_bf16.compiled(torch_fp8.prefill_block))
    finish = torch_bf16.compiled(torch_bf16.rms_norm)

    def logits() -> Tensor:
        x = F.embedding(inputs.tokens, inputs.embedding)
        for layer, (k_cache, v_cache) in zip(blocks, caches, strict=True):
            x = block(x, layer, shape, cos, sin, prompts.lengths, k_cache, v_cache)
        return F.linear(finish(x[-1:], gain, shape.eps), inputs.head)

    return graphed([lambda: logits().argmax(-1)], lambda: [logits()], floor_seconds)
