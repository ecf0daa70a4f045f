"""Decode attention: the kernel against a float32 reference, what must not reach its results, and its CPU half."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from futransformer.build.compile import build_kernels
from futransformer.build.sass import count_instructions, occurrences
from futransformer.build.settings import BuildSettings
from futransformer.generator.config import CONFIGS, load_config
from futransformer.generator.errors import InputError, UnsupportedError
from futransformer.generator.heuristics import attention_decode_spec
from futransformer.generator.precision import BF16, E4M3, Element, get_precision
from futransformer.generator.specs import PAGE_SIZE, AttentionDecodeSpec, Heads
from futransformer.library import KernelLibrary
from futransformer.ops import attention_decode
from futransformer.ops.attention_decode import AttentionDecode, choose_pages_per_split
from futransformer.ops.interface import Ops
from futransformer.reference import ReferenceOps, allowed_error, as_bytes, largest_error
from tests.ops import models
from tests.ops.fp8 import KV_SCALE, stored_kv, worth_of_kv

KV8_MODELS = ("smollm2-135m-kv8", "llama-3.1-8b-kv8", "group16-kv8")
MODELS = ("smollm2-135m", "llama-2-7b", "llama-3.1-8b", "llama-3-70b", "group16", *KV8_MODELS)
IN_BF16 = ("smollm2-135m", "llama-3.1-8b")
BOTH_HEAD_DIMS = (*IN_BF16, "smollm2-135m-kv8", "llama-3.1-8b-kv8")
LENGTHS = (1000, 0, 1, 63, 64, 65, 4097)
SPLITS = (1, 3, 1000)  # pages; the last is the whole sequence in one block
CHOSEN_AND_FIXED: tuple[dict[str, Any], ...] = ({}, {"pages_per_split": 1}, {"pages_per_split": 1000})

GpuOps = Callable[[str], KernelLibrary]
Emulate = Callable[..., str]


def ragged(batch: int) -> list[int]:
    """Lengths of a batch: all of LENGTHS in turn, starting elsewhere in each batch size."""
    return [LENGTHS[(index + batch - 1) % len(LENGTHS)] for index in range(batch)]


def attend(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype) -> Tensor:
    """Attention of one query over one sequence: q [heads, D], k and v [length, kv heads, D] -> [heads, D].

    Everything is computed in float32; P and the result are rounded to ``dtype``.
    """
    if k.shape[0] == 0:
        return torch.zeros_like(q, dtype=dtype)
    k, v = (t.float().repeat_interleave(q.shape[0] // t.shape[1], 1) for t in (k, v))
    scores = torch.einsum("hd,khd->hk", q.float(), k) * q.shape[1] ** -0.5
    p = torch.exp(scores - scores.amax(-1, keepdim=True))
    return (torch.einsum("hk,khd->hd", p.to(dtype).float(), v) / p.sum(-1, keepdim=True)).to(dtype)


class Problem:
    """A batch of sequences in shuffled pages, with NaN and garbage wherever nothing may be read.

    With ``codes`` the pages hold E4M3; ``keys`` and ``values`` are what these are worth.
    """

    def __init__(self, ops: Ops, heads: Heads, lengths: Sequence[int], *, codes: bool = False) -> None:
        self.ops, self.heads, self.lengths = ops, heads, list(lengths)
        self.kv_scale = torch.tensor(KV_SCALE, device=ops.device) if codes else None
        device, kv_shape = ops.device, (heads.num_key_value_heads, heads.head_dim)
        queries = []
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        for index, length in enumerate(lengths):  # a sequence's values depend on nothing but its place and length
            generator = torch.Generator(device).manual_seed(index)
            queries.append(torch.randn(heads.q_features, generator=generator, device=device).bfloat16())
            for part, dense in enumerate((self.keys, self.values)):
                drawn = torch.randn(length, *kv_shape, generator=generator, device=device)
                dense.append(worth_of_kv(stored_kv(drawn, self.kv_scale, part), self.kv_scale, part))
        self.q = torch.stack(queries)
        self.seqlens_k = torch.tensor(self.lengths, dtype=torch.int32, device=device)
        self._fill_pages(torch.Generator().manual_seed(len(lengths)))

    def _fill_pages(self, generator: torch.Generator) -> None:
        device, heads = self.ops.device, self.heads
        counts = [-(-length // PAGE_SIZE) for length in self.lengths]
        spare = 3
        shuffled = torch.randperm(sum(counts) + spare, generator=generator).tolist()
        shape = (len(shuffled), heads.num_key_value_heads, PAGE_SIZE, heads.head_dim)
        dtype = torch.bfloat16 if self.kv_scale is None else torch.float8_e4m3fn
        self.k_pages, self.v_pages = (torch.full(shape, torch.nan, dtype=dtype, device=device) for _ in range(2))
        # Past a sequence's end: pages of NaN, and numbers that are no page at all.
        garbage = torch.tensor([shuffled.pop() for _ in range(spare)] + [-1, 2**31 - 1, -(2**31)], dtype=torch.int32)
        block_table = garbage[torch.randint(len(garbage), (len(counts), max(counts) + 2), generator=generator)]
        for sequence, count in enumerate(counts):
            for index in range(count):
                page, first = shuffled.pop(), index * PAGE_SIZE
                block_table[sequence, index] = page
                for part, (pages, dense) in enumerate(((self.k_pages, self.keys), (self.v_pages, self.values))):
                    rows = stored_kv(dense[sequence][first : first + PAGE_SIZE], self.kv_scale, part)
                    as_bytes(pages)[page, :, : rows.shape[0]] = as_bytes(rows.transpose(0, 1))
        self.block_table = block_table.to(device)

    def arguments(self, rows: slice = slice(None)) -> dict[str, Any]:
        """Arguments of the op for some of the sequences."""
        return {
            "q": self.q[rows].contiguous(),
            "k_pages": self.k_pages,
            "v_pages": self.v_pages,
            "block_table": self.block_table[rows].contiguous(),
            "seqlens_k": self.seqlens_k[rows].contiguous(),
            "max_seqlen_k": max(self.lengths[rows]),
            "kv_scale": self.kv_scale,
        }

    def run(self, rows: slice = slice(None), **options: Any) -> Tensor:
        """The kernel's answer for some of the sequences: everything written, nothing outside."""
        arguments = self.arguments(rows) | options
        sequences = arguments["q"].shape[0]
        room = torch.full((sequences + 2, self.heads.q_features), torch.nan, dtype=torch.bfloat16, device=self.q.device)
        out = room[1 : 1 + sequences]
        if "pages_per_split" in options:
            assert isinstance(self.ops, KernelLibrary)
            returned = self.ops._attention_decode(**arguments, out=out)
        else:
            returned = self.ops.attention_decode(**arguments, out=out)
        assert returned is out
        assert room[0].isnan().all(), "the row before the output was written"
        assert room[-1].isnan().all(), "the row behind the output was written"
        return out

    def check(self, out: Tensor) -> None:
        """Hold every head of every sequence to the tolerance rule of its sequence."""
        for sequence, length in enumerate(self.lengths):
            exact, rounded = (
                attend(
                    self.q[sequence].view(-1, self.heads.head_dim), self.keys[sequence], self.values[sequence], dtype
                )
                for dtype in (torch.float32, torch.bfloat16)
            )
            error = largest_error(out[sequence].view_as(exact), exact)
            allowed = allowed_error(rounded, exact, get_precision("bf16"))
            assert error <= allowed, f"sequence {sequence} of {length} tokens: error {error:.3e}, allowed {allowed:.3e}"


