"""The manifest: what the runtime must know of a built kernel, in JSON beside its cubin.

A kernel is marshalled and launched by its record alone. A cubin is named relative to its manifest, so a folder can be
moved, and is read through ``load_cubin``, which checks its sha256.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from ..generator.errors import ArtifactError, ConfigError
from ..generator.json_reader import names_a_file, parse_json
from ..generator.schedules import ScheduleTable, table_from_json
from ..generator.specs import ABI_VERSION, Param
from .ptxas import Resources

SCHEMA = 1
FILE_NAME = "manifest.json"
_REBUILD = "remove it and run: futransformer build CONFIG"

T = TypeVar("T")


@dataclass(frozen=True)
class KernelRecord:
    """One built kernel."""

    name: str  # also of its extern "C" function
    template: str
    params: tuple[Param, ...]
    threads: int  # a block
    cluster: tuple[int, int, int]  # blocks
    shared_bytes: int  # dynamic, a block
    resources: Resources
    cubin: Path
    cubin_sha256: str
    compile_seconds: float
    nvcc_version: str
    abi_version: int
    source_key: str
    toolchain_key: str

    def to_json(self) -> dict[str, Any]:
        """As it stands in a manifest; the cubin by file name."""
        return {**asdict(self), "cubin": self.cubin.name}

    @classmethod
    def from_json(cls, data: Any, manifest: Path) -> KernelRecord:
        """Read one record back; ArtifactError when it is malformed or of another ABI."""
        take = _Reader(data, manifest)
        take.check_abi()
        return cls(
            name=take("name", str),
            template=take("template", str),
            params=tuple(
                Param(param("name", str), param("kind", str), param("ctype", str))
                for param in (_Reader(item, manifest) for item in take("params", list))
            ),
            threads=take("threads", int),
            cluster=take.triple("cluster"),
            shared_bytes=take("shared_bytes", int),
            resources=take.resources("resources"),
            cubin=manifest.parent / take.file_name("cubin"),
            cubin_sha256=take("cubin_sha256", str),
            compile_seconds=take("compile_seconds", float),
            nvcc_version=take("nvcc_version", str),
            abi_version=take("abi_version", int),
            source_key=take("source_key", str),
            toolchain_key=take("toolchain_key", str),
        )


@dataclass(frozen=True)
class ModelManifest:
    """All kernels of one model shape and precision; ``table`` where another than the shipped one planned them."""

    config: str
    precision: str
    kernels: tuple[KernelRecord, ...]
    table: ScheduleTable | None = None


def load_cubin(record: KernelRecord) -> bytes:
    """Read a record's cubin; ArtifactError when it is missing or not what was built."""
    try:
        image = record.cubin.read_bytes()
    except OSError as error:
        raise ArtifactError(f"{record.cubin}: cannot be read ({error.strerror}); {_REBUILD}") from None
    found = hashlib.sha256(image).hexdigest()
    if found != record.cubin_sha256:
        raise ArtifactError(
            f"{record.cubin}: is corrupt ({len(image)} bytes, sha256 {found[:16]}..., "
            f"the manifest says {record.cubin_sha256[:16]}...); {_REBUILD}"
        )
    return image


def write_kernel_manifest(record: KernelRecord, folder: Path) -> None:
    """Write the manifest of one kernel into its folder."""
    _write(folder / FILE_NAME, {"schema": SCHEMA, "kernel": record.to_json()})


def read_kernel_manifest(folder: Path) -> KernelRecord:
    """Read the manifest of one kernel."""
    path = folder / FILE_NAME
    return KernelRecord.from_json(_read(path)("kernel", dict), path)


def write_model_manifest(manifest: ModelManifest, path: Path) -> None:
    """Write the manifest of a model's kernels."""
    content: dict[str, Any] = {"schema": SCHEMA, "config": manifest.config, "precision": manifest.precision}
    if manifest.table is not None:
        content["table"] = manifest.table.to_json()
    content["kernels"] = [record.to_json() for record in manifest.kernels]
    _write(path, content)


def read_model_manifest(path: Path) -> ModelManifest:
    """Read the manifest of a model's kernels."""
    take = _read(path)
    kernels = tuple(KernelRecord.from_json(item, path) for item in take("kernels", list))
    table = None
    if "table" in take.data:
        try:
            table = table_from_json(take("table", dict), path)
        except ConfigError as error:
            raise ArtifactError(f"{error}; {_REBUILD}") from None
    return ModelManifest(take("config", str), take("precision", str), kernels, table)


class _Reader:
    """Typed access to one JSON object of a manifest; every failure names the file and the remedy."""

    def __init__(self, data: Any, path: Path) -> None:
        self.data = data
        self.path = path
        if not isinstance(data, dict):
            raise self.error(f"holds {type(data).__name__} where an object belongs")

    def __call__(self, key: str, kind: type[T]) -> T:
        value = self.data.get(key)
        if kind is float and isinstance(value, int):
            try:
                value = float(value)
            except OverflowError:  # an int beyond float64
                value = None
        if not isinstance(value, kind) or isinstance(value, bool):
            raise self.error(f"has no {kind.__name__} called {key!r}")
        return value

    def triple(self, key: str) -> tuple[int, int, int]:
        values = self(key, list)
        if len(values) != 3 or not all(type(value) is int for value in values):
            raise self.error(f"{key!r} must be three integers")
        return (values[0], values[1], values[2])

    def resources(self, key: str) -> Resources:
        take = _Reader(self(key, dict), self.path)
        return Resources(**{field: take(field, int) for field in Resources.__dataclass_fields__})

    def file_name(self, key: str) -> str:
        name = self(key, str)
        if not names_a_file(name):
            raise self.error(f"{key!r} must be a file beside the manifest, not {name!r}")
        return name

    def check_abi(self) -> None:
        abi = self("abi_version", int)
        if abi != ABI_VERSION:
            raise self.error(f"was built for kernel ABI {abi}, this version has ABI {ABI_VERSION}")

    def error(self, fault: str) -> ArtifactError:
        return ArtifactError(f"{self.path}: {fault}; {_REBUILD}")


def _read(path: Path) -> _Reader:
    try:
        data = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read ({error.strerror}); {_REBUILD}") from None
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{path}: is not JSON ({error}); {_REBUILD}") from None
    take = _Reader(data, path)
    if take("schema", int) != SCHEMA:
        raise take.error(f"has schema {data['schema']}, this version reads schema {SCHEMA}")
    return take


def _write(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
