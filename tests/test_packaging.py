"""The distributions: a wheel made from the source distribution holds the whole package, linked folders included."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tarfile
import zipfile
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


@pytest.mark.skipif(importlib.util.find_spec("hatchling") is None, reason="hatchling is not installed")
def test_a_wheel_from_the_source_distribution_is_complete(tmp_path: Path) -> None:
    with tarfile.open(build("sdist", ROOT, tmp_path / "sdist")) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (source,) = (tmp_path / "unpacked").iterdir()
    assert (source / "Makefile").is_file()
    assert (source / "tests" / "conftest.py").is_file()
    with zipfile.ZipFile(build("wheel", source, tmp_path / "wheel")) as wheel:
        packed = {name for name in wheel.namelist() if not name.startswith("futransformer-")}
    wanted = files_of(PACKAGE) | {name for linked in LINKED for name in files_of(PACKAGE / linked)}
    assert "build/compile.py" in wanted
    assert "templates/include/futransformer/gemm.cuh" in wanted
    assert packed == {f"futransformer/{name}" for name in wanted}
