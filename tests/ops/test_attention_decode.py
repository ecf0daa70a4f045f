"""Decode attention: the kernel against a float32 reference, what must not reach its results, and its CPU half.

Over pages of BF16 and E4M3 the kernels are models' own, over INT4 copies those of models.COPIES, alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from futransformer.build.compile import build_kernels
from futransformer.build.sass import count_instructions, occurrences
from futransformer.build.settings import BuildSettings
from futransformer.driver import Kernel
from futransformer.generator.config import CONFIGS, load_config
from futransformer.generator.decode_heuristics import COPY_BYTES_AHEAD, attention_decode_spec
from futransformer.generator.errors import InputError, UnsupportedError
from futransformer.generator.kv_format import HEAD, KvFormat
from futransformer.generator.precision import BF16, E4M3, INT4, Element, get_precision
from futransformer.generator.specs import PAGE_SIZE, AttentionDecodeSpec, Heads, KernelSpec
from futransformer.kv_packing import store_tokens
from futransformer.library import KernelLibrary
from futransformer.ops import attention_decode
from futransformer.ops.attention_decode import AttentionDecode, choose_pages_per_split
from futransformer.quantize.kv_int4 import Int4Kv, quantise_kv
from futransformer.reference import ReferenceOps, allowed_error, as_bytes, largest_error
from tests.ops import models
from tests.ops.fp8 import KV_SCALE, stored_kv, worth_of_kv

KV8_MODELS = ("smollm2-135m-kv8", "llama-3.1-8b-kv8", "group16-kv8")
MODELS = ("smollm2-135m", "llama-2-7b", "llama-3.1-8b", "llama-3-70b", "group16", *KV8_MODELS, *models.COPIES)
IN_BF16 = ("smollm2-135m", "llama-3.1-8b")
COPIES = ("h9kv3d64-kv4", "h32kv8d128-kv4", "h64kv8d128-kv4-min", "h32kv2d64-kv4-head-min")
BOTH_HEAD_DIMS = (*IN_BF16, "smollm2-135m-kv8", "llama-3.1-8b-kv8", *COPIES)
LENGTHS = (1000, 0, 1, 63, 64, 65, 4097)
SPLITS = (1, 3, 1000)  # pages; the last is the whole sequence in one block
FORMS = tuple(KvFormat(group, minimum) for group in (32, HEAD) for minimum in (False, True))
CHOSEN_AND_FIXED: tuple[dict[str, Any], ...] = ({}, {"pages_per_split": 1}, {"pages_per_split": 1000})

Attention = Callable[[str], KernelLibrary | AttentionDecode]
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


def attend_codes(q: Tensor, keys: Int4Kv, values: Int4Kv, dtype: torch.dtype) -> Tensor:
    """The same over INT4, codes [length, kv heads, D]: P times V's scales is rounded in place of P."""
    if keys.codes.shape[0] == 0:
        return torch.zeros_like(q, dtype=dtype)
    grouped = q.float().view(keys.codes.shape[1], -1, q.shape[1])
    scores = torch.einsum("hqd,khd->hqk", grouped, keys.worth()) * q.shape[1] ** -0.5
    p = torch.exp(scores - scores.amax(-1, keepdim=True))
    scaled = torch.einsum("hqk,khg->hqkg", p, values.scales.float()).to(dtype).float()
    out = torch.einsum("hqkg,khgd->hqgd", scaled, values.multiples())
    if values.minima is not None:
        out += torch.einsum("hqk,khg->hqg", p, values.minima.float())[..., None]
    return (out / p.sum(-1)[..., None, None]).to(dtype).reshape(q.shape)


class Problem:
    """A batch of sequences in shuffled pages, with NaN and garbage wherever nothing may be read.

    With ``codes`` the pages hold E4M3, with ``copy`` there are none but INT4 ones; ``keys`` and ``values`` are what
    these are worth. ``ones``: all of V is 1, as nearly as it can be stored. ``spare`` pages belong to nobody.
    """

    def __init__(
        self,
        ops: KernelLibrary | ReferenceOps | AttentionDecode,
        heads: Heads,
        lengths: Sequence[int],
        *,
        codes: bool = False,
        copy: KvFormat | None = None,
        ones: bool = False,
        spare: int = 3,
    ) -> None:
        self.attend: Callable[..., Tensor] = ops if isinstance(ops, AttentionDecode) else ops.attention_decode
        self.device = ops.kernel.device if isinstance(ops, AttentionDecode) else ops.device
        self.heads, self.lengths = heads, list(lengths)
        self.kv_scale = torch.tensor(KV_SCALE, device=self.device) if codes else None
        self.copy = copy
        self.kv_copy: Tensor | None = None
        self.codes: list[tuple[Int4Kv, Int4Kv]] = []
        device, kv_shape = self.device, (heads.num_key_value_heads, heads.head_dim)
        queries = []
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        for index, length in enumerate(lengths):  # a sequence's values depend on nothing but its place and length
            generator = torch.Generator(device).manual_seed(index)
            queries.append(torch.randn(heads.q_features, generator=generator, device=device).bfloat16())
            drawn = [torch.randn(length, *kv_shape, generator=generator, device=device) for _ in range(2)]
            if ones:
                drawn[1] = torch.ones_like(drawn[1])
            if copy is not None:
                self.codes.append((quantise_kv(drawn[0], copy), quantise_kv(drawn[1], copy)))
                drawn = [codes.worth() for codes in self.codes[-1]]
            else:
                drawn = [worth_of_kv(stored_kv(d, self.kv_scale, i), self.kv_scale, i) for i, d in enumerate(drawn)]
            self.keys.append(drawn[0])
            self.values.append(drawn[1])
        self.q = torch.stack(queries)
        self.seqlens_k = torch.tensor(self.lengths, dtype=torch.int32, device=device)
        self._fill_pages(torch.Generator().manual_seed(len(lengths)), spare)

    def _fill_pages(self, generator: torch.Generator, spare: int) -> None:
        device, heads = self.device, self.heads
        counts = [-(-length // PAGE_SIZE) for length in self.lengths]
        shuffled = torch.randperm(sum(counts) + spare, generator=generator).tolist()
        pages = len(shuffled)
        # Past a sequence's end: pages of NaN, and numbers that are no page at all.
        garbage = torch.tensor([shuffled.pop() for _ in range(3)] + [-1, 2**31 - 1, -(2**31)], dtype=torch.int32)
        block_table = garbage[torch.randint(len(garbage), (len(counts), max(counts) + 2), generator=generator)]
        for sequence, count in enumerate(counts):
            block_table[sequence, :count] = torch.tensor([shuffled.pop() for _ in range(count)], dtype=torch.int32)
        self.block_table = block_table.to(device)
        shape = (0 if self.copy else pages, heads.num_key_value_heads, PAGE_SIZE, heads.head_dim)
        dtype = torch.bfloat16 if self.kv_scale is None else torch.float8_e4m3fn
        self.k_pages, self.v_pages = (torch.full(shape, torch.nan, dtype=dtype, device=device) for _ in range(2))
        if self.copy is not None:  # full of scales that are no numbers, codes of 15 beside them
            stored = (pages, heads.num_key_value_heads, self.copy.page_bytes(heads.head_dim))
            self.kv_copy = torch.full(stored, 255, dtype=torch.uint8, device=device)
        for sequence, length in enumerate(self.lengths):
            positions = torch.arange(length, device=device)
            page, offset = self.block_table[sequence, positions // PAGE_SIZE].long(), positions % PAGE_SIZE
            if self.copy is not None:
                assert self.kv_copy is not None
                store_tokens(self.kv_copy, page * PAGE_SIZE + offset, *self.codes[sequence], self.copy)
                continue
            for part, (held, dense) in enumerate(((self.k_pages, self.keys), (self.v_pages, self.values))):
                as_bytes(held)[page, :, offset] = as_bytes(stored_kv(dense[sequence], self.kv_scale, part))

    @property
    def op(self) -> AttentionDecode:
        """The operation itself, below the library."""
        if isinstance(self.attend, AttentionDecode):
            return self.attend
        library = getattr(self.attend, "__self__", None)
        assert isinstance(library, KernelLibrary)
        return library._attention_decode

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
            "kv_copy": self.kv_copy,
        }

    def run(self, rows: slice = slice(None), **options: Any) -> Tensor:
        """The kernel's answer for some of the sequences: everything written, nothing outside."""
        arguments = self.arguments(rows) | options
        sequences = arguments["q"].shape[0]
        room = torch.full((sequences + 2, self.heads.q_features), torch.nan, dtype=torch.bfloat16, device=self.q.device)
        out = room[1 : 1 + sequences]
        attend = self.op if "pages_per_split" in options else self.attend
        returned = attend(**arguments, out=out)
        assert returned is out
        assert room[0].isnan().all(), "the row before the output was written"
        assert room[-1].isnan().all(), "the row behind the output was written"
        return out

    def check(self, out: Tensor) -> None:
        """Hold every head of every sequence to the tolerance rule of its sequence."""
        for sequence, length in enumerate(self.lengths):
            q = self.q[sequence].view(-1, self.heads.head_dim)
            exact = attend(q, self.keys[sequence], self.values[sequence], torch.float32)
            if self.codes:
                rounded = attend_codes(q, *self.codes[sequence], torch.bfloat16)
            else:
                rounded = attend(q, self.keys[sequence], self.values[sequence], torch.bfloat16)
            error = largest_error(out[sequence].view_as(exact), exact)
            allowed = allowed_error(rounded, exact, get_precision("bf16"))
            assert error <= allowed, f"sequence {sequence} of {length} tokens: error {error:.3e}, allowed {allowed:.3e}"


@pytest.fixture(scope="session")
def attention(gpu_ops: Callable[[str], KernelLibrary], gpu_kernel: Callable[[KernelSpec], Kernel]) -> Attention:
    """Return a function from a name to what attends: a model's library, or the operation over a copy, alone."""
    over_copies = cache(lambda name: AttentionDecode(gpu_kernel(models.COPIES[name])))
    return lambda name: over_copies(name) if name in models.COPIES else gpu_ops(name)


def on_gpu(attention: Attention, model: str, lengths: Sequence[int], **options: Any) -> Problem:
    """A problem for the generated kernel of a model."""
    ops = attention(model)
    spec = (ops if isinstance(ops, AttentionDecode) else ops._attention_decode).spec
    return Problem(ops, spec.heads, lengths, codes=spec.element == E4M3, copy=spec.copy, **options)


def same_bits(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.view(torch.int16), right.view(torch.int16))


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 2, 3, 5, 17, 33, 129])
@pytest.mark.parametrize("model", MODELS)
def test_ragged_batches(attention: Attention, model: str, batch: int) -> None:
    problem = on_gpu(attention, model, ragged(batch))
    problem.check(problem.run())


