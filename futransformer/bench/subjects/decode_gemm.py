"""decode_gemm/{8b,70b}/{qkv,o,gate_up,down,chain}/{bf16,int4,fp8}/B=...: a projection with its epilogue; all in turn.

Weights are cold, calls graphed, of ours each launched while the one before it ends. ``torch-bf16`` is the bare product
of the same shape, without norm, RoPE, SwiGLU or residual, ``torch-int4`` that of PyTorch's INT4 weights; their chain is
the four products one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import torch

from futransformer.bench.case import MEMORY_BOUND, Case, Contender, Problem
from futransformer.bench.graphs import graphed
from futransformer.bench.llama import sets_for
from futransformer.bench.rivals import torch_int4
from futransformer.bench.runner import Bench
from futransformer.bench.shapes import (
    BLOCK_OPS,
    DECODE_PRECISIONS,
    decode_chain_work,
    decode_gemm_work,
    shape_config,
)
from futransformer.bench.subjects.projection import ProjectionInputs
from futransformer.generator.precision import INT4, get_precision
from futransformer.ops.interface import Projection

BATCHES = (1, 2, 4, 8, 16, 32, 64)
DEFAULT_BATCHES = {"bf16": (1, 8, 32), "int4": (1, 8, 16, 32), "fp8": (1, 8, 16, 32)}  # by what decode reads
Products = Callable[[ProjectionInputs], list[Callable[[], object]]]  # one bare product a weight
OPS: tuple[Projection | Literal["chain"], ...] = (*BLOCK_OPS, "chain")


def cases() -> Sequence[Case]:
    """See futransformer.bench.subjects."""
    return [
        Case(
            f"decode_gemm/{shape}/{op}/{read}/B={batch}",
            "us",
            MEMORY_BOUND,
            partial(open_chain, shape, batch, precision=DECODE_PRECISIONS[read])
            if op == "chain"
            else partial(open_case, shape, op, batch, precision=DECODE_PRECISIONS[read]),
            default=shape == "8b" and batch in DEFAULT_BATCHES[read],
            precision=DECODE_PRECISIONS[read],
        )
        for read in DEFAULT_BATCHES
        for shape in ("8b", "70b")
        for batch in BATCHES
        for op in OPS
    ]


def open_case(shape: str, op: Projection, batch: int, bench: Bench, *, precision: str = "bf16") -> Problem:
    """One projection."""
    inputs = ProjectionInputs(bench, shape, op, batch, "decode", precision=precision)
    work = decode_gemm_work(inputs.config, op, batch, precision)
    floor = work.floor_seconds(bench.ceilings)

    def contender(products: Products) -> Contender:
        return inputs.timed(products(inputs), list, floor)

    return Problem(
        work=work,
        ours=inputs.contender(bench.library(shape, precision), floor),
        rivals={name: partial(contender, products) for name, products in rivals(precision).items()},
        expected=inputs.expected,
    )


def rivals(precision: str) -> dict[str, Products]:
    """By name, what makes a bare product of each of a projection's weights."""

    def bf16(inputs: ProjectionInputs) -> list[Callable[[], object]]:
        return [partial(torch.mm, inputs.x, weight.t()) for weight in inputs.copies()]

    def int4(inputs: ProjectionInputs) -> list[Callable[[], object]]:
        return [partial(torch_int4.product, inputs.x, weight) for weight in inputs.int4_copies()]

    products: dict[str, Products] = {"torch-bf16": bf16}
    return products | ({"torch-int4": int4} if get_precision(precision).decode == INT4 else {})


def open_chain(shape: str, batch: int, bench: Bench, *, precision: str = "bf16") -> Problem:
    """The four in sequence, each fed by random inputs of its own; checked one by one, timed as one call."""
    ops = bench.library(shape, precision)
    work = decode_chain_work(shape_config(shape), batch, precision)
    sets = sets_for(work.bytes)
    parts = [ProjectionInputs(bench, shape, op, batch, "decode", sets=sets, precision=precision) for op in BLOCK_OPS]
    floor = work.floor_seconds(bench.ceilings)
    streams = [part.stream_calls(ops) for part in parts]
    chain = [partial(_in_turn, calls) for calls in zip(*streams, strict=True)]

    def outputs() -> Sequence[torch.Tensor]:
        return [tensor for part in parts for tensor in part.our_outputs(ops)]

    def contender(products: Products) -> Contender:
        layers = zip(*(products(part) for part in parts), strict=True)
        return graphed([partial(_in_turn, calls) for calls in layers], list, floor)

    return Problem(
        work=work,
        ours=graphed(chain, outputs, floor, ops.chain()),
        rivals={name: partial(contender, products) for name, products in rivals(precision).items()},
        expected=lambda: [want for part in parts for want in part.expected()],
    )


def _in_turn(calls: Sequence[Callable[[], object]]) -> None:
    for call in calls:
        call()
