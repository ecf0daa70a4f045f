"""quantization_config and the tensors of GPTQ, AWQ, compressed-tensors and FP8: a typed error, or the config's weights.

The lm_head is quantised too, and of 24 and of 20 rows: a vocabulary need not be a multiple of a word's eight codes.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save
from torch import Tensor

from futransformer.checkpoint import EMBEDDING, Checkpoint, load_checkpoint, projections_of
from futransformer.formats import read_format
from tests.formats.writers import awq, gptq, packed, packed_section
from tests.formats.writers import draw as drawn
from tests.fuzz.damage import damaged, edited, json_text, unless_refused
from tests.fuzz.test_checkpoints import CONFIG, WEIGHTS

MODULES = {**dict.fromkeys(projections_of(0), (64, 64)), "lm_head": (24, 64)}
EXACT = {module: drawn(1, shape, 32, symmetric=False, least_zero=1) for module, shape in MODULES.items()}
PLAIN = {name: tensor for name, tensor in WEIGHTS.items() if name.removesuffix(".weight") not in MODULES}
FP8 = {
    name: tensor
    for module, shape in MODULES.items()
    for name, tensor in {
        f"{module}.weight": torch.ones(shape).to(torch.float8_e4m3fn),
        f"{module}.weight_scale": torch.full((2 if shape[0] > 32 else 1, 2), 0.5),
    }.items()
}


def all_of(write: Any, **options: Any) -> dict[str, Tensor]:
    return {name: tensor for module, one in EXACT.items() for name, tensor in write(module, one, **options).items()}


KINDS: dict[str, tuple[dict[str, Any], dict[str, Tensor]]] = {
    "gptq": (
        {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": 32,
            "sym": False,
            "desc_act": False,
            "checkpoint_format": "gptq",
        },
        all_of(gptq),
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}, all_of(awq)),
    "packed": (packed_section(32, symmetric=False), all_of(packed, symmetric=False)),
    "fp8": ({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [32, 32]}, FP8),
}
MORE = ("static_groups", "dynamic", "pack_dtype", "format", "desc_act", "sparsity_config", "g_idx", "block_structure")
TYPES = (torch.int32, torch.int64, torch.float16, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quantised")


def assert_reads(checkpoint: Checkpoint) -> None:
    """Every projection is float32 of its shape; codes and zero points are of four bits."""
    for module, shape in MODULES.items():
        n = checkpoint.config.vocab_size if module == "lm_head" else shape[0]
        assert checkpoint.projection(module).shape == (n, shape[1])
    layer = checkpoint.layer(0)
    assert (layer.qkv.dtype, layer.qkv.shape) == (torch.bfloat16, (192, 64))
    assert checkpoint.lm_head().shape == (checkpoint.config.vocab_size, 64)
    if checkpoint.may_keep_codes:
        checkpoint.check_codes()
        coded = unless_refused(lambda: checkpoint.codes(0))
        assert coded is None or coded.qkv.codes.shape == (192, 64)
        assert coded is None or int(coded.qkv.codes.max()) < 16


def read(folder: Path, section: bytes, tensors: bytes, vocab_size: int = 24) -> None:
    (folder / "config.json").write_bytes(b'{"quantization_config": ' + section + b"}")
    (folder / "model.safetensors").write_bytes(tensors)
    unless_refused(lambda: assert_reads(load_checkpoint(folder, replace(CONFIG, vocab_size=vocab_size))))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_damaged_here_is_sound_before(folder: Path, kind: str) -> None:
    section, tensors = KINDS[kind]
    (folder / "config.json").write_text(json.dumps({"quantization_config": section}))
    (folder / "model.safetensors").write_bytes(save({**PLAIN, **tensors}))
    checkpoint = load_checkpoint(folder, CONFIG)
    assert_reads(checkpoint)
    for module, one in EXACT.items():
        exact = one.weight() if kind != "fp8" else torch.full(MODULES[module], 0.5, dtype=torch.float64)
        assert torch.equal(checkpoint.projection(module).double(), exact)


@given(kind=st.sampled_from(list(KINDS)), data=st.data())
def test_a_section_is_refused_or_read(folder: Path, kind: str, data: st.DataObject) -> None:
    section, tensors = KINDS[kind]
    text = data.draw(json_text(edited(section, MORE)))
    read(folder, text, save({**PLAIN, **tensors}))


@given(kind=st.sampled_from(list(KINDS)), data=st.data())
def test_tensors_are_refused_or_read(folder: Path, kind: str, data: st.DataObject) -> None:
    section, tensors = KINDS[kind]
    changed = {**PLAIN, **tensors}
    for _ in range(data.draw(st.integers(1, 3))):
        name = data.draw(st.sampled_from(sorted(tensors)))
        tensor = changed.get(name, tensors[name]).clone()
        match data.draw(st.sampled_from(("remove", "type", "shape", "values", "rename"))):
            case "remove":
                changed.pop(name, None)
            case "type":
                changed[name] = tensor.float().to(data.draw(st.sampled_from(TYPES)))
            case "shape":
                changed[name] = tensor.flatten()[: data.draw(st.sampled_from((0, 1, 2, 24, 64)))].clone()
            case "values":
                bits = tensor.contiguous().flatten().view(torch.uint8)
                held = data.draw(st.binary(min_size=1, max_size=8)) * len(bits)
                bits.copy_(torch.tensor(list(held[: len(bits)]), dtype=torch.uint8))
                changed[name] = bits.view(tensor.dtype).view(tensor.shape)
            case _:
                changed[name + data.draw(st.sampled_from(("_inv", ".bias", "x")))] = changed.pop(name, tensor)
    vocab_size = data.draw(st.sampled_from((24, 24, 24, 20)))
    content = save(changed)
    damage = data.draw(st.just(content) | damaged(content, within=6000))
    read(folder, json.dumps(section).encode(), damage, vocab_size)


STORED = {"I32": torch.int32, "I64": torch.int64, "BF16": torch.bfloat16, "F16": torch.float16, "F8_E4M3": TYPES[5]}
SIZES = (-1, 1, 8, 24, 32, 40, 64, 72, 2**31, 10**12, 2**62, 10**30)


class Named:
    """Only what decides which tensors a projection has: nothing but codes in their format."""

    def __init__(self, kind: str) -> None:
        self.ending = ".weight" if kind == "fp8" else ".weight_packed"

    def __contains__(self, name: str) -> bool:
        return name.endswith(self.ending)

    def type_of(self, name: str) -> str:
        return "F8_E4M3"

    def read(self, name: str) -> Tensor:
        raise KeyError(name)


@given(
    kind=st.sampled_from(list(KINDS)),
    size=st.sampled_from(SIZES),
    columns=st.sampled_from(SIZES),
    vocab_size=st.sampled_from((24, 20, 17, 1)),
)
def test_tensors_as_any_section_asks_for_them_are_refused_or_read(
    folder: Path, kind: str, size: int, columns: int, vocab_size: int
) -> None:
    """Groups and blocks of any size, and a vocabulary that fills no whole words, with tensors that fit them."""
    section = json.loads(json.dumps(KINDS[kind][0]))
    if kind == "packed":
        section["config_groups"]["group_0"]["weights"]["group_size"] = size
    else:
        section["weight_block_size" if kind == "fp8" else "group_size"] = [size, columns] if kind == "fp8" else size
    (folder / "config.json").write_text(json.dumps({"quantization_config": section}))
    stored = unless_refused(lambda: read_format(folder))
    if stored is None:
        return
    tensors = {**PLAIN, EMBEDDING: torch.zeros(vocab_size, 64).bfloat16()}
    for module, (n, k) in {**MODULES, "lm_head": (vocab_size, 64)}.items():
        asked = unless_refused(lambda m=module, shape=(n, k): stored.tensors(m, shape, Named(kind)))  # type: ignore[misc]
        for name, (shapes, types) in (asked or {}).items():
            content = torch.tensor((n, k)) if name.endswith("_shape") else torch.ones(shapes[-1])
            tensors[name] = content.to(STORED[types[0]])
    read(folder, json.dumps(section).encode(), save(tensors), vocab_size)
