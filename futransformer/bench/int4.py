"""Layers whose weights decode as INT4: the same values for ours, for the references and for every rival.

*Natural* weights are rounded to nearest; ours packs their codes in its own order, ``torch-int4`` has the same codes,
and ``torch-bf16`` the dequantised values, rounded to BF16.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from futransformer.bench.llama import NaturalBlock, logical
from futransformer.blocks import LayerWeights
from futransformer.generator.config import LlamaConfig
from futransformer.generator.precision import Precision
from futransformer.ops.interface import Ops, Phase, Projection
from futransformer.quantize.int4 import Int4Weight, round_to_nearest


def rounded(op: str, natural: Tensor, precision: Precision) -> Int4Weight:
    """A natural weight in the groups of a precision."""
    return round_to_nearest(op, natural, precision.group_size, zero_points=precision.zero_points)


def logical_int4(config: LlamaConfig, op: Projection, natural: Int4Weight) -> Int4Weight:
    """The natural weight as ``ops.pack`` takes it: groups lie along K, so that rows move as a whole."""
    codes, scales = (logical(config, op, rows) for rows in (natural.codes, natural.scales))
    zeros = None if natural.zeros is None else logical(config, op, natural.zeros)
    return Int4Weight(codes, scales, zeros, natural.group_size)


class Int4Block(NamedTuple):
    """The four weights of one layer, in natural order."""

    qkv: Int4Weight
    o: Int4Weight
    gate_up: Int4Weight
    down: Int4Weight

    @classmethod
    def of(cls, block: NaturalBlock, precision: Precision) -> Int4Block:
        """Round a layer."""
        weights = (("qkv", block.qkv), ("o", block.o), ("gate_up", block.gate_up), ("down", block.down))
        return cls(*(rounded(op, weight, precision) for op, weight in weights))

    def natural(self, gain: Tensor) -> NaturalBlock:
        """The dequantised layer in BF16."""
        qkv, o, gate_up, down = (weight.dequantise().bfloat16() for weight in self)
        return NaturalBlock(qkv, o, gate_up, down, gain)

    def packed(self, config: LlamaConfig, ops: Ops, phase: Phase) -> LayerWeights:
        """See NaturalBlock.packed."""

        def pack(op: Projection, natural: Int4Weight) -> dict[Phase, Tensor]:
            return {phase: ops.pack(op, phase, logical_int4(config, op, natural))}

        return LayerWeights(
            qkv=pack("qkv", self.qkv),
            o=pack("o", self.o),
            gate_up=pack("gate_up", self.gate_up),
            down=pack("down", self.down),
        )
