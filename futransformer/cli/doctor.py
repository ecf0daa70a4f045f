"""``futransformer doctor``: what this machine has, what it lacks, and the command that helps.

Works with no nvcc, no torch and no GPU. Exit status 0: kernels can be generated, built and run here; otherwise 1.
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from futransformer import __version__
from futransformer.build.compile import build_kernels
from futransformer.build.installed import installed_kernels
from futransformer.build.settings import BuildSettings
from futransformer.build.toolchain import (
    INSTALL_CUTLASS,
    INSTALL_HOST_COMPILER,
    INSTALL_NVCC,
    find_cutlass_include,
    find_host_compiler,
    find_nvcc,
    find_toolchain,
)
from futransformer.generator.errors import BuildError, FuTransformerError
from futransformer.generator.specs import KernelSpec, Param

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_ROOM_BYTES = 1 << 30  # the kernels of a model take tens of MB; a compiler's temporary files as much a job
_NO_GPU = "use a machine with an H100 or H200; without one the CPU reference runs models"
_PURPOSES = ("generate", "build", "run")


@dataclass(frozen=True)
class Check:
    """One line of the report; ``needed_to`` is the first of generate, build and run that fails without it."""

    name: str
    needed_to: str
    ok: bool
    detail: str
    remedy: str = ""


class _MissingError(Exception):
    """What a check found wanting, and what to do about it."""

    def __init__(self, detail: str, remedy: str) -> None:
        super().__init__(detail)
        self.remedy = remedy


def add_parsers(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "doctor",
        help="say what this machine has and lacks to build and run kernels",
        description="Say what this machine has and lacks, and what helps. Exit status 0: kernels can be generated, "
        "built and run here; otherwise 1.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.set_defaults(handler=_doctor)


def examine(settings: BuildSettings) -> tuple[Check, ...]:
    """Check everything; a check that fails keeps no other from being made."""
    examinations: tuple[tuple[str, str, Callable[[BuildSettings], str]], ...] = (
        ("Python", "generate", _python),
        ("Jinja", "generate", _jinja),
        ("nvcc", "build", _with_remedy(_nvcc, INSTALL_NVCC)),
        ("host compiler", "build", _with_remedy(_host_compiler, INSTALL_HOST_COMPILER)),
        ("CUTLASS headers", "build", _with_remedy(_cutlass, INSTALL_CUTLASS)),
        ("cache folder", "build", _cache_folder),
        ("disk space", "build", _disk_space),
        ("trial compilation", "build", _trial),
        ("wheels of kernels", "run", _wheels),
        ("torch", "run", _torch),
        ("cuda-python", "run", _cuda_python),
        ("NVIDIA driver", "run", _driver),
        ("GPU", "run", _gpu),
    )
    return tuple(_checked(name, needed_to, function, settings) for name, needed_to, function in examinations)


def ready(checks: tuple[Check, ...]) -> dict[str, bool]:
    """Say which of generate, build and run this machine can do."""
    return {purpose: all(check.ok for check in checks if check.needed_to == purpose) for purpose in _PURPOSES}


def _doctor(args: argparse.Namespace) -> int:
    checks = examine(BuildSettings.from_environment())
    able = ready(checks)
    if args.json:
        print(json.dumps({"ready": able, "checks": [asdict(check) for check in checks]}, indent=2))
    else:
        print("\n".join(_lines(checks)))
        print("Kernels can be " + ", ".join(f"{word}: {'yes' if able[key] else 'no'}" for key, word in _WORDS.items()))
    return 0 if all(able.values()) else 1


_WORDS = {"generate": "generated", "build": "built", "run": "run"}


def _lines(checks: tuple[Check, ...]) -> Iterator[str]:
    width = max(len(check.name) for check in checks)
    for check in checks:
        status = "ok     " if check.ok else "missing"
        yield f"{status}  {check.name.ljust(width)}  " + check.detail.replace("\n", "\n" + " " * (width + 11))
        if check.remedy and check.remedy not in check.detail:
            yield " " * (width + 11) + f"-> {check.remedy}"


def _checked(name: str, needed_to: str, function: Callable[[BuildSettings], str], settings: BuildSettings) -> Check:
    try:
        return Check(name, needed_to, True, function(settings))
    except _MissingError as missing:
        return Check(name, needed_to, False, str(missing), missing.remedy)
    except OSError as error:
        return Check(name, needed_to, False, f"cannot be examined: {error}", "correct what the system refuses")


def _with_remedy(function: Callable[[BuildSettings], str], remedy: str) -> Callable[[BuildSettings], str]:
    """Make a typed error of the tool chain's a finding with this remedy."""

    def examined(settings: BuildSettings) -> str:
        try:
            return function(settings)
        except FuTransformerError as error:
            raise _MissingError(str(error), remedy) from None

    return examined


