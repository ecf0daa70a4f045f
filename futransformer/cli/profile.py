"""The command ``profile CONFIG``: where the time of a decode step goes, on a Hopper GPU."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from futransformer.cli.table import table
from futransformer.generator.config import LlamaConfig, load_config
from futransformer.generator.errors import InputError, UnsupportedError
from futransformer.generator.plan import profiling_specs
from futransformer.generator.precision import PRECISION_NAMES, get_precision

if TYPE_CHECKING:
    from futransformer.bench.profile import StepProfile
    from futransformer.driver import Kernel
    from futransformer.library import KernelLibrary

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_parsers(subparsers: Subparsers) -> None:
    """Add the command of this module."""
    parser = subparsers.add_parser(
        "profile",
        help="show where the time of a decode step goes",
        description="Time each kind of launch of a decode step by itself, and the step as it runs; weights are random.",
    )
    parser.add_argument("config", metavar="CONFIG", help="a model's name, a Hugging Face folder, or a config.json")
    parser.add_argument("--precision", default="bf16", help=f"one of: {PRECISION_NAMES} (default: bf16)")
    parser.add_argument("--batch", type=int, default=1, metavar="B", help="sequences (default: 1)")
    parser.add_argument("--context", type=int, default=1024, metavar="N", help="tokens of each (default: 1024)")
    parser.add_argument("--sample", action="store_true", help="choose tokens by sampling, not greedily")
    parser.add_argument(
        "--gaps",
        action="store_true",
        help="also how long no bulk copy is under way, by clocks in a build for profiling of the launch for all layers",
    )
    parser.add_argument("--kernels", type=Path, metavar="DIR", help="kernels that `futransformer build -o` exported")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw a picture, a PNG")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--output", type=Path, metavar="RESULTS", help="add to the results that `bench report` tells")
    parser.add_argument("--commit", metavar="SHA", help="the commit measured, where there is no git history")
    parser.set_defaults(handler=_profile)


def _profile(args: argparse.Namespace) -> int:
    config, precision = load_config(args.config), get_precision(args.precision)
    for name, value in (("--batch", args.batch), ("--context", args.context)):
        if value < 1:
            raise InputError(f"{name} must be at least 1, not {value}")
    if args.context >= config.max_position_embeddings:
        raise InputError(
            f"--context {args.context} leaves no token to write: {config.name} is made for at most "
            f"{config.max_position_embeddings} (max_position_embeddings)"
        )
    from futransformer.bench.ceilings import measure_ceilings  # noqa: PLC0415 - see futransformer.cli
    from futransformer.bench.harness import CudaClock, Harness  # noqa: PLC0415
    from futransformer.bench.profile import profile_step  # noqa: PLC0415
    from futransformer.library import load_kernels  # noqa: PLC0415

    ops = load_kernels(config, precision, folder=args.kernels)
    clocked = _clocked(config, ops, args) if args.gaps else None
    print(f"{config.name} on: {ops.describe()}", file=sys.stderr)
    harness = Harness(CudaClock())
    ceilings = measure_ceilings(harness, ops.device)
    step = args.batch, args.context
    measure = partial(profile_step, sampled=args.sample, clocked=clocked)
    found = measure(config, ops, precision.name, *step, harness, ceilings.read_tbps)
    if args.output is not None:
        from futransformer.bench import profile_table, results  # noqa: PLC0415

        rows = profile_table.rows_of(found, config.name, *step)
        where = results.environment(args.commit)
        content = results.document(profile_table.SUBJECT, where, rows, precision=precision.name, ceilings=ceilings)
        print(results.merge(args.output, content, profile_table.step_of), file=sys.stderr)
    if args.plot is not None:
        from futransformer.bench.profile_picture import draw  # noqa: PLC0415

        draw(found, f"{config.name}, {precision.name}, batch {args.batch}, context {args.context}", args.plot)
    print(json.dumps(as_json(found), indent=2) if args.json else as_text(found))
    return 0


def _clocked(config: LlamaConfig, ops: KernelLibrary, args: argparse.Namespace) -> Kernel:
    """The build for profiling of the launch that the step has."""
    from futransformer.build.load import load_or_build  # noqa: PLC0415 - see futransformer.cli
    from futransformer.driver import Kernel  # noqa: PLC0415

    (spec,) = profiling_specs(ops.plan) or (None,)
    if spec is None or args.batch > 1:
        raise UnsupportedError(
            f"--gaps: {config.name} in {ops.precision.name} decodes a batch of {args.batch} by single kernels, which "
            "have no build for profiling; it is for one sequence in int4-kv4 and its like, of all but small models"
        )
    record, cubin = load_or_build((spec,), folder=args.kernels)[spec.name]
    return Kernel(spec, record, cubin, ops.device)


def as_json(profile: StepProfile) -> dict[str, Any]:
    """All figures: seconds and bytes of all launches of a stage together."""
    return {**asdict(profile), "sum_seconds": profile.sum_seconds}


def as_text(profile: StepProfile) -> str:
    """A table of the stages, and what the whole says beside their sum."""
    from futransformer.bench.profile_table import FROM_L2, HEADER, cells, rows_of  # noqa: PLC0415 - see futransformer.cli

    rows = [cells(row) for row in rows_of(profile, "", 0, 0)]
    hidden = 1e6 * (profile.sum_seconds - profile.step_seconds)
    says = f"hides {hidden:.0f} us of the sum" if hidden > 0 else f"makes the step {-hidden:.0f} us longer than the sum"
    notes = [
        "",
        f"Memory: {profile.read_tbps:.2f} TB/s, measured. Each stage is timed as a graph of its own launches, which",
        f"overlap one another. In the step they overlap those of other stages instead, which {says}.",
    ]
    if any(stage.from_l2 for stage in profile.stages):
        notes.append(FROM_L2)
    return "\n".join([table(HEADER, rows), *notes])
