"""FP8 weights by GPTQ, all of them in one reading of a text: each when its projection is reached, before it is used.

So a weight is rounded for the operands that it will see: codes, behind the quantised weights of everything before it.
Rows count as futransformer.quantize.gram has it: x before qkv and gate_up times its rstd, what o and down read times
the rstd of the stream that they have added to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from futransformer.checkpoint import Checkpoint, LogicalLayer
from futransformer.fp8_scaling import READERS
from futransformer.generator.precision import Granularity
from futransformer.model import Llama
from futransformer.ops.interface import Ops, Projection
from futransformer.quantize.fp8 import Fp8Weight, codes_of, quantize_weight
from futransformer.quantize.gptq import Fp8Grid, damp, gptq
from futransformer.quantize.gram import counted, gram_of


class SequentialOps:
    """Ops that round a projection's FP8 weight again, in the model, before it is called.

    Every projection must be called once with all rows of the text.
    """

    def __init__(
        self,
        ops: Ops,
        model: Llama,
        checkpoint: Checkpoint,
        granularity: Granularity,
        progress: Callable[[str], object],
    ) -> None:
        """Work on the weights of ``model``, whose logical ones are those of ``checkpoint``."""
        self.weights: dict[tuple[int, Projection], Fp8Weight] = {}
        self._ops = ops
        self._model = model
        self._checkpoint = checkpoint
        self._granularity = granularity
        self._progress = progress
        self._place: dict[int, tuple[int, Projection]] = {
            id(getattr(layer, op)["prefill"]): (index, op)
            for index, layer in enumerate(model.weights.layers)
            for op in READERS
        }
        self._layer: tuple[int, LogicalLayer] | None = None

    def qkv(self, phase: Any, x: Tensor, sumsq: Tensor, weight: Tensor, *inputs: Any, **options: Any) -> Any:
        """See Ops.qkv."""
        if options["scale"] is not None:
            self._round(x, self._rstd(sumsq), weight)
        return self._ops.qkv(phase, x, sumsq, weight, *inputs, **options)

    def gate_up(self, phase: Any, x: Tensor, sumsq: Tensor, weight: Tensor, **options: Any) -> Any:
        """See Ops.gate_up."""
        if options["scale"] is not None:
            self._round(x, self._rstd(sumsq), weight)
        return self._ops.gate_up(phase, x, sumsq, weight, **options)

    def o(self, *inputs: Any, **options: Any) -> Any:
        """See Ops.o."""
        return self._add("o", *inputs, **options)

    def down(self, *inputs: Any, **options: Any) -> Any:
        """See Ops.down."""
        return self._add("down", *inputs, **options)

    def _add(self, op: str, phase: Any, x: Tensor, weight: Tensor, residual: Tensor, **options: Any) -> Any:
        operation = getattr(self._ops, op)
        if options["scale"] is not None:
            added = operation(phase, x, weight, residual.clone(), **options)
            self._round(x, self._rstd(added.sumsq), weight)
        return operation(phase, x, weight, residual, **options)

    def __getattr__(self, name: str) -> Any:
        """All else as it is."""
        return getattr(self._ops, name)

    def _rstd(self, sumsq: Tensor) -> Tensor:
        """Of each row, [T, 1]."""
        config = self._model.config
        return torch.rsqrt(sumsq.sum(1, keepdim=True) / config.hidden_size + config.rms_norm_eps)

    def _round(self, x: Tensor, row_weights: Tensor, packed: Tensor) -> None:
        """Round a weight for operands ``x`` (codes), in place: graphs of earlier passes read it where it is."""
        layer, op = self._place[id(packed)]
        if self._layer is None or self._layer[0] != layer:
            self._layer = layer, self._checkpoint.layer(layer)
        logical = getattr(self._layer[1], op).to(x.device)
        place = f"{self._model.config.name}: layer {layer}, {op}"
        _, scale = quantize_weight(place, logical, self._granularity)
        damped = damp(gram_of(x, counted(x, row_weights)), act_order=True, name=place)
        rounded = gptq(logical, damped, Fp8Grid(scale))
        codes = codes_of(rounded, scale[:, None])
        self.weights[layer, op] = Fp8Weight(codes.cpu(), scale.cpu())
        packed.copy_(self._ops.pack(op, "prefill", codes))
        self._progress(f"rounded the weights of layer {layer}, {op}")
