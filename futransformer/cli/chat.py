"""``futransformer chat``: a conversation with a model in the terminal.

Answers go to standard output as they are written, all else to standard error, so that a pipe gets the answers alone.
A line is a message. Each turn sends the whole conversation through the model's chat template; what the cache still
holds of it is not read again.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, cast

from futransformer.cli.llm import add_engine, load_llm
from futransformer.cli.model import model_folder, say
from futransformer.generator.errors import FuTransformerError, InputError

if TYPE_CHECKING:
    from collections.abc import Generator

    from futransformer.engine import RequestOutput, SamplingParams
    from futransformer.llm import LLM
    from futransformer.tokenizer import Message

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

HELP = "/reset begins anew, /exit (or Ctrl-D) leaves, Ctrl-C stops an answer"


def add_parsers(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "chat",
        help="talk to a model in the terminal",
        description=f"Talk to a model with a chat template, a message a line. {HELP}.",
    )
    add_engine(parser, most=1, warm_up=0)
    parser.add_argument("--system", metavar="TEXT", help="a system message to begin with")
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help="of an answer (default: what fits)")
    for name, kind, what in (
        ("temperature", float, "0: the likeliest token"),
        ("top-p", float, "of the likeliest tokens' probabilities"),
        ("top-k", int, "likeliest tokens"),
        ("min-p", float, "of the likeliest token's probability"),
        ("repetition-penalty", float, "of tokens that have been"),
    ):
        parser.add_argument(
            f"--{name}", type=kind, metavar="X", help=f"{what} (default: as the model's folder recommends, or none)"
        )
    parser.set_defaults(handler=_chat)


def _chat(args: argparse.Namespace) -> int:
    from futransformer.engine import SamplingParams  # noqa: PLC0415 - see futransformer.cli
    from futransformer.sampling_defaults import NAMES, recommended_sampling  # noqa: PLC0415
    from futransformer.tokenizer import Tokenizer  # noqa: PLC0415

    folder = model_folder(args.model)
    if not Tokenizer(folder).can_chat:
        raise InputError(
            f"{folder} is a base model: it has no chat template; let it continue text (futransformer run), or use an "
            "instruction-tuned model"
        )
    asked = {name: getattr(args, name) for name in NAMES if getattr(args, name) is not None}
    params = SamplingParams(
        **{"temperature": 0.0, **recommended_sampling(folder), **asked}, max_tokens=args.max_new_tokens
    )
    conversation = Conversation(load_llm(args, folder), params, args.system)
    if sys.stdin is not None and sys.stdin.isatty():
        import readline  # noqa: F401, PLC0415 - importing it lets input() edit lines

        say(HELP)
        _converse(conversation)
    else:
        for line in sys.stdin or ():
            if line.strip() == "/exit":
                break
            conversation.hear(line.strip())
    return 0


def _converse(conversation: Conversation) -> None:
    """Read lines from a terminal. What goes wrong with a message is said, and the conversation goes on."""
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            say(f"\n{HELP}")
            continue
        if line == "/exit":
            return
        try:
            conversation.hear(line)
        except FuTransformerError as error:
            say(f"{error}; or begin anew with /reset")


class Conversation:
    """The turns so far, and a model that answers."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None) -> None:
        """Begin, with a system message if there is one."""
        self._llm = llm
        self._params = params
        self._system = system
        self.messages: list[Message] = []
        self._reset()

    def _reset(self) -> None:
        self.messages = [] if self._system is None else [{"role": "system", "content": self._system}]

    def hear(self, line: str) -> None:
        """Obey a command, or answer a message; an empty line is none."""
        if line == "/reset":
            self._reset()
            say("a new conversation")
        elif line == "/help":
            say(HELP)
        elif line:
            self._answer(line)

    def _answer(self, message: str) -> None:
        """Print the answer and keep it. A message that cannot be answered is forgotten."""
        self.messages.append({"role": "user", "content": message})
        said: list[str] = []
        times: list[float] = []
        start = time.perf_counter()
        try:
            stream = cast("Generator[RequestOutput]", self._llm.stream_chat(self.messages, self._params))
            with _interruption() as interrupted, closing(stream) as deltas:
                ended = _say_deltas(deltas, said, times, interrupted)
        except FuTransformerError:
            self.messages.pop()
            raise
        print(flush=True)
        self.messages.append({"role": "assistant", "content": "".join(said)})
        say(f"[{_speed(start, times)}{ended}]")


def _say_deltas(
    deltas: Iterator[RequestOutput], said: list[str], times: list[float], interrupted: threading.Event
) -> str:
    """Print text as it comes, until it ends or is interrupted; how it ended, if not by itself."""
    for delta in deltas:
        for output in delta.outputs:
            times += [time.perf_counter()] * len(output.token_ids)
            said.append(output.text)
            print(output.text, end="", flush=True)
            if output.finish_reason == "length":
                return "; cut off at its longest"
        if interrupted.is_set():
            return "; interrupted"
    return ""


def _speed(start: float, times: list[float]) -> str:
    """Tokens, tokens a second behind the first, and how long that took."""
    shown = f"{len(times)} tokens"
    if len(times) > 1:
        shown += f", {(len(times) - 1) / (times[-1] - times[0]):.1f} tokens/s"
    return f"{shown}, the first after {times[0] - start:.2f} s" if times else shown


@contextmanager
def _interruption() -> Iterator[threading.Event]:
    """An event that the first SIGINT sets; the second one interrupts, as ever.

    An engine's step must end as it was begun: the first one is looked at between two of them.
    """
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # which alone may set handlers
        yield event
        return
    before = signal.getsignal(signal.SIGINT)

    def handle(_: int, __: object) -> None:
        event.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, handle)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)
