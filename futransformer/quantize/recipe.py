"""What `futransformer calibrate` decides about an FP8 prefill: scales, the parts that stay in BF16, and weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from futransformer.fp8_scaling import ActivationScales, count_results
from futransformer.generator.errors import InputError
from futransformer.generator.precision import Precision
from futransformer.layer_parts import HALF_OF, Part, Parts, format_parts
from futransformer.ops.interface import Projection
from futransformer.quantize.fp8 import Fp8Weight, quantize_weight

WeightCodes = Mapping[tuple[int, Projection], Fp8Weight]  # by layer and projection


@dataclass(frozen=True)
class Fp8Recipe:
    """How one model's prompts are read in FP8."""

    scales: ActivationScales
    bf16: Parts = frozenset()
    weights: WeightCodes = field(default_factory=dict)  # what is not there is rounded to nearest

    @classmethod
    def unknown(cls, layers: int, bf16: Parts = frozenset()) -> Fp8Recipe:
        """What a calibration begins with."""
        return cls(ActivationScales.unknown(layers), bf16)

    def check(self, layers: int) -> None:
        """Require scales for a model of so many layers, and parts that it has; InputError if not."""
        self.scales.check(count_results(layers))
        beyond = [part for part in self.bf16 if not 0 <= part.layer < layers]
        if beyond:
            raise InputError(f"the model has layers 0 to {layers - 1}, none that is BF16's {format_parts(beyond)}")

    def reads_fp8(self, layer: int, op: Projection) -> bool:
        """Whether a projection reads FP8."""
        return Part(layer, HALF_OF[op]) not in self.bf16

    def weight(self, name: str, layer: int, op: Projection, logical: Tensor, precision: Precision) -> Fp8Weight:
        """The codes of a logical BF16 weight, on its device; ``name`` is what a refusal calls the model."""
        stored = self.weights.get((layer, op))
        place = f"{name}: layer {layer}, {op}"
        if stored is None:
            return quantize_weight(place, logical, precision.weight_scales)
        codes, scale = (tensor.to(logical.device) for tensor in stored)
        rows = len(logical)
        if codes.shape != logical.shape or scale.shape not in ((1,), (rows,)):
            raise InputError(
                f"{place}: codes {list(codes.shape)} with {scale.numel()} scales are not those of a weight "
                f"{list(logical.shape)}: calibrate again"
            )
        if precision.weight_scales == "channel":
            scale = scale.expand(rows).contiguous()
        elif scale.numel() > 1:
            raise InputError(
                f"{place}: its codes have a scale a row, which {precision.name} does not read: calibrate again with "
                f"--precision {precision.name}"
            )
        return Fp8Weight(codes, scale)