def _python(_: BuildSettings) -> str:
    return f"{platform.python_version()} ({sys.executable})"


def _jinja(_: BuildSettings) -> str:
    return _import("jinja2", "jinja2", "pip install jinja2")[1]


def _nvcc(settings: BuildSettings) -> str:
    nvcc = find_nvcc(settings)
    passed_over = "".join(f"\npassed over: {line}" for line in nvcc.passed_over)
    return f"{'.'.join(map(str, nvcc.version))} ({nvcc.origin}: {nvcc.path}){passed_over}"


def _host_compiler(settings: BuildSettings) -> str:
    path = find_host_compiler(settings)
    try:
        asked = subprocess.run(
            [path, "-dumpfullversion"], capture_output=True, text=True, errors="replace", check=False
        )
    except OSError as error:
        raise _MissingError(f"{path} does not run: {error.strerror}", INSTALL_HOST_COMPILER) from None
    return f"{asked.stdout.strip() or 'unknown version'} ({path})"


def _cutlass(settings: BuildSettings) -> str:
    include = find_cutlass_include(settings)
    text = (include / "cutlass" / "version.h").read_text(encoding="utf-8")
    numbers = re.findall(r"#define CUTLASS_(?:MAJOR|MINOR|PATCH) (\d+)", text)
    return f"{'.'.join(numbers)} ({include})"


def _cache_folder(settings: BuildSettings) -> str:
    existing = _existing(settings.cache_root)
    try:
        with tempfile.TemporaryDirectory(dir=existing):
            pass
    except OSError as error:
        raise _MissingError(
            f"{settings.cache_root} cannot be written ({error.strerror}: {existing})",
            "point FUTRANSFORMER_CACHE at a folder that can",
        ) from None
    return str(settings.cache_root) + ("" if settings.jit else " (FUTRANSFORMER_DISABLE_JIT: nothing is compiled)")


def _disk_space(settings: BuildSettings) -> str:
    free = shutil.disk_usage(_existing(settings.cache_root)).free
    if free < _ROOM_BYTES:
        raise _MissingError(
            f"{free / 1e9:.1f} GB free where {settings.cache_root} lies, {_ROOM_BYTES / 1e9:.1f} GB are needed",
            "make room, or point FUTRANSFORMER_CACHE at another disk",
        )
    return f"{free / 1e9:.1f} GB free"


def _existing(path: Path) -> Path:
    return next(folder for folder in (path, *path.parents) if folder.exists())


@dataclass(frozen=True)
class _TrialSpec(KernelSpec):
    """The smallest kernel that needs everything: nvcc, its headers, the host compiler, CUTLASS, temporary files."""

    template = "trial"

    @property
    def name(self) -> str:
        return "trial"

    @property
    def params(self) -> tuple[Param, ...]:
        return (Param("out", "pointer", "int"),)

    @property
    def threads(self) -> int:
        return 32


_TRIAL_SOURCE = """\
#include <cuda.h>
#include <cutlass/version.h>
extern "C" __global__ void trial(int* out) { out[threadIdx.x] = CUTLASS_MAJOR; }
"""


def _trial(settings: BuildSettings) -> str:
    try:
        find_toolchain(settings)
    except FuTransformerError:
        raise _MissingError("not tried: the tool chain is not complete", "install what is missing above") from None
    with tempfile.TemporaryDirectory(prefix="futransformer-doctor-") as folder:
        apart = replace(settings, cache_root=Path(folder), jit=True, jobs=1)
        try:
            (record,) = build_kernels((_TrialSpec(),), settings=apart, render=lambda _: _TRIAL_SOURCE)
        except BuildError as error:
            words, _, _ = str(error).partition("\nThe full log: ")  # which goes with the temporary folder
            raise _MissingError(words, "if nvcc refuses the host compiler, name another in NVCC_CCBIN") from None
    return f"sm_90a cubin in {record.compile_seconds:.1f} s"


