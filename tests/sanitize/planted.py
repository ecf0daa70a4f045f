"""Kernels with one fault each, and one without: what shows that a tool of compute-sanitizer sees what it must.

``python -m tests.sanitize.planted FOLDER`` builds them like any other kernel and exports them to FOLDER/planted.
Every kernel is one block of 64 threads that reads ``values`` [64] and writes ``out`` [64], both float32; ``copies`` is
how often the ring turns, a number that the compiler must not know.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import jinja2

from futransformer.build.compile import build_kernels
from futransformer.build.export import export
from futransformer.build.manifest import ModelManifest
from futransformer.build.settings import BuildSettings
from futransformer.generator.render import TEMPLATES
from futransformer.generator.specs import KernelSpec, Param
from futransformer.generator.specs.base import pointer

EXPORT = "planted"
THREADS = 64
SOUND = "none"  # a ring of bulk copies without a fault: what a tool says of it, it says in error


@dataclass(frozen=True)
class Fault:
    """What is planted: the tool that should say so, and whether a tool that does not is refused."""

    name: str
    tool: str
    required: bool


# Required is what the tool was seen to find (2025.3.1, H200). The others show how far it understands bulk copies,
# transaction barriers, and threads that stay away from a barrier: what it does not see there it does not see in our
# kernels either.
FAULTS = (
    Fault("write_past_end", "memcheck", required=True),
    Fault("copy_past_end", "memcheck", required=False),
    Fault("shared_race", "racecheck", required=True),
    Fault("unawaited_copy", "racecheck", required=False),
    Fault("divergent_barrier", "synccheck", required=False),
    Fault("barrier_without_init", "synccheck", required=True),
)


@dataclass(frozen=True)
class PlantedSpec(KernelSpec):
    """A kernel with one fault, or with none."""

    template: ClassVar[str] = "planted.cu.jinja"

    fault: str

    @property
    def name(self) -> str:
        """See KernelSpec.name."""
        return f"planted_{self.fault}"

    @property
    def params(self) -> tuple[Param, ...]:
        """See KernelSpec.params."""
        return (pointer("values", "const float"), Param("copies", "int32"), pointer("out", "float"))

    @property
    def threads(self) -> int:
        """See KernelSpec.threads."""
        return THREADS

    def context(self) -> dict[str, Any]:
        """See KernelSpec.context; ``ring``: whether the kernel is the ring of bulk copies."""
        return super().context() | {"ring": self.fault in (SOUND, "copy_past_end", "unawaited_copy")}


# Sound first: a fault may leave the context broken.
SPECS = tuple(PlantedSpec(fault) for fault in (SOUND, *(fault.name for fault in FAULTS)))


def specs_for(tool: str) -> tuple[PlantedSpec, ...]:
    """The sound kernel, and those whose faults the tool should find."""
    return SPECS[:1] + tuple(PlantedSpec(fault.name) for fault in FAULTS if fault.tool == tool)


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    loader = jinja2.FileSystemLoader([Path(__file__).parent, TEMPLATES])
    return jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)


def render(spec: KernelSpec) -> str:
    """The source of a planted kernel."""
    return _environment().get_template(spec.template).render(spec.context())


def main(folder: Path) -> None:
    """Build and export."""
    records = build_kernels(SPECS, settings=BuildSettings.from_environment(), progress=print, render=render)
    export(ModelManifest(EXPORT, "float32", records), folder / EXPORT)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
