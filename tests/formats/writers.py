"""Checkpoints written by hand from each format's definition, word by word, from random codes and scales."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from futransformer.checkpoint import projections_of

AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Drawn:
    """A random weight [N, K] and what it is drawn from."""

    codes: Tensor  # int64 [N, K]
    scales: Tensor  # [N, G]
    zeros: Tensor  # int64 [N, G]
    group_of: Tensor  # int64 [K]

    def weight(self) -> Tensor:
        """float64 [N, K], value by value."""
        n, k = self.codes.shape
        rows = torch.arange(n)[:, None].expand(n, k)
        group_of = self.group_of[None].expand(n, k)
        return self.scales.double()[rows, group_of] * (self.codes - self.zeros[rows, group_of]).double()


def draw(
    seed: int,
    shape: tuple[int, int],
    group: int,
    *,
    symmetric: bool,
    act_order: bool = False,
    dtype: torch.dtype = torch.float16,
    least_zero: int = 0,
) -> Drawn:
    generator = torch.Generator().manual_seed(seed)
    n, k = shape
    group = k if group == -1 else group
    count = -(-k // group)
    group_of = torch.arange(k) // group
    if act_order:
        group_of = group_of[torch.randperm(k, generator=generator)]
    zeros = torch.randint(least_zero, 16, (n, count), generator=generator)
    return Drawn(
        torch.randint(16, shape, generator=generator),
        ((torch.rand((n, count), generator=generator) + 0.5) * 0.2 * k**-0.5).to(dtype),
        torch.full_like(zeros, 8) if symmetric else zeros,
        group_of,
    )


def word(codes: list[int]) -> int:
    """Eight nibbles, the first lowest, as a signed word."""
    value = sum(code << 4 * place for place, code in enumerate(codes))
    return value - 2**32 if value >= 2**31 else value


def words_of(codes: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """int32 [R, C / 8] of [R, C]."""
    rows = [[word([row[first + at] for at in order]) for first in range(0, len(row), 8)] for row in codes.tolist()]
    return torch.tensor(rows, dtype=torch.int32)


def gptq(module: str, drawn: Drawn, version: int = 1, *, g_idx: bool = True) -> dict[str, Tensor]:
    tensors = {
        f"{module}.qweight": words_of(drawn.codes).T.contiguous(),
        f"{module}.qzeros": words_of((drawn.zeros - int(version == 1)).T),
        f"{module}.scales": drawn.scales.T.contiguous(),
    }
    return {**tensors, f"{module}.g_idx": drawn.group_of.int()} if g_idx else tensors


def awq(module: str, drawn: Drawn) -> dict[str, Tensor]:
    return {
        f"{module}.qweight": words_of(drawn.codes.T, AWQ_COLUMNS),
        f"{module}.qzeros": words_of(drawn.zeros.T, AWQ_COLUMNS),
        f"{module}.scales": drawn.scales.T.contiguous(),
    }


def packed(module: str, drawn: Drawn, *, symmetric: bool, g_idx: bool = False) -> dict[str, Tensor]:
    tensors = {
        f"{module}.weight_packed": words_of(drawn.codes),
        f"{module}.weight_scale": drawn.scales,
        f"{module}.weight_shape": torch.tensor(drawn.codes.shape),
    }
    if not symmetric:
        tensors[f"{module}.weight_zero_point"] = words_of(drawn.zeros.T).T.contiguous()
    return {**tensors, f"{module}.weight_g_idx": drawn.group_of.int()} if g_idx else tensors


def packed_section(group: int, *, symmetric: bool, actorder: str | None = None) -> dict[str, Any]:
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "channel" if group == -1 else "group",
        "group_size": None if group == -1 else group,
        "actorder": actorder,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
        "ignore": ["lm_head"],
    }


def llm_compressor_section() -> dict[str, Any]:
    """What llm-compressor 0.14 wrote into config.json, of GPTQ by its scheme W4A16."""
    section = packed_section(128, symmetric=True)
    (group,) = section["config_groups"].values()
    observed = {"observer": "memoryless_minmax", "observer_kwargs": {}, "dynamic": False, "block_structure": None}
    group["weights"] |= {**observed, "scale_dtype": None, "zp_dtype": None}
    group |= {"format": "pack-quantized", "output_activations": None}
    spare: dict[str, Any] = {
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "transform_config": {},
    }
    return {**section, **spare, "quantization_status": "compressed", "version": "0.19.0"}


@dataclass(frozen=True)
class Kind:
    """A checkpoint's format: what config.json says, how weights are drawn, how they are written."""

    section: dict[str, Any]
    write: Callable[[str, Drawn], dict[str, Tensor]]
    group: int
    symmetric: bool
    act_order: bool = False
    dtype: torch.dtype = torch.float16
    least_zero: int = 0
    precision: str | None = None  # that keeps the codes


