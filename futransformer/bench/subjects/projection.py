"""One projection with its whole epilogue on random inputs, as several subjects measure it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor

from futransformer.bench.case import Contender, Expected
from futransformer.bench.check import poison
from futransformer.bench.graphs import graphed, rotating
from futransformer.bench.llama import (
    Prompts,
    device_rope_table,
    logical,
    natural_rope,
    random_tensor,
    random_weight,
    sets_for,
    to_pair_order,
)
from futransformer.bench.runner import Bench
from futransformer.bench.shapes import BYTES, shape_config
from futransformer.generator.plan import projections
from futransformer.generator.specs import PAGE_SIZE
from futransformer.library import KernelLibrary
from futransformer.ops.interface import Ops, Phase, Projection
from futransformer.reference import ReferenceOps, row_sumsq


class ProjectionInputs:
    """Inputs of one projection at ``rows`` rows, and enough distinct weights that none is met in L2."""

    def __init__(
        self, bench: Bench, shape: str, op: Projection, rows: int, phase: Phase, *, sets: int | None = None
    ) -> None:
        """Draw them; ``sets`` fixes the number of weights, 1 where a call moves far more than L2 holds."""
        self.op, self.rows, self.phase, self.device = op, rows, phase, bench.device
        self.config = config = shape_config(shape)
        n, k = projections(config)[op]
        self.sets = sets_for(BYTES * n * k) if sets is None else sets
        self.natural = random_weight(config, op, self.device)
        self.x = random_tensor(rows, k, device=self.device)
        self.residual = random_tensor(rows, config.hidden_size, device=self.device)
        if phase == "decode":
            self.residual = self.residual.float()
        if op in ("qkv", "gate_up"):
            parts = sumsq_parts(bench.library(shape), self.residual, phase)
            self.sumsq = self.x.float().square().view(rows, parts, -1).sum(-1)
        if op == "qkv":
            self.prompts = Prompts((rows,), self.device)
            self.rope_table = device_rope_table(config, rows, self.device)
            self.pages = self.prompts.prefill_pass()
            self.k_pages, self.v_pages = (self.prompts.empty_pages(config) for _ in range(2))

    def call(self, ops: Ops, weight: Tensor, residual: Tensor) -> Sequence[Tensor]:
        """Make one call; what it wrote, of the cache only the tokens' slots."""
        if self.op == "qkv":
            return [
                ops.qkv(
                    self.phase,
                    self.x,
                    self.sumsq,
                    weight,
                    self.rope_table,
                    self.pages.positions,
                    self.pages.slots,
                    self.k_pages,
                    self.v_pages,
                )
            ]
        if self.op == "gate_up":
            return [ops.gate_up(self.phase, self.x, self.sumsq, weight)]
        if self.op == "o":
            return [ops.o(self.phase, self.x, weight, residual).x]
        return [ops.down(self.phase, self.x, weight, residual).x]

    def outputs(self, ops: Ops, weight: Tensor) -> Sequence[Tensor]:
        """Make one call on fresh copies, outputs poisoned; K and V are gathered from their slots."""
        residual = self.residual.clone()
        n, _ = projections(self.config)[self.op]
        width = {"qkv": self.config.heads.q_features, "gate_up": n // 2}.get(self.op, n)
        poison(self.device, ((self.rows, width), torch.bfloat16))
        if self.op != "qkv":
            return self.call(ops, weight, residual)
        for pages in (self.k_pages, self.v_pages):
            pages.fill_(torch.nan)
        written = self.call(ops, weight, residual)
        slots = self.pages.slots
        stored = [pages[slots // PAGE_SIZE, :, slots % PAGE_SIZE].clone() for pages in (self.k_pages, self.v_pages)]
        return [*written, *stored]

    def expected(self) -> Sequence[Expected]:
        """What the references make of the same inputs."""
        weight = logical(self.config, self.op, self.natural)

        def by(dtype: torch.dtype) -> Sequence[Tensor]:
            ops = ReferenceOps(self.config, device=self.device, dtype=dtype)
            return self._reference(ops, weight)

        same = by(torch.bfloat16)
        return [Expected(exact, own) for exact, own in zip(by(torch.float32), same, strict=True)]

    def _reference(self, ops: ReferenceOps, weight: Tensor) -> Sequence[Tensor]:
        if self.op != "qkv":
            stream = ops.dtype if self.phase == "prefill" else torch.float32
            return self.call(ops, weight, self.residual.to(stream, copy=True))
        ours = self.k_pages, self.v_pages
        self.k_pages, self.v_pages = (pages.to(ops.dtype, copy=True) for pages in ours)
        try:
            slots = self.pages.slots
            written = self.call(ops, weight, self.residual)
            stored = [pages[slots // PAGE_SIZE, :, slots % PAGE_SIZE] for pages in (self.k_pages, self.v_pages)]
        finally:
            self.k_pages, self.v_pages = ours
        return [*written, *stored]

    def contender(self, ops: Ops, floor_seconds: float | None = None) -> Contender:
        """Ours: launched from the host, or ``floor_seconds`` long calls in a graph, a chain as those of a model are."""
        return self.timed(self.stream_calls(ops), lambda: self.our_outputs(ops), floor_seconds, ops.chain())

    def packed(self, ops: Ops) -> Tensor:
        """The weight as ours reads it."""
        return ops.pack(self.op, self.phase, logical(self.config, self.op, self.natural))

    def our_outputs(self, ops: Ops) -> Sequence[Tensor]:
        """One checked call of ours."""
        return self.outputs(ops, self.packed(ops))

    def stream_calls(self, ops: Ops) -> list[Callable[[], object]]:
        """One call of ours a weight.

        What o and down add in place to their residual grows with the number of calls, in BF16 until it has no digits
        left for another: it stays finite, and as random as it was.
        """
        first, residual = self.packed(ops), self.residual.clone()
        weights = (first, *(first.clone() for _ in range(self.sets - 1)))
        return [partial(self.call, ops, weight, residual) for weight in weights]

    def copies(self) -> list[Tensor]:
        """The natural weight as many times as ours has it."""
        return [self.natural, *(self.natural.clone() for _ in range(self.sets - 1))]

    def timed(
        self,
        calls: Sequence[Callable[[], object]],
        outputs: Callable[[], Sequence[Tensor]],
        floor_seconds: float | None,
        chain: AbstractContextManager[object] = nullcontext(),  # noqa: B008 - it has no state
    ) -> Contender:
        """Any contender over as many weights, timed in the way that ours is; a graph is captured within ``chain``."""
        if floor_seconds is None:
            return Contender(run=rotating(calls), outputs=outputs)
        return graphed(calls, outputs, floor_seconds, chain)

    def normalised(self) -> Tensor:
        """RMSNorm of x, as BF16, for rivals that are given it."""
        mean = row_sumsq(self.x) / self.x.shape[1]
        return (self.x.float() * torch.rsqrt(mean + self.config.rms_norm_eps)).bfloat16()

    def natural_rope(self) -> tuple[Tensor, Tensor]:
        """Cos and sin of every row."""
        return natural_rope(self.rope_table, self.pages.positions)

    def qkv_rival_outputs(self, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Sequence[Tensor]:
        """A rival's q [T, heads x D], K and V [T, kv heads, D], reordered as ours has them."""
        head_dim = self.config.head_dim
        return [to_pair_order(q, head_dim), to_pair_order(k_cache, head_dim), v_cache]


def sumsq_parts(ops: KernelLibrary, residual: Tensor, phase: Phase) -> int:
    """How many partial sums a row the op before a norm hands over: asked of the op itself, on zeros."""
    n, k = projections(ops.config)["o"]
    weight = torch.zeros(n, k, dtype=torch.bfloat16, device=residual.device)
    x = weight.new_zeros(residual.shape[0], k)
    return ops.o(phase, x, ops.pack("o", phase, weight), torch.zeros_like(residual)).sumsq.shape[1]
