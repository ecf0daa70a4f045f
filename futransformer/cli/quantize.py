"""``futransformer quantize``: a model's projections as INT4 codes, written as a folder."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

from futransformer.cli.model import SMALL_MODEL, model_folder, say
from futransformer.generator.precision import CHANNEL, GROUP_SIZES

if TYPE_CHECKING:
    from futransformer.quantize.write import Progress

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

SIZES = {**{str(size): size for size in GROUP_SIZES}, "channel": CHANNEL}


def add_parsers(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "quantize",
        help="write a model whose projections are INT4 codes",
        description="Quantise a model's projections to INT4, layer by layer on the CPU, and write them as a "
        "compressed-tensors checkpoint (docs/formats.md). An interrupted job goes on where it stopped.",
    )
    parser.add_argument("model", metavar="MODEL", help=f"a Hugging Face folder, or {SMALL_MODEL}")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="OUT", help="the folder to write")
    parser.add_argument("--force", action="store_true", help="replace a model that was written to OUT before")
    parser.add_argument("--method", choices=("rtn",), default="rtn", help="rtn: round to nearest (default)")
    parser.add_argument(
        "--group-size", choices=tuple(SIZES), default="128", help="weights of a row that share a scale (default: 128)"
    )
    parser.add_argument("--asymmetric", action="store_true", help="a zero point for each group as well")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(handler=_quantize)


def _quantize(args: argparse.Namespace) -> int:
    from futransformer.formats.codes import Groups  # noqa: PLC0415 - see futransformer.cli
    from futransformer.quantize.int4 import round_to_nearest  # noqa: PLC0415
    from futransformer.quantize.write import write_quantised  # noqa: PLC0415

    groups = Groups(SIZES[args.group_size], args.asymmetric)

    def show(progress: Progress) -> None:
        say(f"layer {progress.layers} of {progress.of}, {math.ceil(progress.seconds_left)} s left")

    errors = write_quantised(
        model_folder(args.model),
        args.output,
        lambda name, weight: round_to_nearest(name, weight, groups.group_size, zero_points=groups.zero_points),
        groups,
        {"method": args.method, "group_size": groups.group_size, "zero_points": groups.zero_points},
        force=args.force,
        progress=show,
    )
    mean = math.sqrt(sum(error**2 for error in errors.values()) / len(errors))
    if args.json:
        print(json.dumps({"output": str(args.output), "method": args.method, "errors": errors}, indent=2))
        return 0
    print(f"{args.output}: INT4 by {args.method}, {groups}; precision int4{groups.suffix} serves it")
    worst = sorted(errors, key=lambda name: -errors[name])[:3]
    print(f"relative error of weights {mean:.4f}; most in {', '.join(f'{name} {errors[name]:.4f}' for name in worst)}")
    return 0
