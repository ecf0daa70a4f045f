"""How a layer's seven projections become INT4 codes: each by itself, or in turn, for what reaches them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from futransformer.checkpoint import projections_of
from futransformer.ops.interface import Projection
from futransformer.quantize.int4 import Int4Weight, round_to_nearest
from futransformer.quantize.int4_gptq import Int4Method, RoundingErrors, round_by_gptq
from futransformer.quantize.stream import CalibrationStream

Errors = Mapping[str, float]
# What reads the same x is one weight, its rows behind one another: of ``projections_of``.
TOGETHER: Mapping[Projection, slice] = {
    "qkv": slice(0, 3),
    "o": slice(3, 4),
    "gate_up": slice(4, 6),
    "down": slice(6, 7),
}


class Quantised(NamedTuple):
    """A projection's codes, and what they lose.

    ``errors``: "weight", |W - Q| / |W|; of GPTQ also "output", |X (W - Q)^T| / |X W^T| of its operands X, dampened, and
    "output_of_nearest", the same of rounding to nearest.
    """

    codes: Int4Weight
    errors: Errors


class LayerQuantiser(Protocol):
    """What quantises layers, which come in order. Weights go by their modules' names."""

    def quantise(self, index: int, weights: Mapping[str, Tensor]) -> Mapping[str, Quantised]:
        """The codes of a layer's projections, on the CPU."""
        ...

    def passed(self, index: int, weights: Mapping[str, Tensor], codes: Mapping[str, Int4Weight]) -> None:
        """Hear of a layer that was quantised before."""
        ...


class Nearest:
    """Every weight rounded to nearest."""

    def __init__(self, method: Int4Method, device: torch.device) -> None:
        self._method = method
        self._device = device

    def quantise(self, index: int, weights: Mapping[str, Tensor]) -> Mapping[str, Quantised]:
        """See LayerQuantiser.quantise."""
        quantised = {}
        for module, weight in weights.items():
            exact = weight.to(self._device)
            size, zero_points = self._method.groups
            codes = round_to_nearest(module, exact, size, zero_points=zero_points, search=self._method.search)
            quantised[module] = Quantised(codes.to(torch.device("cpu")), {"weight": weight_error(exact, codes)})
        return quantised

    def passed(self, index: int, weights: Mapping[str, Tensor], codes: Mapping[str, Int4Weight]) -> None:
        """See LayerQuantiser.passed: nothing depends on it."""


class Gptq:
    """Every weight by GPTQ, for a text that has gone through all that was quantised before it."""

    def __init__(self, method: Int4Method, stream: CalibrationStream, gains: Sequence[Tensor] = ()) -> None:
        """``stream`` stands before the first layer; ``gains``: of all norms, where weights have none in them."""
        self._method = method
        self._stream = stream
        self._gains = gains

    def quantise(self, index: int, weights: Mapping[str, Tensor]) -> Mapping[str, Quantised]:
        """See LayerQuantiser.quantise."""
        modules = projections_of(index)
        fused = {op: torch.cat([weights[module] for module in modules[part]]) for op, part in TOGETHER.items()}
        quantised: dict[str, Quantised] = {}

        def rounder(op: Projection, gram: Tensor) -> Tensor:
            exact = fused[op].to(gram.device, torch.float32)
            codes, errors = round_by_gptq(f"layer {index}, {op}", exact, gram, self._method)
            first = 0
            for module in modules[TOGETHER[op]]:
                rows = slice(first, first + len(weights[module]))
                quantised[module] = _part_of(exact, codes, errors, rows)
                first = rows.stop
            return codes.dequantise()

        self._stream.pass_layer(fused, rounder, self._gains[2 * index : 2 * index + 2])
        return quantised

    def passed(self, index: int, weights: Mapping[str, Tensor], codes: Mapping[str, Int4Weight]) -> None:
        """See LayerQuantiser.passed: the text goes through it as it did when it was quantised."""
        modules = projections_of(index)
        self._stream.pass_layer(
            {
                op: torch.cat([codes[module].to(self._stream.device).dequantise() for module in modules[part]])
                for op, part in TOGETHER.items()
            },
            gains=self._gains[2 * index : 2 * index + 2],
        )


def weight_error(weight: Tensor, codes: Int4Weight) -> float:
    """|W - Q| / |W| in the norm of all elements."""
    exact = weight.float()
    error: float = ((codes.dequantise() - exact).norm() / exact.norm().clamp_min(1e-30)).item()
    return error


def _part_of(weight: Tensor, codes: Int4Weight, errors: RoundingErrors, rows: slice) -> Quantised:
    part = codes.map_rows(lambda tensor: tensor[rows])
    output, nearest = errors.of_rows(rows)
    said = {"weight": weight_error(weight[rows], part), "output": output, "output_of_nearest": nearest}
    return Quantised(part.to(torch.device("cpu")), said)
