"""The subjects that a host's clock times: building and loading."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from futransformer.bench.runner import Bench
from futransformer.bench.subjects import build, decode_host, load, quantize
from futransformer.generator.config import load_config
from futransformer.generator.errors import BuildError, InputError
from futransformer.generator.plan import kernel_specs
from futransformer.ops.interface import Stream
from futransformer.sampling import Sampling
from tests.bench.conftest import CpuBench, ReferenceKernels

SMALL = "smollm2-135m"
KERNELS = len(kernel_specs(load_config(SMALL), "bf16"))


def test_a_build_is_timed_cold_and_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    caches: list[str] = []

    def pretended(name: str, cache: str) -> tuple[float, dict[str, Any]]:
        assert name == SMALL
        cold = cache not in caches
        caches.append(cache)
        return (60.0 if cold else 1.5), {"compiled": KERNELS if cold else 0, "kernels": [{}] * KERNELS}

    monkeypatch.setattr(build, "timed_build", pretended)
    cold, warm = build.measure(SMALL)
    assert len(set(caches)) == 1
    assert (cold["case"], cold["ours"], cold["error"]) == (f"build/{SMALL}/cold", 60.0, 0)
    assert (warm["case"], warm["ours"], warm["error"]) == (f"build/{SMALL}/warm", 1.5, 0)


def test_a_build_that_was_not_cold_or_not_warm_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    report = {"compiled": 1, "kernels": [{}] * KERNELS}
    monkeypatch.setattr(build, "timed_build", lambda name, cache: (1.0, report))
    cold, warm = build.measure(SMALL)
    assert cold["error"] == KERNELS - 1
    assert warm["error"] == build.WARM_BUILDS


def test_a_failed_build_says_why(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUTRANSFORMER_NVCC", str(tmp_path / "no-nvcc"))
    with pytest.raises(BuildError, match="no-nvcc"):
        build.timed_build(SMALL, str(tmp_path / "cache"))


def test_loading_is_timed_and_a_kernel_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[object] = []

    def pretended(config: Any, precision: Any, *, folder: object) -> ReferenceKernels:
        loads.append(folder)
        return ReferenceKernels(config)

    monkeypatch.setattr(load, "load_kernels", pretended)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    bench: Bench = CpuBench()
    (row,) = load.measure(SMALL, bench)
    assert loads == [None] * (load.LOADS + 1)
    assert row["case"] == f"load/{SMALL}"
    assert row["unit"] == "s"
    assert row["error"] == 0
    untouched = lambda self, phase, table, indices: Stream(table, table, table)  # noqa: E731
    monkeypatch.setattr(ReferenceKernels, "gather_rows", untouched)
    assert load.measure(SMALL, bench)[0]["error"] > 0


def test_quantising_is_timed_on_a_random_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """For real, with a short text; what errs more than the nearest codes, or is not there, is seen."""
    tiny = replace(
        load_config(SMALL),
        num_hidden_layers=1,
        vocab_size=256,
        hidden_size=128,
        intermediate_size=192,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    monkeypatch.setattr(quantize, "load_config", lambda name: tiny)
    monkeypatch.setattr(quantize, "CALIBRATION", ("--calibration", "random", "--samples", "2", "--seqlen", "32"))
    time_row, memory_row = quantize.measure("tiny", "gptq", CpuBench())
    assert (time_row["case"], time_row["unit"], time_row["error"]) == ("quantize/tiny/gptq", "s", 0)
    assert (memory_row["case"], memory_row["unit"]) == ("quantize/tiny/gptq/host memory", "GB")
    assert 0.1 < memory_row["ours"] < 4, "torch alone takes some hundred MB"
    worse = {"errors": {f"{index}": {"output": 2.0, "output_of_nearest": 1.0} for index in range(6)}}
    monkeypatch.setattr(quantize, "timed_quantise", lambda model, method: (1.0, 10**9, worse))
    assert [row["error"] for row in quantize.measure("tiny", "gptq", CpuBench())] == [7, 7]


def test_what_a_host_holds_beside_a_gpu_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a process, a layer and a shard of both ends, which rotating takes thrice: of 8B 2, 0.44 and 2.1 GB."""
    config = load_config("llama-3.1-8b")
    plain, rotated = (quantize.memory_bound(config, rotated=turned) for turned in (False, True))
    assert (round(plain / 1e9, 2), round(rotated / 1e9, 2)) == (4.54, 8.74)
    errors = {f"{index}": {"output": 1.0, "output_of_nearest": 1.0} for index in range(7 * config.num_hidden_layers)}
    bench = CpuBench()
    monkeypatch.setattr(bench, "device", torch.device("cuda"))
    monkeypatch.setattr(quantize, "write_random_model", lambda *_: None)
    for peak, wrong in ((plain, 0), (plain + 1, 1)):
        monkeypatch.setattr(quantize, "timed_quantise", lambda *_, peak=peak: (1.0, peak, {"errors": errors}))
        rows = quantize.measure("llama-3.1-8b", "gptq", bench)
        assert [row["error"] for row in rows] == [0, wrong]


def test_a_failed_quantisation_says_why(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no folder"):
        quantize.timed_quantise(tmp_path / "none", ())


@pytest.mark.parametrize("sampling", decode_host.SAMPLINGS.values(), ids=list(decode_host.SAMPLINGS))
@pytest.mark.parametrize("precision", ["bf16", "int4-head8"])
def test_the_hosts_part_of_a_token_is_timed(
    cpu_bench: CpuBench, monkeypatch: pytest.MonkeyPatch, precision: str, sampling: Sampling | None
) -> None:
    """All of the time, where nothing is waited for; wrong tokens are counted."""
    small = replace(load_config(SMALL), num_hidden_layers=1, vocab_size=320)
    monkeypatch.setattr(decode_host, "shape_config", lambda _: small)
    monkeypatch.setattr(cpu_bench, "library", lambda shape, precision: ReferenceKernels(small, precision))
    monkeypatch.setattr(decode_host, "RUNS", 2)
    monkeypatch.setattr(decode_host, "WARM_UP_SECONDS", 0)
    (row,) = decode_host.measure("a", "8b", precision, sampling, 2, 70, 3, cpu_bench)
    assert row["case"] == "a"
    assert row["unit"] == "us"
    assert row["error"] == 0
    assert 1 < row["spread"][0] <= row["ours"] <= row["spread"][1]
    monkeypatch.setattr(ReferenceKernels, "argmax", lambda self, logits, out: out.fill_(320))
    monkeypatch.setattr(ReferenceKernels, "sample", lambda self, logits, rows, out: out.fill_(320))
    assert decode_host.measure("a", "8b", precision, sampling, 2, 70, 1, cpu_bench)[0]["error"] == 2
