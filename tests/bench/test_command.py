"""``futransformer bench`` from its arguments to its files, on pretended cases and a pretended clock."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from futransformer.bench import subjects
from futransformer.bench.case import COMPUTE_BOUND, MEMORY_BOUND, Case, Contender, Expected, Problem, Work
from futransformer.bench.harness import Harness
from futransformer.cli import bench, main
from tests.bench.conftest import CEILINGS

ANSWER = torch.tensor([[1.0, -2.0, 4.0]])


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, harness: Harness, timed: Callable[..., Contender]) -> None:
    """A card on which two subjects have two cases each; the second of the second is wrong."""

    def problem(seconds: float, answer: torch.Tensor) -> Problem:
        ours = timed("ours", seconds, outputs=[answer])
        rivals = {"torch-bf16": lambda: timed("torch", 2e-3, outputs=[ANSWER])}
        return Problem(Work(flops=4e11), ours, rivals, lambda: [Expected(ANSWER, ANSWER)])

    def cases(subject: str) -> list[Case]:
        wrong = ANSWER if subject == "gemm" else -ANSWER
        return [
            Case(f"{subject}/8b/a", "TFLOP/s", COMPUTE_BOUND, lambda _: problem(1e-3, ANSWER)),
            Case(f"{subject}/8b/b", "ms", MEMORY_BOUND, lambda _: problem(1e-3, wrong)),
        ]

    monkeypatch.setattr(subjects, "subject_cases", cases)
    monkeypatch.setattr(bench, "_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(bench, "_harness", lambda: harness)
    monkeypatch.setattr(bench, "_ceilings", lambda *_: CEILINGS)


@pytest.mark.usefixtures("card")
def test_files_and_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "gemm", "--commit", "abc", "--output", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "gemm/8b/a/burst: 400 TFLOP/s, ratio 2.000, 50.0 % of the ceiling (torch-bf16 200)",
        "gemm/8b/a/sustained: 400 TFLOP/s, ratio 2.000, 50.0 % of the ceiling (torch-bf16 200)",
        "gemm/8b/b: 1 ms, ratio 2.000, 50.0 % of the ceiling (torch-bf16 2)",
    ]
    written = json.loads((tmp_path / "gemm.json").read_text())
    assert written["commit"] == "abc"
    assert [row["case"] for row in written["rows"]] == ["gemm/8b/a/burst", "gemm/8b/a/sustained", "gemm/8b/b"]
    assert "notes" not in written


@pytest.mark.usefixtures("card")
def test_a_wrong_case_fails_the_command_and_spares_the_rest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "gemm", "decode_gemm", "--commit", "abc", "--output", str(tmp_path), "--json"]) == 1
    first, second = json.loads(capsys.readouterr().out)
    assert [content["subject"] for content in (first, second)] == ["gemm", "decode_gemm"]
    assert len(second["rows"]) == 2
    assert "decode_gemm/8b/b: not timed, its error" in second["notes"][0]
    assert json.loads((tmp_path / "decode_gemm.json").read_text()) == second


@pytest.mark.usefixtures("card")
def test_only_reaches_the_cases(tmp_path: Path) -> None:
    command = ["bench", "gemm", "--only", "8b/a", "--seconds", "50", "--commit", "abc", "--output", str(tmp_path)]
    assert main(command) == 0
    assert len(json.loads((tmp_path / "gemm.json").read_text())["rows"]) == 2
