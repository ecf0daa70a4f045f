"""Our own folder: it names its precision, holds what an FP8 prefill reads, and notices a flipped bit of any of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from futransformer.checkpoint import load_checkpoint
from futransformer.cli import main
from futransformer.cli import quantize as quantize_module
from futransformer.fp8_scaling import READERS
from futransformer.generator.config import load_config
from futransformer.generator.errors import CheckpointError
from futransformer.model import Llama
from futransformer.quantize.description import named_precision
from futransformer.quantize.folder import read_recipe
from futransformer.quantize.fp8 import quantize_weight

TOKENS = torch.randint(256, (3, 40), generator=torch.Generator().manual_seed(6)).tolist()
SMALL = ("--group-size", "64", "--device", "cpu")
SHORT = ("--samples", "2", "--seqlen", "64")  # of the text, where one is read


def quantised(model: Path, output: Path, *options: str) -> Path:
    text = SHORT if "--fp8-prefill" in options else ()
    assert main(["quantize", str(model), "-o", str(output), *SMALL, *text, *options]) == 0
    return output


def loaded(folder: Path, **options: Any) -> Llama:
    return Llama.from_pretrained(folder, device="cpu", cache_tokens=512, **options)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ((), "int4-g64"),
        (("--asymmetric", "--lm-head", "int4", "--kv", "fp8"), "int4-g64-asym-head4-kv8"),
        (("--fp8-prefill", "--lm-head", "fp8", "--kv", "int4"), "fp8-int4-g64-head8-kv4"),
        (("--kv", "fp8-int4", "--hadamard-block", "64"), "int4-g64-kv8-kv4-h64"),
    ],
)
def test_a_model_is_loaded_as_its_folder_says(
    tiny_model: Path, tmp_path: Path, options: tuple[str, ...], name: str
) -> None:
    out = quantised(tiny_model, tmp_path / "out", *options)
    assert named_precision(out) == name
    model, asked = loaded(out), loaded(out, precision=name)
    assert (model.scaling is not None) == ("--fp8-prefill" in options)
    assert torch.equal(model.prefill(TOKENS), asked.prefill(TOKENS))
    column = torch.tensor([1, 2, 3], dtype=torch.int32)
    assert torch.equal(model.decode(column), asked.decode(column))
    assert (
        not torch.equal(loaded(out, precision="bf16").prefill(TOKENS), model.prefill(TOKENS)) or model.scaling is None
    )


def test_the_command_runs_it_by_that_precision(
    tiny_base_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = quantised(tiny_base_model, tmp_path / "out", "--lm-head", "fp8")
    capsys.readouterr()
    run = ["run", str(out), "--reference", "--prompt", "Hello", "--max-new-tokens", "2", "--json"]
    for precision in ("int4-g64-head8", "bf16"):
        assert main([*run, *(["--precision", precision] if precision == "bf16" else [])]) == 0
        assert json.loads(capsys.readouterr().out)["precision"] == precision


def test_its_kernels_are_generated_for_that_precision(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = quantised(tiny_model, tmp_path / "out", "--lm-head", "fp8")
    capsys.readouterr()
    for config, precision in ((out, "int4-g64-head8"), (out / "config.json", "int4-g64-head8"), (tiny_model, "bf16")):
        assert main(["generate", str(config), "--output", str(tmp_path / "sources")]) == 0
        assert f", {precision}, in " in capsys.readouterr().out


def test_a_folder_of_someone_else_is_bf16(tiny_base_model: Path) -> None:
    assert named_precision(tiny_base_model) is None
    logits = loaded(tiny_base_model).prefill(TOKENS)
    assert torch.equal(logits, loaded(tiny_base_model, precision="bf16").prefill(TOKENS))


def test_an_fp8_prefill_reads_the_weights_before_they_were_int4(tiny_base_model: Path, tmp_path: Path) -> None:
    """In shards of a layer; by scales that a text was read for."""
    out = quantised(tiny_base_model, tmp_path / "out", "--fp8-prefill")
    recipe = read_recipe(out, load_config(out))
    original = load_checkpoint(tiny_base_model, load_config(tiny_base_model))
    for index in range(2):
        for op in READERS:
            expected = quantize_weight(op, getattr(original.layer(index), op), "tensor")
            assert torch.equal(recipe.weights[index, op].codes.float(), expected.codes.float())
            assert torch.equal(recipe.weights[index, op].scale, expected.scale)
    assert (recipe.scales.amax > 0).all()
    said = json.loads((out / "futransformer.json").read_text())
    shards = [f"fp8_weights-0000{index}-of-00002.safetensors" for index in (1, 2)]
    assert said["fp8_weights"] == {"files": shards}
    assert {*shards, "fp8_scales.safetensors"} < set(said["sha256"])
    assert (said["fp8_scales"]["windows"], said["fp8_scales"]["context"]) == (2, 64)


@pytest.mark.parametrize("name", ["fp8_weights-00002-of-00002.safetensors", "fp8_scales.safetensors"])
def test_a_flipped_bit_is_noticed(tiny_base_model: Path, tmp_path: Path, name: str) -> None:
    out = quantised(tiny_base_model, tmp_path / "out", "--fp8-prefill")
    content = bytearray((out / name).read_bytes())
    content[-10] ^= 1
    (out / name).write_bytes(content)
    for precision in (None, "bf16"):
        with pytest.raises(CheckpointError, match=f"{name} is not the file that futransformer.json names"):
            loaded(out, precision=precision)


def test_a_reading_that_fails_keeps_the_layers(
    tiny_base_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(quantize_module, "load", fail)
    command = ["quantize", str(tiny_base_model), "-o", str(tmp_path / "out"), *SMALL, *SHORT, "--fp8-prefill"]
    assert main(command) == 130
    (partial,) = tmp_path.glob(".out-*.partial")
    written = {path.name: path.stat().st_mtime_ns for path in partial.glob("*weights*-of-*")}
    assert len(written) == 2
    monkeypatch.undo()
    assert main(command) == 0
    assert {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in written} == written


def test_compressed_tensors_alone_names_no_precision(
    tiny_base_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = quantised(tiny_base_model, tmp_path / "out", "--format", "compressed-tensors")
    assert named_precision(out) is None
    assert "precision int4-g64 serves it" in capsys.readouterr().out
    for options in (("--kv", "int4"), ("--lm-head", "fp8"), ("--fp8-prefill",)):
        command = ["quantize", str(tiny_base_model), "-o", str(tmp_path / "no"), "--format", "compressed-tensors"]
        assert main([*command, *options]) == 2
        assert "has no place for --fp8-prefill, --lm-head and --kv" in capsys.readouterr().err


def test_a_rotation_beyond_a_head_is_refused(
    tiny_base_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["quantize", str(tiny_base_model), "-o", str(tmp_path / "out"), "--hadamard-block", "128"]
    assert main(command) == 2
    assert "heads of 64 features are no whole Hadamard blocks of 128" in capsys.readouterr().err
