"""The build's configuration: one frozen object, read from the environment in one place and passed on.

| variable | meaning |
| --- | --- |
| FUTRANSFORMER_CACHE | the cache folder; else XDG_CACHE_HOME/futransformer, else ~/.cache/futransformer |
| FUTRANSFORMER_NVCC | the nvcc to use, whatever else is installed |
| FUTRANSFORMER_DISABLE_JIT | 1: never compile; a kernel that is not in the cache is an error |
| FUTRANSFORMER_SCHEDULES | a table of measured GEMM schedules; else the one tuned for this card, else the shipped |
| CUDA_HOME, CUDA_PATH | a CUDA tool kit, asked before the one that pip installed |
| NVCC_CCBIN | the host compiler; else g++ on PATH |
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..generator.errors import InputError

HEADERS = Path(__file__).resolve().parent.parent / "templates" / "include"
_BOOLEANS = {"": False, "0": False, "false": False, "no": False, "1": True, "true": True, "yes": True}


@dataclass(frozen=True)
class BuildSettings:
    """Where kernels are cached, what compiles them, and how many at once."""

    cache_root: Path
    nvcc: Path | None = None  # explicit: used or refused, never passed over
    cuda_homes: tuple[tuple[str, Path], ...] = ()  # (variable, folder)
    host_compiler: str = "g++"  # a path, or a name to look up in search_path
    search_path: str = ""  # as PATH
    jit: bool = True
    jobs: int | None = None  # None: as many as cores and memory allow
    lock_timeout: float = 600.0  # seconds to wait for another process that builds the same kernel
    include_dir: Path = HEADERS  # our own device headers
    cutlass_include: Path | None = None  # None: those of the nvidia-cutlass package
    schedules: Path | None = None  # None: the table that was tuned for this card, else the shipped one

    @property
    def tuned(self) -> Path:
        """The folder of the tables that were tuned here, one a kind of card."""
        return self.cache_root / "schedules"

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None, *, jobs: int | None = None) -> BuildSettings:
        """Read every variable that the build heeds."""
        env = os.environ if environ is None else environ
        if jobs is not None and jobs < 1:
            raise InputError(f"jobs must be 1 or more, not {jobs}")
        disable = env.get("FUTRANSFORMER_DISABLE_JIT", "").strip().lower()
        if disable not in _BOOLEANS:
            raise InputError(f"FUTRANSFORMER_DISABLE_JIT must be 1 or 0, not {disable!r}")
        return cls(
            cache_root=_cache_root(env),
            nvcc=Path(env["FUTRANSFORMER_NVCC"]) if env.get("FUTRANSFORMER_NVCC") else None,
            cuda_homes=tuple((name, Path(env[name])) for name in ("CUDA_HOME", "CUDA_PATH") if env.get(name)),
            host_compiler=env.get("NVCC_CCBIN") or "g++",
            search_path=env.get("PATH", ""),
            jit=not _BOOLEANS[disable],
            jobs=jobs,
            schedules=_expanded(env["FUTRANSFORMER_SCHEDULES"]) if env.get("FUTRANSFORMER_SCHEDULES") else None,
        )


def _cache_root(env: Mapping[str, str]) -> Path:
    if env.get("FUTRANSFORMER_CACHE"):
        return _expanded(env["FUTRANSFORMER_CACHE"]).absolute()
    # The XDG specification: a relative XDG_CACHE_HOME is invalid and to be ignored.
    xdg = env.get("XDG_CACHE_HOME", "")
    return (Path(xdg) if os.path.isabs(xdg) else _home(env) / ".cache") / "futransformer"


def _expanded(path: str) -> Path:
    """With ~ written out; of a user whom nobody knows it stays, where Path.expanduser raises a bare RuntimeError."""
    return Path(os.path.expanduser(path))


def _home(env: Mapping[str, str]) -> Path:
    if env.get("HOME"):
        return Path(env["HOME"]).absolute()
    try:
        return Path.home()
    except RuntimeError:
        raise InputError("there is no home folder to keep a cache in: set FUTRANSFORMER_CACHE to a folder") from None
