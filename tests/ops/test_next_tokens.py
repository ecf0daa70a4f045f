"""Decode's head, which chooses tokens on the way: those of its logits' argmax, whether logits are written or not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from futransformer.generator.errors import InputError
from futransformer.library import KernelLibrary
from futransformer.ops.interface import Ops
from futransformer.reference import ReferenceOps
from tests.ops import models
from tests.ops.stand_in import StandInKernel, stand_in_library
from tests.ops.test_decode_gemm import problem_of
from tests.ops.test_rows import argmax_rows
from tests.ops.test_two_layers import TINY

HEADS = ("smollm2-135m", "llama-3.1-8b", "odd", *models.FP8_DECODE, *models.INT4_HEADS)  # the odd one's is padded

GpuOps = Callable[[str], KernelLibrary]


def check_traps(ops: Ops, vocab_size: int, hidden_size: int) -> None:
    """Ties, zeros of both signs, infinities, NaN among numbers, and nothing but NaN or -inf: a row at a time."""
    logits, expected = argmax_rows(vocab_size, ops.device)
    x = torch.zeros(1, hidden_size, dtype=torch.bfloat16, device=ops.device)
    x[0, 0] = 1
    sumsq = torch.full((1, 1), float(hidden_size), device=ops.device)
    for row, winner in zip(logits.bfloat16(), expected, strict=True):
        head = torch.zeros(vocab_size, hidden_size, dtype=torch.bfloat16, device=ops.device)
        head[:, 0] = row
        weight = ops.pack("lm_head", "decode", head)
        for asked in (False, True):
            tokens, found = ops.next_tokens(x, sumsq, weight, logits=asked)
            assert tokens.dtype == torch.int32
            assert tokens.tolist() == [winner]
            assert (found is not None) == asked


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["smollm2-135m", "odd"])
def test_traps(gpu_ops: GpuOps, model: str) -> None:
    ops = gpu_ops(model)
    check_traps(ops, ops.config.vocab_size, ops.config.hidden_size)


@pytest.mark.parametrize("vocab_size", [TINY.vocab_size, 320])
def test_traps_on_the_reference_and_on_the_stand_in(monkeypatch: pytest.MonkeyPatch, vocab_size: int) -> None:
    config = replace(TINY, vocab_size=vocab_size)
    for ops in (ReferenceOps(config), stand_in_library(config, monkeypatch)):
        check_traps(ops, vocab_size, config.hidden_size)


def check_tokens(ops: KernelLibrary, rows: int) -> None:
    """Logits keep their bits, and tokens do not depend on whether these are written."""
    problem = problem_of(ops, "lm_head")
    x, sumsq = problem.x[:rows], problem.sumsq[:rows]
    logits = ops.lm_head("decode", x, sumsq, problem.weight)
    out = torch.full((rows,), -1, dtype=torch.int32, device=ops.device)
    tokens, found = ops.next_tokens(x, sumsq, problem.weight, logits=True, out=out)
    assert tokens is out
    assert found is not None
    assert torch.equal(found, logits)
    assert torch.equal(tokens, ops.argmax(logits))
    silent, nothing = ops.next_tokens(x, sumsq, problem.weight)
    assert nothing is None
    assert torch.equal(silent, tokens)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3, 8, 16, 17, 33, 129])
@pytest.mark.parametrize("model", HEADS)
def test_tokens_are_those_of_the_logits(gpu_ops: GpuOps, model: str, rows: int) -> None:
    check_tokens(gpu_ops(model), rows)


@pytest.mark.parametrize("precision", ["bf16", "bf16-fp8-head8", "int4-g32-asym-head4"])
def test_the_check_of_tokens_on_the_stand_in(monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    ops = stand_in_library(TINY, monkeypatch, precision=precision)
    for rows in (1, 9, 70):
        check_tokens(ops, rows)


def test_logits_that_nobody_asks_for_have_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel writes none to a null pointer, which an empty tensor is."""
    launched: list[dict[str, Any]] = []

    class Recording(StandInKernel):
        def launch(self, grid: tuple[int, int, int], **arguments: Any) -> None:
            launched.append(arguments)
            super().launch(grid, **arguments)

    ops = stand_in_library(TINY, monkeypatch, Recording)
    x, sumsq = torch.zeros(3, TINY.hidden_size, dtype=torch.bfloat16), torch.ones(3, 1)
    weight = ops.pack("lm_head", "decode", torch.zeros(TINY.vocab_size, TINY.hidden_size))
    for asked in (False, True):
        launched.clear()
        ops.next_tokens(x, sumsq, weight, logits=asked)
        head, choice = launched
        assert (head["out"].data_ptr() == 0) == (not asked)
        assert choice["best"].data_ptr() == head["best"].data_ptr()
    assert ops.next_tokens(x[:0], sumsq[:0], weight).tokens.shape == (0,)
    with pytest.raises(InputError, match=r"next_tokens: out must be torch\.int32"):
        ops.next_tokens(x, sumsq, weight, out=torch.zeros(3))
