"""The environment, read once; and how many compilers a machine can bear."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from futransformer.build.machine import available_memory, usable_cores
from futransformer.build.settings import BuildSettings
from futransformer.generator.errors import InputError


@pytest.mark.parametrize(
    ("environment", "root"),
    [
        ({"HOME": "/home/u"}, "/home/u/.cache/futransformer"),
        ({"HOME": "/home/u", "XDG_CACHE_HOME": "/x"}, "/x/futransformer"),
        ({"HOME": "/home/u", "XDG_CACHE_HOME": "relative"}, "/home/u/.cache/futransformer"),
        ({"HOME": "/home/u", "XDG_CACHE_HOME": "/x", "FUTRANSFORMER_CACHE": "/c d"}, "/c d"),
    ],
)
def test_the_cache_folder(environment: dict[str, str], root: str) -> None:
    assert BuildSettings.from_environment(environment).cache_root == Path(root)


def test_a_relative_cache_folder_is_made_absolute() -> None:
    """Compilers run in a folder of their own."""
    settings = BuildSettings.from_environment({"FUTRANSFORMER_CACHE": "here"})
    assert settings.cache_root == Path.cwd() / "here"
    settings = BuildSettings.from_environment({"HOME": "here"})
    assert settings.cache_root == Path.cwd() / "here" / ".cache" / "futransformer"


def test_without_a_home_the_cache_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's user may be a number that no one has an account for."""

    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nobody)
    with pytest.raises(InputError, match="no home folder to keep a cache in: set FUTRANSFORMER_CACHE"):
        BuildSettings.from_environment({})
    assert BuildSettings.from_environment({"XDG_CACHE_HOME": "/x"}).cache_root == Path("/x/futransformer")
    named = BuildSettings.from_environment({"FUTRANSFORMER_CACHE": "~nobody-we-know/c"})
    assert named.cache_root == Path.cwd() / "~nobody-we-know" / "c"


def test_everything_else() -> None:
    settings = BuildSettings.from_environment(
        {
            "HOME": "/h",
            "PATH": "/bin",
            "CUDA_PATH": "/b",
            "CUDA_HOME": "/a",
            "NVCC_CCBIN": "g++-13",
            "FUTRANSFORMER_NVCC": "/n/nvcc",
            "FUTRANSFORMER_DISABLE_JIT": "1",
        },
        jobs=3,
    )
    assert settings.cuda_homes == (("CUDA_HOME", Path("/a")), ("CUDA_PATH", Path("/b")))
    assert (settings.nvcc, settings.host_compiler, settings.search_path) == (Path("/n/nvcc"), "g++-13", "/bin")
    assert (settings.jit, settings.jobs) == (False, 3)


@pytest.mark.parametrize(("value", "jit"), [("", True), ("0", True), ("false", True), ("1", False), ("True", False)])
def test_disable_jit_is_a_switch(value: str, jit: bool) -> None:
    assert BuildSettings.from_environment({"HOME": "/h", "FUTRANSFORMER_DISABLE_JIT": value}).jit is jit


def test_nonsense_is_refused() -> None:
    with pytest.raises(InputError, match="FUTRANSFORMER_DISABLE_JIT must be 1 or 0, not 'maybe'"):
        BuildSettings.from_environment({"HOME": "/h", "FUTRANSFORMER_DISABLE_JIT": "maybe"})
    with pytest.raises(InputError, match="jobs must be 1 or more, not 0"):
        BuildSettings.from_environment({"HOME": "/h"}, jobs=0)


def test_memory_is_what_machine_and_container_leave(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       32000000 kB\nMemAvailable:    8000000 kB\n")
    assert available_memory(tmp_path, meminfo) == 8_000_000 * 1024

    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("100\n")
    assert available_memory(tmp_path, meminfo) == 8_000_000 * 1024

    (tmp_path / "memory.max").write_text("4000000000\n")
    (tmp_path / "memory.current").write_text("3000000000\n")
    (tmp_path / "memory.stat").write_text("anon 1000000000\ninactive_file 1500000000\n")
    assert available_memory(tmp_path, meminfo) == 2_500_000_000
    assert available_memory(tmp_path, tmp_path / "nowhere") is None


def test_cores_are_what_affinity_and_container_leave(tmp_path: Path) -> None:
    affinity = len(os.sched_getaffinity(0))
    assert usable_cores(tmp_path) == affinity
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert usable_cores(tmp_path) == affinity
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert usable_cores(tmp_path) == 1
