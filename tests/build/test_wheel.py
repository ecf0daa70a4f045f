"""Wheels of kernels: made by `build --wheel`, installed by pip, found and checked where there is no nvcc."""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from futransformer import __version__, library
from futransformer.build.compile import build_kernels
from futransformer.build.export import export, load_exported
from futransformer.build.fingerprint import source_key
from futransformer.build.installed import find_installed, installed_kernels, mention_installed
from futransformer.build.manifest import KernelRecord, ModelManifest
from futransformer.build.nvcc import NVCC_FLAGS
from futransformer.build.settings import HEADERS, BuildSettings
from futransformer.build.wheel import distribution_name, write_wheel
from futransformer.cli import main
from futransformer.generator.config import load_config
from futransformer.generator.errors import ArtifactError, BuildError
from futransformer.generator.plan import kernel_specs
from futransformer.generator.render import render
from futransformer.generator.schedules import ScheduleTable, shipped_table
from futransformer.generator.specs import KernelSpec
from futransformer.library import load_kernels
from tests.build.conftest import TinySpec, render_tiny
from tests.test_library import record_of

NAME = "futransformer-kernels-smollm2-135m-bf16-sm90a"
PACKAGE = NAME.replace("-", "_")
SPECS = kernel_specs(load_config("smollm2-135m"), "bf16")


class LoadedKernel:
    """Stands in for a kernel on a GPU."""

    def __init__(self, spec: Any, record: KernelRecord, cubin: bytes, device: torch.device, chain: Any) -> None:
        self.spec, self.record, self.cubin, self.device, self.chain = spec, record, cubin, device, chain


def pretended(spec: KernelSpec, folder: Path) -> KernelRecord:
    """A kernel as this version's source gives it, but for its machine code."""
    cubin = folder / f"{hashlib.sha256(spec.name.encode()).hexdigest()}.cubin"
    cubin.write_bytes(b"\x7fELF" + spec.name.encode())
    key = source_key(spec, render(spec), NVCC_FLAGS, HEADERS)
    return replace(record_of(spec, cubin), source_key=key)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model's wheel, of pretended cubins."""
    folder = tmp_path_factory.mktemp("wheels")
    kernels = tuple(pretended(spec, folder) for spec in SPECS)
    return write_wheel(ModelManifest("smollm2-135m", "bf16", kernels), folder / "the wheels")


