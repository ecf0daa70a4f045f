"""Options and fixtures that every test may use."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where built kernels and texts may be found; both have a default."""
    parser.addoption("--kernels", type=Path, help="a folder of exports (one a model name) to load kernels from")
    parser.addoption("--text", type=Path, help="a text for perplexity tests; the project's own small text otherwise")
    parser.addoption("--model", type=Path, help="the small model's folder; prepared when missing")
