"""The distributions: a wheel made from the source distribution holds the whole package, and works by itself."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "futransformer"
LINKED = ("build", "generator", "templates")


def files_of(folder: Path) -> set[str]:
    """Files below a folder, relative to the package."""
    return {
        str(path.relative_to(PACKAGE))
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def build(target: str, source: Path, output: Path) -> Path:
    """Build one distribution of the project in ``source``."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(output)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (built,) = output.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel, made from the source distribution."""
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("hatchling is not installed")
    folder = tmp_path_factory.mktemp("distributions")
    with tarfile.open(build("sdist", ROOT, folder / "sdist")) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (source,) = (folder / "unpacked").iterdir()
    assert (source / "Makefile").is_file()
    assert (source / "tests" / "conftest.py").is_file()
    return build("wheel", source, folder / "wheel")


def test_a_wheel_from_the_source_distribution_is_complete(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if not name.startswith("futransformer-")}
    wanted = files_of(PACKAGE) | {name for linked in LINKED for name in files_of(PACKAGE / linked)}
    assert "build/compile.py" in wanted
    assert "templates/include/futransformer/gemm.cuh" in wanted
    assert packed == {f"futransformer/{name}" for name in wanted}


@pytest.fixture(scope="module")
def core(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment that holds the wheel and what it requires by itself, which is Jinja."""
    if importlib.util.find_spec("pip") is None:
        pytest.skip("pip is not installed")
    folder = tmp_path_factory.mktemp("a fresh environment")
    venv.create(folder, symlinks=True)
    programs = folder / "bin"
    command = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(programs / "python"),
        "install",
        "--no-index",
        "--no-deps",
        "-q",
    ]
    subprocess.run([*command, wheel], check=True, capture_output=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for file in (*(metadata.files("jinja2") or ()), *(metadata.files("markupsafe") or ())):
        (site / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file.locate(), site / file)
    return programs


def run(core: Path, *command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a program of the environment, which knows of no other, and of no tool chain."""
    known = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "FUTRANSFORMER", "CUDA"))}
    environment = {**known, "PATH": str(core), "FUTRANSFORMER_CACHE": str(folder / "cache")}
    return subprocess.run(
        [core / command[0], *command[1:]], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def test_the_core_generates_from_any_folder(core: Path, tmp_path: Path) -> None:
    done = run(core, "futransformer", "generate", "smollm2-135m", "--output", "the sources", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "the sources").glob("*.cu"))) > 40
    report = json.loads(run(core, "futransformer", "doctor", "--json", folder=tmp_path).stdout)
    assert report["ready"] == {"generate": True, "build": False, "run": False}


def test_without_the_extra_models_it_says_what_to_install(core: Path, tmp_path: Path) -> None:
    for command in (("run", str(tmp_path), "--prompt", "x"), ("serve", str(tmp_path)), ("perplexity", str(tmp_path))):
        done = run(core, "futransformer", *command, folder=tmp_path)
        assert done.returncode in (1, 2), command
        assert "run: pip install 'futransformer[" in done.stderr, command
        assert "Traceback" not in done.stderr
    done = run(core, "python", "-c", "import futransformer; futransformer.LLM", folder=tmp_path)
    assert done.stderr.splitlines()[-1] == (
        "ModuleNotFoundError: futransformer.LLM needs torch, which is not installed; "
        "run: pip install 'futransformer[models]'"
    )


def test_a_module_of_ours_that_is_missing_is_no_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    import futransformer  # noqa: PLC0415

    monkeypatch.setitem(futransformer._HOMES, "LLM", "futransformer.nowhere")
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'futransformer.nowhere'$"):
        _ = futransformer.LLM
