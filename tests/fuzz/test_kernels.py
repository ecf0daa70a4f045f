"""Manifests and exports of kernels: an ArtifactError, or exactly the records and cubins that were built."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from futransformer.build.export import load_exported
from futransformer.build.load import load_or_build
from futransformer.build.manifest import KernelRecord, read_kernel_manifest
from futransformer.build.ptxas import Resources
from futransformer.generator.errors import ArtifactError
from futransformer.generator.schedules import shipped_table
from futransformer.generator.specs import ABI_VERSION
from tests.build.conftest import TinySpec
from tests.fuzz.damage import damaged, edited, json_text, unless_refused

CUBIN = b"\x7fELF" + bytes(range(256))
SPEC = TinySpec("one")
KERNEL: dict[str, Any] = {
    "name": SPEC.name,
    "template": "tiny",
    "params": [{"name": p.name, "kind": p.kind, "ctype": p.ctype} for p in SPEC.params],
    "threads": SPEC.threads,
    "cluster": list(SPEC.cluster),
    "shared_bytes": SPEC.shared_bytes,
    "resources": dict.fromkeys(Resources.__dataclass_fields__, 0),
    "cubin": "one.cubin",
    "cubin_sha256": hashlib.sha256(CUBIN).hexdigest(),
    "compile_seconds": 1.5,
    "nvcc_version": "13.0",
    "abi_version": ABI_VERSION,
    "source_key": "a",
    "toolchain_key": "b",
}
TABLE = {**shipped_table().to_json(), "rows": shipped_table().to_json()["rows"][:2]}
MODEL = {"schema": 1, "config": "tiny", "precision": "bf16", "table": TABLE, "kernels": [KERNEL]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("export")


def write(folder: Path, manifest: bytes, cubin: bytes = CUBIN) -> None:
    (folder / "one.cubin").write_bytes(cubin)
    (folder / "manifest.json").write_bytes(manifest)


def assert_reads_back(record: KernelRecord, said: dict[str, Any]) -> None:
    """Everything that a record has is what the file says; a key that nobody knows may stand beside it."""
    read = json.loads(json.dumps(record.to_json()))
    assert all(read[key] == said[key] for key in read if key not in {"params", "resources"})
    for one, other in [(read["resources"], said["resources"]), *zip(read["params"], said["params"], strict=True)]:
        assert {**other, **one} == other


@given(text=json_text(edited(MODEL)))
def test_an_export_is_refused_or_read_as_it_stands(folder: Path, text: bytes) -> None:
    write(folder, text)
    read = unless_refused(lambda: (load_exported(folder), load_or_build([SPEC], folder=folder)), ArtifactError)
    if read is None:
        return
    manifest, loaded = read
    said = json.loads(text)
    assert len(manifest.kernels) == len(said["kernels"])
    for record, written in zip(manifest.kernels, said["kernels"], strict=True):
        assert_reads_back(record, written)
    record, image = loaded[SPEC.name]
    assert (record.params, record.threads, image) == (SPEC.params, SPEC.threads, CUBIN)


@given(text=json_text(edited({"schema": 1, "kernel": KERNEL})))
def test_a_kernels_manifest_is_refused_or_read_as_it_stands(folder: Path, text: bytes) -> None:
    write(folder, text)
    record = unless_refused(lambda: read_kernel_manifest(folder), ArtifactError)
    if record is None:
        return
    assert_reads_back(record, json.loads(text)["kernel"])
    assert record.cubin.parent == folder


@given(cubin=st.just(CUBIN) | damaged(CUBIN))
def test_a_cubin_is_refused_or_the_one_that_was_built(folder: Path, cubin: bytes) -> None:
    write(folder, json.dumps(MODEL).encode(), cubin)
    loaded = unless_refused(lambda: load_or_build([SPEC], folder=folder), ArtifactError)
    assert (loaded is not None) == (cubin == CUBIN)