@pytest.mark.gpu
@pytest.mark.parametrize("pages_per_split", SPLITS)
@pytest.mark.parametrize("model", MODELS)
def test_fixed_splits(attention: Attention, model: str, pages_per_split: int) -> None:
    problem = on_gpu(attention, model, LENGTHS)
    problem.check(problem.run(pages_per_split=pages_per_split))


@pytest.mark.gpu
@pytest.mark.parametrize("model", BOTH_HEAD_DIMS)
def test_every_run_gives_the_same_bits(attention: Attention, model: str) -> None:
    """Whichever split arrives last combines; and it leaves the counters as it found them."""
    problem = on_gpu(attention, model, ragged(17))
    for options in CHOSEN_AND_FIXED:
        expected = problem.run(**options)
        for repeat in range(50):
            assert same_bits(problem.run(**options), expected), f"run {repeat} differs"
            assert not problem.op.workspace.arrivals.any(), f"run {repeat} left a counter"


@pytest.mark.gpu
@pytest.mark.parametrize("pages_per_split", SPLITS)
@pytest.mark.parametrize("model", BOTH_HEAD_DIMS)
def test_a_row_equals_its_solo_run(attention: Attention, model: str, pages_per_split: int) -> None:
    problem = on_gpu(attention, model, ragged(33))
    together = problem.run(pages_per_split=pages_per_split)
    for row in range(33):
        alone = problem.run(slice(row, row + 1), pages_per_split=pages_per_split)
        assert same_bits(alone[0], together[row]), f"row {row} of {problem.lengths[row]} tokens"


