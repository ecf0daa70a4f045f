"""The profile of a decode step: what is recorded, timed and told, on the reference and a pretended device."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from futransformer import library
from futransformer.bench import ceilings, profile, profile_table, report, results
from futransformer.bench.harness import Harness
from futransformer.bench.profile import StepProfile, profile_step
from futransformer.bench.profile_table import STEP, SUM
from futransformer.bench.shapes import decode_step_work
from futransformer.blocks import DecodePass
from futransformer.cli import main
from futransformer.cli.profile import as_json, as_text
from futransformer.driver import Kernel
from futransformer.generator.config import load_config
from futransformer.generator.errors import UnsupportedError
from futransformer.generator.plan import make_plan
from futransformer.generator.precision import get_precision
from futransformer.ops.interface import LayerPages, Ops, Stream
from tests.bench.conftest import CEILINGS, ReferenceKernels

TINY = replace(load_config("smollm2-135m"), num_hidden_layers=2, vocab_size=320)
DECODE_LAYERS = make_plan(load_config("llama-3.1-8b"), "int4-kv4").decode_layers
LAYER = ["qkv", "attention", "o", "gate_up", "down"]

Output = pytest.CaptureFixture[str]


class HostClock:
    """Nothing runs behind the host's back."""

    def mark(self) -> float:
        """See Clock.mark."""
        return time.perf_counter()

    def seconds(self, first: float, second: float) -> float:
        """See Clock.seconds."""
        return second - first

    def idle(self, seconds: float) -> None:
        """See Clock.idle."""


