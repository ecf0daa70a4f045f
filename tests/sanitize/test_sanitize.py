"""The script that runs compute-sanitizer, against a stand-in for the tool, and its cases on stand-in kernels."""

from __future__ import annotations

import json
import subprocess
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from futransformer.build.compile import build_kernels
from futransformer.build.sass import count_instructions, occurrences
from futransformer.build.settings import BuildSettings
from futransformer.generator.decode_heuristics import decode_layers_spec
from futransformer.generator.plan import make_plan
from futransformer.generator.precision import PRECISIONS, Precision, get_precision
from futransformer.generator.specs.decode_layers import SETS, SLOT_K
from futransformer.library import KernelLibrary
from futransformer.ops.interface import Projection
from futransformer.reference import ReferenceOps
from tests.ops import models
from tests.ops import test_decode_layers as decode_layers
from tests.ops.stand_in import CPU, StandInKernel, at_address
from tests.ops.test_two_layers import TINY
from tests.sanitize import cases, merged, planted, remote, runner
from tests.sanitize.__main__ import EXPORTS, main, rows_of
from tests.sanitize.records import NO_KERNEL, parse

ALONE = (models.TAILS_NAME, models.COPIES_NAME, models.LAYERS_NAME)
FAKE = Path(__file__).parent / "fake_sanitizer.py"

MEMCHECK = """\
========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at gemm_o_sm90+0x60
=========     by thread (63,0,0) in block (0,0,0)
=========     Access to 0x7f00 is out of bounds
=========
========= Program hit cudaErrorLaunchFailure (error 719) on CUDA API call to cudaDeviceSynchronize.
=========
========= ERROR SUMMARY: 5 errors
"""
RACECHECK = """\
========= COMPUTE-SANITIZER
========= Warning: Race reported between Read access at gemm_o_sm90+0x90
=========     and Write access at gemm_o_sm90_longer+0xb0 [508 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)
"""


def test_records_name_their_kernels() -> None:
    log = parse(MEMCHECK, {"gemm_o_sm90", "gemm_o"})
    assert (log.errors, log.warnings) == (5, 0)
    assert [record.kernel for record in log.records] == ["gemm_o_sm90", NO_KERNEL]
    assert log.records[0].text.endswith("Access to 0x7f00 is out of bounds")
    log = parse(RACECHECK, {"gemm_o_sm90"})
    assert (log.errors, log.warnings) == (0, 1)
    assert [(record.kernel, record.warning) for record in log.records] == [("gemm_o_sm90", True)]


def test_a_log_without_a_summary_is_not_clean() -> None:
    done = json.dumps({"case": "a", "kernels": {"k": 2}, "seconds": 1.0, "failure": None})
    run = runner.judge("memcheck", "tails", done, parse("========= COMPUTE-SANITIZER\n", {"k"}))
    assert run.failures == ["memcheck/tails: the tool wrote no summary"]


def test_what_was_counted_not_printed_not_run_or_not_ended_is_told() -> None:
    lines = [
        {"begin": "a"},
        {"case": "a", "kernels": {"gemm_o_sm90": 2}, "seconds": 1.0, "failure": "AssertionError: two runs differ"},
        {"left_out": "b"},
        {"begin": "c"},
    ]
    log = parse(MEMCHECK, {"gemm_o_sm90", "argmax"})
    run = runner.judge("memcheck", "tails", "\n".join(map(json.dumps, lines)), log)
    assert run.tallies["gemm_o_sm90"] == runner.Tally(cases=1, launches=2, errors=1, seconds=1.0)
    assert run.tallies[NO_KERNEL].errors == 4
    assert run.messages[-1] == "memcheck/tails: 3 more errors, which it counted and did not print"
    assert run.failures == ["memcheck/tails/a: AssertionError: two runs differ", "memcheck/tails/c: did not end"]
    assert run.left_out == ["memcheck/tails/b"]


