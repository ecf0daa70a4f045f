"""The command calibrate, and the models that it writes on the command line."""

from __future__ import annotations

import hashlib
import json
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from futransformer.cli import main

Output = pytest.CaptureFixture[str]


def failure(capsys: Output, *arguments: object, status: int = 2) -> str:
    """Run a command that must fail with this status; return what it says."""
    assert main([str(argument) for argument in arguments]) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def succeed(*arguments: object) -> None:
    assert main([str(argument) for argument in arguments]) == 0


@pytest.fixture
def calibrated(tiny_base_model: Path, tmp_path: Path, capsys: Output) -> Path:
    """The tiny model, calibrated on our page in windows of 64."""
    out = tmp_path / "out"
    succeed("calibrate", tiny_base_model, "-o", out, "--reference", "--samples", 3, "--context", 64)
    capsys.readouterr()
    return out


def test_calibrate_writes_where_its_scales_come_from(tiny_base_model: Path, tmp_path: Path, capsys: Output) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text("abc " * 100, encoding="utf-8")
    command = ("calibrate", tiny_base_model, "-o", out, "--reference", "--text", text, "--context", 64, "--samples", 2)
    succeed(*command)
    captured = capsys.readouterr()
    assert captured.out == f"{out}: tiny-base with FP8 scales of 2 x 64 tokens\n"
    assert "4 of 4 readings" in captured.err
    said = json.loads((out / "futransformer.json").read_text())["fp8_scales"]
    assert said["text"] == "text.txt"
    assert said["text_sha256"] == hashlib.sha256(text.read_bytes()).hexdigest()
    assert (said["windows"], said["context"]) == (2, 64)
    assert "amax" in said["rule"]
    scales = load_file(out / "fp8_scales.safetensors")

    assert "replace it with --force" in failure(capsys, *command)
    succeed(*command, "--force", "--json")
    report = json.loads(capsys.readouterr().out)
    assert report["windows"] == 2
    again = load_file(out / "fp8_scales.safetensors")
    assert all((scales[name] == again[name]).all() for name in ("scale", "amax"))


def test_layers_that_stay_in_bf16_are_said_wherever_the_model_is_used(
    tiny_base_model: Path, tmp_path: Path, capsys: Output
) -> None:
    out = tmp_path / "out"
    command = ("calibrate", tiny_base_model, "-o", out, "--reference", "--context", 64, "--samples", 1)
    assert "'2' is none of the parts of 2 layers" in failure(capsys, *command, "--bf16-layers", "1,2")
    succeed(*command, "--bf16-layers", "0.mlp,1")
    assert capsys.readouterr().out.endswith(", layers in BF16: 0.mlp, 1\n")
    assert json.loads((out / "futransformer.json").read_text())["bf16_layers"] == "0.mlp, 1"
    common = (out, "--reference", "--precision", "fp8", "--json")
    for use in (("perplexity", "--context", 64, "--windows", 1), ("run", "--prompt", "Hello", "--max-new-tokens", 1)):
        succeed(use[0], *common, *use[1:])
        assert json.loads(capsys.readouterr().out)["bf16_layers"] == "0.mlp, 1"


def test_layers_that_stay_in_bf16_are_chosen(tiny_base_model: Path, tmp_path: Path, capsys: Output) -> None:
    out = tmp_path / "out"
    command = ("calibrate", tiny_base_model, "-o", out, "--reference", "--context", 64, "--samples", 2)
    for wrong in ("auto:3", "auto"):
        assert f"{wrong}: give auto:N with N above 0" in failure(capsys, *command, "--bf16-layers", wrong)
    succeed(*command, "--bf16-layers", "auto:0.5", "--json")
    captured = capsys.readouterr()
    assert "layer 1, mlp: " in captured.err
    report = json.loads(captured.out)
    assert report["bf16_layers"]
    assert f"in BF16: {report['bf16_layers']}\n" in captured.err
    said = json.loads((out / "futransformer.json").read_text())
    assert said["bf16_layers"] == report["bf16_layers"]
    assert len(said["fp8_scales"]["effects"]) == 4


