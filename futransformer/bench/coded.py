"""Layers whose weights decode as codes, INT4 or E4M3: the same values for ours, for the references and for every rival.

*Natural* weights are rounded to nearest; ours packs their codes in its own order, ``torch-int4`` has the same codes,
and ``torch-bf16`` the dequantised values, rounded to BF16.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from futransformer.bench.llama import NaturalBlock, logical
from futransformer.blocks import LayerWeights
from futransformer.generator.config import LlamaConfig
from futransformer.generator.decode_heuristics import decode_element
from futransformer.generator.precision import Precision
from futransformer.ops.interface import DecodeWeight, Ops, Phase, Projection
from futransformer.quantize.fp8 import Fp8Weight
from futransformer.quantize.int4 import Int4Weight
from futransformer.weights import as_decoded


def rounded(op: Projection, natural: Tensor, precision: Precision) -> DecodeWeight:
    """A natural weight as a precision decodes it."""
    return as_decoded(op, natural, decode_element(op, precision), precision)


def worth(weight: DecodeWeight) -> Tensor:
    """The values of a weight in BF16, as a rival reads them."""
    return weight if isinstance(weight, Tensor) else weight.dequantise().bfloat16()


def logical_decoded(config: LlamaConfig, op: Projection, natural: DecodeWeight) -> DecodeWeight:
    """The natural weight as ``ops.pack`` takes it: scales lie along K, so that rows move as a whole."""
    if isinstance(natural, Int4Weight):
        return natural.map_rows(lambda rows: logical(config, op, rows))
    if isinstance(natural, Fp8Weight):
        codes = logical(config, op, natural.codes.view(torch.uint8)).view(natural.codes.dtype)
        return Fp8Weight(codes, logical(config, op, natural.scale[:, None])[:, 0].contiguous())
    return logical(config, op, natural)


class CodedBlock(NamedTuple):
    """The four weights of one layer, in natural order."""

    qkv: DecodeWeight
    o: DecodeWeight
    gate_up: DecodeWeight
    down: DecodeWeight

    @classmethod
    def of(cls, block: NaturalBlock, precision: Precision) -> CodedBlock:
        """Round a layer."""
        return cls(
            rounded("qkv", block.qkv, precision),
            rounded("o", block.o, precision),
            rounded("gate_up", block.gate_up, precision),
            rounded("down", block.down, precision),
        )

    def natural(self, gain: Tensor) -> NaturalBlock:
        """The dequantised layer in BF16."""
        qkv, o, gate_up, down = (worth(weight) for weight in self)
        return NaturalBlock(qkv, o, gate_up, down, gain)

    def packed(self, config: LlamaConfig, ops: Ops, phase: Phase) -> LayerWeights:
        """See NaturalBlock.packed."""

        def pack(op: Projection, natural: DecodeWeight) -> dict[Phase, Tensor]:
            return {phase: ops.pack(op, phase, logical_decoded(config, op, natural))}

        return LayerWeights(
            qkv=pack("qkv", self.qkv),
            o=pack("o", self.o),
            gate_up=pack("gate_up", self.gate_up),
            down=pack("down", self.down),
        )
