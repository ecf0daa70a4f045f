"""The kernel cache: a folder of built kernels that any number of processes share.

```
<root>/kernels/<name>/<source key>-<tool-chain key>/  kernel.cu, kernel.cubin, manifest.json, build.log
                      ....lock           held (flock) while the kernel is built; the system frees a killed process's
                      ....partial-XXXX/  a build under way, or left by a killed one
                      ....failed/        the source and log of the last build that failed
```

An entry appears by one rename, complete. Nothing is synchronised to disk first: an entry that a power failure cut short
does not match its sha256, and an entry that does not match is a miss, which the next build replaces.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ..generator.errors import ArtifactError, BuildError
from .fingerprint import Fingerprint
from .manifest import KernelRecord, load_cubin, read_kernel_manifest

LOG = "build.log"

_LONGEST_NAME = 160  # file names end at 255 bytes, and suffixes are added to this
_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class CacheEntry:
    """One folder of the cache; ``record`` is None when it cannot be read."""

    folder: Path
    size_bytes: int
    record: KernelRecord | None


@dataclass(frozen=True)
class ClearedCache:
    """What ``KernelCache.clear`` removed, and what it left because it was being built."""

    kernels: int
    size_bytes: int
    busy: int


def file_stem(name: str) -> str:
    """Return a kernel's name as a file name: shortened, with a hash in its tail, when it is too long for one."""
    if len(name) <= _LONGEST_NAME:
        return name
    return f"{name[: _LONGEST_NAME - 17]}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"


@dataclass(frozen=True)
class KernelCache:
    """The cache under one root folder, which need not exist until something is built."""

    root: Path

    @property
    def kernels(self) -> Path:
        """The folder of all kernels."""
        return self.root / "kernels"

    def errors(self) -> AbstractContextManager[None]:
        """A context in which what the file system refuses becomes a BuildError that names the cache."""
        return storage_errors("the kernel cache", self.root, "point FUTRANSFORMER_CACHE at a folder")

    def entry(self, name: str, key: Fingerprint) -> Path:
        """Return the folder of a kernel, built or not."""
        return self.kernels / file_stem(name) / f"{key.source_key[:16]}-{key.toolchain_key[:16]}"

    def find(self, name: str, key: Fingerprint) -> KernelRecord | None:
        """Return the kernel as this source and this tool chain give it; None when missing or corrupt."""
        record = _sound_record(self.entry(name, key), name, key.source_key)
        return record if record is not None and record.toolchain_key == key.toolchain_key else None

    def find_any(self, name: str, source_key: str) -> KernelRecord | None:
        """Return the kernel as any tool chain built this source: the newest nvcc's, then the greatest key."""
        folders = self.kernels.joinpath(file_stem(name)).glob(f"{source_key[:16]}-{'[0-9a-f]' * 16}")
        records = [record for folder in folders if (record := _sound_record(folder, name, source_key))]
        return max(records, key=lambda record: (_version(record), record.toolchain_key), default=None)

    def last_compile_seconds(self, name: str) -> float | None:
        """How long this kernel took when it was last built from whatever source; None when it never was."""
        records = [_read_record(folder) for folder in _entries(self.kernels / file_stem(name))]
        return max((record.compile_seconds for record in records if record is not None), default=None)

    @contextmanager
    def lock(self, name: str, key: Fingerprint, timeout: float, waiting: Callable[[], None]) -> Iterator[None]:
        """Hold a kernel's lock; BuildError when another process keeps it for longer than ``timeout`` seconds.

        ``waiting`` is called between attempts, and may raise to give up.
        """
        path = self.entry(name, key).with_suffix(".lock")
        deadline = time.monotonic() + timeout
        while (held := _try_lock(path)) is None:
            waiting()
            if time.monotonic() > deadline:
                raise BuildError(
                    f"kernel {name}: another process has been building it for more than {timeout:.0f} s and holds "
                    f"{path}; wait for that process, or end it, and build again"
                )
            time.sleep(_POLL_SECONDS)
        try:
            yield
        finally:
            os.close(held)

    @contextmanager
    def workspace(self, name: str, key: Fingerprint) -> Iterator[Path]:
        """Yield an empty folder to build in, removed in the end; the kernel's lock must be held.

        Every workspace has a new name: a compiler that outlived its killed parent may still write into the old one.
        """
        entry = self.entry(name, key)
        for left in entry.parent.glob(f"{entry.name}.partial-*"):
            shutil.rmtree(left, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix=f"{entry.name}.partial-", dir=entry.parent))
        try:
            folder.chmod(0o777 & ~_umask())  # mkdtemp's folders are private, a cache may be shared
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def publish(self, workspace: Path, name: str, key: Fingerprint) -> KernelRecord:
        """Turn a complete workspace into the entry; the kernel's lock must be held."""
        entry = self.entry(name, key)
        _replace(workspace, entry)
        shutil.rmtree(entry.with_suffix(".failed"), ignore_errors=True)
        record = self.find(name, key)
        if record is None:
            raise BuildError(f"kernel {name}: {entry} was written but does not read back; check its disk")
        return record

    def keep_failed(self, workspace: Path, name: str, key: Fingerprint) -> Path:
        """Keep a failed build's source and log, in place of those of the failure before it; return the log."""
        failed = self.entry(name, key).with_suffix(".failed")
        _replace(workspace, failed)
        return failed / LOG

    def entries(self) -> tuple[CacheEntry, ...]:
        """List every kernel in the cache, by name."""
        folders = [folder for kernel in _folders(self.kernels) for folder in _entries(kernel)]
        return tuple(CacheEntry(folder, _size(folder), _read_record(folder)) for folder in folders)

    def clear(self) -> ClearedCache:
        """Remove every kernel and all that is left of builds, except what is being built now."""
        kernels = size = busy = 0
        for kernel in _folders(self.kernels):
            # Files that begin with a dot are none of ours: a network file system's, for one.
            keys = sorted({path.name.partition(".")[0] for path in kernel.iterdir()} - {""})
            for key in keys:
                lock = kernel / f"{key}.lock"
                held = _try_lock(lock)
                if held is None:
                    busy += 1
                    continue
                try:
                    kernels += (kernel / key).is_dir()
                    for folder in [kernel / key, *kernel.glob(f"{key}.failed"), *kernel.glob(f"{key}.partial-*")]:
                        size += _size(folder)
                        if folder.is_dir():
                            shutil.rmtree(folder)
                    lock.unlink()
                finally:
                    os.close(held)
            with suppress(OSError):  # not empty: a kernel that is being built, or a file of somebody else's
                kernel.rmdir()
        return ClearedCache(kernels, size, busy)


