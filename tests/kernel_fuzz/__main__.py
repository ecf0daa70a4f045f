"""Thousands of random cases of every kernel on a Hopper GPU: ragged batches, page tables and shapes, exact answers.

    python -m tests.kernel_fuzz --kernels FOLDER... --cases 2000 --seed 0 --seconds 120 --output RESULTS

A case follows from the seed, its index and the exports alone: what fails is printed with the command that runs it
again. Results go to RESULTS/fuzz.json. Without --kernels they come from the cache, which builds what it lacks.
Exit status: 0 all cases ran and were right; 1 one was wrong, or there was no time for it; 2 nothing could run.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from futransformer.bench import results
from futransformer.build.load import load_or_build
from futransformer.driver import Kernel, require_hopper
from futransformer.generator.errors import FuTransformerError, InputError
from futransformer.library import KernelLibrary
from futransformer.ops.attention_decode import AttentionDecode
from tests.kernel_fuzz import cases
from tests.kernel_fuzz.exact import Draw, WrongResultError
from tests.ops.models import COPIES, COPIES_NAME, model_config, precision_of, tested_plan

EXPORTS = (
    "smollm2-135m",
    "smollm2-135m-fp8",
    "smollm2-135m-int4",  # K = 576 ends in a part of a group
    "smollm2-135m-int4-g32-asym",
    "smollm2-135m-bf16-fp8-head8",
    "smollm2-135m-kv8",
    "smollm2-135m-kv4",
    "smollm2-135m-int4-g32-asym-kv4",
    "odd",
    "odd-fp8",
    "group5",
    "group16",
    "group16-kv4",
    "llama-3.2-3b-kv4",
    "llama-3.1-8b",
    "llama-3.1-8b-fp8",
    "llama-3.1-8b-int4",
    "llama-3.1-8b-int4-channel-asym",
    "llama-3.1-8b-int4-head4",
    "llama-3.1-8b-bf16-fp8-head8",
    "llama-3.1-8b-fp8-int4-kv8-kv4-min",
    COPIES_NAME,
)
FAILURES_TOLD = 20

Loaded = dict[str, dict[str, cases.Fuzz]]
Load = Callable[[Sequence[str], Sequence[Path]], tuple[Loaded, torch.device]]


def load(exports: Sequence[str], folders: Sequence[Path]) -> tuple[Loaded, torch.device]:
    """The operations of each export; a kernel of decode attention by itself is an export of its own."""
    device, loaded = require_hopper(), Loaded()
    for export in exports:
        found = [folder / export for folder in folders if (folder / export / "manifest.json").is_file()]
        if folders and not found:
            raise InputError(
                f"none of {', '.join(map(str, folders))} holds the export {export}: leave it out by --export"
            )
        folder = found[0] if found else None
        if export == COPIES_NAME:
            built = load_or_build(tuple(COPIES.values()), folder=folder)
            for name, spec in COPIES.items():
                loaded[f"{export}/{name}"] = cases.of_attention(
                    AttentionDecode(Kernel(spec, *built[spec.name], device))
                )
            continue
        plan = tested_plan(export)
        built = load_or_build(plan.specs(), folder=folder)
        ops = KernelLibrary(model_config(export), precision_of(export), plan, built, device)
        loaded[export] = cases.of_library(ops)
    return loaded, device


def main(argv: Sequence[str] | None = None, load: Load = load) -> int:
    """Run the cases; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.kernel_fuzz", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kernels", type=Path, nargs="+", default=[], metavar="FOLDER", help="of exports, one a name")
    parser.add_argument("--cases", type=int, default=2000, help="how many (default: 2000)")
    parser.add_argument("--seed", type=int, default=0, help="of all that is random (default: 0)")
    parser.add_argument("--case", type=int, metavar="INDEX", help="this one alone")
    parser.add_argument("--seconds", type=float, default=120.0, help="of all cases (default: 120)")
    parser.add_argument("--export", action="append", help=f"some of the exports (default: {', '.join(EXPORTS)})")
    parser.add_argument("--output", type=Path, metavar="RESULTS", help="where the results go")
    parser.add_argument("--commit", metavar="SHA", help="the commit checked, where there is no git history")
    args = parser.parse_args(argv)
    start = time.monotonic()
    try:
        exports, device = load(args.export or EXPORTS, args.kernels)
        where = results.environment(args.commit) if args.output else {}
    except FuTransformerError as error:
        print(f"cannot run here: {error}", flush=True)
        return 2
    loaded_after = time.monotonic() - start
    options = [f"--seed {args.seed}", *(f"--export {export}" for export in args.export or ())]
    if args.kernels:
        options.insert(0, f"--kernels {shlex.join(map(str, args.kernels))}")
    again = f"python -m tests.kernel_fuzz {' '.join(options)} --case"
    indices = range(args.cases) if args.case is None else [args.case]
    told = run_cases(exports, device, args.seed, indices, time.monotonic() + args.seconds)
    for failure in told["failures"][:FAILURES_TOLD]:
        print(f"{failure['case']}: {failure['message']}\n    {again} {failure['index']}")
    ran = sum(row["cases"] for row in told["rows"])
    seconds = round(time.monotonic() - start - loaded_after, 1)
    print(f"seed {args.seed}: {ran} of {len(indices)} cases in {seconds} s, {len(told['failures'])} wrong")
    if args.output:
        content = results.document("fuzz", where, told["rows"])
        content |= {"seed": args.seed, "asked": len(indices), "seconds": seconds, "failures": told["failures"]}
        print(f"all of it in {results.write(args.output, content)}")
    return 0 if ran == len(indices) and not told["failures"] else 1


def run_cases(
    exports: Loaded, device: torch.device, seed: int, indices: Sequence[int], end: float
) -> dict[str, list[dict[str, Any]]]:
    """Rows of an export and operation each, and what was wrong; whatever else a case raises ends the run."""
    rows: dict[str, dict[str, Any]] = {}
    failures: list[dict[str, Any]] = []
    for index in indices:
        start = time.monotonic()
        if start >= end:
            break
        draw = Draw(seed, index, device)
        export, name = cases.pick(draw, exports)
        case = f"fuzz/{export}/{name}"
        row = rows.setdefault(case, {"case": case, "cases": 0, "wrong": 0, "seconds": 0.0})
        message, lost = "", False
        try:
            with torch.no_grad():
                exports[export][name](draw)
        except (WrongResultError, FuTransformerError) as error:
            message = str(error)
        except RuntimeError as error:  # of CUDA, which may leave nothing that works behind
            message, lost = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}", True
        row["cases"] += 1
        row["wrong"] += bool(message)
        row["seconds"] = round(row["seconds"] + time.monotonic() - start, 3)
        if message:
            shape = ", ".join(f"{name} {value}" for name, value in draw.chosen.items())
            failures.append({"case": f"{case} ({shape})", "index": index, "message": message})
        if lost:
            break
    return {"rows": [rows[case] for case in sorted(rows)], "failures": failures}


if __name__ == "__main__":
    sys.exit(main())
