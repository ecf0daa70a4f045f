"""GPTQ on the first layer of the small model, for a page of text: what its options gain there."""

from __future__ import annotations

import math
from importlib import resources
from pathlib import Path

import pytest
import torch

from futransformer.checkpoint import load_checkpoint
from futransformer.formats.codes import Groups
from futransformer.generator.config import load_config
from futransformer.quantize.folding import Folding
from futransformer.quantize.int4_gptq import Int4Method
from futransformer.quantize.layers import Gptq, Quantised
from futransformer.quantize.stream import CalibrationStream
from futransformer.tokenizer import Tokenizer

pytestmark = pytest.mark.model
WINDOW = 128


def errors_of(quantised: dict[str, Quantised], kind: str) -> float:
    """Of all projections: the root of the sum of squares."""
    return math.hypot(*(each.errors[kind] for each in quantised.values()))


def test_options_gain(small_model: Path) -> None:
    """Groups of 128 do not divide its width of 576: a last group is half as long."""
    config = load_config(small_model)
    checkpoint = load_checkpoint(small_model, config)
    page = (resources.files("futransformer") / "data" / "sample.txt").read_bytes().decode()
    tokens = Tokenizer(small_model).encode(page)
    windows = [tokens[start : start + WINDOW] for start in range(0, len(tokens) - WINDOW, WINDOW)][:4]
    weights = Folding().layer(checkpoint, 0)
    groups = Groups(128, zero_points=False)
    found = {}
    for method in (
        Int4Method(groups),
        Int4Method(groups, "mse"),
        Int4Method(groups, "mse", act_order=True),
        Int4Method(groups, "mse", act_order=True, sweeps=1),
    ):
        stream = CalibrationStream(config, checkpoint.embedding(), windows, torch.device("cpu"))
        quantised = dict(Gptq(method, stream).quantise(0, weights))
        assert all(each.errors["output"] <= each.errors["output_of_nearest"] for each in quantised.values())
        found[method] = errors_of(quantised, "output")
        nearest = errors_of(quantised, "output_of_nearest")
        assert found[method] < 0.9 * nearest
    plain, searched, ordered, swept = found.values()
    assert searched < 0.95 * plain
    assert ordered < 0.98 * plain  # in this layer less than in most: its scales are not of the updated weights
    assert swept < 0.95 * ordered
