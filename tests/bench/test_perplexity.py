"""Rows of a quantised model beside its baseline, with the reference in the place of the kernels."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from futransformer import model as model_module
from futransformer.bench import accuracy, perplexity, results
from futransformer.bench.accuracy_int4 import DecodeInPasses, reading_as_decoding
from futransformer.checkpoint import load_checkpoint
from futransformer.cli import main
from futransformer.comparison import compare
from futransformer.generator.config import load_config
from futransformer.generator.errors import InputError
from futransformer.generator.precision import get_precision
from futransformer.model import Llama
from futransformer.perplexity import score
from futransformer.reference import ReferenceOps
from futransformer.tokenizer import Tokenizer
from tests.formats.writers import KINDS, edit, quantise

CONTEXT = 16
TEXT = "The quick brown fox jumps over the lazy dog; nobody had asked it to. " * 2


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short windows, and the CPU's reference where kernels are asked for."""
    for module in (accuracy, perplexity):
        monkeypatch.setattr(module, "CONTEXT", CONTEXT)
    monkeypatch.setattr(model_module, "pick_device", lambda _: torch.device("cpu"))


def load(folder: Path, ops: type[ReferenceOps], precision: str, dtype: torch.dtype = torch.bfloat16) -> Llama:
    made = ops(load_config(folder), dtype=dtype, copy=get_precision(precision).copy)
    return Llama.from_pretrained(folder, ops=made, precision=precision, cache_tokens=1024)


@pytest.fixture
def coded(tiny_base_model: Path, tmp_path: Path) -> tuple[Path, str]:
    """A GPTQ checkpoint whose norms have gains, which decode has in x, and the precision that keeps its codes."""
    kind = KINDS["gptq-v1-asym"]
    folder = tmp_path / "coded"
    quantise(tiny_base_model, folder, kind)
    generator = torch.Generator().manual_seed(6)

    def gains(weights: dict[str, torch.Tensor]) -> None:
        for name, weight in weights.items():
            if name.endswith("layernorm.weight"):
                weights[name] = torch.rand(weight.shape, generator=generator) + 0.5

    edit(folder, gains)
    assert any((gain != 1).any() for gain in load_checkpoint(folder, load_config(folder)).norm_gains())
    assert kind.precision is not None
    return folder, kind.precision


def test_a_row_of_weights_rounded_to_nearest(tiny_base_model: Path) -> None:
    (row,) = perplexity.rows(tiny_base_model, TEXT, ["int4-g32"])
    tokens = Tokenizer(tiny_base_model).encode(TEXT)
    windows = len(tokens) // CONTEXT
    assert row["case"] == f"perplexity/tiny-base/int4-g32-rtn-bf16/through=decode/ctx={CONTEXT}/windows={windows}"
    ours = score(load(tiny_base_model, ReferenceOps, "int4-g32"), tokens, context=CONTEXT, through="decode", batch=64)
    bf16 = score(load(tiny_base_model, ReferenceOps, "bf16"), tokens, context=CONTEXT, through="decode", batch=64)
    assert row["ours"] == round(ours.perplexity, 4)
    # read in passes sums come in another order: a value that BF16 rounds the other way is 2^-9 of itself apart
    assert math.log(row["rivals"]["reference-bf16"]) == pytest.approx(math.log(bf16.perplexity), rel=2**-9)
    rise = 100 * (ours.perplexity / row["rivals"]["reference-bf16"] - 1)
    assert row["percent_over_bf16"] == pytest.approx(rise, abs=1e-3)
    assert len(row["windows_minus_bf16"]) == windows
    assert math.fsum(row["windows_minus_bf16"]) / windows == pytest.approx(
        row["nll_minus_reference-bf16"]["mean"], abs=1e-5
    )
    assert row["percent_standard_error"] == pytest.approx(
        (100 + row["percent_over_bf16"]) * statistics.stdev(row["windows_minus_bf16"]) / windows**0.5, rel=1e-3
    )
    # what decodes and what reads in passes differ by less than a rounding of the weights to four bits costs
    assert row["nll_minus_reference"]["deviation"] < 0.1 * row["nll_minus_reference-bf16"]["deviation"]
    assert row["kl_divergence"]["mean"] > 0
    assert 0 < row["top1_agreement"]["mean"] < 1
    assert 0.01 < row["layer_errors"][0] < row["layer_errors"][1] < 1
    assert row["model_sha256"] == row["baseline_sha256"] == results.weights_sha256(tiny_base_model)


def test_a_model_of_codes_stands_beside_what_it_was_made_from(tiny_base_model: Path, coded: tuple[Path, str]) -> None:
    folder, precision = coded
    (row,) = perplexity.rows(folder, TEXT, [precision], baseline=tiny_base_model, windows=2)
    assert row["case"] == f"perplexity/tiny-base/{precision}-gptq-bf16/through=decode/ctx={CONTEXT}/windows=2"
    assert row["model_sha256"] != row["baseline_sha256"]
    tokens = Tokenizer(tiny_base_model).encode(TEXT)
    inside = reading_as_decoding(load(folder, DecodeInPasses, precision))
    beside = reading_as_decoding(load(tiny_base_model, DecodeInPasses, "bf16"))
    found = compare(inside, beside, tokens, context=CONTEXT, windows=2).figures()
    assert row["kl_divergence"]["mean"] == pytest.approx(found["kl_divergence"]["mean"], rel=1e-5)
    (named,) = perplexity.rows(folder, TEXT, [precision], baseline=tiny_base_model, windows=2, label="gptq-other")
    assert f"/{precision}-gptq-other-bf16/" in named["case"]
    with pytest.raises(InputError, match=r"is quantised .*: name what it was made from by --baseline"):
        next(perplexity.rows(folder, TEXT, [precision]))


