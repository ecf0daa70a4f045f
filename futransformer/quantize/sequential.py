"""FP8 weights by GPTQ, all of them in one reading of a text: each when its projection is reached, before it is used.

So a weight is rounded for the operands that it will see: codes, behind the quantised weights of everything before it.
With ``towards_plain`` its results should be those of the unquantised model, which is read beside it: what is rounded is
then not W but the weight whose results on those codes come nearest to W's on what W would have read (the aim of GPTAQ,
arXiv 2504.02692).

Rows count as they count in what follows: x before qkv and gate_up times its rstd, what o and down read times the rstd
of the stream that they have added to; and none for more than ``LOUDEST`` median rows. Else a first token's row, whose
values are the largest by far, would be all that there is to a matrix and its dampening.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from futransformer.checkpoint import Checkpoint, LogicalLayer
from futransformer.fp8_scaling import READERS
from futransformer.generator.precision import Granularity
from futransformer.model import Llama
from futransformer.ops.interface import Ops, Projection
from futransformer.quantize.fp8 import Fp8Weight, codes_of, quantize_weight
from futransformer.quantize.gptq import Fp8Grid, gptq
from futransformer.quantize.plain_stream import PlainStream

ROWS = 4096  # of a product's operands, in float32 at a time
# Of the mean of the Gram matrix's diagonal: how much the text must say to move a weight's target away from the weight.
PRIOR = 0.01
LOUDEST = 4.0  # times the median of rows' sums of squares


class Rounding(NamedTuple):
    """Which weights to round, and how."""

    checkpoint: Checkpoint
    granularity: Granularity
    towards_plain: bool = False  # aim at the unquantised model's results, not at those of W on the same codes


class SequentialOps:
    """Ops that round a projection's FP8 weight again, in the model, before it is called.

    Every projection must be called once with all rows of the text.
    """

    def __init__(self, ops: Ops, model: Llama, rounding: Rounding, progress: Callable[[str], object]) -> None:
        """Work on the weights of ``model``."""
        self.weights: dict[tuple[int, Projection], Fp8Weight] = {}
        self._ops = ops
        self._model = model
        self._rounding = rounding
        self._progress = progress
        self._plain = PlainStream(model.config, ops.device) if rounding.towards_plain else None
        self._calls = 0  # of projections
        self._layer: tuple[int, LogicalLayer] | None = None

    def gather_rows(self, phase: Any, table: Tensor, indices: Tensor, **options: Any) -> Any:
        """See Ops.gather_rows: of the embedding first."""
        if self._plain is not None:
            self._plain.begin(table, indices)
        return self._ops.gather_rows(phase, table, indices, **options)

    def qkv(self, phase: Any, x: Tensor, sumsq: Tensor, weight: Tensor, *inputs: Any, **options: Any) -> Any:
        """See Ops.qkv."""
        layer = self._next("qkv")
        if options["scale"] is not None:
            self._round("qkv", x, self._rstd(sumsq), weight)
        if self._plain is not None:
            self._plain.qkv(layer, *inputs)
        return self._ops.qkv(phase, x, sumsq, weight, *inputs, **options)

    def attention_prefill(
        self, q: Tensor, k_pages: Tensor, v_pages: Tensor, *lengths: Tensor, max_seqlen_q: int, **options: Any
    ) -> Any:
        """See Ops.attention_prefill."""
        if self._plain is not None:
            self._plain.attention_prefill(*lengths, max_seqlen_q=max_seqlen_q)
        return self._ops.attention_prefill(q, k_pages, v_pages, *lengths, max_seqlen_q=max_seqlen_q, **options)

    def gate_up(self, phase: Any, x: Tensor, sumsq: Tensor, weight: Tensor, **options: Any) -> Any:
        """See Ops.gate_up."""
        layer = self._next("gate_up")
        if options["scale"] is not None:
            self._round("gate_up", x, self._rstd(sumsq), weight)
        if self._plain is not None:
            self._plain.gate_up(layer)
        return self._ops.gate_up(phase, x, sumsq, weight, **options)

    def o(self, *inputs: Any, **options: Any) -> Any:
        """See Ops.o."""
        return self._add("o", *inputs, **options)

    def down(self, *inputs: Any, **options: Any) -> Any:
        """See Ops.down."""
        return self._add("down", *inputs, **options)

    def _add(self, op: Projection, phase: Any, x: Tensor, weight: Tensor, residual: Tensor, **options: Any) -> Any:
        layer, operation = self._next(op), getattr(self._ops, op)
        if options["scale"] is not None:
            added = operation(phase, x, weight, residual.clone(), **options)
            self._round(op, x, self._rstd(added.sumsq), weight)
        if self._plain is not None:
            getattr(self._plain, op)(layer)
        return operation(phase, x, weight, residual, **options)

    def __getattr__(self, name: str) -> Any:
        """All else as it is."""
        return getattr(self._ops, name)

    def _next(self, op: Projection) -> LogicalLayer:
        """The layer whose projection is called now."""
        index, place = divmod(self._calls, len(READERS))
        assert READERS[place] == op
        self._calls += 1
        if self._layer is None or self._layer[0] != index:
            self._layer = index, self._rounding.checkpoint.layer(index)
        return self._layer[1]

    def _rstd(self, sumsq: Tensor) -> Tensor:
        """Of each row, [T, 1]."""
        config = self._model.config
        return torch.rsqrt(sumsq.sum(1, keepdim=True) / config.hidden_size + config.rms_norm_eps)

    def _round(self, op: Projection, x: Tensor, row_weights: Tensor, packed: Tensor) -> None:
        """Round a weight for operands ``x`` (codes), in place: graphs of earlier passes read it where it is."""
        assert self._layer is not None
        index, layer = self._layer
        logical = getattr(layer, op).to(x.device)
        place = f"{self._model.config.name}: layer {index}, {op}"
        _, scale = quantize_weight(place, logical, self._rounding.granularity)
        energy = (x.float() * row_weights).square().sum(1, keepdim=True)
        quieter = (LOUDEST * energy.median() / energy).clamp_max_(1).sqrt_().nan_to_num_(1)  # a row of zeros is 0 / 0
        row_weights = row_weights * quieter
        gram = product(x, x, row_weights, row_weights)
        target = logical.float()
        if self._plain is not None:
            target = self._target(target, op, x, row_weights, quieter, gram)
        rounded = gptq(target, gram, Fp8Grid(scale), act_order=True)
        codes = codes_of(rounded, scale[:, None])
        self.weights[index, op] = Fp8Weight(codes.cpu(), scale.cpu())
        packed.copy_(self._ops.pack(op, "prefill", codes))
        self._progress(f"rounded the weights of layer {index}, {op}")

    def _target(
        self, weight: Tensor, op: Projection, x: Tensor, row_weights: Tensor, quieter: Tensor, gram: Tensor
    ) -> Tensor:
        """Of all V that of the least |X' V^T - X W^T|^2 + prior |V - W|^2, X' the codes and X the plain rows."""
        assert self._plain is not None
        assert self._model.scaling is not None
        plain_weights = row_weights
        if op in ("qkv", "gate_up"):
            plain, plain_weights = self._plain.stream.x, self._rstd(self._plain.stream.sumsq) * quieter
        else:
            plain = self._plain.attended if op == "o" else self._plain.h
        worth = self._model.scaling.scale()[self._calls - 1].item()  # of a code
        prior = PRIOR * gram.diagonal().mean().double() * torch.eye(len(gram), device=gram.device, dtype=torch.float64)
        cross = product(x, plain, row_weights, plain_weights).double() / worth
        target: Tensor = torch.linalg.solve(gram.double() + prior, (cross + prior) @ weight.double().T)
        return target.T.float()


def product(left: Tensor, right: Tensor, left_weights: Tensor, right_weights: Tensor) -> Tensor:
    """X^T Y, float32 [K, K], of operands [T, K] whose rows are multiplied by weights [T, 1]."""
    total = torch.zeros(left.shape[1], right.shape[1], device=left.device)
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        for start in range(0, len(left), ROWS):
            rows = slice(start, start + ROWS)
            x, y = left[rows].float() * left_weights[rows], right[rows].float() * right_weights[rows]
            total.addmm_(x.T, y)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
    return total
