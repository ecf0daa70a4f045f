"""The row kernels, gather_rows and argmax: on the GPU, in the emulator, and what their ops refuse."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from futransformer.generator.config import CONFIGS, load_config
from futransformer.generator.errors import InputError, UnsupportedError
from futransformer.generator.plan import make_plan
from futransformer.generator.precision import BF16, E4M3_MAX
from futransformer.generator.specs import ArgmaxSpec, GatherRowsSpec, KernelSpec
from futransformer.library import KernelLibrary
from futransformer.ops.interface import Fp8Output, Ops, Phase
from futransformer.ops.rows import Argmax, GatherRows
from futransformer.reference import ReferenceOps, with_gain
from tests.ops.fp8 import check_fp8_statistics, fp8_output

MODELS, FP8_MODELS = ("smollm2-135m", "llama-3.1-8b"), ("smollm2-135m-fp8", "llama-3.1-8b-fp8")
PHASES: tuple[Phase, ...] = ("prefill", "decode")
ROWS = (1, 2, 3, 17, 127, 129, 1088)
NAN, INF = float("nan"), float("inf")

GpuOps = Callable[[str], KernelLibrary]
Emulate = Callable[..., str]


def check_gather(
    ops: Ops, hidden_size: int, rows: int, phase: Phase, *, fp8: bool = False, gain: Tensor | None = None
) -> None:
    """Rows bit for bit, sums of squares to float32's rounding, NaN for every index outside, the same bits twice.

    In FP8 also codes, the largest magnitude and the count of what saturates, all of them exactly. A gain is x's alone.
    """
    device, table_rows = ops.device, 777
    generator = torch.Generator(device).manual_seed(rows)
    table = torch.randn(table_rows, hidden_size, generator=generator, device=device).bfloat16()
    table[3] = 0
    indices = torch.randint(table_rows, (rows,), generator=generator, device=device, dtype=torch.int32)
    edges = torch.tensor([table_rows - 1, -1, 3, table_rows, 2**31 - 1, -(2**31), 0], dtype=torch.int32, device=device)
    indices[: len(edges)] = edges[:rows]
    outputs = [fp8_output(torch.full((1,), 0.0047, device=device)) if fp8 else None for _ in range(2)]
    x, sumsq, residual = ops.gather_rows(phase, table, indices, fp8=outputs[0], gain=gain)
    assert sumsq.shape == (rows, 1)
    assert residual.dtype == (torch.bfloat16 if phase == "prefill" else torch.float32)
    if outputs[0] is None:
        read = with_gain(residual, gain).bfloat16()
        assert torch.equal(read.float().nan_to_num(7e7), x.float().nan_to_num(7e7))
    else:
        check_codes(x, residual.float() * (1 / outputs[0].scale), outputs[0])
    inside = (indices >= 0) & (indices < table_rows)
    assert torch.equal(residual[inside].bfloat16(), table[indices[inside].long()])
    exact = residual.double().square().sum(1, keepdim=True)
    assert torch.all((sumsq - exact).abs()[inside] <= 2e-6 * exact[inside])
    assert x[~inside].float().isnan().all()
    assert sumsq[~inside].isnan().all()
    again = ops.gather_rows(phase, table, indices, fp8=outputs[1], gain=gain)
    assert torch.equal(again.sumsq.view(torch.int32), sumsq.view(torch.int32)), "two runs differ"
    if outputs[0] is not None and outputs[1] is not None:
        assert torch.equal(again.x.view(torch.uint8), x.view(torch.uint8)), "two runs differ"
        assert [t.item() for t in outputs[1]] == [t.item() for t in outputs[0]], "two runs differ"


def check_codes(actual: Tensor, codes: Tensor, fp8: Fp8Output) -> None:
    """``actual`` are ``codes``, rounded to the nearest and cut off; what ``fp8`` counts of them is exact."""
    want = codes.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()
    assert torch.equal(actual.float().nan_to_num(1e3), want.nan_to_num(1e3))
    check_fp8_statistics(fp8, codes)


def argmax_rows(vocab_size: int, device: torch.device) -> tuple[Tensor, list[int]]:
    """Logits that trap an argmax, and where the maximum is."""
    generator = torch.Generator(device).manual_seed(vocab_size)
    last = vocab_size - 1
    cases: list[tuple[dict[int, float], int]] = [
        ({0: 50.0}, 0),
        ({last: 50.0}, last),
        ({last - 1: 50.0, last: 50.0}, last - 1),  # the lowest of equals
        ({5: 50.0, 6: 50.0, last: 50.0}, 5),
        ({4: NAN, 7: 50.0, 8: NAN, last: NAN}, 7),  # NaN never wins
        ({9: INF, 10: INF}, 9),
        ({11: 0.0, 12: -0.0}, 11),
        ({11: -0.0, 12: 0.0}, 11),  # the two zeros are equal
    ]
    logits = torch.randn(len(cases) + 4, vocab_size, generator=generator, device=device) - 20
    expected = []
    for row, (values, winner) in enumerate(cases):
        for column, value in values.items():
            logits[row, column] = value
        expected.append(winner)
    first = len(cases)
    logits[first] = NAN
    logits[first + 1] = -INF
    logits[first + 2] = NAN
    logits[first + 2, last] = -INF  # still larger than NaN
    logits[first + 3] = 1.5
    return logits, [*expected, 0, 0, last, 0]


def padded(logits: Tensor, stride: int, offset: int) -> Tensor:
    """The same logits in rows of another stride, starting at another alignment, among larger values."""
    rows, columns = logits.shape
    room = torch.full((rows * stride + offset,), INF, device=logits.device)
    view = room[offset:].as_strided((rows, columns), (stride, 1))
    view.copy_(logits)
    return view


@pytest.mark.gpu
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("model", MODELS)
def test_gather_rows(gpu_ops: GpuOps, model: str, rows: int, phase: Phase) -> None:
    ops = gpu_ops(model)
    check_gather(ops, ops.config.hidden_size, rows, phase)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("model", FP8_MODELS)
def test_gather_rows_in_fp8(gpu_ops: GpuOps, model: str, rows: int) -> None:
    ops = gpu_ops(model)
    check_gather(ops, ops.config.hidden_size, rows, "prefill", fp8=True)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", ROWS)
def test_gather_rows_times_a_gain(gpu_ops: GpuOps, rows: int) -> None:
    ops = gpu_ops("smollm2-135m-int4-gain")
    check_gather(ops, ops.config.hidden_size, rows, "decode", gain=gain_of(ops.config.hidden_size, ops.device))


def gain_of(hidden_size: int, device: torch.device) -> Tensor:
    return torch.rand(hidden_size, generator=torch.Generator(device).manual_seed(6), device=device) + 0.5


@pytest.mark.gpu
@pytest.mark.parametrize("model", MODELS)
def test_gather_from_a_table_beyond_two_gigabytes(gpu_ops: GpuOps, model: str) -> None:
    ops = gpu_ops(model)
    hidden_size = ops.config.hidden_size
    rows = 2**31 // hidden_size + 5  # elements, so that byte offsets pass 2^32
    table = torch.zeros(rows, hidden_size, dtype=torch.bfloat16, device=ops.device)
    table[-1] = 2
    x, sumsq, _ = ops.gather_rows("prefill", table, torch.tensor([rows - 1, 0], dtype=torch.int32, device=ops.device))
    assert (x[0] == 2).all()
    assert sumsq.flatten().tolist() == [4.0 * hidden_size, 0.0]


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [0, 1, 2, 3])
@pytest.mark.parametrize("padding", [0, 1, 64])
@pytest.mark.parametrize("model", MODELS)
def test_argmax(gpu_ops: GpuOps, model: str, padding: int, offset: int) -> None:
    ops = gpu_ops(model)
    logits, expected = argmax_rows(ops.config.vocab_size, ops.device)
    view = padded(logits, ops.config.vocab_size + padding, offset)
    for _ in range(2):
        winners = ops.argmax(view)
        assert winners.dtype == torch.int32
        assert winners.tolist() == expected


@pytest.mark.gpu
@pytest.mark.parametrize("model", MODELS)
def test_argmax_of_random_logits(gpu_ops: GpuOps, model: str) -> None:
    """Many ties: the lowest index of the largest value, by an independent search."""
    ops = gpu_ops(model)
    generator = torch.Generator(ops.device).manual_seed(1)
    logits = torch.randint(-9, 10, (65, ops.config.vocab_size), generator=generator, device=ops.device).float()
    expected = [int((row == row.max()).nonzero()[0]) for row in logits]
    assert ops.argmax(logits).tolist() == expected


@pytest.mark.gpu
def test_a_launch_from_a_thread_that_has_not_met_the_gpu(gpu_ops: GpuOps) -> None:
    """As in a server that loads a model in one thread and answers in another: no call of torch's has gone before."""
    ops = gpu_ops("smollm2-135m")
    table = torch.randn(777, ops.config.hidden_size, device=ops.device).bfloat16()
    indices = torch.randint(777, (65,), device=ops.device, dtype=torch.int32)
    x, sumsq, _ = ops.gather_rows("prefill", table, indices)
    out, sumsq_out = torch.full_like(x, NAN), torch.full_like(sumsq, NAN)
    torch.cuda.synchronize()
    arguments: dict[str, Any] = {"table": table, "table_rows": 777, "indices": indices}
    arguments |= {"out": out, "sumsq_out": sumsq_out}
    with ThreadPoolExecutor(1) as pool:
        pool.submit(ops._gather_rows["prefill"].kernel.launch, (65, 1, 1), **arguments).result()
    torch.cuda.synchronize()
    assert torch.equal(out, x)
    assert torch.equal(sumsq_out, sumsq)


