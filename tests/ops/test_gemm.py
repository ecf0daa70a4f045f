"""Prefill projections: the whole epilogue chains against the float32 reference, and the spec's legality."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from futransformer.generator.config import LlamaConfig, load_config
from futransformer.generator.errors import InputError, UnsupportedError
from futransformer.generator.heuristics import MAX_ROWS, gemm_specs
from futransformer.generator.kv_format import KvFormat
from futransformer.generator.plan import make_plan, projections
from futransformer.generator.precision import BF16, E4M3, E4M3_MAX, INT4, get_precision
from futransformer.generator.schedules import SHIPPED
from futransformer.generator.specs import PAGE_SIZE, GemmSpec, Tile
from futransformer.kv_packing import token_bytes, unpack_pages
from futransformer.library import KernelLibrary
from futransformer.ops import gemm
from futransformer.ops.interface import PHASES, PROJECTIONS, Fp8Output, Phase, Projection
from futransformer.quantize.int4 import Int4Weight, round_to_nearest
from futransformer.reference import ReferenceOps, allowed_error, largest_error, sums_error
from tests.ops.fp8 import E4M3_ROUNDING, KV_SCALE, UNBOUNDED, check_fp8_statistics, fp8_output, quantised, unbounded
from tests.ops.int4 import SPLIT_BATCH, as_integers
from tests.ops.kv4 import copied
from tests.ops.models import KV4, KV4_INT4
from tests.ops.stand_in import stand_in_library
from tests.ops.tolerance import worst_block

BF16_MODELS, FP8_MODELS = ("smollm2-135m", "llama-3.1-8b"), ("smollm2-135m-fp8", "llama-3.1-8b-fp8")
MODELS = BF16_MODELS + FP8_MODELS
CASES = [*product(BF16_MODELS, PROJECTIONS), *product(FP8_MODELS, [op for op in PROJECTIONS if op != "lm_head"])]
TINY = LlamaConfig("tiny", 128, 192, 1, 4, 2, 64, 300, 4096, 1e-5, 1e4)
ROWS = (1, 2, 3, 16, 17, 64, 65, 127, 129, 256, 1088)
BF16_PRECISION = get_precision("bf16")


class Problem:
    """Random inputs of one projection at ``rows`` rows, and the reference's answers to them.

    Where the phase's GEMMs read FP8 the operands are codes, to kernels and reference alike, and of an FP8 result the
    largest 30 % of the range lie beyond the largest code. Where pages hold codes, a few of K and V do.
    """

    def __init__(self, ops: KernelLibrary, op: Projection, rows: int, phase: Phase = "prefill") -> None:
        config, device = ops.config, ops.device
        self.ops, self.op, self.rows, self.phase = ops, op, rows, phase
        generator = torch.Generator(device).manual_seed(rows * 131 + len(op))

        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(*shape, generator=generator, device=device) * scale).bfloat16()

        n, k = projections(config)[op]
        n = config.vocab_size if op == "lm_head" else n
        self.logical = normal(n, k, scale=k**-0.5)
        self.x = normal(rows, k) * torch.linspace(0.1, 8, rows, device=device)[:, None].bfloat16()
        parts = self.x.float().square().view(rows, 8, -1).sum(-1)
        self.sumsq = torch.cat([parts, torch.zeros(rows, 3, device=device)], 1).contiguous()  # 11 parts
        self.residual = normal(rows, config.hidden_size, scale=4.0)
        heads, positions = ops.plan.attention_prefill.heads, 4096
        angles = torch.rand(positions, heads.head_dim // 2, generator=generator, device=device) * 6.283
        self.rope_table = torch.stack([angles.cos(), angles.sin()], -1).contiguous()
        self.positions = torch.randint(positions, (rows,), generator=generator, device=device, dtype=torch.int32)
        pages = -(-rows // 64) + 2
        self.pages = (pages, heads.num_key_value_heads, 64, heads.head_dim)
        self.slots = torch.randperm(pages * 64, generator=generator, device=device)[:rows]
        if rows > 2:
            self.slots[1] = -1
        self.integers: Tensor | None = None  # what kernels of INT4 weights make of x
        self.scale: Tensor | None = None  # of the sums, for the logical weight's rows
        self.out_scale: Tensor | None = None
        self.kv_scale = torch.tensor(KV_SCALE, device=device) if ops.precision.kv == E4M3 else None
        self.copy = ops.precision.copy if op == "qkv" else None
        if self.copy is not None:  # of any bytes before
            shape = (*self.pages[:2], self.copy.page_bytes(heads.head_dim))
            self.copy_before = torch.randint(256, shape, generator=generator, device=device, dtype=torch.uint8)
        if ops.precision.prefill == E4M3 and phase == "prefill" and op != "lm_head":
            self._quantise()
        packed: Tensor | Int4Weight = self.logical
        if ops.precision.decode == INT4 and phase == "decode" and op != "lm_head":
            groups = ops.precision.group_size
            zero_points = ops.precision.zero_points
            packed = round_to_nearest(op, self.logical, groups, zero_points=zero_points, search="mse")
            assert zero_points or (packed.scales < 0).any(), "symmetric scales may be negative"
            self.logical = packed.dequantise()
            if rows <= SPLIT_BATCH:
                self.integers = as_integers(self.x, next(iter(ops.plan.decode[op].values())).group_k)
        self.weight = ops.pack(op, phase, packed)

    def _quantise(self) -> None:
        self.logical, of_weight = quantised(self.logical, by_row=self.ops.precision.weight_scales == "channel")
        self.x, of_x = quantised(self.x)
        self.scale = of_weight * of_x
        if self.op != "qkv":
            self.out_scale = torch.ones(1, device=self.ops.device)
            self.out_scale = exact(self)["amax"] * (0.7 / E4M3_MAX)

    def poisoned_pages(self, dtype: torch.dtype) -> list[Tensor]:
        return [torch.full(self.pages, torch.nan, dtype=dtype, device=self.ops.device) for _ in range(2)]

    def run(self, ops: KernelLibrary | ReferenceOps, out_scale: Tensor | None = None) -> dict[str, Tensor]:
        """Every tensor that the projection writes; FP8 results, x and h, as codes, at ``out_scale`` if it is given."""
        dtype = ops.dtype if isinstance(ops, ReferenceOps) else torch.bfloat16
        weight = self.logical.float() if isinstance(ops, ReferenceOps) else self.weight
        phase, x = self.phase, self.x
        if self.integers is not None and isinstance(ops, ReferenceOps):
            x = self.integers
        options: dict[str, Any] = {}
        written: dict[str, Tensor] = {}
        if self.scale is not None:
            options["scale"] = ops.pack_scale(self.op, self.scale)
        if self.out_scale is not None:
            options["fp8"] = fp8 = fp8_output(self.out_scale if out_scale is None else out_scale)
            written = {"amax": fp8.amax, "saturated": fp8.saturated}
        if self.op == "qkv":
            in_codes = self.kv_scale is not None and dtype == torch.bfloat16
            k_pages, v_pages = self.poisoned_pages(torch.float8_e4m3fn if in_codes else dtype)
            options["kv_scale"] = self.kv_scale
            if self.copy is not None:
                options["kv_copy"] = written["kv_copy"] = self.copy_before.clone()
            state = (self.rope_table, self.positions, self.slots, k_pages, v_pages)
            q = ops.qkv(phase, x, self.sumsq, weight, *state, **options)
            return {"q": q, "k_pages": k_pages, "v_pages": v_pages, **written}
        if self.op in ("o", "down"):
            stream = getattr(ops, self.op)(phase, x, weight, self.residual.to(dtype).clone(), **options)
            if self.out_scale is not None:
                written["residual"] = stream.residual
            return {"x": stream.x, "sumsq": stream.sumsq, **written}
        result = getattr(ops, self.op)(phase, x, self.sumsq, weight, **options)
        return {"logits" if self.op == "lm_head" else "h": result, **written}


def same_dtype_torch(problem: Problem) -> dict[str, Tensor]:
    """Answer as PyTorch in the storage types would: the yardstick of the two-times rule."""
    return problem.run(ReferenceOps(problem.ops.config, device=problem.ops.device, copy=problem.copy))


def exact(problem: Problem) -> dict[str, Tensor]:
    """Codes of FP8 results are neither rounded nor cut off."""
    reference = ReferenceOps(problem.ops.config, device=problem.ops.device, dtype=torch.float32, copy=problem.copy)
    if problem.out_scale is None:
        return problem.run(reference)
    outputs = problem.run(reference, unbounded(problem.out_scale))
    outputs["h" if problem.op == "gate_up" else "x"] *= UNBOUNDED
    return outputs


def check_against_reference(problem: Problem, outputs: dict[str, Tensor]) -> None:
    """Every output within the precision's tolerance, NaN exactly where nothing may be written."""
    want, same_dtype, precision = exact(problem), same_dtype_torch(problem), problem.ops.precision
    assert outputs.keys() == want.keys()
    k, fp8 = problem.logical.shape[1], problem.scale is not None
    # A tensor core cuts off what falls below a sum's last place: of BF16 each of K / 16 additions may lose 2^-23 of it.
    lost = sums_error(k, precision.accumulation) if fp8 else k / 16 * 2.0**-23
    if problem.out_scale is not None:
        written = Fp8Output(problem.out_scale, outputs["amax"], outputs["saturated"])
        check_fp8_statistics(written, want["h" if problem.op == "gate_up" else "x"], 4 * lost)
    if problem.copy is not None:
        check_copy(problem, problem.copy, outputs, same_dtype)
    for name in outputs.keys() - {"amax", "saturated", "kv_copy"}:
        if name == "sumsq":  # its parts differ, its sum must not
            rtol = max(1e-5, (2 if fp8 else 1) * lost)
            torch.testing.assert_close(outputs[name].sum(1), want[name].sum(1), rtol=rtol, atol=0)
            continue
        actual, wanted, rounded = (tensors[name].float() for tensors in (outputs, want, same_dtype))
        is_fp8 = (
            problem.kv_scale is not None if "pages" in name else problem.out_scale is not None and name in ("x", "h")
        )
        if is_fp8:  # a common scale changes nothing about errors that are relative to the largest value
            wanted = wanted.clamp(-E4M3_MAX, E4M3_MAX)
        assert torch.equal(actual.isnan(), wanted.isnan())
        actual, wanted, rounded = (t.nan_to_num(0) for t in (actual, wanted, rounded))
        # Logits are float32 sums of 4096 products: 2^-24 a step is 2^-12 at worst, 2^-18 as a random walk.
        rounding = 2.0**-14 if problem.op == "lm_head" else 2.0**-9
        allowed = allowed_error(rounded, wanted, precision)
        if problem.op == "lm_head":
            allowed = rounding * float(wanted.abs().max())
        worst = 4 * rounding  # of a block of 16 columns
        if fp8 and precision.accumulation == "fast":
            allowed += lost * float(wanted.abs().max())
            worst += 4 * lost
        if is_fp8:
            worst += E4M3_ROUNDING
        error = largest_error(actual, wanted)
        assert error <= allowed, f"{problem.op} {name}: error {error:.3e}, allowed {allowed:.3e}"
        relative = worst_block(actual, wanted)
        assert relative <= worst, f"{problem.op} {name}: a 16-column block is off by {relative:.3e}"


