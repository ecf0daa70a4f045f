"""How many inputs, how long one may take, and how much memory all of them may have."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

EXAMPLES = 100  # of a property, by default
MEMORY = 2 << 30  # bytes of address space beyond what is mapped when a module begins


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> None:
    """The same inputs in every default run; more of them, drawn anew, with --fuzz-examples.

    Before a module is imported: a property takes its settings where it is decorated.
    """
    del module_path
    asked: int = parent.config.getoption("--fuzz-examples")
    settings.register_profile(
        "fuzz",
        max_examples=asked or EXAMPLES,
        derandomize=not asked,
        database=None,
        deadline=timedelta(seconds=10),
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )
    settings.load_profile("fuzz")


@pytest.fixture(scope="module", autouse=True)
def bounded_memory() -> Iterator[None]:
    """More memory than the bound is an error of the reader that asks for it, and so a failure."""
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)
