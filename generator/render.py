"""Spec -> CUDA source, through Jinja. A name that a template misspells is an error, never an empty string."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from .specs import KernelSpec

if TYPE_CHECKING:
    import jinja2

TEMPLATES = Path(__file__).resolve().parent.parent / "templates"


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    import jinja2  # noqa: PLC0415 - `futransformer doctor` says so where it is missing

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )


def render(spec: KernelSpec) -> str:
    """Return the complete source of the kernel that ``spec`` describes; the same spec always gives the same text."""
    return _environment().get_template(spec.template).render(spec.context())
