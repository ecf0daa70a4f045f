"""The load on an engine, on the reference: what is counted, and what would be noticed."""

from __future__ import annotations

import subprocess
import sys
import time
import weakref
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from futransformer.bench.case import HostCase, RivalMissingError
from futransformer.bench.rivals import transformers_batching
from futransformer.bench.runner import Outcome, run_host_case
from futransformer.bench.subjects import serve
from futransformer.bench.subjects.serve import Loop
from futransformer.engine import Engine
from futransformer.engine.warmup import WarmedUp
from futransformer.generator.config import load_config
from futransformer.kv_cache import page_bucket, pages_for
from tests.bench.conftest import CpuBench, ReferenceKernels
from tests.conftest import PATIENCE
from tests.engine.exact import ExactLlama

CONFIG = replace(load_config("smollm2-135m"), num_hidden_layers=2, vocab_size=512, max_position_embeddings=1024)


class TinyBench(CpuBench):
    def library(  # type: ignore[override]
        self, shape: str, precision: str = "bf16", *, batch_invariant: bool = False
    ) -> ReferenceKernels:
        return ReferenceKernels(CONFIG, precision)


JOB = transformers_batching.Job(
    transformers_batching.values(CONFIG),
    "cpu",
    streams=3,
    prompt=70,
    output=7,
    rounds=2,
    batch_tokens=256,
    compile_level=0,
    seconds=PATIENCE,
)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "shape_config", lambda shape: CONFIG)
    for name, value in {"STREAMS": 3, "PROMPT": 70, "OUTPUT": 7, "ROUNDS": 2, "ALONE_STEPS": 2, "PREFIX": 150}.items():
        monkeypatch.setattr(serve, name, value)


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[transformers_batching.Job]:
    """A rival that is as fast as it is compiled, and the jobs that it is given."""
    asked: list[transformers_batching.Job] = []

    def measure(job: transformers_batching.Job) -> transformers_batching.Figures:
        asked.append(job)
        return {"tokens_per_second": 10.0 + job.compile_level, "rounds": 1, "attention": "sdpa", "version": "5.17.0"}

    monkeypatch.setattr(transformers_batching, "measure", measure)
    return asked


@pytest.mark.parametrize("precision", ["bf16", "fp8-int4-head8", "fp8-int4-head8-kv4"])
def test_a_closed_loop_is_told_in_five_rows(small: None, jobs: list[transformers_batching.Job], precision: str) -> None:
    rows = serve.measure_streams("8b", precision, TinyBench())
    assert [row["case"].split("/", 3)[3] for row in rows] == [
        f"streams=3/{part}" for part in ("total", "first-token", "between-tokens", "step", "host")
    ]
    assert [row["unit"] for row in rows] == ["tokens/s", "ms", "ms", "ms", "ms"]
    assert all(row["error"] == 0 and row["ours"] > 0 for row in rows)
    total, first, between, step, host = rows
    assert total["rivals"] == {"transformers": 10, "transformers-compiled": 11}
    assert total["ratio"] == pytest.approx(total["ours"] / 11, abs=1e-3)
    assert total["notes"][0].endswith(
        "5.17.0, attention sdpa, a cache for the load alone, in a process of its own; 1 of 2 rounds"
    )
    assert (first["samples"], between["samples"]) == (6, 6 * 6)
    assert first["spread"][0] <= first["ours"] <= first["spread"][1] <= first["p99"]
    assert step["beside"]["a decode step alone"] > 0
    assert 0 < host["ours"] < step["ours"] * 1.001


