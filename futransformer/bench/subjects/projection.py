"""One projection with its whole epilogue on random inputs, as several subjects measure it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from futransformer.bench.case import Contender, Expected
from futransformer.bench.check import poison
from futransformer.bench.coded import logical_decoded, rounded, worth
from futransformer.bench.fp8 import fp8_output, references, scale_of, unscaled_output
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
from futransformer.bench.rivals import torch_fp8, torch_int4
from futransformer.bench.runner import Bench
from futransformer.bench.shapes import BYTES, FP8_BYTES, decode_weight_bytes, shape_config
from futransformer.generator.plan import projections
from futransformer.generator.precision import E4M3, get_precision
from futransformer.generator.specs import PAGE_SIZE
from futransformer.library import KernelLibrary
from futransformer.ops.interface import DecodeWeight, Fp8Output, Ops, Phase, Projection
from futransformer.quantize.fp8 import Fp8Weight, codes_of, quantize_weight
from futransformer.reference import ReferenceOps, row_sumsq

ROOM = 1024  # for a residual stream that timed calls add to: BF16 stops growing some 500 additions on


@dataclass(frozen=True)
class Scales:
    """Of an FP8 projection: what its sums are worth, and how its result is written if it is FP8 as well."""

    sums: Tensor | None = None
    result: Fp8Output | None = None


class ProjectionInputs:
    """Inputs of one projection at ``rows`` rows, and enough distinct weights that none is met in L2.

    Where the phase reads FP8, ``operand`` is x in codes at ``x_scale`` and ``weight`` the logical weight in codes.
    Where decode reads codes, ``weight`` has them with their scales, and ``natural`` has its values.
    """

    def __init__(
        self,
        bench: Bench,
        shape: str,
        op: Projection,
        rows: int,
        phase: Phase,
        *,
        sets: int | None = None,
        precision: str = "bf16",
    ) -> None:
        """Draw them; ``sets`` fixes the number of weights, 1 where a call moves far more than L2 holds."""
        self.op, self.rows, self.phase, self.device = op, rows, phase, bench.device
        self.config = config = shape_config(shape)
        self.precision = get_precision(precision)
        self.fp8 = phase == "prefill" and self.precision.prefill == E4M3
        n, k = projections(config)[op]
        weight_bytes = (FP8_BYTES if self.fp8 else BYTES) * n * k
        if phase == "decode":
            weight_bytes = decode_weight_bytes(config, op, precision)
        self.sets = sets_for(weight_bytes) if sets is None else sets
        self.natural = random_weight(config, op, self.device)
        self.x = self.operand = random_tensor(rows, k, device=self.device)
        self.residual = random_tensor(rows, config.hidden_size, device=self.device)
        if phase == "decode":
            self.residual = self.residual.float()
        self.weight: DecodeWeight = logical(config, op, self.natural)
        if phase == "decode":
            self.coded = rounded(op, self.natural, self.precision)
            self.natural = worth(self.coded)
            self.weight = logical_decoded(config, op, self.coded)
        self.scales = self.reference_scales = self.timed_scales = Scales()
        ops = bench.library(shape, precision)
        if op in ("qkv", "gate_up"):
            parts = sumsq_parts(ops, self.residual, phase, fp8=self.fp8)
            self.sumsq = self.x.float().square().view(rows, parts, -1).sum(-1)
        if op == "qkv":
            self.prompts = Prompts((rows,), self.device)
            self.rope_table = device_rope_table(config, rows, self.device)
            self.pages = self.prompts.prefill_pass()
            self.k_pages, self.v_pages = (self.prompts.empty_pages(config) for _ in range(2))
            if self.precision.copy is not None:
                of_head = self.precision.copy.page_bytes(config.head_dim)
                self.kv_copy = torch.empty(*self.k_pages.shape[:2], of_head, dtype=torch.uint8, device=self.device)
        if self.fp8:
            self._quantise(ops, quantize_weight(op, logical(config, op, self.natural), self.precision.weight_scales))

    def _quantise(self, ops: Ops, weight: Fp8Weight) -> None:
        """Choose every scale; that of the result from what one call at a scale of 1 finds."""
        self.x_scale = scale_of(self.x)
        self.operand, self.weight = codes_of(self.x, self.x_scale), weight.codes
        sums = self.x_scale * weight.scale
        self.scales = self.timed_scales = Scales(ops.pack_scale(self.op, sums))
        self.reference_scales = Scales(sums)
        if self.op == "qkv":
            return
        found = unscaled_output(self.device)
        self.call(ops, self.packed(ops), self.residual.clone(), replace(self.scales, result=found))
        result = fp8_output(scale_of(found.amax))
        roomy = result if self.op == "gate_up" else fp8_output(ROOM * result.scale)
        self.timed_scales = replace(self.scales, result=roomy)
        self.scales = replace(self.scales, result=result)
        self.reference_scales = replace(self.reference_scales, result=fp8_output(result.scale))

    def call(self, ops: Ops, weight: Tensor, residual: Tensor, scales: Scales) -> Sequence[Tensor]:
        """Make one call; what it wrote, of the cache only the tokens' slots."""
        if self.op == "qkv":
            return [
                ops.qkv(
                    self.phase,
                    self.operand,
                    self.sumsq,
                    weight,
                    self.rope_table,
                    self.pages.positions,
                    self.pages.slots,
                    self.k_pages,
                    self.v_pages,
                    scale=scales.sums,
                    kv_copy=self._copy_of(ops),
                )
            ]
        scale, result = scales.sums, scales.result
        if self.op == "gate_up":
            return [ops.gate_up(self.phase, self.operand, self.sumsq, weight, scale=scale, fp8=result)]
        add = ops.o if self.op == "o" else ops.down
        stream = add(self.phase, self.operand, weight, residual, scale=scale, fp8=result)
        return [stream.residual, stream.x] if self.fp8 else [stream.x]

    def _copy_of(self, ops: Ops) -> Tensor | None:
        """The INT4 copy of the cache, where these operations write one; what is in it is the tests' concern."""
        return self.kv_copy if isinstance(ops, KernelLibrary) and ops.precision.copy is not None else None

    def outputs(self, ops: Ops, weight: Tensor) -> Sequence[Tensor]:
        """Make one call on fresh copies, outputs poisoned; K and V are gathered from their slots."""
        residual = self.residual.clone()
        n, _ = projections(self.config)[self.op]
        width = {"qkv": self.config.heads.q_features, "gate_up": n // 2}.get(self.op, n)
        dtype = torch.float8_e4m3fn if self.fp8 and self.op != "qkv" else torch.bfloat16
        poison(self.device, ((self.rows, width), dtype))
        if self.op != "qkv":
            return self.call(ops, weight, residual, self.scales)
        for pages in (self.k_pages, self.v_pages):
            pages.fill_(torch.nan)
        written = self.call(ops, weight, residual, self.scales)
        slots = self.pages.slots
        stored = [pages[slots // PAGE_SIZE, :, slots % PAGE_SIZE].clone() for pages in (self.k_pages, self.v_pages)]
        return [*written, *stored]

    def expected(self) -> Sequence[Expected]:
        """What the references make of the same inputs."""
        exact, same = (self._reference(ops) for ops in references(self.config, self.precision, self.device))
        return [Expected(float32, own) for float32, own in zip(exact, same, strict=True)]

    def _reference(self, ops: ReferenceOps) -> Sequence[Tensor]:
        weight = self.weight if isinstance(self.weight, Tensor) else self.weight.dequantise()
        scales = self.reference_scales
        if self.op != "qkv":
            stream = ops.dtype if self.phase == "prefill" else torch.float32
            return self.call(ops, weight, self.residual.to(stream, copy=True), scales)
        ours = self.k_pages, self.v_pages
        self.k_pages, self.v_pages = (pages.to(ops.dtype, copy=True) for pages in ours)
        try:
            slots = self.pages.slots
            written = self.call(ops, weight, self.residual, scales)
            stored = [pages[slots // PAGE_SIZE, :, slots % PAGE_SIZE] for pages in (self.k_pages, self.v_pages)]
        finally:
            self.k_pages, self.v_pages = ours
        return [*written, *stored]

    def contender(self, ops: Ops, floor_seconds: float | None = None) -> Contender:
        """Ours: launched from the host, or ``floor_seconds`` long calls in a graph, a chain as those of a model are."""
        return self.timed(self.stream_calls(ops), lambda: self.our_outputs(ops), floor_seconds, ops.chain())

    def packed(self, ops: Ops) -> Tensor:
        """The weight as ours reads it."""
        return ops.pack(self.op, self.phase, self.weight)

    def our_outputs(self, ops: Ops) -> Sequence[Tensor]:
        """One checked call of ours."""
        return self.outputs(ops, self.packed(ops))

    def stream_calls(self, ops: Ops) -> list[Callable[[], object]]:
        """One call of ours a weight."""
        first = self.packed(ops)
        return self.calls_over(ops, (first, *(first.clone() for _ in range(self.sets - 1))))

    def calls_over(self, ops: Ops, weights: Sequence[Tensor]) -> list[Callable[[], object]]:
        """One call to be timed of each packed weight.

        What o and down add in place to their residual grows with the number of calls, in BF16 until it has no digits
        left for another: it stays finite, and as random as it was.
        """
        residual = self.residual.clone()
        return [partial(self.call, ops, weight, residual, self.timed_scales) for weight in weights]

    def copies(self) -> list[Tensor]:
        """The natural weight as many times as ours has it."""
        return [self.natural, *(self.natural.clone() for _ in range(self.sets - 1))]

    def fp8_copies(self) -> list[torch_fp8.Weight]:
        """The same quantised for a rival: in natural order, with one scale."""
        first = torch_fp8.Weight.of(self.natural)
        return [first, *(torch_fp8.Weight(first.codes.clone(), first.scale) for _ in range(self.sets - 1))]

    def int4_copies(self) -> list[torch_int4.Weight]:
        """The codes that ours has, for a rival: in natural order."""
        first = torch_int4.Weight.of(self.coded)
        return [first, *(first.copy() for _ in range(self.sets - 1))]

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

    def normalised_codes(self) -> tuple[Tensor, Tensor]:
        """The same in FP8, and its scale of no dimension."""
        normalised = self.normalised()
        scale = scale_of(normalised)
        return codes_of(normalised, scale), scale.view(())

    def natural_rope(self) -> tuple[Tensor, Tensor]:
        """Cos and sin of every row."""
        return natural_rope(self.rope_table, self.pages.positions)

    def qkv_rival_outputs(self, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Sequence[Tensor]:
        """A rival's q [T, heads x D], K and V [T, kv heads, D], reordered as ours has them."""
        head_dim = self.config.head_dim
        return [to_pair_order(q, head_dim), to_pair_order(k_cache, head_dim), v_cache]


def sumsq_parts(ops: KernelLibrary, residual: Tensor, phase: Phase, *, fp8: bool = False) -> int:
    """How many partial sums a row the op before a norm hands over: asked of the op itself, on zeros."""
    (n, k), device = projections(ops.config)["o"], residual.device
    operand = torch.zeros(n, k, dtype=torch.float8_e4m3fn if fp8 else torch.bfloat16, device=device)
    weight = rounded("o", operand, ops.precision) if phase == "decode" else operand
    x = torch.zeros(residual.shape[0], k, dtype=operand.dtype, device=device)
    channels = n if fp8 and ops.precision.weight_scales == "channel" else 1
    scale = ops.pack_scale("o", torch.ones(channels, device=device)) if fp8 else None
    result = unscaled_output(device) if fp8 else None
    packed = ops.pack("o", phase, weight)
    return ops.o(phase, x, packed, torch.zeros_like(residual), scale=scale, fp8=result).sumsq.shape[1]