def check_copy(problem: Problem, form: KvFormat, outputs: dict[str, Tensor], same_dtype: dict[str, Tensor]) -> None:
    """To the byte that of the BF16 pages; beside pages of codes, worth what the reference's is but for roundings.

    Either has its own scales, and is off by half a step of them, or a whole one where the code 8 is missing.
    """
    copy = outputs["kv_copy"]
    if problem.kv_scale is None:
        assert torch.equal(
            copy, copied(problem.copy_before, outputs["k_pages"], outputs["v_pages"], problem.slots, form)
        )
        return
    head_dim, slots = problem.pages[3], problem.slots[problem.slots >= 0]
    page, token = slots // PAGE_SIZE, slots % PAGE_SIZE
    own = token_bytes(head_dim, form).to(copy.device)[token]
    untouched = problem.copy_before.clone()
    untouched[page[:, None], :, own] = copy[page[:, None], :, own]
    assert torch.equal(copy, untouched)
    fp8 = problem.scale is not None
    lost = sums_error(problem.logical.shape[1], problem.ops.precision.accumulation) if fp8 else 0.0
    for written, wanted in zip(
        *(unpack_pages(each["kv_copy"], head_dim, form) for each in (outputs, same_dtype)), strict=True
    ):
        steps = written.scales.float().abs() + wanted.scales.float().abs()
        off = (written.worth() - wanted.worth()).abs() - steps.repeat_interleave(head_dim // steps.shape[-1], -1)
        largest = wanted.worth()[page, :, token].abs().max()
        assert off[page, :, token].max() <= (4 * lost + 2.0**-7) * largest


def assert_same_bits(outputs: dict[str, Tensor], again: dict[str, Tensor], what: str) -> None:
    for name, first in outputs.items():
        assert torch.equal(first.view(torch.uint8), again[name].view(torch.uint8)), f"{name}: {what}"


@pytest.mark.gpu
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("model", "op"), CASES)
def test_projection(gpu_ops: Callable[[str], KernelLibrary], model: str, op: Projection, rows: int) -> None:
    problem = Problem(gpu_ops(model), op, rows)
    outputs = problem.run(problem.ops)
    check_against_reference(problem, outputs)
    assert_same_bits(outputs, problem.run(problem.ops), "two runs differ")


