"""prefill_model/8b/fp8/T=...: a whole prompt, from its tokens to the first token that follows.

Ours is a ``Llama`` as its users run it, calibrated on the prompt: the time is that of ``prefill`` with a list of
tokens, and of argmax. ``torch-fp8`` (each layer compiled) is one CUDA graph on tokens that are on the device, which
takes the host out of a short prompt's time. The check compares the logits that the first token comes from.

Random layers amplify each other's rounding: after 32 of them, FP8's would be an eighth of a logit. So what a layer adds
is scaled by 1 / sqrt(2 layers), as GPT-2 initialised it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from futransformer.bench.case import COMPUTE_BOUND, Case, Contender, Expected, Problem
from futransformer.bench.fp8 import Fp8Layer, references, scale_of
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
from futransformer.blocks import LayerWeights
from futransformer.fp8_scaling import ActivationScales, Fp8Scaling
from futransformer.generator.config import LlamaConfig
from futransformer.generator.precision import Precision, get_precision
from futransformer.kv_cache import KVCache, pages_for
from futransformer.model import Llama
from futransformer.ops.interface import Ops
from futransformer.quantize.calibrate import calibrate
from futransformer.reference import ReferenceOps
from futransformer.weights import LlamaWeights

ROWS = (128, 8192)


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


class LazyLayers(Sequence[LayerWeights]):
    """Layers as a reference reads them, packed when their turn comes: of float32 there is room for one."""

    def __init__(self, inputs: Inputs, reference: ReferenceOps) -> None:
        self.inputs, self.reference = inputs, reference

    def __len__(self) -> int:
        return len(self.inputs.layers)

    def __getitem__(self, index: Any) -> Any:
        if index >= len(self):
            raise IndexError(index)
        return self.inputs.quantised(index).packed(self.reference)


class Inputs:
    """A random model in natural order, and one prompt."""

    def __init__(self, config: LlamaConfig, rows: int, precision: Precision, device: torch.device) -> None:
        self.config, self.device, self.precision = config, device, precision
        added = (2 * config.num_hidden_layers) ** -0.5
        self.layers = [NaturalBlock.random(config, device, added=added) for _ in range(config.num_hidden_layers)]
        self.embedding = random_tensor(config.vocab_size, config.hidden_size, device=device)
        self.head = random_weight(config, "lm_head", device)
        self.tokens = torch.randint(config.vocab_size, (rows,)).tolist()
        self.rope_table = device_rope_table(config, rows, device)

    def quantised(self, index: int) -> Fp8Layer:
        """One layer in FP8, made anew: a reference needs one at a time."""
        return Fp8Layer.of(self.layers[index], self.config, self.precision.weight_scales)

    def model(
        self, ops: Ops, layers: Sequence[LayerWeights], scales: Sequence[Tensor], activations: ActivationScales
    ) -> Llama:
        """The model on ``ops``, with the scales of its weights as they read them; it can prefill, not decode."""
        weights = LlamaWeights(
            self.embedding, self.rope_table, layers, {"prefill": ops.pack("lm_head", "prefill", self.head)}
        )
        dtype = ops.dtype if isinstance(ops, ReferenceOps) else torch.bfloat16
        pages = pages_for(len(self.tokens))
        order = torch.randperm(pages).tolist()
        cache = KVCache(self.config, pages, device=self.device, dtype=dtype, page_order=order)
        return Llama(self.config, ops, weights, cache, scaling=Fp8Scaling(activations, scales))

    def ours(self, ops: Ops) -> Llama:
        """The model on kernels, calibrated on its prompt."""
        layers, scales = [], []
        for index in range(len(self.layers)):
            layer = self.quantised(index)
            layers.append(layer.packed(ops))
            scales += layer.weight_scales(ops)
        model = self.model(ops, layers, scales, ActivationScales.unknown(len(layers)))
        calibrate(model, self.tokens, context=len(self.tokens), samples=1)
        return model

    def expected(self, activations: ActivationScales) -> Sequence[Expected]:
        """The references' answers by the same scales."""
        answers = []
        for reference in references(self.config, self.precision, self.device):
            scales = [
                scale for index in range(len(self.layers)) for scale in self.quantised(index).weight_scales(reference)
            ]
            model = self.model(reference, LazyLayers(self, reference), scales, activations)
            answers.append(model.prefill([self.tokens]))
        return [Expected(answers[0], answers[1])]


def open_case(shape: str, rows: int, bench: Bench) -> Problem:
    """Draw a model."""
    ops, config = bench.library(shape, "fp8"), shape_config(shape)
    inputs = Inputs(config, rows, get_precision("fp8"), bench.device)
    model = inputs.ours(ops)
    assert model.scaling is not None
    activations = model.scaling.calibrated
    work = prefill_model_work(config, rows, "fp8")

    def our_outputs() -> Sequence[Tensor]:
        model.cache.pool.fill_(torch.nan)
        return [model.prefill([inputs.tokens])]

    return Problem(
        work=work,
        ours=Contender(run=lambda: ops.argmax(model.prefill([inputs.tokens])), outputs=our_outputs),
        rivals={"torch-fp8": partial(compiled_torch, inputs, activations, work.floor_seconds(bench.ceilings))},
        expected=partial(inputs.expected, activations),
    )


def compiled_torch(inputs: Inputs, activations: ActivationScales, floor_seconds: float) -> Contender:
    """Compiled PyTorch on the same layers, with the scales that ours has."""
    config, shape = inputs.config, torch_bf16.Shape.of(inputs.config)
    prompts = Prompts((len(inputs.tokens),), inputs.device)
    tokens = torch.tensor(inputs.tokens, dtype=torch.int32, device=inputs.device)
    gain = inputs.layers[0].gain
    normalised = scale_of(torch_bf16.rms_norm(inputs.embedding, gain, shape.eps), room=2).view(())
    # each by itself: compiled code copies what does not stand at a multiple of sixteen bytes
    scales = [scale.clone() for scale in activations.scale.to(inputs.device)]
    per_layer = zip(inputs.layers, scales[1::4], scales[3::4], strict=True)
    blocks = [
        torch_fp8.Block.of(layer, torch_fp8.BlockScales(normalised, attended, h)) for layer, attended, h in per_layer
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
        x = F.embedding(tokens, inputs.embedding)
        for layer, (k_cache, v_cache) in zip(blocks, caches, strict=True):
            x = block(x, layer, shape, cos, sin, prompts.lengths, k_cache, v_cache)
        return F.linear(finish(x[-1:], gain, shape.eps), inputs.head)

    return graphed([lambda: logits().argmax(-1)], lambda: [logits()], floor_seconds)
