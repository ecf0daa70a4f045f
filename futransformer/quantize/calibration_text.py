"""The windows of tokens that weights are quantised for: of a file, of WikiText-2, or tokens drawn at random."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from futransformer.generator.config import LlamaConfig
from futransformer.generator.errors import InputError
from futransformer.quantize.calibrate import choose_windows
from futransformer.tokenizer import Tokenizer

SEED = 0
RANDOM = "random"  # instead of a text


@dataclass(frozen=True)
class CalibrationText:
    """Equally long windows, and where they are from."""

    name: str
    windows: Sequence[Sequence[int]]

    def described(self) -> dict[str, Any]:
        """In JSON's types; of the same tokens it is the same."""
        digest = hashlib.sha256(json.dumps([list(window) for window in self.windows]).encode()).hexdigest()
        return {
            "text": self.name,
            "windows": len(self.windows),
            "context": len(self.windows[0]),
            "tokens_sha256": digest,
        }


def cut_text(name: str, text: str, folder: Path, config: LlamaConfig, samples: int, seqlen: int) -> CalibrationText:
    """At most ``samples`` windows of ``seqlen`` tokens, spread evenly over a text; ``folder`` has the tokenizer."""
    _check(config, seqlen)
    if not text.strip():
        raise InputError(f"{name} is empty: a calibration needs text like what the model will read")
    tokens = Tokenizer(folder).encode(text)
    return CalibrationText(name, choose_windows(tokens, seqlen, samples))


def draw_tokens(config: LlamaConfig, samples: int, seqlen: int) -> CalibrationText:
    """Tokens of the vocabulary, each as likely: the same every time."""
    _check(config, seqlen)
    if samples < 1 or seqlen < 2:
        raise InputError(f"a calibration takes at least 1 window of 2 tokens, not {samples} of {seqlen}")
    generator = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(config.vocab_size, (samples, seqlen), generator=generator)
    return CalibrationText(RANDOM, tokens.tolist())


def _check(config: LlamaConfig, seqlen: int) -> None:
    if seqlen > config.max_position_embeddings:
        raise InputError(
            f"--seqlen: {config.name} is made for at most {config.max_position_embeddings} tokens "
            f"(max_position_embeddings), not for {seqlen}"
        )
