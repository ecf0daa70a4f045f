"""Every operation at shapes that are round in nothing, and the prefill GEMMs where tiles end.

The problems and tolerances are those of each operation's own tests. The same checks run on the stand-in library, so
that what is asked of a GPU has been seen to pass, and to fail, without one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from futransformer.driver import Kernel
from futransformer.generator.heuristics import MAX_ROWS, padded_vocab
from futransformer.generator.precision import E4M3, E4M3_MAX, get_precision
from futransformer.generator.specs import GemmSpec, KernelSpec
from futransformer.library import KernelLibrary
from futransformer.ops import gemm as gemm_module
from futransformer.ops.gemm import PrefillGemm
from futransformer.ops.interface import PROJECTIONS, Fp8Output, Projection
from futransformer.packing import pack_prefill, pack_scale
from futransformer.reference import ReferenceOps, allowed_error, largest_error, sums_error
from tests.ops import test_attention_decode as decode_attention
from tests.ops import test_attention_prefill as prefill_attention
from tests.ops import test_decode_gemm as decode_gemm
from tests.ops import test_gemm as prefill_gemm
from tests.ops import test_rows as rows_tests
from tests.ops.fp8 import E4M3_ROUNDING, UNBOUNDED, check_fp8_statistics, fp8_output, quantised, unbounded
from tests.ops.models import MADE_UP, TAILS
from tests.ops.stand_in import CPU, StandInKernel, stand_in_library
from tests.ops.tolerance import worst_block

ODD = ("odd", "group5", "llama-3.2-3b", "odd-fp8")
PREFILL_ROWS = (1, 17, 129, 1088)
DECODE_ROWS = (1, 3, 9, 33, 65)
TAIL_ROWS = (1, 127, 128, 129, 300)
PROMPTS = ((0, 0), (1, 1), (65, 65), (17, 81), (129, 257), (3, 130))  # (queries, keys)

GpuOps = Callable[[str], KernelLibrary]
GpuKernel = Callable[[KernelSpec], Kernel]


# Projections


def check_prefill(ops: KernelLibrary, op: Projection, rows: int) -> None:
    problem = prefill_gemm.Problem(ops, op, rows)
    outputs = problem.run(ops)
    prefill_gemm.check_against_reference(problem, outputs)
    prefill_gemm.assert_same_bits(outputs, problem.run(ops), "two runs differ")


def check_decode(ops: KernelLibrary, op: Projection, rows: int) -> None:
    problem = decode_gemm.problem_of(ops, op)
    outputs = problem.launch(0, rows)
    decode_gemm.assert_close(problem, outputs, rows)
    decode_gemm.assert_same_bits(outputs, problem.launch(0, rows), "two runs differ")


@pytest.mark.gpu
@pytest.mark.parametrize("rows", PREFILL_ROWS)
@pytest.mark.parametrize("op", PROJECTIONS)
@pytest.mark.parametrize("model", ODD)
def test_prefill_projection(gpu_ops: GpuOps, model: str, op: Projection, rows: int) -> None:
    check_prefill(gpu_ops(model), op, rows)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", DECODE_ROWS)
@pytest.mark.parametrize("op", PROJECTIONS)
@pytest.mark.parametrize("model", ODD)
def test_decode_projection(gpu_ops: GpuOps, model: str, op: Projection, rows: int) -> None:
    check_decode(gpu_ops(model), op, rows)


# Attention and rows


def check_attention(ops: KernelLibrary) -> None:
    heads = ops.config.heads
    prompts = prefill_attention.Problem(ops, heads, PROMPTS, fp8=ops.plan.attention_prefill.fp8_out)
    prompts.check(prompts.run())
    batch = decode_attention.Problem(ops, heads, [0, 1, 63, 64, 65, 700])
    for options in decode_attention.CHOSEN_AND_FIXED:
        batch.check(batch.run(**options))


def check_rows(ops: KernelLibrary) -> None:
    for phase in rows_tests.PHASES:
        rows_tests.check_gather(ops, ops.config.hidden_size, 17, phase)
    if ops.precision.prefill == E4M3:
        rows_tests.check_gather(ops, ops.config.hidden_size, 17, "prefill", fp8=True)
    logits, expected = rows_tests.argmax_rows(ops.config.vocab_size, ops.device)
    view = rows_tests.padded(logits, padded_vocab(ops.config.vocab_size), 0)
    assert ops.argmax(view).tolist() == expected


@pytest.mark.gpu
@pytest.mark.parametrize("model", ODD)
def test_attention(gpu_ops: GpuOps, model: str) -> None:
    check_attention(gpu_ops(model))


@pytest.mark.gpu
@pytest.mark.parametrize("model", ODD)
def test_rows(gpu_ops: GpuOps, model: str) -> None:
    check_rows(gpu_ops(model))


# The ends of the prefill GEMM's tiles


class TailProblem:
    """A GEMM whose K ends within a step, and whose N within a tile: inputs, poisoned outputs, the reference.

    FP8 results are codes, of which the largest are cut off.
    """

    def __init__(self, spec: GemmSpec, rows: int, device: torch.device) -> None:
        self.spec, self.rows, self.device = spec, rows, device
        self.op = cast(Projection, spec.op)
        generator = torch.Generator(device).manual_seed(rows)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=device)

        self.x = (normal(rows, spec.k) * torch.linspace(0.1, 8, rows, device=device)[:, None]).bfloat16()
        self.logical = (normal(spec.n, spec.k) * spec.k**-0.5).bfloat16()
        self.sumsq = self.x.float().square().sum(1, keepdim=True)
        self.residual = (normal(rows, spec.n) * 4).bfloat16()
        self.scale: Tensor | None = None
        self.out_scale: Tensor | None = None
        if spec.element == E4M3:
            self.logical, of_weight = quantised(self.logical, by_row=spec.weight_scales == "channel")
            self.x, of_x = quantised(self.x)
            self.scale = of_weight * of_x
            self.out_scale = torch.full((1,), (4 if spec.op == "gate_up" else 24) / E4M3_MAX, device=device)

    def run(self, kernel: Kernel) -> dict[str, Tensor]:
        """Launch with room behind the last row, which must stay poison."""
        spec, rows = self.spec, self.rows

        def poisoned(columns: int, dtype: torch.dtype) -> Tensor:
            return torch.full((rows + 300, columns), torch.nan, dtype=dtype, device=self.device)

        columns = spec.n // 2 if spec.op == "gate_up" else spec.n
        outputs = {}
        arguments: dict[str, Any] = {"sumsq": self.sumsq, "sumsq_parts": 1, "rms_norm_eps": 1e-5}
        if spec.op == "o":
            outputs["sumsq_out"] = poisoned(spec.sumsq_parts, torch.float32)
            arguments = {"residual": self.residual}
        if spec.op == "o" or self.out_scale is None:
            outputs["out"] = poisoned(columns, torch.float32 if spec.op == "lm_head" else torch.bfloat16)
        statistics = {}
        if self.out_scale is not None and self.scale is not None:
            outputs["out_fp8"] = poisoned(columns, torch.float8_e4m3fn)
            fp8 = fp8_output(self.out_scale)
            statistics = {"amax": fp8.amax, "saturated": fp8.saturated}
            arguments |= {"scale": pack_scale(self.op, self.scale), "out_scale": fp8.scale, **statistics}
        cut = {name: tensor[:rows] for name, tensor in outputs.items()}
        PrefillGemm({MAX_ROWS: kernel}).launch(self.x, pack_prefill(self.op, self.logical), **arguments, **cut)
        for name, tensor in outputs.items():
            assert tensor[rows:].float().isnan().all(), f"{name}: rows past the end were written"
        return {**cut, **statistics}

    def reference(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Results in BF16 or logits as ``out``, codes as ``out_fp8``, which ``float32`` neither rounds nor cuts off."""
        ops = ReferenceOps(MADE_UP["odd"], device=self.device, dtype=dtype)  # of which no shape is read
        weight, exact = self.logical.float(), dtype == torch.float32
        if self.spec.op == "lm_head":
            return {"out": F.linear(self.x.float(), weight) * torch.rsqrt(self.sumsq / self.spec.k + 1e-5)}
        fp8 = None
        if self.out_scale is not None:
            fp8 = fp8_output(unbounded(self.out_scale) if exact else self.out_scale)
        if self.spec.op == "o":
            residual = self.residual.to(dtype).clone()
            stream = ops.o("prefill", self.x, weight, residual, scale=self.scale, fp8=fp8)
            written = {"out": stream.residual, "out_fp8": stream.x}
        else:
            result = ops.gate_up("prefill", self.x, self.sumsq, weight, scale=self.scale, fp8=fp8)
            written = {"out": result} if fp8 is None else {"out_fp8": result}
        if fp8 is None:
            return {"out": written["out"]}
        return {**written, "out_fp8": written["out_fp8"] * UNBOUNDED} if exact else written

    def check(self, outputs: dict[str, Tensor]) -> None:
        """The rules of test_gemm.check_against_reference."""
        spec, precision = self.spec, get_precision("bf16")
        exact, rounded = (self.reference(dtype) for dtype in (torch.float32, torch.bfloat16))
        lost = 0.0 if self.scale is None else sums_error(spec.k, spec.accumulation)
        entitled = lost if spec.accumulation == "fast" else 0.0
        for name, codes in exact.items():
            in_fp8 = name == "out_fp8"
            out, want = outputs[name].float(), codes.clamp(-E4M3_MAX, E4M3_MAX) if in_fp8 else codes
            # as for logits elsewhere: float32 sums of K products, off by sqrt(K) roundings of 2^-24
            rounding = 2.0**-14 if spec.op == "lm_head" else precision.atol / 2
            limit = rounding * float(want.abs().max())
            if spec.op != "lm_head":
                limit = allowed_error(rounded[name], want, precision) + entitled * float(want.abs().max())
            assert largest_error(out, want) <= limit
            assert worst_block(out, want) <= 4 * (rounding + entitled) + (E4M3_ROUNDING if in_fp8 else 0)
            if in_fp8 and self.out_scale is not None:
                written = Fp8Output(self.out_scale, outputs["amax"], outputs["saturated"])
                check_fp8_statistics(written, codes, 4 * lost)
        if spec.op == "o":
            parts = torch.stack([part.square().sum(1) for part in torch.split(exact["out"], spec.tile.n, 1)], 1)
            torch.testing.assert_close(outputs["sumsq_out"], parts, rtol=max(1e-5, 2 * lost), atol=0)