def test_a_kernel_counts_as_launched_whichever_export_it_was_launched_from(exports: Path) -> None:
    shared, own = {"name": "shared"}, {"name": "own"}
    for export, names in (("tails", [shared]), ("odd", [shared, own])):
        (exports / export / "manifest.json").write_text(json.dumps({"kernels": names}))
    runs = [runner.Run("memcheck", "tails"), runner.Run("memcheck", "odd"), runner.Run("racecheck", "odd")]
    runs[1].tallies["shared"].launches = 1
    assert runner.never_launched(runs, exports) == [
        "memcheck/odd: kernel own was not launched",
        "racecheck/odd: kernel own was not launched",
        "racecheck/odd: kernel shared was not launched",
    ]


@pytest.fixture
def exports(tmp_path: Path) -> Path:
    """Manifests are all that is read of the exports here."""
    for export in (planted.EXPORT, "tails", "odd"):
        (tmp_path / export).mkdir()
        kernels = [{"name": f"{export}_sm90_{index}"} for index in range(2)]
        if export == planted.EXPORT:
            kernels = [{"name": spec.name} for spec in planted.SPECS]
        (tmp_path / export / "manifest.json").write_text(json.dumps({"kernels": kernels}))
    return tmp_path


def sanitize(
    exports: Path, monkeypatch: pytest.MonkeyPatch, mode: str, *options: str
) -> tuple[int, dict[str, Any] | None]:
    monkeypatch.setenv("FAKE_SANITIZER", mode)
    output = exports / "results"
    arguments = [
        "--kernels",
        str(exports),
        "--output",
        str(output),
        "--compute-sanitizer",
        str(FAKE),
        "--commit",
        "abc",
    ]
    status = main([*arguments, "--export", "tails", "--export", "odd", *options])
    file = output / "sanitize.json"
    return status, json.loads(file.read_text()) if file.exists() else None


