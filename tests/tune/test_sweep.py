"""What a sweep compiles, exports and reads back; which table plans what; and what the commands refuse."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from futransformer import card as card_module
from futransformer import driver, tables
from futransformer.build.export import load_exported
from futransformer.build.load import LoadedKernels
from futransformer.build.manifest import ModelManifest, read_model_manifest, write_model_manifest
from futransformer.build.settings import BuildSettings
from futransformer.card import Card
from futransformer.cli import main, tune
from futransformer.driver import hopper_problem
from futransformer.generator.config import load_config
from futransformer.generator.errors import ArtifactError, BuildError, ConfigError, InputError
from futransformer.generator.plan import kernel_specs
from futransformer.generator.schedules import ScheduleTable, schedule_of, shipped_table
from futransformer.generator.search import BUCKETS
from futransformer.generator.specs import KernelSpec
from futransformer.tables import exported_table, recorded, schedule_table, tuned_path, write_table
from futransformer.tune import sweep as sweep_module
from futransformer.tune.measure import Outcome, Result
from futransformer.tune.sweep import CANDIDATES, OPS, Sweep, build, export_sweep, load_sweep, make_sweep

SMALL = load_config("smollm2-135m")
HERE = ScheduleTable("NVIDIA H100 PCIe", 114, shipped_table().schedules)
H100 = Card("NVIDIA H100 PCIe", 114)


def test_a_sweep_has_candidates_for_every_place_and_none_is_the_incumbent() -> None:
    sweep = make_sweep(SMALL, "bf16", HERE, OPS, 5)
    assert [(place.op, place.rows) for place in sweep.candidates] == [(op, rows) for op in OPS for rows in BUCKETS]
    for place, specs in sweep.candidates.items():
        assert 4 <= len(specs) <= 5
        assert schedule_of(sweep.incumbent(place)) not in [schedule_of(spec) for spec in specs]
    assert set(kernel_specs(SMALL, "bf16", HERE)) < set(sweep.specs())
    assert len({spec.name for spec in sweep.specs()}) == len(sweep.specs())


@pytest.mark.parametrize(
    ("ops", "count", "message"),
    [
        (["q"], 8, "--ops must name some of qkv, o, gate_up, down, not q"),
        ([], 8, "not nothing"),
        (["o"], 0, "--candidates must be at least 1, not 0"),
    ],
)
def test_what_no_sweep_can_be_made_of(ops: list[str], count: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_sweep(SMALL, "bf16", HERE, ops, count)
    with pytest.raises(InputError, match="kernels of fp8-promoted are not tuned"):
        make_sweep(SMALL, "fp8-promoted", HERE, ["o"], 8)
    with pytest.raises(InputError, match=r"kernels of fp8-kv8-kv4-min are not tuned: .* tune fp8-kv8, whose"):
        make_sweep(SMALL, "fp8-kv8-kv4-min", HERE, ["qkv"], 8)


@pytest.fixture
def settings(tmp_path: Path) -> BuildSettings:
    return BuildSettings(cache_root=tmp_path / "cache", jobs=2)


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Kernels whose cubin is their name; 256-row tiles spill. Returns the names that were asked for."""
    import hashlib  # noqa: PLC0415

    from futransformer.build.manifest import KernelRecord  # noqa: PLC0415
    from futransformer.build.ptxas import Resources  # noqa: PLC0415
    from futransformer.generator.specs import ABI_VERSION  # noqa: PLC0415

    asked: list[str] = []

    def built(specs: Any, **_: Any) -> tuple[KernelRecord, ...]:
        return tuple(record(spec) for spec in specs)

    def record(spec: KernelSpec) -> KernelRecord:
        asked.append(spec.name)
        if "_256x" in spec.name:
            raise BuildError(f"kernel {spec.name}: spills 8 bytes\nThe full log: somewhere")
        cubin = tmp_path / f"{len(asked)}-{hashlib.sha256(spec.name.encode()).hexdigest()[:8]}.cubin"
        cubin.write_text(spec.name)
        return KernelRecord(
            name=spec.name,
            template=spec.template,
            params=spec.params,
            threads=spec.threads,
            cluster=spec.cluster,
            shared_bytes=spec.shared_bytes,
            resources=Resources(**dict.fromkeys(Resources.__dataclass_fields__, 0)),
            cubin=cubin,
            cubin_sha256=hashlib.sha256(spec.name.encode()).hexdigest(),
            compile_seconds=1.0,
            nvcc_version="13.0.88",
            abi_version=ABI_VERSION,
            source_key="source",
            toolchain_key="chain",
        )

    monkeypatch.setattr(sweep_module, "build_kernels", built)
    return asked