@pytest.mark.gpu
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("model", ["smollm2-135m-kv8", "llama-3.1-8b-kv8"])
def test_qkv_writes_codes(gpu_ops: Callable[[str], KernelLibrary], model: str, phase: Phase, rows: int) -> None:
    problem = Problem(gpu_ops(model), "qkv", rows, phase)
    outputs = problem.run(problem.ops)
    check_against_reference(problem, outputs)
    assert_same_bits(outputs, problem.run(problem.ops), "two runs differ")


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("precision", ["bf16-kv8", "fp8-kv8"])
def test_qkv_writes_codes_on_the_stand_in(monkeypatch: pytest.MonkeyPatch, precision: str, phase: Phase) -> None:
    problem = Problem(stand_in_library(TINY, monkeypatch, precision=precision), "qkv", 17, phase)
    outputs = problem.run(problem.ops)
    assert outputs["v_pages"].dtype == torch.float8_e4m3fn
    check_against_reference(problem, outputs)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [*ROWS, 8, 31, 33])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("model", [*KV4, *KV4_INT4])
def test_qkv_writes_a_copy(gpu_ops: Callable[[str], KernelLibrary], model: str, phase: Phase, rows: int) -> None:
    problem = Problem(gpu_ops(model), "qkv", rows, phase)
    outputs = problem.run(problem.ops)
    check_against_reference(problem, outputs)
    assert_same_bits(outputs, problem.run(problem.ops), "two runs differ")


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("precision", ["bf16-kv4", "bf16-kv8-kv4-min", "int4-g32-kv4-head-h64"])
def test_qkv_writes_a_copy_on_the_stand_in(monkeypatch: pytest.MonkeyPatch, precision: str, phase: Phase) -> None:
    problem = Problem(stand_in_library(TINY, monkeypatch, precision=precision), "qkv", 17, phase)
    check_against_reference(problem, problem.run(problem.ops))