def test_chosen_kernels_are_put_into_earlier_results(exports: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of others keep their figures, and lines about what has been run since are gone."""
    status, earlier = sanitize(exports, monkeypatch, "hazard")
    assert (status, earlier is not None) == (1, True)
    assert earlier is not None
    earlier |= {"commit": "old", "seconds": 100.0}
    earlier["left_out"] = [
        "racecheck/odd_sm90_1: planned since, no time",
        "racecheck/odd: kernel tails_sm90_1 was not launched",
        "memcheck/odd/all",
        "synccheck/odd/another",
        "all tools/tails: had no case",
        "all tools/odd: had no case",
    ]
    (exports / "results" / "sanitize.json").write_text(json.dumps(earlier))
    status, content = sanitize(exports, monkeypatch, "clean", "--only", "odd_*_[01]", "--merge")
    assert status == 0
    assert content is not None
    assert content["commit"] == "old"
    assert content["seconds"] >= 100
    rows = {row["case"]: row for row in content["rows"]}
    assert list(rows) == sorted(row["case"] for row in earlier["rows"])
    told = {case for case, row in rows.items() if row.get("commit") == "abc"}
    assert told == {case for case in rows if "/odd_sm90_" in case}
    assert rows["sanitize/racecheck/tails_sm90_0"] == next(
        row for row in earlier["rows"] if row["case"] == "sanitize/racecheck/tails_sm90_0"
    )
    assert rows["sanitize/racecheck/odd_sm90_0"]["errors"] == 0, "it was a race before"
    assert [message for message in earlier["messages"] if "odd_sm90_0" not in message] == content["messages"]
    assert content["left_out"] == [
        "racecheck/odd: kernel tails_sm90_1 was not launched",
        "synccheck/odd/another",
        "all tools/tails: had no case",
    ]
    assert content["planted"] == earlier["planted"]


def test_a_row_that_is_put_in_says_where_it_was_measured_if_elsewhere() -> None:
    of = {"commit": "a", "dirty": False, "date": "then", "card": "one", "driver": "1", "version": "2", "versions": {}}
    nothing: dict[str, Any] = {"planted": [], "messages": [], "failures": [], "left_out": [], "seconds": 1.0}
    earlier = {**of, **nothing, "rows": [{"case": "a"}, {"case": "c"}]}
    now = {**of, "commit": "b", "date": "now", "driver": "3", **nothing, "rows": [{"case": "b", "launches": 1}]}
    content = merged.into(earlier, now, [])
    put_in = {"case": "b", "launches": 1, "commit": "b", "dirty": False, "date": "now", "driver": "3"}
    assert content == earlier | {"rows": [{"case": "a"}, put_in, {"case": "c"}], "seconds": 2.0}


def test_only_the_chosen_kernels_are_missed(exports: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An export without any is not begun; what was launched beside them has no row unless something was said of it."""
    status, content = sanitize(exports, monkeypatch, "clean", "--only", "*_sm90_1", "--only", "odd_*_3", "--merge")
    assert status == 0
    assert content is not None, "there was nothing to be merged with"
    assert len(content["rows"]) == 3 * 2
    assert {row["case"].rpartition("/")[2] for row in content["rows"]} == {"tails_sm90_1", "odd_sm90_1"}
    logs = exports / "results" / "sanitize-logs"
    sanitize(exports, monkeypatch, "clean", "--only", "odd_*")
    assert list(logs.glob("memcheck-odd-*.log"))
    assert not list(logs.glob("memcheck-tails-*.log"))
    run = runner.Run("memcheck", "odd")
    run.tallies["chosen"].launches = run.tallies["beside"].launches = 1
    run.tallies["wrong"].errors = 1
    assert [row["case"] for row in rows_of([run], ["chosen"])] == [
        "sanitize/memcheck/chosen",
        "sanitize/memcheck/wrong",
    ]


def test_kernels_that_no_export_has(
    exports: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sanitize(exports, monkeypatch, "clean", "--only", "none_*") == (2, None)
    assert "has a kernel like none_*" in capsys.readouterr().out


def test_a_case_is_chosen_by_the_kernels_that_it_covers() -> None:
    case = cases.Case("a case", lambda: None, ("gemm_o_sm90/M=127", "gemm_head_sm90 without logits"))
    assert [case.is_chosen(only) for only in ([], ["*_o_sm90"], ["no", "gemm_head_sm90"], ["*127"], ["logits"])] == [
        *(True, True, True),
        *(False, False),
    ]


def test_clean(exports: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    status, content = sanitize(exports, monkeypatch, "clean")
    assert status == 0
    assert content is not None
    assert (content["subject"], content["version"], content["commit"]) == ("sanitize", "2025.3.1.0", "abc")
    assert len(content["rows"]) == 3 * 2 * 2
    assert not any(row["errors"] or row["warnings"] for row in content["rows"])
    found = {row["kernel"]: row["errors"] for row in content["planted"] if row.get("required")}
    assert found == {"planted_write_past_end": 1, "planted_shared_race": 1, "planted_barrier_without_init": 1}
    assert "racecheck, 4, 4, 0, 0, 2.0" in capsys.readouterr().out


def test_a_hazard_is_told_by_kernel(exports: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status, content = sanitize(exports, monkeypatch, "hazard")
    assert status == 1
    assert content is not None
    errors = {row["case"]: row["errors"] for row in content["rows"] if row["errors"]}
    assert errors["sanitize/racecheck/tails_sm90_0"] == errors["sanitize/racecheck/odd_sm90_0"] == 1
    assert errors["sanitize/racecheck/(no kernel)"] == 2 * 2, "counted, not printed"
    assert any("Race reported" in message for message in content["messages"])


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("refused", "cannot run here: memcheck/(no kernel): Error: Device not supported"),
        ("blind", "cannot run here: memcheck does not find planted_write_past_end; it says: nothing"),
    ],
)
def test_a_tool_that_sees_nothing_is_no_proof(
    exports: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], mode: str, message: str
) -> None:
    assert sanitize(exports, monkeypatch, mode) == (2, None)
    assert message in capsys.readouterr().out


def test_a_missing_program(exports: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--kernels", str(exports), "--output", str(exports), "--compute-sanitizer", str(exports / "none")]
    assert main(arguments) == 2
    assert "cannot run here: there is no " in capsys.readouterr().out


def test_time_that_runs_out(exports: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the beginning of a case: a process may take longer to start than there is time."""
    wait = subprocess.Popen.wait

    def wait_in_a_case(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        if timeout is not None:
            assert isinstance(process.args, list)
            (log,) = (word.partition("=")[2] for word in process.args if str(word).startswith("--log-file="))
            said = Path(log).with_suffix(".out")
            while process.poll() is None and "endless" not in said.read_text():
                time.sleep(0.01)
        return wait(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", wait_in_a_case)
    status, content = sanitize(exports, monkeypatch, "hang", "--seconds", "1", "--tool", "memcheck")
    assert status == 1
    assert content is not None
    assert "memcheck/tails/endless: did not end" in content["failures"]
    assert any(failure.startswith("memcheck/tails: killed after") for failure in content["failures"])


# The cases, with the reference in the kernels' place


class Answering:
    """A driver's kernel that the reference plays, and that notes the tensors it was given."""

    def __init__(self, spec: Any, record: Any, cubin: bytes, device: torch.device) -> None:
        self.spec, self.device, self.sm_count = spec, device, 132
        self.record = SimpleNamespace(params=spec.params)
        self._kernel = StandInKernel(spec, ReferenceOps(TINY, copy=getattr(spec, "copy", None)))

    def launch(self, grid: tuple[int, int, int], **arguments: Any) -> None:
        given.append(arguments)
        self._kernel.launch(grid, **arguments)


given: list[dict[str, Any]] = []


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> None:
    given.clear()
    monkeypatch.setattr(remote, "Kernel", Answering)
    monkeypatch.setattr(remote, "require_hopper", lambda: CPU)
    monkeypatch.setattr(remote, "tensor_map_2d", lambda tensor, *_: tensor)
    monkeypatch.setattr(remote, "tensor_map_column_groups", lambda tensor, *_: tensor)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


EVERY_ROW = {**PRECISIONS, **{name: get_precision(name) for name in ("bf16-kv4", "fp8-int4-g32-asym-kv8-kv4-min")}}


@pytest.mark.parametrize("precision", EVERY_ROW.values(), ids=list(EVERY_ROW))
@pytest.mark.usefixtures("answering")
def test_every_kernel_of_a_model_is_launched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, precision: Precision
) -> None:
    plan = make_plan(TINY, precision)
    built: Any = {spec.name: (None, b"") for spec in plan.specs()}
    launches: Counter[str] = Counter()
    ops = remote.remote_library(TINY, precision, plan, built, monkeypatch, lambda name: launches.update([name]))
    covers: dict[str, set[str]] = {case.name: set(case.covers) for case in cases.model_cases(ops)}
    lines = [line for line in cases.run_cases(cases.model_cases(ops), launches, 300, tmp_path) if "case" in line]
    assert [line["failure"] for line in lines] == [None] * len(lines)
    assert len(lines) == len(covers)
    names = {spec.name for spec in plan.specs()}
    for line in lines:
        launched = set(cast(dict[str, int], line["kernels"]))
        assert covers[cast(str, line["case"])] & names <= launched
        names -= launched
    assert not names
    assert not list(cases.run_cases(cases.model_cases(ops), launches, 300, tmp_path)), "somebody has claimed all of it"


def test_a_case_for_which_there_is_no_time_is_told_once(tmp_path: Path) -> None:
    never: list[cases.Case] = [cases.Case("slow", lambda: pytest.fail("there was no time"), ("one", "two"))]
    assert [*cases.run_cases(never, Counter(), 0, tmp_path)] == [{"left_out": "slow"}]
    assert [*cases.run_cases(never, Counter(), 0, tmp_path)] == []


def test_every_kernel_of_the_exports_has_a_case() -> None:
    of_models = [export for export in EXPORTS if export not in ALONE]
    covered: set[str] = set()
    for export in of_models:
        plan, config = models.tested_plan(export), models.model_config(export)
        ops: Any = SimpleNamespace(plan=plan, config=config, _attention_decode=None)
        covered |= {kernel for case in cases.model_cases(ops) for kernel in case.covers}
    for export in of_models:
        assert {spec.name for spec in models.specs_of(export)} <= covered


@pytest.mark.parametrize("file", ["Makefile", "CONTRIBUTING.md"])
def test_the_exports_that_are_built_are_those_that_are_run(file: str) -> None:
    text = (Path(__file__).parents[2] / file).read_text()
    command = next(line for line in text.replace("\\\n", " ").splitlines() if " tails copies layers " in line)
    assert sorted(command.split()[command.split().index("tails") :]) == sorted(EXPORTS)


@pytest.mark.parametrize("name", models.WHOLE)
def test_every_prefill_kernel_has_a_number_of_rows(name: str) -> None:
    plan = models.tested_plan(name)
    ops: Any = SimpleNamespace(plan=plan)
    for op, by_rows in plan.prefill.items():
        rows = cases.rows_of_each_kernel(ops, cast(Projection, op))
        served = {next(spec for most, spec in by_rows.items() if count <= most) for count in rows.values()}
        assert served == set(by_rows.values()), op


@pytest.mark.usefixtures("answering")
def test_a_launch_sees_exactly_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing behind an output, rows apart where they stood apart, and one copy of a tensor that is given twice."""
    plan = make_plan(TINY, "bf16")
    built: Any = {spec.name: (None, b"") for spec in plan.specs()}
    ops = remote.remote_library(TINY, get_precision("bf16"), plan, built, monkeypatch, lambda _: None)
    logits = torch.randn(3, 320)[:, :300]
    assert ops.argmax(logits).tolist() == logits.argmax(1).tolist()
    seen: Tensor = given[-1]["logits"]
    assert (seen.stride(0), seen.untyped_storage().nbytes()) == (320, 4 * (2 * 320 + 300))
    assert seen.data_ptr() != logits.data_ptr()
    x, room = torch.zeros(2, TINY.heads.q_features).bfloat16(), torch.zeros(9, TINY.hidden_size).bfloat16()
    weight = ops.pack("o", "prefill", torch.zeros(TINY.hidden_size, TINY.heads.q_features))
    ops.o("prefill", x, weight, room[:2])
    residual, out = given[-1]["residual"], given[-1]["out"]
    assert residual.data_ptr() == out.data_ptr() != room.data_ptr()
    assert out.untyped_storage().nbytes() == 2 * 2 * TINY.hidden_size


# The launch for all layers, whose tensors are addresses in a table

NARROW = replace(TINY, name="narrow", intermediate_size=1088)  # a row tile of gate_up for each of 132 blocks


@pytest.fixture
def narrow_layers(monkeypatch: pytest.MonkeyPatch, answering: None) -> tuple[KernelLibrary, Counter[str]]:
    """Layers so narrow that no plan has the launch, and how often it was made."""
    precision = get_precision("int4-g32-asym-kv4")
    config = NARROW
    spec = decode_layers_spec(config.heads, config.hidden_size, config.intermediate_size, precision, least_weights=0)
    assert spec is not None
    launches: Counter[str] = Counter()
    built: Any = {spec.name: (None, b"")}
    ops = remote.layers_library(config, precision, spec, built, monkeypatch, lambda name: launches.update([name]))
    return ops, launches


def test_all_layers_of_narrow_ones(narrow_layers: tuple[KernelLibrary, Counter[str]]) -> None:
    ops, launches = narrow_layers
    cases.check_layers(lambda: ops)
    assert list(launches.values()) == [2 + 2 * len(cases.CONTEXTS)]


def test_a_table_names_copies_that_are_written_back(narrow_layers: tuple[KernelLibrary, Counter[str]]) -> None:
    ops, _ = narrow_layers
    layers = decode_layers.Layers(ops, 130)
    layers.launch(layers.bound())
    decode_layers.check_new_token(layers)
    (launch,) = (arguments for arguments in given if "layers" in arguments)
    table: Tensor = launch["layers"]
    on_host = [tensor for index in range(2) for tensor in held(layers, index)]
    assert table.shape == (2, 7)
    assert not {tensor.data_ptr() for tensor in on_host} & set(table.flatten().tolist())
    assert len(set(table.flatten().tolist())) == 2 * 7


@pytest.mark.parametrize("wrong", ["o", "x", "k_pages", "kv_copy"])
def test_all_layers_wrong(
    narrow_layers: tuple[KernelLibrary, Counter[str]], monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    """A weight that is another layer's, x that is left alone, and writes to places that are nobody's are found."""
    ops, _ = narrow_layers
    walk = StandInKernel._walk

    def faulty(kernel: StandInKernel, spec: Any, *, layers: Tensor, x: Tensor, **arguments: Any) -> None:
        table = layers.clone()
        if wrong == "o":
            table[1, 1] = table[0, 1]
        before = x.clone()
        walk(kernel, spec, layers=table, x=x, **arguments)
        if wrong == "x":
            x.copy_(before)
        elif wrong in ("k_pages", "kv_copy"):
            page = int(arguments["block_table"][0, 0])  # not the newest token's
            size = spec.copy.page_bytes(64) if wrong == "kv_copy" else 64 * 2 * 64
            at_address(int(table[1, 4 if wrong == "k_pages" else 6]), page + 1, 2, size)[page, 1, -1] ^= 1

    monkeypatch.setattr(StandInKernel, "_walk", faulty)
    with pytest.raises(AssertionError):
        cases.check_layers(lambda: ops)


def held(layers: decode_layers.Layers, index: int) -> list[Tensor]:
    """What a layer's row of the table names."""
    weights = layers.weights.layers[index]
    of_ops = [weight["decode"] for weight in (weights.qkv, weights.o, weights.gate_up, weights.down)]
    return [*of_ops, *layers.pages.layer(index), layers.pages.copy_layer(index)]


@pytest.mark.parametrize("name", models.LAYERS_ALONE)
def test_the_launch_alone_is_that_of_its_plan_if_it_has_one(name: str) -> None:
    config, precision = models.LAYERS_ALONE[name]
    planned = make_plan(config, precision).decode_layers
    assert planned in (None, models.LAYERS_SPECS[name])
    assert (planned is None) == (name not in ("8b", "two-windows"))


def test_every_way_through_a_layer_is_among_those_alone() -> None:
    specs = models.LAYERS_SPECS.values()
    assert {spec.group_k for spec in specs} == {128, 64, 32}
    assert {(spec.group_k, spec.zero_points) for spec in specs} >= {(128, False), (128, True), (32, True)}
    assert {spec.heads.head_dim for spec in specs} == {64, 128}
    assert {spec.heads.group for spec in specs} == {1, 2, 3, 4, 8}
    assert {spec.copy.suffix for spec in specs} == {"-kv4", "-kv4-head", "-kv4-h0"}
    ks = [[projection.k for projection in spec.projections] for spec in specs]
    assert {all(k % SLOT_K == 0 for k in of_spec) for of_spec in ks} == {True, False}
    assert {spec.hidden_size % (SETS * SLOT_K) == 0 for spec in specs} == {True, False}
    assert {max(of_spec) > spec.window_k for of_spec, spec in zip(ks, specs, strict=True)} == {True, False}


# The planted kernels


def test_every_tool_has_a_fault_that_it_must_find() -> None:
    assert {fault.tool for fault in planted.FAULTS if fault.required} == set(runner.TOOLS)


@pytest.mark.compile
def test_planted_faults_survive_the_compiler() -> None:
    settings = BuildSettings.from_environment()
    records = build_kernels(planted.SPECS, settings=settings, render=planted.render)
    code = {record.name.removeprefix("planted_"): count_instructions(record.cubin, settings) for record in records}

    def count(fault: str, instruction: str) -> int:
        return occurrences(code[fault], instruction)

    assert count("shared_race", "STS") == count("shared_race", "LDS") == 1
    assert count("shared_race", "BAR") == 0
    assert count("divergent_barrier", "BAR") == 1
    assert count("barrier_without_init", "SYNCS.ARRIVE") == 1
    assert count("barrier_without_init", "SYNCS.EXCH") == 0
    for fault in ("none", "copy_past_end", "unawaited_copy"):
        assert count(fault, "UBLKCP") > 0
        assert count(fault, "LDS") > 0