def test_reading_in_passes_is_decoding_with_gains_in_x(coded: tuple[Path, str]) -> None:
    """In float32 nothing is left but the order of sums: a gain that is missing, or another's, would show."""
    folder, precision = coded
    tokens = Tokenizer(folder).encode(TEXT)[: 2 * CONTEXT]
    options: dict[str, Any] = {"context": CONTEXT, "batch": 2}
    decoded = score(load(folder, ReferenceOps, precision, torch.float32), tokens, through="decode", **options).nll
    read = score(reading_as_decoding(load(folder, DecodeInPasses, precision, torch.float32)), tokens, **options).nll
    assert (read - decoded).abs().max() <= 64 * 2.0**-24 * decoded.max()


def test_bf16_is_measured_through_both_phases(tiny_base_model: Path) -> None:
    rows = list(perplexity.rows(tiny_base_model, TEXT, ["bf16"], windows=3))
    base = "perplexity/tiny-base/bf16-none-bf16/through"
    assert [row["case"] for row in rows] == [f"{base}={phase}/ctx=16/windows=3" for phase in ("prefill", "decode")]
    prefill, decode = rows
    assert prefill["nll_minus_reference"] == {"mean": 0, "standard_error": 0, "deviation": 0}
    assert prefill["agrees_with_reference"]
    assert set(decode["layer_errors"]) == {0.0}


@pytest.mark.parametrize(
    ("precision", "through", "named"),
    [
        ("int4-g64-asym-kv4", "decode", "int4-g64-asym-gptq-kv4"),
        ("fp8-int4-head4-kv8", "decode", "int4-head4-gptq-e4m3"),
        ("fp8-int4-head4-kv8", "prefill", "fp8-gptq-e4m3"),
        ("fp8-promoted", "prefill", "fp8-promoted-gptq-bf16"),
        ("bf16-kv4-min-h64", "decode", "bf16-gptq-kv4-min-h64"),
        ("bf16-fp8-kv4", "decode", "fp8-gptq-kv4"),
        ("int4-kv4", "prefill", "bf16-gptq-bf16"),
    ],
)
def test_names(precision: str, through: Any, named: str) -> None:
    case = perplexity.case_of("m", get_precision(precision), "gptq", through, 7)
    assert case["case"] == f"perplexity/m/{named}/through={through}/ctx={CONTEXT}/windows=7"
    assert "-".join(case[part] for part in ("weights", "label", "cache")) == named
    unquantised = perplexity.case_of("m", get_precision("bf16-kv4"), perplexity.NEAREST, "decode", 7)
    assert unquantised["label"] == "none"


def test_kernels_that_are_off_do_not_agree() -> None:
    floor = {"mean": 0.0, "standard_error": 0.01, "deviation": 0.1}
    assert perplexity.agrees({"mean": 0.03, "standard_error": 0.011, "deviation": 0.149}, floor)
    assert not perplexity.agrees({"mean": -0.034, "standard_error": 0.011, "deviation": 0.1}, floor)
    assert not perplexity.agrees({"mean": 0.0, "standard_error": 0.011, "deviation": 0.151}, floor)


def test_runs_meet_in_one_file_a_model(
    tiny_base_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_text(TEXT)
    common = ("bench", "perplexity", "--model", tiny_base_model, "--text", tmp_path / "text", "--output", tmp_path)

    def run(*options: object) -> dict[str, Any]:
        assert main([str(argument) for argument in (*common, *options)]) == 0
        written = tmp_path / "perplexity-tiny-base.json"
        assert str(written) in capsys.readouterr().out
        content: dict[str, Any] = json.loads(written.read_text())
        return content

    first = run("--commit", "one", "--windows", 2, "--precision", "int4-g32,int4-g32-kv4")
    assert [row["case"].split("/")[2] for row in first["rows"]] == ["int4-g32-rtn-bf16", "int4-g32-rtn-kv4"]
    second = run("--commit", "two", "--windows", 2, "--precision", "int4-g32-kv4,int4")
    assert [(row["case"].split("/")[2], row["commit"]) for row in second["rows"]] == [
        ("int4-g32-rtn-bf16", "one"),
        ("int4-g32-rtn-kv4", "two"),
        ("int4-rtn-bf16", "two"),
    ]
    assert (second["subject"], second["model"], second["commit"]) == ("perplexity", "tiny-base", "two")
    text = (tmp_path / "perplexity-tiny-base.json").read_text()
    assert all(line.strip().endswith((",", "]")) for line in text.splitlines() if "windows_minus_bf16" in line)


def test_rows_are_written_as_they_come(tiny_base_model: Path, coded: tuple[Path, str], tmp_path: Path) -> None:
    """The second precision cannot keep the codes: what the first has found is there."""
    folder, precision = coded
    (tmp_path / "text").write_text(TEXT)
    written = tmp_path / "perplexity-tiny-base.json"
    paths = ("--model", folder, "--baseline", tiny_base_model, "--text", tmp_path / "text", "--output", tmp_path)
    options = ("--precision", f"{precision},int4-channel", "--windows", 2, "--commit", "one")
    assert main([str(argument) for argument in ("bench", "perplexity", *paths, *options)]) != 0
    (row,) = json.loads(written.read_text())["rows"]
    assert row["case"].split("/")[2] == f"{precision}-gptq-bf16"


def test_what_is_missing_is_asked_for(tiny_base_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "perplexity", "--model", str(tiny_base_model)]) == 2
    assert "needs --model MODEL and --text FILE" in capsys.readouterr().err
