"""A checkpoint's weights as the operations read them: by which precision it is served, and every tensor packed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from futransformer.blocks import LayerWeights, Packed
from futransformer.checkpoint import Checkpoint
from futransformer.fp8_scaling import READERS
from futransformer.generator.config import LlamaConfig
from futransformer.generator.errors import CheckpointError, UnsupportedError
from futransformer.generator.precision import BF16, E4M3, INT4, Element, Precision, gains_in_x
from futransformer.ops.interface import DecodeWeight, Ops
from futransformer.quantize.fp8 import quantize_weight
from futransformer.quantize.int4 import round_to_nearest
from futransformer.quantize.kv_int4 import fold_value_rotation
from futransformer.quantize.recipe import Fp8Recipe


@dataclass(frozen=True)
class LlamaWeights:
    """Everything that the ops read: tables as they are, matrices packed for each phase."""

    embedding: Tensor
    rope_table: Tensor
    layers: Sequence[LayerWeights]
    lm_head: Packed
    # of an FP8 prefill's weights: each layer's READERS, in order, as their GEMMs read them; of one in BF16 it is 1
    scales: tuple[Tensor, ...] = ()
    # Where decode's weights keep a checkpoint's codes: float32 [H] of every norm, in order; of the last, whose gain the
    # head holds, ones.
    gains: tuple[Tensor, ...] = ()


def serving(checkpoint: Checkpoint, precision: Precision) -> tuple[Precision, str | None]:
    """The precision that serves a checkpoint, and what to say of its codes.

    INT4 decode keeps INT4 codes. Then the gains of norms go into x, unless they are all one. What is asked for must
    have the checkpoint's groups: UnsupportedError says which precision has.
    """
    stored_as, groups = checkpoint.format, checkpoint.groups
    whole = ("fp8" if precision.prefill == E4M3 else "bf16") + precision.suffix
    if stored_as is not None and stored_as.mixed and precision.decode == INT4:
        raise UnsupportedError(
            f"{checkpoint.folder} is {stored_as.title}: codes of several kinds, which INT4 kernels cannot keep, and "
            f"rounding them again would lose more; use {whole}"
        )
    if precision.gain_in_x and groups is None:
        raise UnsupportedError(
            f"{checkpoint.folder} has no INT4 codes of its own, for which {precision.name} is; use "
            f"{precision.name.replace('-gain', '')}"
        )
    if stored_as is None:
        return precision, None
    keeping = ""
    if checkpoint.may_keep_codes and groups is not None and groups.suffix is not None:
        keeping = f"{'fp8-' if precision.prefill == E4M3 else ''}int4{groups.suffix}{precision.suffix}"
    phases = " and ".join(dict.fromkeys((precision.prefill.name, precision.decode.name)))
    if precision.decode != INT4 or groups is None:
        advice = f"; decode keeps the codes with precision {keeping}" if keeping else ""
        return precision, f"{stored_as.title}: dequantised, and served as {phases}{advice}"
    if groups != (precision.group_size, precision.zero_points):
        served = f"{keeping}, which keeps its codes, or {whole}" if keeping else whole
        raise UnsupportedError(
            f"{checkpoint.folder} is {stored_as.title}, and precision {precision.name} has other groups; use {served}"
        )
    checkpoint.check_codes()
    if any((gain != 1).any() for gain in checkpoint.norm_gains()):
        precision = gains_in_x(precision)
    return precision, f"{stored_as.title}: decode keeps the codes ({precision.name}), prefill reads them dequantised"


def load_weights(
    checkpoint: Checkpoint, config: LlamaConfig, ops: Ops, precision: Precision, recipe: Fp8Recipe | None = None
) -> LlamaWeights:
    """Fold, quantise and pack, one layer at a time, so that no more than one layer exists twice.

    ``precision`` is what ``serving`` gave; ``recipe`` is of an FP8 prefill.
    """
    keeps_codes = precision.decode == INT4 and checkpoint.groups is not None
    # A rotation of V is for both phases' weights: not beside codes of a checkpoint, or an FP8 recipe made without it.
    rotation = precision.copy.hadamard if precision.copy is not None and not keeps_codes and recipe is None else 0
    scales: list[Tensor] = []
    layers = []
    for index in range(config.num_hidden_layers):
        logical = checkpoint.layer(index)
        if rotation:
            qkv, o = fold_value_rotation(logical.qkv, logical.o, config.heads, rotation)
            logical = replace(logical, qkv=qkv.bfloat16(), o=o.bfloat16())
        coded = checkpoint.codes(index) if keeps_codes else None
        packed: dict[str, Packed] = {}
        for op in READERS:
            weight: Tensor = getattr(logical, op).to(ops.device)
            coded_kv = precision.kv == E4M3 or precision.copy is not None
            if op == "qkv" and coded_kv and not weight.isfinite().all():
                # a NaN that K alone had would look like an answer: kernels read E4M3's as 480, and INT4 has none
                raise CheckpointError(f"{config.name}: layer {index}, qkv: its weight is not finite; fetch it again")
            decoded: DecodeWeight
            if coded is not None:
                decoded = getattr(coded, op)
            else:
                decoded = as_decoded(f"{config.name}: layer {index}, {op}", weight, precision.decode, precision)
            packed[op] = {"decode": ops.pack(op, "decode", decoded)}
            if recipe is not None:
                scale = torch.ones(1)
                if recipe.reads_fp8(index, op):
                    weight, scale = recipe.weight(config.name, index, op, weight, precision)
                scales.append(ops.pack_scale(op, scale))
            packed[op]["prefill"] = ops.pack(op, "prefill", weight)
        layers.append(LayerWeights(**packed))
    lm_head = checkpoint.lm_head().to(ops.device)
    decoded = as_decoded(f"{config.name}: lm_head", lm_head, precision.head, precision)
    gains: list[Tensor] = []
    if precision.gain_in_x:
        gains = [gain.to(ops.device) for gain in (*checkpoint.norm_gains(), torch.ones(config.hidden_size))]
    return LlamaWeights(
        embedding=checkpoint.embedding().to(ops.device),
        rope_table=checkpoint.rope_table().to(ops.device),
        layers=layers,
        lm_head={"prefill": ops.pack("lm_head", "prefill", lm_head), "decode": ops.pack("lm_head", "decode", decoded)},
        scales=tuple(scales),
        gains=tuple(gains),
    )


def as_decoded(name: str, weight: Tensor, element: Element, precision: Precision) -> DecodeWeight:
    """A logical weight rounded to nearest for decode: E4M3 with a scale a row, INT4 in the precision's groups."""
    if element == BF16:
        return weight
    if element == E4M3:
        return quantize_weight(name, weight, "channel")
    return round_to_nearest(name, weight, precision.group_size, zero_points=precision.zero_points)
