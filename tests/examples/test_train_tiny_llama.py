"""The example that trains a small model: its steps, and the folder that it writes."""

from __future__ import annotations

import argparse
import importlib.util
import io
import lzma
import re
import subprocess
import sys
from importlib import resources
from itertools import count
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from futransformer.bench.results import weights_sha256
from futransformer.generator.config import load_config
from futransformer.model import Llama
from futransformer.perplexity import score
from futransformer.reference import ReferenceOps
from futransformer.tokenizer import Tokenizer

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "train_tiny_llama.py"
VOCABULARY, CONTEXT = 320, 63
SHAPE = ("--layers", "1", "--context", str(CONTEXT), "--batch", "2", "--every", "0", "--lr", "0.003")


@pytest.fixture(scope="module")
def text() -> str:
    return (resources.files("futransformer") / "data" / "sample.txt").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def books(text: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two books, compressed."""
    path = tmp_path_factory.mktemp("books") / "books.txt.xz"
    path.write_bytes(lzma.compress(f"# Title: One\n\n{text}\n# Title: Two\n\n{text}".encode()))
    return path


@pytest.fixture(scope="module")
def prepared(books: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    run(books, "--prepare", "--held-out", books, "--vocabulary", VOCABULARY, "-o", folder)
    return folder


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_tiny_llama", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(*arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_learns_and_writes_a_folder_that_loads(prepared: Path, books: Path, tmp_path: Path) -> None:
    """The loss on the books falls, and the written model has the loss that was told.

    BF16 rounds each weight and activation by at most 2^-9: over some 1,900 tokens that moves a mean of about 4 by far
    less than 2^-9 of it; a weight under another's name, or of another step, moves it by more.
    """
    said = run(prepared, "-o", tmp_path / "model", "--steps", 12, *SHAPE)
    losses = [float(loss) for loss in re.findall(r"held out (\d\.\d+)", said)]
    assert len(losses) == 12
    assert losses[-1] < losses[0] - 0.5
    whole = re.search(r"held out, in windows of 64: loss (\d\.\d+)", said)
    assert whole is not None
    config = load_config(tmp_path / "model")
    assert (config.head_dim, config.num_attention_heads, config.num_key_value_heads) == (128, 4, 1)
    model = Llama.from_pretrained(tmp_path / "model", ops=ReferenceOps(config), cache_tokens=1024)
    stored = script_tokens(prepared)
    result = score(model, stored, context=CONTEXT + 1, windows=len(stored) // (CONTEXT + 1) // 2 * 2)
    assert result.nll.mean().item() == pytest.approx(float(whole[1]), rel=2**-9)
    assert weights_sha256(tmp_path / "model") in said


def script_tokens(prepared: Path) -> list[int]:
    stored = np.load(io.BytesIO(lzma.decompress((prepared / "tokens.npz.xz").read_bytes())))
    tokens: list[int] = stored["held_out"].tolist()
    return tokens


def test_books_are_apart_and_nothing_is_lost(prepared: Path, text: str) -> None:
    tokens, tokenizer = script_tokens(prepared), Tokenizer(prepared)
    (end,) = tokenizer.encode("<|endoftext|>")
    assert [index for index, token in enumerate(tokens) if token == end][-1] == len(tokens) - 1
    assert tokens.count(end) == 2
    assert tokenizer.decode(tokens) == f"# Title: One\n\n{text}# Title: Two\n\n{text}"


def test_the_same_seed_trains_the_same_model(prepared: Path, books: Path, tmp_path: Path) -> None:
    """From prepared tokens or from the text, by a tokenizer that is given."""
    options = ("--steps", 2, *SHAPE)
    run(prepared, "-o", tmp_path / "prepared", *options)
    run(books, "--tokenizer", prepared, "-o", tmp_path / "text", *options)
    run(prepared, "-o", tmp_path / "seed", *options, "--seed", 1)
    sums = {name: weights_sha256(tmp_path / name) for name in ("prepared", "text", "seed")}
    assert sums["prepared"] == sums["text"] != sums["seed"]


@pytest.mark.parametrize(("seconds", "steps"), [(8, 47), (4, 1)])
def test_it_ends_in_time(
    script: ModuleType,
    prepared: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    seconds: int,
    steps: int,
) -> None:
    """The rate has fallen to its end by then: the schedule is one of time, which passes here each time it is read.

    The last five seconds are for what comes behind the steps; where that is all there is, one step is made.
    """
    monkeypatch.setattr(script, "time", SimpleNamespace(perf_counter=count(0.0, 2**-4).__next__))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    options = ("-o", tmp_path / "model", "--seconds", seconds, *SHAPE)
    assert script.main([str(prepared), *map(str, options)]) == 0
    passed = [int(passed) for passed in re.findall(r"step \d+, (\d+) s", capsys.readouterr().out)]
    assert len(passed) == steps
    assert passed[-1] == max(seconds - 5, 0)
    assert (tmp_path / "model" / "config.json").is_file()


def test_the_folder_is_the_model_that_was_trained(
    script: ModuleType, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32 its loss is that of transformers on the folder: names, layouts, RoPE and config mean the same."""
    monkeypatch.setattr(script, "SHARD", 3_000_000)
    torch.manual_seed(3)
    model = script.Llama(2, VOCABULARY)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(
                (torch.randn_like(weight) * (0.1 if weight.ndim == 2 else 0.3) + (weight.ndim == 1)).bfloat16()
            )
    tokenizer = script.Tokenizer.from_file(str(prepared / "tokenizer.json"))
    script.save(tmp_path, model, tokenizer, argparse.Namespace(layers=2))
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    tokens = torch.randint(VOCABULARY, (2, 65), generator=torch.Generator().manual_seed(4))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        assert model(tokens).item() == pytest.approx(theirs(tokens, labels=tokens).loss.item(), rel=2e-5)


def test_errors_are_told(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("too short")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path / "short.txt"), "-o", str(tmp_path / "model")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "error: the text gives a vocabulary of" in done.stderr
    assert not (tmp_path / "model").exists()
