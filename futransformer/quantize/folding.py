"""A layer's weights as they are quantised: gains of norms in them, and V rotated, if it is to be."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from futransformer.checkpoint import Checkpoint, fold_gain, pair_order, projections_of
from futransformer.ops.interface import Projection
from futransformer.quantize.kv_int4 import rotate

NORMS = ("input_layernorm", "post_attention_layernorm")


def folded_layer(checkpoint: Checkpoint, index: int, value_rotation: int = 0) -> dict[str, Tensor]:
    """The weights [N, K] of a layer's projections, by their modules' names: BF16, and v and o float32 if rotated.

    ``value_rotation``: the block of features of a head in which V comes out rotated (futransformer.quantize.kv_int4);
    o takes it back.
    """
    input_gain, mlp_gain = (checkpoint.read(f"model.layers.{index}.{norm}.weight") for norm in NORMS)
    folded = {}
    for module in projections_of(index):
        gain = None if module.endswith(("o_proj", "down_proj")) else mlp_gain if ".mlp." in module else input_gain
        weight = checkpoint.projection(module)
        folded[module] = weight.to(torch.bfloat16) if gain is None else fold_gain(weight, gain)
    if value_rotation:
        _, _, v, o, *_ = projections_of(index)
        folded[v] = rotate(folded[v].float().T, value_rotation).T.contiguous()
        folded[o] = rotate(folded[o], value_rotation)
    return folded


def logical_weights(weights: Mapping[str, Tensor], head_dim: int) -> dict[Projection, Tensor]:
    """The same as a prefill reads them: BF16, the rows of Q and K in pair order."""
    q, k, v, o, gate, up, down = (weight.to(torch.bfloat16) for weight in weights.values())
    return {
        "qkv": torch.cat((pair_order(q, head_dim), pair_order(k, head_dim), v)),
        "o": o,
        "gate_up": torch.cat((gate, up)),
        "down": down,
    }
