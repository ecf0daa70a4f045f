"""The generated kernels under test, loaded once a model; skipped with the driver's own reason where they cannot run."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from futransformer.build.settings import BuildSettings
from futransformer.build.toolchain import find_host_compiler
from futransformer.driver import hopper_problem
from futransformer.generator.config import LlamaConfig, load_config
from futransformer.library import KernelLibrary, load_kernels


def model_config(name: str) -> LlamaConfig:
    """Return a named configuration; ``group16`` is a made-up one with 16 query heads a key/value head."""
    if name == "group16":
        llama = load_config("llama-3.2-1b")
        return replace(llama, name="group16", num_attention_heads=32, num_key_value_heads=2)
    return load_config(name)


@pytest.fixture(scope="session")
def gpu_ops(request: pytest.FixtureRequest) -> Callable[[str], KernelLibrary]:
    """Return a function from a model's name to its kernel library."""
    problem = hopper_problem()
    if problem is not None:
        pytest.skip(problem)
    exports: Path | None = request.config.getoption("--kernels")

    @cache
    def load(name: str) -> KernelLibrary:
        return load_kernels(model_config(name), folder=exports / name if exports else None)

    return load


@pytest.fixture
def emulate(tmp_path: Path) -> Callable[..., str]:
    """Return a function that runs a kernel's own source on the host (emulator.h) and gives what it printed.

    ``emulate("rows")`` builds emulated_rows.cpp with rows.cuh, whose includes the emulator replaces; further names are
    headers that it takes as they are.
    """
    folder, settings = Path(__file__).parent, BuildSettings.from_environment()

    def run(kernel: str, *headers: str) -> str:
        for header in (kernel, *headers):
            source = (settings.include_dir / "futransformer" / f"{header}.cuh").read_text()
            text = re.sub(r'^#include (<cut.*|".*)$', "", source, flags=re.MULTILINE)
            (tmp_path / f"{header}.cuh").write_text(text)
        program = tmp_path / kernel
        options = ["-std=c++17", "-O2", "-w", "-fno-extern-tls-init", "-include", str(folder / "emulator.h")]
        sources = ["-I", str(tmp_path), str(folder / f"emulated_{kernel}.cpp"), "-o", str(program)]
        compiler = str(find_host_compiler(settings))
        compiled = subprocess.run([compiler, *options, *sources], capture_output=True, text=True, check=False)
        assert compiled.returncode == 0, compiled.stderr
        ran = subprocess.run([str(program)], capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout

    return run
