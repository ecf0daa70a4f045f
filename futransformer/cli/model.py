"""The commands about models: run and perplexity.

MODEL is a Hugging Face folder, or smollm2-135m: the small model, which is prepared when it is first asked for. Results
go to standard output, progress and the name of what computes to standard error.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from futransformer.generator.config import CONFIGS, load_config
from futransformer.generator.errors import CheckpointError, InputError
from futransformer.generator.precision import BF16, E4M3, PRECISION_NAMES, PRECISIONS, get_precision

if TYPE_CHECKING:
    from futransformer.model import Llama
    from futransformer.quantize.recipe import Fp8Recipe
    from futransformer.sampling import Sampling

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

SMALL_MODEL = "smollm2-135m"
FP8_PRECISIONS = [name for name, precision in PRECISIONS.items() if precision.prefill == E4M3]
# Windows at a time: a prefill pass is full at a few thousand tokens, a decode step reads all weights for each batch.
DEFAULT_BATCH = {"prefill": 4, "decode": 32, "turns": 8}
SATURATED_SHOWN = 5  # results whose count is printed; JSON has all


def add_parsers(subparsers: Subparsers) -> None:
    """Add the commands of this module."""
    run = subparsers.add_parser(
        "run",
        help="write text that continues or answers a prompt",
        description="Write text: on a Hopper GPU through the kernels, elsewhere through the CPU reference.",
    )
    add_model(run)
    _add_precision(run)
    run.add_argument("--prompt", required=True, help="what to continue, or the message to answer")
    run.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="stop after N tokens (default: 128)")
    run.add_argument(
        "--chat",
        action=argparse.BooleanOptionalAction,
        help="answer through the model's chat template, or continue the text (default: chat if there is a template)",
    )
    _add_sampling(run)
    run.set_defaults(handler=_run)

    perplexity = subparsers.add_parser(
        "perplexity",
        help="measure how well a model predicts a text",
        description="Measure how well a model predicts a text, in windows that do not overlap (docs/numerics.md).",
    )
    add_model(perplexity)
    _add_precision(perplexity)
    perplexity.add_argument(
        "--text", type=Path, metavar="FILE", help="UTF-8 text to score (default: a page that comes with the package)"
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


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add MODEL and where it runs."""
    parser.add_argument("model", metavar="MODEL", help=f"a Hugging Face folder, or {SMALL_MODEL}")
    parser.add_argument("--reference", action="store_true", help="compute on the CPU reference, even beside a GPU")
    parser.add_argument(
        "--kernels",
        type=Path,
        metavar="DIR",
        help="kernels that `futransformer build -o` exported; without a Hopper GPU the reference computes, and says so",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_precision(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--precision", default="bf16", help=f"one of: {PRECISION_NAMES} (default: bf16)")
    parser.add_argument(
        "--fp8-scales",
        choices=("frozen", "running"),
        help="scales of an FP8 prefill: as calibrated, or following what is read (default: frozen)",
    )


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0, the default: greedily")
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="of the K likeliest tokens (default: of all)")
    parser.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="of the fewest that hold P of the probability"
    )
    parser.add_argument(
        "--min-p", type=float, default=0.0, metavar="P", help="of those P times as likely as the likeliest"
    )
    parser.add_argument(
        "--repetition-penalty", type=float, default=1.0, metavar="R", help="divide logits of tokens seen (default: 1)"
    )
    parser.add_argument("--seed", type=int, default=0, help="the same seed, the same text (default: 0)")


def _sampling(args: argparse.Namespace) -> Sampling:
    from futransformer.sampling import Sampling  # noqa: PLC0415 - see futransformer.cli

    return Sampling(args.temperature, args.top_k, args.top_p, args.min_p, args.repetition_penalty, args.seed)


