"""What this machine has for us: cores and memory, container limits included, and how many compilers that makes."""

from __future__ import annotations

import os
from pathlib import Path

# One nvcc with CuTe takes 0.5 to 0.9 GB (measured on the GEMM kernels); twice that keeps the out-of-memory killer away.
BYTES_PER_JOB = 2 << 30

_CGROUP = Path("/sys/fs/cgroup")


def default_jobs() -> int:
    """As many compilers as there are cores, and no more than fit in the memory that is free now; at least one."""
    memory = available_memory()
    return max(1, min(usable_cores(), 1 if memory is None else memory // BYTES_PER_JOB))


def usable_cores(cgroup: Path = _CGROUP) -> int:
    """Cores that this process may use: its affinity, and the CPU quota of its container."""
    cores = len(os.sched_getaffinity(0))
    quota, _, period = _read(cgroup / "cpu.max").partition(" ")
    if quota.isdigit() and period.strip().isdigit():
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def available_memory(cgroup: Path = _CGROUP, meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Bytes that can be allocated: the machine's available memory, and what its container has left; None: unknown."""
    fields = dict(line.split(":", 1) for line in _read(meminfo).splitlines() if ":" in line)
    kilobytes = fields.get("MemAvailable", "").split()
    if not kilobytes:
        return None
    free = int(kilobytes[0]) << 10
    limit, used = _read(cgroup / "memory.max").strip(), _read(cgroup / "memory.current").strip()
    if limit.isdigit() and used.isdigit():
        # The container's figure counts the page cache, which is given back on demand.
        stat = dict(line.split() for line in _read(cgroup / "memory.stat").splitlines())
        free = min(free, int(limit) - int(used) + int(stat.get("inactive_file", 0)))
    return max(0, free)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""  # not Linux, or no such control group
