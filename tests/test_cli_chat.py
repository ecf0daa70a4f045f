"""The command chat: turns, its own commands, interrupts; and run's prompts from files and standard input."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from futransformer import LLM, SamplingParams
from futransformer.cli import chat, main
from futransformer.generator.errors import InputError
from tests.conftest import PATIENCE, make_tiny_model

Output = pytest.CaptureFixture[str]

TURNS = "<s>{% for message in messages %}{{ message.role[0] }}:{{ message.content }};{% endfor %}a:"


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny-turns", tied=False, chat_template=TURNS)


def answers(folder: Path, turns: list[list[str]], system: str | None = None, count: int = 12) -> list[list[str]]:
    """What the model says to each conversation's messages."""
    llm = LLM(folder, device="cpu", max_num_seqs=1)
    said: list[list[str]] = []
    for messages in turns:
        conversation: Any = [] if system is None else [{"role": "system", "content": system}]
        said.append([])
        for message in messages:
            conversation.append({"role": "user", "content": message})
            (output,) = llm.chat(conversation, SamplingParams(temperature=0, max_tokens=count))
            said[-1].append(output.outputs[0].text)
            conversation.append({"role": "assistant", "content": said[-1][-1]})
    return said


def test_a_piped_conversation(chat_model: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers alone go to standard output; each turn has the ones before it, until /reset."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n\nMore\n/reset\nHello\n/exit\nnever\n"))
    options = ["--max-new-tokens", "12", "--system", "Be brief.", "--reference", "--num-pages", "8"]
    assert main(["chat", str(chat_model), *options]) == 0
    (first, second), (third,) = answers(chat_model, [["Hello", "More"], ["Hello"]], "Be brief.")
    captured = capsys.readouterr()
    assert captured.out == f"{first}\n{second}\n{third}\n"
    assert first == third
    assert len(re.findall(r"\[\d+ tokens, [\d.]+ tokens/s, the first after [\d.]+ s", captured.err)) == 3
    assert "a new conversation" in captured.err
    assert "tiny-turns on: CPU reference" in captured.err


def test_a_base_model_does_not_chat(tiny_base_model: Path, capsys: Output) -> None:
    assert main(["chat", str(tiny_base_model), "--reference"]) == 2
    captured = capsys.readouterr()
    assert "is a base model: it has no chat template" in captured.err
    assert " on: CPU reference" not in captured.err  # refused before it is loaded


def test_a_conversation_that_outgrows_the_context_is_refused(
    chat_model: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("x" * 70 + "\n"))
    assert main(["chat", str(chat_model), "--reference", "--num-pages", "1"]) == 2
    assert "shorten it, or use a larger cache" in capsys.readouterr().err


class Interrupting:
    """An LLM that is interrupted as it writes its third token."""

    def __init__(self) -> None:
        """Nothing said yet."""
        self.llm: Any = None
        self.closed = False
        self.conversations: list[Any] = []

    def stream_chat(self, messages: Any, params: Any) -> Any:
        """Deltas of the model's own."""
        self.conversations.append(list(messages))
        try:
            for count, delta in enumerate(self.llm.stream_chat(messages, params)):
                if count == 2:
                    signal.raise_signal(signal.SIGINT)
                yield delta
        finally:
            self.closed = True


def test_an_interrupt_stops_the_answer_and_keeps_what_was_said(chat_model: Path, capsys: Output) -> None:
    llm = Interrupting()
    llm.llm = LLM(chat_model, device="cpu", num_pages=8)
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    conversation = chat.Conversation(llm, params, None)  # type: ignore[arg-type]
    before = signal.getsignal(signal.SIGINT)
    conversation.hear("Hello")
    assert signal.getsignal(signal.SIGINT) is before
    captured = capsys.readouterr()
    assert captured.err.startswith("[3 tokens")
    assert "interrupted]" in captured.err
    assert llm.closed
    assert conversation.messages[-1] == {"role": "assistant", "content": captured.out.removesuffix("\n")}
    assert llm.llm.engine.stats().free_pages == 8