@pytest.mark.gpu
@pytest.mark.parametrize("model", MODELS)
def test_row_scale_of_an_earlier_tile_is_not_reused(gpu_ops: Callable[[str], KernelLibrary], model: str) -> None:
    """All-one operands whose rows differ only by their scale, with more tiles than multiprocessors."""
    ops = gpu_ops(model)
    rows, (n, k) = 128 * 150, projections(ops.config)["gate_up"]
    per_k = (torch.ones(1, device=ops.device) / k).bfloat16()
    ones, x = (torch.ones(shape, dtype=torch.bfloat16, device=ops.device) for shape in ((n, k), (rows, k)))
    scale = torch.where(torch.arange(rows, device=ops.device) // 128 % 2 == 0, 2.0, 4.0)
    sumsq = (k / scale.square())[:, None].contiguous()
    value = scale * per_k.float() * k
    want = torch.nn.functional.silu(value) * value
    if ops.precision.prefill == E4M3:
        fp8 = fp8_output(torch.full((1,), 2.0**-4, device=ops.device))
        weight, of_sums = ops.pack("gate_up", "prefill", ones.to(torch.float8_e4m3fn)), per_k.float()
        codes = ops.gate_up("prefill", x.to(torch.float8_e4m3fn), sumsq, weight, scale=of_sums, fp8=fp8)
        out, rounding = codes.float() * fp8.scale, E4M3_ROUNDING
    else:
        out = ops.gate_up("prefill", x, sumsq, ops.pack("gate_up", "prefill", ones * per_k)).float()
        rounding = 2.0**-8
    worst = ((out - want[:, None]).abs() / want[:, None]).max()
    assert worst <= 1.1 * rounding


class OneSign:
    """down of codes between 1 and 2 alone, so that every product cut off is missing from its sum."""

    def __init__(self, ops: KernelLibrary) -> None:
        generator = torch.Generator(ops.device).manual_seed(6)
        self.ops, (n, self.k) = ops, projections(ops.config)["down"]

        def codes(rows: int) -> Tensor:
            return (1 + torch.rand(rows, self.k, generator=generator, device=ops.device)).to(torch.float8_e4m3fn)

        self.x, self.weight = codes(17), codes(n)
        self.exact = self.x.double() @ self.weight.double().T / self.k

    def run(self) -> float:
        """The largest part of a sum that is lost."""
        ops = self.ops
        residual = torch.zeros_like(self.exact, dtype=torch.bfloat16)
        per_row = len(self.weight) if ops.precision.weight_scales == "channel" else 1
        scale = ops.pack_scale("down", torch.full((per_row,), 1 / self.k, device=ops.device))
        fp8 = fp8_output(torch.ones(1, device=ops.device))
        weight = ops.pack("down", "prefill", self.weight)
        stream = ops.down("prefill", self.x, weight, residual, scale=scale, fp8=fp8)
        assert stream.residual is not None
        return self.lost(stream.residual)

    def lost(self, sums: Tensor) -> float:
        """The largest part of a sum that ``sums`` lack; none of them is too large."""
        missing = (self.exact - sums.double()) / self.exact
        assert missing.min() >= -(2.0**-8)
        return float(missing.max())


# Each product loses less than 2^-13 of its part's sum, and so does the sum with each of the part's four instructions.
MOST_OF_PROMOTED = (128 + 4) * 2.0**-13 + 2.0**-8  # and the rounding to BF16


@pytest.mark.gpu
def test_fast_sums_of_one_sign_lose_what_pytorchs_lose(gpu_ops: Callable[[str], KernelLibrary]) -> None:
    """K = 14336, the two-times rule."""
    problem = OneSign(gpu_ops("llama-3.1-8b-fp8"))
    one = torch.ones((), device=problem.ops.device)
    theirs = torch._scaled_mm(problem.x, problem.weight.T, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
    assert problem.run() <= 2 * problem.lost(theirs.double() / problem.k) + 2.0**-8


@pytest.mark.gpu
def test_promoted_sums_of_one_sign_lose_little(gpu_ops: Callable[[str], KernelLibrary]) -> None:
    assert OneSign(gpu_ops("odd-fp8")).run() <= MOST_OF_PROMOTED


@pytest.mark.parametrize("precision", ["fp8", "fp8-promoted"])
def test_the_check_of_sums_of_one_sign_on_the_stand_in(monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    """Whose sums are exact; of half of the products missing it takes notice."""
    problem = OneSign(stand_in_library(TINY, monkeypatch, precision=precision))
    assert problem.run() <= 2.0**-8
    problem.x[:, ::2] = 0
    assert problem.run() > MOST_OF_PROMOTED


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3, 16, 17, 65, 100])
@pytest.mark.parametrize("op", ["qkv", "o", "gate_up", "down", "lm_head"])
@pytest.mark.parametrize("model", ["smollm2-135m", "smollm2-135m-fp8"])
def test_what_an_earlier_launch_left_in_shared_memory_reaches_no_row(
    gpu_ops: Callable[[str], KernelLibrary], model: str, op: Projection, rows: int
) -> None:
    """Few rows arrive without those behind them, where the ring then holds the NaN of a launch with a whole tile."""
    ops = gpu_ops(model)
    poison = Problem(ops, op, 64 if rows <= 64 else 256)
    poison.x.fill_(torch.nan)
    problem = Problem(ops, op, rows)
    poison.run(ops)
    check_against_reference(problem, problem.run(ops))


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["smollm2-135m", "smollm2-135m-fp8"])
def test_rows_past_the_end_are_untouched(gpu_ops: Callable[[str], KernelLibrary], model: str) -> None:
    """A tile's tail stores nothing: the rows behind a residual of 17 keep their poison."""
    ops = gpu_ops(model)
    problem = Problem(ops, "o", 17)
    room = torch.full((256, ops.config.hidden_size), torch.nan, dtype=torch.bfloat16, device=ops.device)
    room[:17] = problem.residual
    fp8 = None if problem.out_scale is None else fp8_output(problem.out_scale)
    stream = ops.o("prefill", problem.x, problem.weight, room[:17], scale=problem.scale, fp8=fp8)
    assert stream.residual.data_ptr() == room.data_ptr()
    assert room[:17].isfinite().all()
    assert stream.x.float().isfinite().all()
    assert room[17:].isnan().all()


