"""The projections on the CPU, up to the launch: what they ask of their tensors and what reaches each kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from futransformer.driver import Kernel
from futransformer.generator.config import load_config
from futransformer.generator.errors import InputError
from futransformer.generator.plan import Plan, make_plan
from futransformer.generator.precision import BF16, E4M3, INT4, Precision, get_precision
from futransformer.generator.specs import PAGE_SIZE, DecodeGemmSpec, GemmSpec
from futransformer.ops import decode_gemm as decode_gemm_module
from futransformer.ops import gemm as gemm_module
from futransformer.ops.decode_gemm import DecodeGemm
from futransformer.ops.gemm import PrefillGemm
from futransformer.ops.interface import PROJECTIONS, Phase, Projection
from futransformer.ops.projections import ProjectionGemm, Projections
from tests.ops.fp8 import fp8_output

CONFIG = replace(load_config("smollm2-135m"), vocab_size=1001, eos_token_ids=())
ROWS, PADDED_VOCAB = 5, 1024
CPU, META = torch.device("cpu"), torch.device("meta")
PHASES: tuple[Phase, ...] = ("prefill", "decode")


@dataclass
class RecordingKernel:
    """Stands in for a loaded kernel: remembers its launches."""

    spec: GemmSpec | DecodeGemmSpec
    launches: list[tuple[tuple[int, int, int], dict[str, Any]]] = field(default_factory=list)
    sm_count: int = 132

    def launch(self, grid: tuple[int, int, int], **arguments: Any) -> None:
        assert set(arguments) == {param.name for param in self.spec.params}, "every parameter once, and no other"
        self.launches.append((grid, arguments))


class Recorded:
    """The projections of CONFIG on kernels that only remember."""

    def __init__(self, precision: str | Precision = "bf16") -> None:
        self.plan: Plan = make_plan(CONFIG, precision)
        self.kernels: list[RecordingKernel] = []
        gemms: dict[tuple[Phase, Projection], ProjectionGemm] = {}
        for op in PROJECTIONS:
            by_rows = {rows: self.kernel(spec) for rows, spec in self.plan.prefill[op].items()}
            gemms["prefill", op] = PrefillGemm(by_rows)
            by_batch = {batch: self.kernel(spec) for batch, spec in self.plan.decode[op].items()}
            gemms["decode", op] = DecodeGemm(by_batch)
        self.gemms = gemms
        self.projections = Projections(CONFIG, CONFIG.heads, gemms, CPU)

    def kernel(self, spec: GemmSpec | DecodeGemmSpec) -> Kernel:
        self.kernels.append(RecordingKernel(spec))
        return cast(Kernel, self.kernels[-1])

    def arguments(self, phase: Phase, op: Projection, rows: int = ROWS) -> dict[str, Any]:
        """Tensors that fit."""
        heads, hidden, inner = CONFIG.heads, CONFIG.hidden_size, CONFIG.intermediate_size
        k = {"o": heads.q_features, "down": inner}.get(op, hidden)
        gemm = self.gemms[phase, op]
        arguments: dict[str, Any] = {
            "phase": phase,
            "x": torch.zeros(rows, k).to(gemm.operand),
            "weight": torch.zeros(gemm.weight_shape()).to(gemm.weight_type),
        }
        if gemm.scales:
            arguments["scale"] = torch.ones(gemm.scales)
            if op != "qkv":
                arguments["fp8"] = fp8_output(torch.ones(1))
        if op in ("o", "down"):
            residual = torch.zeros(rows, hidden, dtype=torch.bfloat16 if phase == "prefill" else torch.float32)
            return {**arguments, "op": op, "residual": residual}
        arguments["sumsq"] = torch.zeros(rows, 3)
        if op == "lm_head":
            arguments["padded_vocab"] = PADDED_VOCAB
        if op == "qkv":
            pages = torch.zeros(2, heads.num_key_value_heads, PAGE_SIZE, heads.head_dim).bfloat16()
            arguments |= {
                "rope_table": torch.zeros(100, heads.head_dim // 2, 2),
                "positions": torch.zeros(rows, dtype=torch.int32),
                "slots": torch.zeros(rows, dtype=torch.int64),
                "k_pages": pages,
                "v_pages": pages.clone(),
            }
        return arguments

    def run(self, op: Projection, arguments: dict[str, Any]) -> Any:
        method = "add_to_residual" if op in ("o", "down") else op
        return getattr(self.projections, method)(**arguments)

    @property
    def launched(self) -> list[RecordingKernel]:
        return [kernel for kernel in self.kernels if kernel.launches]


@pytest.fixture(autouse=True)
def maps(monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(tensor: Tensor, box_rows: int, box_columns: int) -> SimpleNamespace:
        return SimpleNamespace(tensor=tensor, box=(box_rows, box_columns))

    def encode_groups(tensor: Tensor, box: tuple[int, int, int]) -> SimpleNamespace:
        return SimpleNamespace(tensor=tensor, box=box)

    monkeypatch.setattr(gemm_module, "tensor_map_2d", encode)
    monkeypatch.setattr(decode_gemm_module, "tensor_map_column_groups", encode_groups)


@pytest.fixture
def recorded() -> Recorded:
    return Recorded()


@pytest.fixture(params=["tensor", "channel"])
def recorded_fp8(request: pytest.FixtureRequest) -> Recorded:
    return Recorded(replace(get_precision("fp8"), weight_scales=request.param))


@pytest.mark.parametrize("op", PROJECTIONS)
@pytest.mark.parametrize("phase", PHASES)
def test_one_launch_with_every_argument(recorded: Recorded, phase: Phase, op: Projection) -> None:
    arguments = recorded.arguments(phase, op)
    returned = recorded.run(op, arguments)
    (kernel,) = recorded.launched
    ((_, given),) = kernel.launches
    assert kernel.spec.op == op
    assert given["m"] == ROWS
    for name in ("rope_table", "positions", "slots", "k_pages", "v_pages", "residual"):
        if name in arguments:
            assert given[name].data_ptr() == arguments[name].data_ptr()
    if "rowscale" in kernel.spec.epilogue:
        assert given["sumsq"].data_ptr() == arguments["sumsq"].data_ptr()
        assert (given["sumsq_parts"], given["rms_norm_eps"]) == (3, CONFIG.rms_norm_eps)

    heads = CONFIG.heads
    if op == "qkv":
        assert (returned.shape, returned.dtype) == ((ROWS, heads.q_features), torch.bfloat16)
        assert given["q"].data_ptr() == returned.data_ptr()
    elif op in ("o", "down"):
        x, sumsq, residual = returned
        assert residual is arguments["residual"], "in place"
        assert (x is residual) == (phase == "prefill")
        assert (x.shape, x.dtype) == ((ROWS, CONFIG.hidden_size), torch.bfloat16)
        assert given["out"].data_ptr() == x.data_ptr()
        assert (sumsq.shape, sumsq.dtype) == ((ROWS, kernel.spec.sumsq_parts), torch.float32)
        assert given["sumsq_out"].data_ptr() == sumsq.data_ptr()
    elif op == "gate_up":
        assert (returned.shape, returned.dtype) == ((ROWS, CONFIG.intermediate_size), torch.bfloat16)
    else:
        assert (returned.shape, returned.dtype) == ((ROWS, CONFIG.vocab_size), torch.float32)
        assert returned.stride() == (PADDED_VOCAB, 1)
        assert given["out"].shape == (ROWS, PADDED_VOCAB)


@pytest.mark.parametrize("op", PROJECTIONS)
@pytest.mark.parametrize("phase", PHASES)
def test_no_rows_launch_nothing(recorded: Recorded, phase: Phase, op: Projection) -> None:
    returned = recorded.run(op, recorded.arguments(phase, op, rows=0))
    assert recorded.launched == []
    for tensor in returned if isinstance(returned, tuple) else (returned,):
        assert tensor.shape[0] == 0


@pytest.mark.parametrize("rows", [1, 17, 128, 129, 1088, 100_000])
@pytest.mark.parametrize("op", PROJECTIONS)
def test_the_prefills_grid_and_boxes(recorded: Recorded, op: Projection, rows: int) -> None:
    """Whole clusters, no more blocks than multiprocessors; boxes of a tile or of x, shared out in a cluster."""
    recorded.run(op, recorded.arguments("prefill", op, rows))
    (kernel,) = recorded.launched
    ((grid, given),) = kernel.launches
    spec = kernel.spec
    assert isinstance(spec, GemmSpec)
    blocks = grid[0] * grid[1] * grid[2]
    in_cluster = spec.cluster[0] * spec.cluster[1] * spec.cluster[2]
    assert blocks % in_cluster == 0
    assert in_cluster <= blocks <= 132 * spec.blocks_per_sm
    assert given["x"].tensor.shape == (rows, spec.k)
    assert given["weight"].tensor.shape == (spec.n, spec.k)
    of_x = -(-rows // 8) * 8  # whole swizzle atoms
    assert given["x"].box == (min(spec.tile.m // spec.cluster[1], of_x), spec.tile.k)
    assert given["weight"].box == (spec.tile.n // spec.cluster[0], spec.tile.k)


Change = Callable[[Tensor], Any]


def misaligned(tensor: Tensor) -> Tensor:
    """The same values two bytes (four, of float32) behind a multiple of sixteen."""
    return torch.cat([tensor.flatten()[:1], tensor.flatten()])[1:].view(tensor.shape)


def strided(tensor: Tensor) -> Tensor:
    """The same shape, its rows apart."""
    return torch.cat([tensor, tensor], -1)[..., : tensor.shape[-1]]


WRONG: dict[str, tuple[Change, str]] = {
    "type": (lambda tensor: tensor.to(torch.float64), "must be torch.*, not torch.float64"),
    "extent": (lambda tensor: torch.cat([tensor, tensor]), "must have shape"),
    "dimensions": (lambda tensor: tensor[None], "must have shape"),
    "scalar": (lambda tensor: tensor.flatten()[0], "must have shape"),
    "device": (lambda tensor: tensor.to(META), "is on meta, the kernels are on cpu"),
    "strides": (strided, "must be contiguous"),
    "no tensor": (lambda _: None, "must be a tensor, not NoneType"),
}
TENSORS: dict[Projection, tuple[str, ...]] = {
    "qkv": ("x", "sumsq", "weight", "rope_table", "positions", "slots", "k_pages", "v_pages"),
    "o": ("x", "weight", "residual"),
    "gate_up": ("x", "sumsq", "weight"),
    "down": ("x", "weight", "residual"),
    "lm_head": ("x", "sumsq", "weight"),
}
# Whose first extent is the caller's to choose; of a doubled x, the other tensors complain.
FREE = {"rope_table", "k_pages", "x"}
CASES = [
    pytest.param(phase, op, name, fault, id=f"{phase}-{op}-{name}-{fault}")
    for phase in PHASES
    for op, names in TENSORS.items()
    for name in names
    for fault in WRONG
    if not (fault == "extent" and name in FREE) and not (fault == "strides" and name in ("positions", "slots"))
]


@pytest.mark.parametrize(("phase", "op", "name", "fault"), CASES)
def test_a_wrong_tensor_is_named(recorded: Recorded, phase: Phase, op: Projection, name: str, fault: str) -> None:
    change, message = WRONG[fault]
    arguments = recorded.arguments(phase, op)
    arguments[name] = change(arguments[name])
    with pytest.raises(InputError, match=f"^{op}: {name} {message}"):
        recorded.run(op, arguments)
    assert recorded.launched == []


@pytest.mark.parametrize("op", PROJECTIONS)
@pytest.mark.parametrize("phase", PHASES)
def test_a_misaligned_tensor_is_named(recorded: Recorded, phase: Phase, op: Projection) -> None:
    """Kernels read and write these sixteen bytes at a time, and a fault on the device ends the process."""
    for name in set(TENSORS[op]) - {"sumsq", "positions", "slots"}:
        arguments = recorded.arguments(phase, op)
        arguments[name] = misaligned(arguments[name])
        with pytest.raises(InputError, match=f"^{op}: {name} starts at 0x.*, not at a multiple of 16 bytes"):
            recorded.run(op, arguments)
    assert recorded.launched == []


@pytest.mark.parametrize("phase", PHASES)
def test_rows_that_disagree_are_named(recorded: Recorded, phase: Phase) -> None:
    for op in PROJECTIONS:
        arguments = recorded.arguments(phase, op)
        arguments["x"] = torch.cat([arguments["x"], arguments["x"]])
        other = "residual" if op in ("o", "down") else "sumsq"
        with pytest.raises(InputError, match=rf"^{op}: {other} must have shape \[{2 * ROWS}, "):
            recorded.run(op, arguments)


@pytest.mark.parametrize("op", PROJECTIONS)
def test_a_weight_packed_for_the_other_phase_is_refused(recorded: Recorded, op: Projection) -> None:
    arguments = recorded.arguments("prefill", op)
    arguments["weight"] = recorded.arguments("decode", op)["weight"]
    with pytest.raises(InputError, match=f"^{op}: weight must have shape"):
        recorded.run(op, arguments)


# INT4 weights


@pytest.mark.parametrize("op", PROJECTIONS)
def test_decode_reads_int4_as_bytes_and_x_in_bf16(op: Projection) -> None:
    """The head, and all of prefill, stay in BF16; scales are inside the packed weight."""
    recorded = Recorded("int4-g32-asym")
    arguments = recorded.arguments("decode", op)
    assert arguments["x"].dtype == torch.bfloat16
    assert arguments["weight"].dtype == (torch.bfloat16 if op == "lm_head" else torch.uint8)
    assert recorded.arguments("prefill", op)["weight"].dtype == torch.bfloat16
    recorded.run(op, arguments)
    (kernel,) = recorded.launched
    ((_, given),) = kernel.launches
    assert kernel.spec.element == (BF16 if op == "lm_head" else INT4)
    assert given["weight"] is arguments["weight"]
    assert "scale" not in given


@pytest.mark.parametrize("op", [op for op in PROJECTIONS if op != "lm_head"])
def test_a_weight_that_is_not_packed_int4_is_named(recorded: Recorded, op: Projection) -> None:
    int4, shape, kind = Recorded("int4-g64"), "must have shape", "must be torch.*; no conversion makes codes of it"
    for there, name, message in ((int4, "int4-g32-asym", shape), (int4, "bf16", kind), (recorded, "int4-g64", kind)):
        arguments = there.arguments("decode", op)
        arguments["weight"] = Recorded(name).arguments("decode", op)["weight"]
        with pytest.raises(InputError, match=f"^{op}: weight {message}"):
            there.run(op, arguments)
        assert there.launched == []


@pytest.mark.parametrize("op", PROJECTIONS)
def test_decode_reads_codes_of_a_head_and_of_e4m3_as_bytes(op: Projection) -> None:
    """x stays in BF16, and no scale is an argument: they are inside the packed weight."""
    for precision, element in (("bf16-fp8-head8", E4M3), ("bf16-fp8-head4", INT4 if op == "lm_head" else E4M3)):
        recorded = Recorded(precision)
        arguments = recorded.arguments("decode", op)
        assert (arguments["x"].dtype, arguments["weight"].dtype) == (torch.bfloat16, torch.uint8)
        assert recorded.arguments("prefill", op)["weight"].dtype == torch.bfloat16
        recorded.run(op, arguments)
        (kernel,) = recorded.launched
        assert kernel.spec.element == element
        assert kernel.spec.epilogue[0] == ("weightscale" if element == E4M3 else "rowscale")
        assert "scale" not in kernel.launches[0][1]


# FP8 operands and results


@pytest.mark.parametrize("op", PROJECTIONS)
def test_an_fp8_prefill_launches_with_its_scales(recorded_fp8: Recorded, op: Projection) -> None:
    """lm_head stays in BF16, as all of decode does; in FP8 the residual stream is a tensor of its own."""
    recorded = recorded_fp8
    arguments = recorded.arguments("prefill", op)
    returned = recorded.run(op, arguments)
    (kernel,) = recorded.launched
    ((_, given),) = kernel.launches
    assert ("scale" in given) == ("scale" in arguments) == (op != "lm_head")
    assert kernel.spec.element == (BF16 if op == "lm_head" else E4M3)
    if "scale" in arguments:
        assert given["scale"] is arguments["scale"]
        by_channel = "channelscale" in kernel.spec.epilogue
        assert arguments["scale"].shape == (kernel.spec.n if by_channel else 1,)
    if "fp8" in arguments:
        assert (given["out_scale"], given["amax"], given["saturated"]) == tuple(arguments["fp8"])
        written = returned.x if op in ("o", "down") else returned
        assert given["out_fp8"] is written
        columns = CONFIG.intermediate_size if op == "gate_up" else CONFIG.hidden_size
        assert (written.shape, written.dtype) == ((ROWS, columns), torch.float8_e4m3fn)
        assert ("out" in given) == (op != "gate_up")
    if op in ("o", "down"):
        assert given["out"] is given["residual"] is returned.residual is arguments["residual"]
    assert "scale" not in recorded.arguments("decode", op)


@pytest.mark.parametrize("op", [op for op in PROJECTIONS if op != "lm_head"])
def test_wrong_scales_are_named(recorded: Recorded, recorded_fp8: Recorded, op: Projection) -> None:
    right = recorded_fp8.arguments("prefill", op)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"scale": None}, "the prefill kernel needs the scale of its sums"),
        ({"scale": torch.ones(right["scale"].numel() + 1)}, r"scale must have shape"),
        ({"scale": right["scale"].double()}, r"scale must be torch\.float32"),
        ({"x": right["x"].bfloat16()}, r"x must be torch\.float8_e4m3fn, .*; no conversion gives codes their scale"),
        ({"weight": right["weight"].bfloat16()}, r"weight must be torch\.float8_e4m3fn"),
    ]
    if op != "qkv":
        wrong.append(({"fp8": None}, "the kernel writes FP8 and needs fp8, the scale of its result"))
        wrong.append(({"fp8": tuple(right["fp8"])}, r"fp8 must be an Fp8Output .*, not tuple"))
        wrong.append(({"fp8": right["fp8"]._replace(amax=torch.ones(2))}, r"fp8\.amax must have shape \[1\]"))
    for changes, message in wrong:
        with pytest.raises(InputError, match=f"^{op}: {message}"):
            recorded_fp8.run(op, {**right, **changes})
    assert recorded_fp8.launched == []

    plain = recorded.arguments("prefill", op)
    with pytest.raises(InputError, match=f"^{op}: the prefill kernel takes no scale: its operands are not scaled"):
        recorded.run(op, {**plain, "scale": torch.ones(1)})
    if op != "qkv":
        with pytest.raises(InputError, match=f"^{op}: the kernel writes no FP8: leave fp8 out"):
            recorded.run(op, {**plain, "fp8": fp8_output(torch.ones(1))})
    assert recorded.launched == []
