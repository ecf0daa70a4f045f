"""A model's weights as they are quantised: gains of norms in them or not, and rotated, if they are to be.

Two rotations change nothing that a model computes, but what there is to round: outliers of a few columns are spread
over all. That of the *residual stream*, x -> x R, goes through RMSNorm (whose gain is in the weight behind it), for it
changes no row's norm: what reads x is W R, what adds to it R^T W, the embedding E R, the head W R with the last gain in
it. That of *V* is undone by o.

R = diag(signs) (D x H) with H the Hadamard matrix of the largest power of two in hidden_size, D of what is left (the
discrete Hartley matrix: orthogonal and its own inverse for any size) and random signs; all of it is applied in float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from futransformer.checkpoint import EMBEDDING, FINAL_NORM, HEAD, Checkpoint, fold_gain, pair_order, projections_of
from futransformer.generator.errors import InputError
from futransformer.ops.interface import Projection
from futransformer.quantize.kv_int4 import rotate

NORMS = ("input_layernorm", "post_attention_layernorm")
CPU = torch.device("cpu")
SEED = 0  # of the signs
ROWS = 8192  # of an embedding or a head, in float32 at a time


@dataclass(frozen=True)
class Folding:
    """What is folded into a checkpoint's weights, on ``device``."""

    residual_rotation: bool = False
    value_rotation: int = 0  # features of a head in whose blocks V comes out rotated (quantize/kv_int4.py); 0: not
    device: torch.device = CPU
    keep_gains: bool = False  # leave those of the layers' norms where they are; not where the stream is rotated

    def check(self, name: str, head_dim: int) -> None:
        """Refuse a block that heads are no multiple of, and gains of a stream that is another one."""
        if self.keep_gains and self.residual_rotation:
            raise InputError(
                f"{name}: rotating the residual stream folds gains into the weights; leave out one of both"
            )
        if self.value_rotation and head_dim % self.value_rotation:
            raise InputError(
                f"{name}: heads of {head_dim} features are no whole Hadamard blocks of {self.value_rotation}; "
                f"give a block that divides {head_dim}, or 0"
            )

    def layer(self, checkpoint: Checkpoint, index: int) -> dict[str, Tensor]:
        """The weights [N, K] of a layer's projections, by their modules' names: BF16, and float32 where rotated.

        They lie on ``device``: a host folds the gains of a layer of 8B in a second.
        """
        gains = [checkpoint.read(f"model.layers.{index}.{norm}.weight").to(self.device) for norm in NORMS]
        folded = {}
        for module in projections_of(index):
            weight = checkpoint.projection(module).to(self.device)
            adds = module.endswith(("o_proj", "down_proj"))
            plain = adds or self.keep_gains
            weight = weight.to(torch.bfloat16) if plain else fold_gain(weight, gains[".mlp." in module])
            folded[module] = self._rotated(weight, module, adds)
        return folded

    def norms(self, checkpoint: Checkpoint, index: int) -> dict[str, Tensor]:
        """The weights of a layer's norms, by name, BF16 [hidden_size]: ones where gains are folded."""
        names = [f"model.layers.{index}.{norm}.weight" for norm in NORMS]
        if self.keep_gains:
            return {name: checkpoint.read(name).to(torch.bfloat16) for name in names}
        return {name: torch.ones(checkpoint.config.hidden_size, dtype=torch.bfloat16) for name in names}

    def embedding(self, checkpoint: Checkpoint) -> Tensor:
        """The embedding [vocab_size, hidden_size], BF16: where the stream begins."""
        return self._table(checkpoint.embedding()) if self.residual_rotation else checkpoint.embedding()

    def ends(self, checkpoint: Checkpoint) -> Iterator[dict[str, Tensor]]:
        """What stands apart from the layers, a shard at a time: the embedding; the last norm, and the head if it is
        apart, as it is where the stream is rotated.
        """
        yield {EMBEDDING: self.embedding(checkpoint)}
        if self.residual_rotation:
            ones = torch.ones(checkpoint.config.hidden_size, dtype=torch.bfloat16)
            yield {FINAL_NORM: ones, HEAD: self._table(checkpoint.lm_head())}
        else:
            yield {name: checkpoint.read(name) for name in (FINAL_NORM, *([HEAD] if HEAD in checkpoint else []))}

    def _table(self, rows: Tensor) -> Tensor:
        return torch.cat(
            [self._turned(some.to(self.device)).to(torch.bfloat16).cpu() for some in torch.split(rows, ROWS)]
        )

    def _rotated(self, weight: Tensor, module: str, adds: bool) -> Tensor:
        if self.value_rotation and module.endswith("v_proj"):
            weight = rotate(weight.float().T, self.value_rotation).T
        if self.value_rotation and module.endswith("o_proj"):
            weight = rotate(weight, self.value_rotation)
        if self.residual_rotation:
            weight = self._turned(weight.T).T if adds else self._turned(weight)
        return weight.contiguous()

    def _turned(self, features: Tensor) -> Tensor:
        """Features [..., H] times R, float32."""
        width = features.shape[-1]
        even = width & -width  # the largest power of two in it
        generator = torch.Generator().manual_seed(SEED)
        signs = torch.randint(2, (width,), generator=generator).mul_(2).sub_(1).to(self.device)
        turned = rotate((features.float() * signs).view(*features.shape[:-1], -1, even), even)
        if even < width:
            turned = _hartley(width // even).to(self.device) @ turned
        return turned.reshape(features.shape)


def _hartley(size: int) -> Tensor:
    """cos + sin of 2 pi i j / size, over the root of size: symmetric and orthogonal; float32."""
    places = torch.arange(size, dtype=torch.float64)
    angles = torch.outer(places, places) * (2 * math.pi / size)
    return ((angles.cos() + angles.sin()) / math.sqrt(size)).float()


def logical_weights(weights: Mapping[str, Tensor], head_dim: int) -> dict[Projection, Tensor]:
    """Folded weights as a prefill reads them: BF16, the rows of Q and K in pair order."""
    q, k, v, o, gate, up, down = (weight.to(torch.bfloat16) for weight in weights.values())
    return {
        "qkv": torch.cat((pair_order(q, head_dim), pair_order(k, head_dim), v)),
        "o": o,
        "gate_up": torch.cat((gate, up)),
        "down": down,
    }
