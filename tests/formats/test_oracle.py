"""Pack-quantized as the library that defines it has it: it unpacks what we wrote, and we read what it packed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from futransformer.checkpoint import load_checkpoint, projections_of
from futransformer.cli import main
from futransformer.formats.codes import Groups
from futransformer.formats.compressed_tensors import packed_tensors, unpacked
from futransformer.generator.config import load_config
from futransformer.generator.json_reader import read_json
from futransformer.generator.precision import CHANNEL
from futransformer.model import Llama
from futransformer.quantize.int4 import round_to_nearest
from futransformer.reference import ReferenceOps

pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
from compressed_tensors.compressors import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationConfig

KINDS = [Groups(size, zero_points) for size in (32, 64, CHANNEL) for zero_points in (False, True)]
TOKENS = torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(4))


def scheme_of(folder: Path) -> Any:
    """The library's own reading of config.json."""
    section = read_json(folder / "config.json")["quantization_config"]
    (scheme,) = QuantizationConfig.model_validate(section).config_groups.values()
    return scheme


def quantised(model: Path, output: Path, groups: Groups) -> Path:
    size = "channel" if groups.group_size == CHANNEL else str(groups.group_size)
    options = ["--group-size", size, "--scale-search", "mse", *["--asymmetric"] * groups.zero_points]
    assert main(["quantize", str(model), "-o", str(output), *options]) == 0
    return output


def tensors_of(folder: Path, module: str) -> dict[str, Tensor]:
    prefix = f"{module}."
    shards = [load_file(path) for path in sorted(folder.glob("model-*.safetensors"))]
    return {name.removeprefix(prefix): shard[name] for shard in shards for name in shard if name.startswith(prefix)}


@pytest.mark.parametrize("groups", KINDS, ids=str)
def test_the_library_unpacks_what_we_wrote(tiny_base_model: Path, tmp_path: Path, groups: Groups) -> None:
    """To float16, which is what it takes from the scales: a rounding of ours."""
    folder = quantised(tiny_base_model, tmp_path / "out", groups)
    scheme, checkpoint = scheme_of(folder), load_checkpoint(folder, load_config(folder))
    for module in (*projections_of(0), *projections_of(1)):
        theirs = PackedQuantizationCompressor.decompress(tensors_of(folder, module), scheme)["weight"]
        assert torch.equal(theirs.half(), checkpoint.projection(module).half()), module


@pytest.mark.parametrize("groups", KINDS, ids=str)
def test_we_read_what_the_library_packed(tiny_base_model: Path, tmp_path: Path, groups: Groups) -> None:
    """And pack it to the same words."""
    scheme = scheme_of(quantised(tiny_base_model, tmp_path / "out", groups))
    weight = torch.randn(48, 192, generator=torch.Generator().manual_seed(0))
    codes = round_to_nearest("w", weight, groups.group_size, zero_points=groups.zero_points)
    zeros = torch.full_like(codes.scales, 8) if codes.zeros is None else codes.zeros
    packed = PackedQuantizationCompressor.compress(
        {
            "weight": codes.dequantise(),
            "weight_scale": codes.scales.float(),
            "weight_zero_point": zeros.to(torch.int8) - 8,
        },
        scheme,
    )
    ours = {name.removeprefix("w."): tensor for name, tensor in packed_tensors("w", codes).items()}
    assert set(packed) == set(ours)
    for name, tensor in ours.items():
        assert torch.equal(packed[name].float(), tensor.float()), name
    again = unpacked({f"w.{name}": tensor for name, tensor in packed.items()} | {"w.weight_scale": codes.scales},
                     ["w"], groups)["w"]  # fmt: skip
    assert torch.equal(again.codes, codes.codes)
    assert torch.equal(again.dequantise(), codes.dequantise())


@torch.inference_mode()
def test_transformers_computes_the_same(tiny_base_model: Path, tmp_path: Path) -> None:
    """The whole model through the library's own loading; float16 weights are 2^-12 off at most."""
    folder = quantised(tiny_base_model, tmp_path / "out", Groups(64, zero_points=False))
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(TOKENS).logits.float()
    ops = ReferenceOps(load_config(folder), dtype=torch.float32)
    model = Llama.from_pretrained(folder, ops=ops, precision="int4-g64", cache_tokens=256)
    model.start(2)
    ours = torch.stack([model.decode(column) for column in TOKENS.T.int()], 1)
    assert (ours - theirs).abs().max() <= 2e-3 * theirs.abs().max()
