"""The command perplexity beside a baseline, and on WikiText-2."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from futransformer.cli import main

Output = pytest.CaptureFixture[str]


def run(capsys: Output, *arguments: object) -> str:
    assert main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


def failure(capsys: Output, *arguments: object) -> str:
    assert main([str(argument) for argument in arguments]) == 2
    return capsys.readouterr().err


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """A stand-in for the datasets library, which holds two rows, and a folder without a file of the text's name."""

    def load_dataset(*which: str, split: str) -> dict[str, list[str]]:
        assert (which, split) == (("Salesforce/wikitext", "wikitext-2-raw-v1"), "test")
        return {"text": ["", " = A title = \n", " A line of text . \n"] * 4}

    module = ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    monkeypatch.chdir(tmp_path)
    return module


def test_a_precision_is_compared_with_another(tiny_base_model: Path, capsys: Output) -> None:
    common = ("perplexity", tiny_base_model, "--context", 16, "--windows", 3, "--reference", "--precision", "int4-g32")
    report: dict[str, Any] = json.loads(run(capsys, *common, "--json", "--compare", "bf16"))
    alone = json.loads(run(capsys, *common, "--json"))
    baseline = json.loads(run(capsys, *common[:-2], "--through", "decode", "--json"))
    assert report["compared_with"] == "tiny-base in bf16"
    assert report["perplexity"] == alone["perplexity"]
    assert report["baseline_perplexity"] == baseline["perplexity"]
    assert report["percent_over_baseline"] == pytest.approx(
        100 * (alone["perplexity"] / baseline["perplexity"] - 1), rel=1e-6
    )
    assert report["kl_divergence"]["mean"] > 10 * report["kl_divergence"]["standard_error"] / 3 > 0
    assert 0.3 < report["top1_agreement"]["mean"] < 1
    said = run(capsys, *common, "--compare", "bf16")
    assert (
        f"{report['kl_divergence']['mean']:.6f} (standard error {report['kl_divergence']['standard_error']:.6f})"
        in said
    )
    assert "bos                   none added" in said


def test_another_folder_is_a_baseline_in_bf16(tiny_base_model: Path, tmp_path: Path, capsys: Output) -> None:
    copy = shutil.copytree(tiny_base_model, tmp_path / "original")
    common = ("perplexity", tiny_base_model, "--context", 16, "--windows", 2, "--reference", "--json", "--compare")
    report = json.loads(run(capsys, *common, copy))
    assert report["compared_with"] == "original in bf16"
    assert report["kl_divergence"] == {"mean": 0, "standard_error": 0}


def test_comparisons_that_cannot_be(tiny_base_model: Path, tmp_path: Path, capsys: Output) -> None:
    common = ("perplexity", tiny_base_model, "--context", 16, "--windows", 2, "--reference")
    said = failure(capsys, *common, "--compare", "int5")
    assert "--compare int5 is neither a precision, such as bf16, nor a model: there is no folder int5" in said
    assert "--compare-kernels is of a comparison" in failure(capsys, *common, "--compare-kernels", tmp_path)
    other = shutil.copytree(tiny_base_model, tmp_path / "other")
    path = other / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["model"]["merges"] = [["t", "h"]]
    tokenizer["model"]["vocab"]["th"] = tokenizer["model"]["vocab"].pop("~")
    path.write_text(json.dumps(tokenizer))
    assert "splits the text into other tokens" in failure(capsys, *common, "--compare", other)


def test_wikitext2_is_its_rows_joined(tiny_base_model: Path, hub: ModuleType, tmp_path: Path, capsys: Output) -> None:
    rows = ["", " = A title = \n", " A line of text . \n"] * 4
    (tmp_path / "joined").write_text("\n\n".join(rows))
    common = ("perplexity", tiny_base_model, "--context", 32, "--reference", "--json", "--text")
    report = json.loads(run(capsys, *common, "wikitext2"))
    assert report.pop("text") == "wikitext2"
    assert report["windows"] > 1
    as_file = json.loads(run(capsys, *common, tmp_path / "joined"))
    assert {**as_file, "seconds": 0, "text": 0} == {**report, "seconds": 0, "text": 0}


def test_wikitext2_says_what_it_needs(
    tiny_base_model: Path, hub: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    common = ("perplexity", tiny_base_model, "--reference", "--text", "wikitext2")

    def unreachable(*_: str, split: str) -> None:
        raise ConnectionError(f"no route to the {split} split")

    monkeypatch.setattr(hub, "load_dataset", unreachable)
    assert "wikitext2 cannot be fetched: no route to the test split; check" in failure(capsys, *common)
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "not installed; run: pip install datasets, or name a file" in failure(capsys, *common)


def test_a_file_of_that_name_is_read(tiny_base_model: Path, hub: ModuleType, tmp_path: Path, capsys: Output) -> None:
    (tmp_path / "wikitext2").write_text("what stands in the file")
    said = run(capsys, "perplexity", tiny_base_model, "--reference", "--json", "--text", "wikitext2")
    assert json.loads(said)["tokens_scored"] == len("what stands in the file") - 1