FIELDS: dict[str, object] = {
    "op": "o",
    "element": BF16,
    "n": 576,
    "k": 576,
    "tile": Tile(128, 192, 64),
    "cluster_m": 1,
    "cluster_n": 1,
    "splits": 1,
    "stages": 4,
    "schedule": "cooperative",
    "raster": 8,
}


IN_FP8: dict[str, object] = {"element": E4M3, "tile": Tile(128, 192, 128)}


def changed(**changes: object) -> GemmSpec:
    return GemmSpec(**{**FIELDS, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n": 100}, "multiple of 32"),
        ({"k": 100}, "multiple of 8"),
        ({"tile": Tile(192, 128, 64)}, r"tile\.m must be one of \(64, 128, 256\) where the schedule is cooperative"),
        ({"tile": Tile(64, 128, 64), "schedule": "pingpong"}, r"tile\.m must be one of \(128, 192\)"),
        ({"tile": Tile(128, 100, 64)}, r"tile\.n"),
        ({"tile": Tile(256, 224, 64)}, "more than 208 sums, and tile 256x224x64 makes it 224"),
        ({"tile": Tile(128, 224, 64), "schedule": "pingpong"}, "more than 208 sums"),
        ({"stages": 12}, "shared memory"),
        ({"cluster_m": 4}, "a cluster is"),
        ({"cluster_m": 2, "cluster_n": 2}, "a cluster is"),
        ({"splits": 2, "schedule": "pingpong"}, "only the cooperative schedule can split K"),
        ({"schedule": "stream-k"}, "schedule must be one of cooperative, pingpong"),
        ({"raster": 0}, "raster"),
        ({"accumulation": "promoted"}, "BF16 products are summed in float32: there is nothing to promote"),
        ({"weight_scales": "channel"}, "BF16 weights have no scales"),
        ({**IN_FP8, "tile": Tile(128, 192, 64)}, r"tile\.k must be 128"),
        ({**IN_FP8, "k": 584}, "multiple of 16"),
        ({**IN_FP8, "op": "lm_head"}, "op must be one of qkv, o, gate_up, down"),
        (
            {**IN_FP8, "tile": Tile(128, 224, 128), "accumulation": "promoted"},
            "more than 208 sums, and .* makes it 224",
        ),
    ],
)
def test_illegal_specs_are_refused(changes: dict[str, object], message: str) -> None:
    changed()
    with pytest.raises(UnsupportedError, match=message):
        changed(**changes)


