"""``futransformer calibrate``: the scales of an FP8 prefill from a text, and the model written with them."""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

from futransformer.cli.model import FP8_PRECISIONS, add_model, check_window, load, model_folder, read_text, say
from futransformer.generator.errors import CheckpointError, InputError
from futransformer.generator.precision import E4M3, get_precision

if TYPE_CHECKING:
    from futransformer.model import Llama

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_parsers(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "calibrate",
        help="find the scales of an FP8 prefill, and write the model with them",
        description="Read a text through the FP8 kernels (elsewhere through the CPU reference), find the scales of "
        "what they write in FP8, and write a folder that holds the model and these scales (docs/numerics.md).",
    )
    add_model(parser)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="OUT", help="the folder to write")
    parser.add_argument("--force", action="store_true", help="replace an earlier calibration in OUT")
    parser.add_argument(
        "--text",
        type=Path,
        metavar="FILE",
        help="UTF-8 text like what the model will read (default: a page that comes with the package, enough for a try)",
    )
    parser.add_argument("--samples", type=int, default=8, metavar="N", help="windows of the text (default: 8)")
    parser.add_argument("--context", type=int, default=1024, metavar="L", help="tokens in a window (default: 1024)")
    parser.add_argument(
        "--precision",
        help=f"what to calibrate for: {', '.join(FP8_PRECISIONS)}, or any whose prefill is FP8 (default: what a folder "
        f"that `quantize` wrote names, with an FP8 prefill, else {FP8_PRECISIONS[0]})",
    )
    add_method(parser)
    parser.set_defaults(handler=_calibrate, fp8_scales=None)


def add_method(parser: argparse.ArgumentParser) -> None:
    """Add what decides how accurate an FP8 prefill is, beside the text."""
    parser.add_argument(
        "--bf16-layers",
        metavar="PARTS",
        help="layers that stay in BF16, or parts of them: 0,1.attention,29.mlp; or auto:N, those parts that cost most "
        "accuracy, in all as large as N layers",
    )
    parser.add_argument(
        "--weights",
        choices=("rtn", "gptq"),
        default="rtn",
        help="how FP8 weights are rounded: each to nearest when the model is loaded, or by GPTQ, for the text, now "
        "(default: rtn)",
    )


def _calibrate(args: argparse.Namespace) -> int:
    from futransformer.checkpoint import load_checkpoint  # noqa: PLC0415 - see futransformer.cli
    from futransformer.generator.config import load_config  # noqa: PLC0415
    from futransformer.layer_parts import format_parts  # noqa: PLC0415
    from futransformer.quantize.calibrate import choose_windows  # noqa: PLC0415
    from futransformer.quantize.folder import check_output, write_folder  # noqa: PLC0415
    from futransformer.quantize.make import Method, make_recipe, parse_bf16  # noqa: PLC0415
    from futransformer.quantize.recipe import Fp8Recipe  # noqa: PLC0415
    from futransformer.tokenizer import Tokenizer  # noqa: PLC0415

    folder = model_folder(args.model)
    args.precision = args.precision or _named(folder)
    precision = get_precision(args.precision)
    if precision.prefill != E4M3:
        raise InputError(
            f"calibration is of an FP8 prefill, and {precision.name} has none: give one of {', '.join(FP8_PRECISIONS)}"
        )
    text_name, text = read_text(args.text)
    check_output(folder, args.output, force=args.force)
    config = load_config(folder)
    bf16 = parse_bf16(args.bf16_layers, config.num_hidden_layers)
    method = Method(bf16, args.weights, args.context, args.samples)
    tokens = Tokenizer(folder).encode(text)
    windows = choose_windows(tokens, args.context, args.samples)
    window = len(windows[0])
    check_window(folder, window)
    if len(windows) < args.samples or window < args.context:
        say(
            f"note: {text_name} gives {len(windows)} x {window} tokens, of {args.samples} x {args.context} asked for; "
            "--text names a longer one"
        )

    def load_with(recipe: Fp8Recipe, cache_tokens: int, max_rows: int) -> Llama:
        return load(args, folder, cache_tokens, recipe, max_rows)

    made = make_recipe(load_with, load_checkpoint(folder, config), config, precision, tokens, method, say)
    digest = hashlib.sha256(text.encode()).hexdigest()
    calibration = {"text": Path(text_name).name, "text_sha256": digest, **made.described()}
    recipe = made.calibration.recipe
    write_folder(folder, args.output, recipe, precision, calibration, force=args.force)
    plain = format_parts(recipe.bf16)
    if args.json:
        report = {"model": config.name, "output": str(args.output), "bf16_layers": plain, **calibration}
        print(json.dumps(report, indent=2))
    else:
        beside = f", layers in BF16: {plain}" if plain else ""
        print(f"{args.output}: {config.name} with FP8 scales of {len(windows)} x {window} tokens{beside}")
    return 0


def _named(folder: Path) -> str:
    """The precision that the folder names, with an FP8 prefill in place of another."""
    from futransformer.quantize.description import named_precision  # noqa: PLC0415 - see futransformer.cli

    try:
        named = named_precision(folder)
    except CheckpointError:  # a description that is damaged, and will be written anew
        named = None
    if named is None:
        return FP8_PRECISIONS[0]
    return named if get_precision(named).prefill == E4M3 else f"fp8-{named}".replace("fp8-bf16", "fp8", 1)
