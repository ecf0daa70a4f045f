"""What the runtime asks for: the cubins of a plan's kernels, from an exported folder or from the cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ..generator.errors import ArtifactError
from ..generator.specs import KernelSpec
from .compile import BuildEvent, build_kernels
from .export import load_exported
from .manifest import FILE_NAME, KernelRecord, ModelManifest, load_cubin
from .settings import BuildSettings

LoadedKernels = dict[str, tuple[KernelRecord, bytes]]  # record and checked cubin, by kernel name


def load_or_build(
    specs: Sequence[KernelSpec],
    *,
    folder: Path | None = None,
    settings: BuildSettings | None = None,
    progress: Callable[[BuildEvent], None] | None = None,
) -> LoadedKernels:
    """Return the record and the checked cubin of every spec, by kernel name.

    ``folder`` is an export of ``futransformer build --output``, and nothing is compiled. Without it the cache serves,
    and what it lacks is compiled; ``progress`` hears of every kernel.
    """
    if folder is None:
        records = build_kernels(specs, settings=settings or BuildSettings.from_environment(), progress=progress)
    else:
        exported = load_exported(folder)
        records = _exported_records(specs, exported, folder / FILE_NAME)
    return {record.name: (record, load_cubin(record)) for record in records}


def _exported_records(specs: Sequence[KernelSpec], exported: ModelManifest, manifest: Path) -> tuple[KernelRecord, ...]:
    """Find every spec's kernel; refuse what is missing, or would be launched otherwise than it was built for."""
    records = {record.name: record for record in exported.kernels}
    again = f"run: futransformer build CONFIG --output {manifest.parent}"
    missing = [spec.name for spec in specs if spec.name not in records]
    if missing:
        raise ArtifactError(
            f"{manifest}: lacks {len(missing)} of {len(specs)} kernels, first {missing[0]}; it was exported for "
            f"{exported.config} ({exported.precision}), or by another version: {again}"
        )
    for spec in specs:
        record = records[spec.name]
        built = (record.params, record.threads, record.cluster, record.shared_bytes)
        if built != (spec.params, spec.threads, spec.cluster, spec.shared_bytes):
            raise ArtifactError(
                f"{manifest}: kernel {spec.name} has another launch interface than this version's; {again}"
            )
    return tuple(records[spec.name] for spec in specs)
