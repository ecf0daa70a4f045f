"""The page of accuracy, from rows as `bench perplexity` and `bench accuracy` write them."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

import pytest

from futransformer.bench import accuracy_report, report, results
from tests.bench.test_report import FRAME

NEAREST = [0.2, 0.1, 0.3]  # mean differences of three windows
BETTER = [0.1, 0.06, 0.14]


def row(label: str, windows: list[float], weights: str = "int4", **values: Any) -> dict[str, Any]:
    mean = statistics.fmean(windows)
    return {
        "case": f"perplexity/m/{weights}-{label}-bf16/through=decode/ctx=1024/windows={len(windows)}",
        "weights": weights,
        "label": label,
        "cache": "bf16",
        "ours": 20 * math.exp(mean),
        "unit": "perplexity",
        "rivals": {"reference": 20 * math.exp(mean), "reference-bf16": 20.0},
        "nll_minus_reference": {"mean": 1e-5, "standard_error": 2e-5, "deviation": 0.02},
        "nll_minus_reference-bf16": {"mean": mean, "standard_error": 0.01, "deviation": 0.2},
        "noise_floor_reference_float32_minus_float64": {"mean": 0.0, "standard_error": 1e-5, "deviation": 0.016},
        "percent_standard_error": 1.5,
        "windows_minus_bf16": windows,
        "kl_divergence": {"mean": 0.05, "standard_error": 0.001},
        "top1_agreement": {"mean": 0.9, "standard_error": 0.002},
        "layer_errors": [0.1, 0.2],
        "baseline_sha256": "b" * 64,
        "text_sha256": "e" * 64,
        "commit": "0123456789abcdef",
        "date": "2026-11-30 12:00 UTC",
        **values,
    }


def content(*rows: dict[str, Any]) -> dict[str, Any]:
    frame = {key: value for key, value in FRAME.items() if key != "ceilings"}
    return {"subject": "perplexity", "model": "m", **frame, "rows": list(rows)}


def test_a_model_has_one_table() -> None:
    text = accuracy_report.render([content(row("rtn", NEAREST), row("gptq", BETTER))])
    assert "## What quantisation costs: m\n\n- NVIDIA H200, driver 580.159.04" in text
    assert f"- sha256 of the weights: {'b' * 64}.\n- sha256 of the text: {'e' * 64}." in text
    assert "several commits" not in text
    lines = [line for line in text.splitlines() if line.startswith("| int4")]
    assert lines[0].startswith("| int4 | gptq | bf16 | decode | 3 | 22.103 | 10.52 ± 1.50 | 0.500 ± ")
    assert lines[0].endswith("| 0.05000 ± 0.00100 | 90.00 ± 0.20 | 0.00001 ± 0.00002 | 0.020 of 0.016 |")
    assert lines[1].startswith("| int4 | rtn | bf16 | decode | 3 | 24.428 | 22.14 ± 1.50 |  | 0.05")


def test_what_remains_is_paired_by_windows() -> None:
    """Where a method takes the same part of every window's rise, that part is known exactly."""
    nearest, half, other = (
        accuracy_report.parse(row(label, windows))
        for label, windows in (("rtn", NEAREST), ("gptq", [value / 2 for value in NEAREST]), ("awq", BETTER))
    )
    assert accuracy_report.share(half, nearest) == pytest.approx((0.5, 0), abs=1e-12)
    remains = accuracy_report.share(other, nearest)
    assert remains is not None
    apart = [0.1 - 0.5 * 0.2, 0.06 - 0.5 * 0.1, 0.14 - 0.5 * 0.3]
    assert remains == pytest.approx((0.5, statistics.stdev(apart) / 0.2 / 3**0.5))
    assert accuracy_report.share(nearest, nearest) is None
    assert accuracy_report.share(accuracy_report.parse(row("gptq", BETTER[:2])), nearest) is None
    unpaired = accuracy_report.parse({**row("gptq", BETTER), "windows_minus_bf16": None})
    assert accuracy_report.share(unpaired, nearest) is None


def test_methods_stand_beside_rounding_of_the_same_kind_alone() -> None:
    contents = [content(row("rtn", NEAREST), row("gptq", BETTER, weights="int4-g32"))]
    (lone,) = [line for line in accuracy_report.render(contents).splitlines() if line.startswith("| int4-g32")]
    assert "0.500" not in lone


def test_the_row_with_the_most_windows_is_told() -> None:
    costs = accuracy_report.costs([content(row("rtn", NEAREST[:2])), content(row("rtn", NEAREST))])
    assert [cost.windows for cost in costs] == [3]


def test_rows_of_bench_accuracy_stand_in_the_same_table() -> None:
    old = {
        "ours": 25.0,
        "unit": "perplexity",
        "rivals": {"reference-bf16": 24.0},
        "nll_minus_reference-bf16": {"mean": math.log(25 / 24), "standard_error": 0.001, "deviation": 0.3},
    }
    names = {
        "m/int4-g32-asym-rtn-kv4/through=decode/ctx=1024/windows=296/B=64": ("int4-g32-asym", "rtn", "kv4"),
        "m/fp8/through=prefill/ctx=1024/windows=296/scales=frozen": ("fp8", "rtn", "bf16"),
        "m/fp8/recipe=gptq+auto:6/through=prefill/ctx=1024/windows=296/scales=running": (
            "fp8",
            "gptq+auto:6, running scales",
            "bf16",
        ),
    }
    for name, parts in names.items():
        cost = accuracy_report.parse({"case": f"perplexity/{name}", **old})
        assert (cost.weights, cost.label, cost.cache) == parts
        assert cost.rise == pytest.approx((100 / 24, 100 * 25 / 24 * 0.001))


def test_the_page_and_its_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    results.write(tmp_path / "results", content(row("rtn", NEAREST), row("gptq", BETTER, date="2026-12-01 09:00 UTC")))
    docs = tmp_path / "docs"
    docs.mkdir()
    (page,) = report.write(tmp_path / "results", docs)
    text = page.read_text()
    assert page.name == "accuracy.md"
    assert "- Rows are of several commits: " in text
    for name in ("m.svg", "m-layers.svg"):
        assert f"(accuracy/{name})" in text
        first = (docs / "accuracy" / name).read_text()
        report.write(tmp_path / "results", docs)
        assert (docs / "accuracy" / name).read_text() == first
    assert "10.52  gptq" in (docs / "accuracy" / "m.svg").read_text()
