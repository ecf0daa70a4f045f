"""The residual stream of a calibration text, carried through a model's layers in plain PyTorch.

Layers are read as decode reads them: the stream is float32, what a projection reads has the type of computing, BF16 on
a GPU and float32 elsewhere. A norm is its rstd, and its gain where weights have none in them. Windows are taken some at
a time; only the stream, and what o reads, are kept of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from futransformer.checkpoint import rope_table
from futransformer.generator.config import LlamaConfig
from futransformer.generator.errors import CheckpointError
from futransformer.ops.interface import Projection
from futransformer.quantize.gram import gram_of

ROWS = 16384  # tokens at a time: gate and up of 8B are 0.9 GB in BF16

Weights = Mapping[Projection, Tensor]  # of a layer: qkv, o, gate_up, down [N, K], rows in natural order
Rounder = Callable[[Projection, Tensor], Tensor]  # its operands' Gram matrix -> the weight to go on with
Operands = Callable[[slice], Tensor]  # of some windows: what is read


class CalibrationStream:
    """Windows of L tokens on their way through a model, whose layers come one after another.

    ``residual`` is where they are, float32 [windows, L, H].
    """

    def __init__(
        self, config: LlamaConfig, embedding: Tensor, windows: Sequence[Sequence[int]], device: torch.device
    ) -> None:
        """Begin with the embedding [vocab_size, hidden_size] of equally long windows."""
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.device = device
        self._config = config
        tokens = torch.tensor(windows, device=device)
        self.residual = embedding.to(device)[tokens].float()  # of 8B and 128 windows of 2048: 4.3 GB
        if not self.residual.isfinite().all():
            raise CheckpointError(f"{config.name}: its embedding holds values that are not finite; fetch it again")
        self._attended = torch.empty(*tokens.shape, config.heads.q_features, dtype=self.dtype, device=device)
        self._cos, self._sin = rope_table(config, tokens.shape[1]).to(device).unbind(-1)
        at_once = max(1, ROWS // tokens.shape[1])
        self._batches = [slice(start, start + at_once) for start in range(0, len(tokens), at_once)]

    @torch.inference_mode()
    def pass_layer(self, weights: Weights, rounder: Rounder | None = None, gains: Sequence[Tensor] = ()) -> None:
        """Go through a layer. With ``rounder`` each weight is replaced before it is used.

        Its operands have then gone through all weights that were replaced before it. ``gains``: of the layer's two
        norms, [H], where weights have none in them.
        """
        qkv, o, gate_up, down = (weights[op].to(self.device, self.dtype) for op in ("qkv", "o", "gate_up", "down"))
        first, second = (partial(self._normed, gain.to(self.device)) for gain in gains or [torch.ones(1)] * 2)
        if rounder is not None:
            qkv = self._replace("qkv", rounder, first)
        for windows in self._batches:
            self._attended[windows] = self._attend(first(windows) @ qkv.T)
        if rounder is not None:
            o = self._replace("o", rounder, lambda windows: self._attended[windows])
        for windows in self._batches:
            self.residual[windows] += self._attended[windows] @ o.T
        if rounder is not None:
            gate_up = self._replace("gate_up", rounder, second)
            down = self._replace("down", rounder, lambda windows: activated(second(windows) @ gate_up.T))
        for windows in self._batches:
            self.residual[windows] += activated(second(windows) @ gate_up.T) @ down.T

    def _replace(self, op: Projection, rounder: Rounder, operands: Operands) -> Tensor:
        gram: Tensor | None = None
        for windows in self._batches:
            rows = operands(windows).flatten(0, 1)
            gram = gram_of(rows, onto=gram)
        assert gram is not None
        return rounder(op, gram).to(self.device, self.dtype)

    def _normed(self, gain: Tensor, windows: slice) -> Tensor:
        x = self.residual[windows]
        rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + self._config.rms_norm_eps)
        return (x * rstd * gain).to(self.dtype)

    def _attend(self, qkv: Tensor) -> Tensor:
        """What o reads [windows, L, q features], of the three projections' results."""
        heads = self._config.heads
        q, k, v = torch.split(qkv, [heads.q_features, heads.kv_features, heads.kv_features], -1)
        by_head = [part.view(*part.shape[:2], -1, heads.head_dim).transpose(1, 2) for part in (q, k, v)]
        q, k = (self._rotated(part) for part in by_head[:2])
        k, v = (part.repeat_interleave(heads.group, 1) for part in (k, by_head[2]))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)

    def _rotated(self, features: Tensor) -> Tensor:
        """RoPE of [windows, heads, L, D] in natural order."""
        first, second = features.float().chunk(2, -1)
        turned = first * self._cos - second * self._sin, second * self._cos + first * self._sin
        return torch.cat(turned, -1).to(self.dtype)


def activated(gate_up: Tensor) -> Tensor:
    """What down reads, of gate's and up's results [..., 2 I]."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)
