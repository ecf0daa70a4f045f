"""The tool chain: nvcc, a host g++, and the CUTLASS headers; found, checked, or refused with the command that helps.

nvcc is looked for in this order; the first usable one wins, and those that were passed over are remembered:

1. ``settings.nvcc`` (FUTRANSFORMER_NVCC): used or refused, never passed over;
2. CUDA_HOME, then CUDA_PATH: whoever sets one means it, as with every CUDA program. One that is too old or has no nvcc
   (a run-time image) is passed over;
3. the tool kit that pip installed beside the running interpreter (``nvidia/cu*/bin/nvcc``);
4. PATH.

Nothing here imports torch, cuda or cutlass: ``import cutlass_library`` has side effects, so packages are only located.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..generator.errors import ToolchainError
from .settings import BuildSettings

Version = tuple[int, int, int]

# What CUTLASS 4.2 asks for; compared as a tuple.
MINIMUM_VERSION: Version = (12, 8, 0)

INSTALL_NVCC = 'pip install "cuda-toolkit[nvcc,cudart,cccl]==13.0.*"'
INSTALL_HOST_COMPILER = "install g++ (Debian, Ubuntu: apt install g++), or name one in NVCC_CCBIN"
INSTALL_CUTLASS = "pip install nvidia-cutlass==4.2.0.0"


@dataclass(frozen=True)
class Nvcc:
    """One nvcc. ``version_text`` is all that ``nvcc --version`` says: it names the very build, and no path."""

    path: Path
    origin: str
    version: Version
    version_text: str
    passed_over: tuple[str, ...] = ()


@dataclass(frozen=True)
class Toolchain:
    """All that turns a source into a cubin."""

    nvcc: Nvcc
    host_compiler: Path
    cutlass_include: Path


def find_toolchain(settings: BuildSettings) -> Toolchain:
    """Find all three parts, or raise ToolchainError for the first that is missing."""
    return Toolchain(find_nvcc(settings), find_host_compiler(settings), find_cutlass_include(settings))


def find_nvcc(settings: BuildSettings) -> Nvcc:
    """Find the first usable nvcc in the documented order."""
    if settings.nvcc is not None:
        try:
            return _inspect(settings.nvcc, "FUTRANSFORMER_NVCC", ())
        except ToolchainError as error:
            raise ToolchainError(f"FUTRANSFORMER_NVCC cannot be used: {error}; correct it or unset it") from None
    passed_over: list[str] = []
    for origin, path in _candidates(settings):
        found = _try_inspect(path, origin, passed_over)
        if found is not None:
            return found
    looked = "".join(f"\n  {line}" for line in passed_over)
    raise ToolchainError(
        f"no usable nvcc ({_dotted(MINIMUM_VERSION[:2])} or newer) was found. Looked at:{looked}\n"
        f"Install one with: {INSTALL_NVCC}\nor point CUDA_HOME (or FUTRANSFORMER_NVCC) at one."
    )


def find_host_compiler(settings: BuildSettings) -> Path:
    """Find the host compiler: nvcc preprocesses with it, even for a cubin."""
    found = shutil.which(settings.host_compiler, path=settings.search_path)
    if found is None:
        raise ToolchainError(
            f"the host compiler {settings.host_compiler!r} was not found (PATH: {settings.search_path or 'empty'}), "
            f"and nvcc needs one; {INSTALL_HOST_COMPILER}"
        )
    return Path(found).absolute()


def find_cutlass_include(settings: BuildSettings) -> Path:
    """Find the CUTLASS and CuTe headers in the nvidia-cutlass package, without importing it."""
    packaged = [folder / "source" / "include" for folder in _package_folders("cutlass_library")]
    folders = [settings.cutlass_include] if settings.cutlass_include else packaged
    for folder in folders:
        if (folder / "cute" / "tensor.hpp").is_file():
            return folder
    looked = ", ".join(map(str, folders)) or f"no package cutlass_library beside {sys.executable}"
    raise ToolchainError(f"the CUTLASS headers (cute/tensor.hpp) were not found: {looked}; run: {INSTALL_CUTLASS}")


def pip_toolkits() -> tuple[Path, ...]:
    """Tool kits that pip installed beside the running interpreter, the newest first."""
    kits = [kit for folder in _package_folders("nvidia") for kit in folder.glob("cu[0-9]*") if kit.name[2:].isdigit()]
    return tuple(sorted(kits, key=lambda kit: (-int(kit.name[2:]), str(kit))))


def _candidates(settings: BuildSettings) -> Iterator[tuple[str, Path]]:
    for variable, folder in settings.cuda_homes:
        yield variable, folder / "bin" / "nvcc"
    kits = pip_toolkits()
    for kit in kits:
        yield "pip tool kit", kit / "bin" / "nvcc"
    if not kits:
        yield "pip tool kit", Path(sys.prefix) / "nvidia" / "cu*" / "bin" / "nvcc"
    yield "PATH", Path(shutil.which("nvcc", path=settings.search_path) or "nvcc")


def _try_inspect(path: Path, origin: str, passed_over: list[str]) -> Nvcc | None:
    try:
        return _inspect(path, origin, tuple(passed_over))
    except ToolchainError as error:
        passed_over.append(f"{origin}: {error}")
        return None


def _inspect(path: Path, origin: str, passed_over: tuple[str, ...]) -> Nvcc:
    if not path.is_file():
        raise ToolchainError(f"{path} does not exist")
    if not os.access(path, os.X_OK):
        raise ToolchainError(f"{path} is not executable")
    try:
        asked = subprocess.run(
            [path, "--version"], capture_output=True, text=True, errors="replace", timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ToolchainError(f"{path} does not run: {error}") from None
    found = re.search(r"release \d+\.\d+, V(\d+)\.(\d+)\.(\d+)", asked.stdout)
    if asked.returncode != 0 or found is None:
        words = (asked.stderr or asked.stdout).strip() or f"exit code {asked.returncode}"
        raise ToolchainError(f"{path} --version gave no version: {words[:200]}")
    version: Version = (int(found[1]), int(found[2]), int(found[3]))
    if version < MINIMUM_VERSION:
        raise ToolchainError(f"{path} is version {_dotted(version)}, {_dotted(MINIMUM_VERSION[:2])} or newer is needed")
    return Nvcc(path.absolute(), origin, version, asked.stdout.strip(), passed_over)


def _package_folders(package: str) -> tuple[Path, ...]:
    spec = importlib.util.find_spec(package)
    return tuple(Path(folder) for folder in (spec.submodule_search_locations or ())) if spec else ()


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
