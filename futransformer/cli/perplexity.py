"""The command that measures how well a model predicts a text, alone or beside another over the same windows."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from futransformer.cli.model import (
    add_model,
    add_precision,
    check_window,
    choose_precision,
    count_saturated,
    load,
    model_folder,
    read_text,
    say,
    what_computed,
)
from futransformer.generator.errors import CheckpointError, InputError, UnsupportedError
from futransformer.generator.precision import BF16, get_precision

if TYPE_CHECKING:
    from futransformer.model import Llama

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

# Windows at a time: a prefill pass is full at a few thousand tokens, a decode step reads all weights for each batch.
DEFAULT_BATCH = {"prefill": 4, "decode": 32, "turns": 8}
SATURATED_SHOWN = 5  # results whose count is printed; JSON has all


def add_parsers(subparsers: Subparsers) -> None:
    """Add the command of this module."""
    perplexity = subparsers.add_parser(
        "perplexity",
        help="measure how well a model predicts a text",
        description="Measure how well a model predicts a text, in windows that do not overlap (docs/numerics.md).",
    )
    add_model(perplexity)
    add_precision(perplexity)
    perplexity.add_argument(
        "--text",
        type=Path,
        metavar="FILE",
        help="UTF-8 text to score (default: a page that comes with the package), or wikitext2: the test split of "
        "WikiText-2, read by the datasets library",
    )
    perplexity.add_argument(
        "--compare",
        metavar="BASELINE",
        help="score another model too, and tell the KL divergence from it and how often the likeliest token is the "
        "same: a precision of the same MODEL, such as bf16, or a model's folder, in bf16. Of a quantised MODEL name "
        "the folder that it was made from: its own bf16 is its codes, dequantised",
    )
    perplexity.add_argument(
        "--compare-kernels", type=Path, metavar="DIR", help="kernels for BASELINE, where --kernels has MODEL's"
    )
    perplexity.add_argument(
        "--through",
        choices=tuple(DEFAULT_BATCH),
        help="the kernels to measure, or turns: half of a window is read, three eighths are decoded, the rest is read "
        "(default: prefill, but decode where that reads codes, of weights or of the cache)",
    )
    perplexity.add_argument("--context", type=int, default=1024, metavar="N", help="tokens in a window (default: 1024)")
    perplexity.add_argument("--windows", type=int, metavar="N", help="score the first N windows (default: all)")
    perplexity.add_argument(
        "--batch",
        type=int,
        metavar="N",
        help="windows at a time (default: 4 through prefill, 32 through decode, 8 in turns)",
    )
    perplexity.add_argument(
        "--nll", type=Path, metavar="FILE", help="write each token's -log p as a float32 .npy array"
    )
    perplexity.set_defaults(handler=_perplexity)


def _perplexity(args: argparse.Namespace) -> int:
    import numpy as np  # noqa: PLC0415 - see futransformer.cli

    from futransformer.comparison import compare  # noqa: PLC0415
    from futransformer.generator.specs import PAGE_SIZE  # noqa: PLC0415
    from futransformer.kv_cache import pages_for  # noqa: PLC0415
    from futransformer.perplexity import Through, score, split_windows  # noqa: PLC0415
    from futransformer.tokenizer import Tokenizer  # noqa: PLC0415

    if args.nll is not None and (args.nll.is_dir() or not args.nll.absolute().parent.is_dir()):
        raise InputError(f"--nll {args.nll}: give the name of a file, in a folder that exists")
    text_name, text = read_text(args.text, named=True)
    tokenizer = Tokenizer(model_folder(args.model))
    choose_precision(args, tokenizer.folder)
    tokens = tokenizer.encode(text)
    windows = split_windows(tokens, args.context, args.windows)
    precision = get_precision(args.precision)
    through: Through = args.through or ("decode" if precision.decodes_codes else "prefill")
    batch = DEFAULT_BATCH[through] if args.batch is None else args.batch
    if batch < 1:
        raise InputError(f"--batch must be at least 1 window, not {batch}")
    check_window(tokenizer.folder, len(windows[0]))
    batch = min(batch, len(windows))
    baseline_folder, baseline_precision = _baseline(args, tokenizer.folder)
    if baseline_folder != tokenizer.folder and Tokenizer(baseline_folder).encode(text) != tokens:
        raise InputError(
            f"--compare {args.compare}: its tokenizer splits the text into other tokens than {args.model}'s"
        )
    cache_tokens = batch * pages_for(len(windows[0])) * PAGE_SIZE
    model = load(args, tokenizer.folder, cache_tokens)

    def show(done: int, total: int, so_far: float) -> None:
        say(f"{done} of {total} windows, perplexity so far {so_far:.3f}")

    options: dict[str, Any] = {
        "context": args.context,
        "windows": args.windows,
        "batch": batch,
        "through": through,
        "progress": show,
    }
    baseline = None
    if args.compare is not None:
        baseline = _load_baseline(args, baseline_folder, baseline_precision, cache_tokens)
    one_by_one = ", token by token" if through == "decode" else ""  # minutes a window on a CPU, before the first report
    say(f"reading {len(windows)} x {len(windows[0])} tokens{one_by_one}")
    start = time.perf_counter()
    figures: dict[str, Any] = {}
    if baseline is None:
        result = score(model, tokens, **options)
    else:
        compared = compare(model, baseline, tokens, **options)
        result = compared.result
        figures = {"compared_with": f"{baseline.config.name} in {baseline_precision}", **compared.figures()}
    seconds = time.perf_counter() - start
    if args.nll is not None:
        with args.nll.open("wb") as stream:
            np.save(stream, result.nll.numpy())
    read = through != "turns" and getattr(precision, through) == BF16
    plain = read and not precision.name.startswith(BF16.name)
    report: dict[str, Any] = {
        **what_computed(model, args.precision),
        **({through: BF16.name} if plain else {}),  # the precision's name speaks of the other phase
        "through": through,
        "text": text_name,
        "context": args.context,
        "stride": args.context,
        "bos": "none added",
        "batch": batch,
        "windows": result.windows,
        "tokens_scored": result.tokens_scored,
        "tokens_left_out": result.tokens_left_out,
        "seconds": round(seconds, 3),
        "perplexity": result.perplexity,
        **figures,
        **count_saturated(model),
    }
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        _print(report)
    return 0


def _baseline(args: argparse.Namespace, folder: Path) -> tuple[Path, str]:
    """The folder and the precision that --compare names; of nothing to compare with, MODEL's own."""
    if args.compare is None:
        if args.compare_kernels is not None:
            raise InputError("--compare-kernels is of a comparison: add --compare bf16, or leave it out")
        return folder, args.precision
    try:
        return folder, get_precision(args.compare).name
    except UnsupportedError:
        pass
    try:
        return model_folder(args.compare), BF16.name
    except CheckpointError as error:
        raise InputError(
            f"--compare {args.compare} is neither a precision, such as {BF16.name}, nor a model: {error}"
        ) from error


def _load_baseline(args: argparse.Namespace, folder: Path, precision: str, cache_tokens: int) -> Llama:
    own = {"precision": precision, "kernels": args.compare_kernels, "fp8_scales": None}
    return load(argparse.Namespace(**{**vars(args), **own}), folder, cache_tokens)


def _print(report: dict[str, Any]) -> None:
    width = max(16, *map(len, report))
    for name, value in report.items():
        shown = value
        if name.endswith("perplexity"):
            shown = f"{value:.4f}"
        elif name == "percent_over_baseline":
            shown = f"{value:.3f}"
        elif isinstance(value, dict) and "standard_error" in value:
            error = value["standard_error"]
            shown = f"{value['mean']:.6f}" + ("" if error is None else f" (standard error {error:.6f})")
        elif name == "saturated":
            worst = sorted(value.items(), key=lambda item: -item[1])
            shown = "; ".join(f"{place}: {count}" for place, count in worst[:SATURATED_SHOWN])
            shown += f"; and {len(worst) - SATURATED_SHOWN} others" if len(worst) > SATURATED_SHOWN else ""
        print(f"{name.replace('_', ' '):<{width}} {shown}")
