"""One run of nvcc: a source into a cubin, in a folder that holds all of its files; and what its failure means."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from .toolchain import Toolchain

# sm_90a, for wgmma and TMA; machine code alone, for PTX of an nvcc newer than the driver is refused.
NVCC_FLAGS = (
    "-cubin",
    "-gencode=arch=compute_90a,code=sm_90a",
    "-std=c++17",
    "-O3",
    "-DNDEBUG",
    "--expt-relaxed-constexpr",
    "-Xptxas=-v",
)

SOURCE = "kernel.cu"
CUBIN = "kernel.cubin"

# Variables by which nvcc or the host compiler would take options or headers that no fingerprint has seen.
_HIDDEN_INPUTS = (
    "NVCC_PREPEND_FLAGS",
    "NVCC_APPEND_FLAGS",
    "NVCC_CCBIN",
    "CPATH",
    "C_INCLUDE_PATH",
    "CPLUS_INCLUDE_PATH",
    "GCC_EXEC_PREFIX",
)

_LEAST_ROOM_BYTES = 1 << 20  # with less, nvcc's failure is the disk's


def nvcc_options(include_dirs: Sequence[Path]) -> list[str]:
    """Return nvcc's options for a generated source; the order of folders is the order of precedence."""
    return [*NVCC_FLAGS, *(option for folder in include_dirs for option in ("-I", str(folder)))]


def run_nvcc(
    toolchain: Toolchain, include_dir: Path, folder: Path, check_cancelled: Callable[[], None]
) -> tuple[int, str]:
    """Compile the source in ``folder``; return nvcc's exit status and all that it says.

    ``check_cancelled`` is called about ten times a second; when it raises, nvcc and all that it has started are ended.
    """
    temporary = folder / "tmp"
    temporary.mkdir()
    # By relative names in the folder itself: no path of this machine enters the cubin. nvcc's own temporary files stay
    # inside as well, so that whatever removes the folder removes them.
    process = subprocess.Popen(
        [
            str(toolchain.nvcc.path),
            *nvcc_options((include_dir, toolchain.cutlass_include)),
            f"-ccbin={toolchain.host_compiler}",
            "-o",
            CUBIN,
            SOURCE,
        ],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name not in _HIDDEN_INPUTS}
        | {"TMPDIR": str(temporary), "LC_ALL": "C"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,  # not a file: a full disk would swallow what nvcc says of it
        stderr=subprocess.STDOUT,
        start_new_session=True,  # a group of its own, that can be ended together
    )
    try:
        while (said := _output_if_ended(process)) is None:
            check_cancelled()
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    shutil.rmtree(temporary)
    return process.returncode, said.decode(errors="replace")


def ran_out_of_disk(folder: Path, said: str) -> bool:
    """Whether nvcc failed for want of room: it says so in many ways, and at times not at all."""
    admitted = "No space left on device" in said or "Disk quota exceeded" in said
    return admitted or shutil.disk_usage(folder).free < _LEAST_ROOM_BYTES


def describe_failure(status: int, said: str, jobs: int) -> str:
    """Say what ended nvcc, one of ``jobs`` at once: a signal (9: most often for want of memory), or its input."""
    number = _signal_number(status, said)
    if number == signal.SIGKILL:
        fewer = (
            f"build with fewer jobs: futransformer build CONFIG --jobs {jobs // 2}"
            if jobs > 1
            else "it was the only one: free memory, or build on a larger machine"
        )
        return (
            f"nvcc was killed (exit status {status}) while compiling {SOURCE}: the machine most likely ran out of "
            f"memory, with {jobs} compilers at once; {fewer}"
        )
    if number is not None:
        return f"nvcc crashed with signal {number} (exit status {status}):\n{_words(said)}"
    return f"nvcc failed (exit status {status}):\n{_words(said)}"


def _output_if_ended(process: subprocess.Popen[bytes]) -> bytes | None:
    try:
        return process.communicate(timeout=0.1)[0]
    except subprocess.TimeoutExpired:  # what was read so far is kept for the next call
        return None


def _signal_number(status: int, said: str) -> int | None:
    """The signal that ended nvcc (-9, or 137 through a shell), or the tool that nvcc ran."""
    inner = re.search(r"died due to signal (\d+)", said)
    if inner:
        return int(inner[1])
    if status < 0:
        return -status
    return status - 128 if status > 128 else None


def _words(said: str, lines: int = 30, width: int = 400) -> str:
    """nvcc's words from its first error on, trimmed: one mistake in a template's header fills pages."""
    spoken = [line[:width] for line in said.splitlines() if line.strip()]
    first = next((index for index, line in enumerate(spoken) if re.search(r"\b(error|fatal)\b", line)), 0)
    return "\n".join(spoken[first : first + lines]) or "(it said nothing)"
