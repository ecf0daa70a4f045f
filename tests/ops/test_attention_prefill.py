"""Prefill attention: the kernel against a float32 reference, what must not reach its results, and its CPU half."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from futransformer.build.compile import build_kernels
from futransformer.build.sass import count_instructions, find_nvdisasm, occurrences
from futransformer.build.settings import BuildSettings
from futransformer.build.toolchain import find_cutlass_include, find_host_compiler, find_nvcc
from futransformer.generator.config import load_config
from futransformer.generator.errors import InputError, UnsupportedError
from futransformer.generator.plan import make_plan
from futransformer.generator.precision import BF16, E4M3, E4M3_MAX, PRECISIONS, Element, get_precision
from futransformer.generator.specs import PAGE_SIZE, AttentionPrefillSpec, Heads
from futransformer.library import KernelLibrary
from futransformer.ops import attention_prefill
from futransformer.ops.attention_prefill import AttentionPrefill
from futransformer.ops.interface import Ops
from futransformer.reference import ReferenceOps, allowed_error, as_bytes, largest_error
from tests.ops.fp8 import E4M3_ROUNDING, KV_SCALE, check_fp8_statistics, fp8_output, stored_kv, worth_of_kv

MODELS = ("smollm2-135m", "llama-2-7b", "llama-3.1-8b", "llama-3-70b", "group16")
BOTH_HEAD_DIMS = ("smollm2-135m", "llama-3.1-8b")
FP8_MODELS = ("smollm2-135m-fp8", "llama-3.1-8b-fp8")
KV8_MODELS = ("smollm2-135m-kv8", "llama-3.1-8b-kv8", "group16-kv8")  # of these the second writes FP8
EVERY_OUTPUT = BOTH_HEAD_DIMS + FP8_MODELS + KV8_MODELS[:2]
ROUNDING = 2.0**-9  # of BF16, relative

RAGGED = (0, 1, 17, 63, 64, 65, 0, 127, 128, 129, 1088, 0)
# (queries, keys): a later turn's queries are the last of a longer sequence
LATER_TURNS = (
    (1, 1),
    (1, 65),
    (17, 81),
    (64, 200),
    (65, 1088),
    (128, 129),
    (0, 500),
    (129, 257),
    (3, 2048),
    (300, 363),
)

GpuOps = Callable[[str], KernelLibrary]


def attend(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype) -> Tensor:
    """Causal attention of the last queries of one sequence: q [Q, heads, D], k and v [K, kv heads, D] -> [Q, heads, D].

    Everything is computed in float32; P is rounded to ``dtype``. A query that sees no key gives zeros.
    """
    (queries, heads, head_dim), length = q.shape, k.shape[0]
    out = torch.zeros(queries, heads, head_dim, device=q.device)
    if length == 0:
        return out
    k, v = (t.float().repeat_interleave(heads // t.shape[1], 1) for t in (k, v))
    position = torch.arange(length, device=q.device)
    for first in range(0, queries, 256):
        block = slice(first, min(first + 256, queries))
        scores = torch.einsum("qhd,khd->hqk", q[block].float(), k) * head_dim**-0.5
        sees_to = torch.arange(block.start, block.stop, device=q.device)[:, None] + length - queries
        scores = scores.masked_fill(position > sees_to, -torch.inf)
        p = torch.exp(scores - scores.amax(-1, keepdim=True)).nan_to_num(0)
        total = p.sum(-1).T[:, :, None]
        attended = torch.einsum("hqk,khd->qhd", p.to(dtype).float(), v)
        out[block] = torch.where(total > 0, attended / total, 0)
    return out


class Problem:
    """Sequences of (queries, keys) tokens in shuffled pages, with NaN and garbage wherever nothing may be read.

    With ``fp8`` the result is written in FP8, and beyond 2 it saturates: where a query sees few keys. With ``codes``
    the pages hold E4M3; ``keys`` and ``values`` are what these are worth.
    """

    def __init__(
        self,
        ops: Ops,
        heads: Heads,
        lengths: Sequence[tuple[int, int]],
        seed: int = 0,
        *,
        fp8: bool = False,
        codes: bool = False,
    ) -> None:
        self.ops, self.heads, self.lengths, self.fp8 = ops, heads, tuple(lengths), fp8
        self.kv_scale = torch.tensor(KV_SCALE, device=ops.device) if codes else None
        device, kv_shape = ops.device, (heads.num_key_value_heads, heads.head_dim)
        sequences = []
        for index, (queries, keys) in enumerate(
            lengths
        ):  # a sequence's values depend on nothing but its place and length
            generator = torch.Generator(device).manual_seed(1000 * seed + index)
            q = torch.randn(queries, heads.q_features, generator=generator, device=device)
            drawn = [torch.randn(keys, *kv_shape, generator=generator, device=device) for _ in range(2)]
            k, v = (
                worth_of_kv(stored_kv(values, self.kv_scale, part), self.kv_scale, part)
                for part, values in enumerate(drawn)
            )
            sequences.append((q.bfloat16(), k, v))
        qs, self.keys, self.values = (list(tensors) for tensors in zip(*sequences, strict=True))
        self.q = torch.cat(qs)
        self.offsets = torch.tensor([0, *(queries for queries, _ in lengths)]).cumsum(0).tolist()
        self._fill_pages(torch.Generator().manual_seed(seed))

    def _fill_pages(self, generator: torch.Generator) -> None:
        device, heads = self.ops.device, self.heads
        pages = [-(-keys // PAGE_SIZE) for _, keys in self.lengths]
        spare = 5
        shuffled = torch.randperm(sum(pages) + spare, generator=generator).tolist()
        shape = (len(shuffled), heads.num_key_value_heads, PAGE_SIZE, heads.head_dim)
        dtype = torch.bfloat16 if self.kv_scale is None else torch.float8_e4m3fn
        self.k_pages, self.v_pages = (torch.full(shape, torch.nan, dtype=dtype, device=device) for _ in range(2))
        # Past a sequence's end: pages of NaN, and numbers that are no page at all.
        nan_pages = [shuffled.pop() for _ in range(spare)]
        garbage = torch.tensor([*nan_pages, -1, 2**31 - 1, -(2**31)], dtype=torch.int32)
        columns = max(pages) + 3
        block_table = garbage[torch.randint(len(garbage), (len(pages), columns), generator=generator)]
        for sequence, count in enumerate(pages):
            for index in range(count):
                page, first = shuffled.pop(), index * PAGE_SIZE
                block_table[sequence, index] = page
                for part, (cache, dense) in enumerate(((self.k_pages, self.keys), (self.v_pages, self.values))):
                    rows = stored_kv(dense[sequence][first : first + PAGE_SIZE], self.kv_scale, part)
                    as_bytes(cache)[page, :, : rows.shape[0]] = as_bytes(rows.transpose(0, 1))
        self.block_table = block_table.to(device)

    def run(self) -> Tensor:
        """The kernel's answer: everything written, nothing outside, and the same bits twice.

        Of FP8, what the codes are worth; ``written`` keeps the statistics.
        """
        device, rows, dtype = self.ops.device, self.q.shape[0], torch.float8_e4m3fn if self.fp8 else torch.bfloat16
        room = torch.full((rows + 256, self.heads.q_features), torch.nan, dtype=dtype, device=device)
        outs = [room[64 : 64 + rows], torch.full_like(self.q, torch.nan, dtype=dtype)]
        written = [fp8_output(torch.full((1,), 2 / E4M3_MAX, device=device)) for _ in outs]
        for out, fp8 in zip(outs, written, strict=True):
            self.ops.attention_prefill(
                self.q,
                self.k_pages,
                self.v_pages,
                self.block_table,
                torch.tensor(self.offsets, dtype=torch.int32, device=device),
                torch.tensor([keys for _, keys in self.lengths], dtype=torch.int32, device=device),
                max_seqlen_q=max(queries for queries, _ in self.lengths),
                out=out,
                fp8=fp8 if self.fp8 else None,
                kv_scale=self.kv_scale,
            )
        assert room[:64].float().isnan().all(), "rows before the output were written"
        assert room[64 + rows :].float().isnan().all(), "rows behind the output were written"
        assert torch.equal(outs[0].view(torch.uint8), outs[1].view(torch.uint8)), "two runs differ"
        if not self.fp8:
            return outs[1]
        self.written = written[1]
        assert [t.item() for t in written[0]] == [t.item() for t in self.written], "two runs differ"
        return outs[1].float() * self.written.scale

    def part(self, rows: Tensor, sequence: int) -> Tensor:
        """The rows of one sequence, [queries, heads, D]."""
        start, stop = self.offsets[sequence : sequence + 2]
        return rows[start:stop].view(stop - start, self.heads.num_attention_heads, self.heads.head_dim)

    def check(self, out: Tensor) -> None:
        """Hold every sequence to the tolerance rule, and every block of 16 columns to its row's size."""
        everything = []
        for sequence, (queries, keys) in enumerate(self.lengths):
            if queries == 0:
                continue
            actual, q = self.part(out, sequence), self.part(self.q, sequence)
            exact, rounded = (
                attend(q, self.keys[sequence], self.values[sequence], dtype)
                for dtype in (torch.float32, torch.bfloat16)
            )
            if self.fp8:
                everything.append(exact / self.written.scale)
                exact, rounded = exact.clamp(-2, 2), rounded.clamp(-2, 2)
                rounded = (rounded / self.written.scale).to(torch.float8_e4m3fn).float() * self.written.scale
            else:
                rounded = rounded.bfloat16()
            allowed, error = allowed_error(rounded, exact, get_precision("bf16")), largest_error(actual, exact)
            assert error <= allowed, f"{queries} queries, {keys} keys: error {error:.3e}, allowed {allowed:.3e}"
            errors, sizes = (
                t.view(*exact.shape[:2], -1, 16).square().mean(-1).sqrt() for t in (actual.float() - exact, exact)
            )
            size = exact.square().mean(-1, keepdim=True).sqrt()
            limits = 4 * ROUNDING * size + (E4M3_ROUNDING * sizes if self.fp8 else 0)
            worst = (errors - limits).max().item()
            assert worst <= 0, f"{queries} queries, {keys} keys: a 16-column block is off by {worst:.3e} too much"
        if self.fp8:
            check_fp8_statistics(self.written, torch.cat(everything), 4 * ROUNDING)