def test_weights_by_gptq_are_kept_and_read(tiny_base_model: Path, tmp_path: Path, capsys: Output) -> None:
    nearest, out = tmp_path / "nearest", tmp_path / "out"
    command = ("calibrate", tiny_base_model, "--reference", "--context", 64, "--samples", 4, "-o")
    succeed(*command, nearest)
    succeed(*command, out, "--weights", "gptq")
    assert "rounded the weights of layer 1, down\n" in capsys.readouterr().err
    described = [json.loads((folder / "futransformer.json").read_text()) for folder in (nearest, out)]
    assert [said["fp8_scales"]["weights"] for said in described] == ["rtn", "gptq"]
    assert [said["fp8_weights"] is None for said in described] == [True, False]
    perplexities = []
    for folder in (nearest, out):
        succeed("perplexity", folder, "--reference", "--context", 64, "--windows", 2, "--precision", "fp8", "--json")
        perplexities.append(json.loads(capsys.readouterr().out)["perplexity"])
    assert perplexities[0] != perplexities[1]


def test_the_default_text_is_our_page(tiny_base_model: Path, tmp_path: Path, capsys: Output) -> None:
    page = (resources.files("futransformer") / "data" / "sample.txt").read_bytes()
    out = tmp_path / "out"
    succeed("calibrate", tiny_base_model, "-o", out, "--reference", "--samples", 1, "--context", 32)
    said = json.loads((out / "futransformer.json").read_text())["fp8_scales"]
    assert (said["text"], said["text_sha256"]) == ("sample.txt", hashlib.sha256(page).hexdigest())


def test_a_calibrated_model_is_measured_in_fp8(calibrated: Path, tmp_path: Path, capsys: Output) -> None:
    """Not the same as BF16, and near it; through decode, which stays BF16, the same."""
    common = ("perplexity", calibrated, "--reference", "--context", 64, "--windows", 3, "--json")
    reports = {}
    for name, options in (
        ("bf16", ("--precision", "bf16")),
        ("fp8", ()),  # which is what the folder names
        ("running", ("--precision", "fp8", "--fp8-scales", "running")),
        ("bf16 decode", ("--precision", "bf16", "--through", "decode")),
        ("fp8 decode", ("--precision", "fp8", "--through", "decode")),
    ):
        succeed(*common, *options)
        reports[name] = json.loads(capsys.readouterr().out)
    assert reports["fp8"]["precision"] == "fp8"
    assert reports["bf16"]["precision"] == "bf16"
    assert reports["fp8"]["perplexity"] != reports["bf16"]["perplexity"]
    assert np.log(reports["fp8"]["perplexity"]) == pytest.approx(np.log(reports["bf16"]["perplexity"]), rel=0.05)
    assert reports["fp8 decode"]["perplexity"] == reports["bf16 decode"]["perplexity"]
    assert [reports[name].get("fp8_scales") for name in ("bf16", "fp8", "running")] == [None, "frozen", "running"]


def test_an_int4_model_is_calibrated_for_the_precision_that_its_refusal_names(
    tiny_base_model: Path, tmp_path: Path, capsys: Output
) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    succeed("quantize", tiny_base_model, "-o", model, "--group-size", 32)
    capsys.readouterr()
    command = ("calibrate", model, "-o", out, "--reference", "--samples", 1, "--context", 32, "--precision")
    assert "use fp8-int4-g32, which keeps its codes, or fp8" in failure(capsys, *command, "fp8-int4")
    succeed(*command[:-1])  # what the folder names, with an FP8 prefill
    assert json.loads((out / "futransformer.json").read_text())["precision"]["name"] == "fp8-int4-g32"
    succeed("run", out, "--reference", "--prompt", "Hello", "--max-new-tokens", 1)


def test_a_description_that_was_cut_short_is_cured_as_it_says(calibrated: Path, tmp_path: Path, capsys: Output) -> None:
    """The weights are the model's own, so they run in BF16 and can be calibrated again."""
    description = calibrated / "futransformer.json"
    description.write_bytes(description.read_bytes()[:100])
    run = ("run", calibrated, "--reference", "--prompt", "Hello", "--max-new-tokens", 1)
    assert f"calibrate again: futransformer calibrate {calibrated}" in failure(capsys, *run, "--precision", "fp8")
    assert "is not valid JSON" in failure(capsys, *run)
    succeed(*run, "--precision", "bf16")
    succeed("calibrate", calibrated, "-o", tmp_path / "again", "--reference", "--samples", 1, "--context", 32)
    succeed("run", tmp_path / "again", *run[2:], "--precision", "fp8")