def install(wheel: Path, folder: Path) -> Path:
    """Install a wheel into a folder of its own, as pip does."""
    if importlib.util.find_spec("pip") is None:
        pytest.skip("pip is not installed")
    command = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--quiet"]
    subprocess.run([*command, "--target", folder, wheel], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where pip has installed that wheel."""
    return install(wheel, tmp_path_factory.mktemp("installed") / "site packages")


@pytest.fixture
def site(installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without a tool chain and with an empty cache, on which the wheel is installed and any cubin loads."""
    folder = shutil.copytree(installed, tmp_path / "site packages")
    monkeypatch.syspath_prepend(folder)
    for name in ("FUTRANSFORMER_NVCC", "FUTRANSFORMER_SCHEDULES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("FUTRANSFORMER_CACHE", str(tmp_path / "empty"))
    monkeypatch.setenv("FUTRANSFORMER_DISABLE_JIT", "1")
    monkeypatch.setattr(library, "require_hopper", lambda: torch.device("cpu"))
    monkeypatch.setattr(library, "Kernel", LoadedKernel)
    return folder


def describe(folder: Path, **changes: str) -> None:
    """Change fields of an installed wheel's METADATA."""
    (path,) = folder.glob("*.dist-info/METADATA")
    lines = path.read_text().splitlines()
    path.write_text(
        "\n".join(f"{key}: {changes.get(key, value)}" for key, _, value in (x.partition(": ") for x in lines))
    )


# --- the file ---


@pytest.mark.usefixtures("machine")
def test_build_writes_a_wheel_and_says_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["build", "smollm2-135m", "--wheel", str(tmp_path / "the wheels")]) == 0
    (path,) = (tmp_path / "the wheels").iterdir()
    assert path.name == f"{PACKAGE}-{__version__}-py3-none-any.whl"
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"{path}, ")
    assert main(["build", "smollm2-135m", "--wheel", str(tmp_path / "the wheels"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["wheel"] == str(path)
    with zipfile.ZipFile(path) as archive:
        assert sum(name.endswith(".cubin") for name in archive.namelist()) == len(SPECS)


def test_a_wheel_is_what_pip_and_importlib_read(wheel: Path, installed: Path) -> None:
    assert wheel.name == f"{PACKAGE}-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    *_, last = content
    rows = list(csv.reader(content[last].decode().splitlines()))
    assert last == f"{PACKAGE}-{__version__}.dist-info/RECORD"
    assert [path for path, *_ in rows] == list(content)
    for path, digest, size in rows[:-1]:
        wanted = base64.urlsafe_b64encode(hashlib.sha256(content[path]).digest()).decode().rstrip("=")
        assert (digest, size) == (f"sha256={wanted}", str(len(content[path])))
    (found,) = metadata.Distribution.discover(path=[str(installed)])
    assert (found.name, found.version) == (NAME, __version__)
    assert found.requires == [f"futransformer=={__version__}"]
    (entry,) = found.entry_points
    assert (entry.group, entry.value) == ("futransformer.kernels", PACKAGE)
    assert {record.name for record in load_exported(installed / PACKAGE).kernels} == {spec.name for spec in SPECS}


def test_the_same_kernels_give_the_same_bytes(settings: BuildSettings, tmp_path: Path) -> None:
    kernels = build_kernels((TinySpec("one"),), settings=settings, render=render_tiny)
    first, second = (write_wheel(ModelManifest("m", "bf16", kernels), tmp_path / name) for name in "ab")
    assert first.read_bytes() == second.read_bytes()
    assert [path.name for path in (tmp_path / "a").iterdir()] == [first.name], "nothing is left beside it"


@pytest.mark.parametrize(
    ("config", "stem"),
    [("Llama-3.1-8B_Instruct", "llama-3-1-8b-instruct"), ('my "model" \n \\ 1', "my-model-1"), ("模型", "")],
)
def test_any_name_of_a_config_gives_a_wheel(settings: BuildSettings, tmp_path: Path, config: str, stem: str) -> None:
    kernels = build_kernels((TinySpec("one"),), settings=settings, render=render_tiny)
    name = distribution_name(config, "fp8-int4")
    assert name == "-".join(filter(None, ("futransformer-kernels", stem, "fp8-int4-sm90a")))
    path = write_wheel(ModelManifest(config, "fp8-int4", kernels), tmp_path / "out")
    folder = install(path, tmp_path / "site")
    package = name.replace("-", "_")
    compile((folder / package / "__init__.py").read_text(), "__init__.py", "exec")
    assert load_exported(folder / package).config == config


def test_a_wheel_that_cannot_be_written_says_so(settings: BuildSettings, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    kernels = build_kernels((TinySpec("one"),), settings=settings, render=render_tiny)
    with pytest.raises(BuildError, match=r"the wheel's folder .*file cannot be written.*--wheel"):
        write_wheel(ModelManifest("m", "bf16", kernels), tmp_path / "file")


# --- what the runtime makes of it ---


@pytest.mark.usefixtures("site")
def test_an_installed_wheel_serves_where_there_is_no_nvcc() -> None:
    ops: Any = load_kernels("smollm2-135m")
    kernel = ops._argmax.kernel
    assert kernel.cubin.startswith(b"\x7fELF")
    assert kernel.spec.name.encode() in kernel.cubin


def test_an_export_that_is_named_comes_before_a_wheel(site: Path, tmp_path: Path) -> None:
    manifest = load_exported(site / PACKAGE)
    (tmp_path / "other.cubin").write_bytes(b"another")
    sha = hashlib.sha256(b"another").hexdigest()
    kernels = tuple(replace(k, cubin=tmp_path / "other.cubin", cubin_sha256=sha) for k in manifest.kernels)
    export(replace(manifest, kernels=kernels), tmp_path / "export")
    ops: Any = load_kernels("smollm2-135m", folder=tmp_path / "export")
    assert ops._argmax.kernel.cubin == b"another"


def test_a_corrupt_cubin_names_the_wheel(site: Path) -> None:
    cubin = sorted((site / PACKAGE).glob("*.cubin"))[0]
    cubin.write_bytes(cubin.read_bytes()[:-1])
    with pytest.raises(
        ArtifactError, match=rf"is corrupt.*installed wheel {NAME} {__version__}: install that again"
    ) as caught:
        load_kernels("smollm2-135m")
    assert str(cubin) in str(caught.value)


def test_a_damaged_manifest_names_the_wheel(site: Path) -> None:
    (site / PACKAGE / "manifest.json").write_text("{}")
    with pytest.raises(ArtifactError, match=rf"'schema'.*pip uninstall {NAME}"):
        load_kernels("smollm2-135m")
    (site / PACKAGE / "manifest.json").unlink()
    with pytest.raises(ArtifactError, match=rf"is no export.*pip uninstall {NAME}"):
        load_kernels("smollm2-135m")


def test_a_wheel_of_another_version_does_not_serve_and_is_named(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    describe(site, Version="0.0.9")
    with pytest.raises(
        ArtifactError,
        match=rf"not in the cache .*FUTRANSFORMER_DISABLE_JIT.*serves here: {NAME} 0\.0\.9 \(this is {__version__}\)",
    ):
        load_kernels("smollm2-135m")
    main(["doctor"])
    assert f"{NAME} 0.0.9, not for this version, {__version__}" in capsys.readouterr().out


def test_a_wheel_of_other_kernels_or_sources_does_not_serve(site: Path) -> None:
    named = rf"serves here: {NAME} {__version__} \(of other kernels, or other sources\)"
    with pytest.raises(ArtifactError, match=named):
        load_kernels("smollm2-135m", "bf16-kv8")
    path = site / PACKAGE / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["kernels"][-1]["source_key"] = "0" * 64
    path.write_text(json.dumps(manifest))
    with pytest.raises(ArtifactError, match=named):
        load_kernels("smollm2-135m")


def test_without_wheels_the_error_is_the_caches_own() -> None:
    with pytest.raises(ArtifactError, match=r"^missing$"), mention_installed():
        raise ArtifactError("missing")


def test_a_wheel_brings_its_own_table(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Built by another card's table, it serves by that table; where another is asked for, not at all."""
    table = ScheduleTable("another card", multiprocessors=8)
    by_rule = kernel_specs(load_config("smollm2-135m"), "bf16", table)
    assert by_rule != SPECS
    kernels = tuple(pretended(spec, tmp_path) for spec in by_rule)
    wheel = write_wheel(ModelManifest("smollm2-135m", "bf16", kernels, table), tmp_path / "tuned")
    install(wheel, tmp_path / "tuned site")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "tuned site"), *(p for p in sys.path if p != str(site))])
    ops: Any = load_kernels("smollm2-135m")
    assert set(ops.plan.specs()) == set(by_rule)
    (tmp_path / "shipped.json").write_text(shipped_table().text())
    monkeypatch.setenv("FUTRANSFORMER_SCHEDULES", str(tmp_path / "shipped.json"))
    with pytest.raises(ArtifactError, match="No installed wheel of kernels serves here"):
        load_kernels("smollm2-135m")


def test_wheels_are_asked_in_the_order_of_their_names(
    settings: BuildSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = build_kernels((TinySpec("one"),), settings=settings, render=render_tiny)
    monkeypatch.setattr("futransformer.build.installed.render", render_tiny)
    for config in ("second", "first"):
        monkeypatch.syspath_prepend(
            install(write_wheel(ModelManifest(config, "bf16", kernels), tmp_path / "out"), tmp_path / config)
        )
    assert [wheel.manifest().config for wheel in installed_kernels()] == ["first", "second"]
    found = find_installed(lambda _: (TinySpec("one"),), settings)
    assert found == installed_kernels()[0]
    assert find_installed(lambda _: (TinySpec("one"), TinySpec("two")), settings) is None
