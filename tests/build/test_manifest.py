"""Manifests read back, and refuse what they were not written for."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from futransformer.build.compile import BuildEvent, build_kernels
from futransformer.build.export import export, load_exported
from futransformer.build.load import load_or_build
from futransformer.build.manifest import (
    KernelRecord,
    ModelManifest,
    load_cubin,
    read_kernel_manifest,
    read_model_manifest,
)
from futransformer.build.settings import BuildSettings
from futransformer.generator.errors import ArtifactError, BuildError
from futransformer.generator.specs import ABI_VERSION
from tests.build.conftest import FakeNvcc, TinySpec, render_tiny

SPECS = (TinySpec("one"), TinySpec("two" * 100))


@pytest.fixture
def built(settings: BuildSettings) -> ModelManifest:
    return ModelManifest("tiny-model", "bf16", build_kernels(SPECS, settings=settings, render=render_tiny))


@pytest.fixture
def record(built: ModelManifest) -> KernelRecord:
    return built.kernels[0]


def test_a_record_reads_back_as_it_was(record: KernelRecord) -> None:
    assert read_kernel_manifest(record.cubin.parent) == record


def set_schema(data: dict[str, Any]) -> None:
    data["schema"] = 2


def set_abi(data: dict[str, Any]) -> None:
    data["kernel"]["abi_version"] += 1


def drop_threads(data: dict[str, Any]) -> None:
    del data["kernel"]["threads"]


def text_for_number(data: dict[str, Any]) -> None:
    data["kernel"]["shared_bytes"] = "1024"


def flat_cluster(data: dict[str, Any]) -> None:
    data["kernel"]["cluster"] = [2, 1]


def escape(data: dict[str, Any]) -> None:
    data["kernel"]["cubin"] = "../other/kernel.cubin"


def null_in_name(data: dict[str, Any]) -> None:
    data["kernel"]["cubin"] = "a\0b"


def endless_compilation(data: dict[str, Any]) -> None:
    data["kernel"]["compile_seconds"] = 10**400


def long_name(data: dict[str, Any]) -> None:
    data["kernel"]["cubin"] = "x" * 256


def no_registers(data: dict[str, Any]) -> None:
    del data["kernel"]["resources"]["registers"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (set_schema, "has schema 2, this version reads schema 1"),
        (set_abi, f"was built for kernel ABI {ABI_VERSION + 1}, this version has ABI {ABI_VERSION}"),
        (drop_threads, "has no int called 'threads'"),
        (text_for_number, "has no int called 'shared_bytes'"),
        (flat_cluster, "'cluster' must be three integers"),
        (endless_compilation, "has no float called 'compile_seconds'"),
        (null_in_name, "must be a file beside the manifest"),
        (long_name, "must be a file beside the manifest"),
        (escape, "must be a file beside the manifest"),
        (no_registers, "has no int called 'registers'"),
    ],
)
def test_a_manifest_of_another_kind_is_refused(
    record: KernelRecord, change: Callable[[dict[str, Any]], None], words: str
) -> None:
    path = record.cubin.parent / "manifest.json"
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(ArtifactError, match=words) as caught:
        read_kernel_manifest(path.parent)
    assert str(caught.value).startswith(str(path))
    assert "futransformer build CONFIG" in str(caught.value)


def test_a_missing_or_garbled_manifest_is_refused(record: KernelRecord, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="cannot be read"):
        read_kernel_manifest(tmp_path)
    for text in ("[1, 2", "[" * 100_000, '{"schema": ' + "1" * 1001 + "}"):
        (tmp_path / "manifest.json").write_text(text)
        with pytest.raises(ArtifactError, match="is not JSON"):
            read_kernel_manifest(tmp_path)
    (tmp_path / "manifest.json").write_text("[1, 2]")
    with pytest.raises(ArtifactError, match="holds list where an object belongs"):
        read_kernel_manifest(tmp_path)


# --- export ---


def test_an_export_can_be_moved_and_loaded_without_a_tool_chain(built: ModelManifest, tmp_path: Path) -> None:
    exported = export(built, tmp_path / "an export")
    assert [load_cubin(record) for record in exported.kernels] == [load_cubin(record) for record in built.kernels]
    (tmp_path / "an export").rename(tmp_path / "moved")
    loaded = load_exported(tmp_path / "moved")
    assert (loaded.config, loaded.precision) == ("tiny-model", "bf16")
    assert [replace(record, cubin=Path()) for record in loaded.kernels] == [
        replace(record, cubin=Path()) for record in built.kernels
    ]
    assert len(list((tmp_path / "moved").iterdir())) == 3


def test_a_second_export_replaces_the_first_and_nothing_else(
    settings: BuildSettings, built: ModelManifest, tmp_path: Path
) -> None:
    folder = tmp_path / "export"
    export(built, folder)
    (folder / "notes.cubin").write_text("mine")
    (changed,) = build_kernels((TinySpec("one", 2.0),), settings=settings, render=render_tiny)
    exported = export(replace(built, kernels=(changed,)), folder)
    assert {path.name for path in folder.iterdir()} == {
        "manifest.json",
        "notes.cubin",
        exported.kernels[0].cubin.name,
    }
    assert load_exported(folder).kernels == exported.kernels


def test_a_corrupt_export_is_refused(built: ModelManifest, tmp_path: Path) -> None:
    exported = export(built, tmp_path)
    cubin = exported.kernels[1].cubin
    cubin.write_bytes(cubin.read_bytes()[:-1])
    with pytest.raises(ArtifactError, match="is corrupt") as caught:
        load_exported(tmp_path)
    assert str(cubin) in str(caught.value)
    cubin.unlink()
    with pytest.raises(ArtifactError, match="cannot be read"):
        load_exported(tmp_path)
    assert len(read_model_manifest(tmp_path / "manifest.json").kernels) == 2
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(ArtifactError, match=r"is no export.*futransformer build CONFIG --output"):
        load_exported(tmp_path)


def test_an_export_that_cannot_be_written_says_so(built: ModelManifest, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BuildError, match=r"the output folder .*file cannot be written.*--output"):
        export(built, tmp_path / "file")


# --- what the runtime asks for ---


def test_kernels_come_from_an_export_or_from_the_cache(
    settings: BuildSettings, built: ModelManifest, nvcc: FakeNvcc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export(built, tmp_path / "export")
    from_export = load_or_build(SPECS, folder=tmp_path / "export")
    assert {name: cubin for name, (_, cubin) in from_export.items()} == {
        record.name: load_cubin(record) for record in built.kernels
    }

    calls = len(nvcc.calls)
    events: list[BuildEvent] = []
    monkeypatch.setattr("futransformer.build.load.build_kernels", _with_tiny_renderer)
    loaded = load_or_build((*SPECS, TinySpec("three")), settings=settings, progress=events.append)
    assert list(loaded) == [*from_export, "three"]
    assert len(nvcc.calls) == calls + 1
    assert [(event.record.name, event.cached) for event in events] == [
        (SPECS[0].name, True),
        (SPECS[1].name, True),
        ("three", False),
    ]


def _with_tiny_renderer(*args: Any, **kwargs: Any) -> tuple[KernelRecord, ...]:
    return build_kernels(*args, render=render_tiny, **kwargs)


def test_an_export_of_another_model_or_interface_is_refused(built: ModelManifest, tmp_path: Path) -> None:
    export(built, tmp_path)
    with pytest.raises(
        ArtifactError,
        match=r"lacks 1 of 1 kernels, first three; it was exported for tiny-model \(bf16\).*run: futransformer build",
    ):
        load_or_build((TinySpec("three"),), folder=tmp_path)
    with pytest.raises(ArtifactError, match="kernel one has another launch interface"):
        load_or_build((TinySpec("one", block=64),), folder=tmp_path)
