"""``futransformer quantize``: a model's projections as INT4 codes, written as a folder."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from futransformer.cli.model import SMALL_MODEL, model_folder, read_text, say
from futransformer.generator.errors import InputError
from futransformer.generator.precision import CHANNEL, GROUP_SIZES
from futransformer.texts import WIKITEXT2, read_wikitext2

if TYPE_CHECKING:
    import torch

    from futransformer.checkpoint import Checkpoint
    from futransformer.generator.config import LlamaConfig
    from futransformer.quantize.calibration_text import CalibrationText
    from futransformer.quantize.layers import Errors, LayerQuantiser
    from futransformer.quantize.write import Progress

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

SIZES = {**{str(size): size for size in GROUP_SIZES}, "channel": CHANNEL}
PARTS = ("q", "k", "v", "o", "gate", "up", "down")  # of projections_of
DEFAULT_SEQLEN = 2048


def add_parsers(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "quantize",
        help="write a model whose projections are INT4 codes",
        description="Quantise a model's projections to INT4, layer by layer, on a GPU where there is one, and write "
        "them as a compressed-tensors checkpoint (docs/formats.md). An interrupted job goes on where it stopped.",
    )
    parser.add_argument("model", metavar="MODEL", help=f"a Hugging Face folder, or {SMALL_MODEL}")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="OUT", help="the folder to write")
    parser.add_argument("--force", action="store_true", help="replace a model that was written to OUT before")
    parser.add_argument(
        "--method",
        choices=("rtn", "gptq"),
        default="rtn",
        help="rtn: round to nearest (default); gptq: for what a text makes the projections read",
    )
    parser.add_argument(
        "--group-size", choices=tuple(SIZES), default="128", help="weights of a row that share a scale (default: 128)"
    )
    parser.add_argument("--asymmetric", action="store_true", help="a zero point for each group as well")
    parser.add_argument(
        "--scale-search",
        choices=("max", "mse"),
        default="max",
        help="scales by a group's largest weight (default), or those of the least squared error",
    )
    gptq = parser.add_argument_group("gptq")
    gptq.add_argument(
        "--calibration",
        metavar="TEXT",
        help=f"a file of UTF-8 text like what the model will read, {WIKITEXT2} (its train split), or random tokens "
        "(default: a page that comes with the package, enough for a try)",
    )
    gptq.add_argument("--samples", type=int, default=128, metavar="N", help="windows of the text (default: 128)")
    gptq.add_argument(
        "--seqlen", type=int, metavar="L", help=f"tokens in a window (default: {DEFAULT_SEQLEN}, if the model takes it)"
    )
    gptq.add_argument(
        "--act-order", action="store_true", help="columns of the largest operands first; groups stay runs of columns"
    )
    gptq.add_argument(
        "--sweeps", type=int, default=0, metavar="N", help="move scales and codes on N times, one by one (default: 0)"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="where to compute (default: cuda, if it is there)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(handler=_quantize)


def _quantize(args: argparse.Namespace) -> int:
    from futransformer.formats.codes import Groups  # noqa: PLC0415 - see futransformer.cli
    from futransformer.generator.config import load_config  # noqa: PLC0415
    from futransformer.quantize.folder import check_output  # noqa: PLC0415
    from futransformer.quantize.int4_gptq import Int4Method  # noqa: PLC0415
    from futransformer.quantize.layers import Gptq, Nearest  # noqa: PLC0415
    from futransformer.quantize.stream import CalibrationStream  # noqa: PLC0415
    from futransformer.quantize.write import WHAT, write_quantised  # noqa: PLC0415

    if args.sweeps < 0:
        raise InputError(f"--sweeps must not be negative, as {args.sweeps} is")
    groups = Groups(SIZES[args.group_size], args.asymmetric)
    method = Int4Method(groups, args.scale_search, args.act_order, args.sweeps)
    folder, device = model_folder(args.model), _device(args.device)
    check_output(folder, args.output, force=args.force, what=WHAT)
    described: dict[str, Any] = {
        "method": args.method,
        "group_size": groups.group_size,
        "zero_points": groups.zero_points,
        "scale_search": method.search,
    }
    text: CalibrationText | None = None
    if args.method == "gptq":
        text = _calibration(args, folder, load_config(folder))
        described |= {
            "act_order": method.act_order,
            "sweeps": method.sweeps,
            "calibration": text.described(),
            "computed_on": device.type,
        }

    def quantiser(checkpoint: Checkpoint) -> LayerQuantiser:
        if text is None:
            return Nearest(method, device)
        return Gptq(method, CalibrationStream(checkpoint.config, checkpoint.embedding(), text.windows, device))

    def show(progress: Progress) -> None:
        say(f"layer {progress.layers} of {progress.of}, {math.ceil(progress.seconds_left)} s left")

    errors = write_quantised(folder, args.output, quantiser, groups, described, force=args.force, progress=show)
    if args.json:
        print(json.dumps({"output": str(args.output), **described, "errors": errors}, indent=2))
    else:
        _report(args, f"{groups}; precision int4{groups.suffix} serves it", errors)
    return 0


def _device(name: str | None) -> torch.device:
    import torch  # noqa: PLC0415 - see futransformer.cli

    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: PyTorch finds no GPU here; leave it out to compute on the CPU")
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def _calibration(args: argparse.Namespace, folder: Path, config: LlamaConfig) -> CalibrationText:
    from futransformer.quantize.calibration_text import RANDOM, cut_text, draw_tokens  # noqa: PLC0415

    seqlen = args.seqlen or min(DEFAULT_SEQLEN, config.max_position_embeddings)
    if args.calibration == RANDOM:
        return draw_tokens(config, args.samples, seqlen)
    if args.calibration == WIKITEXT2:
        name, content = WIKITEXT2, read_wikitext2("train")
    else:
        name, content = read_text(Path(args.calibration) if args.calibration else None, "--calibration")
    text = cut_text(Path(name).name, content, folder, config, args.samples, seqlen)
    count, length = len(text.windows), len(text.windows[0])
    if count < args.samples or length < seqlen:
        say(f"note: {name} gives {count} x {length} tokens, of {args.samples} x {seqlen} asked for")
    return text


def _report(args: argparse.Namespace, served: str, errors: Mapping[str, Errors]) -> None:
    """The errors of every projection: of what it computes where that was measured, else of its weight."""
    kind = "output" if args.method == "gptq" else "weight"
    said = [error[kind] for error in errors.values()]
    what = "what projections compute from the text" if kind == "output" else "weights"
    print(f"relative error of {what}, by layer")
    print("      " + "".join(f"{part:>9}" for part in PARTS))
    for first in range(0, len(said), len(PARTS)):
        row = said[first : first + len(PARTS)]
        print(f"{first // len(PARTS):>6}" + "".join(f"{error:>9.4f}" for error in row))
    mean = _root_mean_square(said)
    nearest = ""
    if kind == "output":
        others = _root_mean_square([error["output_of_nearest"] for error in errors.values()])
        nearest = f", {others:.4f} if rounded to nearest"
    print(f"{args.output}: INT4 by {args.method}, {served}")
    print(f"relative error of {what} {mean:.4f}{nearest} (root mean square)")


def _root_mean_square(values: Sequence[float]) -> float:
    return math.sqrt(sum(value**2 for value in values) / len(values))
