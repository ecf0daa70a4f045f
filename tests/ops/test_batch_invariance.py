"""A decoded row has the same bits alone and in any batch of up to eight, through two layers and the head.

Kernel by kernel this is test_decode_gemm's; here it is what ``batch_invariant`` leaves of the kernels, and how it
splits attention: sequences of unequal lengths, attended by one split and by several.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from futransformer.bench.llama import Paging, copy_of
from futransformer.blocks import DecodePass, llama_block
from futransformer.build.load import LoadedKernels, load_or_build
from futransformer.kv_cache import token_slots
from futransformer.library import KernelLibrary
from tests.ops import models
from tests.ops.stand_in import StandInKernel, stand_in_library
from tests.ops.test_two_layers import TINY, RandomModel, same_bits

MODELS = (
    *("smollm2-135m", "llama-3.1-8b-int4", "smollm2-135m-int4-g32-asym-kv4"),
    *("smollm2-135m-kv4", "smollm2-135m-bf16-fp8-head8"),
)
LENGTHS: tuple[int, ...] = (1, 64, 65, 129, 700, 300, 63, 128)  # pages of 64, of which a split has two
BATCHES = ((0, 8), (0, 4), (2, 7), (4, 6), (5, 8))

GpuOps = Callable[[str], KernelLibrary]


def check_batches(ops: KernelLibrary) -> None:
    """Logits of each row in each batch."""
    random = RandomModel(ops.config, ops.device, ops.precision)
    weights = random.weights(ops)
    paging, form = Paging(len(LENGTHS), max(LENGTHS), ops.device), ops.precision.copy
    caches = [paging.cache(ops.config) for _ in random.layers]
    copies = [None if form is None else copy_of(cache, form) for cache in caches]
    lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=ops.device)
    tokens = torch.arange(len(LENGTHS), dtype=torch.int32, device=ops.device)
    slots = token_slots(paging.block_table, torch.arange(len(LENGTHS), device=ops.device), lengths - 1)

    def logits(first: int, last: int) -> Tensor:
        part = slice(first, last)
        rows = DecodePass(
            positions=(lengths - 1)[part].contiguous(),
            slots=slots[part].contiguous(),
            block_table=paging.block_table[part].contiguous(),
            seqlens_k=lengths[part].contiguous(),
            max_seqlen_k=max(LENGTHS[part]),
        )
        stream = ops.gather_rows("decode", weights.embedding, tokens[part].contiguous())
        for layer, cache, kv_copy in zip(weights.layers, caches, copies, strict=True):
            pages = cache.k_pages, cache.v_pages
            stream = llama_block(ops, layer, stream, rows, weights.rope_table, *pages, kv_copy=kv_copy)
        return ops.lm_head("decode", stream.x, stream.sumsq, weights.lm_head["decode"])

    alone = [logits(row, row + 1)[0] for row in range(len(LENGTHS))]
    assert len({int(row.argmax()) for row in alone}) > 1, "all rows say the same"
    for first, last in BATCHES:
        for row, found in enumerate(logits(first, last), first):
            assert same_bits(found, alone[row]), f"row {row} of the batch {first} .. {last - 1}"


def invariant(ops: KernelLibrary, built: LoadedKernels) -> KernelLibrary:
    """The same kernels, of which batches of up to eight get one."""
    return KernelLibrary(ops.config, ops.precision, ops.plan, built, ops.device, batch_invariant=True)


@pytest.mark.gpu
@pytest.mark.parametrize("model", MODELS)
def test_rows_have_the_same_bits_in_any_batch(
    gpu_ops: GpuOps, exports: Callable[[str], Path | None], model: str
) -> None:
    built = load_or_build(models.tested_plan(model).specs(), folder=exports(model))
    check_batches(invariant(gpu_ops(model), built))


@pytest.mark.parametrize("precision", ["bf16", "int4-g32-asym-kv4", "bf16-fp8-head8"])
def test_the_check_on_the_stand_in(monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    ops = stand_in_library(TINY, monkeypatch, precision=precision)
    check_batches(invariant(ops, {spec.name: () for spec in ops.plan.specs()}))  # type: ignore[misc]


def test_a_kernel_that_sees_the_batch_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Faulty(StandInKernel):
        def launch(self, grid: tuple[int, int, int], **arguments: Any) -> None:
            super().launch(grid, **arguments)
            if "partial_out" in arguments and len(arguments["seqlens_k"]) > 1:
                arguments["out"].view(torch.int16)[-1, 0] ^= 1

    ops = stand_in_library(TINY, monkeypatch, Faulty)
    with pytest.raises(AssertionError, match=r"row 7 of the batch 0 \.\. 7"):
        check_batches(invariant(ops, {spec.name: () for spec in ops.plan.specs()}))  # type: ignore[misc]
