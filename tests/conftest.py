"""Options and fixtures that every test may use."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

# Before anything imports torch: see futransformer.cli.main.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

PATIENCE = 600.0  # seconds that only what hangs takes, however busy the machine


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where built kernels and texts may be found; both have a default."""
    parser.addoption("--kernels", type=Path, help="a folder of exports (one a model name) to load kernels from")
    parser.addoption("--text", type=Path, help="a text for perplexity tests; the project's own small text otherwise")
    parser.addoption("--soak-seconds", type=float, default=0, help="how long the engine's random traffic goes on")
    parser.addoption("--fuzz-examples", type=int, default=0, help="inputs a property of tests/fuzz, drawn anew")
    parser.addoption("--model", type=Path, help="the small model's folder; prepared when missing")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say once why tests were skipped: the reasons, most frequent first."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in skipped)
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} skipped: {reason}")


@pytest.fixture(scope="session")
def small_model(request: pytest.FixtureRequest) -> Path:
    """The folder of the real small model; prepared when missing."""
    from futransformer.small_model import prepare_small_model  # noqa: PLC0415 - needs torch; not every test does

    folder: Path | None = request.config.getoption("--model")
    return folder if folder is not None else prepare_small_model()


@pytest.fixture(scope="session", params=["apart", "tied-llama3"])
def tiny_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama as a Hugging Face folder; head apart and plain RoPE, or tied and llama3 RoPE."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / f"tiny-{request.param}", tied=request.param != "apart")


@pytest.fixture(scope="session")
def tiny_base_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model whose head is apart, without a chat template."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny-base", tied=False, chat_template=None)


def make_tiny_model(folder: Path, *, tied: bool, chat_template: str | None = "<s>{{ messages[0].content }}") -> Path:
    """Write a Llama whose width differs from heads x head_dim, with a byte-level tokenizer of 258 tokens.

    Norm gains are powers of two and matrices BF16, so folding the gains rounds nothing: float32 arithmetic on our
    logical weights is that of the checkpoint.
    """
    import torch  # noqa: PLC0415 - the generator is tested without torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: PLC0415

    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
    if tied:
        scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        rope = {"rope_type": "llama3", "rope_theta": 500000.0, "original_max_position_embeddings": 64, **scaling}
    torch.manual_seed(7)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=258,
            hidden_size=128,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            max_position_embeddings=512,
            tie_word_embeddings=tied,
            rope_parameters=rope,
            bos_token_id=256,
            eos_token_id=[257, 10],
        )
    )
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            if "norm" in name:
                parameter.copy_(2.0 ** torch.randint(-1, 2, parameter.shape))
            else:
                parameter.normal_(std=0.25 if "embed" in name or "head" in name else parameter.shape[1] ** -0.5)
    model.to(torch.bfloat16).save_pretrained(folder)

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate([*alphabet, "<s>", "</s>"])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = chat_template
    fast.save_pretrained(folder)
    return folder
