"""``futransformer quantize --method gptq``: better than rounding, the same bits, resumed, alone, in little memory."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from futransformer.build.cache import lock_at
from futransformer.checkpoint import projections_of
from futransformer.cli import main
from futransformer.cli import quantize as quantize_module
from futransformer.generator.config import load_config
from futransformer.model import Llama
from futransformer.quantize.layers import Gptq, Quantised
from futransformer.reference import ReferenceOps

Output = pytest.CaptureFixture[str]
MODULES = [*projections_of(0), *projections_of(1)]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Words of a few letters: enough for 20 windows of 64 bytes."""
    generator = torch.Generator().manual_seed(0)
    letters = torch.randint(ord("a"), ord("z"), (1300,), generator=generator).tolist()
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text("".join(" " if index % 5 == 4 else chr(letter) for index, letter in enumerate(letters)))
    return path


def arguments(model: Path, output: Path, text: Path, *others: object) -> list[str]:
    return [
        *("quantize", str(model), "-o", str(output), "--method", "gptq", "--group-size", "64", "--device", "cpu"),
        *("--calibration", str(text), "--samples", "16", "--seqlen", "64", *map(str, others)),
    ]


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def refusal(capsys: Output, *arguments: object, status: int = 2) -> str:
    assert main([str(argument) for argument in arguments]) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


@pytest.mark.parametrize(
    "options",
    [(), ("--asymmetric", "--act-order", "--scale-search", "mse"), ("--sweeps", 1, "--group-size", "channel")],
)
def test_its_codes_serve_and_err_less(
    tiny_model: Path, tmp_path: Path, text: Path, capsys: Output, options: tuple[object, ...]
) -> None:
    assert main(arguments(tiny_model, tmp_path / "out", text, *options, "--json")) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report["errors"]) == MODULES
    for module, errors in report["errors"].items():
        assert errors["output"] <= errors["output_of_nearest"] * (1 + 1e-5), module
        assert 0.03 < errors["weight"] < 0.3
    mean, nearest = (
        sum(errors[kind] for errors in report["errors"].values()) for kind in ("output", "output_of_nearest")
    )
    assert mean < 0.95 * nearest
    said = json.loads((tmp_path / "out" / "futransformer.json").read_text())["int4_weights"]
    assert said["calibration"]["text"] == "words.txt"
    assert (said["calibration"]["windows"], said["calibration"]["context"]) == (16, 64)
    assert said["errors"] == report["errors"]
    suffix = {"64": "-g64", "channel": "-channel"}["channel" if "channel" in options else "64"]
    precision = "int4" + suffix + "-asym" * ("--asymmetric" in options)
    model = Llama.from_pretrained(
        tmp_path / "out", ops=ReferenceOps(load_config(tmp_path / "out")), precision=precision, cache_tokens=256
    )
    model.start(1)
    assert model.decode(torch.tensor([5], dtype=torch.int32)).isfinite().all()


def test_the_report_has_a_row_a_layer(tiny_base_model: Path, tmp_path: Path, text: Path, capsys: Output) -> None:
    assert main(arguments(tiny_base_model, tmp_path / "out", text)) == 0
    said, heard = capsys.readouterr()
    head, *rows, served, mean = said.splitlines()[1:]
    assert head.split() == ["q", "k", "v", "o", "gate", "up", "down"]
    assert [row.split()[0] for row in rows] == ["0", "1"]
    assert all(len(row.split()) == 8 for row in rows)
    assert "INT4 by gptq, groups of 64; precision int4-g64 serves it" in served
    assert "if rounded to nearest" in mean
    assert "layer 1 of 2, " in heard
    assert "note" not in heard


class StoppedError(Exception):
    pass


def test_a_job_that_was_stopped_gives_the_same_bits(
    tiny_base_model: Path, tmp_path: Path, text: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text goes through the finished layer again, and what it reads in the next is what it read."""
    for output in ("whole", "again"):
        assert main(arguments(tiny_base_model, tmp_path / output, text)) == 0
    assert content(tmp_path / "whole") == content(tmp_path / "again")
    quantise, done = Gptq.quantise, []

    def stopped(self: Gptq, index: int, weights: Mapping[str, Tensor]) -> Mapping[str, Quantised]:
        done.append(index)
        if done == [0, 1]:
            raise StoppedError
        return quantise(self, index, weights)

    monkeypatch.setattr(Gptq, "quantise", stopped)
    with pytest.raises(StoppedError):
        main(arguments(tiny_base_model, tmp_path / "out", text))
    assert main(arguments(tiny_base_model, tmp_path / "out", text)) == 0
    assert done == [0, 1, 1]
    assert "layer 1 of 2, kept from before" in capsys.readouterr().err
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_two_at_once(tiny_base_model: Path, tmp_path: Path, text: Path, capsys: Output) -> None:
    """The second is told, and does no damage; and what a first one's death leaves locks nobody out."""
    output = tmp_path / "out"
    messages: list[str] = []
    quantise = Gptq.quantise

    def meanwhile(self: Gptq, index: int, weights: Mapping[str, Tensor]) -> Mapping[str, Quantised]:
        if not messages:
            messages.append("")
            messages.append(refusal(capsys, *arguments(tiny_base_model, output, text), status=1))
        return quantise(self, index, weights)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Gptq, "quantise", meanwhile)
        assert main(arguments(tiny_base_model, output, text)) == 0
    assert f"another process is writing this model to {output}: wait for it, or end it" in messages[1]
    assert not list(tmp_path.glob(".out*"))
    held = lock_at(output)
    assert held is not None
    os.close(held)