def on_gpu(gpu_ops: GpuOps, model: str, lengths: Sequence[int]) -> Problem:
    """A problem for the generated kernel of a model."""
    ops = gpu_ops(model)
    spec = ops.plan.attention_decode
    return Problem(ops, spec.heads, lengths, codes=spec.element == E4M3)


def same_bits(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.view(torch.int16), right.view(torch.int16))


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 2, 3, 5, 17, 33, 129])
@pytest.mark.parametrize("model", MODELS)
def test_ragged_batches(gpu_ops: GpuOps, model: str, batch: int) -> None:
    problem = on_gpu(gpu_ops, model, ragged(batch))
    problem.check(problem.run())


@pytest.mark.gpu
@pytest.mark.parametrize("pages_per_split", SPLITS)
@pytest.mark.parametrize("model", MODELS)
def test_fixed_splits(gpu_ops: GpuOps, model: str, pages_per_split: int) -> None:
    problem = on_gpu(gpu_ops, model, LENGTHS)
    problem.check(problem.run(pages_per_split=pages_per_split))


@pytest.mark.gpu
@pytest.mark.parametrize("model", BOTH_HEAD_DIMS)
def test_every_run_gives_the_same_bits(gpu_ops: GpuOps, model: str) -> None:
    """Whichever split arrives last combines; and it leaves the counters as it found them."""
    problem = on_gpu(gpu_ops, model, ragged(17))
    ops = problem.ops
    assert isinstance(ops, KernelLibrary)
    for options in CHOSEN_AND_FIXED:
        expected = problem.run(**options)
        for repeat in range(50):
            assert same_bits(problem.run(**options), expected), f"run {repeat} differs"
            assert not ops._attention_decode.workspace.arrivals.any(), f"run {repeat} left a counter"


