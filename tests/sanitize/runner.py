"""One tool over one export: a process of its own, which is killed at its limit, and what it said and did."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tests.sanitize.records import NO_KERNEL, Log, parse

# Before its first case a process imports torch and lets the tool look through it: time that is no case's.
START_SECONDS = 15.0

OPTIONS = (
    "--launch-timeout=120",  # the tool waits so long for a process to open the GPU
    "--destroy-on-device-error=kernel",  # the cases behind one that fails are run all the same
    "--show-backtrace=device",
    "--print-limit=2000",
    "--kernel-name=kns=_sm90_",  # ours; PyTorch's fills and copies are not looked through
    "--kernel-name=kns=planted_",
)
TOOL_OPTIONS = {
    "memcheck": ("--padding=4096", "--report-api-errors=no", "--check-device-heap=no"),
    "racecheck": (),
    "synccheck": (),
}
TOOLS = tuple(TOOL_OPTIONS)
FIRST_PORT, PORTS = 49152, 16  # the tool and its process talk over a port: each run has a range of its own


@dataclass
class Tally:
    """One kernel under one tool."""

    cases: int = 0
    launches: int = 0
    errors: int = 0
    warnings: int = 0
    seconds: float = 0.0

    def __iadd__(self, other: Tally) -> Tally:
        """Add up, for two processes that launched it."""
        for name, value in vars(other).items():
            setattr(self, name, round(getattr(self, name) + value, 2))
        return self


@dataclass
class Run:
    """One tool over one export."""

    tool: str
    export: str
    tallies: dict[str, Tally] = field(default_factory=lambda: defaultdict(Tally))
    messages: list[str] = field(default_factory=list)  # of the tool, each once
    failures: list[str] = field(default_factory=list)  # wrong results, launches that failed, a killed process
    left_out: list[str] = field(default_factory=list)  # cases
    ended: list[str] = field(default_factory=list)  # cases, right or wrong


def run(
    sanitizer: Path,
    tool: str,
    export: str,
    kernels: Path,
    logs: Path,
    *,
    seconds: float,
    threads: int,
    index: int,
    only: Sequence[str] = (),
) -> Run:
    """Run within ``seconds``; the tool's log and the process's output stay in ``logs``, and so do the tool's claims.

    ``threads`` are those of PyTorch on the CPU; runs at the same time have different indices. ``only``: patterns of the
    kernels whose cases are run.
    """
    log = logs / f"{tool}-{export}-{index}.log"
    claims = logs / f"claims-{tool}"
    claims.mkdir(exist_ok=True)
    command = [str(sanitizer), f"--tool={tool}", f"--log-file={log}", f"--port={FIRST_PORT + PORTS * index}"]
    command += [*OPTIONS, *TOOL_OPTIONS[tool]]
    command += [sys.executable, "-m", "tests.sanitize.cases", "--kernels", str(kernels), "--export", export]
    command += ["--tool", tool, "--seconds", f"{max(seconds - START_SECONDS, 1):.0f}", "--claims", str(claims)]
    command += [f"--only={pattern}" for pattern in only]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": str(threads)}
    with log.with_suffix(".out").open("w+") as out, log.with_suffix(".err").open("w+") as err:
        child = subprocess.Popen(command, stdout=out, stderr=err, env=environment, start_new_session=True)
        killed = False
        try:
            child.wait(seconds)
        except subprocess.TimeoutExpired:
            killed = True
        finally:
            _kill(child)
        for file in (out, err):
            file.seek(0)
        lines, said = out.read(), err.read()
    names = kernel_names(kernels / export)
    text = log.read_text(errors="replace") if log.is_file() else ""
    result = judge(tool, export, lines, parse(text, names))
    if killed:
        result.failures.append(f"{tool}/{export}: killed after {seconds:.0f} s")
    elif child.returncode:
        last = (said.strip().splitlines() or ["nothing on standard error"])[-1]
        result.failures.append(f"{tool}/{export}: ended with status {child.returncode}: {last}")
    return result


def judge(tool: str, export: str, lines: str, log: Log) -> Run:
    """Put together what the process wrote, a JSON object a line, and what the tool did."""
    result = Run(tool, export)
    under_way = None
    for line in lines.splitlines():
        if not line.startswith("{"):
            continue
        said: dict[str, Any] = json.loads(line)
        if "left_out" in said:
            result.left_out.append(f"{tool}/{export}/{said['left_out']}")
        elif "begin" in said:
            under_way = said["begin"]
        else:
            under_way = None
            result.ended.append(f"{tool}/{export}/{said['case']}")
            _count(result, said)
    if under_way is not None:
        result.failures.append(f"{tool}/{export}/{under_way}: did not end")
    for record in log.records:
        tally = result.tallies[record.kernel]
        tally.warnings += record.warning
        tally.errors += not record.warning
        message = f"{tool}/{record.kernel}: {record.text}"
        if message not in result.messages:
            result.messages.append(message)
    if log.errors is None:
        result.failures.append(f"{tool}/{export}: the tool wrote no summary")
    else:
        # Beyond the print limit the tool only counts.
        unprinted = log.errors - sum(tally.errors for tally in result.tallies.values())
        if unprinted > 0:
            result.tallies[NO_KERNEL].errors += unprinted
            result.messages.append(f"{tool}/{export}: {unprinted} more errors, which it counted and did not print")
    return result


def never_launched(runs: Sequence[Run], kernels: Path, only: Sequence[str] = ()) -> list[str]:
    """Kernels of the exports that no run of a tool launched, though they were asked for, in a sentence each."""
    found = []
    for tool in dict.fromkeys(run.tool for run in runs):
        of_tool = [run for run in runs if run.tool == tool]
        known = {name for run in of_tool for name, tally in run.tallies.items() if tally.launches}
        for export in dict.fromkeys(run.export for run in of_tool):
            never = kernel_names(kernels / export, only) - known
            known |= never
            found += [f"{tool}/{export}: kernel {name} was not launched" for name in sorted(never)]
    return found


def _count(result: Run, case: dict[str, Any]) -> None:
    launches: dict[str, int] = case["kernels"]
    for name, count in launches.items():
        tally = result.tallies[name]
        tally.cases += 1
        tally.launches += count
        tally.seconds += case["seconds"] * count / sum(launches.values())
    if case["failure"] is not None:
        result.failures.append(f"{result.tool}/{result.export}/{case['case']}: {case['failure']}")


def is_chosen(kernel: str, only: Sequence[str]) -> bool:
    """Whether a kernel's name is like one of the patterns; all are, where there are none."""
    return not only or any(fnmatchcase(kernel, pattern) for pattern in only)


def kernel_names(folder: Path, only: Sequence[str] = ()) -> frozenset[str]:
    """The kernels of an export that are asked for; none where there is no export."""
    if not (folder / "manifest.json").is_file():
        return frozenset()
    manifest = json.loads((folder / "manifest.json").read_text())
    return frozenset(kernel["name"] for kernel in manifest["kernels"] if is_chosen(kernel["name"], only))


def _kill(child: subprocess.Popen[bytes]) -> None:
    """End the tool and the process under it: both are in the session of the first."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
