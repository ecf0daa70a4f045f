"""``futransformer quantize``: a model's projections as INT4 codes, written as a folder."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from futransformer.cli.model import SMALL_MODEL, load, model_folder, read_text, say
from futransformer.generator.errors import InputError
from futransformer.generator.kv_format import BLOCKS
from futransformer.generator.kv_format import DEFAULT as DEFAULT_COPY
from futransformer.generator.precision import CHANNEL, GROUP_SIZES, Precision, gains_in_x, get_precision
from futransformer.texts import WIKITEXT2, read_wikitext2

if TYPE_CHECKING:
    import torch

    from futransformer.checkpoint import Checkpoint
    from futransformer.fp8_scaling import ActivationScales
    from futransformer.generator.config import LlamaConfig
    from futransformer.quantize.calibration_text import CalibrationText
    from futransformer.quantize.layers import Errors, LayerQuantiser
    from futransformer.quantize.recipe import Fp8Recipe
    from futransformer.quantize.write import Fp8Reader, Progress

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

SIZES = {**{str(size): size for size in GROUP_SIZES}, "channel": CHANNEL}
HEADS = {"bf16": "", "fp8": "-head8", "int4": "-head4"}
CACHES = {"bf16": "", "fp8": "-kv8", "int4": "-kv4", "fp8-int4": "-kv8-kv4"}  # an INT4 copy beside BF16 or FP8 pages
OWN = "futransformer"
FP8_SAMPLES = 8  # windows of the text that scales of activations are found by
PARTS = ("q", "k", "v", "o", "gate", "up", "down")  # of projections_of
DEFAULT_SEQLEN = 2048


def add_parsers(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "quantize",
        help="write a model whose projections are INT4 codes",
        description="Quantise a model's projections to INT4, layer by layer, on a GPU where there is one, and write "
        "a compressed-tensors checkpoint that says by which precision we serve it (docs/formats.md). An interrupted "
        "job goes on where it stopped.",
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
    parser.add_argument(
        "--rotate",
        action="store_true",
        help="rotate the residual stream, and V within its heads, by what is folded into the weights: spreads outliers",
    )
    parser.add_argument(
        "--keep-gains",
        action="store_true",
        help="leave gains in the norms, not in the weights; decode multiplies them into the x that it writes",
    )
    gptq = parser.add_argument_group("gptq, and the text that it reads")
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
    served = parser.add_argument_group("how it is served", "written into the folder, where every command finds it")
    served.add_argument(
        "--format",
        choices=(OWN, "compressed-tensors"),
        default=OWN,
        help=f"{OWN} (default) is the other and more; compressed-tensors alone leaves the precision to be named",
    )
    served.add_argument("--lm-head", choices=tuple(HEADS), default="bf16", help="decode's head (default: bf16)")
    served.add_argument("--kv", choices=tuple(CACHES), default="bf16", help="the KV cache (default: bf16)")
    served.add_argument(
        "--hadamard-block",
        type=int,
        choices=BLOCKS,
        metavar="N",
        help="rotate V in blocks of N features of a head, folded into the weights, and K as an INT4 cache is written "
        f"(default: {DEFAULT_COPY.hadamard} for an INT4 cache, else 0: not at all; with --rotate V's is a head)",
    )
    served.add_argument(
        "--fp8-prefill",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="FP8 codes of the same weights, and scales by the text, for prefill; else it reads the INT4 codes "
        "dequantised (default: no)",
    )
    served.add_argument(
        "--kernels", type=Path, metavar="DIR", help="kernels of that precision, exported, that read the text"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="where to compute (default: cuda, if it is there)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(handler=_quantize)


def _quantize(args: argparse.Namespace) -> int:
    from futransformer.formats.codes import Groups  # noqa: PLC0415 - see futransformer.cli
    from futransformer.generator.config import load_config  # noqa: PLC0415
    from futransformer.quantize.folder import check_output  # noqa: PLC0415
    from futransformer.quantize.folding import Folding  # noqa: PLC0415
    from futransformer.quantize.int4_gptq import Int4Method  # noqa: PLC0415
    from futransformer.quantize.layers import Gptq, Nearest  # noqa: PLC0415
    from futransformer.quantize.stream import CalibrationStream  # noqa: PLC0415
    from futransformer.quantize.write import WHAT, Own, write_quantised  # noqa: PLC0415

    _check_used(args)
    groups = Groups(SIZES[args.group_size], args.asymmetric)
    method = Int4Method(groups, args.scale_search, args.act_order, args.sweeps)
    precision = _precision(args, f"int4{groups.suffix}")
    folder, device = model_folder(args.model), _device(args.device)
    config = load_config(folder)
    folding = Folding(args.rotate, _value_rotation(args, config), device, args.keep_gains)
    folding.check(config.name, config.head_dim)
    check_output(folder, args.output, force=args.force, what=WHAT)
    described: dict[str, Any] = {
        "method": args.method,
        "group_size": groups.group_size,
        "zero_points": groups.zero_points,
        "scale_search": method.search,
        "residual_rotation": folding.residual_rotation,
        "value_rotation": folding.value_rotation,
        "keep_gains": folding.keep_gains,
    }
    text = _calibration(args, folder, config) if args.method == "gptq" or args.fp8_prefill else None
    if args.method == "gptq":
        assert text is not None
        described |= {
            "act_order": method.act_order,
            "sweeps": method.sweeps,
            "calibration": text.described(),
            "computed_on": device.type,
        }

    def quantiser(checkpoint: Checkpoint) -> LayerQuantiser:
        if args.method == "rtn" or text is None:
            return Nearest(method, device)
        stream = CalibrationStream(config, folding.embedding(checkpoint), text.windows, device)
        return Gptq(method, stream, checkpoint.norm_gains() if folding.keep_gains else ())

    def show(progress: Progress) -> None:
        left = progress.seconds_left
        rest = "kept from before" if left is None else f"{math.ceil(left)} s left"
        say(f"layer {progress.layers} of {progress.of}, {rest}")

    reader = None if text is None else _fp8_reader(args, precision, text)
    errors = write_quantised(
        folder,
        args.output,
        quantiser,
        groups,
        described,
        own=Own(precision, reader) if args.format == OWN else None,
        folding=folding,
        force=args.force,
        progress=show,
    )
    if args.json:
        report = {"output": str(args.output), "precision": precision.name, **described, "errors": errors}
        print(json.dumps(report, indent=2))
    else:
        _report(args, f"{groups}; precision {precision.name} serves it", errors)
    return 0


def _check_used(args: argparse.Namespace) -> None:
    """Refuse options that would change nothing: a folder must not be taken for what was asked for in vain."""
    if args.sweeps < 0:
        raise InputError(f"--sweeps must not be negative, as {args.sweeps} is")
    of_gptq = {"--act-order": args.act_order, "--sweeps": args.sweeps}
    of_text = {"--calibration": args.calibration is not None, "--seqlen": args.seqlen is not None}
    for options, used, remedy in (
        (of_gptq, args.method == "gptq", "--method gptq"),
        (of_text, args.method == "gptq" or args.fp8_prefill, "--method gptq or --fp8-prefill"),
    ):
        vain = [name for name, given in options.items() if given and not used]
        if vain:
            raise InputError(f"{' and '.join(vain)} would change nothing: add {remedy}, or leave them out")


def _value_rotation(args: argparse.Namespace, config: LlamaConfig) -> int:
    if args.hadamard_block is not None:
        block: int = args.hadamard_block
        return block
    if args.rotate:
        return config.head_dim
    return DEFAULT_COPY.hadamard if "int4" in args.kv else 0


def _precision(args: argparse.Namespace, weights: str) -> Precision:
    """What the folder is to name; InputError where only our own format can."""
    block = args.hadamard_block
    copied = "int4" in args.kv and block not in (None, DEFAULT_COPY.hadamard)
    name = f"{'fp8-' if args.fp8_prefill else ''}{weights}{HEADS[args.lm_head]}{CACHES[args.kv]}"
    precision = get_precision(name + (f"-h{block}" if copied else ""))
    if args.keep_gains:
        precision = gains_in_x(precision)
    if args.format != OWN and (args.fp8_prefill or precision.suffix):
        raise InputError(
            f"--format {args.format} has no place for --fp8-prefill, --lm-head and --kv: leave them out, or write "
            f"--format {OWN}, which other engines read as well"
        )
    if args.kernels is not None and not args.fp8_prefill:
        raise InputError("--kernels read the text for an FP8 prefill: add --fp8-prefill, or leave them out")
    return precision


def _fp8_reader(args: argparse.Namespace, precision: Precision, text: CalibrationText) -> Fp8Reader:
    """Finds scales for windows of the text."""

    def read(folder: Path, recipe: Fp8Recipe) -> tuple[ActivationScales, dict[str, Any]]:
        from futransformer.generator.specs import PAGE_SIZE  # noqa: PLC0415 - see futransformer.cli
        from futransformer.kv_cache import pages_for  # noqa: PLC0415
        from futransformer.quantize.calibrate import RULE, calibrate  # noqa: PLC0415

        tokens = [token for window in text.windows for token in window]
        window = len(text.windows[0])
        settings = {"precision": precision.name, "reference": args.device == "cpu", "fp8_scales": None}
        model = load(argparse.Namespace(**{**vars(args), **settings}), folder, pages_for(window) * PAGE_SIZE, recipe)
        found = calibrate(model, tokens, context=window, samples=FP8_SAMPLES, progress=say)
        return found.scales, {
            "text": text.name,
            "rule": RULE,
            "weights": "rtn",
            "windows": found.windows,
            "context": found.context,
            "backend": model.ops.describe(),
            "saturated": found.saturated,
        }

    return read


def _device(name: str | None) -> torch.device:
    import torch  # noqa: PLC0415 - see futransformer.cli

    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: PyTorch finds no GPU here; leave it out to compute on the CPU")
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def _calibration(args: argparse.Namespace, folder: Path, config: LlamaConfig) -> CalibrationText:
    from futransformer.quantize.calibration_text import RANDOM, cut_text, draw_tokens  # noqa: PLC0415

    longest = min(DEFAULT_SEQLEN, config.max_position_embeddings)
    seqlen = longest if args.seqlen is None else args.seqlen
    if args.calibration == RANDOM:
        return draw_tokens(config, args.samples, seqlen)
    if args.calibration == WIKITEXT2:
        name, content = WIKITEXT2, read_wikitext2("train")
    else:
        name, content = read_text(Path(args.calibration) if args.calibration else None, option="--calibration")
    text = cut_text(Path(name).name, content, folder, config, args.samples, seqlen)
    count, length = len(text.windows), len(text.windows[0])
    if count < args.samples or length < seqlen:
        say(
            f"note: {name} gives {count} x {length} tokens, of {args.samples} x {seqlen} asked for; "
            "--calibration names a longer text"
        )
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