def check_tails(spec: GemmSpec, kernel: Kernel, device: torch.device, rows: int) -> None:
    problem = TailProblem(spec, rows, device)
    outputs = problem.run(kernel)
    problem.check(outputs)
    for name, again in problem.run(kernel).items():
        assert torch.equal(again.view(torch.uint8), outputs[name].view(torch.uint8)), f"{name}: two runs differ"


@pytest.mark.gpu
@pytest.mark.parametrize("rows", TAIL_ROWS)
@pytest.mark.parametrize("spec", TAILS, ids=lambda spec: spec.name)
def test_tails(gpu_kernel: GpuKernel, spec: GemmSpec, rows: int) -> None:
    kernel = gpu_kernel(spec)
    check_tails(spec, kernel, kernel.device, rows)


# Rows of the prefill by themselves


ROW_INPUTS = ("x", "sumsq", "residual", "positions", "slots")


def variant(problem: prefill_gemm.Problem, **inputs: Tensor) -> prefill_gemm.Problem:
    """The same problem with other inputs."""
    other = copy.copy(problem)
    vars(other).update(inputs)
    return other


def row_of(outputs: dict[str, Tensor], row: int, slot: int) -> dict[str, Tensor]:
    """What one row has written: its row of each output, and its slot of the pages."""
    of_row = {name: tensor for name, tensor in outputs.items() if name not in ("amax", "saturated")}
    return {
        name: tensor[slot // 64, :, slot % 64] if name.endswith("_pages") else tensor[row]
        for name, tensor in of_row.items()
        if slot >= 0 or not name.endswith("_pages")
    }


def check_a_row_does_not_see_its_neighbours(ops: KernelLibrary, op: Projection, rows: int, fewer: int) -> None:
    """A row of ``rows`` has the same bits among NaN, and as the first of ``fewer`` rows, which the same kernel serves.

    Another kernel may serve another number of rows, and add in another order.
    """
    problem = prefill_gemm.Problem(ops, op, rows)
    together = problem.run(ops)
    for row in (0, rows // 2, rows - 1):
        slot = int(problem.slots[row])
        want = row_of(together, row, slot)
        among_nan = torch.full_like(problem.x, torch.nan)
        among_nan[row] = problem.x[row]
        poisoned = row_of(variant(problem, x=among_nan).run(ops), row, slot)
        inputs = {name: getattr(problem, name)[:fewer].clone() for name in ROW_INPUTS}
        inputs["x"].fill_(torch.nan)
        inputs["slots"].fill_(-1)
        for name, values in inputs.items():
            values[0] = getattr(problem, name)[row]
        first = row_of(variant(problem, **inputs).run(ops), 0, slot)
        prefill_gemm.assert_same_bits(want, first, f"row {row} depends on the number of rows")
        prefill_gemm.assert_same_bits(want, poisoned, f"row {row} saw a NaN beside it")


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "fewer"), [(64, 1), (128, 65), (256, 129), (400, 257)])
@pytest.mark.parametrize("op", PROJECTIONS)
@pytest.mark.parametrize("model", prefill_gemm.MODELS)
def test_a_row_of_the_prefill_does_not_see_its_neighbours(
    gpu_ops: GpuOps, model: str, op: Projection, rows: int, fewer: int
) -> None:
    check_a_row_does_not_see_its_neighbours(gpu_ops(model), op, rows, fewer)


