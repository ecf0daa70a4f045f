"""FP8 operands of random data, whose scales come from its own largest magnitudes, read on the device.

A kernel writes FP8 results at scales that it is given; what they should be is found by one call at a scale of 1, which
leaves the largest magnitude behind. ``room`` is for timed calls that add to one residual stream again and again: a code
keeps its digits at any scale, but values beyond the largest code are counted one by one, which takes time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from futransformer.bench.llama import NaturalBlock, logical
from futransformer.blocks import BlockScales, LayerWeights, Packed
from futransformer.fp8_scaling import READERS
from futransformer.generator.config import LlamaConfig
from futransformer.generator.precision import Granularity, Precision
from futransformer.ops.interface import DecodeWeight, Fp8Output, Ops, Phase, Projection
from futransformer.quantize import fp8 as quantize
from futransformer.quantize.fp8 import Fp8Weight, quantize_weight
from futransformer.reference import ReferenceOps


def scale_of(values: Tensor, room: float = 1.0) -> Tensor:
    """Float32 [1]: the scale at which the largest value, ``room`` times, is the largest code."""
    return quantize.scale_of(room * values.abs().amax().float()).view(1)


def fp8_output(scale: Tensor) -> Fp8Output:
    """A result at this scale, of which nothing was recorded yet."""
    return Fp8Output(scale, torch.zeros_like(scale), torch.zeros_like(scale, dtype=torch.int32))


def unscaled_output(device: torch.device) -> Fp8Output:
    """A result at a scale of 1, for a call that is to find its largest value."""
    return fp8_output(torch.ones(1, device=device))


@dataclass(frozen=True)
class LayerResults:
    """The four FP8 results of a layer."""

    attended: Fp8Output
    middle: Fp8Output
    h: Fp8Output
    end: Fp8Output

    @classmethod
    def unscaled(cls, device: torch.device) -> LayerResults:
        """For a call that is to find the largest values."""
        return cls(*(unscaled_output(device) for _ in range(4)))


@dataclass(frozen=True)
class Fp8Layer:
    """A layer's weights, quantised in logical order."""

    qkv: Fp8Weight
    o: Fp8Weight
    gate_up: Fp8Weight
    down: Fp8Weight

    @classmethod
    def of(cls, block: NaturalBlock, config: LlamaConfig, granularity: Granularity) -> Fp8Layer:
        """Quantise a block."""

        def weight(op: Projection, natural: Tensor) -> Fp8Weight:
            return quantize_weight(op, logical(config, op, natural), granularity)

        return cls(
            weight("qkv", block.qkv),
            weight("o", block.o),
            weight("gate_up", block.gate_up),
            weight("down", block.down),
        )

    def packed(self, ops: Ops) -> LayerWeights:
        """As ``ops`` reads them."""

        def pack(op: Projection, weight: Fp8Weight) -> Packed:
            return {"prefill": ops.pack(op, "prefill", weight.codes)}

        return LayerWeights(
            qkv=pack("qkv", self.qkv),
            o=pack("o", self.o),
            gate_up=pack("gate_up", self.gate_up),
            down=pack("down", self.down),
        )

    def weight_scales(self, ops: Ops) -> list[Tensor]:
        """Of ``READERS``, as ``ops`` reads them."""
        return [ops.pack_scale(op, getattr(self, op).scale) for op in READERS]

    def scales(self, ops: Ops, x_scale: Tensor, results: LayerResults) -> BlockScales:
        """Of a layer whose x is read at ``x_scale`` and whose results are written at theirs."""

        def sums(op: Projection, x: Tensor, weight: Fp8Weight) -> Tensor:
            return ops.pack_scale(op, x * weight.scale)

        return BlockScales(
            qkv=sums("qkv", x_scale, self.qkv),
            o=sums("o", results.attended.scale, self.o),
            gate_up=sums("gate_up", results.middle.scale, self.gate_up),
            down=sums("down", results.h.scale, self.down),
            attended=results.attended,
            middle=results.middle,
            h=results.h,
            end=results.end,
        )


class ScaledMmReference(ReferenceOps):
    """The rounding reference with PyTorch's own FP8 product: what the tolerance rule calls PyTorch in the same type.

    With fast accumulation that leaves a whole row of K to the tensor cores, as ours does; of K = 14336 the sums then
    err by more than BF16 rounds them.
    """

    def __init__(self, config: LlamaConfig, precision: Precision, device: torch.device) -> None:
        super().__init__(config, device=device)
        self.fast = precision.accumulation == "fast"
        self.one = torch.ones((), device=device)

    def pack(self, op: Projection, phase: Phase, logical: DecodeWeight) -> Tensor:
        """See ReferenceOps.pack; codes of FP8 stay codes."""
        if isinstance(logical, Tensor) and logical.dtype == torch.float8_e4m3fn:
            return logical
        return super().pack(op, phase, logical)

    def _linear(self, x: Tensor, weight: Tensor, scale: Tensor | None) -> Tensor:
        if scale is None:
            return super()._linear(x, weight, scale)
        sums = torch._scaled_mm(
            x,
            weight.t(),
            scale_a=self.one,
            scale_b=self.one,
            out_dtype=torch.float32,
            use_fast_accum=self.fast,
        )
        return sums.mul_(scale)


def references(config: LlamaConfig, precision: Precision, device: torch.device) -> tuple[ReferenceOps, ReferenceOps]:
    """The exact reference, and PyTorch in the storage type."""
    exact = ReferenceOps(config, device=device, dtype=torch.float32)
    return exact, ScaledMmReference(config, precision, device)
