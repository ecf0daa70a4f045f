"""Checkpoints of compressed-tensors: pack-quantized (INT4 weights) and float-quantized (FP8).

| tensor | type | shape | content |
| --- | --- | --- | --- |
| weight_packed | int32 | [N, K / 8] | codes + 8, nibble k % 8 |
| weight_scale | float | [N, G] | |
| weight_zero_point | int32 | [N / 8, G] | asymmetric: zero points + 8, nibble n % 8 |
| weight_shape | int64 | [2] | N, K |
| weight_g_idx | int32 | [K] | actorder "group": the group of each k; all -1: k // group_size |
| weight | E4M3 | [N, K] | float-quantized: codes |
| weight_scale | float | [1], [N, 1] or blocks | of those |
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from futransformer.formats.codes import (
    FLOATS,
    WORD,
    Codes,
    GroupedCodes,
    Groups,
    ScaledCodes,
    Stored,
    Tensors,
    fp8_scale,
    fp8_tensors,
    groups_of_columns,
    nibbles,
    words,
)
from futransformer.formats.fp8 import SPARE, block_size
from futransformer.generator.errors import CheckpointError
from futransformer.generator.json_reader import JsonReader, shown
from futransformer.generator.precision import CHANNEL
from futransformer.quantize.int4 import Int4Weight

PACKED, FLOAT = "pack-quantized", "float-quantized"
ACT_ORDERS = ("group", "dynamic")  # with weight_g_idx; "weight" and "static" leave nothing to do


@dataclass(frozen=True)
class Scheme:
    """One of config_groups: which modules it is of, and how they are quantised."""

    targets: tuple[str, ...]
    groups: Groups | None  # of INT4 codes; None: FP8
    act_order: bool = False
    block: tuple[int, int] | None = None

    def holds(self, module: str) -> bool:
        """Whether a target names this linear layer: its class, its name, or a pattern of names (re:...)."""
        return any(
            target in ("Linear", module)
            or (target.startswith("re:") and re.match(target.removeprefix("re:"), module) is not None)
            for target in self.targets
        )


@dataclass(frozen=True)
class CompressedTensors:
    """A checkpoint's format."""

    schemes: tuple[Scheme, ...]

    @property
    def title(self) -> str:
        """See Format.title."""
        kinds = dict.fromkeys("FP8" if scheme.groups is None else f"INT4, {scheme.groups}" for scheme in self.schemes)
        return f"compressed-tensors ({'; '.join(kinds)})"

    @property
    def groups(self) -> Groups | None:
        """See Format.groups; None where schemes differ."""
        different = {scheme.groups for scheme in self.schemes}
        return next(iter(different)) if len(different) == 1 else None

    @property
    def mixed(self) -> bool:
        """See Format.mixed."""
        return len({scheme.groups for scheme in self.schemes}) > 1

    @property
    def act_order(self) -> bool:
        """See Format.act_order."""
        return any(scheme.act_order for scheme in self.schemes)

    def tensors(self, module: str, shape: tuple[int, int], stored: Tensors) -> Mapping[str, Stored] | None:
        """See Format.tensors."""
        packed, weight = f"{module}.weight_packed", f"{module}.weight"
        if packed not in stored and (weight in stored and stored.type_of(weight) != "F8_E4M3"):
            return None
        scheme = self._scheme(module)
        if scheme is None:
            if packed not in stored:
                return None  # what is missing is the plain weight
            raise CheckpointError(f"{packed} belongs to none of quantization_config's config_groups; fetch both again")
        if scheme.groups is None:
            if weight not in stored:
                return {weight: Stored((shape,), ("F8_E4M3",))}
            return fp8_tensors(module, shape, stored, scheme.block)
        n, k = shape
        count = scheme.groups.count(k)
        wanted = {
            packed: Stored(((n, -(-k // WORD)),), ("I32",)),
            f"{module}.weight_scale": Stored(((n, count),), FLOATS),
            f"{module}.weight_shape": Stored(((2,),), ("I64", "I32")),
        }
        if scheme.groups.zero_points:
            wanted[f"{module}.weight_zero_point"] = Stored(((-(-n // WORD), count),), ("I32",))
        if scheme.act_order or f"{module}.weight_g_idx" in stored:
            wanted[f"{module}.weight_g_idx"] = Stored(((k,),), ("I32", "I64"))
        return wanted

    def read(self, module: str, shape: tuple[int, int], stored: Tensors) -> Codes:
        """See Format.read."""
        scheme = self._scheme(module)
        assert scheme is not None
        if scheme.groups is None:
            return ScaledCodes(stored.read(f"{module}.weight"), stored.read(fp8_scale(module, stored)), scheme.block)
        written = tuple(stored.read(f"{module}.weight_shape").tolist())
        if written != shape:
            raise CheckpointError(
                f"{module}.weight_shape is {list(written)}, the config asks for {list(shape)}; the weights and "
                "config.json belong to different models"
            )
        n, k = shape
        zeros = None
        if scheme.groups.zero_points:
            zeros = nibbles(stored.read(f"{module}.weight_zero_point").T).T[:n].contiguous()
        g_idx, group_of = f"{module}.weight_g_idx", None
        if g_idx in stored:
            columns = stored.read(g_idx)
            group_of = None if (columns == -1).all() else groups_of_columns(g_idx, columns, scheme.groups)
        return GroupedCodes(
            module,
            codes=nibbles(stored.read(f"{module}.weight_packed"))[:, :k].contiguous(),
            scales=stored.read(f"{module}.weight_scale"),
            zeros=zeros,
            group_size=scheme.groups.group_size,
            group_of=group_of,
        )

    def spare(self, name: str) -> bool:
        """See Format.spare."""
        return name.endswith(SPARE)

    def _scheme(self, module: str) -> Scheme | None:
        return next((scheme for scheme in self.schemes if scheme.holds(module)), None)


def parse(section: JsonReader) -> CompressedTensors:
    """Read quantization_config, or compression_config."""
    kind = section.text("format") if section.has("format") else "dense"
    if kind not in (PACKED, FLOAT, "mixed-precision"):
        raise section.error("format", f"is {kind!r}; supported: {PACKED}, {FLOAT}")
    for key in ("sparsity_config", "transform_config"):
        other = section.section(key)
        if other.content and other.content.get("format") != "dense":
            raise section.error(key, "is not supported; save the model without it")
    described = section.section("config_groups")
    if not described.content:
        raise section.error("config_groups", "is missing; fetch config.json again")
    return CompressedTensors(tuple(_scheme(described.section(name)) for name in described.content))


def _scheme(group: JsonReader) -> Scheme:
    weights = group.section("weights")
    targets = group.content.get("targets")
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise group.error("targets", "must be a list of names")
    for target in targets:
        pattern = target.removeprefix("re:") if target.startswith("re:") else ""
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:  # counts and nesting that re gives up on, too
            raise group.error("targets", f"holds {shown(pattern)} after re:, which is no pattern: {error}") from error
    kind, bits = weights.text("type"), weights.integer("num_bits")
    implied = "group" if weights.has("group_size") else "tensor"
    strategy = weights.text("strategy") if weights.has("strategy") else implied
    if kind == "float" and bits == 8:
        if strategy not in ("tensor", "channel", "block"):
            raise weights.error("strategy", f"is {strategy!r}; of FP8 weights supported: tensor, channel, block")
        return Scheme(tuple(targets), None, block=block_size(weights, "block_structure"))
    if kind != "int" or bits != 4:
        raise weights.error("num_bits", f"and type are {bits}, {kind!r}; supported: 4 of int, 8 of float")
    if group.section("input_activations").content:
        raise group.error("input_activations", "are not supported of INT4 weights: their x is BF16")
    if strategy not in ("group", "channel"):
        raise weights.error("strategy", f"is {strategy!r}; of INT4 weights supported: group, channel")
    size = weights.integer("group_size") if strategy == "group" else CHANNEL
    if size != CHANNEL and size < 1:
        raise weights.error("group_size", f"must be positive, not {size}")
    order = weights.content.get("actorder")
    if order is True or order not in (None, False, "weight", "static", *ACT_ORDERS):
        raise weights.error("actorder", f"is {order!r}; supported: group, weight")
    symmetric = weights.boolean("symmetric") if weights.has("symmetric") else True
    return Scheme(tuple(targets), Groups(size, not symmetric), act_order=order in ACT_ORDERS)


def packed_tensors(module: str, weight: Int4Weight) -> dict[str, Tensor]:
    """The tensors of a pack-quantized projection; its rows as the checkpoint orders them."""
    n, k = weight.codes.shape
    tensors = {
        f"{module}.weight_packed": words(weight.codes),
        f"{module}.weight_scale": weight.scales,
        f"{module}.weight_shape": torch.tensor([n, k]),
    }
    if weight.zeros is not None:
        tensors[f"{module}.weight_zero_point"] = words(weight.zeros.T.contiguous()).T.contiguous()
    return tensors


def unpacked(tensors: Mapping[str, Tensor], modules: Iterable[str], groups: Groups) -> dict[str, Int4Weight]:
    """The projections of which ``packed_tensors`` made these tensors."""
    codes = {}
    for module in modules:
        n, k = tensors[f"{module}.weight_shape"].tolist()
        zeros = tensors.get(f"{module}.weight_zero_point")
        codes[module] = Int4Weight(
            nibbles(tensors[f"{module}.weight_packed"])[:, :k].contiguous(),
            tensors[f"{module}.weight_scale"],
            None if zeros is None else nibbles(zeros.T).T[:n].contiguous(),
            groups.group_size,
        )
    return codes


def packed_config(groups: Groups) -> dict[str, Any]:
    """quantization_config of a model whose projections, and they alone, are pack-quantized."""
    channel = groups.group_size == CHANNEL
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": not groups.zero_points,
        "strategy": "channel" if channel else "group",
        "group_size": None if channel else groups.group_size,
        "actorder": None,
        "dynamic": False,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": PACKED,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": None,
                "output_activations": None,
            }
        },
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }
