"""Prefill projections: the whole epilogue chains against the float32 reference, and the spec's legality."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from futransformer.generator.errors import InputError, UnsupportedError
from futransformer.generator.plan import projections
from futransformer.generator.precision import BF16, get_precision
from futransformer.generator.specs import GemmSpec, Tile
from futransformer.library import KernelLibrary
from futransformer.ops.interface import Phase, Projection
from futransformer.reference import ReferenceOps, allowed_error, largest_error
from tests.ops.tolerance import worst_block

MODELS = ("smollm2-135m", "llama-3.1-8b")
ROWS = (1, 2, 3, 17, 127, 129, 1088)
BF16_PRECISION = get_precision("bf16")


class Problem:
    """Random inputs of one projection at ``rows`` rows, and the reference's answers to them."""

    def __init__(self, ops: KernelLibrary, op: Projection, rows: int, phase: Phase = "prefill") -> None:
        config, device = ops.config, ops.device
        self.ops, self.op, self.rows, self.phase = ops, op, rows, phase
        generator = torch.Generator(device).manual_seed(rows * 131 + len(op))

        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(*shape, generator=generator, device=device) * scale).bfloat16()

        n, k = projections(config)[op]
        n = config.vocab_size if op == "lm_head" else n
        self.logical = normal(n, k, scale=k**-0.5)
        self.weight = ops.pack(op, phase, self.logical)
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

    def poisoned_pages(self, dtype: torch.dtype) -> list[Tensor]:
        return [torch.full(self.pages, torch.nan, dtype=dtype, device=self.ops.device) for _ in range(2)]

    def run(self, ops: KernelLibrary | ReferenceOps) -> list[Tensor]:
        """Every tensor that the projection writes."""
        dtype = ops.dtype if isinstance(ops, ReferenceOps) else torch.bfloat16
        weight = self.logical.float() if isinstance(ops, ReferenceOps) else self.weight
        phase = self.phase
        if self.op == "qkv":
            k_pages, v_pages = self.poisoned_pages(dtype)
            q = ops.qkv(
                phase, self.x, self.sumsq, weight, self.rope_table, self.positions, self.slots, k_pages, v_pages
            )
            return [q, k_pages, v_pages]
        if self.op in ("o", "down"):
            return list(getattr(ops, self.op)(phase, self.x, weight, self.residual.to(dtype).clone()))
        return [getattr(ops, self.op)(phase, self.x, self.sumsq, weight)]


def same_dtype_torch(problem: Problem) -> list[Tensor]:
    """Answer as PyTorch in BF16 would: the yardstick of the two-times rule."""
    return problem.run(ReferenceOps(problem.ops.config, device=problem.ops.device, dtype=torch.bfloat16))


def exact(problem: Problem) -> list[Tensor]:
    return problem.run(ReferenceOps(problem.ops.config, device=problem.ops.device, dtype=torch.float32))


def check_against_reference(problem: Problem, outputs: list[Tensor]) -> None:
    """Every output within the precision's tolerance, NaN exactly where nothing may be written."""
    for index, (actual, want, torch_bf16) in enumerate(
        zip(outputs, exact(problem), same_dtype_torch(problem), strict=True)
    ):
        if problem.op in ("o", "down") and index == 1:  # sumsq: its parts differ, its sum must not
            stored = outputs[0].float().square().sum(1)
            torch.testing.assert_close(actual.sum(1), stored, rtol=1e-5, atol=0)
            continue
        assert torch.equal(actual.isnan(), want.isnan())
        actual, want, torch_bf16 = (t.float().nan_to_num(0) for t in (actual, want, torch_bf16))  # noqa: PLW2901
        # Logits are float32 sums of 4096 products: 2^-24 a step is 2^-12 at worst, 2^-18 as a random walk.
        rounding = 2.0**-14 if problem.op == "lm_head" else 2.0**-9
        allowed = allowed_error(torch_bf16, want, BF16_PRECISION)
        if problem.op == "lm_head":
            allowed = rounding * float(want.abs().max())
        error = largest_error(actual, want)
        assert error <= allowed, f"{problem.op} output {index}: error {error:.3e}, allowed {allowed:.3e}"
        relative = worst_block(actual, want)
        assert relative <= 4 * rounding, f"{problem.op} output {index}: a 16-column block is off by {relative:.3e}"


@pytest.mark.gpu
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("op", ["qkv", "o", "gate_up", "down", "lm_head"])
@pytest.mark.parametrize("model", MODELS)
def test_projection(gpu_ops: Callable[[str], KernelLibrary], model: str, op: Projection, rows: int) -> None:
    problem = Problem(gpu_ops(model), op, rows)
    outputs = problem.run(problem.ops)
    check_against_reference(problem, outputs)
    for first, second in zip(outputs, problem.run(problem.ops), strict=True):
        assert torch.equal(first.view(torch.uint8), second.view(torch.uint8)), "two runs differ"


@pytest.mark.gpu
@pytest.mark.parametrize("model", MODELS)
def test_row_scale_of_an_earlier_tile_is_not_reused(gpu_ops: Callable[[str], KernelLibrary], model: str) -> None:
    """All-one operands whose rows differ only by their scale, with more tiles than multiprocessors."""
    ops = gpu_ops(model)
    rows, (n, k) = 128 * 150, projections(ops.config)["gate_up"]
    ones = torch.ones(n, k, dtype=torch.bfloat16, device=ops.device) / k
    x = torch.ones(rows, k, dtype=torch.bfloat16, device=ops.device)
    scale = torch.where(torch.arange(rows, device=ops.device) // 128 % 2 == 0, 2.0, 4.0)
    sumsq = (k / scale.square())[:, None].contiguous()
    out = ops.gate_up("prefill", x, sumsq, ops.pack("gate_up", "prefill", ones))
    value = scale * (torch.ones_like(scale) / k).bfloat16().float() * k
    want = torch.nn.functional.silu(value) * value
    assert largest_error(out.float(), want[:, None].expand_as(out)) <= 2.0**-7 * float(want.max())


@pytest.mark.gpu
def test_rows_past_the_end_are_untouched(gpu_ops: Callable[[str], KernelLibrary]) -> None:
    """A tile's tail stores nothing: the rows behind a residual of 17 keep their poison."""
    ops = gpu_ops("smollm2-135m")
    problem = Problem(ops, "o", 17)
    room = torch.full((256, ops.config.hidden_size), torch.nan, dtype=torch.bfloat16, device=ops.device)
    room[:17] = problem.residual
    x, _ = ops.o("prefill", problem.x, problem.weight, room[:17])
    assert x.isfinite().all()
    assert room[17:].isnan().all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n": 100}, "multiple of 32"),
        ({"k": 100}, "multiple of 8"),
        ({"tile": Tile(64, 128, 64)}, "tile.m"),
        ({"tile": Tile(128, 100, 64)}, "tile.n"),
        ({"stages": 12}, "shared memory"),
        ({"cluster_m": 4}, "cluster_m"),
    ],
)
def test_illegal_specs_are_refused(changes: dict[str, object], message: str) -> None:
    fields: dict[str, object] = {
        "op": "o",
        "element": BF16,
        "n": 576,
        "k": 576,
        "tile": Tile(128, 192, 64),
        "cluster_m": 1,
        "stages": 4,
    }
    with pytest.raises(UnsupportedError, match=message):
        GemmSpec(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.mark.gpu
def test_wrong_tensors_are_named(gpu_ops: Callable[[str], KernelLibrary]) -> None:
    ops = gpu_ops("smollm2-135m")
    problem = Problem(ops, "o", 3)
    with pytest.raises(InputError, match="o: x must have shape"):
        ops.o("prefill", problem.x[:, :64].contiguous(), problem.weight, problem.residual)
    with pytest.raises(InputError, match=r"o: residual must be torch\.bfloat16"):
        ops.o("prefill", problem.x, problem.weight, problem.residual.float())