def on_gpu(gpu_ops: GpuOps, model: str, lengths: Sequence[tuple[int, int]]) -> Problem:
    """A problem for the generated kernel of a model."""
    ops = gpu_ops(model)
    spec = ops.plan.attention_prefill
    return Problem(ops, spec.heads, lengths, fp8=spec.fp8_out, codes=spec.element == E4M3)


@pytest.mark.gpu
@pytest.mark.parametrize("model", MODELS + FP8_MODELS + KV8_MODELS)
def test_ragged_prompts(gpu_ops: GpuOps, model: str) -> None:
    problem = on_gpu(gpu_ops, model, [(length, length) for length in RAGGED])
    problem.check(problem.run())


@pytest.mark.gpu
@pytest.mark.parametrize("model", MODELS + FP8_MODELS + KV8_MODELS)
def test_later_turns(gpu_ops: GpuOps, model: str) -> None:
    problem = on_gpu(gpu_ops, model, LATER_TURNS)
    problem.check(problem.run())


@pytest.mark.gpu
@pytest.mark.parametrize("length", [1, 17, 64, 127, 129, 1088])
@pytest.mark.parametrize("model", EVERY_OUTPUT)
def test_one_prompt(gpu_ops: GpuOps, model: str, length: int) -> None:
    """The only sequence: its last tile reaches past the end of q and of the pages."""
    problem = on_gpu(gpu_ops, model, [(length, length)])
    problem.check(problem.run())