def test_graphs_are_told_by_their_time_and_memory(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shape that has no graph is one too many."""
    model = serve.load("8b", "bf16", TinyBench(), 77)
    assert serve.graph_rows(model, "a") == []
    monkeypatch.setattr(Engine, "warm_up", lambda engine, seconds: WarmedUp(191, 192, 4.5, 3 * 10**8))
    time_taken, memory = serve.graph_rows(model, "a")
    assert (time_taken["case"], time_taken["ours"], time_taken["unit"]) == ("a/warm-up", 4.5, "s")
    assert (memory["case"], memory["ours"], memory["unit"]) == ("a/graphs", 0.3, "GB")
    assert time_taken["error"] == memory["error"] == 1
    assert model.cache.free_pages == model.cache.num_pages


def test_a_step_alone_may_be_one_that_an_engine_has_made(small: None) -> None:
    """Whose tensors are those of inference mode, which nothing outside it may write."""
    model = serve.load("8b", "bf16", TinyBench(), 77)
    with torch.inference_mode():
        made = model.decode_step(2, page_bucket(pages_for(70)))
    assert made.block_table.is_inference()
    assert model.decode_step(2, page_bucket(pages_for(70))) is made
    assert serve.seconds_alone(model, 2, 70) > 0


def test_a_rival_that_reads_bf16_runs_once_for_all_precisions(
    small: None, jobs: list[transformers_batching.Job]
) -> None:
    bench = TinyBench()
    totals = [serve.measure_streams("8b", precision, bench)[0] for precision in ("bf16", "fp8-int4-head8")]
    assert [total["rivals"] for total in totals] == [{"transformers": 10, "transformers-compiled": 11}] * 2
    assert [job.compile_level for job in jobs] == [0, 1]
    assert sum(job.seconds for job in jobs) <= 240


def test_the_rival_runs_when_our_model_is_gone(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    models = []
    load = serve.load

    def loaded(*arguments: Any) -> Any:
        model = load(*arguments)
        models.append(weakref.ref(model))
        return model

    def measure(job: transformers_batching.Job) -> transformers_batching.Figures:
        assert [model() for model in models] == [None]
        raise RivalMissingError("seen")

    monkeypatch.setattr(serve, "load", loaded)
    monkeypatch.setattr(transformers_batching, "measure", measure)
    assert serve.measure_streams("8b", "bf16", TinyBench())[0]["notes"][0].endswith("RivalMissingError: seen")


def test_a_rival_that_fails_is_left_out_with_a_note(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> None:
        raise RuntimeError("no such kernel\nand more")

    monkeypatch.setattr(transformers_batching, "measure", failing)
    outcome = Outcome()
    run_host_case(HostCase("serve", partial(serve.measure_streams, "8b", "bf16")), TinyBench(), outcome, lambda _: None)
    assert outcome.notes == [
        f"serve/8b/bf16/streams=3/total: {name} left out: RuntimeError: no such kernel"
        for name in ("transformers", "transformers-compiled")
    ]
    assert (len(outcome.rows), outcome.failed) == (5, False)


def test_transformers_serves_the_load_in_a_process_of_its_own() -> None:
    found = transformers_batching.measure(JOB)
    assert found["tokens_per_second"] > 0
    assert (found["rounds"], found["version"]) == (2, version("transformers"))


def test_a_rival_that_has_no_time_for_more_rounds_is_told_by_its_first() -> None:
    """Which compiles, and by one more."""
    found = list(transformers_batching.run(replace(JOB, seconds=0), time.monotonic()))
    assert [each["rounds"] for each in found] == [0, 1]
    assert all(each["tokens_per_second"] > 0 for each in found)


def test_a_rival_that_is_ended_is_told_by_what_it_has_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    slow.write_text(
        "#!/bin/sh\necho starting\necho '{\"rounds\": 0}'\necho '{\"rounds\": 1}'\necho more\n"
        ': > "$0.has said it"\nexec sleep 600\n'
    )
    slow.chmod(0o755)
    communicate = subprocess.Popen.communicate

    def communicate_behind(process: Any, *said: Any, **options: Any) -> Any:
        while process.poll() is None and not (tmp_path / "slow.has said it").exists():
            time.sleep(0.01)
        return communicate(process, *said, **options)

    monkeypatch.setattr(sys, "executable", str(slow))
    monkeypatch.setattr(subprocess.Popen, "communicate", communicate_behind)
    assert transformers_batching.measure(replace(JOB, seconds=0.1)) == {"rounds": 1}


def test_a_rival_that_ended_no_more_than_what_compiles_has_no_figure(
    small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(job: transformers_batching.Job) -> transformers_batching.Figures:
        return {"tokens_per_second": 10.0, "rounds": 1 - job.compile_level, "attention": "sdpa", "version": "5.17.0"}

    monkeypatch.setattr(transformers_batching, "measure", measure)
    total = serve.measure_streams("8b", "bf16", TinyBench())[0]
    assert total["rivals"] == {"transformers": 10.0}
    assert total["notes"][1].startswith("transformers-compiled left out: it ended one round alone")


def test_a_run_may_give_a_rival_that_compiles_more_time(small: None, jobs: list[transformers_batching.Job]) -> None:
    bench = TinyBench()
    bench.compile_seconds = 500
    serve.measure_streams("8b", "bf16", bench)
    assert [job.seconds for job in jobs] == [serve.RIVALS["transformers"][1], 500]


def test_a_rival_that_is_not_done_in_time_is_ended() -> None:
    begin = time.monotonic()
    with pytest.raises(RivalMissingError, match=r"not done in 0\.5 s; its last stage: "):
        transformers_batching.measure(replace(JOB, seconds=0.5))
    assert time.monotonic() - begin < 20


def test_a_rival_says_why_it_failed() -> None:
    with pytest.raises(RivalMissingError, match=r"^a request failed: The size of tensor"):
        transformers_batching.measure(replace(JOB, model=JOB.model | {"num_key_value_heads": 7}))


def test_a_shared_prefix_is_told_beside_one_that_is_not(small: None) -> None:
    (row,) = serve.measure_prefix("8b", "bf16", TinyBench())
    assert (row["samples"], row["error"]) == (3, 0)
    assert row["beside"]["without shared pages"] > 0


def test_answers_that_are_short_are_counted() -> None:
    """The exact model ends one of these texts early if it may."""
    engine: Any = Engine(ExactLlama(40), None)
    loop = Loop(engine, [[[5, 6, 7]], [[1]]], 200)
    loop.params = replace(loop.params, ignore_eos=False)
    loop.run()
    assert loop.wrong > 0
    assert loop.generated < 400


def test_every_case_names_its_precision() -> None:
    cases = serve.cases()
    assert cases[0].name == "serve/8b/fp8-int4-head8/streams=64"
    assert all(case.precision == case.name.split("/")[2] for case in cases)
    assert {case.precision for case in cases if case.default} == {"fp8-int4-head8", "bf16"}
