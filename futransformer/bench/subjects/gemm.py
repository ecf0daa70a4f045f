"""gemm/{8b,70b}/{qkv,o,gate_up,down}/{bf16,fp8}/M=...: a prefill projection with its whole epilogue.

gemm/{8b,70b}/qkv/{bf16,fp8}-kv4/M=... write the INT4 copy of the cache as well, which no rival does: beside them runs
``ours-no-copy``, whose ratio is its price.

``torch-bf16`` is ``torch.mm`` alone, without any epilogue; ``torch-bf16-epilogue`` compiled code for the same work. In
FP8 ``torch-fp8-mm`` is ``torch._scaled_mm`` alone and ``torch-fp8`` that with compiled code: what reads a norm gets its
rows normalised and quantised, what adds to the residual stream normalises and quantises the rows that it leaves.
Two limits, for two questions. How calls are launched: below ``HOST_ROWS`` rows a launch is a good part of a call, so
calls are replayed from a graph, ours as a chain. In which regimes they are timed: from ``ARITHMETIC_ROWS`` rows on
arithmetic decides and power limits it, so in bursts and sustained; below, memory decides, and they are timed steadily.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from futransformer.bench.case import COMPUTE_BOUND, MEMORY_BOUND, Case, Ceilings, Contender, Problem, Regime, Work
from futransformer.bench.fp8 import scale_of
from futransformer.bench.rivals import torch_bf16, torch_fp8
from futransformer.bench.runner import Bench
from futransformer.bench.shapes import BLOCK_OPS, gemm_work
from futransformer.bench.subjects.projection import ProjectionInputs
from futransformer.ops.interface import Projection

HOST_ROWS = 1024  # 8B's shortest projection then takes 45 us
ARITHMETIC_ROWS = 256  # operations a byte of BF16 weights; an H200 has 180 (800 TFLOP/s, 4.4 TB/s), 128 rows lie below
ROWS = (16, 64, 256, 512, 2048, 8192, 16384)
DEFAULT_ROWS = (16, 64, 256, 2048, 8192)
# names, whether the prefill reads FP8, and the projections that they make another kernel of
PRECISIONS: tuple[tuple[str, bool, tuple[Projection, ...]], ...] = (
    ("bf16", False, BLOCK_OPS),
    ("fp8", True, BLOCK_OPS),
    ("bf16-kv4", False, ("qkv",)),
    ("fp8-kv4", True, ("qkv",)),
)


def cases() -> Sequence[Case]:
    """See futransformer.bench.subjects."""
    return [
        Case(
            f"gemm/{shape}/{op}/{precision}/M={rows}",
            "TFLOP/s",
            regimes(rows),
            partial(open_fp8_case if reads_fp8 else open_case, shape, op, rows, precision=precision),
            default=shape == "8b" and rows in DEFAULT_ROWS and ops == BLOCK_OPS,
            precision=precision,
        )
        for precision, reads_fp8, ops in PRECISIONS
        for shape in ("8b", "70b")
        for rows in ROWS
        for op in ops
    ]


def regimes(rows: int) -> tuple[Regime, ...]:
    """What is told of this many rows."""
    return COMPUTE_BOUND if rows >= ARITHMETIC_ROWS else MEMORY_BOUND


def graph_floor(work: Work, rows: int, ceilings: Ceilings) -> float | None:
    """The least time of a call that is replayed from a graph, which that is sized by; None: the host launches it."""
    return None if rows >= HOST_ROWS else work.floor_seconds(ceilings)


def open_case(shape: str, op: Projection, rows: int, bench: Bench, *, precision: str = "bf16") -> Problem:
    """Draw inputs; every contender has the same number of distinct weights."""
    inputs = ProjectionInputs(bench, shape, op, rows, "prefill", precision=precision)
    work = gemm_work(inputs.config, op, rows, precision)
    floor = graph_floor(work, rows, bench.ceilings)

    def product() -> Contender:
        weights = inputs.copies()
        calls: list[Callable[[], object]] = [partial(torch.mm, inputs.x, weight.t()) for weight in weights]
        return inputs.timed(calls, list, floor)

    def compiled_epilogue() -> Contender:
        call, reordered = epilogue_call(inputs)
        calls: list[Callable[[], object]] = [partial(call, weight) for weight in inputs.copies()]
        return inputs.timed(calls, lambda: reordered(call(inputs.natural)), floor)

    return Problem(
        work=work,
        ours=inputs.contender(bench.library(shape, precision), floor),
        rivals={"torch-bf16": product, "torch-bf16-epilogue": compiled_epilogue},
        expected=inputs.expected,
        beside=without_copy(inputs, shape, floor, bench),
    )


def open_fp8_case(shape: str, op: Projection, rows: int, bench: Bench, *, precision: str = "fp8") -> Problem:
    """The same in FP8."""
    inputs = ProjectionInputs(bench, shape, op, rows, "prefill", precision=precision)
    work = gemm_work(inputs.config, op, rows, precision)
    floor = graph_floor(work, rows, bench.ceilings)

    def product() -> Contender:
        x, scale = inputs.operand, inputs.x_scale.view(())
        calls: list[Callable[[], object]] = [partial(torch_fp8.product, x, scale, w) for w in inputs.fp8_copies()]
        return inputs.timed(calls, list, floor)

    def compiled_epilogue() -> Contender:
        call, reordered = fp8_epilogue_call(inputs)
        weights = inputs.fp8_copies()
        calls: list[Callable[[], object]] = [partial(call, weight) for weight in weights]
        return inputs.timed(calls, lambda: reordered(call(weights[0])), floor)

    return Problem(
        work=work,
        ours=inputs.contender(bench.library(shape, precision), floor),
        rivals={"torch-fp8-mm": product, "torch-fp8": compiled_epilogue},
        expected=inputs.expected,
        beside=without_copy(inputs, shape, floor, bench),
    )


def without_copy(
    inputs: ProjectionInputs, shape: str, floor: float | None, bench: Bench
) -> Mapping[str, Callable[[], Contender]]:
    """Our own kernel that writes no INT4 copy, where the case's does."""
    if inputs.precision.copy is None:
        return {}
    plain = inputs.precision.name.removesuffix(inputs.precision.copy.suffix)
    return {"ours-no-copy": lambda: inputs.contender(bench.library(shape, plain), floor)}