@pytest.mark.gpu
@pytest.mark.parametrize("model", EVERY_OUTPUT)
def test_queries_that_see_no_key_give_zeros(gpu_ops: GpuOps, model: str) -> None:
    problem = on_gpu(gpu_ops, model, [(5, 2), (200, 0), (70, 70), (200, 3), (300, 130)])
    out = problem.run()
    problem.check(out)
    for sequence, (queries, keys) in enumerate(problem.lengths):
        assert not problem.part(out, sequence)[: queries - keys].any()


@pytest.mark.gpu
@pytest.mark.parametrize("model", EVERY_OUTPUT)
def test_neighbours_do_not_matter(gpu_ops: GpuOps, model: str) -> None:
    """Another length, or NaN everywhere, in the middle sequence leaves the others' bits alone."""
    around = [(65, 65), (130, 400)]
    want = on_gpu(gpu_ops, model, [around[0], (100, 100), around[1]])
    expected = want.run()
    for middle in ((0, 0), (1, 1), (100, 100), (1088, 1088), (77, 300)):
        problem = on_gpu(gpu_ops, model, [around[0], middle, around[1]])
        problem.part(problem.q, 1).fill_(torch.nan)
        for index in range(-(-middle[1] // PAGE_SIZE)):
            for pages in (problem.k_pages, problem.v_pages):
                pages[int(problem.block_table[1, index])].fill_(torch.nan)
        out = problem.run()
        assert problem.part(out, 1).isnan().all()
        for sequence in (0, 2):
            assert torch.equal(problem.part(out, sequence), want.part(expected, sequence)), (
                f"{middle} changed {sequence}"
            )


@pytest.mark.gpu
@pytest.mark.parametrize("model", BOTH_HEAD_DIMS + KV8_MODELS[:1])
def test_large_scores(gpu_ops: GpuOps, model: str) -> None:
    """Queries of 100: scores of some thousands, whose exponentials overflow without the maximum."""
    problem = on_gpu(gpu_ops, model, [(300, 300), (129, 1000), (1, 1)])
    problem.q *= 100
    out = problem.run()
    assert out.isfinite().all()
    problem.check(out)


@pytest.mark.gpu
@pytest.mark.parametrize("model", BOTH_HEAD_DIMS + KV8_MODELS[:1])
def test_peaked_scores(gpu_ops: GpuOps, model: str) -> None:
    """Queries of 5: a few keys make up a row, and the largest weight has to be exactly 1, which BF16 does not round."""
    problem = on_gpu(gpu_ops, model, [(300, 300), (600, 1500), (129, 1000)])
    problem.q *= 5
    problem.check(problem.run())


@pytest.mark.gpu
@pytest.mark.parametrize("model", BOTH_HEAD_DIMS)
def test_growing_scores(gpu_ops: GpuOps, model: str) -> None:
    """Keys that matter more the earlier they are met last: maxima grow, by a little and by a lot."""
    problem = on_gpu(gpu_ops, model, [(300, 1500), (1088, 1088), (129, 4000)])
    for keys in problem.keys:
        keys.mul_(torch.logspace(1, -1, len(keys), device=keys.device)[:, None, None])
    problem._fill_pages(torch.Generator().manual_seed(1))
    problem.check(problem.run())


@pytest.mark.gpu
@pytest.mark.parametrize("model", EVERY_OUTPUT)
def test_many_prompts(gpu_ops: GpuOps, model: str) -> None:
    """More items than blocks, and more sequences than a warp has lanes."""
    lengths = [(64 + 37 * index, 64 + 37 * index + 100 * (index % 3)) for index in range(40)]
    problem = on_gpu(gpu_ops, model, lengths)
    problem.check(problem.run())


@pytest.mark.gpu
@pytest.mark.parametrize("model", EVERY_OUTPUT)
def test_long_context_of_ones(gpu_ops: GpuOps, model: str) -> None:
    """Over 32k tokens with V = 1 the weights must sum to 1: no drift of the running sum or of its corrections."""
    problem = on_gpu(gpu_ops, model, [(200, 32_768), (130, 32_700)])
    one = torch.ones(1) if problem.kv_scale is None else 1 / problem.kv_scale[1:].cpu()
    code = one.to(problem.v_pages.dtype)
    is_nan = problem.v_pages.float().isnan()
    as_bytes(problem.v_pages)[~is_nan] = as_bytes(code).to(problem.v_pages.device)
    want = code.float().item() / one.item()
    out = problem.run().float()
    # at a scale of 2 / 448, 1 is the code 224
    rounding = abs(torch.tensor(want * 224).to(torch.float8_e4m3fn).float().item() / 224 - want) if problem.fp8 else 0
    assert (out - want).abs().max() <= 2 * ROUNDING + rounding


@pytest.mark.gpu
@pytest.mark.parametrize("model", EVERY_OUTPUT)
def test_a_sequence_longer_than_its_block_table_is_nan(gpu_ops: GpuOps, model: str) -> None:
    problem = on_gpu(gpu_ops, model, [(65, 65), (10, 320), (40, 40)])
    problem.block_table = problem.block_table[:, :3].contiguous()
    out = problem.run()
    assert problem.part(out, 1).isnan().all()
    assert problem.part(out, 0).isfinite().all()
    assert problem.part(out, 2).isfinite().all()


@pytest.mark.parametrize("codes", [False, True])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("model", ["smollm2-135m", "llama-3.2-1b"])
def test_reference(model: str, fp8: bool, codes: bool) -> None:
    """The PyTorch operation passes what the kernel must pass."""
    config = load_config(model)
    lengths = [(0, 0), (1, 1), (65, 65), (17, 81), (300, 363), (3, 130)]
    problem = Problem(ReferenceOps(config), config.heads, lengths, fp8=fp8, codes=codes)
    problem.check(problem.run())


def prefill_spec(**changes: Any) -> AttentionPrefillSpec:
    """The spec of an 8B model, with changes."""
    fields: dict[str, Any] = {"element": BF16, "heads": Heads(32, 8, 128), "tile_m": 128, "tile_n": 128, "stages": 2}
    return AttentionPrefillSpec(**{**fields, **changes})


@pytest.mark.parametrize("model", MODELS)
def test_every_head_geometry_has_a_legal_spec(model: str) -> None:
    heads = Heads(32, 2, 64) if model == "group16" else load_config(model).heads
    for tile_n, stages in ((128, 2), (64, 2), (64, 4)):
        spec = prefill_spec(heads=heads, tile_n=tile_n, stages=stages)
        tiles = 2 * 128 + 2 * stages * tile_n  # of Q, K and V, in rows
        plain = tiles * heads.head_dim * 2 + 4 * 32 + 8 * (2 * 2 + 4 * stages)
        assert spec.shared_bytes == plain
        of_codes = prefill_spec(heads=heads, tile_n=tile_n, stages=stages, element=E4M3)
        assert of_codes.shared_bytes == -(-plain // 1024) * 1024 + 2 * (tile_n * heads.head_dim + 8 * 2 + 4)
        assert str(heads) in spec.name
        assert f"128x{tile_n}_s{stages}_causal" in spec.name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": Heads(32, 8, 96)}, "head_dim must be 64 or 128"),
        ({"heads": Heads(32, 5, 64)}, "divide evenly"),
        ({"element": Element("int4", "uint8_t", 4)}, "pages hold BF16 or E4M3"),
        ({"tile_m": 64}, "tile_m must be 128"),
        ({"tile_n": 96}, "tile_n must be 64 or 128"),
        ({"tile_n": 256}, "tile_n must be 64 or 128"),
        ({"stages": 1}, "stages must be at least 2"),
        ({"stages": 4}, "shared memory"),
    ],
)
def test_illegal_specs_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        prefill_spec(**changes)


class RecordingKernel:
    """Stands in for a loaded kernel on the CPU: remembers its launches."""

    def __init__(self, heads: Heads, *, fp8_out: bool = False, element: Element = BF16) -> None:
        self.spec = prefill_spec(heads=heads, fp8_out=fp8_out, element=element)
        self.device = torch.device("cpu")
        self.sm_count = 20
        self.launches: list[tuple[tuple[int, int, int], dict[str, Any]]] = []

    def launch(self, grid: tuple[int, int, int], **arguments: Any) -> None:
        self.launches.append((grid, arguments))


def small_inputs() -> dict[str, Any]:
    """Two sequences of 200 and 100 queries, 8 heads and 2 key/value heads of 64 features."""
    pages = torch.zeros(6, 2, PAGE_SIZE, 64, dtype=torch.bfloat16)
    return {
        "q": torch.zeros(300, 512, dtype=torch.bfloat16),
        "k_pages": pages,
        "v_pages": pages.clone(),
        "block_table": torch.zeros(2, 4, dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, 200, 300], dtype=torch.int32),
        "seqlens_k": torch.tensor([200, 100], dtype=torch.int32),
        "max_seqlen_q": 200,
    }


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> RecordingKernel:
    def encode(tensor: Tensor, box_rows: int, box_columns: int) -> SimpleNamespace:
        return SimpleNamespace(shape=tuple(tensor.shape), box=(box_rows, box_columns))

    monkeypatch.setattr(attention_prefill, "tensor_map_2d", encode)
    return RecordingKernel(Heads(8, 2, 64))


