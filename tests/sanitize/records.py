"""What compute-sanitizer wrote, taken apart: which kernel each of its records is about, and its own summary.

A record is a line behind the prefix, and the indented lines after it; formats of version 2025.3:

    ========= Invalid __global__ write of size 4 bytes
    =========     at planted_write_past_end+0x60
    =========     by thread (63,0,0) in block (0,0,0)
    =========
    ========= Error: Race reported between Write access at planted_shared_race+0x90
    =========     and Read access at planted_shared_race+0xb0 [16 hazards]
    =========
    ========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

PREFIX = "========="
NO_KERNEL = "(no kernel)"

_BANNER = ("COMPUTE-SANITIZER", "NVIDIA", "Copyright", "Version")
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK|LEAK) SUMMARY: (.*)")
_COUNTS = re.compile(r"\((\d+) errors?, (\d+) warnings?\)|^(\d+) errors?")
_WORD = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True)
class Record:
    """One thing that the tool says, about a kernel of ours or about none."""

    kernel: str
    warning: bool
    text: str


@dataclass(frozen=True)
class Log:
    """All records, and the tool's own count of errors and warnings; None where it did not come to its summary."""

    records: tuple[Record, ...]
    errors: int | None
    warnings: int | None


def parse(text: str, kernels: Collection[str]) -> Log:
    """Take a log apart; ``kernels`` are the names that a record may be about."""
    blocks: list[list[str]] = []
    errors = warnings = None
    for line in text.splitlines():
        if not line.startswith(PREFIX):
            continue
        said = line.removeprefix(PREFIX).rstrip()
        summary = _SUMMARY.match(said.strip())
        if summary:
            counts = _COUNTS.search(summary[1])
            if counts is not None:
                errors = (errors or 0) + int(counts[1] or counts[3])
                warnings = (warnings or 0) + int(counts[2] or 0)
        elif said.startswith("  ") and blocks:
            blocks[-1].append(said.strip())
        elif said.strip() and not said.strip().startswith(_BANNER):
            blocks.append([said.strip()])
    return Log(tuple(_record(block, kernels) for block in blocks), errors, warnings)


def _record(block: list[str], kernels: Collection[str]) -> Record:
    text = "; ".join(block)
    kernel = next((word for word in _WORD.findall(text) if word in kernels), NO_KERNEL)
    return Record(kernel, text.startswith("Warning"), text)
