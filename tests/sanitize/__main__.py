"""compute-sanitizer over every kernel on small shapes: memcheck, racecheck, synccheck.

    python -m tests.ops.models FOLDER EXPORT...                                 # where nvcc is; those of EXPORTS
    python -m tests.sanitize.planted FOLDER
    python -m tests.sanitize --kernels FOLDER --output RESULTS                  # on a Hopper GPU; needs no nvcc
    python -m tests.sanitize --kernels FOLDER --output RESULTS --only PATTERN --merge

First each tool has to run the sound kernel and to find what is planted for it; then it runs over the exports, several
at a time, and once over a kernel that several exports have. All that it says is told by kernel in
RESULTS/sanitize.json, and stays in RESULTS/sanitize-logs. --only runs the cases of the kernels whose names match a
pattern, --merge keeps what the file says of all others; each row that is put in says of which commit it is.
Exit status: 0 clean; 1 something was said, wrong, or left out; 2 the tools cannot run here, or find nothing.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

from futransformer.bench import results
from futransformer.generator.errors import InputError
from tests.sanitize import merged, planted, runner
from tests.sanitize.runner import TOOLS, Run, Tally

# The longest first: each process has what is left of the time, and those that come free help those that are not done.
EXPORTS = (
    "layers",
    "narrow-head",
    "narrow-head-fp8",
    "narrow-head-bf16-fp8-head8",
    "narrow-head-int4",
    "narrow-head-int4-channel-asym",
    "narrow-head-int4-head4",
    "narrow-head-fp8-int4-kv8-kv4-min",
    "group5",
    "group16",
    "smollm2-135m",
    "odd",
    "tails",
    "smollm2-135m-int4-g32-asym-kv4",
    "smollm2-135m-int4-g32-asym",
    "smollm2-135m-bf16-fp8-head8",
    "smollm2-135m-fp8",
    "odd-fp8",
    "smollm2-135m-kv4",
    "copies",
)
PLANTED_SECONDS = 60.0
USUAL_PLACES = ("/usr/local/cuda/bin", "/opt/cuda/bin")
MESSAGES_SHOWN = 40


class CannotRunError(Exception):
    """compute-sanitizer is missing, refuses the device, or does not find what is planted."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run everything; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.sanitize", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kernels", type=Path, required=True, metavar="FOLDER", help="of exports, one a name")
    parser.add_argument("--output", type=Path, required=True, metavar="RESULTS", help="where the results go")
    parser.add_argument("--tool", action="append", choices=TOOLS, help="some of the tools (default: all)")
    parser.add_argument("--export", action="append", help=f"some of the exports (default: {', '.join(EXPORTS)})")
    parser.add_argument("--only", action="append", default=[], metavar="PATTERN", help="of kernels' names, as of files")
    parser.add_argument("--merge", action="store_true", help="keep what RESULTS/sanitize.json says of other kernels")
    parser.add_argument("--seconds", type=float, default=160.0, help="for everything (default: 160)")
    parser.add_argument("--jobs", type=int, help="processes at once (default: half the cores, at most 8)")
    parser.add_argument("--commit", metavar="SHA", help="the commit checked, where there is no git history")
    parser.add_argument("--compute-sanitizer", type=Path, metavar="FILE", help="the program (default: looked for)")
    args = parser.parse_args(argv)
    start = time.monotonic()
    tools, exports = args.tool or TOOLS, with_chosen(args.export or EXPORTS, args.kernels, args.only)
    jobs = args.jobs or max(1, min(8, (os.cpu_count() or 1) // 2))
    logs = args.output / "sanitize-logs"
    earlier = merged.read(args.output) if args.merge else None
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    try:
        if not exports:
            raise CannotRunError(f"no export in {args.kernels} has a kernel like {' or '.join(args.only)}")
        sanitizer = find_sanitizer(args.compute_sanitizer)
        version = version_of(sanitizer)
        where = results.environment(args.commit)
        print(f"compute-sanitizer {version}: {', '.join(tools)} over {', '.join(exports)}", flush=True)
        probes = list(product(tools, [planted.EXPORT]))
        findings = what_was_found(run_all(sanitizer, probes, args.kernels, logs, start + PLANTED_SECONDS, jobs))
    except (CannotRunError, InputError) as error:
        print(f"compute-sanitizer cannot run here: {error}", flush=True)
        return 2
    tasks = [(tool, export) for export in exports for tool in tools]
    runs = run_all(sanitizer, 2 * tasks, args.kernels, logs, start + args.seconds, jobs, args.only)
    content = results.document("sanitize", where, rows_of(runs, args.only))
    content |= {
        "version": version,
        "planted": findings,
        "messages": [message for run in runs for message in run.messages],
        "failures": [failure for run in runs for failure in run.failures],
        "left_out": [
            *(case for run in runs for case in run.left_out),
            *runner.never_launched(runs, args.kernels, args.only),
        ],
        "seconds": round(time.monotonic() - start, 1),
    }
    path = results.write(args.output, content if earlier is None else merged.into(earlier, content, runs))
    show(content)
    print(f"{content['seconds']} s; all of it in {path} and {logs}")
    return 1 if content["messages"] or content["failures"] or content["left_out"] else 0


def find_sanitizer(given: Path | None) -> Path:
    """The program: as given, on PATH, in CUDA_HOME, or where tool kits usually lie."""
    if given is not None:
        if not given.is_file():
            raise CannotRunError(f"there is no {given}")
        return given
    homes = [f"{os.environ[name]}/bin" for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    path = os.pathsep.join([os.environ.get("PATH", ""), *homes, *USUAL_PLACES])
    found = shutil.which("compute-sanitizer", path=path)
    if found is None:
        raise CannotRunError(
            "it is not on PATH, in CUDA_HOME or in /usr/local/cuda; "
            "name it with --compute-sanitizer, or: pip install nvidia-cuda-sanitizer-api"
        )
    return Path(found)


def version_of(sanitizer: Path) -> str:
    """The version that the program gives itself."""
    said = subprocess.run([str(sanitizer), "--version"], capture_output=True, text=True, check=False)
    version = re.search(r"Version (\S+)", said.stdout)
    if version is None:
        raise CannotRunError(f"{sanitizer} --version says {(said.stdout + said.stderr).strip()!r}")
    return version[1]


def with_chosen(exports: Sequence[str], kernels: Path, only: Sequence[str]) -> list[str]:
    """The exports that have a kernel to be run; of all kernels, all exports."""
    return [name for name in exports if not only or runner.kernel_names(kernels / name, only)]


def run_all(
    sanitizer: Path,
    tasks: list[tuple[str, str]],
    kernels: Path,
    logs: Path,
    end: float,
    jobs: int,
    only: Sequence[str] = (),
) -> list[Run]:
    """Run (tool, export) by (tool, export), ``jobs`` at once, each with what is left of the time.

    Two processes of the same share its cases. The second is left out if the first is done, or it would be cut short.
    """
    jobs = min(jobs, len(tasks))
    threads = -(-(os.cpu_count() or 1) // jobs)
    done: set[tuple[str, str]] = set()

    def one(index: int) -> Run:
        tool, export = task = tasks[index]
        seconds = end - time.monotonic()
        if task in tasks[:index] and (task in done or seconds < 2 * runner.START_SECONDS):
            return Run(tool, export)
        if not (kernels / export / "manifest.json").is_file():
            return Run(tool, export, failures=[f"{tool}/{export}: {kernels / export} holds no export"])
        run = runner.run(
            sanitizer,
            tool,
            export,
            kernels,
            logs,
            seconds=max(seconds, 1.0),
            threads=threads,
            index=index,
            only=only,
        )
        done.add(task)
        counts = f"{len(run.messages)} messages, {len(run.failures)} failures, {len(run.left_out)} left out"
        print(f"{tool}/{export}: {counts}", flush=True)
        return run

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(one, range(len(tasks))))


def what_was_found(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """What each tool made of the planted kernels; CannotRunError where it is of no use."""
    found: list[dict[str, Any]] = []
    for run in runs:
        sound = f"planted_{planted.SOUND}"
        wrong = [failure for failure in run.failures if f"/{sound}" in failure]
        if wrong or not run.tallies[sound].launches:
            raise CannotRunError("; ".join([*run.messages[:3], *wrong, *run.failures][:4]) or f"{run.tool} ran nothing")
        tally = run.tallies[sound]
        found.append({"tool": run.tool, "kernel": sound, "errors": tally.errors, "warnings": tally.warnings})
        for fault in planted.FAULTS:
            if fault.tool != run.tool:
                continue
            tally = run.tallies[f"planted_{fault.name}"]
            found.append(
                {
                    "tool": run.tool,
                    "kernel": f"planted_{fault.name}",
                    "errors": tally.errors,
                    "warnings": tally.warnings,
                    "required": fault.required,
                }
            )
            if fault.required and tally.errors + tally.warnings == 0:
                said = "; ".join([*run.messages, *run.failures]) or "nothing"
                raise CannotRunError(f"{run.tool} does not find planted_{fault.name}; it says: {said}")
    return found


def rows_of(runs: Sequence[Run], only: Sequence[str] = ()) -> list[dict[str, Any]]:
    """A row a tool and kernel, with the export that it was found in first.

    What was launched beside the kernels that were asked for has no row, unless something was said of it.
    """
    first: dict[tuple[str, str], str] = {}
    sums: dict[tuple[str, str], Tally] = defaultdict(Tally)
    for run in runs:
        for name, tally in sorted(run.tallies.items()):
            first.setdefault((run.tool, name), run.export)
            sums[run.tool, name] += tally
    return [
        {"case": f"sanitize/{tool}/{name}", "export": first[tool, name], **asdict(tally)}
        for (tool, name), tally in sums.items()
        if runner.is_chosen(name, only) or tally.errors or tally.warnings
    ]


def show(content: dict[str, Any]) -> None:
    """A line for each tool, and all that was said, wrong or left out, up to a length that can be read."""
    for kind in ("messages", "failures", "left_out"):
        for line in content[kind][:MESSAGES_SHOWN]:
            print(f"{kind}: {line[:400]}")
        if len(content[kind]) > MESSAGES_SHOWN:
            print(f"{kind}: and {len(content[kind]) - MESSAGES_SHOWN} more")
    for row in content["planted"]:
        print(f"planted: {row['tool']}/{row['kernel']}: {row['errors']} errors, {row['warnings']} warnings")
    print("tool, kernels, cases, errors, warnings, seconds")
    for tool in TOOLS:
        rows = [row for row in content["rows"] if row["case"].startswith(f"sanitize/{tool}/")]
        totals = [round(sum(row[key] for row in rows), 1) for key in ("cases", "errors", "warnings", "seconds")]
        print(", ".join(map(str, (tool, len(rows), *totals))))


if __name__ == "__main__":
    sys.exit(main())