def test_launch(recorded: RecordingKernel) -> None:
    """Every parameter of the ABI once; a block a multiprocessor, if there are as many items; the kernel's boxes."""
    inputs = small_inputs()
    out = torch.empty_like(inputs["q"])
    assert AttentionPrefill(recorded)(**inputs, out=out) is out  # type: ignore[arg-type]
    ((grid, arguments),) = recorded.launches
    assert grid == (20, 1, 1)
    assert list(arguments) == [param.name for param in recorded.spec.params]
    assert (arguments["q"].shape, arguments["q"].box) == ((300, 512), (128, 64))
    for name in ("k_pages", "v_pages"):
        assert (arguments[name].shape, arguments[name].box) == ((6 * 2 * PAGE_SIZE, 64), (PAGE_SIZE, 64))
    assert arguments["out"] is out
    assert arguments["block_table_stride"] == 4
    assert arguments["sequences"] == 2
    assert arguments["tickets"].tolist() == [0]
    assert arguments["softmax_scale"] == 0.125


def test_an_fp8_result_is_written_as_its_output_says(recorded: RecordingKernel) -> None:
    kernel, inputs, fp8 = RecordingKernel(Heads(8, 2, 64), fp8_out=True), small_inputs(), fp8_output(torch.ones(1))
    attention = AttentionPrefill(kernel)  # type: ignore[arg-type]
    out = attention(**inputs, fp8=fp8)
    ((_, arguments),) = kernel.launches
    assert set(arguments) == {param.name for param in kernel.spec.params}
    assert (out.shape, out.dtype) == (inputs["q"].shape, torch.float8_e4m3fn)
    assert arguments["out_fp8"] is out
    assert (arguments["out_scale"], arguments["amax"], arguments["saturated"]) == tuple(fp8)
    for changes, message in (
        ({"fp8": None}, "writes FP8 and needs fp8"),
        ({"out": torch.empty_like(inputs["q"])}, r"out must be torch\.float8_e4m3fn"),
        ({"fp8": fp8._replace(scale=torch.ones(512))}, r"fp8\.scale must have shape \[1\]"),
    ):
        with pytest.raises(InputError, match=f"attention_prefill: .*{message}"):
            attention(**{**inputs, "fp8": fp8, **changes})
    with pytest.raises(InputError, match="attention_prefill: the kernel writes no FP8: leave fp8 out"):
        AttentionPrefill(recorded)(**inputs, fp8=fp8)  # type: ignore[arg-type]
    assert (len(kernel.launches), recorded.launches) == (1, [])