@pytest.mark.gpu
@pytest.mark.parametrize("model", BOTH_HEAD_DIMS)
def test_neighbours_do_not_matter(attention: Attention, model: str) -> None:
    """Another length, or NaN everywhere, in the middle sequence leaves the others' bits alone."""
    expected = on_gpu(attention, model, [1000, 500, 65]).run()
    for middle in (0, 1, 64, 999):
        problem = on_gpu(attention, model, [1000, middle, 65])
        problem.q[1] = torch.nan
        for index in range(-(-middle // PAGE_SIZE)):
            page = int(problem.block_table[1, index])
            if problem.kv_copy is None:
                problem.k_pages[page] = problem.v_pages[page] = torch.nan
            else:
                problem.kv_copy[page] = 255
        out = problem.run()
        assert out[1].isnan().all() if middle else not out[1].any()
        assert same_bits(out[0], expected[0]), f"{middle} tokens changed the row before"
        assert same_bits(out[2], expected[2]), f"{middle} tokens changed the row behind"


@pytest.mark.gpu
@pytest.mark.parametrize("model", BOTH_HEAD_DIMS)
def test_large_scores(attention: Attention, model: str) -> None:
    """Queries of 100: scores of some thousands, whose exponentials overflow without the maximum."""
    problem = on_gpu(attention, model, LENGTHS)
    problem.q *= 100
    out = problem.run(pages_per_split=4)
    assert out.isfinite().all()
    problem.check(out)


@pytest.mark.gpu
@pytest.mark.parametrize("model", IN_BF16)
def test_scores_of_minus_infinity_weigh_nothing(attention: Attention, model: str) -> None:
    """Whole warps and splits whose every score is -inf, beside others that are finite."""
    problem = on_gpu(attention, model, [300])
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
@pytest.mark.parametrize("model", [name for name in COPIES if "min" not in name])
def test_scores_of_minus_infinity_over_a_copy(attention: Attention, model: str) -> None:
    """The same where scales are infinite and codes all -8: a score of -inf weighs nothing, and is no NaN."""
    problem = on_gpu(attention, model, [300])
    assert problem.kv_copy is not None
    head_dim = problem.heads.head_dim
    problem.q[:] = 1
    code_bytes = PAGE_SIZE * head_dim // 2
    for index in range(4):
        page = problem.kv_copy[problem.block_table[0, index]]
        page[:, :code_bytes] = 0
        scales = page[:, code_bytes : problem.kv_copy.shape[-1] // 2]
        scales.copy_(torch.full((scales.numel() // 2,), torch.inf).half().view(torch.uint8).view_as(scales))
    for part, keep in zip(problem.codes[0], (0, 1), strict=True):
        if keep == 0:
            part.scales[: 4 * PAGE_SIZE], part.codes[: 4 * PAGE_SIZE] = torch.inf, 0
    problem.keys[0] = problem.codes[0][0].worth()
    assert (problem.keys[0][: 4 * PAGE_SIZE] == -torch.inf).all()
    problem.check(problem.run(pages_per_split=1))
    problem.check(problem.run(pages_per_split=1000))


@pytest.mark.gpu
@pytest.mark.parametrize("model", COPIES)
def test_scales_that_are_no_numbers_reach_their_rows_alone(attention: Attention, model: str) -> None:
    """One token whose K, or one group of whose V, has a scale of NaN: its row's heads are NaN, or those features."""
    problem = on_gpu(attention, model, [300, 300])
    assert problem.kv_copy is not None
    expected, head_dim = problem.run(), problem.heads.head_dim
    part_bytes, code_bytes = problem.kv_copy.shape[-1] // 2, PAGE_SIZE * head_dim // 2
    untouched = problem.kv_copy.clone()
    page = int(problem.block_table[0, 2])
    for part in range(2):
        problem.kv_copy.copy_(untouched)
        first = part * part_bytes + code_bytes + 2 * 17  # of group 0, token 17
        problem.kv_copy[page, 0, first : first + 2] = 255
        out = problem.run()
        assert same_bits(out[1], expected[1])
        heads = out[0].view(problem.heads.num_key_value_heads, problem.heads.group, head_dim)
        kept = expected[0].view_as(heads)
        assert same_bits(heads[1:], kept[1:])
        group = head_dim if part == 0 else head_dim // (problem.copy or KvFormat()).groups(head_dim)
        assert heads[0, :, :group].isnan().all()
        assert same_bits(heads[0, :, group:], kept[0, :, group:])


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["h32kv8d128-kv4", "h9kv3d64-kv4"])
def test_a_pool_of_more_bytes_than_an_int32_counts(attention: Attention, model: str) -> None:
    """131,072 tokens in pages that are spread over more than 2^32 bytes."""
    heads = models.COPIES[model].heads
    copy = models.COPIES[model].copy
    assert copy is not None
    spare = 2**32 // (copy.page_bytes(heads.head_dim) * heads.num_key_value_heads)
    problem = on_gpu(attention, model, [131_072, 131_071, 1], spare=spare)
    assert problem.kv_copy is not None
    assert problem.kv_copy.numel() > 2**32
    problem.check(problem.run())
    problem.check(problem.run(pages_per_split=1000))


@pytest.mark.gpu
@pytest.mark.parametrize("model", COPIES)
def test_values_near_nothing_beside_large_ones(attention: Attention, model: str) -> None:
    """A feature whose codes are all 0 beside one whose are all -8: 8 x P, added and taken away, must cancel.

    Of N tokens the sums reach 8 N scales, and float32 leaves 2^-24 of that for each of two products: 2^-20 of a scale
    is several times what a split of 64 pages can lose.
    """
    problem = on_gpu(attention, model, [4096])
    assert problem.kv_copy is not None
    drawn = torch.zeros(4096, problem.heads.num_key_value_heads, problem.heads.head_dim, device=problem.device)
    drawn[..., 1::2] = 1
    assert problem.copy is not None
    values = quantise_kv(drawn, problem.copy)
    slots = problem.block_table[0, torch.arange(4096, device=problem.device) // PAGE_SIZE].long() * PAGE_SIZE
    slots += torch.arange(4096, device=problem.device) % PAGE_SIZE
    store_tokens(problem.kv_copy, slots, problem.codes[0][0], values, problem.copy)
    out = problem.run(pages_per_split=1000)[0].view(-1, problem.heads.head_dim).float()
    assert out[:, 0::2].abs().max() <= 2.0**-17
    assert (out[:, 1::2] - 1).abs().max() <= 2.0**-7


@pytest.mark.gpu
@pytest.mark.parametrize("model", BOTH_HEAD_DIMS)
def test_long_context_of_ones(attention: Attention, model: str) -> None:
    """Over 32k tokens with V = 1 the weights must sum to 1: no drift of the running sums or in combining."""
    problem = on_gpu(attention, model, [32_768, 32_700, 1], ones=True)
    want = float(problem.values[2].flatten()[0])
    assert abs(want - 1) <= 2.0**-4
    for options in CHOSEN_AND_FIXED:
        assert (problem.run(**options).float() / want - 1).abs().max() <= 2.0**-8


@pytest.mark.gpu
@pytest.mark.parametrize("model", BOTH_HEAD_DIMS)
def test_longer_than_announced_is_still_right(attention: Attention, model: str) -> None:
    """The grid is sized for max_seqlen_k; a sequence that has outgrown it gives its last block more to do."""
    problem = on_gpu(attention, model, [1000, 65, 4097])
    problem.check(problem.run(max_seqlen_k=200, pages_per_split=2))
    problem.check(problem.run(max_seqlen_k=0))


@pytest.mark.gpu
@pytest.mark.parametrize("model", BOTH_HEAD_DIMS)
def test_longer_than_the_block_table_is_nan(attention: Attention, model: str) -> None:
    problem = on_gpu(attention, model, [65, 500, 128])
    problem.block_table = problem.block_table[:, :2].contiguous()
    out = problem.run(max_seqlen_k=128)
    assert out[1].isnan().all()
    assert out[0].isfinite().all()
    assert out[2].isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("model", BOTH_HEAD_DIMS)
def test_graph_replays_equal_eager_runs(attention: Attention, model: str) -> None:
    """A captured launch serves growing sequences, past page and split boundaries, and outlives a larger workspace."""
    problem = on_gpu(attention, model, [700, 640, 1])
    op = AttentionDecode(problem.op.kernel)  # of its own, so that its workspace has the size of this test alone
    out = torch.full_like(problem.q, torch.nan)
    options = {"out": out, "pages_per_split": 3}
    op(**problem.arguments() | options)
    arguments = problem.arguments() | options
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        op(**arguments)
    larger = on_gpu(attention, model, [4097] * 17)
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
def test_a_workspace_does_not_grow_in_a_capture(attention: Attention) -> None:
    problem = on_gpu(attention, "smollm2-135m", [700, 640])
    op = AttentionDecode(problem.op.kernel)
    arguments = problem.arguments()
    with (
        pytest.raises(InputError, match="workspace must grow while a CUDA graph is captured"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        op(**arguments, pages_per_split=1)


@pytest.mark.gpu
@pytest.mark.parametrize("model", BOTH_HEAD_DIMS)
def test_streams_take_turns(attention: Attention, model: str) -> None:
    """Launches from two streams share one workspace, and do not meet in it."""
    problems = [on_gpu(attention, model, lengths) for lengths in ([4097, 1000, 65], [3000, 2000, 129])]
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


@pytest.mark.parametrize("copy", FORMS, ids=str)
def test_reference_over_a_copy(copy: KvFormat) -> None:
    config = load_config("smollm2-135m")
    problem = Problem(ReferenceOps(config, copy=copy), config.heads, [1, 0, 63, 64, 65, 300], copy=copy)
    problem.check(problem.run())


@pytest.mark.parametrize("precision", ["bf16", "bf16-kv8", "bf16-kv4", "fp8-kv8-kv4-head-min"])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_model_has_a_legal_spec(name: str, precision: str) -> None:
    heads, row = load_config(name).heads, get_precision(precision)
    spec = attention_decode_spec(heads, row)
    assert str(heads) in spec.name
    assert spec.threads == 160
    page_bytes = 2 * PAGE_SIZE * heads.head_dim * row.kv.bits // 8
    if row.copy is not None:
        page_bytes = row.copy.page_bytes(heads.head_dim)
        assert 2**16 <= spec.blocks_per_sm * spec.stages * page_bytes <= COPY_BYTES_AHEAD, "what is on its way"
    assert spec.shared_bytes == spec.stages * (page_bytes + 16) + 16
    assert spec.blocks_per_sm * (spec.shared_bytes + 1024) <= 228 * 1024
    assert spec.blocks_per_sm >= 2, "one block combines while another streams"


def test_how_keys_are_rotated_makes_no_other_kernel() -> None:
    heads, rows = Heads(32, 8, 128), [get_precision(f"bf16-kv4-h{block}") for block in (0, 32, 64, 128)]
    assert len({attention_decode_spec(heads, row) for row in rows}) == 1
    assert attention_decode_spec(heads, rows[0]) != attention_decode_spec(heads, get_precision("bf16-kv4-min"))


def test_names_of_specs_tell_forms_apart() -> None:
    assert len({spec.name for spec in models.COPIES.values()}) == len(models.COPIES)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": Heads(32, 8, 96)}, "head_dim must be 64 or 128"),
        ({"heads": Heads(32, 5, 64)}, "divide evenly"),
        ({"heads": Heads(17, 1, 64)}, "at most 16 query heads"),
        ({"element": Element("int8", "uint8_t", 8)}, "pages hold BF16, E4M3 or INT4"),
        ({"element": INT4}, "INT4 needs its form"),
        ({"copy": KvFormat()}, "nothing else has one"),
        ({"element": INT4, "copy": KvFormat(), "stages": 30}, "shared memory"),
        (
            {"heads": Heads(32, 2, 128), "element": INT4, "copy": KvFormat(), "stages": 3},
            "results must fit in the ring",
        ),
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

    def __init__(self, heads: Heads, element: Element = BF16, copy: KvFormat | None = None) -> None:
        self.spec = AttentionDecodeSpec(element, heads, warps=4, stages=3, copy=copy)
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


def test_a_copy_in_place_of_pages(recorded: RecordingKernel) -> None:
    """The copy is what is launched on; pages are not looked at, and a copy is asked for by name."""
    copy = KvFormat(minimum=True)
    kernel, inputs = RecordingKernel(Heads(8, 2, 64), INT4, copy), small_inputs()
    kv_copy = torch.zeros(9, 2, copy.page_bytes(64), dtype=torch.uint8)
    op = AttentionDecode(kernel)  # type: ignore[arg-type]
    op(**{**inputs, "k_pages": None, "v_pages": None, "kv_copy": kv_copy})
    ((grid, arguments),) = kernel.launches
    assert grid == (4, 2, 3)
    assert list(arguments) == [param.name for param in kernel.spec.params]
    assert arguments["kv_copy"] is kv_copy
    misaligned = torch.zeros(kv_copy.numel() + 1, dtype=torch.uint8)[1:].view_as(kv_copy)
    for changes, message in (
        ({}, "the kernel has an INT4 copy of the cache and needs kv_copy"),
        ({"kv_copy": kv_copy[:, :1]}, r"kv_copy must have shape \[any, 2, 5120\]"),
        ({"kv_copy": kv_copy.int()}, r"kv_copy must be torch\.uint8"),
        ({"kv_copy": misaligned}, "kv_copy starts at .*16 bytes"),
        ({"kv_copy": kv_copy[:0]}, "kv_copy holds no page"),
    ):
        with pytest.raises(InputError, match=f"attention_decode: {message}"):
            op(**{**inputs, **changes})
    with pytest.raises(InputError, match="attention_decode: the kernel has none: leave kv_copy out"):
        AttentionDecode(recorded)(**inputs, kv_copy=kv_copy)  # type: ignore[arg-type]
    assert (len(kernel.launches), recorded.launches) == (1, [])


def test_smaller_pages_are_split_into_longer_rows() -> None:
    """A block's fixed cost is as long as more pages of INT4: fewer blocks, of more pages each."""
    of_bf16, of_int4 = (choose_pages_per_split(64, 256, 396, overhead) for overhead in (2, 7))
    assert of_bf16 <= of_int4
    assert choose_pages_per_split(64, 256, 396, 7) == 22  # two waves


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


ROWS = ("smollm2-135m", "llama-3.1-8b", "smollm2-135m-kv8", "llama-3.1-8b-kv8", "group16", "group16-kv8")


@pytest.mark.compile
@pytest.mark.parametrize("model", ROWS)
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
@pytest.mark.parametrize("name", models.COPIES)
def test_codes_are_multiplied_as_they_are(name: str) -> None:
    """Bulk copies, codes by sixteen bytes a lane, no conversion of one: an AND of each operand, a shift of each word.

    Twice all of it, for whole tiles of tokens and for the last.
    """
    settings = BuildSettings.from_environment()
    spec = models.COPIES[name]
    assert spec.copy is not None
    (record,) = build_kernels([spec], settings=settings)
    counts = count_instructions(record.cubin, settings)
    steps, head_tiles, groups = (
        spec.heads.head_dim // 16,
        -(-spec.heads.group // 8),
        spec.copy.groups(spec.heads.head_dim),
    )
    products = 2 * steps if spec.copy.minimum else 3 * steps  # K, V, and -8 of each V
    assert occurrences(counts, "HMMA.16816.F32.BF16") == (2 * products + steps) * head_tiles  # and the sums of q
    assert occurrences(counts, "MOVM") == 2 * 2 * groups * head_tiles
    assert occurrences(counts, "LDS.128") >= 2 * 2 * spec.heads.head_dim // 64
    assert occurrences(counts, "UBLKCP") > 0
    for other in ("LDSM", "UTMALDG", "LDL", "STL"):
        assert not occurrences(counts, other), other
    assert record.resources.registers * spec.threads * spec.blocks_per_sm <= 65_536


@pytest.mark.compile
def test_kernel_in_the_emulator(emulate: Emulate) -> None:
    """The kernel's source, run on the host thread by thread: layouts, masks, the ring's protocol, the combine."""
    parts = [f"attention_decode_{part}" for part in ("pages", "warp", "rows", "int4")]
    printed = emulate("attention_decode", *parts, "e4m3_operand", "fragment", "kv_int4")
    assert printed.count("allowed error\n") == 3 * 13 + 3 * 5
