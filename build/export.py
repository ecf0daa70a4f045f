"""Kernels in a folder of their own: cubins and one manifest, for a machine that has no tool chain.

A cubin's file name ends in a part of its sha256, and the manifest is replaced last, in one step: whoever reads the
folder while it is written anew sees the old kernels or the new ones, never a mixture.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path

from ..generator.errors import ArtifactError
from .cache import file_stem, storage_errors
from .manifest import FILE_NAME, ModelManifest, load_cubin, read_model_manifest, write_model_manifest


def export(manifest: ModelManifest, folder: Path) -> ModelManifest:
    """Write a model's kernels into ``folder``, replacing those of an earlier export; return them as they lie there."""
    with storage_errors("the output folder", folder, "choose one with --output"):
        folder.mkdir(parents=True, exist_ok=True)
        before = _cubins(folder)
        records = []
        for record in manifest.kernels:
            path = folder / f"{file_stem(record.name)}-{record.cubin_sha256[:12]}.cubin"
            write_atomically(path, load_cubin(record))
            records.append(replace(record, cubin=path))
        exported = replace(manifest, kernels=tuple(records))
        staged = folder / f".{FILE_NAME}.{os.getpid()}"
        try:
            write_model_manifest(exported, staged)
            staged.replace(folder / FILE_NAME)
        finally:
            staged.unlink(missing_ok=True)
        for path in before - {record.cubin for record in records}:
            path.unlink(missing_ok=True)
    return exported


def load_exported(folder: Path) -> ModelManifest:
    """Read an exported folder and check every cubin; ArtifactError names the file that is missing or corrupt."""
    manifest = read_export(folder)
    for record in manifest.kernels:
        load_cubin(record)
    return manifest


def read_export(folder: Path) -> ModelManifest:
    """Read what an exported folder says of itself; ArtifactError when it is none."""
    if not (folder / FILE_NAME).is_file():
        raise ArtifactError(
            f"{folder} is no export, it holds no {FILE_NAME}; write one with: "
            f"futransformer build CONFIG --output {folder}"
        )
    return read_model_manifest(folder / FILE_NAME)


def _cubins(folder: Path) -> set[Path]:
    """The cubins of the export that lies in ``folder``: what may be removed once another has taken its place."""
    try:
        return {record.cubin for record in read_model_manifest(folder / FILE_NAME).kernels}
    except ArtifactError:
        return set()


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file in one step: whoever reads it meanwhile sees the old one or the new one."""
    descriptor, staged = tempfile.mkstemp(prefix=".", suffix=path.suffix, dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        Path(staged).chmod(0o644)
        Path(staged).replace(path)
    finally:
        Path(staged).unlink(missing_ok=True)
