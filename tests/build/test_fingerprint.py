"""The key: what enters it, and what does not."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from futransformer.build.fingerprint import header_closure, source_key
from futransformer.generator.errors import BuildError
from futransformer.generator.specs import KernelSpec
from tests.build.conftest import TinySpec

SOURCE = '#include "futransformer/a.cuh"\n#include <cute/tensor.hpp>\n'


@pytest.fixture
def headers(tmp_path: Path) -> Path:
    folder = tmp_path / "include" / "futransformer"
    folder.mkdir(parents=True)
    (folder / "a.cuh").write_text('#pragma once\n#  include "b.cuh" // beside it\n#include <cuda.h>\n')
    (folder / "b.cuh").write_text("#include <futransformer/a.cuh>\n#include <futransformer/../futransformer/c.cuh>\n")
    (folder / "c.cuh").write_text("")
    (folder / "unused.cuh").write_text("")
    return tmp_path / "include"


def test_headers_are_followed_as_the_compiler_does(headers: Path) -> None:
    names = list(header_closure(SOURCE, headers))
    assert names == ["futransformer/a.cuh", "futransformer/b.cuh", "futransformer/c.cuh"]


def test_a_header_counts_if_it_is_included_and_only_then(headers: Path) -> None:
    before = source_key(TinySpec(), SOURCE, ("-O3",), headers)
    (headers / "futransformer" / "unused.cuh").write_text("// changed\n")
    assert source_key(TinySpec(), SOURCE, ("-O3",), headers) == before
    (headers / "futransformer" / "c.cuh").write_text("// changed\n")
    assert source_key(TinySpec(), SOURCE, ("-O3",), headers) != before


def test_text_cannot_move_between_headers_unnoticed(headers: Path) -> None:
    b, c = headers / "futransformer" / "b.cuh", headers / "futransformer" / "c.cuh"
    b.write_text('#include "c.cuh"\n')
    c.write_text("int x;\n")
    before = source_key(TinySpec(), SOURCE, (), headers)
    b.write_text('#include "c.cuh"\nint x;\n')
    c.write_text("")
    assert source_key(TinySpec(), SOURCE, (), headers) != before


def test_flags_interface_and_abi_count(headers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Clustered(TinySpec):
        @property
        def cluster(self) -> tuple[int, int, int]:
            return (2, 1, 1)

    @dataclass(frozen=True)
    class Shared(TinySpec):
        @property
        def shared_bytes(self) -> int:
            return 1024

    def key(spec: KernelSpec, *flags: str) -> str:
        return source_key(spec, SOURCE, flags, headers)

    keys = [key(TinySpec()), key(TinySpec(), "-G"), key(TinySpec(block=64)), key(Clustered()), key(Shared())]
    monkeypatch.setattr("futransformer.build.fingerprint.ABI_VERSION", 99)
    keys.append(key(TinySpec()))
    assert len(set(keys)) == len(keys)


def test_a_computed_include_is_refused(headers: Path) -> None:
    with pytest.raises(BuildError, match=r"#include HEADER: a computed include has no fingerprint"):
        header_closure("#define HEADER <x.h>\n#include HEADER\n", headers)
