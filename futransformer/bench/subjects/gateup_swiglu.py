"""gateup_swiglu/{8b,70b}/bf16/M=...: the gate and up projections with their SwiGLU; ours also applies the norm's rstd.

Rivals get x already normalised, so they do less.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from futransformer.bench.case import COMPUTE_BOUND, Case, Contender, Problem, RivalMissingError
from futransformer.bench.rivals import coda, quack, torch_bf16
from futransformer.bench.runner import Bench
from futransformer.bench.shapes import gemm_work
from futransformer.bench.subjects.projection import ProjectionInputs

ROWS = (2048, 8192, 16384)
CODA_ROWS = 8192
DEFAULT = {("8b", 2048), ("8b", 8192), ("8b", 16384), ("70b", 8192)}


def cases() -> Sequence[Case]:
    """See futransformer.bench.subjects."""
    return [
        Case(
            f"gateup_swiglu/{shape}/bf16/M={rows}",
            "TFLOP/s",
            COMPUTE_BOUND,
            partial(open_case, shape, rows),
            default=(shape, rows) in DEFAULT,
        )
        for shape in ("8b", "70b")
        for rows in ROWS
    ]


def open_case(shape: str, rows: int, bench: Bench) -> Problem:
    """Draw inputs; each rival lays its weight out when its turn comes."""
    inputs = ProjectionInputs(bench, shape, "gate_up", rows, "prefill", sets=1)
    normalised = inputs.normalised()

    def contender(call: Callable[[], object]) -> Contender:
        return Contender(run=call, outputs=lambda: [call()])  # type: ignore[list-item]

    def compiled_torch() -> Contender:
        function = torch_bf16.compiled(torch_bf16.gated_product)
        return contender(lambda: function(normalised, inputs.natural))

    def quack_gated(store_preact: bool) -> Contender:
        weight = quack.interleaved(inputs.natural)
        return contender(quack.gated_product(normalised, weight, store_preact=store_preact, tuned=bench.tuned))

    def coda_gated() -> Contender:
        if rows != CODA_ROWS or not bench.tuned:
            raise RivalMissingError(f"it tunes itself over 150 kernels, which is done at {CODA_ROWS} rows only")
        return contender(coda.gated_product(normalised, quack.interleaved(inputs.natural)))

    return Problem(
        work=gemm_work(inputs.config, "gate_up", rows),
        ours=inputs.contender(bench.library(shape)),
        rivals={
            "torch-bf16": compiled_torch,
            "quack-bf16": lambda: quack_gated(False),
            "quack-bf16-prepost": lambda: quack_gated(True),
            "coda-bf16": coda_gated,
        },
        expected=inputs.expected,
    )