class OperationsClock(HostClock, TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Time passes with PyTorch's operations alone, a tenth of a millisecond each, on a busy machine too."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))

    def mark(self) -> float:
        """See Clock.mark."""
        return self.count * 1e-4


def profiled(precision: str = "bf16", *, sampled: bool = False) -> StepProfile:
    ops: Any = ReferenceKernels(TINY, precision)
    with OperationsClock() as clock:
        return profile_step(TINY, ops, precision, 2, 70, Harness(clock), 4.0, sampled=sampled, seconds=0.01)


@pytest.mark.usefixtures("cpu_bench")
@pytest.mark.parametrize("precision", ["bf16", "int4-head8-kv4", "bf16-fp8-kv8"])
def test_every_launch_is_in_one_stage_and_every_byte_counted(precision: str) -> None:
    found = profiled(precision)
    launches = {stage.name: stage.launches for stage in found.stages}
    assert launches == {"begin": 1, "embedding": 1} | dict.fromkeys(LAYER, 2) | {"head, choice": 1, "end": 1}
    assert sum(stage.bytes for stage in found.stages) == decode_step_work(TINY, 2, 71, precision).bytes
    assert found.step_bytes == decode_step_work(TINY, 2, 71, precision).bytes
    assert all(stage.seconds > 0 for stage in found.stages)
    assert found.step_seconds > max(stage.seconds for stage in found.stages)
    assert found.apart_seconds is None, "on the reference nothing overlaps"


@pytest.mark.usefixtures("cpu_bench")
def test_sampling_is_a_stage() -> None:
    stages = [stage.name for stage in profiled(sampled=True).stages]
    assert stages == ["begin", "embedding", *LAYER, "head", "sample", "end"]


@pytest.mark.usefixtures("cpu_bench")
def test_a_step_that_is_repeated_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention reads the same lengths every time, finite results among them."""
    lengths = set()
    real = ReferenceKernels.attention_decode

    def watched(self: ReferenceKernels, q: Any, k: Any, v: Any, table: Any, seqlens_k: Any, **options: Any) -> Any:
        lengths.add(tuple(seqlens_k.tolist()))
        out = real(self, q, k, v, table, seqlens_k, **options)
        assert out.isfinite().all()
        return out

    monkeypatch.setattr(ReferenceKernels, "attention_decode", watched)
    profiled()
    assert lengths == {(71, 71)}


def test_a_table_tells_what_overlap_hides() -> None:
    stages = (
        profile.Stage("qkv", 2, 4e6, 2e-6, from_l2=False),
        profile.Stage("attention", 2, 2.4e6, 4e-6, from_l2=True),
        profile.Stage("end", 1, 0.0, 1e-6, from_l2=False),
    )
    text = as_text(StepProfile(stages, 5e-6, 8e-6, 6e6, 4.0))
    lines = [line.split() for line in text.splitlines()]
    assert lines[1] == ["qkv", "2", "4.0", "1.0", "2.0", "50", "40.0"]
    assert lines[2] == ["attention", "2", "2.4", "2.0", "4.0", "15*", "80.0"]
    assert lines[3] == ["end", "1", "1.0", "1.0", "20.0"]
    assert lines[4][-4:] == ["6.0", "7.0", "21", "140.0"]
    assert lines[5][-4:] == ["6.0", "5.0", "30", "100.0"]
    assert lines[6][-4:] == ["6.0", "8.0", "19", "160.0"]
    assert "hides 2 us of the sum" in text
    assert "fit L2" in text
    longer = as_text(StepProfile(stages[:1], 5e-6, None, 6e6, 4.0))
    assert "3 us longer than the sum" in longer
    assert "fit L2" not in longer
    assert "apart" not in longer


@pytest.mark.usefixtures("cpu_bench")
def test_the_command_prints_and_draws(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Output) -> None:
    monkeypatch.setattr(library, "load_kernels", lambda config, precision, folder: ReferenceKernels(config))
    monkeypatch.setattr(ceilings, "measure_ceilings", lambda *_: CEILINGS)
    monkeypatch.setattr("futransformer.bench.harness.CudaClock", HostClock)
    config = write_config(tmp_path)
    picture = tmp_path / "step.png"
    command = ["profile", str(config), "--batch", "2", "--context", "70"]
    assert main([*command, "--plot", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert [line.split()[0] for line in printed.splitlines()[1:8]] == ["begin", "embedding", *LAYER]
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert main([*command, "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert [stage["name"] for stage in content["stages"]][-2:] == ["head, choice", "end"]
    assert content["sum_seconds"] == pytest.approx(sum(stage["seconds"] for stage in content["stages"]))
    folder = tmp_path / "results"
    for batch in ("2", "3"):
        assert main([*command, "--batch", batch, "--output", str(folder), "--commit", "abc"]) == 0
    content = json.loads((folder / "profile.json").read_text())
    assert len(content["rows"]) == 2 * (2 + len(LAYER) + 2 + 2)
    (page,) = report.write(folder, tmp_path)
    lines = page.read_text().splitlines()
    assert (page.name, lines[4]) == ("decode.md", "## Where a step's time goes")
    (first,) = [index for index, line in enumerate(lines) if "/B=2/ctx=70 | begin |" in line]
    told = [line.split(" | ")[1].strip() for line in lines[first + 1 : first + 11]]
    assert told == ["embedding", *LAYER, "head, choice", "end", SUM, STEP]
    assert "/B=3/ctx=70 | begin |" in lines[first + 11]
    assert main(["profile", str(config), "--context", "512"]) == 2
    assert "--context 512 leaves no token to write" in capsys.readouterr().err
    assert main(["profile", str(config), "--batch", "0"]) == 2


def write_config(folder: Path) -> Path:
    content = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 320,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "eos_token_id": 2,
        "bos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(content))
    return folder / "config.json"


@pytest.mark.gpu
def test_a_profile_of_the_small_model(request: pytest.FixtureRequest) -> None:
    from futransformer.bench.harness import CudaClock  # noqa: PLC0415
    from futransformer.driver import hopper_problem  # noqa: PLC0415

    problem = hopper_problem()
    if problem is not None:
        pytest.skip(problem)
    exports: Path | None = request.config.getoption("--kernels")
    config = load_config("smollm2-135m")
    ops = library.load_kernels(config, "bf16", folder=exports / "smollm2-135m" if exports else None)
    for sampled in (False, True):
        found = profile_step(config, ops, "bf16", 8, 1000, Harness(CudaClock()), 4.5, sampled=sampled, seconds=0.2)
        assert found.apart_seconds is not None
        assert 0 < found.step_seconds < 1.1 * found.apart_seconds
        assert as_json(found)["stages"]
        assert all(0 < stage.seconds < found.apart_seconds for stage in found.stages)


def test_gaps_are_of_the_launch_and_of_what_is_not_the_head() -> None:
    """A launch with copies under way for 3/4 and 1/2 of its blocks' clocks; a step of three parts."""

    class Clocked:
        clocks = torch.tensor([[400, 300], [200, 100]])

        def __init__(self, *bound: object) -> None:
            assert bound == (TINY, "kernel", ["layers"], "cache")
            self.runs = 0

        def __call__(self, *args: object) -> None:
            assert args == (1, 2, 3)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profile, "DecodeLayers", Clocked)
        standing = SimpleNamespace(bound=(["layers"], "cache"), calls={"layers": [partial(print, 1, 2, 3)]})
        share = profile._share_without_copies(TINY, cast(Kernel, "kernel"), cast(Any, standing))
    assert share == (1 / 4 + 1 / 2) / 2
    stages = (profile.Stage("layers", 1, 6e6, 3e-6, from_l2=False),)
    text = as_text(StepProfile(stages, 5e-6, 8e-6, 6e6, 4.0, gap_seconds=1.25e-6))
    assert text.splitlines()[5].split()[-2:] == ["1.2", "25.0"]
    assert "without a bulk copy" in text.splitlines()[5]