def _run(args: argparse.Namespace) -> int:
    if args.max_new_tokens < 1:
        raise InputError(f"--max-new-tokens must be at least 1, not {args.max_new_tokens}")
    from futransformer.tokenizer import TextStream, Tokenizer  # noqa: PLC0415 - see futransformer.cli

    sampling = _sampling(args)
    tokenizer = Tokenizer(model_folder(args.model))
    chat = tokenizer.can_chat if args.chat is None else args.chat
    prompt = tokenizer.encode_chat(args.prompt) if chat else tokenizer.encode_prompt(args.prompt)
    if not prompt:
        raise InputError("the prompt is empty: give --prompt at least one word")
    model = load(args, tokenizer.folder, len(prompt) + args.max_new_tokens)
    stream = TextStream(tokenizer)

    def show(_: int, token: int) -> None:
        piece = stream.add(token)
        if not args.json:
            print(piece, end="", flush=True)

    start = time.perf_counter()
    (tokens,) = model.generate([prompt], args.max_new_tokens, on_token=show, sampling=sampling)
    seconds = time.perf_counter() - start
    if not args.json:
        print(stream.rest())
    saturated = _saturated(model)
    if not args.json:
        return 0
    report = {
        **_what_computed(model, args.precision),
        "prompt": args.prompt,
        "chat": chat,
        "prompt_tokens": len(prompt),
        "new_tokens": len(tokens),
        "stopped_by": "eos" if tokens[-1] in model.config.eos_token_ids else "max_new_tokens",
        "seconds": round(seconds, 3),
        "tokens": tokens,
        "text": stream.text,
        **saturated,
    }
    print(json.dumps(report, indent=2, ensure_ascii=False))
    return 0


def _perplexity(args: argparse.Namespace) -> int:
    import numpy as np  # noqa: PLC0415 - see futransformer.cli

    from futransformer.generator.specs import PAGE_SIZE  # noqa: PLC0415
    from futransformer.kv_cache import pages_for  # noqa: PLC0415
    from futransformer.perplexity import Through, score, split_windows  # noqa: PLC0415
    from futransformer.tokenizer import Tokenizer  # noqa: PLC0415

    if args.nll is not None and (args.nll.is_dir() or not args.nll.absolute().parent.is_dir()):
        raise InputError(f"--nll {args.nll}: give the name of a file, in a folder that exists")
    text_name, text = read_text(args.text)
    tokenizer = Tokenizer(model_folder(args.model))
    tokens = tokenizer.encode(text)
    windows = split_windows(tokens, args.context, args.windows)
    precision = get_precision(args.precision)
    through: Through = args.through or ("decode" if precision.decodes_codes else "prefill")
    batch = DEFAULT_BATCH[through] if args.batch is None else args.batch
    if batch < 1:
        raise InputError(f"--batch must be at least 1 window, not {batch}")
    check_window(tokenizer.folder, len(windows[0]))
    batch = min(batch, len(windows))
    model = load(args, tokenizer.folder, batch * pages_for(len(windows[0])) * PAGE_SIZE)

    def show(done: int, total: int, so_far: float) -> None:
        say(f"{done} of {total} windows, perplexity so far {so_far:.3f}")

    start = time.perf_counter()
    result = score(
        model,
        tokens,
        context=args.context,
        windows=args.windows,
        batch=batch,
        through=through,
        progress=show,
    )
    seconds = time.perf_counter() - start
    if args.nll is not None:
        with args.nll.open("wb") as stream:
            np.save(stream, result.nll.numpy())
    read = through != "turns" and getattr(precision, through) == BF16
    plain = read and not precision.name.startswith(BF16.name)
    report: dict[str, Any] = {
        **_what_computed(model, args.precision),
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
        **_saturated(model),
    }
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        for name, value in report.items():
            shown = f"{value:.4f}" if name == "perplexity" else value
            if name == "saturated":
                worst = sorted(value.items(), key=lambda item: -item[1])
                shown = "; ".join(f"{place}: {count}" for place, count in worst[:SATURATED_SHOWN])
                shown += f"; and {len(worst) - SATURATED_SHOWN} others" if len(worst) > SATURATED_SHOWN else ""
            print(f"{name.replace('_', ' '):<16} {shown}")
    return 0