def _gptq(group: int, *, symmetric: bool, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": group, "sym": symmetric, "desc_act": False, **more}


_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}

KINDS: dict[str, Kind] = {
    "gptq-v1": Kind(_gptq(128, symmetric=True), gptq, 128, True, precision="int4"),
    "gptq-v1-asym": Kind(_gptq(32, symmetric=False), gptq, 32, False, least_zero=1, precision="int4-g32-asym"),
    "gptq-v2-asym": Kind(
        _gptq(64, symmetric=False, checkpoint_format="gptq_v2"),
        lambda module, drawn: gptq(module, drawn, 2),
        64,
        False,
        precision="int4-g64-asym",
    ),
    "gptq-v2-called-v1": Kind(
        _gptq(128, symmetric=True), lambda module, drawn: gptq(module, drawn, 2), 128, True, precision="int4"
    ),
    "gptq-no-g_idx": Kind(
        _gptq(-1, symmetric=True),
        lambda module, drawn: gptq(module, drawn, g_idx=False),
        -1,
        True,
        precision="int4-channel",
    ),
    "gptq-act-order": Kind(_gptq(32, symmetric=True, desc_act=True), gptq, 32, True, act_order=True),
    "awq": Kind(_AWQ, awq, 64, False, precision="int4-g64-asym"),
    "packed": Kind(
        packed_section(128, symmetric=True),
        lambda module, drawn: packed(module, drawn, symmetric=True),
        128,
        True,
        dtype=torch.bfloat16,
        precision="int4",
    ),
    "llm-compressor": Kind(
        llm_compressor_section(),
        lambda module, drawn: packed(module, drawn, symmetric=True),
        128,
        True,
        dtype=torch.bfloat16,
        precision="int4",
    ),
    "packed-asym": Kind(
        packed_section(32, symmetric=False),
        lambda module, drawn: packed(module, drawn, symmetric=False),
        32,
        False,
        precision="int4-g32-asym",
    ),
    "packed-channel": Kind(
        packed_section(-1, symmetric=True),
        lambda module, drawn: packed(module, drawn, symmetric=True),
        -1,
        True,
        precision="int4-channel",
    ),
    "packed-static": Kind(
        packed_section(64, symmetric=True, actorder="static"),
        lambda module, drawn: packed(module, drawn, symmetric=True),
        64,
        True,
        precision="int4-g64",
    ),
    "packed-act-order": Kind(
        packed_section(32, symmetric=False, actorder="group"),
        lambda module, drawn: packed(module, drawn, symmetric=False, g_idx=True),
        32,
        False,
        act_order=True,
    ),
}


def shapes_of(weights: dict[str, Tensor], layers: int) -> dict[str, tuple[int, int]]:
    """Module -> N, K of all projections of an unquantised checkpoint."""
    modules = [module for index in range(layers) for module in projections_of(index)]
    return {module: (weights[f"{module}.weight"].shape[0], weights[f"{module}.weight"].shape[1]) for module in modules}


def quantise(plain: Path, folder: Path, kind: Kind, layers: int = 2) -> dict[str, Drawn]:
    """Write ``plain`` with random weights of this kind in place of its projections; what was drawn, by module."""
    folder.mkdir()
    for file in plain.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    weights = load_file(plain / "model.safetensors")
    drawn: dict[str, Drawn] = {}
    for seed, (module, shape) in enumerate(shapes_of(weights, layers).items()):
        del weights[f"{module}.weight"]
        drawn[module] = draw(
            seed,
            shape,
            kind.group,
            symmetric=kind.symmetric,
            act_order=kind.act_order,
            dtype=kind.dtype,
            least_zero=kind.least_zero,
        )
        weights.update(kind.write(module, drawn[module]))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    set_config(folder, quantization_config=kind.section)
    return drawn


def set_config(folder: Path, **keys: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))


def edit(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Rewrite the folder's tensors."""
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


def with_section(kind: Kind, **keys: Any) -> Kind:
    return replace(kind, section={**kind.section, **keys})
