"""decode_gemm/{8b,70b}/{qkv,o,gate_up,down,chain}/bf16/B=...: a decode projection with its epilogue; all in sequence.

Weights are cold, calls graphed. ``torch-bf16`` is the bare product of the same shape, without norm, RoPE, SwiGLU or
residual; its chain is the four products one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import torch

from futransformer.bench.case import MEMORY_BOUND, Case, Contender, Problem
from futransformer.bench.graphs import graphed
from futransformer.bench.llama import sets_for
from futransformer.bench.runner import Bench
from futransformer.bench.shapes import BLOCK_OPS, block_gemm_work, gemm_work, shape_config
from futransformer.bench.subjects.projection import ProjectionInputs
from futransformer.ops.interface import Projection

BATCHES = (1, 2, 4, 8, 16, 32, 64)
DEFAULT_BATCHES = (1, 8, 32)
OPS: tuple[Projection | Literal["chain"], ...] = (*BLOCK_OPS, "chain")


def cases() -> Sequence[Case]:
    """See futransformer.bench.subjects."""
    return [
        Case(
            f"decode_gemm/{shape}/{op}/bf16/B={batch}",
            "us",
            MEMORY_BOUND,
            partial(open_chain, shape, batch) if op == "chain" else partial(open_case, shape, op, batch),
            default=shape == "8b" and batch in DEFAULT_BATCHES,
        )
        for shape in ("8b", "70b")
        for batch in BATCHES
        for op in OPS
    ]


def open_case(shape: str, op: Projection, batch: int, bench: Bench) -> Problem:
    """One projection."""
    inputs = ProjectionInputs(bench, shape, op, batch, "decode")
    work = gemm_work(inputs.config, op, batch)
    floor = work.floor_seconds(bench.ceilings)

    def product() -> Contender:
        calls: list[Callable[[], object]] = [partial(torch.mm, inputs.x, weight.t()) for weight in inputs.copies()]
        return inputs.timed(calls, list, floor)

    return Problem(
        work=work,
        ours=inputs.contender(bench.library(shape), floor),
        rivals={"torch-bf16": product},
        expected=inputs.expected,
    )


def open_chain(shape: str, batch: int, bench: Bench) -> Problem:
    """The four in sequence, each fed by random inputs of its own; checked one by one, timed as one call."""
    ops = bench.library(shape)
    sets = sets_for(block_gemm_work(shape_config(shape), batch).bytes)
    parts = [ProjectionInputs(bench, shape, op, batch, "decode", sets=sets) for op in BLOCK_OPS]
    work = block_gemm_work(parts[0].config, batch)
    floor = work.floor_seconds(bench.ceilings)
    streams = [part.stream_calls(ops) for part in parts]
    chain = [partial(_in_turn, calls) for calls in zip(*streams, strict=True)]

    def outputs() -> Sequence[torch.Tensor]:
        return [tensor for part in parts for tensor in part.our_outputs(ops)]

    def products() -> Contender:
        copies = [part.copies() for part in parts]
        calls = [
            partial(
                _in_turn, [partial(torch.mm, part.x, weight.t()) for part, weight in zip(parts, layer, strict=True)]
            )
            for layer in zip(*copies, strict=True)
        ]
        return graphed(calls, list, floor)

    return Problem(
        work=work,
        ours=graphed(chain, outputs, floor, ops.chain()),
        rivals={"torch-bf16": products},
        expected=lambda: [want for part in parts for want in part.expected()],
    )


def _in_turn(calls: Sequence[Callable[[], object]]) -> None:
    for call in calls:
        call()
