"""What the runtime asks for: the cubins of a plan's kernels, from an exported folder or from the cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ..generator.errors import ArtifactError
from ..generator.specs import KernelSpec
from .compile import build_kernels
from .export import load_exported
from .manifest import FILE_NAME, KernelRecord, load_cubin
from .settings import BuildSettings


def load_or_build(
    specs: Sequence[KernelSpec],
    *,
    folder: Path | None = None,
    settings: BuildSettings | None = None,
    progress: Callable[[str], None] | None = None,
) -> dict[str, tuple[KernelRecord, bytes]]:
    """Return the record and the checked cubin of every spec, by kernel name.

    ``folder`` is an export of ``futransformer build --output``, and nothing is compiled. Without it the cache serves,
    and what it lacks is compiled; ``progress`` gets a line for every kernel that is.
    """
    if folder is None:
        built = build_kernels(
            specs,
            settings=settings or BuildSettings.from_environment(),
            progress=progress and (lambda event: None if event.cached else progress(str(event))),
        )
        return {record.name: (record, load_cubin(record)) for record in built}
    exported = {record.name: record for record in load_exported(folder).kernels}
    for spec in specs:
        _check_interface(spec, exported.get(spec.name), folder / FILE_NAME)
    return {spec.name: (exported[spec.name], load_cubin(exported[spec.name])) for spec in specs}


def _check_interface(spec: KernelSpec, record: KernelRecord | None, manifest: Path) -> None:
    """Refuse an exported kernel that would be launched otherwise than it was built for."""
    if record is None:
        raise ArtifactError(
            f"{manifest}: has no kernel {spec.name}; it was exported for another model or by another version: "
            f"run futransformer build CONFIG --output {manifest.parent}"
        )
    built = (record.params, record.threads, record.cluster, record.shared_bytes)
    if built != (spec.params, spec.threads, spec.cluster, spec.shared_bytes):
        raise ArtifactError(
            f"{manifest}: kernel {spec.name} has another launch interface than this version's; "
            f"run futransformer build CONFIG --output {manifest.parent}"
        )
