"""A quantised model's folder: the same codes as at load, a checkpoint to others, whole or not at all, and resumed."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from futransformer.checkpoint import Checkpoint, load_checkpoint, projections_of
from futransformer.cli import main
from futransformer.formats.codes import Groups
from futransformer.generator.config import load_config
from futransformer.generator.errors import BuildError, CheckpointError, InputError, UnsupportedError
from futransformer.generator.precision import CHANNEL
from futransformer.model import Llama
from futransformer.quantize import assemble as assemble_module
from futransformer.quantize import layers as layers_module
from futransformer.quantize import write as write_module
from futransformer.quantize.int4 import Int4Weight, round_to_nearest
from futransformer.quantize.int4_gptq import Int4Method
from futransformer.quantize.layers import Nearest, Quantised
from futransformer.quantize.write import write_quantised
from futransformer.reference import ReferenceOps
from tests.formats.writers import words_of

TOKENS = torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(4))
ASYMMETRIC = Groups(64, zero_points=True)
SHARDS = [f"model-0000{index}-of-00004.safetensors" for index in (1, 2, 3, 4)]


def nearest(groups: Groups) -> Callable[[Checkpoint], Nearest]:
    return lambda _: Nearest(Int4Method(groups), torch.device("cpu"))


def write(source: Path, output: Path, groups: Groups = ASYMMETRIC, **options: Any) -> Path:
    write_quantised(source, output, nearest(groups), groups, {"method": "rtn", "groups": list(groups)}, **options)
    return output


@torch.inference_mode()
def decoded(folder: Path, precision: str) -> Tensor:
    ops = ReferenceOps(load_config(folder))
    model = Llama.from_pretrained(folder, ops=ops, precision=precision, cache_tokens=256)
    assert model.weights.gains == ()
    model.start(len(TOKENS))
    return torch.stack([model.decode(column) for column in TOKENS.T.int()], 1)


@pytest.mark.parametrize(
    "groups", [Groups(128, zero_points=False), Groups(32, zero_points=True), Groups(CHANNEL, True)]
)
def test_it_decodes_as_a_model_that_is_quantised_at_load(tiny_model: Path, tmp_path: Path, groups: Groups) -> None:
    """Bit for bit: the same codes, and norms whose gains are in them. Its prefill reads the dequantised weights."""
    output = write(tiny_model, tmp_path / "out", groups)
    precision = f"int4{groups.suffix}"
    assert torch.equal(decoded(output, precision), decoded(tiny_model, precision))
    checkpoint, original = (load_checkpoint(folder, load_config(folder)) for folder in (output, tiny_model))
    for index in range(2):
        layer, plain = checkpoint.layer(index), original.layer(index)
        for part in ("qkv", "o", "gate_up", "down"):
            codes = round_to_nearest(part, getattr(plain, part), *groups[:1], zero_points=groups.zero_points)
            assert torch.equal(getattr(layer, part), codes.dequantise().bfloat16())
    assert torch.equal(checkpoint.lm_head(), original.lm_head())
    assert torch.equal(checkpoint.embedding(), original.embedding())


def test_the_tensors_are_those_of_the_format(tiny_base_model: Path, tmp_path: Path) -> None:
    """By the definition of pack-quantized, not by our reader; and the weights are those of the folded model."""
    output = write(tiny_base_model, tmp_path / "out", Groups(64, zero_points=True))
    weights, plain = load_file(output / SHARDS[1]), load_file(tiny_base_model / "model.safetensors")
    for module in projections_of(1):
        weight = plain[f"{module}.weight"].float()
        norm = None if module.endswith(("o_proj", "down_proj")) else "post_attention" if ".mlp." in module else "input"
        if norm is not None:
            weight *= plain[f"model.layers.1.{norm}_layernorm.weight"].float()  # powers of two: nothing is rounded
        codes = round_to_nearest(module, weight, 64, zero_points=True)
        assert codes.zeros is not None
        assert torch.equal(weights[f"{module}.weight_packed"], words_of(codes.codes.long()))
        assert torch.equal(weights[f"{module}.weight_scale"], codes.scales)
        assert torch.equal(weights[f"{module}.weight_zero_point"], words_of(codes.zeros.long().T).T)
        assert weights[f"{module}.weight_shape"].tolist() == list(weight.shape)
    assert torch.equal(weights["model.layers.1.input_layernorm.weight"], torch.ones(128).bfloat16())
    section = json.loads((output / "config.json").read_text())["quantization_config"]
    assert section["format"] == "pack-quantized"
    assert section["config_groups"]["group_0"]["weights"]["group_size"] == 64
    assert not section["config_groups"]["group_0"]["weights"]["symmetric"]


def test_the_folder_says_what_it_is(tiny_base_model: Path, tmp_path: Path) -> None:
    output = write(tiny_base_model, tmp_path / "out")
    others = {path.name for path in tiny_base_model.iterdir()} - {"model.safetensors"}
    names = {path.name for path in output.iterdir()}
    assert names == {*others, *SHARDS, "model.safetensors.index.json", "futransformer.json"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    said = json.loads((output / "futransformer.json").read_text())
    assert set(said["sha256"]) == names - {"futransformer.json"}
    assert said["int4_weights"]["method"] == "rtn"
    errors = said["int4_weights"]["errors"]
    assert set(errors) == {*projections_of(0), *projections_of(1)}
    assert all(0.05 < error["weight"] < 0.15 for error in errors.values()), errors


@pytest.mark.parametrize("name", [SHARDS[0], "tokenizer.json"])
def test_a_flipped_bit_is_noticed(tiny_base_model: Path, tmp_path: Path, name: str) -> None:
    output = write(tiny_base_model, tmp_path / "out")
    content = bytearray((output / name).read_bytes())
    content[-100] ^= 1
    (output / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{name} is not the file that futransformer.json names: its sha256"):
        decoded(output, "int4-g64-asym")
    (output / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        decoded(output, "int4-g64-asym")


def test_a_flipped_bit_is_noticed_when_scales_have_been_added(tiny_base_model: Path, tmp_path: Path) -> None:
    output, calibrated = write(tiny_base_model, tmp_path / "out"), tmp_path / "calibrated"
    short = ["--reference", "--samples", "1", "--context", "32"]
    for source, twice in ((output, calibrated), (calibrated, tmp_path / "again")):
        assert main(["calibrate", str(source), "-o", str(twice), *short]) == 0
        assert decoded(twice, "fp8-int4-g64-asym").isfinite().all()
    (twice / SHARDS[0]).unlink()  # it is a link to the first one
    shutil.copyfile(calibrated / SHARDS[0], twice / SHARDS[0])
    flip(twice / SHARDS[0])
    for precision in ("bf16", "fp8-int4-g64-asym"):
        with pytest.raises(CheckpointError, match=f"{SHARDS[0]} is not the file that futransformer.json names"):
            decoded(twice, precision)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sha256": None}, "config.json is no file that futransformer.json names"),
        ({"format": 4}, "is of format 4, this version reads formats up to 3"),
    ],
)
def test_a_description_that_says_no_sums_is_refused(
    tiny_base_model: Path, tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    output = write(tiny_base_model, tmp_path / "out")
    path = output / "futransformer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CheckpointError, match=words):
        decoded(output, "int4-g64-asym")


def test_a_foreign_file_of_weights_is_noticed(tiny_base_model: Path, tmp_path: Path) -> None:
    output = write(tiny_base_model, tmp_path / "out")
    shutil.copyfile(tiny_base_model / "model.safetensors", output / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is no file that futransformer\.json names"):
        decoded(output, "bf16")


class StoppedError(Exception):
    pass


def test_an_interrupted_job_goes_on(tiny_base_model: Path, tmp_path: Path) -> None:
    """The finished layer stays, half a one does not, and nothing lies in OUT before all of it is there."""
    whole = write(tiny_base_model, tmp_path / "whole")
    done: list[int] = []

    class Stopping(Nearest):
        def quantise(self, index: int, weights: Mapping[str, Tensor]) -> Mapping[str, Quantised]:
            if index == 1 and not done[1:]:
                done.append(-1)
                raise StoppedError
            done.append(index)
            return super().quantise(index, weights)

    arguments: tuple[Groups, dict[str, Any]] = (Groups(64, True), {"method": "rtn", "groups": [64, True]})
    stopping = Stopping(Int4Method(ASYMMETRIC), torch.device("cpu"))
    with pytest.raises(StoppedError):
        write_quantised(tiny_base_model, tmp_path / "out", lambda _: stopping, *arguments)
    (partial,) = tmp_path.glob(".out-*.partial")
    assert sorted(path.name for path in partial.iterdir()) == [SHARDS[0], f"{SHARDS[0]}.errors.json"]
    assert not (tmp_path / "out").exists()
    write_quantised(tiny_base_model, tmp_path / "out", lambda _: stopping, *arguments)
    assert done == [0, -1, 1]
    for path in whole.iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes(), path.name
    assert not list(tmp_path.glob(".out*"))


def lose(path: Path) -> None:
    path.unlink()


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:50])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)


def empty(path: Path) -> None:
    path.write_text("{}")


@pytest.mark.parametrize(
    ("beside", "damage"),
    [("", lose), ("", cut_short), ("", flip), (".errors.json", cut_short), (".errors.json", empty)],
)
def test_a_finished_layer_that_a_crash_has_damaged_is_done_again(
    tiny_base_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beside: str, damage: Callable[[Path], None]
) -> None:
    """A file system may lose what was renamed into place shortly before."""

    def stop(*_: Any, **__: Any) -> None:
        raise StoppedError

    with monkeypatch.context() as patched:
        patched.setattr(write_module, "assemble", stop)
        with pytest.raises(StoppedError):
            write(tiny_base_model, tmp_path / "out")
    (partial,) = tmp_path.glob(".out-*.partial")
    damage(partial / f"{SHARDS[0]}{beside}")
    output, whole = write(tiny_base_model, tmp_path / "out"), write(tiny_base_model, tmp_path / "whole")
    assert {path.name: path.read_bytes() for path in output.iterdir()} == {
        path.name: path.read_bytes() for path in whole.iterdir()
    }


@pytest.mark.parametrize(
    ("place", "stop"),
    [
        ("sha256_of", StoppedError()),
        ("check_output", InputError("another was faster")),
        ("publish", StoppedError()),
    ],
)
def test_a_job_that_is_stopped_at_its_end_has_its_layers(
    tiny_base_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, stop: Exception
) -> None:
    """While gigabytes are summed, where another model has come to lie in OUT, or as the folder is to take its place."""
    whole = write(tiny_base_model, tmp_path / "whole")
    done: list[int] = []

    class Counting(Nearest):
        def quantise(self, index: int, weights: Mapping[str, Tensor]) -> Mapping[str, Quantised]:
            done.append(index)
            return super().quantise(index, weights)

    def again() -> None:
        counting = Counting(Int4Method(ASYMMETRIC), torch.device("cpu"))
        how = {"method": "rtn", "groups": list(ASYMMETRIC)}
        write_quantised(tiny_base_model, tmp_path / "out", lambda _: counting, ASYMMETRIC, how)

    def stopping(*arguments: Any, **options: Any) -> None:
        if done:
            raise stop

    with monkeypatch.context() as patched:
        patched.setattr(assemble_module if place == "sha256_of" else write_module, place, stopping)
        with pytest.raises(type(stop)):
            again()
    (partial,) = tmp_path.glob(".out-*.partial")
    (partial / f"{SHARDS[1]}.1{assemble_module.UNFINISHED}").write_text("what a killed process leaves")
    (partial / "NOTICE.txt").write_text("of the source as it was")
    again()
    assert done == [0, 1]
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == {
        path.name: path.read_bytes() for path in whole.iterdir()
    }


def test_what_fills_the_disk_does_not_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(path: Path, content: bytes) -> int:
        with path.open("wb") as file:
            file.write(content[:1])
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(OSError, match="No space left"):
        assemble_module.write_whole(tmp_path / "shard", b"content")
    assert not list(tmp_path.iterdir())


def test_a_full_disk_says_what_is_kept(tiny_base_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = assemble_module.write_whole

    def full(path: Path, content: bytes) -> None:
        if path.name == SHARDS[1]:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        whole(path, content)

    monkeypatch.setattr(write_module, "write_whole", full)
    with pytest.raises(BuildError, match="finished layers are kept in") as refusal:
        write(tiny_base_model, tmp_path / "out")
    (partial,) = tmp_path.glob(".out-*.partial")
    assert f"kept in {partial}, for the same command to go on" in str(refusal.value)


@pytest.mark.parametrize(
    "jobs",
    [
        [(Groups(64, zero_points=True), "rtn"), (Groups(32, zero_points=True), "rtn")],
        [(ASYMMETRIC, "rtn"), (ASYMMETRIC, "other")],
    ],
)
def test_another_method_begins_anew(
    tiny_base_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: list[tuple[Groups, str]]
) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise StoppedError

    monkeypatch.setattr(write_module, "assemble", stop)
    for groups, method in jobs:
        with pytest.raises(StoppedError):
            write_quantised(tiny_base_model, tmp_path / "out", nearest(groups), groups, {"method": method})
    assert len(list(tmp_path.glob(".out-*.partial"))) == 2


def test_what_cannot_be_written(tiny_base_model: Path, tmp_path: Path) -> None:
    output = write(tiny_base_model, tmp_path / "out")
    with pytest.raises(InputError, match="holds a model written before: replace it with --force"):
        write(tiny_base_model, output)
    write(tiny_base_model, output, Groups(32, zero_points=False), force=True)
    assert decoded(output, "int4-g32").isfinite().all()
    with pytest.raises(InputError, match=r"is quantised already \(compressed-tensors .INT4, groups of 32.\)"):
        write(output, tmp_path / "twice")
    with pytest.raises(CheckpointError, match="has no FP8 scales, it holds INT4 weights alone; calibrate it first"):
        decoded(output, "fp8-int4-g32")
    with pytest.raises(UnsupportedError, match="precision int4 has other groups; use int4-g32"):
        decoded(output, "int4")


def test_the_command(tiny_base_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out"
    arguments = ["quantize", str(tiny_base_model), "-o", str(output), "--group-size", "32", "--asymmetric"]
    assert main(arguments) == 0
    said, heard = capsys.readouterr()
    assert "groups of 32 with zero points; precision int4-g32-asym serves it" in said
    assert "layer 2 of 2, 0 s left" in heard
    assert main([*arguments, "--json", "--force"]) == 0
    assert set(json.loads(capsys.readouterr().out)["errors"]) == {*projections_of(0), *projections_of(1)}
    assert torch.equal(decoded(output, "int4-g32-asym"), decoded(tiny_base_model, "int4-g32-asym"))
    assert main(arguments) == 2


def test_an_interrupted_command_says_what_is_kept(
    tiny_base_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As Ctrl-C in the middle of the second layer does."""

    def interrupted(name: str, *arguments: Any, **options: Any) -> Int4Weight:
        if name.startswith("model.layers.1"):
            raise KeyboardInterrupt
        return round_to_nearest(name, *arguments, **options)

    arguments = ["quantize", str(tiny_base_model), "-o", str(tmp_path / "out")]
    monkeypatch.setattr(layers_module, "round_to_nearest", interrupted)
    assert main(arguments) == 130
    (partial,) = tmp_path.glob(".out-*.partial")
    assert f"interrupted; finished layers are kept in {partial}, for the same command" in capsys.readouterr().err
    monkeypatch.undo()
    assert main(arguments) == 0
    assert not partial.exists()


def test_transformers_folded_model_has_the_same_head(tiny_base_model: Path, tmp_path: Path) -> None:
    """Unit norms beside folded weights are the same model: put dequantised into transformers, it gives our logits."""
    output = write(tiny_base_model, tmp_path / "out")
    checkpoint = load_checkpoint(output, load_config(output))
    model = AutoModelForCausalLM.from_pretrained(tiny_base_model).float()
    parameters = dict(model.named_parameters())
    for index in range(2):
        for module in projections_of(index):
            parameters[f"{module}.weight"].data = checkpoint.projection(module)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            parameters[f"model.layers.{index}.{norm}.weight"].data = torch.ones(128)
    with torch.inference_mode():
        theirs = model(TOKENS).logits.float()
    ops = ReferenceOps(load_config(output), dtype=torch.float32)
    ours = Llama.from_pretrained(output, ops=ops, precision="int4-g64-asym", cache_tokens=256)
    ours.start(2)
    logits = torch.stack([ours.decode(column) for column in TOKENS.T.int()], 1)
    assert (logits - theirs).abs().max() <= 2e-5 * theirs.abs().max()
