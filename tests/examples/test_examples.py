"""Every example, run as a user types it, on the CPU reference."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from futransformer import LLM, SamplingParams
from futransformer.reference import ReferenceOps
from futransformer.tokenizer import Message
from tests.conftest import make_tiny_model

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run an example; return its exit status and what it prints."""

    def run_example(name: str, *arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        printed = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, printed.out, printed.err

    return run_example


def test_every_example_is_run_by_a_test() -> None:
    tests = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    assert {path.name for path in EXAMPLES.glob("*.py") if f'"{path.name}"' not in tests} == set()


def test_one_kernel_beside_pytorch(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference keeps the rule; a result that is a tenth too large does not."""
    status, out, _ = run("fused_gate_up.py", "smollm2-135m", "--rows", 17)
    assert status == 0
    assert "[17, 576] -> [17, 1536]" in out
    gate_up = ReferenceOps.gate_up
    monkeypatch.setattr(ReferenceOps, "gate_up", lambda *args, **options: gate_up(*args, **options) * 1.1)
    status, out, _ = run("fused_gate_up.py", "smollm2-135m", "--rows", 17)
    assert status == 1
    status, _, err = run("fused_gate_up.py", "llama-9")
    assert (status, err.startswith("fused_gate_up: llama-9 is neither")) == (2, True)


def test_a_file_of_questions_is_answered(run: Run, tmp_path: Path) -> None:
    """Each answer is that of its question alone, by the same seed."""
    model = make_tiny_model(tmp_path / "model", tied=False)
    questions = ["What is gravity?", "And what an atom?", "Why?"]
    (tmp_path / "questions.txt").write_text("\n".join([*questions, ""]))
    status, out, err = run("answer_file.py", model, tmp_path / "questions.txt", "--max-tokens", 6, "--temperature", 1)
    assert status == 0, err
    answers = {line["question"]: line for line in map(json.loads, out.splitlines())}
    assert sorted(answers) == sorted(questions)
    llm = LLM(model)
    for number, question in enumerate(questions):
        params = SamplingParams(temperature=1.0, max_tokens=6, seed=number)
        conversation: list[Message] = [{"role": "user", "content": question}]
        (alone,) = llm.chat(conversation, params)
        assert answers[question]["answer"] == alone.outputs[0].text
        assert answers[question]["finish_reason"] == alone.outputs[0].finish_reason
    assert "3 answers, " in err


def test_formats_are_compared_on_a_text(run: Run, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", tied=False)
    text = resources.files("futransformer") / "data" / "sample.txt"
    options: tuple[Any, ...] = ("--context", 40, "--windows", 2)
    status, out, err = run("compare_precisions.py", model, text, "bf16", "int4-g32", "bf16-kv4", *options)
    assert status == 0, err
    rows = {cells[1].strip(): cells for cells in (line.split("|") for line in out.splitlines()[2:])}
    assert list(rows) == ["bf16", "int4-g32", "bf16-kv4"]
    assert rows["bf16"][3:6] == [" +0.00 % ", " 0.0000 ", " 100.0 % "], "a model beside itself loses nothing"
    assert all(float(rows[name][4]) > 0 for name in ("int4-g32", "bf16-kv4"))
    status, _, err = run("compare_precisions.py", model, text, "int5", *options)
    assert (status, "precision 'int5' is not implemented" in err) == (2, True)