def test_a_message_that_is_refused_is_forgotten(chat_model: Path) -> None:
    conversation = chat.Conversation(LLM(chat_model, device="cpu", num_pages=1), SamplingParams(max_tokens=4), None)
    conversation.hear("Hello")
    kept = list(conversation.messages)
    with pytest.raises(InputError, match="max_model_len"):
        conversation.hear("x" * 60)
    assert conversation.messages == kept


def test_a_terminal_has_a_prompt_and_survives_interrupts(chat_model: Path) -> None:
    """Ctrl-C at the prompt and in an answer, an error, and Ctrl-D at last."""
    controller, terminal = pty.openpty()
    command = [sys.executable, "-m", "futransformer", "chat", str(chat_model), "--reference", "--num-pages", "8"]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a child of who ignores it would ignore it
    process = subprocess.Popen(
        [*command, "--max-new-tokens", "5"],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
        env={**os.environ, "TERM": "dumb"},
    )
    signal.signal(signal.SIGINT, before)
    os.close(terminal)
    shown = ""

    def expect(what: str, again: signal.Signals | None = None) -> None:
        """Read until it is shown; send a signal again that came before the line was being read.

        After as long as no answer takes that is on its way: a second signal would interrupt what comes next.
        """
        nonlocal shown
        tries = 0
        while what not in shown:
            if select.select([controller], [], [], 10)[0]:
                shown += os.read(controller, 4096).decode(errors="replace")
                continue
            tries += 1
            assert tries < PATIENCE / 10, shown
            if again is not None:
                process.send_signal(again)
        shown = shown[shown.index(what) + len(what) :]

    try:
        expect("> ")
        process.send_signal(signal.SIGINT)
        expect("Ctrl-C stops an answer", again=signal.SIGINT)
        expect("> ")
        os.write(controller, b"Hello\n")
        expect("[5 tokens")
        expect("> ")
        os.write(controller, b"x" * 600 + b"\n")
        expect("begin anew with /reset")
        expect("> ")
        os.write(controller, b"\x04")
        assert process.wait(PATIENCE) == 0
    finally:
        process.kill()
        process.wait()
        os.close(controller)


# run


def test_run_reads_its_prompt_from_a_file_or_standard_input(
    tiny_base_model: Path, tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = ["run", str(tiny_base_model), "--max-new-tokens", "5", "--reference", "--json"]
    assert main([*common, "--prompt", "Grüße\nHello"]) == 0
    expected = json.loads(capsys.readouterr().out)
    path = tmp_path / "prompt.txt"
    path.write_bytes("Grüße\nHello\n".encode())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(path.read_bytes())))
    for source in (str(path), "-"):
        assert main([*common, "--prompt-file", source]) == 0
        report = json.loads(capsys.readouterr().out)
        assert (report["prompt"], report["tokens"]) == (expected["prompt"], expected["tokens"])


def test_run_refuses_prompts_that_cannot_be_read(
    tiny_base_model: Path, tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusal(*options: str) -> str:
        assert main(["run", str(tiny_base_model), "--reference", *options]) == 2
        return capsys.readouterr().err

    assert "there is no such file" in refusal("--prompt-file", str(tmp_path / "none"))
    (tmp_path / "latin").write_bytes(b"Gr\xfc\xdfe")
    assert "is not UTF-8 text" in refusal("--prompt-file", str(tmp_path / "latin"))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff")))
    assert "standard input is not UTF-8 text" in refusal("--prompt-file", "-")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\n")))
    assert "the prompt is empty" in refusal("--prompt-file", "-")
    for options in ([], ["--prompt", "a", "--prompt-file", "b"]):
        with pytest.raises(SystemExit) as caught:
            main(["run", str(tiny_base_model), *options])
        assert caught.value.code == 2
        assert "--prompt-file" in capsys.readouterr().err
