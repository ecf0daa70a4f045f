"""What ``ptxas -v`` says about a kernel, and the gate: no register spills, no local memory, no serialised wgmma.

Each of these costs a kernel a large part of its speed without changing a result, so nothing else would notice.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..generator.errors import BuildError

_FUNCTION = re.compile(
    r"Function properties for \S+\s*\n\s*(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
)
_ENTRY = re.compile(r"Compiling entry function '([^']+)' for")
_USED = re.compile(r"Used (\d+) registers(.*)")
_STATIC_SHARED = re.compile(r"(\d+) bytes smem")
# C7508: setmaxnreg ignored; C7510, C7511: wgmma serialised. ptxas calls them information or warnings by version.
_SLOW = re.compile(r"C75(?:08|10|11)\b|Potential Performance Loss|wgmma.*serializ", re.IGNORECASE)


@dataclass(frozen=True)
class Resources:
    """What one kernel takes: registers a thread, bytes spilled, local memory (stack) and static shared memory."""

    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    stack_bytes: int
    static_shared_bytes: int


def parse_resources(name: str, log: str) -> Resources:
    """Read the resources of entry ``name`` from the compiler's output; the source must hold that entry and no other."""
    entries = _ENTRY.findall(log)
    if entries != [name]:
        raise BuildError(f"kernel {name}: the source must have one entry, of that name; it has {entries or 'none'}")
    functions = [tuple(map(int, found)) for found in _FUNCTION.findall(log)]
    used = _USED.findall(log)
    if not functions or not used:
        raise BuildError(f"kernel {name}: ptxas reported no resources; the log:\n{log.strip()[-2000:]}")
    registers, rest = used[-1]
    shared = _STATIC_SHARED.search(rest)
    # A device function that was not inlined has a stack and spills of its own: all functions count.
    stack, stores, loads = (sum(column) for column in zip(*functions, strict=True))
    return Resources(int(registers), stores, loads, stack, int(shared[1]) if shared else 0)


def check_resources(name: str, resources: Resources, log: str) -> None:
    """Refuse a kernel that spills, uses local memory or has its wgmma serialised: BuildError with the numbers."""
    faults = []
    if resources.spill_store_bytes or resources.spill_load_bytes:
        faults.append(
            f"spills registers ({resources.spill_store_bytes} bytes stored, {resources.spill_load_bytes} bytes loaded)"
        )
    if resources.stack_bytes:
        faults.append(f"uses {resources.stack_bytes} bytes of local memory (stack)")
    slow = [line.strip() for line in log.splitlines() if _SLOW.search(line)]
    if slow:
        faults.append("has its Tensor Core instructions held back: " + " | ".join(dict.fromkeys(slow)))
    if faults:
        raise BuildError(
            f"kernel {name}: {'; '.join(faults)} at {resources.registers} registers. "
            "Choose a smaller tile or fewer accumulators for this shape in generator/*heuristics.py."
        )