def test_another_job_that_was_faster_is_not_replaced(
    tiny_base_model: Path, tmp_path: Path, text: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, quantise = tmp_path / "out", Gptq.quantise

    def overtaken(self: Gptq, index: int, weights: Mapping[str, Tensor]) -> Mapping[str, Quantised]:
        if index == 1:
            assert main(["quantize", str(tiny_base_model), "-o", str(output)]) == 0
        return quantise(self, index, weights)

    monkeypatch.setattr(Gptq, "quantise", overtaken)
    assert main(arguments(tiny_base_model, output, text)) == 2
    assert "holds a model written before: replace it with --force" in capsys.readouterr().err
    assert json.loads((output / "futransformer.json").read_text())["int4_weights"]["method"] == "rtn"


def test_another_text_is_another_job(
    tiny_base_model: Path, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(self: Gptq, index: int, weights: Mapping[str, Tensor]) -> Mapping[str, Quantised]:
        raise StoppedError

    monkeypatch.setattr(Gptq, "quantise", stopped)
    other = tmp_path / "words.txt"
    other.write_text(text.read_text()[::-1])
    for calibration, options in ((text, ()), (other, ()), (text, ("--act-order",)), (text, ("--sweeps", 2))):
        with pytest.raises(StoppedError):
            main(arguments(tiny_base_model, tmp_path / "out", calibration, *options))
    assert len(list(tmp_path.glob(".out-*.partial"))) == 4


@pytest.mark.parametrize(
    ("written", "options", "words"),
    [
        ("", (), "words.txt is empty: a calibration needs text"),
        (" \n", (), "words.txt is empty: a calibration needs text"),
        ("a", (), "the text has 1 tokens; a window needs at least 2"),
        (None, (), "--calibration {text}: there is no such file"),
        (b"\xff\xfe\xfd", (), "--calibration {text} is not UTF-8 text"),
        ("some words", ("--samples", 0), "a calibration takes at least 1 window, not 0"),
        ("some words", ("--seqlen", 0), "a window must be at least 2 tokens, not 0"),
        ("some words", ("--seqlen", 1), "a window must be at least 2 tokens, not 1"),
        ("some words", ("--seqlen", 513), "--seqlen: tiny-base is made for at most 512 tokens"),
        ("some words", ("--sweeps", -1), "--sweeps must not be negative"),
    ],
)
def test_what_cannot_be_calibrated_for(
    tiny_base_model: Path,
    tmp_path: Path,
    capsys: Output,
    written: str | bytes | None,
    options: tuple[object, ...],
    words: str,
) -> None:
    path = tmp_path / "words.txt"
    if written is not None:
        path.write_bytes(written if isinstance(written, bytes) else written.encode())
    message = refusal(capsys, *arguments(tiny_base_model, tmp_path / "out", path, *options))
    assert words.format(text=path) in message
    assert not list(tmp_path.glob("*out*"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--act-order", "--sweeps", 2), "--act-order and --sweeps would change nothing: add --method gptq"),
        (("--act-order", "--fp8-prefill"), "--act-order would change nothing: add --method gptq"),
        (("--calibration", "absent.txt"), "--calibration would change nothing: add --method gptq or --fp8-prefill"),
        (("--seqlen", 64), "--seqlen would change nothing: add --method gptq or --fp8-prefill"),
    ],
)
def test_options_that_rounding_to_nearest_does_not_use_are_refused(
    tiny_base_model: Path, tmp_path: Path, capsys: Output, options: tuple[object, ...], words: str
) -> None:
    assert words in refusal(capsys, "quantize", tiny_base_model, "-o", tmp_path / "out", *options)
    assert not list(tmp_path.glob("*out*"))


def test_a_short_text_is_said(tiny_base_model: Path, tmp_path: Path, capsys: Output) -> None:
    path = tmp_path / "short.txt"
    path.write_text("a few words of a text")
    assert main(arguments(tiny_base_model, tmp_path / "out", path)) == 0
    assert "short.txt gives 1 x 21 tokens, of 16 x 64 asked for" in capsys.readouterr().err


def test_a_weight_that_is_not_finite_is_named(
    tiny_base_model: Path, tmp_path: Path, text: Path, capsys: Output
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny_base_model, broken)
    weights = load_file(broken / "model.safetensors")
    weights["model.layers.1.self_attn.k_proj.weight"][3, 5] = torch.nan
    save_file(weights, broken / "model.safetensors")
    message = refusal(capsys, *arguments(broken, tmp_path / "out", text))
    assert "layer 1, qkv holds 1 values that are not finite, so it has no INT4 scales; fetch the checkpoint" in message


def test_random_tokens_need_no_text(tiny_base_model: Path, tmp_path: Path) -> None:
    command = arguments(tiny_base_model, tmp_path / "out", Path("random"))
    assert main(command) == 0
    said = json.loads((tmp_path / "out" / "futransformer.json").read_text())["int4_weights"]["calibration"]
    assert (said["text"], said["windows"], said["context"]) == ("random", 16, 64)


def test_wikitext2_is_read_by_its_library(
    tiny_base_model: Path, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def read(split: str) -> str:
        asked.append(split)
        return text.read_text()

    monkeypatch.setattr(quantize_module, "read_wikitext2", read)
    assert main(arguments(tiny_base_model, tmp_path / "out", Path("wikitext2"))) == 0
    assert asked == ["train"]


def test_a_device_that_is_not_there_is_refused(
    tiny_base_model: Path, tmp_path: Path, text: Path, capsys: Output
) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    message = refusal(capsys, *arguments(tiny_base_model, tmp_path / "out", text, "--device", "cuda"))
    assert "--device cuda: PyTorch finds no GPU here" in message
