"""From cases to rows: what is refused, what is noted, what a row says, how a budget is spent."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from futransformer.bench import results, runner
from futransformer.bench.case import COMPUTE_BOUND, MEMORY_BOUND, Case, Contender, Expected, HostCase, Problem, Work
from futransformer.bench.harness import Harness, Timing
from futransformer.bench.rivals import require
from futransformer.bench.runner import by_file, host_row, run_cases, select
from futransformer.bench.subjects import subject_cases
from futransformer.cli import main
from futransformer.generator.errors import InputError
from tests.bench.conftest import CEILINGS, CpuBench, FakeClock

Timed = Callable[..., Contender]
ANSWER = torch.tensor([[1.0, -2.0, 4.0]])
EXACT = [Expected(ANSWER, ANSWER.clone())]
WORK = Work(flops=8e9, bytes=4e6)  # 10 us at 800 TFLOP/s, 1 us at 4 TB/s


def case(
    ours: Contender,
    name: str = "gemm/8b/qkv/bf16/M=8192",
    *,
    rivals: dict[str, Callable[[], Contender]] | None = None,
    regimes: Any = MEMORY_BOUND,
    unit: Any = "TFLOP/s",
) -> Case:
    return Case(name, unit, regimes, lambda _: Problem(WORK, ours, rivals or {}, lambda: EXACT))


def run(cases: list[Any], harness: Harness, **options: Any) -> runner.Outcome:
    arguments: dict[str, Any] = {"seconds": 60.0, "say": lambda _: None, **options}
    return run_cases(cases, CpuBench(), harness, **arguments)


def test_a_row_in_throughput(harness: Harness, timed: Timed) -> None:
    rivals = {
        "torch-bf16": lambda: timed("torch", 25e-6, calls=40, outputs=[ANSWER]),
        "quack-bf16": lambda: timed("quack", 16e-6, calls=40, outputs=[ANSWER]),
    }
    ours = timed("ours", 20e-6, calls=40, outputs=[ANSWER])
    (row,) = run([case(ours, rivals=rivals)], harness).rows
    assert row == {
        "case": "gemm/8b/qkv/bf16/M=8192",
        "ours": 400.0,
        "unit": "TFLOP/s",
        "spread": [400.0, 400.0],
        "rivals": {"torch-bf16": 320.0, "quack-bf16": 500.0},
        "ratio": 0.8,  # against the best rival; above 1 ours is faster
        "percent_of_ceiling": 50.0,
        "error": 0.0,
        "tolerance": pytest.approx(2.0**-8, rel=1e-2),
    }


def test_a_row_in_time(harness: Harness, timed: Timed) -> None:
    ours = timed("ours", 20e-6, 20e-6, 40e-6, calls=40, outputs=[ANSWER])
    rivals = {"torch-bf16": lambda: timed("torch", 30e-6, calls=40)}  # without outputs, nothing is compared
    (row,) = run([case(ours, rivals=rivals, unit="us")], harness).rows
    assert row["ours"] == 20
    assert row["spread"] == [20, 40]
    assert row["ratio"] == 1.5


def test_what_runs_beside_the_rivals_has_no_part_in_the_ratio(harness: Harness, timed: Timed) -> None:
    def problem(_: object) -> Problem:
        rivals = {"torch-fp8": lambda: timed("torch", 24e-6, calls=40, outputs=[ANSWER * 1.1])}
        beside = {
            "torch-fp8-mm": lambda: timed("mm", 16e-6, calls=40),
            "quack-bf16-prepost": lambda: timed("quack", 40e-6, calls=40, outputs=[-ANSWER]),
        }
        work = Work(fp8_flops=16e9)  # 10 us at 1600 TFLOP/s
        ours = timed("ours", 20e-6, calls=40, outputs=[ANSWER])
        return Problem(work, ours, rivals, lambda: EXACT, beside)

    fp8 = Case("gateup_swiglu/8b/fp8/M=8192", "TFLOP/s", MEMORY_BOUND, problem, precision="fp8")
    outcome = run([fp8], harness)
    (row,) = outcome.rows
    assert row["ours"] == 800.0
    assert row["rivals"] == {"torch-fp8": pytest.approx(666.67)}  # a tenth beside the answer, which FP8 may be
    assert row["ratio"] == 1.2
    assert row["percent_of_ceiling"] == 50.0
    assert row["beside"] == {"torch-fp8-mm": 1000.0}
    assert "quack-bf16-prepost left out: it computes something else" in outcome.notes[0]
    assert "ratio 1.200" in runner.describe(row)
    assert "beside: torch-fp8-mm 1000, ratio 0.800" in runner.describe(row)
    in_bf16 = Case("gateup_swiglu/8b/bf16/M=8192", "TFLOP/s", MEMORY_BOUND, problem)
    assert run([in_bf16], harness).rows[0]["rivals"] == {}


def test_kernels_of_a_precision_have_a_folder_and_a_file_of_their_own() -> None:
    bench = runner.Bench(torch.device("cpu"), CEILINGS, kernels=Path("kernels"))
    assert bench.folder("8b") == Path("kernels/llama-3.1-8b")
    assert bench.folder("8b", "fp8") == Path("kernels/llama-3.1-8b-fp8")
    chosen = {
        "gemm": select(subject_cases("gemm"), ["8b/o/*/M=8192", "8b/down/fp8/M=2048"]),
        "decode_block": select(subject_cases("decode_block"), ["8b/bf16/B=1/ctx=1024"]),
    }
    named = [(subject, precision, [case.name for case in cases]) for subject, precision, cases in by_file(chosen)]
    assert named == [
        ("gemm", "bf16", ["gemm/8b/o/bf16/M=8192"]),
        ("gemm", "fp8", ["gemm/8b/down/fp8/M=2048", "gemm/8b/o/fp8/M=8192"]),
        ("decode_block", "bf16", ["decode_block/8b/bf16/B=1/ctx=1024"]),
    ]


def test_compute_bound_cases_give_two_rows(harness: Harness, timed: Timed, clock: FakeClock) -> None:
    rows = run([case(timed("ours", 2e-3, outputs=[ANSWER]), regimes=COMPUTE_BOUND)], harness).rows
    assert [row["case"].rsplit("/", 1)[1] for row in rows] == ["burst", "sustained"]
    assert all(row["ratio"] is None and row["rivals"] == {} for row in rows)


@pytest.mark.parametrize("wrong", [ANSWER + 0.1, torch.full_like(ANSWER, torch.nan)])
def test_a_wrong_result_gives_no_row(harness: Harness, timed: Timed, clock: FakeClock, wrong: Tensor) -> None:
    outcome = run([case(timed("ours", 1e-3, outputs=[wrong]))], harness)
    assert outcome.failed
    assert outcome.rows == []
    assert "not timed, its error" in outcome.notes[0]
    assert clock.time == 0  # nothing was timed


def test_rivals_that_cannot_compete_are_noted(harness: Harness, timed: Timed) -> None:
    def broken() -> Contender:
        raise RuntimeError("no kernel for this shape\nand much more")

    def missing() -> Contender:
        require("no_such_library.interface", "no-such-package")
        raise AssertionError

    rivals = {
        "torch-bf16": broken,
        "quack-bf16": missing,
        "coda-bf16": lambda: timed("coda", 1e-9, outputs=[-ANSWER]),
        "cudnn": lambda: timed("cudnn", 1e-3, outputs=[ANSWER * 1.01]),
    }
    outcome = run([case(timed("ours", 1e-3, outputs=[ANSWER]), rivals=rivals)], harness)
    assert list(outcome.rows[0]["rivals"]) == ["cudnn"]
    assert not outcome.failed
    notes = "\n".join(outcome.notes)
    assert "torch-bf16 left out: RuntimeError: no kernel for this shape\n" in notes
    assert "quack-bf16 left out: no-such-package cannot be imported here" in notes
    assert "coda-bf16 left out: it computes something else" in notes


def test_a_case_that_fails_leaves_the_others_alone(harness: Harness, timed: Timed) -> None:
    def fails(_: object) -> Problem:
        raise InputError("no such page")

    good = case(timed("ours", 1e-3, outputs=[ANSWER]))
    saved: list[int] = []
    cases = [Case("gemm/bad", "us", MEMORY_BOUND, fails), good]
    outcome = run(cases, harness, save=lambda so_far: saved.append(len(so_far.rows)))
    assert saved == [0, 1]
    assert outcome.failed
    assert outcome.notes == ["gemm/bad: failed: no such page"]
    assert len(outcome.rows) == 1


def test_the_budget_is_divided_and_ends(clock: FakeClock, timed: Timed, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []

    class Recorder(Harness):
        def measure(self, regime: Any, contenders: Any, seconds: float) -> dict[str, Timing]:
            given.append(seconds)
            clock.time += 10  # slower than asked for
            return {"ours": Timing(1e-3, 1e-3, 1e-3, 1)}

    monkeypatch.setattr(runner, "WANTED_SECONDS", {"burst": 100.0, "sustained": 100.0, "steady": 100.0})
    cases = [case(timed(str(i), 1e-3, outputs=[ANSWER]), f"gemm/{i}") for i in range(4)]
    outcome = run(cases, Recorder(clock), seconds=24, now=lambda: clock.time)
    assert given == [6.0, pytest.approx(14 / 3), 2.0]  # what is left over the cases that are left
    assert len(outcome.rows) == 3
    assert outcome.notes == ["gemm/3: left out, the budget of 24 s was spent"]


def test_host_cases_check_themselves(harness: Harness) -> None:
    timing = Timing.of([2.0, 1.0, 3.0])
    good = HostCase("build/x/cold", lambda _: [host_row("build/x/cold", timing, error=0)])
    bad = HostCase("build/y/cold", lambda _: [host_row("build/y/cold", timing, error=2)])
    outcome = run([good, bad], harness)
    assert [row["case"] for row in outcome.rows] == ["build/x/cold"]
    assert outcome.rows[0]["ours"] == 2.0
    assert outcome.failed


def test_only_selects_by_name() -> None:
    cases = [Case(f"gemm/8b/{op}/bf16/M={m}", "us", MEMORY_BOUND, lambda _: None, default=m == 1)  # type: ignore[arg-type, return-value]
             for op in ("qkv", "o") for m in (1, 16, 1638)]  # fmt: skip
    assert [c.name for c in select(cases, [])] == ["gemm/8b/qkv/bf16/M=1", "gemm/8b/o/bf16/M=1"]
    assert [c.name for c in select(cases, ["/o/*M=16"])] == ["gemm/8b/o/bf16/M=16"]
    assert len(select(cases, ["M=16", "qkv"])) == 4  # M=1638 is another part
    with pytest.raises(InputError, match="matches no case of this subject; one is gemm/8b/qkv/bf16/M=1"):
        select(cases, ["M=17"])


def test_a_results_file(tmp_path: Path) -> None:
    where = results.environment("abc1234")
    content = results.document("gemm", where, [{"case": "gemm/x"}], ceilings=CEILINGS, notes=["a note"])
    path = results.write(tmp_path / "h200", content)
    read = json.loads(path.read_text())
    assert path.name == "gemm.json"
    assert list(read) == [
        "subject", "card", "driver", "commit", "dirty", "date", "versions", "ceilings", "rows", "notes",
    ]  # fmt: skip
    assert read["ceilings"] == {"read_tbps": 4.0, "fp8_tflops": 1600.0, "bf16_tflops": 800.0}
    assert read["commit"] == "abc1234"
    assert set(read["versions"]) == {"torch", "cuda", "futransformer"}
    fp8 = results.document("gemm", where, [], precision="fp8")
    assert results.write(tmp_path / "h200", fp8).name == "gemm-fp8.json"
    assert list(fp8)[:2] == ["subject", "precision"]


def test_a_tree_without_history_needs_a_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "_output", lambda *_: "")
    with pytest.raises(InputError, match="--commit"):
        results.environment(None)


def test_the_command_lists_and_refuses(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["bench", "list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert "decode_block/8b/bf16/B=1/ctx=1024" in listed
    assert "decode_block/8b/bf16/B=64/ctx=131072  (with --only)" in listed
    assert main(["bench", "no_such_subject"]) == 2
    assert "choose from: gateup_swiglu" in capsys.readouterr().err
    assert main(["bench", "gemm", "--only", "nothing"]) == 2
    assert main(["bench", "accuracy"]) == 2
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    for name, wrong in (("none.txt", "there is no such file"), ("latin.txt", "is not UTF-8 text")):
        capsys.readouterr()  # said before a model is fetched or loaded
        assert main(["bench", "accuracy", "--model", "smollm2-135m", "--text", str(tmp_path / name)]) == 2
        assert wrong in capsys.readouterr().err
    assert main(["bench", "report", "gemm"]) == 2
    for seconds in ("0", "-1", "nan"):
        capsys.readouterr()
        assert main(["bench", "gemm", "--seconds", seconds]) == 2
        assert f"--seconds must be positive, not {seconds}" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["0", "-1"])
def test_no_time_to_compile_in_is_refused(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", f"--compile-seconds={seconds}"]) == 2
    assert f"--compile-seconds must be positive, not {seconds}" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_the_command_needs_a_gpu(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["bench", "gemm", "--commit", "abc", "--output", str(tmp_path)]) == 1
    assert "no Hopper GPU" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_rows_that_stay_are_of_the_commit_that_their_file_named(tmp_path: Path) -> None:
    """A file that was written as a whole says it once; another commit's rows beside them must not take them over."""
    where = {"card": "H200", "commit": "a", "dirty": False, "date": "then", "driver": "", "versions": {}}
    path = results.write(tmp_path, results.document("gemm", where, [{"case": "gemm/x"}, {"case": "gemm/y"}]))
    now = results.document("gemm", where | {"commit": "b", "date": "now"}, [{"case": "gemm/y"}])
    assert results.merge(tmp_path, now) == path
    rows = [(row["case"], row["commit"], row["date"]) for row in json.loads(path.read_text())["rows"]]
    assert rows == [("gemm/x", "a", "then"), ("gemm/y", "b", "now")]