def test_every_choice_is_in_the_name() -> None:
    changes: list[dict[str, object]] = [
        {},
        {"n": 608},
        {"k": 640},
        {"tile": Tile(64, 192, 64)},
        {"cluster_m": 2},
        {"cluster_n": 2},
        {"splits": 2},
        {"stages": 3},
        {"schedule": "pingpong"},
        {"raster": 4},
        IN_FP8,
        {**IN_FP8, "weight_scales": "channel"},
        {**IN_FP8, "accumulation": "promoted"},
    ]
    assert len({changed(**change).name for change in changes}) == len(changes)


class Launched:
    """A kernel that only notes how it is launched, on a card of 132 multiprocessors."""

    sm_count = 132

    def __init__(self, spec: GemmSpec) -> None:
        self.spec = spec
        self.grids: list[tuple[int, int, int]] = []

    def launch(self, grid: tuple[int, int, int], **_: object) -> None:
        self.grids.append(grid)


def test_the_number_of_rows_chooses_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kernel serves up to its bucket's rows; sumsq_out has as many parts as the one that will run."""
    monkeypatch.setattr(gemm, "tensor_map_2d", lambda *_: None)
    plan = make_plan(load_config("llama-3.1-8b"), "bf16").prefill["o"]
    kernels = {rows: Launched(spec) for rows, spec in plan.items()}
    op = gemm.PrefillGemm(dict(reversed(kernels.items())))  # type: ignore[arg-type]
    assert list(kernels) == [64, 128, 256, MAX_ROWS]
    edges = ((1, 64), (64, 64), (65, 128), (128, 128), (129, 256), (256, 256), (257, MAX_ROWS), (100_000, MAX_ROWS))
    for rows, bucket in edges:
        before = len(kernels[bucket].grids)
        op.launch(torch.empty(rows, 4096, device="meta"), torch.empty(0))
        assert len(kernels[bucket].grids) == before + 1
        assert op.sumsq_parts(rows) == plan[bucket].sumsq_parts == -(-4096 // plan[bucket].tile.n)


@pytest.mark.parametrize(
    ("changes", "rows", "grid"),
    [
        ({}, 1, (3, 1, 1)),  # 576 columns are three tiles of 192
        ({}, 128 * 43 + 1, (132, 1, 1)),  # 44 x 3 tiles: one each
        ({}, 100_000, (132, 1, 1)),
        ({"cluster_m": 2}, 1, (6, 1, 1)),
        ({"cluster_n": 2}, 129, (4, 2, 1)),  # two rows of tiles, and 576 columns are two pairs
        ({"splits": 2}, 129, (6, 1, 2)),
        ({"cluster_n": 2}, 100_000, (66, 2, 1)),
        ({"tile": Tile(64, 96, 64)}, 100_000, (264, 1, 1)),  # 64-row tiles stand two on a multiprocessor
    ],
)
def test_the_grid_is_whole_clusters_and_no_more_than_the_card_holds(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], rows: int, grid: tuple[int, int, int]
) -> None:
    monkeypatch.setattr(gemm, "tensor_map_2d", lambda *_: None)
    kernel = Launched(changed(**changes))
    op = gemm.PrefillGemm({MAX_ROWS: kernel})  # type: ignore[dict-item]
    op.launch(torch.empty(rows, 576, device="meta"), torch.empty(0))
    assert kernel.grids == [grid]
    assert all(size % of == 0 for size, of in zip(grid, kernel.spec.cluster, strict=True))