@pytest.mark.gpu
@pytest.mark.parametrize("pages_per_split", SPLITS)
@pytest.mark.parametrize("model", BOTH_HEAD_DIMS)
def test_a_row_equals_its_solo_run(gpu_ops: GpuOps, model: str, pages_per_split: int) -> None:
    problem = on_gpu(gpu_ops, model, ragged(33))
    together = problem.run(pages_per_split=pages_per_split)
    for row in range(33):
        alone = problem.run(slice(row, row + 1), pages_per_split=pages_per_split)
        assert same_bits(alone[0], together[row]), f"row {row} of {problem.lengths[row]} tokens"


@pytest.mark.gpu
@pytest.mark.parametrize("model", BOTH_HEAD_DIMS)
def test_neighbours_do_not_matter(gpu_ops: GpuOps, model: str) -> None:
    """Another length, or NaN everywhere, in the middle sequence leaves the others' bits alone."""
    expected = on_gpu(gpu_ops, model, [1000, 500, 65]).run()
    for middle in (0, 1, 64, 999):
        problem = on_gpu(gpu_ops, model, [1000, middle, 65])
        problem.q[1] = torch.nan
        for index in range(-(-middle // PAGE_SIZE)):
            for pages in (problem.k_pages, problem.v_pages):
                pages[int(problem.block_table[1, index])].fill_(torch.nan)
        out = problem.run()
        assert out[1].isnan().all() if middle else not out[1].any()
        assert same_bits(out[0], expected[0]), f"{middle} tokens changed the row before"
        assert same_bits(out[2], expected[2]), f"{middle} tokens changed the row behind"


@pytest.mark.gpu
@pytest.mark.parametrize("model", BOTH_HEAD_DIMS)
def test_large_scores(gpu_ops: GpuOps, model: str) -> None:
    """Queries of 100: scores of some thousands, whose exponentials overflow without the maximum."""
    problem = on_gpu(gpu_ops, model, LENGTHS)
    problem.q *= 100
    out = problem.run(pages_per_split=4)
    assert out.isfinite().all()
    problem.check(out)


@pytest.mark.gpu
@pytest.mark.parametrize("model", IN_BF16)
def test_scores_of_minus_infinity_weigh_nothing(gpu_ops: GpuOps, model: str) -> None:
    """Whole warps and splits whose every score is -inf, beside others that are finite."""
    problem = on_gpu(gpu_ops, model, [300])
    head_dim = problem.heads.head_dim
    largest = torch.finfo(torch.bfloat16).max
    problem.q[:] = 1
    for index in range(4):  # all but the last page
        problem.k_pages[problem.block_table[0, index]] = -largest
    problem.keys[0][: 4 * PAGE_SIZE] = -largest
    assert torch.tensor(-largest).mul(head_dim).isinf()
    problem.check(problem.run(pages_per_split=1))
    problem.check(problem.run(pages_per_split=1000))


@pytest.mark.gpu
@pytest.mark.parametrize("model", BOTH_HEAD_DIMS)
def test_long_context_of_ones(gpu_ops: GpuOps, model: str) -> None:
    """Over 32k tokens with V = 1 the weights must sum to 1: no drift of the running sums or in combining."""
    problem = on_gpu(gpu_ops, model, [32_768, 32_700, 1])
    one = torch.ones(1) if problem.kv_scale is None else (1 / problem.kv_scale[1:]).cpu()
    code = one.to(problem.v_pages.dtype)
    is_nan = problem.v_pages.float().isnan()
    as_bytes(problem.v_pages)[~is_nan] = as_bytes(code).to(problem.v_pages.device)
    want = worth_of_kv(code, None if problem.kv_scale is None else problem.kv_scale.cpu(), 1).float().item()
    for options in CHOSEN_AND_FIXED:
        assert (problem.run(**options).float() / want - 1).abs().max() <= 2.0**-8


@pytest.mark.gpu
@pytest.mark.parametrize("model", BOTH_HEAD_DIMS)
def test_longer_than_announced_is_still_right(gpu_ops: GpuOps, model: str) -> None:
    """The grid is sized for max_seqlen_k; a sequence that has outgrown it gives its last block more to do."""
    problem = on_gpu(gpu_ops, model, [1000, 65, 4097])
    problem.check(problem.run(max_seqlen_k=200, pages_per_split=2))
    problem.check(problem.run(max_seqlen_k=0))


@pytest.mark.gpu
@pytest.mark.parametrize("model", BOTH_HEAD_DIMS)
def test_longer_than_the_block_table_is_nan(gpu_ops: GpuOps, model: str) -> None:
    problem = on_gpu(gpu_ops, model, [65, 500, 128])
    problem.block_table = problem.block_table[:, :2].contiguous()
    out = problem.run(max_seqlen_k=128)
    assert out[1].isnan().all()
    assert out[0].isfinite().all()
    assert out[2].isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("model", BOTH_HEAD_DIMS)
def test_graph_replays_equal_eager_runs(gpu_ops: GpuOps, model: str) -> None:
    """A captured launch serves growing sequences, past page and split boundaries, and outlives a larger workspace."""
    problem = on_gpu(gpu_ops, model, [700, 640, 1])
    ops = problem.ops
    assert isinstance(ops, KernelLibrary)
    # This op of its own, so that its workspace has the size of this test alone.
    op = AttentionDecode(ops._attention_decode.kernel)
    out = torch.full_like(problem.q, torch.nan)
    options = {"out": out, "pages_per_split": 3}
    op(**problem.arguments() | options)
    arguments = problem.arguments() | options
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        op(**arguments)
    larger = on_gpu(gpu_ops, model, [4097] * 17)
    op(**larger.arguments(), pages_per_split=1)
    for length in (1, 63, 64, 65, 192, 193, 576, 577, 700):
        arguments["seqlens_k"][0] = length
        out.fill_(torch.nan)
        graph.replay()
        replayed = out.clone()
        out.fill_(torch.nan)
        op(**arguments)
        assert same_bits(replayed, out), f"{length} tokens"


@pytest.mark.gpu
def test_a_workspace_does_not_grow_in_a_capture(gpu_ops: GpuOps) -> None:
    problem = on_gpu(gpu_ops, "smollm2-135m", [700, 640])
    ops = problem.ops
    assert isinstance(ops, KernelLibrary)
    op = AttentionDecode(ops._attention_decode.kernel)
    arguments = problem.arguments()
    with (
        pytest.raises(InputError, match="workspace must grow while a CUDA graph is captured"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        op(**arguments, pages_per_split=1)


@pytest.mark.gpu
@pytest.mark.parametrize("model", BOTH_HEAD_DIMS)
def test_streams_take_turns(gpu_ops: GpuOps, model: str) -> None:
    """Launches from two streams share one workspace, and do not meet in it."""
    problems = [on_gpu(gpu_ops, model, lengths) for lengths in ([4097, 1000, 65], [3000, 2000, 129])]
    expected = [problem.run(pages_per_split=1) for problem in problems]
    streams = [torch.cuda.Stream() for _ in problems]  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    for _ in range(20):
        outs = []
        for problem, stream in zip(problems, streams, strict=True):
            with torch.cuda.stream(stream):
                outs.append(problem.run(pages_per_split=1))
        torch.cuda.synchronize()
        assert all(same_bits(out, want) for out, want in zip(outs, expected, strict=True))


@pytest.mark.parametrize("codes", [False, True])
@pytest.mark.parametrize("model", ["smollm2-135m", "llama-3.2-1b"])
def test_reference(model: str, codes: bool) -> None:
    """The PyTorch operation passes what the kernel must pass."""
    config = load_config(model)
    problem = Problem(ReferenceOps(config), config.heads, [1, 0, 63, 64, 65, 300], codes=codes)
    problem.check(problem.run())


@pytest.mark.parametrize("precision", ["bf16", "bf16-kv8"])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_model_has_a_legal_spec(name: str, precision: str) -> None:
    heads, element_bytes = load_config(name).heads, get_precision(precision).kv.bits // 8
    spec = attention_decode_spec(heads, get_precision(precision))
    assert str(heads) in spec.name
    assert spec.threads == 160
    assert spec.shared_bytes == spec.stages * (2 * PAGE_SIZE * heads.head_dim * element_bytes + 16) + 16
    assert spec.blocks_per_sm * (spec.shared_bytes + 1024) <= 228 * 1024
    assert spec.blocks_per_sm >= 2, "one block combines while another streams"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": Heads(32, 8, 96)}, "head_dim must be 64 or 128"),
        ({"heads": Heads(32, 5, 64)}, "divide evenly"),
        ({"heads": Heads(17, 1, 64)}, "at most 16 query heads"),
        ({"element": Element("int4", "uint8_t", 4)}, "pages hold BF16 or E4M3"),
        ({"warps": 8}, "warps must be 4"),
        ({"stages": 1}, "two stages"),
        ({"stages": 8}, "shared memory"),
    ],
)
def test_illegal_specs_are_refused(changes: dict[str, Any], message: str) -> None:
    fields: dict[str, Any] = {"element": BF16, "heads": Heads(32, 8, 128), "warps": 4, "stages": 3}
    with pytest.raises(UnsupportedError, match=message):
        AttentionDecodeSpec(**{**fields, **changes})


@pytest.mark.parametrize(
    ("max_pages", "sequence_heads", "pages_per_split"),
    [
        (1, 8, 1),  # nothing to split
        (64, 8, 2),  # 4k tokens of one 8B sequence: 256 of 264 blocks at once
        (64, 256, 64),  # 32 sequences fill the card by themselves
        (2048, 8, 63),  # 128k tokens: 264 blocks
        (1, 100_000, 1),
    ],
)
def test_choice_of_split(max_pages: int, sequence_heads: int, pages_per_split: int) -> None:
    assert choose_pages_per_split(max_pages, sequence_heads, 264) == pages_per_split


def test_a_split_balances_the_last_wave() -> None:
    """272 unsplit blocks on 264 places would run for two waves; the choice stays near the ideal of even work."""
    pages = choose_pages_per_split(64, 272, 264)
    waves = -(-(-(-64 // pages) * 272) // 264)
    assert waves * pages <= 1.25 * 64 * 272 / 264


class RecordingKernel:
    """Stands in for a loaded kernel on the CPU: remembers its launches."""

    def __init__(self, heads: Heads, element: Element = BF16) -> None:
        self.spec = AttentionDecodeSpec(element, heads, warps=4, stages=3)
        self.device = torch.device("cpu")
        self.sm_count = 132
        self.launches: list[tuple[tuple[int, int, int], dict[str, Any]]] = []

    def launch(self, grid: tuple[int, int, int], **arguments: Any) -> None:
        self.launches.append((grid, arguments))


def small_inputs() -> dict[str, Any]:
    """Three sequences of up to 200 tokens, 8 heads and 2 key/value heads of 64 features."""
    pages = torch.zeros(9, 2, PAGE_SIZE, 64, dtype=torch.bfloat16)
    return {
        "q": torch.zeros(3, 512, dtype=torch.bfloat16),
        "k_pages": pages,
        "v_pages": pages.clone(),
        "block_table": torch.zeros(3, 5, dtype=torch.int32),
        "seqlens_k": torch.tensor([200, 100, 0], dtype=torch.int32),
        "max_seqlen_k": 200,
    }


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> RecordingKernel:
    def encode(tensor: Tensor, box_rows: int, box_columns: int) -> SimpleNamespace:
        return SimpleNamespace(shape=tuple(tensor.shape), box=(box_rows, box_columns))

    monkeypatch.setattr(attention_decode, "tensor_map_2d", encode)
    return RecordingKernel(Heads(8, 2, 64))


def test_launch(recorded: RecordingKernel) -> None:
    """Every parameter of the ABI once; a grid of splits, heads and sequences; boxes as the kernel expects them."""
    inputs = small_inputs()
    out = torch.empty_like(inputs["q"])
    assert AttentionDecode(recorded)(**inputs, out=out, pages_per_split=3) is out  # type: ignore[arg-type]
    ((grid, arguments),) = recorded.launches
    assert grid == (2, 2, 3)
    assert list(arguments) == [param.name for param in recorded.spec.params]
    for name in ("k_pages", "v_pages"):
        assert (arguments[name].shape, arguments[name].box) == ((9 * 2 * PAGE_SIZE, 64), (PAGE_SIZE, 64))
    assert arguments["out"] is out
    assert arguments["block_table_stride"] == 5
    assert arguments["pages_per_split"] == 3
    assert arguments["softmax_scale"] == 0.125
    assert arguments["partial_out"].numel() >= 3 * 2 * 2 * 4 * 64
    assert arguments["partial_max_sum"].numel() >= 3 * 2 * 2 * 4 * 2
    assert arguments["arrivals"].numel() >= 3 * 2
    assert not arguments["arrivals"].any()


def in_codes(inputs: dict[str, Any]) -> dict[str, Any]:
    """The same inputs over pages of E4M3."""
    pages = {name: inputs[name].to(torch.float8_e4m3fn) for name in ("k_pages", "v_pages")}
    return {**inputs, **pages, "kv_scale": torch.tensor(KV_SCALE)}


def test_pages_of_codes(recorded: RecordingKernel) -> None:
    """A page is one box of 128 columns; codes come with their scales, and BF16 without."""
    kernel, inputs = RecordingKernel(Heads(8, 2, 64), E4M3), in_codes(small_inputs())
    op = AttentionDecode(kernel)  # type: ignore[arg-type]
    op(**inputs)
    ((_, arguments),) = kernel.launches
    assert list(arguments) == [param.name for param in kernel.spec.params]
    for name in ("k_pages", "v_pages"):
        assert (arguments[name].shape, arguments[name].box) == ((9 * 2 * PAGE_SIZE // 2, 128), (PAGE_SIZE // 2, 128))
    assert arguments["kv_scale"] is inputs["kv_scale"]
    for changes, message in (
        ({"kv_scale": None}, "the cache of this kernel holds codes and needs kv_scale"),
        ({"kv_scale": torch.ones(1)}, r"kv_scale must have shape \[2\]"),
        ({"k_pages": small_inputs()["k_pages"]}, r"k_pages must be torch\.float8_e4m3fn"),
    ):
        with pytest.raises(InputError, match=f"attention_decode: {message}"):
            op(**{**inputs, **changes})
    with pytest.raises(InputError, match="attention_decode: the cache of this kernel holds no codes"):
        AttentionDecode(recorded)(**small_inputs(), kv_scale=torch.ones(2))  # type: ignore[arg-type]
    assert (len(kernel.launches), recorded.launches) == (1, [])


def test_the_op_chooses_a_split(recorded: RecordingKernel) -> None:
    AttentionDecode(recorded)(**small_inputs())  # type: ignore[arg-type]
    ((grid, arguments),) = recorded.launches
    assert (grid, arguments["pages_per_split"]) == ((4, 2, 3), 1)


def test_a_larger_workspace_replaces_and_keeps_the_smaller(recorded: RecordingKernel) -> None:
    op = AttentionDecode(recorded)  # type: ignore[arg-type]
    inputs = small_inputs()
    for pages_per_split in (2, 1, 2):
        op(**inputs, pages_per_split=pages_per_split)
    small, large, again = (arguments["partial_out"] for _, arguments in recorded.launches)
    assert large.numel() == 2 * small.numel()
    assert again is large
    assert any(kept is small for kept in op.workspace._retired), "a captured graph may still write to it"


def test_nothing_to_do_launches_nothing(recorded: RecordingKernel) -> None:
    inputs = small_inputs()
    inputs |= {name: inputs[name][:0] for name in ("q", "block_table", "seqlens_k")} | {"max_seqlen_k": 0}
    assert AttentionDecode(recorded)(**inputs).shape == (0, 512)  # type: ignore[arg-type]
    assert recorded.launches == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(3, 512)}, r"q must be torch\.bfloat16"),
        ({"q": torch.zeros(3, 256, dtype=torch.bfloat16)}, r"q must have shape \[any, 512\]"),
        ({"q": torch.tensor(0, dtype=torch.bfloat16)}, "q must have shape"),
        ({"q": None}, "q must be a tensor, not NoneType"),
        (
            {"seqlens_k": torch.zeros(3, dtype=torch.int32, device="meta")},
            "seqlens_k is on meta, the kernels are on cpu",
        ),
        ({"q": torch.zeros(512, 3, dtype=torch.bfloat16).T}, "q must be contiguous"),
        ({"q": torch.zeros(3 * 512 + 1, dtype=torch.bfloat16)[1:].view(3, 512)}, "q starts at .*16 bytes"),
        ({"k_pages": torch.zeros(9, 2, 32, 64, dtype=torch.bfloat16)}, "k_pages must have shape"),
        ({"v_pages": torch.zeros(8, 2, 64, 64, dtype=torch.bfloat16)}, "v_pages must have shape"),
        ({"k_pages": torch.zeros(0, 2, 64, 64, dtype=torch.bfloat16), "v_pages": None}, "k_pages holds no page"),
        ({"block_table": torch.zeros(3, 5)}, r"block_table must be torch\.int32"),
        ({"block_table": torch.zeros(2, 5, dtype=torch.int32)}, r"block_table must have shape \[3, any\]"),
        ({"seqlens_k": torch.zeros(2, dtype=torch.int32)}, r"seqlens_k must have shape \[3\]"),
        ({"out": torch.zeros(2, 512, dtype=torch.bfloat16)}, r"out must have shape \[3, 512\]"),
        ({"max_seqlen_k": 321}, "max_seqlen_k is 321, but block_table names 5 pages"),
        ({"max_seqlen_k": -1}, "max_seqlen_k is -1"),
        ({"pages_per_split": 0}, "pages_per_split must be at least 1, not 0"),
    ],
)
def test_wrong_arguments_are_named(recorded: RecordingKernel, changes: dict[str, Any], message: str) -> None:
    inputs = {**small_inputs(), **changes}
    if inputs["v_pages"] is None:
        inputs["v_pages"] = inputs["k_pages"].clone()
    with pytest.raises(InputError, match=f"attention_decode: {message}"):
        AttentionDecode(recorded)(**inputs)  # type: ignore[arg-type]
    assert recorded.launches == []


def test_the_grid_bounds_the_batch(recorded: RecordingKernel) -> None:
    sequences = 65_536
    inputs = small_inputs() | {
        "q": torch.zeros(sequences, 512, dtype=torch.bfloat16),
        "block_table": torch.zeros(sequences, 5, dtype=torch.int32),
        "seqlens_k": torch.zeros(sequences, dtype=torch.int32),
    }
    with pytest.raises(InputError, match="65536 sequences, at most 65535"):
        AttentionDecode(recorded)(**inputs)  # type: ignore[arg-type]


@pytest.mark.compile
@pytest.mark.parametrize("model", [*BOTH_HEAD_DIMS, "group16", "group16-kv8"])
def test_kernel_compiles_to_its_instructions(model: str) -> None:
    """Tensor Cores, TMA and movmatrix, no access to local memory; the build itself refuses spills."""
    settings = BuildSettings.from_environment()
    spec = models.tested_plan(model).attention_decode
    (record,) = build_kernels([spec], settings=settings)
    counts = count_instructions(record.cubin, settings)
    steps, head_tiles = spec.heads.head_dim // 16, -(-spec.heads.group // 8)
    assert occurrences(counts, "HMMA.16816.F32.BF16") == 2 * steps * head_tiles
    assert occurrences(counts, "LDSM") == 2 * steps * spec.element.bits // 16  # sixteen bytes of each of 32 rows
    assert occurrences(counts, "UTMALDG") > 0
    assert occurrences(counts, "MOVM") == 2 * head_tiles
    assert occurrences(counts, "LDL") == occurrences(counts, "STL") == 0


@pytest.mark.compile
def test_kernel_in_the_emulator(emulate: Emulate) -> None:
    """The kernel's source, run on the host thread by thread: layouts, masks, the ring's protocol, the combine."""
    printed = emulate("attention_decode", "attention_decode_pages", "e4m3_operand")
    assert printed.count("allowed error\n") == 2 * 13