def test_pages_of_codes(recorded: RecordingKernel) -> None:
    """A page is one box of 128 columns; codes come with their scales."""
    kernel, inputs = RecordingKernel(Heads(8, 2, 64), element=E4M3), small_inputs()
    inputs |= {name: inputs[name].to(torch.float8_e4m3fn) for name in ("k_pages", "v_pages")}
    kv_scale = torch.tensor(KV_SCALE)
    attention = AttentionPrefill(kernel)  # type: ignore[arg-type]
    attention(**inputs, kv_scale=kv_scale)
    ((_, arguments),) = kernel.launches
    assert list(arguments) == [param.name for param in kernel.spec.params]
    for name in ("k_pages", "v_pages"):
        assert (arguments[name].shape, arguments[name].box) == ((6 * 2 * PAGE_SIZE // 2, 128), (PAGE_SIZE // 2, 128))
    assert (arguments["q"].shape, arguments["q"].box) == ((300, 512), (128, 64))
    assert arguments["kv_scale"] is kv_scale
    with pytest.raises(InputError, match="attention_prefill: the cache of this kernel holds codes and needs kv_scale"):
        attention(**inputs)
    with pytest.raises(InputError, match=r"attention_prefill: k_pages must be torch\.bfloat16"):
        AttentionPrefill(recorded)(**inputs, kv_scale=kv_scale)  # type: ignore[arg-type]
    assert (len(kernel.launches), recorded.launches) == (1, [])


def test_a_block_an_item_at_most(recorded: RecordingKernel) -> None:
    """One sequence of up to 128 queries and 8 heads are 8 items; the counter of tickets is one for all launches."""
    attention, inputs = AttentionPrefill(recorded), small_inputs()  # type: ignore[arg-type]
    inputs["block_table"] = inputs["block_table"][:1]
    inputs["cu_seqlens_q"] = torch.tensor([0, 100], dtype=torch.int32)
    inputs["seqlens_k"] = inputs["seqlens_k"][:1]
    for _ in range(2):
        attention(**{**inputs, "max_seqlen_q": 100})
    assert [grid for grid, _ in recorded.launches] == [(8, 1, 1)] * 2
    first, second = (arguments["tickets"] for _, arguments in recorded.launches)
    assert first.data_ptr() == second.data_ptr()


def test_nothing_to_do_launches_nothing(recorded: RecordingKernel) -> None:
    inputs = small_inputs()
    inputs.update(q=inputs["q"][:0], max_seqlen_q=0)
    assert AttentionPrefill(recorded)(**inputs).shape == (0, 512)  # type: ignore[arg-type]
    assert recorded.launches == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(300, 512)}, r"q must be torch\.bfloat16"),
        ({"q": torch.zeros(300, 256, dtype=torch.bfloat16)}, r"q must have shape \[any, 512\]"),
        ({"q": None}, "q must be a tensor, not NoneType"),
        (
            {"seqlens_k": torch.zeros(2, dtype=torch.int32, device="meta")},
            "seqlens_k is on meta, the kernels are on cpu",
        ),
        ({"q": torch.zeros(512, 300, dtype=torch.bfloat16).T}, "q must .*"),
        ({"k_pages": torch.zeros(6, 2, 32, 64, dtype=torch.bfloat16)}, "k_pages must have shape"),
        ({"v_pages": torch.zeros(7, 2, 64, 64, dtype=torch.bfloat16)}, "v_pages must have shape"),
        ({"block_table": torch.zeros(2, 4)}, r"block_table must be torch\.int32"),
        ({"block_table": torch.zeros(8, dtype=torch.int32)}, "block_table must have shape"),
        ({"cu_seqlens_q": torch.zeros(2, dtype=torch.int32)}, r"cu_seqlens_q must have shape \[3\]"),
        ({"seqlens_k": torch.zeros(3, dtype=torch.int32)}, r"seqlens_k must have shape \[2\]"),
        ({"out": torch.zeros(299, 512, dtype=torch.bfloat16)}, r"out must have shape \[300, 512\]"),
        ({"q": torch.zeros(300 * 512 + 1, dtype=torch.bfloat16)[1:].view(300, 512)}, "q starts at .*16 bytes"),
        ({"max_seqlen_q": 0}, "max_seqlen_q is 0"),
        ({"max_seqlen_q": 301}, "max_seqlen_q is 301"),
        ({"k_pages": torch.zeros(0, 2, 64, 64, dtype=torch.bfloat16), "v_pages": None}, "k_pages holds no page"),
    ],
)
def test_wrong_arguments_are_named(recorded: RecordingKernel, changes: dict[str, Any], message: str) -> None:
    inputs = {**small_inputs(), **changes}
    if inputs["v_pages"] is None:
        inputs["v_pages"] = inputs["k_pages"].clone()
    with pytest.raises(InputError, match=f"attention_prefill: {message}"):
        AttentionPrefill(recorded)(**inputs)  # type: ignore[arg-type]
    assert recorded.launches == []