def check_an_outlier(ops: KernelLibrary) -> None:
    """One channel at 3e4 in one row, in FP8 at the largest code: finite, right, and of no effect on the other rows."""
    problem = prefill_gemm.Problem(ops, "down", 130)
    fp8 = problem.scale is not None
    if fp8:  # the outlier sets the scale
        problem.x = (problem.x.float() / 16).to(problem.x.dtype)
    before = problem.run(ops)["x"]
    problem.x[1, 5] = E4M3_MAX if fp8 else 3e4
    after = problem.run(ops)
    assert after["x"].float().isfinite().all()
    prefill_gemm.check_against_reference(problem, after)
    rest = [0, *range(2, 130)]
    assert torch.equal(after["x"].float()[rest], before.float()[rest])


@pytest.mark.gpu
@pytest.mark.parametrize("model", prefill_gemm.MODELS)
def test_an_activation_outlier_in_the_prefill(gpu_ops: GpuOps, model: str) -> None:
    check_an_outlier(gpu_ops(model))


# The same checks on the stand-in, which must pass, and on stand-ins with a fault, which must not


BY_CHANNEL = replace(get_precision("fp8"), weight_scales="channel")


@pytest.fixture(
    params=[
        get_precision("bf16"),
        get_precision("fp8"),
        BY_CHANNEL,
        get_precision("int4"),
        get_precision("int4-g32-asym"),
    ],
    ids=["bf16", "fp8", "fp8-channel", "int4", "int4-g32-asym"],
)
def stand_in(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> KernelLibrary:
    config = replace(MADE_UP["odd"], vocab_size=2001)
    return stand_in_library(config, monkeypatch, precision=request.param)


@pytest.mark.parametrize("op", PROJECTIONS)
def test_the_checks_of_projections_pass_on_the_reference(stand_in: KernelLibrary, op: Projection) -> None:
    check_prefill(stand_in, op, 17)
    for rows in (3, 65):
        check_decode(stand_in, op, rows)
    check_a_row_does_not_see_its_neighbours(stand_in, op, 5, 2)


def test_the_other_checks_pass_on_the_reference(stand_in: KernelLibrary) -> None:
    check_attention(stand_in)
    check_rows(stand_in)
    check_an_outlier(stand_in)


FP8_TAIL = next(spec for spec in TAILS if spec.element == E4M3)


@pytest.fixture
def tail_ops(monkeypatch: pytest.MonkeyPatch) -> ReferenceOps:
    monkeypatch.setattr(gemm_module, "tensor_map_2d", lambda tensor, *_: tensor)
    return ReferenceOps(MADE_UP["odd"])


def kinds_of_tails() -> tuple[GemmSpec, ...]:
    """One of every operation, type and granularity."""
    return tuple({(spec.op, spec.element, spec.weight_scales): spec for spec in TAILS}.values())


@pytest.mark.parametrize("spec", kinds_of_tails(), ids=lambda spec: spec.name)
def test_the_checks_of_tails_pass_on_the_reference(tail_ops: ReferenceOps, spec: GemmSpec) -> None:
    check_tails(spec, cast(Kernel, StandInKernel(spec, tail_ops)), CPU, 129)


def lose_the_last_row(arguments: dict[str, Any]) -> None:
    arguments["out"][-1] = torch.nan


def write_past_the_end(arguments: dict[str, Any]) -> None:
    out = arguments["out"]
    torch.as_strided(out, (out.shape[0] + 1, out.shape[1]), out.stride())[-1] = 0


def spoil_a_stripe(arguments: dict[str, Any]) -> None:
    """Sixteen columns of a row by 2 %: far inside the absolute tolerance of values that reach 16."""
    arguments["out"][40, 32:48] *= 1.02


def leave_the_end_of_k(arguments: dict[str, Any]) -> None:
    x, weight = arguments["x"].float(), arguments["weight"].float()
    last = x.shape[1] % 64  # of K, an eighth of which is missed
    missing = x[:, -last:] @ weight[:, -last:].T * arguments.get("scale", 1)
    arguments["out"] -= missing.bfloat16()  # of other columns, for the weight is packed: no matter


def lose_a_part(arguments: dict[str, Any]) -> None:
    arguments["sumsq_out"][:, -1] = 0


def lose_a_code(arguments: dict[str, Any]) -> None:
    arguments["out_fp8"][-1, -1] = torch.nan


def spoil_codes(arguments: dict[str, Any]) -> None:
    """Sixteen columns of a row by 12 %: inside the absolute tolerance, twice what rounding takes of a code."""
    codes = arguments["out_fp8"][40, 32:48]
    codes.copy_(codes.float() * 0.88)


def miss_the_maximum(arguments: dict[str, Any]) -> None:
    arguments["amax"] *= 0.98


def count_a_warp_twice(arguments: dict[str, Any]) -> None:
    arguments["saturated"] += 32


def forget_what_was_counted(arguments: dict[str, Any]) -> None:
    arguments["saturated"] -= 7


FP8_FAULTS: dict[Callable[[dict[str, Any]], None], str] = {
    lose_a_code: "assert inf <=",
    spoil_codes: "worst_block",
    miss_the_maximum: "amax is",
    count_a_warp_twice: "are counted as saturated",
    forget_what_was_counted: "are counted as saturated",
}
FAULTS: dict[Callable[[dict[str, Any]], None], str] = {
    lose_the_last_row: "assert inf <=",
    write_past_the_end: "out: rows past the end were written",
    spoil_a_stripe: "worst_block",
    leave_the_end_of_k: "largest_error",
    lose_a_part: "not close",
}


@pytest.mark.parametrize(
    ("spec", "fault"),
    [*product((TAILS[0], FP8_TAIL), FAULTS), *((FP8_TAIL, fault) for fault in FP8_FAULTS)],
    ids=lambda value: value.element.name if isinstance(value, GemmSpec) else value.__name__,
)
def test_a_fault_is_noticed(tail_ops: ReferenceOps, spec: GemmSpec, fault: Callable[[dict[str, Any]], None]) -> None:
    class Faulty(StandInKernel):
        def launch(self, grid: tuple[int, int, int], **arguments: Any) -> None:
            super().launch(grid, **arguments)
            fault(arguments)

    kernel = cast(Kernel, Faulty(spec, tail_ops))
    with pytest.raises(AssertionError, match={**FAULTS, **FP8_FAULTS}[fault]):
        check_tails(spec, kernel, CPU, 129)


def test_an_output_that_is_left_out_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Faulty(StandInKernel):
        def launch(self, grid: tuple[int, int, int], **arguments: Any) -> None:
            kept = arguments["q"].clone() if "q" in arguments else None
            super().launch(grid, **arguments)
            if kept is not None:
                arguments["q"][3, 64:72] = kept[3, 64:72]

    with pytest.raises(AssertionError):
        check_prefill(stand_in_library(MADE_UP["odd"], monkeypatch, Faulty), "qkv", 17)


def test_a_difference_between_two_runs_is_noticed(tail_ops: ReferenceOps) -> None:
    launches: list[tuple[int, int, int]] = []

    class Faulty(StandInKernel):
        def launch(self, grid: tuple[int, int, int], **arguments: Any) -> None:
            super().launch(grid, **arguments)
            arguments["out"].view(torch.int16)[-1, -1] ^= len(launches)
            launches.append(grid)

    with pytest.raises(AssertionError, match="out: two runs differ"):
        check_tails(TAILS[0], cast(Kernel, Faulty(TAILS[0], tail_ops)), CPU, 129)