@contextmanager
def storage_errors(
    what: str, folder: Path, elsewhere: str, kept: str = "nothing half-written was kept"
) -> Iterator[None]:
    """Turn what the file system refuses into a BuildError that names the folder and how to use another.

    ``kept`` is what a full disk still holds of it.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise BuildError(
                f"the disk of {what} {folder} is full ({error.strerror}); {kept}. "
                f"Make room, or {elsewhere} on another disk"
            ) from error
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST):
            raise BuildError(
                f"{what} {folder} cannot be written ({error.strerror}: {error.filename}); {elsewhere} that can"
            ) from error
        raise BuildError(f"{what} {folder} failed ({error}); {elsewhere} on a sound disk") from error


def _read_record(folder: Path) -> KernelRecord | None:
    try:
        return read_kernel_manifest(folder)
    except ArtifactError:
        return None


def _sound_record(folder: Path, name: str, source_key: str) -> KernelRecord | None:
    record = _read_record(folder)
    # The folder's name holds a part of each key: the manifest holds all.
    if record is None or (record.name, record.source_key) != (name, source_key):
        return None
    try:
        load_cubin(record)
    except ArtifactError:
        return None
    return record


def _version(record: KernelRecord) -> tuple[int, ...]:
    return tuple(int(part) for part in record.nvcc_version.split(".") if part.isdigit())


def _try_lock(path: Path) -> int | None:
    """Lock a file, which is made if need be, and return its descriptor; None when another process holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return lock_at(path, os.O_RDWR | os.O_CREAT)


def lock_at(path: Path, flags: int = os.O_RDONLY) -> int | None:
    """Lock a file or a folder and return its descriptor, which the system frees with the process.

    None when another holds it, or it is gone.
    """
    try:
        descriptor = os.open(path, flags, 0o666)
    except FileNotFoundError:  # whoever held it has removed it meanwhile, or its folder
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # What was removed or renamed since is no longer at this place: a lock on it excludes nobody.
        if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
            return descriptor
    except BlockingIOError:
        pass
    except OSError:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _replace(source: Path, target: Path) -> None:
    """Rename a folder over another. A reader in between finds nothing, takes the lock, and looks again."""
    if target.exists():
        old = Path(tempfile.mkdtemp(prefix=f"{target.stem}.partial-", dir=target.parent))
        target.rename(old / "old")
        source.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    else:
        source.rename(target)


def _folders(parent: Path) -> list[Path]:
    return sorted(path for path in parent.iterdir() if path.is_dir()) if parent.is_dir() else []


def _entries(kernel: Path) -> list[Path]:
    return [folder for folder in _folders(kernel) if "." not in folder.name]


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else 0


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