def _what_computed(model: Llama, precision: str) -> dict[str, str]:
    """What a report begins with."""
    from futransformer.layer_parts import format_parts  # noqa: PLC0415 - see futransformer.cli

    report = {"model": model.config.name, "precision": precision}
    if model.scaling is not None:
        report["fp8_scales"] = model.scaling.mode
        if model.scaling.bf16:
            report["bf16_layers"] = format_parts(model.scaling.bf16)
    return {**report, "backend": model.ops.describe()}


def _saturated(model: Llama) -> dict[str, dict[str, int]]:
    """What to report of FP8 values that saturated; says so in one line if any did."""
    if model.scaling is None or not (counts := model.scaling.saturated()):
        return {}
    worst = max(counts, key=lambda name: counts[name])
    total = sum(counts.values())
    beyond = f"{total} FP8 {'value' if total == 1 else 'values'} saturated, {counts[worst]} of them in {worst}"
    instead = ", or use --fp8-scales running" if model.scaling.mode == "frozen" else ""
    say(f"warning: {beyond}: the text goes beyond what was calibrated; calibrate on text like it{instead}")
    return {"saturated": counts}


def model_folder(name: str) -> Path:
    """Turn MODEL into a folder; the small model is prepared when it is first asked for."""
    if name == SMALL_MODEL and not Path(name).exists():
        from futransformer.small_model import prepare_small_model  # noqa: PLC0415 - see futransformer.cli

        return prepare_small_model(progress=say)
    folder = Path(os.path.expanduser(name))
    if not folder.is_dir():
        known = f"; {name} is the name of a shape, without weights" if name.lower() in CONFIGS else ""
        raise CheckpointError(
            f"there is no folder {folder}{known}; MODEL is a Hugging Face folder (config.json, tokenizer, "
            f"safetensors), which `hf download` fetches, or {SMALL_MODEL}, which is fetched here"
        )
    return folder


def check_window(folder: Path, tokens: int) -> None:
    """Refuse windows that are longer than the model's sequences, before it is read."""
    config = load_config(folder)
    if tokens > config.max_position_embeddings:
        raise InputError(
            f"--context: {config.name} is made for at most {config.max_position_embeddings} tokens "
            f"(max_position_embeddings), not for {tokens}"
        )


def load(
    args: argparse.Namespace,
    folder: Path,
    cache_tokens: int,
    recipe: Fp8Recipe | None = None,
    max_rows: int | None = None,
) -> Llama:
    """Load the model and say what computes; ``max_rows`` of a pass, if there is a reason for another number."""
    from futransformer.driver import hopper_problem  # noqa: PLC0415 - see futransformer.cli
    from futransformer.model import MAX_ROWS, Llama  # noqa: PLC0415

    if args.fp8_scales is not None and get_precision(args.precision).prefill != E4M3:
        raise InputError(f"--fp8-scales is of FP8: add --precision {FP8_PRECISIONS[0]}, or leave it out")
    problem = hopper_problem()
    if args.kernels is not None and not args.reference and problem is not None:
        say(f"{problem}; the kernels in {args.kernels} are not used")
        args.kernels = None
    model = Llama.from_pretrained(
        folder,
        precision=args.precision,
        device="cpu" if args.reference else None,
        cache_tokens=cache_tokens,
        kernels=args.kernels,
        progress=say,
        fp8_scales=args.fp8_scales or "frozen",
        recipe=recipe,
        max_rows=max_rows or MAX_ROWS,
    )
    say(f"{model.config.name} on: {model.ops.describe()}")
    return model


def read_text(path: Path | None) -> tuple[str, str]:
    """The name and the content of the text, exactly as it stands."""
    if path is None:
        return "sample.txt", (resources.files("futransformer") / "data" / "sample.txt").read_bytes().decode()
    try:
        return str(path), path.read_bytes().decode()
    except FileNotFoundError as error:
        raise InputError(f"--text {path}: there is no such file") from error
    except OSError as error:
        raise InputError(f"--text {path} cannot be read: {error.strerror}; name a file of UTF-8 text") from error
    except UnicodeDecodeError as error:
        raise InputError(f"--text {path} is not UTF-8 text: {error}") from error


def say(line: str) -> None:
    """Print a line to standard error."""
    print(line, file=sys.stderr, flush=True)
