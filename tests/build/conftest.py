"""A kernel of three lines, a compiler that only pretends, and the settings that join them: builds in milliseconds."""

from __future__ import annotations

import signal
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from futransformer.build.settings import BuildSettings
from futransformer.generator.specs import KernelSpec, Param

# It answers --version, counts its calls, and writes what ptxas would say. While a file `held` lies beside it, it waits
# (ten minutes at most), unless it is one of the first calls, as many as that file says.
FAKE_NVCC = r"""#!/bin/sh
here=$(dirname "$0")
if [ "$1" = --version ]; then cat "$here/version.txt"; exit; fi
name=$(tr '\n' ' ' < kernel.cu | sed 's/.*extern "C" __global__ void//; s/__[a-z_]*__([^)]*)//; s/^ *//; s/(.*//')
echo "$name" >> "$here/calls.txt"
env > "$here/environment.txt"
printf '%s\n' "$@" > "$here/arguments.txt"
echo $$ >> "$here/running.txt"
if [ -e "$here/held" ] && [ "$(wc -l < "$here/calls.txt")" -gt "$(cat "$here/held")" ]; then
    echo "$name" >> "$here/waiting.txt"
    turns=0
    while [ -e "$here/held" ] && [ $turns -lt 30000 ]; do sleep 0.02; turns=$((turns + 1)); done
fi
[ -e "$here/fail.sh" ] && . "$here/fail.sh"
cat <<END
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '$name' for 'sm_90a'
ptxas info    : Function properties for $name
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers, used 0 barriers
END
{ printf '\177ELF'; cat kernel.cu; } > kernel.cubin
"""

VERSION = """nvcc: NVIDIA (R) Cuda compiler driver
Built on Wed_Aug_20_01:58:59_PM_PDT_2025
Cuda compilation tools, release {short}, V{full}
Build cuda_{short}.r{short}/compiler.1_0
"""


@dataclass(frozen=True)
class TinySpec(KernelSpec):
    """A kernel that any test can vary: its name, its text, its launch."""

    template = "tiny"

    label: str = "tiny"
    value: float = 1.0
    block: int = 32

    @property
    def name(self) -> str:
        return self.label

    @property
    def params(self) -> tuple[Param, ...]:
        return (Param("out", "pointer", "float"), Param("n", "int32"))

    @property
    def threads(self) -> int:
        return self.block


def render_tiny(spec: KernelSpec) -> str:
    assert isinstance(spec, TinySpec)
    return (
        '#include "futransformer/tiny.cuh"\n'
        f'extern "C" __global__ void {spec.name}(float* out, int n) '
        f"{{ out[threadIdx.x] = OFFSET + {spec.value}f * n; }}\n"
    )


@dataclass(frozen=True)
class FakeNvcc:
    """A folder with the pretended compiler, and what it noted."""

    folder: Path
    path: Path = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", self.folder / "nvcc")

    @property
    def calls(self) -> list[str]:
        return self.note("calls").split()

    def note(self, name: str) -> str:
        path = self.folder / f"{name}.txt"
        return path.read_text() if path.exists() else ""

    def hold(self, *, but: int = 0) -> None:
        """Let compilers wait, but for so many of the first calls."""
        (self.folder / "held").write_text(str(but))

    def release(self) -> None:
        (self.folder / "held").unlink()

    def fails(self, script: str) -> None:
        (self.folder / "fail.sh").write_text(script)


@pytest.fixture
def make_nvcc(tmp_path: Path) -> Callable[..., FakeNvcc]:
    """Make pretended compilers, each in a folder of its own."""

    def make(name: str = "tool chain", version: str = "13.0.88") -> FakeNvcc:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        nvcc = FakeNvcc(folder)
        nvcc.path.write_text(FAKE_NVCC)
        nvcc.path.chmod(nvcc.path.stat().st_mode | stat.S_IXUSR)
        short = version.rpartition(".")[0]
        (folder / "version.txt").write_text(VERSION.format(short=short, full=version))
        return nvcc

    return make


@pytest.fixture
def nvcc(make_nvcc: Callable[..., FakeNvcc]) -> FakeNvcc:
    return make_nvcc()


@pytest.fixture
def settings(tmp_path: Path, nvcc: FakeNvcc) -> BuildSettings:
    """Settings for pretended builds; every folder has a space in its name."""
    headers = tmp_path / "our headers"
    (headers / "futransformer").mkdir(parents=True)
    (headers / "futransformer" / "tiny.cuh").write_text("#pragma once\n#define OFFSET 3.0f\n")
    cutlass = tmp_path / "cutlass headers"
    (cutlass / "cute").mkdir(parents=True)
    (cutlass / "cute" / "tensor.hpp").write_text("// CuTe\n")
    return BuildSettings(
        cache_root=tmp_path / "the cache",
        nvcc=nvcc.path,
        host_compiler="/bin/sh",  # never run by the pretended compiler
        jobs=2,
        lock_timeout=20.0,
        include_dir=headers,
        cutlass_include=cutlass,
    )


@pytest.fixture
def machine(settings: BuildSettings, nvcc: FakeNvcc, monkeypatch: pytest.MonkeyPatch) -> FakeNvcc:
    """The environment of a machine with the pretended compiler and an empty cache."""
    for name in ("CUDA_HOME", "CUDA_PATH", "XDG_CACHE_HOME", "FUTRANSFORMER_DISABLE_JIT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FUTRANSFORMER_NVCC", str(nvcc.path))
    monkeypatch.setenv("NVCC_CCBIN", settings.host_compiler)
    monkeypatch.setenv("FUTRANSFORMER_CACHE", str(settings.cache_root))
    return nvcc


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Processes that start here can be ended, also where a shell's `&` or nohup made this one ignore the signals."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGHUP, signal.SIGTERM)}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
