"""Rotations are orthogonal, of any width, and change nothing that a model computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from futransformer.checkpoint import EMBEDDING, HEAD, load_checkpoint, projections_of
from futransformer.cli import main
from futransformer.generator.config import load_config
from futransformer.model import Llama
from futransformer.quantize.description import named_precision
from futransformer.quantize.folding import Folding
from futransformer.quantize.kv_int4 import rotate
from futransformer.quantize.stream import CalibrationStream

CPU = torch.device("cpu")
TOKENS = torch.randint(256, (3, 40), generator=torch.Generator().manual_seed(6))
ROTATED = Folding(residual_rotation=True, value_rotation=64)


@pytest.mark.parametrize("width", [64, 96, 576, 7, 640])
def test_the_rotation_is_orthogonal_and_spreads(width: int) -> None:
    """To float32's roundings; and of one column none keeps more than a few of its shares."""
    turned = ROTATED._turned(torch.eye(width)).double()
    assert (turned @ turned.T - torch.eye(width)).abs().max() < 2e-6
    assert turned.abs().max() <= 1.01 * (2 / width) ** 0.5, "Hartley's values are at most the root of 2 of Hadamard's"
    assert torch.equal(ROTATED._turned(torch.eye(width)).double(), turned)


def logits_of(stream: CalibrationStream, head: Tensor, gain: Tensor) -> Tensor:
    normed = stream.residual * torch.rsqrt(stream.residual.square().mean(-1, keepdim=True) + 1e-6)
    return (normed * gain) @ head.float().T


@torch.inference_mode()
@pytest.mark.parametrize("folding", [ROTATED, Folding(value_rotation=32), Folding(residual_rotation=True)])
def test_a_rotated_model_is_the_same(tiny_model: Path, folding: Folding) -> None:
    """Its logits are transformers', but for the roundings of the tables to BF16 where the stream is rotated."""
    config = load_config(tiny_model)
    checkpoint = load_checkpoint(tiny_model, config)
    exact = Folding(folding.residual_rotation, folding.value_rotation)
    embedding, head = checkpoint.embedding().float(), checkpoint.lm_head().float()
    if folding.residual_rotation:
        embedding, head = exact._turned(embedding), exact._turned(head)
    stream = CalibrationStream(config, embedding, TOKENS.tolist(), CPU)
    for index in range(2):
        q, k, v, o, gate, up, down = (weight.float() for weight in folding.layer(checkpoint, index).values())
        fused: dict[Any, Tensor] = {
            "qkv": torch.cat((q, k, v)),
            "o": o,
            "gate_up": torch.cat((gate, up)),
            "down": down,
        }
        stream.pass_layer(fused)
    ours = logits_of(stream, head, torch.ones(128))
    theirs = LlamaForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)(TOKENS).logits
    assert (ours - theirs).abs().max() <= 2e-5 * theirs.abs().max()
    ends = {name: tensor for shard in folding.ends(checkpoint) for name, tensor in shard.items()}
    if folding.residual_rotation:  # a tied head is rotated once, from the table that it was
        assert (ends[EMBEDDING].float() - embedding).abs().max() <= 2**-8 * embedding.abs().max()
        assert (ends[HEAD].float() - head).abs().max() <= 2**-8 * head.abs().max()
    else:
        assert torch.equal(ends[EMBEDDING], checkpoint.embedding())


def test_v_is_rotated_by_head(tiny_base_model: Path) -> None:
    config = load_config(tiny_base_model)
    checkpoint = load_checkpoint(tiny_base_model, config)
    v = projections_of(0)[2]
    plain, turned = (folding.layer(checkpoint, 0)[v] for folding in (Folding(), Folding(value_rotation=64)))
    heads = [weight.float().view(2, 64, -1).transpose(1, 2) for weight in (plain, turned)]
    assert torch.equal(heads[1], rotate(heads[0], 64))


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_a_rotated_model_is_written_and_served(tiny_model: Path, tmp_path: Path, method: str) -> None:
    """Its head apart from then on, whether it was or not."""
    out = tmp_path / "out"
    options = ("--rotate", "--group-size", "32", "--asymmetric", "--scale-search", "mse", "--method", method)
    text = ("--calibration", "random", "--samples", "4", "--seqlen", "64") if method == "gptq" else ()
    assert main(["quantize", str(tiny_model), "-o", str(out), "--device", "cpu", *options, *text]) == 0
    config = load_config(out)
    assert not config.tie_word_embeddings
    said = json.loads((out / "futransformer.json").read_text())["int4_weights"]
    assert (said["residual_rotation"], said["value_rotation"]) == (True, 64)
    prompts = TOKENS.tolist()
    ours, theirs = (
        Llama.from_pretrained(folder, device="cpu", cache_tokens=512).prefill(prompts, rows="all")
        for folder in (out, tiny_model)
    )
    share = (ours - theirs).norm() / theirs.norm()
    assert 0.01 < share < 0.5, "weights are 7 % off; logits of another model would be 140 %"


@pytest.mark.parametrize("options", [("--method", "rtn"), ("--method", "gptq", "--kv", "int4", "--fp8-prefill")])
def test_gains_that_are_kept_stay_in_the_norms(tiny_model: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    """Codes are of the weights as they were, V and o rotated beside an INT4 cache; FP8 codes have gains in them."""
    text = ("--calibration", "random", "--samples", "4", "--seqlen", "64") if "gptq" in options else ()
    small = ("--group-size", "32", "--asymmetric", "--device", "cpu", "--keep-gains")
    assert main(["quantize", str(tiny_model), "-o", str(tmp_path / "out"), *small, *options, *text]) == 0
    fp8, kv4 = "--fp8-prefill" in options, "--kv" in options
    assert named_precision(tmp_path / "out") == f"{'fp8-' * fp8}int4-g32-asym-gain{'-kv4' * kv4}"
    ours, theirs = (load_checkpoint(folder, load_config(folder)) for folder in (tmp_path / "out", tiny_model))
    for kept, gain in zip(ours.norm_gains(), theirs.norm_gains(), strict=True):
        assert torch.equal(kept, gain)
    for index in range(2):
        for module in projections_of(index):
            if not (kv4 and module.endswith(("v_proj", "o_proj"))):
                exact = theirs.projection(module).float()
                assert (ours.projection(module) - exact).norm() < 0.15 * exact.norm(), module
    model, exact_model = (
        Llama.from_pretrained(folder, device="cpu", cache_tokens=512) for folder in (tmp_path / "out", tiny_model)
    )
    assert len(model.weights.gains) == 5
    logits, expected = (each.prefill(TOKENS.tolist(), rows="all") for each in (model, exact_model))
    assert (logits - expected).norm() < 0.5 * expected.norm()
    column = torch.full((len(TOKENS),), 5, dtype=torch.int32)
    logits, expected = (each.decode(column) for each in (model, exact_model))
    assert (logits - expected).norm() < 0.5 * expected.norm()


def test_gains_of_another_stream_are_refused(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quantize", str(tiny_model), "-o", str(tmp_path / "out"), "--rotate", "--keep-gains"]) == 2
    assert "rotating the residual stream folds gains into the weights" in capsys.readouterr().err
