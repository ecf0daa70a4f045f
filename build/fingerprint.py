"""The cache key, in two levels, of everything that decides a cubin; no path and no modification time enters.

- The *source key*: the rendered source, our headers that it includes (transitively, by content), the compiler's flags,
  the launch interface and the ABI version. It is computed without a tool chain, so built kernels are found without one.
- The *tool-chain key*: all that ``nvcc --version`` says, and the content of the CUTLASS tree (26 MB, 0.2 s to hash).

The host compiler only preprocesses, and the code it sees is the same for every g++: it is left out.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ..generator.errors import BuildError
from ..generator.specs import ABI_VERSION, KernelSpec
from .toolchain import Toolchain

_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include[ \t]*(.*)$", re.MULTILINE)
_INCLUDE_NAME = re.compile(r'[<"]([^>"]+)[>"]')


@dataclass(frozen=True)
class Fingerprint:
    """The two keys of one kernel as one tool chain builds it."""

    source_key: str
    toolchain_key: str


def source_key(spec: KernelSpec, source: str, flags: Sequence[str], include_dir: Path) -> str:
    """Hash everything of ours that decides the kernel and its record."""
    interface = {
        "abi": ABI_VERSION,
        "params": [asdict(param) for param in spec.params],
        "threads": spec.threads,
        "cluster": spec.cluster,
        "shared_bytes": spec.shared_bytes,
        "flags": list(flags),
    }
    headers = header_closure(source, include_dir)
    parts = [json.dumps(interface, sort_keys=True).encode(), source.encode()]
    return _digest([*parts, *(part for name, text in headers.items() for part in (name.encode(), text))])


def toolchain_key(toolchain: Toolchain) -> str:
    """Hash what the tool chain is, wherever it lies."""
    root = toolchain.cutlass_include
    files = sorted((path.relative_to(root).as_posix(), path) for path in root.rglob("*") if path.is_file())
    headers = (part for name, path in files for part in (name.encode(), path.read_bytes()))
    return _digest([toolchain.nvcc.version_text.encode(), *headers])


def header_closure(source: str, include_dir: Path) -> dict[str, bytes]:
    """Return our headers that ``source`` includes, directly or not, by name and in order of name.

    Names that are not found under ``include_dir`` belong to CUTLASS, CUDA or the host and are the tool chain's.
    """
    found: dict[str, bytes] = {}
    waiting = [("", name) for name in _included(source)]
    while waiting:
        folder, name = waiting.pop()
        # A quoted name is looked up beside its includer first; both readings count, which can only rebuild too much.
        for candidate in {posixpath.normpath(posixpath.join(folder, name)): None, posixpath.normpath(name): None}:
            path = include_dir / candidate
            if candidate not in found and path.is_file():
                found[candidate] = path.read_bytes()
                parent = posixpath.dirname(candidate)
                waiting += [(parent, inner) for inner in _included(found[candidate].decode())]
    return dict(sorted(found.items()))


def _included(text: str) -> list[str]:
    names = []
    for operand in _INCLUDE.findall(text):
        name = _INCLUDE_NAME.match(operand)
        if name is None:
            raise BuildError(f"#include {operand.strip()}: a computed include has no fingerprint; write the name out")
        names.append(name[1])
    return names


def _digest(parts: Iterable[bytes]) -> str:
    """Hash a list of byte strings; each by its own hash, so that no two lists run together."""
    total = hashlib.sha256()
    for part in parts:
        total.update(hashlib.sha256(part).digest())
    return total.hexdigest()
