"""Specs -> built kernels: look each up in the cache, compile what is missing, in parallel, and publish it.

A kernel is built under its lock, in a temporary folder, and published by one rename: a build killed at any moment
leaves nothing that a later one trips over, and two builds at once compile each kernel once. What spills or serialises
wgmma is refused (``ptxas``). Without a usable tool chain, what any tool chain has built from the same source serves.
"""

from __future__ import annotations

import errno
import hashlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..generator.errors import ArtifactError, BuildError, ToolchainError
from ..generator.render import render as render_spec
from ..generator.specs import ABI_VERSION, KernelSpec
from .cache import LOG, KernelCache
from .fingerprint import Fingerprint, source_key, toolchain_key
from .machine import default_jobs
from .manifest import KernelRecord, write_kernel_manifest
from .nvcc import CUBIN, NVCC_FLAGS, SOURCE, describe_failure, ran_out_of_disk, run_nvcc
from .ptxas import check_resources, parse_resources
from .settings import BuildSettings
from .toolchain import Toolchain, find_nvcc, find_toolchain


@dataclass(frozen=True)
class BuildEvent:
    """One kernel is ready: the ``done``-th of ``total``, found in the cache or compiled now."""

    done: int
    total: int
    record: KernelRecord
    cached: bool

    def __str__(self) -> str:
        """One line of progress."""
        how = "cached" if self.cached else f"{self.record.compile_seconds:.1f} s"
        return f"[{self.done}/{self.total}] {self.record.name} ({how})"


@dataclass(frozen=True)
class _Job:
    """One kernel to compile."""

    spec: KernelSpec
    source: str
    key: Fingerprint


def build_kernels(
    specs: Sequence[KernelSpec],
    *,
    settings: BuildSettings,
    progress: Callable[[BuildEvent], None] | None = None,
    render: Callable[[KernelSpec], str] = render_spec,
) -> tuple[KernelRecord, ...]:
    """Return the built kernel of every spec, in order, compiling those that the cache does not hold."""
    assert len({spec.name for spec in specs}) == len(specs), "kernel names are unique within a plan"
    cache = KernelCache(settings.cache_root)
    sources = [render(spec) for spec in specs]
    keys = [
        source_key(spec, source, NVCC_FLAGS, settings.include_dir) for spec, source in zip(specs, sources, strict=True)
    ]
    toolchain, chain_key, lacking = _toolchain(settings)

    records: dict[str, KernelRecord] = {}
    jobs: list[_Job] = []

    def ready(record: KernelRecord, cached: bool) -> None:
        records[record.name] = record
        if progress is not None:
            progress(BuildEvent(len(records), len(specs), record, cached))

    for spec, source, key in zip(specs, sources, keys, strict=True):
        fingerprint = Fingerprint(key, chain_key)
        found = cache.find(spec.name, fingerprint) if toolchain else cache.find_any(spec.name, key)
        if found is not None:
            ready(found, cached=True)
        else:
            jobs.append(_Job(spec, source, fingerprint))

    if jobs:
        if toolchain is None:
            raise _missing(jobs, cache, settings, lacking)
        _Builder(cache, toolchain, settings).run(jobs, ready)
    return tuple(records[spec.name] for spec in specs)


def _toolchain(settings: BuildSettings) -> tuple[Toolchain | None, str, ToolchainError | None]:
    """The tool chain and its key; None, and why, when there is none or nothing may be compiled."""
    if not settings.jit:
        return None, "", None
    try:
        toolchain = find_toolchain(settings)
    except ToolchainError as error:
        if settings.nvcc is not None:
            find_nvcc(settings)  # raises where what is lacking is the nvcc that was named: used or refused
        return None, "", error
    return toolchain, toolchain_key(toolchain), None


def _missing(
    jobs: Sequence[_Job], cache: KernelCache, settings: BuildSettings, lacking: ToolchainError | None
) -> ArtifactError | ToolchainError:
    names = ", ".join(job.spec.name for job in jobs[:3]) + (f" and {len(jobs) - 3} more" if len(jobs) > 3 else "")
    what = f"not in the cache {cache.root}: {names}"
    if lacking is not None:
        return ToolchainError(f"{what}. They have to be built, but {lacking}")
    return ArtifactError(
        f"{what}. FUTRANSFORMER_DISABLE_JIT forbids building them here: run `futransformer build CONFIG` without it, "
        "or point FUTRANSFORMER_CACHE at a cache that holds them"
    )


