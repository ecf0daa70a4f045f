"""A text's way through the layers is transformers', and so is what each projection reads on it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from futransformer.checkpoint import fold_gain, load_checkpoint, projections_of
from futransformer.generator.config import load_config
from futransformer.generator.errors import CheckpointError
from futransformer.ops.interface import Projection
from futransformer.quantize import stream as stream_module
from futransformer.quantize.stream import CalibrationStream

WINDOWS = torch.randint(256, (5, 40), generator=torch.Generator().manual_seed(1))
CPU = torch.device("cpu")
READ_BY: dict[Projection, str] = {
    "qkv": "self_attn.q_proj",
    "o": "self_attn.o_proj",
    "gate_up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def folded(folder: Path, index: int) -> dict[Projection, Tensor]:
    """The weights of a layer; gains are powers of two, so folding rounds nothing."""
    checkpoint = load_checkpoint(folder, load_config(folder))
    first, second = checkpoint.norm_gains()[2 * index : 2 * index + 2]
    q, k, v, o, gate, up, down = (checkpoint.projection(module) for module in projections_of(index))
    return {
        "qkv": torch.cat([fold_gain(weight, first) for weight in (q, k, v)]),
        "o": o,
        "gate_up": torch.cat([fold_gain(weight, second) for weight in (gate, up)]),
        "down": down,
    }


def begin(folder: Path, monkeypatch: pytest.MonkeyPatch) -> CalibrationStream:
    monkeypatch.setattr(stream_module, "ROWS", 80)  # two windows at a time, and in the end one
    config = load_config(folder)
    return CalibrationStream(config, load_checkpoint(folder, config).embedding(), WINDOWS.tolist(), CPU)


@torch.inference_mode()
def test_it_goes_transformers_way(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both kinds of RoPE; and what a projection reads is what its Gram matrix is of."""
    model = LlamaForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    read: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            module.register_forward_hook(lambda _, inputs, __, name=name: read.update({name: inputs[0].flatten(0, 1)}))
    theirs = model.model(WINDOWS, output_hidden_states=True).hidden_states
    gains = load_checkpoint(tiny_model, load_config(tiny_model)).norm_gains()
    stream = begin(tiny_model, monkeypatch)
    for index in range(2):
        weights = folded(tiny_model, index)
        grams: dict[Projection, Tensor] = {}

        def keep(
            op: Projection,
            gram: Tensor,
            weights: dict[Projection, Tensor] = weights,
            grams: dict[Projection, Tensor] = grams,
        ) -> Tensor:
            grams[op] = gram
            return weights[op]

        stream.pass_layer(weights, keep)
        for op, module_name in READ_BY.items():
            operands = read[f"model.layers.{index}.{module_name}"].double()
            if op in ("qkv", "gate_up"):
                operands /= gains[2 * index + (op == "gate_up")].double()
            expected = operands.T @ operands
            assert (grams[op] - expected).abs().max() <= 1e-4 * expected.abs().max(), op
        if index == 0:
            assert (stream.residual - theirs[1]).abs().max() <= 1e-5 * theirs[1].abs().max()
    final = stream.residual * torch.rsqrt(stream.residual.square().mean(-1, keepdim=True) + 1e-6)
    logits = final @ load_checkpoint(tiny_model, load_config(tiny_model)).lm_head().float().T
    expected = model(WINDOWS).logits
    assert (logits - expected).abs().max() <= 2e-5 * expected.abs().max()


@torch.inference_mode()
def test_gains_of_norms_are_operands_or_in_the_weights(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same way through the layer; what projections read of them, and so its Gram matrix, has them or not."""
    checkpoint = load_checkpoint(tiny_model, load_config(tiny_model))
    weights = {op: weight.float() for op, weight in folded(tiny_model, 0).items()}
    first, second = checkpoint.norm_gains()[:2]
    assert not torch.equal(first, torch.ones_like(first))
    plain = {**weights, "qkv": weights["qkv"] / first, "gate_up": weights["gate_up"] / second}
    seen: list[Tensor] = []  # Gram matrices of qkv's, o's, gate_up's and down's operands, of one way after the other's

    def go(through: dict[Projection, Tensor], gains: list[Tensor]) -> Tensor:
        def keep(op: Projection, gram: Tensor) -> Tensor:
            seen.append(gram)
            return through[op]

        stream = begin(tiny_model, monkeypatch)
        stream.pass_layer(through, keep, gains)
        return stream.residual

    expected, kept = go(weights, []), go(plain, [first, second])
    assert (kept - expected).abs().max() <= 1e-5 * expected.abs().max()
    for gram, with_gain, gain in ((seen[0], seen[4], first), (seen[2], seen[6], second)):
        scaled = gram * torch.outer(gain, gain)
        assert (with_gain - scaled).abs().max() <= 1e-4 * scaled.abs().max()


@torch.inference_mode()
def test_each_projection_hears_of_those_before_it(tiny_base_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once rounded, a weight is what the text goes through: its way is that of a model of rounded weights."""
    weights = folded(tiny_base_model, 0)
    changed = {op: (weight.float() * 1.5).round(decimals=1) for op, weight in weights.items()}
    stream, expected = (begin(tiny_base_model, monkeypatch) for _ in range(2))
    order: list[Projection] = []

    def replace(op: Projection, gram: Tensor) -> Tensor:
        order.append(op)
        return changed[op]

    stream.pass_layer(weights, replace)
    expected.pass_layer(changed)
    assert order == ["qkv", "o", "gate_up", "down"]
    assert torch.equal(stream.residual, expected.residual)


def test_an_embedding_that_is_not_finite_is_refused(tiny_base_model: Path) -> None:
    config = load_config(tiny_base_model)
    embedding = load_checkpoint(tiny_base_model, config).embedding()
    embedding[WINDOWS[0, 0]] = torch.nan
    with pytest.raises(CheckpointError, match="its embedding holds values that are not finite"):
        CalibrationStream(config, embedding, WINDOWS.tolist(), CPU)
