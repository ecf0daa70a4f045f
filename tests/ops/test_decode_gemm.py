"""Decode projections: against the float32 reference at every batch, row by row independence, legality, machine code."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import product
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from futransformer.build.compile import build_kernels
from futransformer.build.sass import count_instructions, occurrences
from futransformer.build.settings import BuildSettings
from futransformer.driver import Kernel
from futransformer.generator.config import load_config
from futransformer.generator.decode_heuristics import BATCH_TILES, batch_tiles, decode_gemm_spec
from futransformer.generator.errors import InputError
from futransformer.generator.plan import make_plan, projections
from futransformer.generator.precision import INT4, get_precision
from futransformer.generator.specs import DecodeGemmSpec, Heads
from futransformer.library import KernelLibrary
from futransformer.ops import decode_gemm
from futransformer.ops.decode_gemm import DecodeGemm
from futransformer.ops.interface import Projection
from futransformer.reference import ReferenceOps, allowed_error, largest_error, with_gain
from futransformer.weights import as_decoded
from tests.ops import models
from tests.ops.int4 import SPLIT_BATCH, as_integers
from tests.ops.tolerance import worst_block

MODELS = ("smollm2-135m", "llama-3.1-8b")
OPS: tuple[Projection, ...] = ("qkv", "o", "gate_up", "down", "lm_head")
CASES = [
    *product((*MODELS, *models.FP8_DECODE), OPS),
    *product(models.INT4, OPS[:4]),  # their head is BF16's
    *product(models.INT4_HEADS, OPS[4:]),
]
TILES = [
    (model, op, tile)
    for model, op in CASES
    if model in models.WHOLE
    for tile in batch_tiles(op, models.precision_of(model))
]
BATCHES = (1, 2, 3, 5, 7, 8, 9, 17, 31, 32, 33, 63, 64)
ROOM = 160  # rows that every row tensor really has; those past the batch are poison
PAGES = 4

Kernels = Callable[[str], KernelLibrary]
Tensors = dict[str, Tensor]


class Problem:
    """One projection of one model: a weight, ROOM rows of inputs, and launches on some of the rows."""

    def __init__(self, ops: KernelLibrary, op: Projection) -> None:
        config, device = ops.config, ops.device
        self.ops, self.op, self.device = ops, op, device
        self.gemm = cast(DecodeGemm, ops._projections.gemms["decode", op])
        self.generator = torch.Generator(device).manual_seed(len(op))
        self.n, self.k = projections(config)[op]
        rows = config.vocab_size if op == "lm_head" else self.n
        self.logical = self.normal(rows, self.k, scale=self.k**-0.5)
        packed = as_decoded(op, self.logical, self.gemm.element, ops.precision)
        if not isinstance(packed, Tensor):
            self.logical = packed.dequantise()
        self.weight = ops.pack(op, "decode", packed)
        self.x = self.normal(ROOM, self.k) * torch.linspace(0.1, 8, ROOM, device=device)[:, None].bfloat16()
        # The reference adds the parts in another order: eight true ones, and zeros that must not disturb.
        parts = self.x.float().square().view(ROOM, 8, -1).sum(-1)
        self.sumsq = torch.cat([parts, torch.zeros(ROOM, 3, device=device)], 1)
        # Float32, with digits that BF16 has not.
        self.residual = self.normal(ROOM, config.hidden_size, scale=4.0).float() * (1 + 2**-12)
        self.gain: Tensor | None = None
        if self.gemm.gain_in_x:
            self.gain = torch.rand(config.hidden_size, generator=self.generator, device=device) + 0.5
        self.heads = ops.plan.attention_prefill.heads
        angles = torch.rand(4096, self.heads.head_dim // 2, generator=self.generator, device=device) * 6.283
        self.rope_table = torch.stack([angles.cos(), angles.sin()], -1)
        self.positions = torch.randint(4096, (ROOM,), generator=self.generator, device=device, dtype=torch.int32)
        self.slots = torch.randperm(PAGES * 64, generator=self.generator, device=device)[:ROOM]
        self.slots[2] = -1

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=self.generator, device=self.device) * scale).bfloat16()

    def poisoned(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.full(shape, torch.nan, dtype=dtype, device=self.device)

    def launch(self, first: int, last: int, tile: int | None = None, neighbours: Tensor | None = None) -> Tensors:
        """Run rows first .. last - 1, poison behind them; ``neighbours`` replaces x where it is not NaN in row one.

        ``tile`` picks the kernel, else the op does. Returned are the whole outputs, with the room behind the batch.
        """
        m = last - first

        def room(source: Tensor, poison: float) -> Tensor:
            rows = torch.full_like(source, poison)
            rows[:m] = source[first:last]
            return rows

        x = room(self.x, torch.nan) if neighbours is None else neighbours
        gemm = self.gemm if tile is None else DecodeGemm({tile: self.gemm.kernels[tile]})
        arguments: dict[str, Any] = {}
        outputs: Tensors = {}
        if "rowscale" in gemm.kernels[min(gemm.kernels)].spec.epilogue:  # type: ignore[attr-defined]
            arguments["sumsq"] = room(self.sumsq, torch.nan)[:m]
            arguments["sumsq_parts"] = self.sumsq.shape[1]
            arguments["rms_norm_eps"] = self.ops.config.rms_norm_eps
        if self.op == "qkv":
            # A row that is read past the batch would rotate by, or write to, an address outside every allocation.
            arguments["positions"] = room(self.positions, 2**30)[:m]
            arguments["slots"] = room(self.slots, 2**50)[:m]
            arguments["rope_table"] = self.rope_table
            shape = (PAGES, self.heads.num_key_value_heads, 64, self.heads.head_dim)
            outputs["k_pages"], outputs["v_pages"] = self.poisoned(*shape), self.poisoned(*shape)
            outputs["q"] = self.poisoned(ROOM, self.heads.q_features)
        elif self.op in ("o", "down"):
            outputs["residual"] = room(self.residual, torch.nan)
            outputs["out"] = self.poisoned(ROOM, self.n)
            outputs["sumsq_out"] = self.poisoned(ROOM, gemm.sumsq_parts(m), dtype=torch.float32)
            if self.gain is not None:
                arguments["gain"] = self.gain
        elif self.op == "gate_up":
            outputs["out"] = self.poisoned(ROOM, self.n // 2)
        else:
            outputs["out"] = self.poisoned(ROOM, self.n, dtype=torch.float32)
            outputs["best"] = self.poisoned(ROOM, gemm.sumsq_parts(m), 2, dtype=torch.float32)
        cut = {name: tensor if "pages" in name else tensor[:m] for name, tensor in outputs.items()}
        gemm.launch(x[:m], self.weight, **arguments, **cut)
        for name, tensor in outputs.items():
            if "pages" not in name:
                assert tensor[m:].isnan().all(), f"{name}: rows past the batch were written"
        return outputs

    def reference(self, rows: int, dtype: torch.dtype) -> Tensors:
        ops = ReferenceOps(self.ops.config, device=self.device, dtype=dtype)
        x, sumsq, weight = self.x[:rows], self.sumsq[:rows], self.logical.float()
        spec = self.gemm.kernels[min(self.gemm.kernels)].spec
        assert isinstance(spec, DecodeGemmSpec)
        if spec.element == INT4 and rows <= SPLIT_BATCH:
            x = as_integers(x, spec.group_k)
        if self.op == "qkv":
            shape = (PAGES, self.heads.num_key_value_heads, 64, self.heads.head_dim)
            pages = [self.poisoned(*shape, dtype=dtype) for _ in range(2)]
            row_state = self.positions[:rows], self.slots[:rows]
            q = ops.qkv("decode", x, sumsq, weight, self.rope_table, *row_state, *pages)
            return {"q": q, "k_pages": pages[0], "v_pages": pages[1]}
        if self.op in ("o", "down"):
            stream = ops.o("decode", x, weight, self.residual[:rows].clone(), gain=self.gain)
            return {"out": stream.x, "residual": stream.residual}
        if self.op == "gate_up":
            return {"out": ops.gate_up("decode", x, sumsq, weight)}
        return {"out": ops.lm_head("decode", x, sumsq, weight)}


@lru_cache(maxsize=1)
def problem_of(ops: KernelLibrary, op: Projection) -> Problem:
    """Keep the last problem: batches are the fastest parameter, and a head of 8B takes a gigabyte."""
    return Problem(ops, op)


def assert_close(problem: Problem, outputs: Tensors, rows: int) -> None:
    """The two-times rule, and every block of 16 columns by itself, NaN exactly where nothing may be written."""
    exact, same_dtype = (problem.reference(rows, dtype) for dtype in (torch.float32, torch.bfloat16))
    precision = get_precision("bf16")
    for name, want in exact.items():
        actual = outputs[name] if "pages" in name else outputs[name][:rows, : want.shape[1]]
        assert torch.equal(actual.isnan(), want.isnan()), name
        actual, want, bf16 = (t.float().nan_to_num(0) for t in (actual, want, same_dtype[name]))  # noqa: PLW2901
        # Float32 stays unrounded: a sum of k products is then off by about sqrt(k) roundings of 2^-24.
        unrounded = problem.op == "lm_head" or name == "residual"
        rounding = 2.0**-14 if unrounded else precision.atol / 2
        limit = rounding * float(want.abs().max()) if unrounded else allowed_error(bf16, want, precision)
        assert largest_error(actual, want) <= limit, name
        relative = worst_block(actual, want)
        assert relative <= 4 * rounding, f"{name}: a block of 16 columns is off by {relative:.3e}"
    if "best" in outputs:
        logits = outputs["out"][:rows, : problem.ops.config.vocab_size]
        values, index = outputs["best"][:rows].unbind(2)
        part = values.max(1).indices[:, None]
        token = index.contiguous().view(torch.int32).gather(1, part)
        assert torch.equal(token[:, 0].long(), logits.argmax(1)), "another token than that of the largest logit"
        assert torch.equal(values.gather(1, part), logits.gather(1, token.long()))
    if "sumsq_out" in outputs:
        assert torch.equal(outputs["out"][:rows], with_gain(outputs["residual"][:rows], problem.gain).bfloat16())
        parts = outputs["residual"][:rows].square().view(rows, outputs["sumsq_out"].shape[1], -1).sum(-1)
        torch.testing.assert_close(outputs["sumsq_out"][:rows], parts, rtol=1e-5, atol=0)


def assert_same_bits(first: Tensors, second: Tensors, message: str) -> None:
    for name, tensor in first.items():
        assert torch.equal(tensor.view(torch.uint8), second[name].view(torch.uint8)), f"{name}: {message}"


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [*BATCHES, 65, 127, 129])
@pytest.mark.parametrize(("model", "op"), CASES)
def test_projection(gpu_ops: Kernels, model: str, op: Projection, rows: int) -> None:
    problem = problem_of(gpu_ops(model), op)
    outputs = problem.launch(0, rows)
    assert_close(problem, outputs, rows)
    assert_same_bits(outputs, problem.launch(0, rows), "two runs differ")


@pytest.mark.gpu
@pytest.mark.parametrize(("model", "op", "tile"), TILES)
def test_a_row_does_not_see_its_neighbours(gpu_ops: Kernels, model: str, op: Projection, tile: int) -> None:
    """Each row of a batch has the bits of its solo run by the same kernel, whatever the other rows hold."""
    problem = problem_of(gpu_ops(model), op)
    together = problem.launch(0, tile, tile)
    poisoned = {}
    if op != "qkv":  # where rows share no pages
        for row in (0, tile // 2, tile - 1):
            x = torch.full_like(problem.x, torch.nan)
            x[row] = problem.x[row]
            poisoned[row] = problem.launch(0, tile, tile, neighbours=x)
    for row in range(tile):
        alone = problem.launch(row, row + 1, tile)
        for name, tensor in together.items():
            if "pages" in name:
                slot = int(problem.slots[row])
                if slot < 0:
                    assert alone[name].isnan().all()
                    continue
                one, other = (t[slot // 64, :, slot % 64] for t in (alone[name], tensor))
            else:
                one, other = alone[name][0], tensor[row]
            assert torch.equal(one, other), f"{name}: row {row} differs from its solo run"
            if row in poisoned:
                assert torch.equal(one, poisoned[row][name][row]), f"{name}: row {row} saw a NaN beside it"


@pytest.mark.gpu
@pytest.mark.parametrize("model", [*MODELS, *models.INT4, *models.FP8_DECODE])
def test_an_activation_outlier_stays_finite(gpu_ops: Kernels, model: str) -> None:
    """One channel at 3e4 in one row: finite, right, and of no effect on the other rows."""
    problem = Problem(gpu_ops(model), "down")
    before = problem.launch(0, 4)
    problem.x[1, 5] = 3e4
    after = problem.launch(0, 4)
    assert_close(problem, after, 4)
    for row in (0, 2, 3):
        assert torch.equal(after["out"][row], before["out"][row])


@pytest.mark.gpu
def test_wrong_tensors_are_named(gpu_ops: Kernels) -> None:
    ops = gpu_ops("smollm2-135m")
    problem = problem_of(ops, "o")
    x, residual = problem.x[:3], problem.residual[:3]
    with pytest.raises(InputError, match="o: weight must have shape"):
        ops.o("decode", x, ops.pack("o", "prefill", problem.logical), residual)
    with pytest.raises(InputError, match="o: x must have shape"):
        ops.o("decode", x[:, :64].contiguous(), problem.weight, residual)
    room = torch.zeros(3 * problem.k + 1, dtype=torch.bfloat16, device=ops.device)
    with pytest.raises(InputError, match="o: x starts at"):
        ops.o("decode", room[1:].view(3, problem.k), problem.weight, residual)


class RecordedKernel:
    """Stands in for a loaded kernel, and remembers its launches."""

    def __init__(self, spec: DecodeGemmSpec) -> None:
        self.spec = spec
        self.launches: list[tuple[tuple[int, int, int], dict[str, Any]]] = []

    def launch(self, grid: tuple[int, int, int], **arguments: Any) -> None:
        assert set(arguments) == {param.name for param in self.spec.params}
        self.launches.append((grid, arguments))


@pytest.fixture(autouse=True)
def described_maps(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Without a GPU a tensor map is what it was made from."""
    if "gpu" not in request.keywords:
        described = lambda tensor, box: SimpleNamespace(tensor=tensor, box=box)  # noqa: E731
        monkeypatch.setattr(decode_gemm, "tensor_map_column_groups", described)


def recorded(op: str, n: int, k: int, heads: Heads | None = None) -> tuple[DecodeGemm, dict[int, RecordedKernel]]:
    specs = {batch: decode_gemm_spec(op, n, k, batch, get_precision("bf16"), heads) for batch in BATCH_TILES}
    kernels = {batch: RecordedKernel(spec) for batch, spec in specs.items()}
    return DecodeGemm(cast(dict[int, Kernel], kernels)), kernels


@pytest.mark.parametrize(("rows", "tile"), [(1, 8), (8, 8), (9, 16), (17, 32), (33, 64), (64, 64)])
def test_the_smallest_tile_that_fits_runs(rows: int, tile: int) -> None:
    gemm, kernels = recorded("o", 576, 576)
    x, residual = torch.zeros(rows, 576).bfloat16(), torch.zeros(rows, 576)
    sumsq_out = torch.zeros(rows, gemm.sumsq_parts(rows))
    weight = torch.zeros(gemm.weight_shape()).bfloat16()
    gemm.launch(x, weight, residual=residual, out=torch.zeros_like(x), sumsq_out=sumsq_out)
    assert {batch: len(kernel.launches) for batch, kernel in kernels.items()} == {
        b: int(b == tile) for b in BATCH_TILES
    }
    grid, arguments = kernels[tile].launches[0]
    assert grid == (kernels[tile].spec.blocks, 1, 1)
    assert arguments["m"] == rows
    if tile == 8:  # its lanes read x themselves
        assert arguments["x"].data_ptr() == x.data_ptr()
    else:
        assert arguments["x"].box == kernels[tile].spec.x_box
    assert sumsq_out.shape[1] == kernels[tile].spec.sumsq_parts


def test_a_larger_batch_runs_in_chunks() -> None:
    heads = Heads(9, 3, 64)
    gemm, kernels = recorded("qkv", heads.qkv_features, 576, heads)
    rows, pages = 130, torch.zeros(4, 3, 64, 64).bfloat16()
    x, q = torch.zeros(rows, 576).bfloat16(), torch.zeros(rows, heads.q_features).bfloat16()
    by_row = {"positions": torch.arange(rows), "slots": torch.arange(rows), "sumsq": torch.zeros(rows, 1), "q": q}
    weight, rope_table = torch.zeros(gemm.weight_shape()).bfloat16(), torch.zeros(100, 32, 2)
    shared = {"rope_table": rope_table, "k_pages": pages, "v_pages": pages}
    gemm.launch(x, weight, sumsq_parts=1, rms_norm_eps=1e-5, **by_row, **shared)
    assert all(not kernels[batch].launches for batch in (8, 16, 32))
    seen = 0
    for _, arguments in kernels[64].launches:
        arguments |= {"x": arguments["x"].tensor}
        for name, whole in {"x": x, **by_row}.items():
            assert torch.equal(arguments[name], whole[seen : seen + arguments["m"]])
            assert arguments[name].data_ptr() == whole[seen].data_ptr()
        assert all(arguments[name] is tensor for name, tensor in {"weight": weight, **shared}.items())
        seen += arguments["m"]
    assert seen == rows