def fp8_epilogue_call(
    inputs: ProjectionInputs,
) -> tuple[Callable[[torch_fp8.Weight], Any], Callable[[Any], Sequence[Tensor]]]:
    """See epilogue_call."""
    config, shape = inputs.config, torch_bf16.Shape.of(inputs.config)
    if inputs.op == "qkv":
        project = torch_bf16.compiled(torch_fp8.qkv_into_cache)
        x, scale = inputs.normalised_codes()
        cos, sin = inputs.natural_rope()
        cache = (inputs.rows, config.num_key_value_heads, config.head_dim)
        k_cache, v_cache = (inputs.x.new_empty(cache) for _ in range(2))
        return (
            lambda weight: project(x, scale, weight, shape, cos, sin, k_cache, v_cache),
            lambda q: inputs.qkv_rival_outputs(q, k_cache, v_cache),
        )
    if inputs.op == "gate_up":
        assert inputs.scales.result is not None
        gated, h_scale = torch_bf16.compiled(torch_fp8.gated_product), inputs.scales.result.scale.view(())
        x, scale = inputs.normalised_codes()
        return lambda weight: gated(x, scale, weight, h_scale), lambda h: [h]
    added = torch_bf16.compiled(torch_fp8.added_product)
    gain = torch.ones(config.hidden_size, dtype=torch.bfloat16, device=inputs.device)
    scale, next_scale = inputs.x_scale.view(()), scale_of(inputs.residual, room=2).view(())  # once normalised
    return (
        lambda weight: added(inputs.operand, scale, weight, inputs.residual, gain, shape.eps, next_scale),
        lambda outputs: outputs[:1],
    )


def epilogue_call(inputs: ProjectionInputs) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Sequence[Tensor]]]:
    """Return compiled code for the projection of a given weight, and what puts its outputs into our order."""
    config, x = inputs.config, inputs.x
    gain = torch.ones(config.hidden_size, dtype=torch.bfloat16, device=x.device)
    if inputs.op == "qkv":
        function = torch_bf16.compiled(torch_bf16.qkv_into_cache)
        cos, sin = inputs.natural_rope()
        cache = (inputs.rows, config.num_key_value_heads, config.head_dim)
        k_cache, v_cache = (x.new_empty(cache) for _ in range(2))
        shape = torch_bf16.Shape.of(config)
        return (
            lambda weight: function(x, weight, gain, shape, cos, sin, k_cache, v_cache),
            lambda q: inputs.qkv_rival_outputs(q, k_cache, v_cache),
        )
    if inputs.op == "gate_up":
        gated = torch_bf16.compiled(torch_bf16.normalised_gated_product)
        return lambda weight: gated(x, weight, gain, config.rms_norm_eps), lambda h: [h]
    added = torch_bf16.compiled(torch_bf16.added_product)
    return lambda weight: added(x, weight, inputs.residual), lambda out: [out]
