"""gateup_swiglu/{8b,70b}/{bf16,fp8}/M=...: the gate and up projections with their SwiGLU; ours applies the norm's rstd.

Rivals get x already normalised (in FP8: and quantised), so they do less. In FP8 all write the result in codes; beside
them stand the product alone, and what BF16 gains in the best public kernel that writes the pre-activation as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from futransformer.bench.case import COMPUTE_BOUND, Case, Contender, Problem, RivalMissingError
from futransformer.bench.rivals import coda, quack, torch_bf16, torch_fp8
from futransformer.bench.runner import Bench
from futransformer.bench.shapes import gemm_work
from futransformer.bench.subjects.projection import ProjectionInputs

ROWS = (2048, 8192, 16384)
CODA_ROWS = 8192
BF16_ROWS = 8192  # from which FP8 is compared with BF16: fewer rows are no question of arithmetic alone
DEFAULT = {("8b", 2048), ("8b", 8192), ("8b", 16384), ("70b", 8192)}


def cases() -> Sequence[Case]:
    """See futransformer.bench.subjects."""
    return [
        Case(
            f"gateup_swiglu/{shape}/{precision}/M={rows}",
            "TFLOP/s",
            COMPUTE_BOUND,
            partial(open_fp8_case if precision == "fp8" else open_case, shape, rows),
            default=(shape, rows) in DEFAULT,
            precision=precision,
        )
        for precision in ("bf16", "fp8")
        for shape in ("8b", "70b")
        for rows in ROWS
    ]


def open_case(shape: str, rows: int, bench: Bench) -> Problem:
    """Draw inputs; each rival lays its weight out when its turn comes."""
    inputs = ProjectionInputs(bench, shape, "gate_up", rows, "prefill", sets=1)
    normalised = inputs.normalised()

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


def open_fp8_case(shape: str, rows: int, bench: Bench) -> Problem:
    """The same in FP8."""
    inputs = ProjectionInputs(bench, shape, "gate_up", rows, "prefill", sets=1, precision="fp8")
    assert inputs.scales.result is not None
    h_scale = inputs.scales.result.scale.view(())

    def compiled_torch() -> Contender:
        function, weight = torch_bf16.compiled(torch_fp8.gated_product), torch_fp8.Weight.of(inputs.natural)
        codes, scale = inputs.normalised_codes()
        return contender(lambda: function(codes, scale, weight, h_scale))

    def product() -> Contender:
        weight = torch_fp8.Weight.of(inputs.natural)
        codes, scale = inputs.normalised_codes()
        return Contender(run=lambda: torch_fp8.product(codes, scale, weight), outputs=list)

    def quack_gated() -> Contender:
        weight = quack.interleaved(inputs.natural)
        call = quack.gated_product(inputs.normalised(), weight, store_preact=True, tuned=bench.tuned)
        return Contender(run=call, outputs=lambda: [call() / h_scale])

    return Problem(
        work=gemm_work(inputs.config, "gate_up", rows, "fp8"),
        ours=inputs.contender(bench.library(shape, "fp8")),
        rivals={"torch-fp8": compiled_torch},
        expected=inputs.expected,
        beside={"torch-fp8-mm": product, **({"quack-bf16-prepost": quack_gated} if rows >= BF16_ROWS else {})},
    )


def contender(call: Callable[[], Tensor]) -> Contender:
    """A rival that returns its result."""
    return Contender(run=call, outputs=lambda: [call()])