def rescale(folder: Path, factor: float) -> None:
    """Other scales than were found, whose sha256 is right."""
    path = folder / "fp8_scales.safetensors"
    save_file({name: tensor * factor for name, tensor in load_file(path).items()}, path)
    description = json.loads((folder / "futransformer.json").read_text())
    description["sha256"][path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    (folder / "futransformer.json").write_text(json.dumps(description))


def test_saturation_is_said_in_one_line(calibrated: Path, capsys: Output) -> None:
    run = ("run", calibrated, "--prompt", "Hello", "--max-new-tokens", 3, "--reference", "--precision", "fp8")
    perplexity = ("perplexity", calibrated, "--reference", "--context", 64, "--windows", 2, "--precision", "fp8")
    rescale(calibrated, 1 / 8)
    succeed(*run)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "saturated" in line]
    assert line.startswith("warning: ")
    assert "--fp8-scales running" in line
    succeed(*run, "--fp8-scales", "running")
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "saturated" in line]
    assert line.endswith("calibrate on text like it")
    succeed(*run, "--json")
    counts = json.loads(capsys.readouterr().out)["saturated"]
    assert len(counts) == 9
    assert all(count > 0 for count in counts.values())
    succeed(*perplexity)
    captured = capsys.readouterr()
    (shown,) = [line for line in captured.out.splitlines() if line.startswith("saturated ")]
    assert shown.endswith("; and 4 others")
    numbers = [int(part.rpartition(": ")[2]) for part in shown.split("; ")[:-1]]
    assert numbers == sorted(numbers, reverse=True)
    assert len(numbers) == 5
    assert captured.err.count("warning: ") == 1


def test_without_saturation_nothing_is_said(calibrated: Path, capsys: Output) -> None:
    rescale(calibrated, 2)
    succeed("perplexity", calibrated, "--reference", "--context", 64, "--windows", 1, "--precision", "fp8")
    captured = capsys.readouterr()
    assert "saturated" not in captured.out + captured.err


def test_what_makes_no_sense_is_refused(
    tiny_base_model: Path, calibrated: Path, tmp_path: Path, capsys: Output
) -> None:
    new = tmp_path / "new"
    calibrate = ("calibrate", tiny_base_model, "--reference", "-o")
    assert "overlaps the model's folder" in failure(capsys, *calibrate, tiny_base_model, "--force")
    assert "is not implemented" in failure(capsys, *calibrate, new, "--precision", "fp8-int4-g48")
    assert "is of an FP8 prefill, and int4 has none" in failure(capsys, *calibrate, new, "--precision", "int4")
    assert "at least 1 window, not 0" in failure(capsys, *calibrate, new, "--samples", 0)
    assert "a window must be at least 2 tokens, not 1" in failure(capsys, *calibrate, new, "--context", 1)
    assert "there is no such file" in failure(capsys, *calibrate, new, "--text", tmp_path / "none")
    line = failure(capsys, *calibrate, new, "--context", 1024)
    assert "--context: tiny-base is made for at most 512 tokens (max_position_embeddings)" in line
    assert len(line.splitlines()) == 1, "the model was read"
    (tmp_path / "file").write_text("")
    line = failure(capsys, *calibrate, tmp_path / "file" / "below", status=1)
    assert "cannot be written" in line
    assert len(line.splitlines()) == 1, "the model was read"
    assert not new.exists()
    run = ("run", tiny_base_model, "--reference", "--prompt", "Hello")
    assert "futransformer calibrate" in failure(capsys, *run, "--precision", "fp8")
    assert "add --precision fp8" in failure(capsys, *run, "--fp8-scales", "frozen")
    assert "is not implemented" in failure(capsys, *run, "--precision", "fp9", "--fp8-scales", "running")
