"""``futransformer demo``: the whole way once, from a model's shape to generated text, on a real small Llama.

Three steps, the first two kept for the next time: the kernels of the model's shape are generated and compiled (which
needs nvcc and g++, but neither a GPU nor the model), the model is prepared, and text is written: on a Hopper GPU
through these kernels, elsewhere through the CPU reference. The text goes to standard output, all else to standard
error.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from futransformer.build.compile import BuildEvent, build_kernels
from futransformer.build.manifest import KernelRecord
from futransformer.build.settings import BuildSettings
from futransformer.cli.model import SMALL_MODEL
from futransformer.cli.table import megabytes, table
from futransformer.generator.config import load_config
from futransformer.generator.errors import InputError
from futransformer.generator.plan import kernel_specs
from futransformer.tables import schedule_table

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

PRECISION = "bf16"
DEFAULT_PROMPT = "What is gravity?"
DEFAULT_NEW_TOKENS = 128  # the model's answer to the default prompt has 78; the CPU reference writes ten a second


def add_parsers(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "demo",
        help="set up a real small model, build its kernels, and write text with it",
        description="Build the kernels of SmolLM2-135M, fetch that model, and write text: on a Hopper GPU through the "
        "kernels, elsewhere through the CPU reference.",
    )
    parser.add_argument("--prompt", default=DEFAULT_PROMPT, help=f"the message to answer (default: {DEFAULT_PROMPT})")
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        default=DEFAULT_NEW_TOKENS,
        metavar="N",
        help=f"stop after N tokens (default: {DEFAULT_NEW_TOKENS})",
    )
    parser.set_defaults(handler=_demo)


def _demo(args: argparse.Namespace) -> int:
    if not args.prompt.strip():
        raise InputError("the prompt is empty: give --prompt at least one word")
    if args.max_new_tokens < 1:
        raise InputError(f"--max-new-tokens must be at least 1, not {args.max_new_tokens}")
    _build_kernels()
    folder = _prepare_model()
    _write_text(folder, args.prompt, args.max_new_tokens)
    activate = Path(sys.executable).with_name("activate")
    if shutil.which("futransformer") is None and activate.is_file():
        _say(f"\nThe commands below are found after: source {activate}")
    _say(
        f"\nNext: futransformer chat {SMALL_MODEL}, futransformer serve {SMALL_MODEL}, futransformer doctor; "
        "docs/quickstart.md"
    )
    return 0


def _build_kernels() -> None:
    settings = BuildSettings.from_environment()
    specs = kernel_specs(load_config(SMALL_MODEL), PRECISION, schedule_table(settings))
    _say(
        f"==> 1 of 3: kernels: {len(specs)} generated for the shape of {SMALL_MODEL} ({PRECISION}), compiled for sm_90a"
    )
    compiled: list[KernelRecord] = []

    def progress(event: BuildEvent) -> None:
        if not event.cached:
            compiled.append(event.record)
            _say(str(event))

    start = time.monotonic()
    records = build_kernels(specs, settings=settings, progress=progress)
    seconds = time.monotonic() - start
    _say(kernel_table(records))
    if compiled:
        how = f"{len(compiled)} compiled in {seconds:.0f} s"
        how += f", {len(records) - len(compiled)} from the cache" if len(compiled) < len(records) else ""
    else:
        how = "all from the cache"
    size = sum(record.cubin.stat().st_size for record in records)
    _say(f"{len(records)} kernels, {megabytes(size)}, in {settings.cache_root}: {how}")


def kernel_table(records: Sequence[KernelRecord]) -> str:
    """A line for each kind of kernel: how many, and the most registers and shared memory that one of them takes."""
    kinds: dict[str, list[KernelRecord]] = {}
    for record in records:
        kinds.setdefault(record.template.partition("_sm90")[0], []).append(record)
    rows = [
        (
            kind,
            str(len(members)),
            str(max(record.resources.registers for record in members)),
            f"{max(record.shared_bytes + record.resources.static_shared_bytes for record in members) / 1024:.1f}",
            str(sum(record.resources.spill_store_bytes + record.resources.spill_load_bytes for record in members)),
            f"{sum(record.compile_seconds for record in members):.0f}",
        )
        for kind, members in kinds.items()
    ]
    return table(("kind", "kernels", "registers", "shared KiB", "spilled B", "compiler s"), rows)


def _prepare_model() -> Path:
    from futransformer.small_model import NAME, prepare_small_model  # noqa: PLC0415 - see futransformer.cli

    _say(f"\n==> 2 of 3: the model, {NAME}")
    folder = prepare_small_model(progress=_say)
    _say(str(folder))
    return folder


def _write_text(folder: Path, prompt: str, max_new_tokens: int) -> None:
    from futransformer.driver import hopper_problem  # noqa: PLC0415 - see futransformer.cli
    from futransformer.model import Llama  # noqa: PLC0415
    from futransformer.tokenizer import TextStream, Tokenizer  # noqa: PLC0415

    problem = hopper_problem()
    through = "these kernels" if problem is None else f"the CPU reference, not these kernels ({problem})"
    _say(f"\n==> 3 of 3: text, through {through}")
    tokenizer = Tokenizer(folder)
    tokens = tokenizer.encode_chat(prompt)
    model = Llama.from_pretrained(folder, cache_tokens=len(tokens) + max_new_tokens, progress=_say)
    _say(f"{model.ops.describe()}\n\n> {prompt}\n")
    stream = TextStream(tokenizer)
    start = time.monotonic()
    (written,) = model.generate(
        [tokens], max_new_tokens, on_token=lambda _, token: print(stream.add(token), end="", flush=True)
    )
    print(stream.rest(), flush=True)
    ended = "the answer is complete" if written[-1] in model.config.eos_token_ids else "--max-new-tokens"
    _say(f"\n{len(tokens)} tokens read, {len(written)} written in {time.monotonic() - start:.1f} s (ended by: {ended})")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
