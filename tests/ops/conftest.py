"""The generated kernels under test, loaded once a model; skipped with the driver's own reason where they cannot run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

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