@pytest.mark.parametrize(("phase", "fp8"), [("prefill", False), ("prefill", True), ("decode", False)])
def test_reference_gather(phase: Phase, fp8: bool) -> None:
    config = load_config("smollm2-135m")
    check_gather(ReferenceOps(config), config.hidden_size, 17, phase, fp8=fp8)


def test_reference_gather_times_a_gain() -> None:
    config = load_config("smollm2-135m")
    gain = gain_of(config.hidden_size, torch.device("cpu"))
    check_gather(ReferenceOps(config), config.hidden_size, 17, "decode", gain=gain)


def test_reference_argmax() -> None:
    config = load_config("smollm2-135m")
    logits, expected = argmax_rows(config.vocab_size, torch.device("cpu"))
    assert ReferenceOps(config).argmax(logits).tolist() == expected


@pytest.mark.parametrize("name", CONFIGS)
def test_every_model_has_legal_specs(name: str) -> None:
    plan = make_plan(load_config(name), "bf16")
    for gather in plan.gather_rows.values():
        assert f"k{gather.k}_" in gather.name
    assert f"v{plan.argmax.vocab_size}_" in plan.argmax.name
    for spec in (*plan.gather_rows.values(), plan.argmax):
        assert spec.threads % 32 == 0
        assert spec.shared_bytes == 0


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: GatherRowsSpec(BF16, 100), "hidden_size must be a multiple of 8"),
        (lambda: GatherRowsSpec(BF16, 0), "hidden_size must be a multiple of 8"),
        (lambda: GatherRowsSpec(BF16, 64, threads_per_row=100), "multiple of 32"),
        (lambda: ArgmaxSpec(0), "vocab_size must be positive"),
        (lambda: ArgmaxSpec(100, threads_per_row=2048), "at most 1024"),
    ],
)
def test_illegal_specs_are_refused(build: Callable[[], KernelSpec], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        build()


class RecordingKernel:
    """Stands in for a loaded kernel on the CPU: remembers its launches."""

    def __init__(self, spec: KernelSpec) -> None:
        self.spec = spec
        self.device = torch.device("cpu")
        self.launches: list[tuple[tuple[int, int, int], dict[str, Any]]] = []

    def launch(self, grid: tuple[int, int, int], **arguments: Any) -> None:
        self.launches.append((grid, arguments))


@pytest.mark.parametrize(
    ("residual", "fp8", "gain"),
    [(False, False, None), (True, False, None), (False, True, None), (True, False, torch.ones(64))],
)
def test_launches(residual: bool, fp8: bool, gain: Tensor | None) -> None:
    """Every parameter of the ABI once, one block a row."""
    spec = GatherRowsSpec(BF16, 64, residual, fp8, gain=gain is not None)
    gather, argmax = RecordingKernel(spec), RecordingKernel(ArgmaxSpec(100))
    table, indices = torch.zeros(10, 64, dtype=torch.bfloat16), torch.zeros(5, dtype=torch.int32)
    output = fp8_output(torch.ones(1)) if fp8 else None
    x, sumsq, stream = GatherRows(gather)(table, indices, output, gain)  # type: ignore[arg-type]
    ((grid, arguments),) = gather.launches
    assert grid == (5, 1, 1)
    assert set(arguments) == {param.name for param in gather.spec.params}
    assert arguments["table_rows"] == 10
    assert arguments.get("gain") is gain
    assert (arguments["sumsq_out"], arguments.get("residual", arguments["out"])) == (sumsq, stream)
    assert arguments.get("out_fp8", arguments["out"]) is x
    assert (stream is x) == (not residual and not fp8)
    if output is not None:
        assert (arguments["out_scale"], arguments["amax"], arguments["saturated"]) == tuple(output)

    winners = Argmax(argmax)(torch.zeros(3, 128)[:, :100])  # type: ignore[arg-type]
    ((grid, arguments),) = argmax.launches
    assert grid == (3, 1, 1)
    assert list(arguments) == [param.name for param in argmax.spec.params]
    assert arguments["logits_stride"] == 128
    assert arguments["out"] is winners


def test_a_kernel_is_given_an_fp8_output_if_it_writes_one() -> None:
    table, indices = torch.zeros(9, 64).bfloat16(), torch.zeros(2, dtype=torch.int32)
    plain, in_fp8 = (RecordingKernel(GatherRowsSpec(BF16, 64, fp8=fp8)) for fp8 in (False, True))
    output = fp8_output(torch.ones(1))
    for kernel, given, message in (
        (plain, output, "the kernel writes no FP8: leave fp8 out"),
        (in_fp8, None, "the kernel writes FP8 and needs fp8, the scale of its result"),
        (in_fp8, output._replace(scale=torch.ones(2)), r"fp8\.scale must have shape \[1\]"),
        (in_fp8, output._replace(amax=torch.ones(1).double()), r"fp8\.amax must be torch\.float32"),
        (in_fp8, output._replace(saturated=torch.ones(1)), r"fp8\.saturated must be torch\.int32"),
    ):
        with pytest.raises(InputError, match=f"gather_rows: {message}"):
            GatherRows(kernel)(table, indices, given)  # type: ignore[arg-type]
        assert kernel.launches == []


def test_nothing_to_do_launches_nothing() -> None:
    gather, argmax = RecordingKernel(GatherRowsSpec(BF16, 64)), RecordingKernel(ArgmaxSpec(100))
    x, sumsq, _ = GatherRows(gather)(torch.zeros(9, 64).bfloat16(), torch.zeros(0, dtype=torch.int32))  # type: ignore[arg-type]
    assert (x.shape, sumsq.shape) == ((0, 64), (0, 1))
    assert Argmax(argmax)(torch.zeros(0, 100)).shape == (0,)  # type: ignore[arg-type]
    assert gather.launches == argmax.launches == []


@pytest.mark.parametrize(
    ("table", "indices", "message"),
    [
        (torch.zeros(9, 64), torch.zeros(2, dtype=torch.int32), r"table must be torch\.bfloat16"),
        (torch.zeros(9, 32).bfloat16(), torch.zeros(2, dtype=torch.int32), r"table must have shape \[any, 64\]"),
        (torch.zeros(64, 9).bfloat16().T, torch.zeros(2, dtype=torch.int32), "table must be contiguous"),
        (torch.zeros(9, 64).bfloat16(), torch.zeros(2), r"indices must be torch\.int32"),
        (torch.zeros(9, 64).bfloat16(), torch.zeros(2, dtype=torch.int32, device="meta"), "indices is on meta"),
        (None, torch.zeros(2, dtype=torch.int32), "table must be a tensor, not NoneType"),
        (torch.zeros(9, 64).bfloat16(), torch.zeros(2, 2, dtype=torch.int32), r"indices must have shape \[any\]"),
        (
            torch.zeros(9 * 64 + 1).bfloat16()[1:].view(9, 64),
            torch.zeros(2, dtype=torch.int32),
            "table starts at .*16 bytes",
        ),
    ],
)
def test_gather_names_wrong_arguments(table: Tensor, indices: Tensor, message: str) -> None:
    kernel = RecordingKernel(GatherRowsSpec(BF16, 64))
    with pytest.raises(InputError, match=f"gather_rows: {message}"):
        GatherRows(kernel)(table, indices)  # type: ignore[arg-type]
    assert kernel.launches == []


@pytest.mark.parametrize(
    ("logits", "message"),
    [
        (torch.zeros(2, 100).bfloat16(), r"logits must be torch\.float32"),
        (torch.zeros(2, 100, device="meta"), "logits is on meta"),
        (None, "logits must be a tensor, not NoneType"),
        (torch.zeros(2, 99), r"logits must have shape \[any, 100\]"),
        (torch.zeros(100), r"logits must have shape \[any, 100\]"),
        (torch.zeros(100, 2).T, "logits must be contiguous"),
        (torch.zeros(1, 200)[:, ::2], "logits must be contiguous"),
        (torch.zeros(1, 100).expand(3, 100), "logits must be contiguous"),
    ],
)
def test_argmax_names_wrong_arguments(logits: Tensor, message: str) -> None:
    kernel = RecordingKernel(ArgmaxSpec(100))
    with pytest.raises(InputError, match=f"argmax: {message}"):
        Argmax(kernel)(logits)  # type: ignore[arg-type]
    assert kernel.launches == []


@pytest.mark.compile
def test_kernels_in_the_emulator(emulate: Emulate) -> None:
    """The kernels' source, run on the host thread by thread: every alignment, ties, NaN, bad indices, FP8 codes."""
    assert emulate("rows", "epilogue", "epilogue_fp8", "candidate") == ""
