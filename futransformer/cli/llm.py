"""What the commands on an engine share: its options, and loading it."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from futransformer.cli.model import add_model, add_precision, say
from futransformer.generator.errors import InputError

if TYPE_CHECKING:
    from futransformer.llm import LLM


def add_engine(parser: argparse.ArgumentParser, *, most: int, warm_up: float) -> None:
    """Add MODEL, what it computes in, and the engine's options; ``most`` sequences at a time by default, after
    ``warm_up`` seconds.
    """
    add_model(parser, json=False)
    add_precision(parser, scales=False)
    parser.add_argument(
        "--max-num-seqs", type=int, default=most, metavar="N", help=f"sequences at a time (default: {most})"
    )
    parser.add_argument(
        "--max-model-len",
        type=int,
        metavar="N",
        help="tokens of a prompt and its text (default: what the model is made for, or the cache if that is less)",
    )
    parser.add_argument(
        "--num-pages",
        type=int,
        metavar="N",
        help="pages of 64 tokens in the KV cache (default: what fits into the GPU; 256 on the CPU)",
    )
    parser.add_argument(
        "--gpu-memory-utilization",
        type=float,
        default=0.9,
        metavar="FRACTION",
        help="of the GPU's memory, weights included, where --num-pages is not given (default: 0.9)",
    )
    parser.add_argument(
        "--warm-up",
        type=float,
        default=warm_up,
        metavar="SECONDS",
        help="for capturing graphs before the first request, on a GPU, at most; the others are captured when they are "
        f"needed (default: {warm_up:g})",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="for samples whose request names none")


def load_llm(args: argparse.Namespace, folder: Path) -> LLM:
    """Load the model and say what computes."""
    from futransformer.driver import hopper_problem  # noqa: PLC0415 - see futransformer.cli
    from futransformer.llm import LLM  # noqa: PLC0415
    from futransformer.memory import gib  # noqa: PLC0415

    if args.num_pages is not None and args.num_pages < 1:
        raise InputError(f"--num-pages must be at least 1, not {args.num_pages}")
    if not 0 <= args.warm_up < math.inf:  # nor NaN
        raise InputError(f"--warm-up must be at least 0, and finite, not {args.warm_up}")
    options: dict[str, Any] = {"device": "cpu"} if args.reference else {}
    problem = hopper_problem()
    if args.kernels is not None and not args.reference and problem is not None:
        say(f"{problem}; the kernels in {args.kernels} are not used")
    elif args.kernels is not None:
        options["kernels"] = args.kernels
    llm = LLM(
        folder,
        precision=args.precision,
        max_num_seqs=args.max_num_seqs,
        max_model_len=args.max_model_len,
        num_pages=args.num_pages,
        gpu_memory_utilization=args.gpu_memory_utilization,
        seed=args.seed,
        progress=say,
        **options,
    )
    engine = llm.engine
    if args.warm_up and engine.model.ops.capturable:
        warmed = engine.warm_up(args.warm_up, say)
        say(
            f"captured {warmed.captured} of {warmed.shapes} shapes of steps and passes in {warmed.seconds:.1f} s, "
            f"{gib(warmed.memory)}"
        )
    say(
        f"{engine.model.config.name} on: {engine.model.ops.describe()}; {engine.stats().num_pages} pages of 64 tokens, "
        f"texts of up to {engine.max_model_len}"
    )
    return llm