def test_the_boxes_are_a_blocks_share_of_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """What two blocks share, each loads half of; a split of K shares nothing; of x no more than its rows come."""
    boxes: list[tuple[int, int]] = []
    monkeypatch.setattr(gemm, "tensor_map_2d", lambda _, rows, columns: boxes.append((rows, columns)))
    for changes in ({}, {"cluster_m": 2}, {"cluster_n": 2}, {"splits": 2}):
        op = gemm.PrefillGemm({MAX_ROWS: Launched(changed(**changes))})  # type: ignore[dict-item]
        op.launch(torch.empty(4096, 576, device="meta"), torch.empty(0))
    x, half_x, w, half_w = (128, 64), (64, 64), (192, 64), (96, 64)
    assert boxes == [x, w, x, half_w, half_x, w, x, w]

    boxes.clear()
    for rows in (1, 8, 9, 63, 64, 65, 121, 128, 129):
        op.launch(torch.empty(rows, 576, device="meta"), torch.empty(0))
    assert [rows for rows, _ in boxes[::2]] == [8, 8, 16, 64, 64, 72, 128, 128, 128]
    assert changed(cluster_n=2).box_rows(65) == changed(cluster_n=2).box_rows(57) == 64


def test_few_rows_fill_the_card() -> None:
    """At 8B's shapes no projection of up to 256 rows leaves a fifth of the multiprocessors idle in a single wave."""
    plan = make_plan(load_config("llama-3.1-8b"), "bf16")
    for op, by_rows in plan.prefill.items():
        for rows in (64, 128, 256):
            spec = by_rows[rows]
            blocks = -(-spec.n // spec.tile.n) * -(-rows // spec.tile.m) * spec.splits
            waves = -(-blocks // 132)
            assert blocks / (132 * waves) >= 0.8, f"{op}, {rows} rows: {blocks} blocks"


def test_the_table_is_legal_and_wins() -> None:
    """Every row of gemm_table.json is a spec, and is what its shape's plan holds."""
    rows = json.loads(SHIPPED.read_text())["rows"]
    keys = [(row["op"], row["element"], row["n"], row["k"], row["rows"]) for row in rows]
    assert len(set(keys)) == len(keys) > 0
    heads = load_config("llama-3.1-8b").heads
    for row in rows:
        precision = get_precision({"bf16": "bf16", "e4m3": "fp8"}[row["element"]])
        specs = gemm_specs(row["op"], row["n"], row["k"], precision, heads if row["op"] == "qkv" else None)
        spec = specs[row["rows"] or MAX_ROWS]
        assert (spec.tile, spec.cluster) == (Tile(*row["tile"]), tuple(row["cluster"]))
        assert (spec.stages, spec.schedule, spec.raster) == (row["stages"], row["schedule"], row["raster"])


@pytest.mark.gpu
def test_wrong_tensors_are_named(gpu_ops: Callable[[str], KernelLibrary]) -> None:
    ops = gpu_ops("smollm2-135m")
    problem = Problem(ops, "o", 3)
    with pytest.raises(InputError, match="o: x must have shape"):
        ops.o("prefill", problem.x[:, :64].contiguous(), problem.weight, problem.residual)
    with pytest.raises(InputError, match=r"o: residual must be torch\.bfloat16"):
        ops.o("prefill", problem.x, problem.weight, problem.residual.float())
