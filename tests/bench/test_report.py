"""The report, from results as the benchmark writes them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from futransformer.bench import accuracy_report, report, results
from futransformer.cli import main
from futransformer.generator.errors import InputError

FRAME = {
    "card": "NVIDIA H200",
    "driver": "580.159.04",
    "commit": "0123456789abcdef",
    "dirty": False,
    "date": "2026-11-29 20:00 UTC",
    "versions": {"torch": "2.11.0", "cuda": "13.0", "futransformer": "0.1.0"},
    "ceilings": {"read_tbps": 4.5, "fp8_tflops": 1518, "bf16_tflops": 799},
}


def row(case: str, **values: Any) -> dict[str, Any]:
    return {
        "case": case,
        "ours": 33.1,
        "unit": "us",
        "spread": [32.9, 33.6],
        "rivals": {"torch-bf16": 138.2, "torch-int4": 88.5},
        "ratio": 2.674,
        "percent_of_ceiling": 75.52,
        "error": 0.0031,
        "tolerance": 0.01,
        **values,
    }


DECODE = {
    "subject": "decode_block",
    **FRAME,
    "rows": [
        row("decode_block/8b/int4/B=1/ctx=1024"),
        row("decode_block/8b/int4/B=2/ctx=1024", rivals={"torch-bf16": 140.0}, ratio=0.947),
    ],
    "notes": ["decode_block/8b/int4/B=2/ctx=1024: torch-int4 left out: it computes something else"],
}
GATED = {
    "subject": "gateup_swiglu",
    "precision": "fp8",
    **FRAME,
    "rows": [
        row(
            "gateup_swiglu/8b/fp8/M=2048/burst",
            ours=1500.0,
            unit="TFLOP/s",
            spread=[1490.0, 1510.0],
            rivals={"torch-fp8": 1250.0},
            ratio=1.2,
            beside={"torch-fp8-mm": 1480.0},
        ),
        row(
            "gateup_swiglu/8b/fp8/M=8192/burst",
            ours=1600.0,
            unit="TFLOP/s",
            spread=[1590.0, 1610.0],
            rivals={"torch-fp8": 1350.0},
            ratio=1.185,
            beside={"torch-fp8-mm": 1520.0, "quack-bf16-prepost": 800.0},
        ),
    ],
}
LOAD = {
    "subject": "load",
    **{key: value for key, value in FRAME.items() if key != "ceilings"},
    "rows": [row("load/llama-3.1-8b", unit="s", ours=0.0123, rivals={}, ratio=None, percent_of_ceiling=None)],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    written = tmp_path / "results"
    written.mkdir()
    accuracy = {**LOAD, "subject": "accuracy", "rows": [{"case": "p", "ours": 1, "unit": "x", "rivals": {"a": 2}}]}
    for content in (LOAD, DECODE, accuracy):
        (written / f"{content['subject']}.json").write_text(json.dumps(content))
    return written


def timed(folder: Path) -> list[dict[str, Any]]:
    return [content for content in report.read(folder) if content["subject"] not in report.ACCURACY]


def test_tables(folder: Path) -> None:
    text = report.render(timed(folder))
    assert text.index("## One layer of a decode step") < text.index("## Loading kernels")  # in the subjects' order
    lines = text.splitlines()
    assert "| case | ours (us) | p10 to p90 | torch-bf16 | torch-int4 | ratio | % of ceiling |" in lines
    assert "| 8b/int4/B=1/ctx=1024 | 33.1 | 32.9 to 33.6 | 138 | 88.5 | **2.67** | 76 |" in lines
    assert "| 8b/int4/B=2/ctx=1024 | 33.1 | 32.9 to 33.6 | 140 |  | **0.95** | 76 |" in lines
    assert "| llama-3.1-8b | 0.0123 | 32.9 to 33.6 |" in lines  # no rivals: no columns for them
    assert "- 8b/int4/B=2/ctx=1024: torch-int4 left out: it computes something else" in lines
    assert "commit 0123456789ab, 2026-11-29 20:00 UTC. Ceilings of this run: 4.50 TB/s read" in text
    assert "![One layer of a decode step: ours beside the rivals](performance/decode_block.svg)" in lines
    assert "performance/load.svg" not in text


def test_a_reason_is_told_once_for_all_its_cases() -> None:
    missing = "flash-attn-4 left out: flash-attn-4 cannot be imported here (No module named 'flash_attn')"
    notes = [f"serve/8b/B={batch}: {missing}" for batch in (1, 8, 32)]
    notes[1:1] = ["serve/8b/B=4: failed: no memory", "the card was shared"]
    assert report.by_reason("serve", notes) == [
        f"{missing} (3 cases, 8b/B=1 to 8b/B=32)",
        "8b/B=4: failed: no memory",
        "the card was shared",
    ]


def test_fp8_stands_apart_from_bf16(folder: Path) -> None:
    bf16 = {key: value for key, value in GATED.items() if key != "precision"}
    bf16["rows"] = [row("gateup_swiglu/8b/bf16/M=2048/burst", rivals={"torch-bf16": 40.0})]
    for content in (bf16, GATED):
        results.write(folder, content)
    assert {path.name for path in folder.iterdir()} >= {"gateup_swiglu.json", "gateup_swiglu-fp8.json"}
    contents = report.read(folder)
    assert [results.stem(content) for content in contents][:3] == [
        "gateup_swiglu",
        "gateup_swiglu-fp8",
        "decode_block",
    ]
    text = report.render(content for content in contents if content["subject"] not in report.ACCURACY)
    headings = [line for line in text.splitlines() if line.startswith("## ")]
    assert headings[:2] == ["## Gate and up projections with SwiGLU", "## Gate and up projections with SwiGLU, FP8"]
    assert "| 8b/bf16/M=2048/burst | 33.1 | 32.9 to 33.6 | 40 | **2.67** | 76 |" in text
    lines = text.splitlines()
    assert (
        "| case | ours (TFLOP/s) | p10 to p90 | torch-fp8 | ratio | % of ceiling | beside: torch-fp8-mm "
        "| beside: quack-bf16-prepost |"
    ) in lines
    assert "| 8b/fp8/M=2048/burst | 1500 | 1490 to 1510 | 1250 | **1.20** | 76 | 1480 (1.01) |  |" in lines
    assert "| 8b/fp8/M=8192/burst | 1600 | 1590 to 1610 | 1350 | **1.19** | 76 | 1520 (1.05) | 800 (2.00) |" in lines
    assert "(performance/gateup_swiglu-fp8.svg)" in text


def test_a_plot_shows_what_ran_beside_the_rivals(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from futransformer.bench import plots  # noqa: PLC0415

    plots.draw(GATED, tmp_path / "plot.svg")
    picture = (tmp_path / "plot.svg").read_text()
    assert "quack-bf16-prepost" in picture
    assert "torch-fp8-mm" in picture


def test_the_committed_results_can_be_told() -> None:
    committed = Path(__file__).parents[2] / "benchmarks" / "results" / "h200"
    text = report.render(timed(committed))
    assert "## A whole prefill, FP8" in text
    assert "perplexity" not in text
    told = accuracy_report.render([each for each in report.read(committed) if each["subject"] in report.ACCURACY])
    assert "## What quantisation costs: smollm2-135m" in told
    assert "| fp8 | gptq+auto:10 | bf16 | prefill | 296 | 25.116 |" in told
    assert "perplexity/smollm2-135m/bf16/through=prefill/ctx=1024/windows=296" in told


def test_what_people_wrote_stays(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    docs = tmp_path / "docs"
    docs.mkdir()
    page = docs / "performance.md"
    page.write_text(f"# Performance\n\nOurs, by hand.\n\n{report.MARKER}\n\nold tables\n")
    assert report.write(folder, docs) == [page, docs / "accuracy.md"]
    assert "| p | 1 | x | a 2 |" in (docs / "accuracy.md").read_text()
    text = page.read_text()
    assert "| p |" not in text
    assert text.startswith(f"# Performance\n\nOurs, by hand.\n\n{report.MARKER}\n")
    assert "old tables" not in text
    assert "8b/int4/B=1/ctx=1024" in text


def test_plots_are_reproducible_and_complete(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    first, second = tmp_path / "a", tmp_path / "b"
    for docs in (first, second):
        docs.mkdir()
        report.write(folder, docs)
    assert [path.name for path in (first / "performance").iterdir()] == ["decode_block.svg"]
    picture = (first / "performance" / "decode_block.svg").read_text()
    assert picture == (second / "performance" / "decode_block.svg").read_text()
    for text in ("8b/int4/B=1/ctx=1024", "torch-int4", "ours", "us (shorter is better)"):
        assert text in picture


def test_without_matplotlib_the_error_says_what_to_install(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_svg", None)
    with pytest.raises(InputError, match=r"pip install 'futransformer\[bench\]'"):
        report.write(folder, tmp_path)
    assert not (tmp_path / "performance.md").exists()


def test_files_that_are_no_results_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match="holds no results"):
        report.read(tmp_path)
    for content in (b"{", b"[]", b'{"subject": "gemm"}', b"\xff"):
        (tmp_path / "gemm.json").write_bytes(content)
        with pytest.raises(InputError, match=r"gemm\.json is not a results file"):
            report.read(tmp_path)
    assert main(["bench", "report", "--output", str(tmp_path)]) == 2
    assert "measure that subject again" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dirty": None}, "lacks dirty"),
        ({"versions": {}}, "lacks torch"),
        ({"subject": ["load"]}, r"its subject is \['load'\]"),
        ({"subject": "sanitize"}, "lacks failures, left_out, messages, planted, seconds, version"),
        ({"subject": "fuzz"}, "lacks asked, failures, seconds, seed"),
        ({"rows": 5}, "'int' object"),
        ({"rows": [5]}, "'int' object"),
        (
            {"rows": [row("load/a"), {"case": "load/b", "ours": 1.0, "unit": "s", "spread": [1, 1]}]},
            "lacks percent_of_",
        ),
        ({"rows": [{"case": "load/b"}]}, r"lacks ours of rows\[0\], percent_of_ceiling of rows\[0\]"),
    ],
)
def test_results_that_lack_something_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    content = {key: value for key, value in {**LOAD, **changes}.items() if value is not None}
    (tmp_path / "load.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match=rf"load\.json is not a results file.*{message}.*measure that subject again"):
        report.read(tmp_path)


def test_what_random_cases_found() -> None:
    content = {
        "subject": "fuzz",
        **{key: value for key, value in FRAME.items() if key != "ceilings"},
        "seed": 7,
        "asked": 9,
        "seconds": 1.5,
        "rows": [
            {"case": "fuzz/odd/decode/o", "cases": 2, "wrong": 0, "seconds": 0.1},
            {"case": "fuzz/odd/step", "cases": 1, "wrong": 0, "seconds": 0.1},
            {"case": "fuzz/group5/decode/o", "cases": 3, "wrong": 1, "seconds": 0.1},
            {"case": "fuzz/copies/h4kv4d128-kv4-head/attention_decode", "cases": 2, "wrong": 0, "seconds": 0.1},
        ],
        "failures": [{"case": "fuzz/group5/decode/o (rows 3)", "index": 4, "message": "x: 1 of 9 values are wrong"}],
    }
    text = report.section(content)
    assert "Seed 7: 8 of 9 cases, 1.5 s." in text
    assert "| decode/o | 2 | 5 | 1 |\n| step | 1 | 1 | 0 |" in text
    assert "| attention_decode | 1 | 2 | 0 |" in text
    assert "- fuzz/group5/decode/o (rows 3): x: 1 of 9 values are wrong" in text


def test_what_compute_sanitizer_found() -> None:
    counts = {"cases": 2, "launches": 3, "warnings": 0}
    content = {
        "subject": "sanitize",
        **{key: value for key, value in FRAME.items() if key != "ceilings"},
        "version": "2025.3.1.0",
        "seconds": 91.5,
        "rows": [
            {"case": "sanitize/memcheck/gemm_a", "errors": 0, **counts},
            {"case": "sanitize/memcheck/gemm_b", "errors": 0, **counts},
            {"case": "sanitize/racecheck/gemm_a", "errors": 7, **counts},
        ],
        "planted": [
            {"tool": "racecheck", "kernel": "planted_none", "errors": 0, "warnings": 0},
            {"tool": "racecheck", "kernel": "planted_shared_race", "errors": 1, "warnings": 0, "required": True},
            {"tool": "racecheck", "kernel": "planted_unawaited_copy", "errors": 0, "warnings": 0, "required": False},
        ],
        "messages": ["racecheck/gemm_a: Error: Race reported"],
        "failures": [],
        "left_out": ["memcheck/odd/rows"],
    }
    text = report.section(content)
    assert "| tool | kernels | cases | launches | errors | warnings | planted faults found |" in text
    assert "| memcheck | 2 | 4 | 6 | 0 | 0 | 0 of 0 |" in text
    assert "| racecheck | 1 | 2 | 3 | 7 | 0 | 1 of 2 |" in text
    assert "- memcheck/odd/rows\n- racecheck/gemm_a: Error: Race reported\n" in text
    assert not report.has_plot(content)


def test_rows_of_other_runs_are_named_or_counted(folder: Path) -> None:
    path = next(folder.glob("decode_block*.json"))
    content = json.loads(path.read_text(encoding="utf-8"))
    row = content["rows"][0]
    of_two = [row | {"case": f"a/{index}", "commit": "c" * 40, "date": "yesterday"} for index in range(2)]
    of_nine = [row | {"case": f"b/{index}", "commit": "d" * 40, "date": "today"} for index in range(9)]
    told = report.provenance(content | {"rows": [row, *of_two, *of_nine]})
    apart = told.partition(" Measured apart: ")[2]
    assert apart == f"a/0, a/1 of commit {'c' * 12}, yesterday; 9 rows of commit {'d' * 12}, today."
