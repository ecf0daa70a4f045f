"""Finding nvcc, g++ and the CUTLASS headers, in the documented order."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from futransformer.build.settings import BuildSettings
from futransformer.build.toolchain import find_cutlass_include, find_host_compiler, find_nvcc, find_toolchain
from futransformer.generator.errors import ToolchainError
from tests.build.conftest import FakeNvcc

MakeNvcc = Callable[..., FakeNvcc]


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BuildSettings:
    """A machine with nothing on it."""
    monkeypatch.setattr("futransformer.build.toolchain.pip_toolkits", lambda: ())
    return BuildSettings(cache_root=tmp_path / "cache")


def test_the_order_is_explicit_home_pip_path(
    bare: BuildSettings, make_nvcc: MakeNvcc, monkeypatch: pytest.MonkeyPatch
) -> None:
    explicit, home, pip, path = (make_nvcc(f"{name}/bin") for name in ("explicit", "home", "pip", "path"))
    machine = replace(bare, search_path=f"{path.folder}:/usr/bin:/bin")
    assert find_nvcc(machine).path == path.path
    monkeypatch.setattr("futransformer.build.toolchain.pip_toolkits", lambda: (pip.folder.parent,))
    assert find_nvcc(machine).path == pip.path
    machine = replace(machine, cuda_homes=(("CUDA_HOME", home.folder.parent),))
    assert find_nvcc(machine).path == home.path
    machine = replace(machine, nvcc=explicit.path)
    assert find_nvcc(machine).path == explicit.path


def test_versions_are_numbers_not_text(bare: BuildSettings, make_nvcc: MakeNvcc) -> None:
    found = find_nvcc(replace(bare, nvcc=make_nvcc("later", "12.10.3").path))
    assert found.version == (12, 10, 3)
    with pytest.raises(ToolchainError, match=r"version 9\.2\.88, 12\.8 or newer is needed"):
        find_nvcc(replace(bare, nvcc=make_nvcc("ancient", "9.2.88").path))


def test_one_that_is_too_old_is_passed_over_and_said(bare: BuildSettings, make_nvcc: MakeNvcc, tmp_path: Path) -> None:
    old, new = make_nvcc("old/bin", "12.4.131"), make_nvcc("new/bin")
    homes = (("CUDA_HOME", old.folder.parent), ("CUDA_PATH", tmp_path / "empty"))
    found = find_nvcc(replace(bare, cuda_homes=homes, search_path=f"{new.folder}:/usr/bin:/bin"))
    assert found.path == new.path
    assert len(found.passed_over) == 3
    assert "CUDA_HOME" in found.passed_over[0]
    assert "12.4.131" in found.passed_over[0]
    assert "does not exist" in found.passed_over[1]


def test_an_explicit_one_is_never_passed_over(bare: BuildSettings, make_nvcc: MakeNvcc, tmp_path: Path) -> None:
    machine = replace(bare, nvcc=tmp_path / "nowhere", search_path=str(make_nvcc().folder))
    with pytest.raises(ToolchainError, match=r"FUTRANSFORMER_NVCC cannot be used: .*nowhere does not exist"):
        find_nvcc(machine)


def test_none_says_where_it_looked_and_what_to_install(bare: BuildSettings, tmp_path: Path) -> None:
    with pytest.raises(ToolchainError) as caught:
        find_nvcc(replace(bare, cuda_homes=(("CUDA_HOME", tmp_path / "cuda"),)))
    message = str(caught.value)
    for words in (f"CUDA_HOME: {tmp_path}/cuda/bin/nvcc", "pip tool kit", "PATH", 'pip install "cuda-toolkit[nvcc'):
        assert words in message


def test_one_that_does_not_run_is_passed_over(bare: BuildSettings, make_nvcc: MakeNvcc) -> None:
    broken, silent = make_nvcc("broken"), make_nvcc("silent")
    broken.path.write_text("#!/nonexistent/interpreter\n")
    (silent.folder / "version.txt").write_text("hello\n")
    for nvcc, words in ((broken, "does not run"), (silent, "gave no version: hello")):
        with pytest.raises(ToolchainError, match=words):
            find_nvcc(replace(bare, nvcc=nvcc.path))
    silent.path.chmod(0o644)
    with pytest.raises(ToolchainError, match="is not executable"):
        find_nvcc(replace(bare, nvcc=silent.path))


def test_no_host_compiler_says_what_to_install(bare: BuildSettings, make_nvcc: MakeNvcc) -> None:
    with pytest.raises(ToolchainError, match=r"host compiler 'g\+\+'.*apt install g\+\+.*NVCC_CCBIN"):
        find_toolchain(replace(bare, nvcc=make_nvcc().path))


def test_the_host_compiler_may_be_a_path(bare: BuildSettings) -> None:
    assert find_host_compiler(replace(bare, host_compiler="/bin/sh")) == Path("/bin/sh")


def test_the_headers_are_found_without_importing_cutlass(bare: BuildSettings) -> None:
    include = find_cutlass_include(bare)
    assert (include / "cutlass" / "version.h").is_file()
    assert "cutlass_library" not in sys.modules


def test_missing_headers_say_what_to_install(bare: BuildSettings, tmp_path: Path) -> None:
    with pytest.raises(ToolchainError, match=r"CUTLASS headers.*nothing here.*pip install nvidia-cutlass==4\.2\.0\.0"):
        find_cutlass_include(replace(bare, cutlass_include=tmp_path / "nothing here"))