def test_a_candidate_that_spills_is_left_out_and_the_rest_built(pretended: list[str], settings: BuildSettings) -> None:
    sweep = make_sweep(SMALL, "bf16", HERE, ["down"], 20)
    records, refused = build(sweep, settings, print)
    assert refused
    assert all(reason == f"kernel {name}: spills 8 bytes" for name, reason in refused.items())
    assert {record.name for record in records} | set(refused) == {spec.name for spec in sweep.specs()}
    assert len(pretended) == len(sweep.specs())


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_an_exported_sweep_is_read_back(
    pretended: list[str], settings: BuildSettings, tmp_path: Path, precision: str
) -> None:
    sweep = make_sweep(SMALL, precision, HERE, ["qkv", "down"], 6)
    records, refused = build(sweep, settings, print)
    kept = sweep.without(frozenset(refused))
    export_sweep(kept, records, tmp_path / "export")
    again = load_sweep(tmp_path / "export", SMALL, precision)
    assert again == kept
    other = {"bf16": "fp8", "fp8": "bf16"}[precision]
    with pytest.raises(ConfigError, match=rf"in {precision}, not of smollm2-135m in {other}; write one"):
        load_sweep(tmp_path / "export", SMALL, other)
    assert {record.name for record in load_exported(tmp_path / "export").kernels} >= {s.name for s in again.specs()}
    assert exported_table(tmp_path / "export") == HERE, "and it serves as an export of the model"
    with pytest.raises(
        ConfigError, match=rf"is a sweep of smollm2-135m in {precision}, not of llama-3.1-8b in {precision}; write one"
    ):
        load_sweep(tmp_path / "export", load_config("llama-3.1-8b"), precision)
    (tmp_path / "export" / CANDIDATES).write_text('{"config": "smollm2-135m", "precision": "bf16"}')
    with pytest.raises(ConfigError, match="rows must be a list"):
        load_sweep(tmp_path / "export", SMALL, "bf16")
    (tmp_path / "export" / CANDIDATES).unlink()
    with pytest.raises(ArtifactError, match="not of a sweep; write one with: futransformer tune smollm2-135m --build"):
        load_sweep(tmp_path / "export", SMALL, "bf16")


# Which table plans


def test_an_export_says_its_table_unless_it_is_the_shipped_one(tmp_path: Path) -> None:
    for table in (shipped_table(), HERE):
        write_model_manifest(ModelManifest("a", "bf16", (), recorded(table)), tmp_path / "manifest.json")
        assert ("table" in json.loads((tmp_path / "manifest.json").read_text())) == (table is HERE)
        assert exported_table(tmp_path) == table
    content = json.loads((tmp_path / "manifest.json").read_text())
    content["table"]["rows"] = 7
    (tmp_path / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(ArtifactError, match="rows must be a list"):
        read_model_manifest(tmp_path / "manifest.json")


def test_a_tuned_table_is_taken_for_its_card_alone(
    settings: BuildSettings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tables, "current_card", lambda _: H100)
    assert schedule_table(settings) == shipped_table()
    write_table(HERE, tuned_path(settings, H100))
    assert [path.name for path in settings.tuned.iterdir()] == ["nvidia-h100-pcie-114.json"]
    assert schedule_table(settings) == HERE
    for other in (Card("NVIDIA H100 PCIe", 100), None):
        monkeypatch.setattr(tables, "current_card", lambda _, other=other: other)
        assert schedule_table(settings) == shipped_table()
    named = tmp_path / "named.json"
    write_table(replace(HERE, multiprocessors=78), named)
    assert schedule_table(replace(settings, schedules=named)).multiprocessors == 78


def test_the_driver_is_not_asked_where_nothing_was_tuned(
    settings: BuildSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "current_card", lambda _: pytest.fail("asked"))
    assert schedule_table(settings) == shipped_table()


@pytest.mark.skipif(hopper_problem() is None, reason="there is a GPU")
def test_no_card_is_none() -> None:
    assert card_module.current_card() is None


# The command


def refused_by(capsys: pytest.CaptureFixture[str], status: int, *arguments: object) -> str:
    assert main(["tune", *map(str, arguments)]) == status
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("futransformer: error: ")
    assert "\n" not in printed.err.rstrip("\n")
    return printed.err


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["llama-9"], 2, "llama-9"),
        (["smollm2-135m", "--seconds", "0"], 2, "--seconds must be positive, not 0"),
        (["smollm2-135m", "--seconds", "nan"], 2, "--seconds must be positive, not nan"),
        (["smollm2-135m", "--multiprocessors", "114"], 2, "belongs to --build-only"),
        (["smollm2-135m", "--build-only", "x", "--multiprocessors", "0"], 2, "needs a positive number"),
        (["smollm2-135m", "--build-only", "x", "--ops", "lm_head"], 2, "--ops must name some of qkv, o, gate_up, down"),
        (["smollm2-135m", "--build-only", "x", "--precision", "fp3"], 2, "precision 'fp3' is not implemented"),
        (["smollm2-135m", "--kernels", "nowhere"], 1, "nowhere is no export"),
        (["smollm2-135m", "--jobs", "0"], 2, "jobs must be 1 or more"),
    ],
)
def test_bad_requests(capsys: pytest.CaptureFixture[str], arguments: list[str], status: int, message: str) -> None:
    assert message in refused_by(capsys, status, *arguments)


