"""What a user would run instead: one module a family, each call written as that library's own users write it.

A package that is not installed raises RivalMissingError from ``require``; the runner notes it and goes on.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from futransformer.bench.case import RivalMissingError


def require(module: str, package: str) -> Any:
    """Import a rival's module, or say which package lacks."""
    try:
        return import_module(module)
    except ImportError as error:
        raise RivalMissingError(f"{package} cannot be imported here ({error})") from error
