"""The command that runs a model, and what other commands about models share.

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
from typing import TYPE_CHECKING

from futransformer.generator.config import CONFIGS, load_config
from futransformer.generator.errors import CheckpointError, InputError
from futransformer.generator.precision import BF16, E4M3, PRECISION_NAMES, PRECISIONS, get_precision
from futransformer.texts import WIKITEXT2, read_wikitext2

if TYPE_CHECKING:
    from futransformer.model import Llama
    from futransformer.quantize.recipe import Fp8Recipe
    from futransformer.sampling import Sampling

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

SMALL_MODEL = "smollm2-135m"
FP8_PRECISIONS = [name for name, precision in PRECISIONS.items() if precision.prefill == E4M3]


def add_parsers(subparsers: Subparsers) -> None:
    """Add the command of this module."""
    run = subparsers.add_parser(
        "run",
        help="write text that continues or answers a prompt",
        description="Write text: on a Hopper GPU through the kernels, elsewhere through the CPU reference.",
    )
    add_model(run)
    add_precision(run)
    prompt = run.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", help="what to continue, or the message to answer")
    prompt.add_argument(
        "--prompt-file", type=Path, metavar="FILE", help="the same from a UTF-8 file without its last newline; -: stdin"
    )
    run.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="stop after N tokens (default: 128)")
    run.add_argument(
        "--chat",
        action=argparse.BooleanOptionalAction,
        help="answer through the model's chat template, or continue the text (default: chat if there is a template)",
    )
    _add_sampling(run)
    run.add_argument(
        "--speculate",
        type=int,
        default=0,
        metavar="K",
        help="try up to K tokens ahead, those that followed the last ones before: fewer steps where the text repeats "
        "what stands in it or in the prompt (1 to 7; default: 0, none)",
    )
    run.set_defaults(handler=_run)


def add_model(parser: argparse.ArgumentParser, *, json: bool = True) -> None:
    """Add MODEL and where it runs; ``json``: and the form of the result."""
    parser.add_argument("model", metavar="MODEL", help=f"a Hugging Face folder, or {SMALL_MODEL}")
    parser.add_argument("--reference", action="store_true", help="compute on the CPU reference, even beside a GPU")
    parser.add_argument(
        "--kernels",
        type=Path,
        metavar="DIR",
        help="kernels that `futransformer build -o` exported; without a Hopper GPU the reference computes, and says so",
    )
    if json:
        parser.add_argument("--json", action="store_true", help="print JSON")


def add_precision(parser: argparse.ArgumentParser, *, scales: bool = True) -> None:
    """Add what the model computes in; ``scales``: and a choice of FP8's."""
    parser.add_argument(
        "--precision",
        help=f"one of: {PRECISION_NAMES} (default: what a folder of ours names, else bf16)",
    )
    if scales:
        _add_scales(parser)


def _add_scales(parser: argparse.ArgumentParser) -> None:
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
    if args.speculate:
        from futransformer.speculation import check_drafts  # noqa: PLC0415

        check_drafts(args.speculate, [sampling])
    text = args.prompt if args.prompt_file is None else _prompt_of(args.prompt_file)
    tokenizer = Tokenizer(model_folder(args.model))
    choose_precision(args, tokenizer.folder)
    chat = tokenizer.can_chat if args.chat is None else args.chat
    prompt = tokenizer.encode_chat(text) if chat else tokenizer.encode_prompt(text)
    if not prompt:
        raise InputError("the prompt is empty: give at least one word")
    model = load(args, tokenizer.folder, len(prompt) + args.max_new_tokens)
    stream = TextStream(tokenizer)

    def show(_: int, token: int) -> None:
        piece = stream.add(token)
        if not args.json:
            print(piece, end="", flush=True)

    start = time.perf_counter()
    (tokens,) = model.generate(
        [prompt], args.max_new_tokens, on_token=show, sampling=sampling, speculate=args.speculate
    )
    seconds = time.perf_counter() - start
    if not args.json:
        print(stream.rest())
    saturated = count_saturated(model)
    if not args.json:
        return 0
    report = {
        **what_computed(model, args.precision),
        "prompt": text,
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


def choose_precision(args: argparse.Namespace, folder: Path) -> None:
    """Let the folder name the precision where --precision does not."""
    from futransformer.quantize.description import named_precision  # noqa: PLC0415 - see futransformer.cli

    args.precision = args.precision or named_precision(folder) or BF16.name


def _prompt_of(path: Path) -> str:
    """The text of a file, or of standard input, without the newline that editors and ``echo`` end it with."""
    if str(path) == "-":
        if sys.stdin is None:
            raise InputError("--prompt-file -: standard input is closed; name a file")
        try:
            return sys.stdin.buffer.read().decode().removesuffix("\n")
        except UnicodeDecodeError as error:
            raise InputError(f"--prompt-file -: standard input is not UTF-8 text: {error}") from error
    return read_text(path, "--prompt-file")[1].removesuffix("\n")


def what_computed(model: Llama, precision: str) -> dict[str, str]:
    """What a report begins with."""
    from futransformer.layer_parts import format_parts  # noqa: PLC0415 - see futransformer.cli

    report = {"model": model.config.name, "precision": precision}
    if model.scaling is not None:
        report["fp8_scales"] = model.scaling.mode
        if model.scaling.bf16:
            report["bf16_layers"] = format_parts(model.scaling.bf16)
    return {**report, "backend": model.ops.describe()}


def count_saturated(model: Llama) -> dict[str, dict[str, int]]:
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


def read_text(path: Path | None, option: str = "--text", *, named: bool = False) -> tuple[str, str]:
    """The name and the content of the text, exactly as it stands; ``option`` names it in errors; where
    ``named`` is set, wikitext2 is its test split.
    """
    if named and str(path) == WIKITEXT2 and not Path(WIKITEXT2).exists():
        return WIKITEXT2, read_wikitext2("test")
    if path is None:
        return "sample.txt", (resources.files("futransformer") / "data" / "sample.txt").read_bytes().decode()
    try:
        return str(path), path.read_bytes().decode()
    except FileNotFoundError as error:
        raise InputError(f"{option} {path}: there is no such file") from error
    except OSError as error:
        raise InputError(f"{option} {path} cannot be read: {error.strerror}; name a file of UTF-8 text") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{option} {path} is not UTF-8 text: {error}") from error


def say(line: str) -> None:
    """Print a line to standard error."""
    print(line, file=sys.stderr, flush=True)
