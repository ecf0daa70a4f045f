"""A whole model of random weights, in any precision, as its users hold it: a ``Llama`` with a cache.

Weights are drawn a layer at a time and go through the loader's own rounding and packing. What a layer adds is scaled by
1 / sqrt(2 layers), as GPT-2 initialised it, so that no activation leaves its range; an FP8 prefill is calibrated on
random tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from futransformer.bench.llama import NaturalBlock, device_rope_table, logical, random_tensor, random_weight
from futransformer.checkpoint import LogicalLayer
from futransformer.fp8_scaling import Fp8Scaling
from futransformer.generator.config import LlamaConfig
from futransformer.generator.precision import E4M3, Precision
from futransformer.kv_cache import KVCache
from futransformer.model import MAX_ROWS, Llama, copy_of
from futransformer.ops.interface import Ops
from futransformer.ops.validate import DTYPES
from futransformer.quantize.calibrate import calibrate
from futransformer.quantize.recipe import Fp8Recipe
from futransformer.weights import load_weights

CALIBRATION = (512, 4)  # tokens of a window, and windows


class RandomCheckpoint:
    """Draws what a checkpoint would hold; every layer once, in order."""

    groups = None

    def __init__(self, config: LlamaConfig, device: torch.device) -> None:
        self.config, self.device = config, device

    def layer(self, index: int) -> LogicalLayer:
        """The logical weights of a layer; the gains of its norms are one."""
        block = NaturalBlock.random(self.config, self.device, added=(2 * self.config.num_hidden_layers) ** -0.5)
        return LogicalLayer(logical(self.config, "qkv", block.qkv), block.o, block.gate_up, block.down)

    def lm_head(self) -> Tensor:
        """The logical weight of the head."""
        return random_weight(self.config, "lm_head", self.device)

    def embedding(self) -> Tensor:
        """The table of embeddings."""
        return random_tensor(self.config.vocab_size, self.config.hidden_size, device=self.device)

    def rope_table(self) -> Tensor:
        """Of all positions."""
        return device_rope_table(self.config, self.config.max_position_embeddings, self.device)


def random_llama(config: LlamaConfig, precision: Precision, ops: Ops, num_pages: int) -> Llama:
    """Draw a model on ``ops``, with a cache of so many pages."""
    checkpoint: Any = RandomCheckpoint(config, ops.device)
    recipe = Fp8Recipe.unknown(config.num_hidden_layers) if precision.prefill == E4M3 else None
    weights = load_weights(checkpoint, config, ops, precision, recipe)
    scaling = None if recipe is None else Fp8Scaling(recipe.scales, weights.scales, max_rows=MAX_ROWS)
    kv_scales = torch.ones(config.num_hidden_layers, 2) if precision.kv == E4M3 else None
    dtype, copy = DTYPES[precision.kv], copy_of(ops, precision)
    cache = KVCache(config, num_pages, device=ops.device, dtype=dtype, scales=kv_scales, copy=copy)
    model = Llama(config, ops, weights, cache, scaling=scaling)
    if scaling is not None:
        context, windows = CALIBRATION
        context = min(context, config.max_position_embeddings)
        tokens = torch.randint(config.vocab_size, (context * windows,)).tolist()
        calibrate(model, tokens, context=context, samples=windows)
    return model