class _CancelledError(Exception):
    """Another kernel failed, or the user interrupted."""


class _Builder:
    """Compiles jobs in parallel; the first failure stops the others."""

    def __init__(self, cache: KernelCache, toolchain: Toolchain, settings: BuildSettings) -> None:
        self.cache = cache
        self.toolchain = toolchain
        self.settings = settings
        self.parallel = settings.jobs or default_jobs()
        self.cancelled = threading.Event()

    def run(self, jobs: Sequence[_Job], ready: Callable[[KernelRecord, bool], None]) -> None:
        """Build all jobs, those that took longest before (and those never built) first."""

        def seconds(job: _Job) -> float:
            known = self.cache.last_compile_seconds(job.spec.name)
            return float("inf") if known is None else known

        with ThreadPoolExecutor(self.parallel, thread_name_prefix="nvcc") as pool:
            futures = [pool.submit(self.build, job) for job in sorted(jobs, key=seconds, reverse=True)]
            try:
                for future in as_completed(futures):
                    with suppress(_CancelledError):  # the failure that caused it is the one to report
                        ready(*future.result())
            except BaseException:
                self.cancelled.set()
                pool.shutdown(cancel_futures=True)
                raise

    def build(self, job: _Job) -> tuple[KernelRecord, bool]:
        """Build one kernel, and say whether another process had done so meanwhile; after a failure begin no other."""
        try:
            self.check_cancelled()
            return self.build_locked(job)
        except BaseException:
            self.cancelled.set()
            raise

    def check_cancelled(self) -> None:
        """Give up when another kernel has failed."""
        if self.cancelled.is_set():
            raise _CancelledError

    def build_locked(self, job: _Job) -> tuple[KernelRecord, bool]:
        """Wait for the kernel's lock, look again, and build."""
        name, key = job.spec.name, job.key
        timeout = self.settings.lock_timeout
        with self.cache.errors(), self.cache.lock(name, key, timeout, self.check_cancelled):
            found = self.cache.find(name, key)
            if found is not None:
                return found, True
            with self.cache.workspace(name, key) as folder:
                try:
                    record = self.compile(job, folder)
                except _RefusedError as refused:
                    log = self.cache.keep_failed(folder, name, key)
                    raise BuildError(f"{refused}\nThe full log: {log}") from None
                write_kernel_manifest(record, folder)
                return self.cache.publish(folder, name, key), False

    def compile(self, job: _Job, folder: Path) -> KernelRecord:
        """Run nvcc in ``folder`` and judge what it made."""
        spec = job.spec
        (folder / SOURCE).write_text(job.source, encoding="utf-8")
        start = time.monotonic()
        status, log = run_nvcc(self.toolchain, self.settings.include_dir, folder, self.check_cancelled)
        seconds = time.monotonic() - start
        if status != 0 and ran_out_of_disk(folder, log):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        (folder / LOG).write_text(log, encoding="utf-8")
        if status != 0:
            raise _RefusedError(f"kernel {spec.name}: {describe_failure(status, log, self.parallel)}")
        image = (folder / CUBIN).read_bytes() if (folder / CUBIN).is_file() else b""
        if not image.startswith(b"\x7fELF"):
            raise _RefusedError(f"kernel {spec.name}: nvcc reported success but wrote no cubin ({len(image)} bytes)")
        try:
            resources = parse_resources(spec.name, log)
            check_resources(spec.name, resources, log)
        except BuildError as error:
            raise _RefusedError(str(error)) from None
        return KernelRecord(
            name=spec.name,
            template=spec.template,
            params=spec.params,
            threads=spec.threads,
            cluster=spec.cluster,
            shared_bytes=spec.shared_bytes,
            resources=resources,
            cubin=folder / CUBIN,
            cubin_sha256=hashlib.sha256(image).hexdigest(),
            compile_seconds=round(seconds, 3),
            nvcc_version=".".join(map(str, self.toolchain.nvcc.version)),
            abi_version=ABI_VERSION,
            source_key=job.key.source_key,
            toolchain_key=job.key.toolchain_key,
        )


class _RefusedError(BuildError):
    """A build that failed for its source, its resources or its compiler: what there is of it is kept to look at."""