def _wheels(_: BuildSettings) -> str:
    wheels = [
        f"{wheel.name} {wheel.version}"
        + ("" if wheel.serves_this_version else f", not for this version, {__version__}")
        for wheel in installed_kernels()
    ]
    return "\n".join(wheels) or "none installed: kernels come from the cache, or from an export"


def _torch(_: BuildSettings) -> str:
    torch, version = _import("torch", "torch", "pip install 'torch>=2.11'")
    if torch.version.cuda is None:
        raise _MissingError(
            f"{version} is built without CUDA",
            "pip uninstall torch, then pip install 'torch>=2.11' --index-url https://download.pytorch.org/whl/cu130",
        )
    return f"{version}, CUDA {torch.version.cuda}"


def _cuda_python(_: BuildSettings) -> str:
    return _import("cuda.bindings.driver", "cuda-bindings", "pip install 'cuda-python>=13.0,<14'")[1]


def _driver(settings: BuildSettings) -> str:
    number = _cuda("cuDriverGetVersion")
    version = (number // 1000, number % 1000 // 10)
    try:
        built_by = find_nvcc(settings).version[:2]
    except FuTransformerError:
        built_by = (0, 0)
    if version[0] < built_by[0]:
        raise _MissingError(
            f"serves CUDA {version[0]}.{version[1]}, older than nvcc {built_by[0]}.{built_by[1]} builds for",
            f"install a driver for CUDA {built_by[0]}, or an nvcc of CUDA {version[0]}",
        )
    return f"CUDA {version[0]}.{version[1]}"


def _gpu(_: BuildSettings) -> str:
    hopper: list[str] = []
    others: list[str] = []
    try:
        count = _cuda("cuDeviceGetCount")
    except _MissingError as missing:
        raise _MissingError(f"not found without a driver that answers ({missing})", _NO_GPU) from None
    for ordinal in range(count):
        device = _cuda("cuDeviceGet", ordinal)
        # a buffer of the length asked for: the name, a NUL, and whatever was in the buffer before
        name = _cuda("cuDeviceGetName", 128, device).partition(b"\0")[0].decode().strip()
        attributes = _import("cuda.bindings.driver", "cuda-bindings", "")[0].CUdevice_attribute
        major = _cuda("cuDeviceGetAttribute", attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device)
        minor = _cuda("cuDeviceGetAttribute", attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device)
        line = f"{name}, compute capability {major}.{minor}, {_cuda('cuDeviceTotalMem', device) / 1e9:.0f} GB"
        (hopper if (major, minor) == (9, 0) else others).append(line)
    if not hopper:
        raise _MissingError(
            f"no Hopper GPU, only: {'; '.join(others)}" if others else "the driver finds no GPU",
            _NO_GPU,
        )
    return "; ".join(hopper)


def _cuda(function: str, *arguments: Any) -> Any:
    """Call the CUDA driver; what is missing when it does not answer."""
    driver, _ = _import("cuda.bindings.driver", "cuda-bindings", "pip install 'cuda-python>=13.0,<14'")
    remedy = "install the NVIDIA driver (580 or newer serves CUDA 13), or use a machine that has one"
    try:
        results = [driver.cuInit(0), getattr(driver, function)(*arguments)]
    except RuntimeError as error:  # libcuda.so is not there
        raise _MissingError(f"not installed ({error})", remedy) from None
    for status, *_ in results:
        if status != driver.CUresult.CUDA_SUCCESS:
            raise _MissingError(f"{status.name} from {function}", remedy)
    return results[-1][1]


def _import(module: str, distribution: str, install: str) -> tuple[ModuleType, str]:
    """Import a module, however broken its installation may be; return it and its version."""
    try:
        return importlib.import_module(module), metadata.version(distribution)
    except Exception as error:  # a broken package can raise anything
        raise _MissingError(f"cannot be imported ({type(error).__name__}: {error})", install) from None
