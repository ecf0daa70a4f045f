"""The installed wheels of kernels (``wheel``), found by their entry points; none of their code is imported."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

from .. import __version__
from ..generator.errors import ArtifactError, ToolchainError
from ..generator.render import render
from ..generator.schedules import ScheduleTable, read_table, shipped_table
from ..generator.specs import KernelSpec
from .export import read_export
from .fingerprint import source_key
from .manifest import ModelManifest
from .nvcc import NVCC_FLAGS
from .settings import BuildSettings
from .wheel import GROUP


@dataclass(frozen=True)
class InstalledKernels:
    """One installed wheel; ``folder`` is an export."""

    name: str
    version: str
    folder: Path

    @property
    def serves_this_version(self) -> bool:
        """Whether it was built by this version of FuTransformer, and for no other."""
        return self.version == __version__

    @contextmanager
    def errors(self) -> Iterator[None]:
        """A context in which an ArtifactError says which wheel to install again."""
        try:
            yield
        except ArtifactError as error:
            raise ArtifactError(
                f"{error}. It belongs to the installed wheel {self.name} {self.version}: install that again, or remove "
                f"it: pip uninstall {self.name}"
            ) from None

    def manifest(self) -> ModelManifest:
        """What the wheel says of itself; ArtifactError when it is damaged."""
        with self.errors():
            return read_export(self.folder)


def installed_kernels() -> tuple[InstalledKernels, ...]:
    """Every installed wheel of kernels, by name."""
    found = [
        InstalledKernels(entry.name, entry.dist.version, Path(str(entry.dist.locate_file(entry.value))))
        for entry in entry_points(group=GROUP)
        if entry.dist is not None
    ]
    return tuple(sorted(found, key=lambda wheel: wheel.name))


def find_installed(
    specs_by: Callable[[ScheduleTable], Sequence[KernelSpec]], settings: BuildSettings
) -> InstalledKernels | None:
    """Return the first wheel that holds every kernel as this version's sources, and the wheel's own table, give it.

    ``specs_by`` gives a model's specs as a table plans them. Where FUTRANSFORMER_SCHEDULES names a table, only a wheel
    that was built by that one serves.
    """
    asked = None if settings.schedules is None else read_table(settings.schedules)
    for wheel in installed_kernels():
        if not wheel.serves_this_version:
            continue
        manifest = wheel.manifest()
        table = manifest.table or shipped_table()
        held = {record.name: record.source_key for record in manifest.kernels}
        if asked in (None, table) and all(
            held.get(spec.name) == source_key(spec, render(spec), NVCC_FLAGS, settings.include_dir)
            for spec in specs_by(table)
        ):
            return wheel
    return None


@contextmanager
def mention_installed() -> Iterator[None]:
    """A context in which the error of kernels that are missing names the wheels that were no help."""
    try:
        yield
    except (ArtifactError, ToolchainError) as error:
        wheels = [
            f"{wheel.name} {wheel.version}"
            + (" (of other kernels, or other sources)" if wheel.serves_this_version else f" (this is {__version__})")
            for wheel in installed_kernels()
        ]
        if not wheels:
            raise
        raise type(error)(f"{error}. No installed wheel of kernels serves here: {'; '.join(wheels)}") from None
