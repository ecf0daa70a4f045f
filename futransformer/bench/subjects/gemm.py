"""gemm/{8b,70b}/{qkv,o,gate_up,down}/bf16/M=...: a prefill projection with its whole epilogue.

``torch-bf16`` is ``torch.mm`` alone, without any epilogue; ``torch-bf16-epilogue`` compiled code for the same work.
Below ``COMPUTE_ROWS`` rows memory and launches decide: calls are then graphed, and timed in one regime.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from futransformer.bench.case import COMPUTE_BOUND, MEMORY_BOUND, Case, Contender, Problem
from futransformer.bench.rivals import torch_bf16
from futransformer.bench.runner import Bench
from futransformer.bench.shapes import BLOCK_OPS, gemm_work
from futransformer.bench.subjects.projection import ProjectionInputs
from futransformer.ops.interface import Projection

COMPUTE_ROWS = 1024
ROWS = (16, 64, 256, 512, 2048, 8192, 16384)
DEFAULT_ROWS = (16, 64, 256, 2048, 8192)


def cases() -> Sequence[Case]:
    """See futransformer.bench.subjects."""
    return [
        Case(
            f"gemm/{shape}/{op}/bf16/M={rows}",
            "TFLOP/s",
            COMPUTE_BOUND if rows >= COMPUTE_ROWS else MEMORY_BOUND,
            partial(open_case, shape, op, rows),
            default=shape == "8b" and rows in DEFAULT_ROWS,
        )
        for shape in ("8b", "70b")
        for rows in ROWS
        for op in BLOCK_OPS
    ]


def open_case(shape: str, op: Projection, rows: int, bench: Bench) -> Problem:
    """Draw inputs; every contender has the same number of distinct weights."""
    inputs = ProjectionInputs(bench, shape, op, rows, "prefill")
    work = gemm_work(inputs.config, op, rows)
    floor = None if rows >= COMPUTE_ROWS else work.floor_seconds(bench.ceilings)

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
        ours=inputs.contender(bench.library(shape), floor),
        rivals={"torch-bf16": product, "torch-bf16-epilogue": compiled_epilogue},
        expected=inputs.expected,
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
