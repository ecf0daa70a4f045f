"""The command line: ``futransformer`` and ``python -m futransformer``.

Each module of commands offers ``add_parsers(subparsers)``; a command's parser names its function by
``set_defaults(handler=function)``, which takes the parsed arguments and returns the exit status:

| status | meaning |
| --- | --- |
| 0 | done |
| 1 | what was asked for is sound, but it failed here: tool chain, compilation, kernels, GPU, memory, disk |
| 2 | what was asked for cannot be: usage, configuration, shape, precision, checkpoint, prompt |
| 130 | interrupted |
| 129, 143 | ended by SIGHUP (its terminal was closed) or SIGTERM |

An error is a message on standard error, never a traceback. Nothing here imports torch before a command needs it.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata

from futransformer import MODELS_PACKAGES, models_remedy
from futransformer.cli import (
    bench,
    calibrate,
    chat,
    demo,
    doctor,
    kernels,
    model,
    perplexity,
    profile,
    quantize,
    serve,
    tune,
)
from futransformer.generator.errors import (
    CheckpointError,
    ConfigError,
    FuTransformerError,
    InputError,
    UnsupportedError,
)

_REQUEST_ERRORS = (ConfigError, UnsupportedError, InputError, CheckpointError)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    # The CPU reference's operations are small. On cores that are busy, OpenMP threads that spin at each one's end keep
    # the thread that they wait for from running: 0.75 s a token of the small model instead of 0.10 s on two cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    args = _parser().parse_args(argv)
    handler: Callable[[argparse.Namespace], int] = args.handler
    try:
        with _orderly_end():
            status = handler(args)
        if sys.stdout is not None:  # None where the shell has closed it
            sys.stdout.flush()
    except FuTransformerError as error:
        return _fail(str(error), 2 if isinstance(error, _REQUEST_ERRORS) else 1)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in MODELS_PACKAGES:
            raise
        return _fail(f"this {models_remedy(error)}", 1)
    except KeyboardInterrupt as interruption:
        return _fail("; ".join(["interrupted", *map(str, interruption.args)]), 130)
    except BrokenPipeError:
        # The reader (`| head`) has gone; what is left in the buffer must not be written at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except UnicodeEncodeError as error:
        lacking = f"the output's encoding, {error.encoding}, has no {error.object[error.start]!a}"
        return _fail(f"{lacking}: set PYTHONIOENCODING=utf-8", 1)
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error), 1)
    return status


@contextmanager
def _orderly_end() -> Iterator[None]:
    """Within it SIGTERM and SIGHUP unwind as an interrupt does: compilers are ended, temporary folders removed.

    A compiler is a process group of its own, so nothing else would end it.
    """
    if threading.current_thread() is not threading.main_thread():  # which alone may set handlers
        yield
        return
    ours = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) == signal.SIG_DFL]
    for number in ours:  # nohup has SIGHUP ignored, and so it stays
        signal.signal(number, _end)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _end(number: int, _: object) -> None:
    sys.exit(128 + number)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="futransformer", description="Generated Hopper kernels for Llama-style models, and the models on them."
    )
    parser.add_argument("--version", action="version", version=f"futransformer {_version()}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for commands in (demo, kernels, model, chat, serve, perplexity, quantize, calibrate, bench, profile, tune, doctor):
        commands.add_parsers(subparsers)
    return parser


def _version() -> str:
    try:
        return metadata.version("futransformer")
    except metadata.PackageNotFoundError:
        return "(not installed)"


def _fail(message: str, status: int) -> int:
    print(f"futransformer: error: {message}", file=sys.stderr)
    return status
