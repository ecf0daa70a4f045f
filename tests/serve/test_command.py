"""``futransformer serve`` as a process: what it says, the key, and how a signal ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from futransformer.cli import main, serve
from futransformer.generator.errors import ConfigError
from futransformer.sampling_defaults import recommended_sampling
from futransformer.serve.server import bind
from tests.conftest import PATIENCE

Output = pytest.CaptureFixture[str]


class Process:
    """The command, and what it says."""

    def __init__(self, *arguments: object, **environment: str) -> None:
        """Start it on a free port of loopback."""
        command = [sys.executable, "-m", "futransformer", "serve", *map(str, arguments), "--port", "0", "--reference"]
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}
        )
        self.lines: list[str] = []
        self.url = ""
        self._listening = threading.Event()
        self.reader = threading.Thread(target=self._read)
        self.reader.start()
        assert self._listening.wait(PATIENCE)
        assert self.url, self.lines

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip())
            if line.startswith("serving "):
                self.url = line.split()[-1]
                self._listening.set()
        self._listening.set()

    def client(self, key: str) -> openai.OpenAI:
        """A client of it."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=PATIENCE)


@contextmanager
def process(*arguments: object, **environment: str) -> Iterator[Process]:
    """A process that is not left behind."""
    started = Process(*arguments, **environment)
    try:
        yield started
    finally:
        if started.process.poll() is None:
            started.process.kill()
            started.process.wait()


def test_a_server_from_start_to_end(chat_model: Path) -> None:
    """The folder's name is the model's, the key is the environment's, and SIGTERM lets an answer finish."""
    options = ("--max-num-seqs", 2, "--num-pages", 16, "--max-model-len", 400, "--max-tokens-limit", 300)
    with process(chat_model, *options, "--grace-seconds", PATIENCE, FUTRANSFORMER_API_KEY="s3cret") as server:
        with pytest.raises(openai.AuthenticationError):
            server.client("wrong").models.list()
        client = server.client("s3cret")
        (model,) = client.models.list().data
        assert model.id == "tiny-chat"
        assert getattr(model, "max_model_len", None) == 400
        request: Any = {"model": "tiny-chat", "messages": [{"role": "user", "content": "Hello"}], "temperature": 0}
        request |= {"max_tokens": 200, "extra_body": {"ignore_eos": True}}
        whole = client.chat.completions.create(**request).choices[0].message.content
        stream = client.chat.completions.create(**request, stream=True)
        said = [next(stream).choices[0].delta.content or ""]
        server.process.send_signal(signal.SIGTERM)
        said += [chunk.choices[0].delta.content or "" for chunk in stream]
        assert "".join(said) == whole
        assert server.process.wait(PATIENCE) == 0
        server.reader.join()
        assert not any("s3cret" in line or "Traceback" in line for line in server.lines)
        assert any("on: CPU reference" in line and "16 pages" in line for line in server.lines)


def test_an_interrupt_ends_an_idle_server(tiny_base_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, whose main thread is the engine's."""
    lines: list[str] = []
    names: list[str] = []

    def ask(line: str) -> None:
        lines.append(line)
        if line.startswith("serving a, b on "):
            client = openai.OpenAI(
                base_url=f"{line.rsplit(maxsplit=1)[-1]}/v1", api_key="none", max_retries=0, timeout=PATIENCE
            )
            threading.Thread(target=interrupt, args=(client,)).start()

    def interrupt(client: openai.OpenAI) -> None:
        try:
            names.extend(model.id for model in client.models.list())
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(serve, "say", ask)
    before = signal.getsignal(signal.SIGINT)
    options = ["--served-model-name", "a", "b", "--port", "0", "--reference", "--num-pages", "8"]
    assert main(["serve", str(tiny_base_model), *options]) == 0
    assert names == ["a", "b"]
    assert lines[-1] == "ended"
    assert signal.getsignal(signal.SIGINT) is before


def test_a_server_beyond_loopback_without_a_key_warns(
    tiny_base_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    monkeypatch.delenv(serve.KEY_VARIABLE, raising=False)
    monkeypatch.setattr("futransformer.serve.server.HttpServer.run", lambda *_: None)
    options = ["--port", "0", "--reference", "--num-pages", "8"]
    for host, key, warns in (("127.0.0.1", "", False), ("0.0.0.0", "", True), ("0.0.0.0", "s3cret", False)):
        given = ["--host", host, *(["--api-key", key] if key else [])]
        assert main(["serve", str(tiny_base_model), *options, *given]) == 0
        assert ("warning: whoever reaches" in capsys.readouterr().err) is warns


def failure(capsys: Output, *arguments: object) -> str:
    """Run a command that must refuse with status 2; return what it says."""
    assert main(["serve", *map(str, arguments)]) == 2
    return capsys.readouterr().err


def test_serve_refuses_before_it_loads(
    chat_model: Path, tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "there is no folder" in failure(capsys, tmp_path / "none")
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        said = failure(capsys, chat_model, "--port", taken.getsockname()[1])
        assert "cannot listen on" in said
        assert " on: CPU reference" not in said
    assert "--max-queue" in failure(capsys, chat_model, "--max-queue", -1)
    assert "API key" in failure(capsys, chat_model, "--api-key", "")
    assert "--warm-up must be at least 0" in failure(capsys, chat_model, "--port", 0, "--warm-up", "nan")
    monkeypatch.setattr(serve, "PACKAGES", ("fastapi", "no_such_package"))
    assert "no_such_package, which is not installed" in failure(capsys, chat_model)


def test_the_models_own_sampling_is_read(tmp_path: Path) -> None:
    assert recommended_sampling(tmp_path) == {}
    path = tmp_path / "generation_config.json"
    path.write_text('{"temperature": 0.6, "top_p": 0.9, "top_k": null, "do_sample": true, "eos_token_id": 2}')
    assert recommended_sampling(tmp_path) == {"temperature": 0.6, "top_p": 0.9}
    for wrong, says in (
        ('{"temperature": -1}', "temperature is at least 0"),
        ("[]", "no JSON object"),
        ("{", "no JSON"),
    ):
        path.write_text(wrong)
        with pytest.raises(ConfigError, match=says):
            recommended_sampling(tmp_path)