@pytest.mark.skipif(hopper_problem() is None, reason="there is a Hopper GPU")
def test_without_a_hopper_gpu(capsys: pytest.CaptureFixture[str], pretended: list[str]) -> None:
    message = refused_by(capsys, 1, "smollm2-135m")
    assert "no Hopper GPU" in message
    assert "compile here for it with --build-only DIR" in message
    assert not pretended, "nothing is compiled that cannot be timed"


def test_build_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, pretended: list[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("FUTRANSFORMER_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "sweep"
    options = ["--build-only", str(folder), "--candidates", "3", "--ops", "o, down", "--multiprocessors", "114"]
    assert main(["tune", "smollm2-135m", *options]) == 0
    printed = capsys.readouterr()
    assert f"futransformer tune smollm2-135m --kernels {folder}" in printed.out
    sweep = load_sweep(folder, SMALL, "bf16")
    assert sweep.table.multiprocessors == 114
    assert {place.op for place in sweep.candidates} == {"o", "down"}


@pytest.fixture
def exported(pretended: list[str], settings: BuildSettings, tmp_path: Path) -> Path:
    """A sweep of SmolLM2's down projection, for 114 multiprocessors."""
    sweep = make_sweep(SMALL, "bf16", HERE, ["down"], 4)
    records, refused = build(sweep, settings, print)
    export_sweep(sweep.without(frozenset(refused)), records, tmp_path / "sweep")
    assert pretended
    return tmp_path / "sweep"


def on_a_card(monkeypatch: pytest.MonkeyPatch, multiprocessors: int) -> None:
    properties = SimpleNamespace(name="NVIDIA H100 PCIe", multi_processor_count=multiprocessors)
    monkeypatch.setattr(driver, "hopper_problem", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)


def test_a_sweep_for_another_card_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, exported: Path
) -> None:
    on_a_card(monkeypatch, 132)
    message = refused_by(capsys, 1, "smollm2-135m", "--kernels", exported)
    assert (
        "was built for 114 multiprocessors, this NVIDIA H100 PCIe has 132: build with --multiprocessors 132" in message
    )


def test_what_wins_is_written_and_plans_the_next_build(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, exported: Path, tmp_path: Path
) -> None:
    monkeypatch.setenv("FUTRANSFORMER_CACHE", str(tmp_path / "cache"))
    on_a_card(monkeypatch, 114)

    def timed(_: object, sweep: Sweep, built: LoadedKernels, device: object) -> Outcome:
        assert {spec.name for spec in sweep.specs()} == set(built)
        place, specs = next(iter(sweep.candidates.items()))
        incumbent = sweep.incumbent(place)
        return Outcome([Result(place, incumbent, [(specs[1], 0.9), (specs[0], 1.1)], {})], [])

    monkeypatch.setattr(tune, "_run", timed)
    assert main(["tune", "smollm2-135m", "--kernels", str(exported), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    path = tuned_path(BuildSettings.from_environment(), H100)
    assert (said["table"], said["changed"], said["left_out"]) == (str(path), 1, [])
    winner = said["results"][0]["winner"]
    assert said["results"][0]["times"][winner] == 0.9
    monkeypatch.setattr(tables, "current_card", lambda _: H100)
    table = schedule_table(BuildSettings.from_environment())
    assert (table.card, table.multiprocessors) == ("NVIDIA H100 PCIe", 114)
    assert set(table.schedules) > set(HERE.schedules)
    assert winner in {spec.name for spec in kernel_specs(SMALL, "bf16", table)}


def test_a_broken_table_stops_a_build(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FUTRANSFORMER_SCHEDULES", str(tmp_path / "missing.json"))
    assert main(["generate", "smollm2-135m", "-o", str(tmp_path / "sources")]) == 2
    assert f"{tmp_path / 'missing.json'} cannot be read" in capsys.readouterr().err


def test_a_named_table_changes_what_is_generated(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sweep = make_sweep(SMALL, "bf16", shipped_table(), ["down"], 3)
    place, specs = next(item for item in sweep.candidates.items() if item[0].rows is None)
    path = tmp_path / "table.json"
    write_table(shipped_table().with_schedules({place: schedule_of(specs[0])}), path)
    monkeypatch.setenv("FUTRANSFORMER_SCHEDULES", str(path))
    assert main(["generate", "smollm2-135m", "-o", str(tmp_path / "sources")]) == 0
    names = {source.stem for source in (tmp_path / "sources").iterdir()}
    assert specs[0].name in names
    assert sweep.incumbent(place).name not in names


def test_a_table_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BuildError, match=r"the table's folder .* cannot be written .*choose another with --output"):
        write_table(HERE, tmp_path / "file" / "table.json")
