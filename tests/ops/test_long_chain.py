"""Ten thousand launches that overlap: decode steps chained in one graph, replayed, with the same bits every time.

A step's tokens come from the step before, so every launch of a chain but the first may begin while its predecessor
runs. A kernel that reads too early, or frees what is still read, gives other bits sooner or later; run one after the
other, with ordinary launches, the same kernels say which bits are right.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from futransformer.bench.llama import Paging, copy_of
from futransformer.blocks import llama_block
from futransformer.library import KernelLibrary
from tests.ops.stand_in import StandInKernel, stand_in_library
from tests.ops.test_two_layers import TINY, RandomModel, same_bits

LAYERS = 2
LAUNCHES_A_STEP = 1 + 5 * LAYERS + 2  # gather_rows, the layers, lm_head, argmax
STEPS, REPLAYS = 40, 20
CONTEXT = 200  # tokens a sequence, in four pages

# INT4 below and above eight sequences by integers and by wgmma, over BF16 pages and over an INT4 copy; E4M3 weights
MODELS = (
    *("smollm2-135m", "llama-3.1-8b"),
    *("llama-3.1-8b-int4", "smollm2-135m-int4-g32-asym-kv4", "smollm2-135m-kv4", "smollm2-135m-bf16-fp8-head8"),
)

GpuOps = Callable[[str], KernelLibrary]


class Chain:
    """Steps of a random model, each fed with the tokens of the one before; the newest slots are written every time."""

    def __init__(self, ops: KernelLibrary, batch: int, steps: int) -> None:
        self.ops, self.steps = ops, steps
        random = RandomModel(ops.config, ops.device, ops.precision)
        self.weights = random.weights(ops)
        torch.manual_seed(4)
        paging = Paging(batch, CONTEXT, ops.device)
        form = ops.precision.copy
        self.caches = [paging.cache(ops.config) for _ in range(LAYERS)]
        self.copies = [None if form is None else copy_of(cache, form) for cache in self.caches]
        self.rows = paging.decode_pass()
        self.first = torch.arange(batch, dtype=torch.int32, device=ops.device)

    def run(self) -> list[Tensor]:
        """Every step's logits."""
        ops, weights, tokens, all_logits = self.ops, self.weights, self.first, []
        with ops.chain():
            for _ in range(self.steps):
                stream = ops.gather_rows("decode", weights.embedding, tokens)
                for layer, cache, kv_copy in zip(weights.layers, self.caches, self.copies, strict=True):
                    pages = cache.k_pages, cache.v_pages
                    stream = llama_block(ops, layer, stream, self.rows, weights.rope_table, *pages, kv_copy=kv_copy)
                all_logits.append(ops.lm_head("decode", stream.x, stream.sumsq, weights.lm_head["decode"]))
                tokens = ops.argmax(all_logits[-1])
        return all_logits


def check_long_chain(ops: KernelLibrary, batch: int, steps: int, replays: int) -> None:
    """Replay (without graphs, run) the chain; every step's logits are poisoned before, and compared after."""
    chain = Chain(ops, batch, steps)
    ops.launch_chain.enabled = False
    expected = chain.run()
    ops.launch_chain.enabled = True
    assert all(logits.isfinite().all() for logits in expected)
    assert len({int(logits.argmax()) for logits in expected}) > 1, "all steps choose the same token"
    graph = None
    if ops.capturable:
        chain.run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = chain.run()
    for replay in range(replays):
        if graph is None:
            found = chain.run()
        else:
            for logits in found:
                logits.fill_(torch.nan)
            graph.replay()
        for step, (logits, want) in enumerate(zip(found, expected, strict=True)):
            assert same_bits(logits, want), f"replay {replay}, step {step}"


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [3, 33])
@pytest.mark.parametrize("model", MODELS)
def test_ten_thousand_overlapping_launches(
    gpu_ops: GpuOps, monkeypatch: pytest.MonkeyPatch, model: str, batch: int
) -> None:
    assert STEPS * REPLAYS * LAUNCHES_A_STEP >= 10_000
    ops = gpu_ops(model)
    monkeypatch.delattr(ops._projections, "_empty")  # filling outputs in between would keep launches from overlapping
    with torch.no_grad():
        check_long_chain(ops, batch, STEPS, REPLAYS)


@pytest.mark.parametrize("precision", ["bf16", "int4-g32-asym-kv4", "bf16-fp8-head8"])
def test_the_check_passes_on_the_reference(monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    check_long_chain(stand_in_library(TINY, monkeypatch, precision=precision), 3, steps=3, replays=2)


def test_one_wrong_bit_in_one_launch_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = 0

    class Faulty(StandInKernel):
        def launch(self, grid: tuple[int, int, int], **arguments: Tensor) -> None:
            nonlocal launches
            super().launch(grid, **arguments)
            launches += 1
            if launches == 2 * 3 * LAUNCHES_A_STEP - 1:  # the last lm_head of the first chain that overlaps
                arguments["out"].view(torch.int32)[-1, 0] ^= 1

    with pytest.raises(AssertionError, match="replay 0, step 2"):
        check_long_chain(stand_in_library(TINY, monkeypatch, Faulty), 3, steps=3, replays=2)