@pytest.mark.usefixtures("cpu_bench")
def test_gaps_of_a_step_of_single_kernels_are_refused() -> None:
    ops: Any = ReferenceKernels(TINY, "bf16")
    with pytest.raises(UnsupportedError, match="a step of 2 x 70 tokens is one of single kernels"):
        profile_step(TINY, ops, "bf16", 2, 70, Harness(HostClock()), 4.0, clocked=cast(Kernel, "kernel"))


def test_a_step_is_replaced_as_a_whole(tmp_path: Path) -> None:
    """Its stages may be others than those of before; other steps stay."""

    def told(case: str, commit: str) -> dict[str, Any]:
        where = {"card": "H200", "commit": commit, "dirty": False, "date": "", "driver": "", "versions": {}}
        return results.document("profile", where, [{"case": case, "seconds": 1.0}], precision="bf16")

    for case in ("profile/m/B=1/ctx=64/qkv", "profile/m/B=2/ctx=64/qkv", "profile/m/B=1/ctx=64/layers"):
        content = told(case, "a" if case.endswith("qkv") else "b")
        path = results.merge(tmp_path, content, profile_table.step_of)
    rows = {row["case"]: row["commit"] for row in json.loads(path.read_text())["rows"]}
    assert rows == {"profile/m/B=1/ctx=64/layers": "b", "profile/m/B=2/ctx=64/qkv": "a"}


def test_gaps_are_asked_for_where_a_build_can_tell(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Output
) -> None:
    for precision, batch, plan in (("bf16", "1", None), ("int4-kv4", "2", DECODE_LAYERS)):
        ops = SimpleNamespace(
            plan=SimpleNamespace(decode_layers=plan), precision=get_precision(precision), describe=str
        )
        monkeypatch.setattr(library, "load_kernels", lambda *_, ops=ops, **__: ops)
        command = ["profile", str(write_config(tmp_path)), "--precision", precision, "--batch", batch]
        assert main([*command, "--context", "70", "--gaps"]) == 2
        assert f"decodes a batch of {batch} by single kernels" in capsys.readouterr().err


def test_layers_in_one_launch_are_a_stage() -> None:
    """Of a backend that has them: noted once, served as it serves."""

    class Walk:
        def serves(self, rows: int, most_keys: int) -> bool:
            return rows == 1

        def __call__(self, stream: object, rows: object, rope_table: object) -> object:
            return stream

    standing = profile._StandingOps(cast(Ops, SimpleNamespace(bind_layers=lambda *_: Walk())))
    walk = standing.bind_layers([], cast(LayerPages, None))
    assert walk is not None
    assert (walk.serves(1, 64), walk.serves(2, 64)) == (True, False)
    stream = cast(Stream, object())
    assert walk(stream, cast(DecodePass, None), torch.empty(0)) is stream
    assert [len(calls) for calls in standing.calls.values()] == [1]
    assert set(standing.calls) == {"layers"}
    config = load_config("llama-3.1-8b")
    parts = [profile._stage_bytes(config, op, 1, 1024, "int4-kv4") for op in ("qkv", "o", "gate_up", "down")]
    attention = profile._stage_bytes(config, "attention_decode", 1, 1024, "int4-kv4")
    assert profile._stage_bytes(config, "layers", 1, 1024, "int4-kv4") == pytest.approx(sum(parts) + attention)