@pytest.mark.compile
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("model", BOTH_HEAD_DIMS)
def test_kernel_compiles_to_overlapped_wgmma(model: str, precision: str) -> None:
    """wgmma and TMA loads, no access to local memory; the exponentials run beside the output's wgmma.

    The build itself refuses spills and serialised wgmma. That ptxas leaves every exponential of the loop between the
    wait for the scores and the wait for the output is what half of the overlap depends on.
    """
    settings = BuildSettings.from_environment()
    spec = make_plan(load_config(model), precision).attention_prefill
    (record,) = build_kernels([spec], settings=settings)
    counts = count_instructions(record.cubin, settings)
    head_dim, tile_n = spec.heads.head_dim, spec.tile_n
    # Scores are issued before the loop and in it, outputs in it and behind it.
    assert occurrences(counts, "HGMMA") == 2 * head_dim // 16 + 2 * tile_n // 16
    assert occurrences(counts, "UTMALDG") > 0
    assert occurrences(counts, "LDL") == occurrences(counts, "STL") == 0
    # Two codes each: of two rows of head_dim / 4 columns, behind the loop and in it.
    assert occurrences(counts, "F2FP.SATFINITE.E4M3") == (head_dim // 2 if spec.fp8_out else 0)

    command = [str(find_nvdisasm(settings)), "--print-code", str(record.cubin)]
    code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    between = re.split(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x([01])", code)
    assert between[1::2] == ["0", "1", "0", "0"]
    # A thread has two rows of tile_n / 4 columns, and one correction of each.
    assert [text.count("MUFU.EX2") for text in between[::2]] == [0, tile_n // 2 + 2, tile_n // 2 + 2, 0, 0]


@pytest.mark.compile
def test_schedule_in_the_emulator(emulate: Callable[[str], str]) -> None:
    """Every item once and longest first, whatever the lengths; the counter of tickets is put back."""
    assert emulate("attention_schedule") == ""


@pytest.mark.compile
def test_outputs_in_the_emulator(emulate: Callable[..., str]) -> None:
    """Every feature at its place in BF16 and in FP8; maxima and counts of the rows that are stored, of no others."""
    assert emulate("attention_prefill_output", "epilogue", "epilogue_fp8") == ""


@pytest.mark.compile
def test_converters_in_the_emulator(emulate: Callable[..., str]) -> None:
    """Every code becomes the operand of its value, at its place, in rings that turn."""
    assert emulate("attention_prefill_codes", "attention_code_tiles", "e4m3_operand") == ""


@pytest.mark.compile
def test_tiles_against_tma_and_cute(tmp_path: Path) -> None:
    """Boxes land where the wgmma layouts read them, and P's operand holds what the scores' accumulator held."""
    settings = BuildSettings.from_environment()
    program, source = tmp_path / "tiles", Path(__file__).parent / "attention_tiles.cpp"
    toolkit = find_nvcc(settings).path.resolve().parent.parent / "include"
    includes = [settings.include_dir, find_cutlass_include(settings), toolkit, toolkit / "cccl"]
    options = [option for folder in includes for option in ("-isystem", str(folder))]
    command = [str(find_host_compiler(settings)), "-std=c++17", "-O1", *options, str(source), "-o", str(program)]
    compiled = subprocess.run(command, capture_output=True, text=True, check=False)
    assert compiled.returncode == 0, compiled.stderr
    ran = subprocess.run([program], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout
