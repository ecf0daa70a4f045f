"""The generated kernels under test, loaded once a model; skipped with the driver's own reason where they cannot run."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest

from futransformer.build.load import load_or_build
from futransformer.build.settings import BuildSettings
from futransformer.build.toolchain import find_cutlass_include, find_host_compiler, find_nvcc
from futransformer.driver import Kernel, hopper_problem, require_hopper
from futransformer.generator.specs import GemmSpec, KernelSpec
from futransformer.library import KernelLibrary
from tests.ops.models import COPIES_NAME, TAILS_NAME, model_config, precision_of, tested_plan
from tests.ops.stand_in import with_poisoned_outputs


@pytest.fixture(scope="session")
def exports(request: pytest.FixtureRequest) -> Callable[[str], Path | None]:
    """Skip where kernels cannot run; else return a function from a model's name to its export, None for the cache."""
    problem = hopper_problem()
    if problem is not None:
        pytest.skip(problem)
    folder: Path | None = request.config.getoption("--kernels")
    return lambda name: folder / name if folder else None


@pytest.fixture(scope="session")
def gpu_ops(exports: Callable[[str], Path | None]) -> Callable[[str], KernelLibrary]:
    """Return a function from a model's name to its kernel library, whose outputs begin as NaN."""

    @cache
    def load(name: str) -> KernelLibrary:
        plan = tested_plan(name)
        built = load_or_build(plan.specs(), folder=exports(name))
        precision, device = precision_of(name), require_hopper()
        return with_poisoned_outputs(KernelLibrary(model_config(name), precision, plan, built, device))

    return load


@pytest.fixture(scope="session")
def gpu_kernel(exports: Callable[[str], Path | None]) -> Callable[[KernelSpec], Kernel]:
    """Return a function that loads one kernel of no model's: its export is that of the tails, or of the copies."""

    @cache
    def load(spec: KernelSpec) -> Kernel:
        built = load_or_build([spec], folder=exports(TAILS_NAME if isinstance(spec, GemmSpec) else COPIES_NAME))
        return Kernel(spec, *built[spec.name], require_hopper())

    return load


@pytest.fixture(scope="session")
def with_cute(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that compiles a program of this folder for the host, with our headers and CuTe's own."""
    settings = BuildSettings.from_environment()

    @cache
    def compiled(name: str) -> Path:
        program = tmp_path_factory.mktemp("host") / name
        toolkit = find_nvcc(settings).path.resolve().parent.parent / "include"
        includes = [settings.include_dir, find_cutlass_include(settings), toolkit, toolkit / "cccl"]
        options = [option for folder in includes for option in ("-isystem", str(folder))]
        source = str(Path(__file__).parent / f"{name}.cpp")
        command = [str(find_host_compiler(settings)), "-std=c++17", "-O1", *options, source, "-o", str(program)]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr
        return program

    return compiled


@pytest.fixture
def emulated(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that builds a kernel's own source for the host (emulator.h) and gives the program.

    ``emulated("rows")`` builds emulated_rows.cpp with rows.cuh, whose includes the emulator replaces; ``headers`` are
    further ones that it takes as they are, and ``source`` gives another program's text.
    """
    folder, settings = Path(__file__).parent, BuildSettings.from_environment()

    def build(kernel: str, *headers: str, source: str | None = None) -> Path:
        for header in (kernel, *headers):
            text = (settings.include_dir / "futransformer" / f"{header}.cuh").read_text()
            text = re.sub(r'^#include (<cut.*|".*)$', "", text, flags=re.MULTILINE)
            (tmp_path / f"{header}.cuh").write_text(text)
        program_text = source or (folder / f"emulated_{kernel}.cpp").read_text()
        (tmp_path / f"{kernel}.cpp").write_text(program_text)
        program = tmp_path / kernel
        options = ["-std=c++17", "-O2", "-w", "-ffp-contract=off", "-fno-extern-tls-init"]
        options += ["-include", str(folder / "emulator.h")]
        sources = ["-I", str(tmp_path), str(tmp_path / f"{kernel}.cpp"), "-o", str(program)]
        compiler = str(find_host_compiler(settings))
        compiled = subprocess.run([compiler, *options, *sources], capture_output=True, text=True, check=False)
        assert compiled.returncode == 0, compiled.stderr
        return program

    return build


@pytest.fixture
def emulate(emulated: Callable[..., Path]) -> Callable[..., str]:
    """Return a function that builds as ``emulated`` does, runs the program and gives what it printed.

    ``runs`` are the arguments of each of its runs.
    """

    def run(*headers: str, source: str | None = None, runs: Sequence[Sequence[str]] = ((),)) -> str:
        program, printed = emulated(*headers, source=source), ""
        for arguments in runs:
            ran = subprocess.run([str(program), *arguments], capture_output=True, text=True, check=False)
            assert ran.returncode == 0, ran.stdout + ran.stderr
            printed += ran.stdout
        return printed

    return run