def test_a_misaligned_tensor_is_refused() -> None:
    gemm, kernels = recorded("gate_up", 3072, 576)
    weight, out = torch.zeros(gemm.weight_shape()).bfloat16(), torch.zeros(2, 1536).bfloat16()
    x = torch.zeros(2 * 576 + 4).bfloat16()[4:].view(2, 576)
    with pytest.raises(InputError, match=r"gate_up: x starts at .* not at a multiple of 16 bytes"):
        gemm.launch(x, weight, sumsq=torch.zeros(2, 1), sumsq_parts=1, rms_norm_eps=1e-5, out=out)
    assert not kernels[8].launches


@pytest.mark.compile
@pytest.mark.parametrize(
    ("precision", "op", "batch", "x_in_ring"),
    [
        ("bf16", "o", 16, True),
        ("bf16", "down", 16, False),
        ("bf16-fp8", "down", 16, False),
        ("bf16-fp8", "o", 32, True),
        ("int4", "down", 4, False),
        ("int4", "down", 16, False),
        ("int4", "o", 64, True),
    ],
)
def test_machine_code(precision: str, op: str, batch: int, x_in_ring: bool) -> None:
    """Both ways of x: tensor cores, bulk copies, 16-byte loads of both operands, nothing in local memory."""
    settings = BuildSettings.from_environment()
    spec = make_plan(load_config("smollm2-135m"), precision).decode[op][batch]
    assert spec.x_in_ring == x_in_ring
    (record,) = build_kernels([spec], settings=settings)
    counts = count_instructions(record.cubin, settings)
    for instruction in (*spec.instructions, "LDG.E.128"):
        assert occurrences(counts, instruction), f"no {instruction}"
    assert bool(occurrences(counts, "UTMALDG.3D")) == x_in_ring
    for instruction in ("LDL", "STL"):
        assert not occurrences(counts, instruction), instruction


@pytest.mark.compile
def test_kernel_in_the_emulator(emulate: Callable[..., str]) -> None:
    """The kernel's source, run on the host thread by thread: fragments, the ring's protocol, the sums of a cluster."""
    headers = ("fragment", "unit_scales", "split_activations", "decode_ring", "decode_block", "decode_gemm_wgmma")
    assert emulate("decode_gemm", *headers).count("allowed error\n") == 62
