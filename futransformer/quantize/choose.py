"""Which parts of layers an FP8 prefill should leave in BF16, by what each costs a text's predictions.

One part at a time is put into FP8, all others stay in BF16, and the text is read: its effect is the Kullback-Leibler
divergence of the predictions from BF16's. Any change at all has one, since BF16 rounds otherwise behind it (of
SmolLM2-135M some 0.5e-3 nats), so the smallest is taken off all. Effects add up (in float32, a layer at a time: 15.9e-3
nats, all together 14.1e-3), and a part costs time in proportion to its weights, so those of the largest effect a weight
are left in BF16.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from futransformer.checkpoint import Checkpoint
from futransformer.fp8_scaling import READERS, ActivationScales, Fp8Scaling
from futransformer.generator.config import LlamaConfig
from futransformer.generator.precision import Granularity
from futransformer.layer_parts import PROJECTIONS_OF, Part, Parts, all_parts
from futransformer.memory import part_weights
from futransformer.model import Llama, check_numbers
from futransformer.ops.interface import Ops
from futransformer.quantize.calibrate import LearningOps
from futransformer.quantize.fp8 import quantize_weight

WINDOWS, CONTEXT = 2, 512  # that are read once for every part
ROWS = 256  # of logits that are compared at a time


@torch.inference_mode()
def measure_parts(
    model: Llama,
    checkpoint: Checkpoint,
    granularity: Granularity,
    windows: Sequence[Sequence[int]],
    progress: Callable[[str], object] = lambda line: None,
) -> dict[Part, float]:
    """The effect of each part, nats a token, on a model that was loaded with all of its parts in BF16."""
    layers = model.config.num_hidden_layers
    parts = all_parts(layers)
    assert model.scaling is not None
    assert model.scaling.bf16 == frozenset(parts)
    plain_ops, plain_scaling = model.ops, model.scaling
    expected = _predictions(model, windows)
    effects: dict[Part, float] = {}
    try:
        for part in parts:
            logical = checkpoint.layer(part.layer)
            weights = list(model.weights.scales)
            in_bf16 = {}
            for op in PROJECTIONS_OF[part.half]:
                packed = getattr(model.weights.layers[part.layer], op)
                place = f"{model.config.name}: layer {part.layer}, {op}"
                codes, scale = quantize_weight(place, getattr(logical, op).to(plain_ops.device), granularity)
                in_bf16[op], packed["prefill"] = packed["prefill"], plain_ops.pack(op, "prefill", codes)
                weights[len(READERS) * part.layer + READERS.index(op)] = plain_ops.pack_scale(op, scale)
            model.scaling = Fp8Scaling(
                ActivationScales.unknown(layers), weights, bf16=frozenset(parts) - {part}, max_rows=model.max_rows
            )
            model.ops = cast("Ops", LearningOps(plain_ops, model.scaling))
            effects[part] = _divergence(expected, _predictions(model, windows))
            for op, packed_weight in in_bf16.items():
                getattr(model.weights.layers[part.layer], op)["prefill"] = packed_weight
            progress(f"layer {part.layer}, {part.half}: {1000 * effects[part]:.3f}e-3 nats a token")
    finally:
        model.ops, model.scaling = plain_ops, plain_scaling
        model.keep([])
    return effects


def choose_parts(effects: Mapping[Part, float], config: LlamaConfig, layers: float) -> Parts:
    """Parts of the largest effect a weight that together have at most the weights of so many layers."""
    weights = part_weights(config)
    left = layers * sum(weights.values())
    floor = min(effects.values())
    chosen: set[Part] = set()
    for part in sorted(effects, key=lambda part: ((floor - effects[part]) / weights[part.half], part)):
        if weights[part.half] <= left:
            chosen.add(part)
            left -= weights[part.half]
    return frozenset(chosen)


def _predictions(model: Llama, windows: Sequence[Sequence[int]]) -> Tensor:
    """Logits of every token, [T, vocab_size]."""
    logits = model.prefill(windows, rows="all")
    check_numbers(model.config.name, logits)
    return logits


def _divergence(expected: Tensor, actual: Tensor) -> float:
    """Mean Kullback-Leibler divergence of rows of logits, in nats."""
    total = 0.0
    for start in range(0, len(expected), ROWS):
        log_p, log_q = (logits[start : start + ROWS].log_softmax(1) for logits in (expected, actual))
        total += (log_p.exp() * (log_p - log_q)).sum().item()
    return total / len(expected)
