"""Each reference operation against transformers' own modules or a direct formula, and its rounding points."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig as HuggingFaceConfig
from transformers.models.llama import modeling_llama

from futransformer.checkpoint import pair_order, rope_table
from futransformer.generator.config import CONFIGS
from futransformer.generator.errors import InputError
from futransformer.generator.kv_format import HEAD, KvFormat
from futransformer.generator.precision import get_precision
from futransformer.generator.specs import PAGE_SIZE
from futransformer.kv_packing import store_tokens
from futransformer.quantize.kv_int4 import quantise_keys, quantise_kv
from futransformer.reference import ReferenceOps, allowed_error, largest_error

CONFIG = replace(
    CONFIGS["llama-3.2-1b"],
    hidden_size=192,
    intermediate_size=320,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=100,
    max_position_embeddings=4096,
    rms_norm_eps=1e-3,
    rope_scaling=None,
    bos_token_id=None,
    eos_token_ids=(),
)
HEADS = CONFIG.heads
EXACT = ReferenceOps(CONFIG, dtype=torch.float32)
ROUNDED = ReferenceOps(CONFIG)
FLOAT32_NOISE = 1e-5  # relative: sums of a few hundred float32 products in another order


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def assert_same(actual: Tensor, expected: Tensor, relative: float = FLOAT32_NOISE) -> None:
    assert actual.shape == expected.shape
    assert largest_error(actual, expected) <= relative * expected.abs().max().item()


def hugging_face_config() -> HuggingFaceConfig:
    return HuggingFaceConfig(
        hidden_size=CONFIG.hidden_size,
        intermediate_size=CONFIG.intermediate_size,
        num_attention_heads=CONFIG.num_attention_heads,
        num_key_value_heads=CONFIG.num_key_value_heads,
        head_dim=CONFIG.head_dim,
        rms_norm_eps=CONFIG.rms_norm_eps,
        max_position_embeddings=CONFIG.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": CONFIG.rope_theta},
    )


def rms_norm(x: Tensor) -> Tensor:
    """Transformers' RMSNorm with a gain of one."""
    norm = modeling_llama.LlamaRMSNorm(CONFIG.hidden_size, CONFIG.rms_norm_eps)
    normalised: Tensor = norm(x).detach()
    return normalised


def split_sumsq(x: Tensor) -> Tensor:
    """Sums of squares in three parts, as a GEMM of three tiles leaves them."""
    return x.float().square().view(x.shape[0], 3, -1).sum(-1)


# gather_rows


def test_gather_rows_returns_rows_and_their_sums_of_squares() -> None:
    table = random(7, CONFIG.hidden_size).bfloat16()
    x, sumsq, residual = ROUNDED.gather_rows("prefill", table, torch.tensor([6, 0, 0], dtype=torch.int32))
    assert residual is x
    assert torch.equal(x, table[[6, 0, 0]])
    assert sumsq.shape == (3, 1)
    assert_same(sumsq[:, 0], table[[6, 0, 0]].float().square().sum(1))


@pytest.mark.parametrize("index", [-1, 7, 2**31 - 1])
def test_gather_rows_answers_an_index_outside_with_nan(index: int) -> None:
    table = random(7, CONFIG.hidden_size).bfloat16()
    x, sumsq, residual = ROUNDED.gather_rows("decode", table, torch.tensor([2, index], dtype=torch.int32))
    assert residual.dtype == torch.float32
    assert torch.equal(residual.isnan(), x.isnan())
    assert torch.equal(residual[0], table[2].float())
    assert torch.equal(x[0], table[2])
    assert x[1].isnan().all()
    assert sumsq[1].isnan().all()


# qkv


def qkv_inputs(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Activations, a natural weight [Q, K, V heads], and the same in pair order."""
    x = random(rows, CONFIG.hidden_size, seed=1) * torch.linspace(0.01, 30, rows)[:, None]
    natural = random(HEADS.qkv_features, CONFIG.hidden_size, seed=2, scale=CONFIG.hidden_size**-0.5)
    rotated_rows = HEADS.q_features + HEADS.kv_features
    logical = torch.cat([pair_order(natural[:rotated_rows], CONFIG.head_dim), natural[rotated_rows:]])
    return x, natural, logical


def natural_order(pairs: Tensor) -> Tensor:
    """Pair order back to (i, i + D / 2) on the last dimension."""
    return torch.cat([pairs[..., 0::2], pairs[..., 1::2]], -1)


def test_qkv_is_transformers_projection_and_rotation() -> None:
    rows, pages = 5, 4
    x, natural, logical = qkv_inputs(rows)
    positions = torch.tensor([0, 1, 4095, 7, 63], dtype=torch.int32)
    slots = torch.tensor([3 * PAGE_SIZE + 63, 0, -1, PAGE_SIZE, 2 * PAGE_SIZE + 5])
    shape = (pages, HEADS.num_key_value_heads, PAGE_SIZE, HEADS.head_dim)
    k_pages, v_pages = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
    table = rope_table(CONFIG, CONFIG.max_position_embeddings)
    q = EXACT.qkv("prefill", x, split_sumsq(x), logical, table, positions, slots, k_pages, v_pages)

    expected_q, expected_k, expected_v = (
        part.view(1, rows, -1, HEADS.head_dim).transpose(1, 2)
        for part in F.linear(rms_norm(x), natural).tensor_split(
            (HEADS.q_features, HEADS.q_features + HEADS.kv_features), 1
        )
    )
    rotary = modeling_llama.LlamaRotaryEmbedding(hugging_face_config())
    cos, sin = rotary(expected_v, positions[None])
    expected_q, expected_k = modeling_llama.apply_rotary_pos_emb(expected_q, expected_k, cos, sin)
    # transformers takes its angles in float32: 4095 radians are known to 2^-13
    assert_same(natural_order(q.view(rows, -1, HEADS.head_dim)), expected_q[0].transpose(0, 1), relative=3e-4)
    written = slots >= 0
    page, offset = slots[written] // PAGE_SIZE, slots[written] % PAGE_SIZE
    assert_same(natural_order(k_pages[page, :, offset]), expected_k[0].transpose(0, 1)[written])
    assert_same(v_pages[page, :, offset], expected_v[0].transpose(0, 1)[written])


def test_qkv_writes_its_slots_and_nothing_else() -> None:
    x, _, logical = qkv_inputs(3)
    slots = torch.tensor([PAGE_SIZE + 1, -1, 2])
    pages = [torch.full((2, HEADS.num_key_value_heads, PAGE_SIZE, HEADS.head_dim), torch.nan) for _ in range(2)]
    positions = torch.arange(3, dtype=torch.int32)
    EXACT.qkv("decode", x, split_sumsq(x), logical, rope_table(CONFIG, 3), positions, slots, *pages)
    for filled in pages:
        finite = filled.isfinite().all(-1).all(1)
        assert finite.nonzero().tolist() == [[0, 2], [1, 1]]


def test_qkv_rounds_what_it_stores() -> None:
    x, _, logical = qkv_inputs(3)
    x = x.bfloat16()
    slots, positions = torch.arange(3), torch.arange(3, dtype=torch.int32)

    def run(ops: ReferenceOps) -> list[Tensor]:
        pages = [
            torch.zeros(1, HEADS.num_key_value_heads, PAGE_SIZE, HEADS.head_dim, dtype=ops.dtype) for _ in range(2)
        ]
        q = ops.qkv("prefill", x, split_sumsq(x), logical, rope_table(CONFIG, 3), positions, slots, *pages)
        return [q, *pages]

    for rounded, exact in zip(run(ROUNDED), run(EXACT), strict=True):
        assert rounded.dtype == torch.bfloat16
        assert torch.equal(rounded, exact.bfloat16())


# attention


class PagedBatch:
    """Ragged sequences in shuffled pages; every slot that no token owns is NaN, every unused table entry absurd."""

    def __init__(
        self, lengths: list[int], queries: list[int], dtype: torch.dtype = torch.float32, seed: int = 0
    ) -> None:
        self.lengths, self.queries = lengths, queries
        self.q = random(sum(queries), HEADS.q_features, seed=seed, scale=2.0).to(dtype)
        self.k = [random(HEADS.num_key_value_heads, n, HEADS.head_dim, seed=seed + 1 + n).to(dtype) for n in lengths]
        self.v = [random(HEADS.num_key_value_heads, n, HEADS.head_dim, seed=seed + 999 + n).to(dtype) for n in lengths]
        counts = [-(-n // PAGE_SIZE) for n in lengths]
        order = torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(seed)).tolist()
        shape = (len(order), HEADS.num_key_value_heads, PAGE_SIZE, HEADS.head_dim)
        self.k_pages, self.v_pages = (torch.full(shape, torch.nan, dtype=dtype) for _ in range(2))
        self.block_table = torch.full((len(lengths), max(counts) + 2), 2**30, dtype=torch.int32)
        for row, (count, length) in enumerate(zip(counts, lengths, strict=True)):
            for index in range(count):
                page = order.pop()
                self.block_table[row, index] = page
                span = slice(index * PAGE_SIZE, min((index + 1) * PAGE_SIZE, length))
                self.k_pages[page, :, : span.stop - span.start] = self.k[row][:, span]
                self.v_pages[page, :, : span.stop - span.start] = self.v[row][:, span]
        offsets = torch.tensor([0, *queries]).cumsum(0)
        self.cu_seqlens_q, self.seqlens_k = offsets.int(), torch.tensor(lengths, dtype=torch.int32)

    def prefill(self, ops: ReferenceOps) -> Tensor:
        return ops.attention_prefill(
            self.q,
            self.k_pages,
            self.v_pages,
            self.block_table,
            self.cu_seqlens_q,
            self.seqlens_k,
            max_seqlen_q=max(self.queries),
        )

    def decode(self, ops: ReferenceOps) -> Tensor:
        return ops.attention_decode(
            self.q, self.k_pages, self.v_pages, self.block_table, self.seqlens_k, max_seqlen_k=max(self.lengths)
        )

    def torch_attention(self) -> Tensor:
        """PyTorch's own attention, a sequence at a time, in float32."""
        outputs, start = [], 0
        for k, v, queries, length in zip(self.k, self.v, self.queries, self.lengths, strict=True):
            shape = (queries, HEADS.num_attention_heads, HEADS.head_dim)
            q = self.q[start : start + queries].float().view(shape).transpose(0, 1)
            mask = torch.ones(queries, length, dtype=torch.bool).tril(length - queries)
            attended = F.scaled_dot_product_attention(
                q[None], k[None].float(), v[None].float(), attn_mask=mask, enable_gqa=True
            )
            outputs.append(attended[0].transpose(0, 1).flatten(1))
            start += queries
        return torch.cat(outputs)


RAGGED = [0, 1, 63, 64, 0, 65, 300, 700]
QUERIES = [0, 1, 63, 2, 0, 65, 300, 17]


def test_attention_prefill_is_causal_ragged_and_paged() -> None:
    batch = PagedBatch(RAGGED, QUERIES)
    assert_same(batch.prefill(EXACT), batch.torch_attention())


def test_attention_decode_is_the_last_row_of_prefill() -> None:
    lengths = [1, 0, 63, 64, 65, 700]
    batch = PagedBatch(lengths, [1] * len(lengths))
    out = batch.decode(EXACT)
    assert (out[1] == 0).all()
    alive = PagedBatch([n for n in lengths if n], [1] * 5)
    alive.q = torch.cat([batch.q[:1], batch.q[2:]])
    assert_same(torch.cat([out[:1], out[2:]]), alive.torch_attention())


@pytest.mark.parametrize("form", [KvFormat(), KvFormat(minimum=True, hadamard=0), KvFormat(HEAD, hadamard=64)], ids=str)
def test_attention_over_a_copy_is_attention_over_what_its_codes_are_worth(form: KvFormat) -> None:
    lengths = [1, 0, 63, 64, 65, 300]
    batch = PagedBatch(lengths, [1] * len(lengths))
    ops = ReferenceOps(CONFIG, dtype=torch.float32, copy=form)
    # every page packed, those that nobody reads included; the batch's pages become what the codes are worth
    kv_copy = torch.zeros(len(batch.k_pages), 2, form.page_bytes(HEADS.head_dim), dtype=torch.uint8)
    slots = torch.arange(len(batch.k_pages) * PAGE_SIZE)
    tokens = [pages.transpose(1, 2).flatten(0, 1).nan_to_num(0) for pages in (batch.k_pages, batch.v_pages)]
    keys, values = quantise_keys(tokens[0], form), quantise_kv(tokens[1], form)
    store_tokens(kv_copy, slots, keys, values, form)
    for pages, codes in ((batch.k_pages, keys), (batch.v_pages, values)):
        pages.copy_(codes.worth().view(-1, PAGE_SIZE, 2, HEADS.head_dim).transpose(1, 2))
    want = batch.decode(ops)
    batch.k_pages.fill_(torch.nan)
    batch.v_pages.fill_(torch.nan)
    arguments = (batch.q, batch.k_pages, batch.v_pages, batch.block_table, batch.seqlens_k)
    attended = ops.attention_decode(*arguments, max_seqlen_k=300, kv_copy=kv_copy)
    assert_same(attended, want)
    same_type = ReferenceOps(CONFIG, copy=form)
    rounded = same_type.attention_decode(*arguments, max_seqlen_k=300, kv_copy=kv_copy)
    assert 0 < largest_error(rounded, want) <= 2.0**-7 * float(want.abs().max())
    with pytest.raises(InputError, match="knows no form of an INT4 copy"):
        EXACT.attention_decode(*arguments, max_seqlen_k=300, kv_copy=kv_copy)


def test_queries_that_see_no_key_give_zeros() -> None:
    batch = PagedBatch([3, 0], [3, 0])
    expected = batch.torch_attention()
    batch.q = torch.cat([torch.full((2, HEADS.q_features), torch.nan), batch.q, batch.q[:1]])
    batch.queries, batch.cu_seqlens_q = [5, 1], torch.tensor([0, 5, 6], dtype=torch.int32)
    out = batch.prefill(EXACT)
    assert (out[:2] == 0).all()
    assert_same(out[2:5], expected)
    assert (out[5] == 0).all()


def test_attention_writes_into_out() -> None:
    batch = PagedBatch([70, 3], [1, 1])
    out = torch.full_like(batch.q, torch.nan)
    arguments = (batch.q, batch.k_pages, batch.v_pages, batch.block_table)
    returned = EXACT.attention_decode(*arguments, batch.seqlens_k, max_seqlen_k=70, out=out)
    assert returned is out
    assert_same(out, batch.torch_attention())


def test_neighbours_do_not_change_a_sequence() -> None:
    queries = 17
    long, short = PagedBatch([700, 300], [queries, 300]), PagedBatch([700, 5], [queries, 5])
    short.q[:queries] = long.q[:queries]
    assert torch.equal(long.prefill(ROUNDED)[:queries], short.prefill(ROUNDED)[:queries])


def test_attention_rounds_p_before_it_meets_v() -> None:
    """Keys of weights 1 and p with V of 0 and 1 give p / (1 + p): where rounding p shows, it must."""
    shown = 0
    for step in range(64):
        gap = -(step + 1) / 32
        batch = PagedBatch([2], [1], torch.bfloat16)
        batch.q[:] = 0
        batch.q.view(-1, HEADS.head_dim)[:, 0] = gap * math.sqrt(HEADS.head_dim)
        page = int(batch.block_table[0, 0])
        batch.k_pages[page, :, :2] = 0
        batch.k_pages[page, :, 1, 0] = 1
        batch.v_pages[page, :, 0] = 0
        batch.v_pages[page, :, 1] = 1
        p = torch.tensor(gap).exp()
        rounded, plain = (p.bfloat16().float() / (1 + p)).bfloat16(), (p / (1 + p)).bfloat16()
        assert (batch.decode(ROUNDED) == rounded).all()
        shown += int(rounded != plain)
    assert shown >= 8


def test_attention_over_many_equal_values_returns_the_value() -> None:
    length = 32768
    batch = PagedBatch([length], [1], torch.bfloat16)
    batch.v_pages.fill_(1.0)
    assert (batch.decode(ROUNDED) == 1).all()


def test_attention_of_large_scores_is_finite() -> None:
    batch = PagedBatch([100], [100], torch.bfloat16)
    batch.q *= 3e4
    assert batch.prefill(ROUNDED).isfinite().all()


# o, down, gate_up, lm_head


@pytest.mark.parametrize("op", ["o", "down"])
def test_residual_projections_write_in_place_and_sum_what_they_rounded(op: str) -> None:
    features = HEADS.q_features if op == "o" else CONFIG.intermediate_size
    x, weight = random(3, features).bfloat16(), random(CONFIG.hidden_size, features, seed=1, scale=0.1)
    residual = random(3, CONFIG.hidden_size, seed=2, scale=8.0).bfloat16()
    expected = residual.float() + x.float() @ weight.T
    out, sumsq, stream = getattr(ROUNDED, op)("prefill", x, weight, residual)
    assert out is residual is stream
    assert torch.equal(out, expected.bfloat16())
    assert_same(sumsq.sum(1), expected.square().sum(1))


@pytest.mark.parametrize("op", ["o", "down"])
def test_decodes_residual_is_not_rounded(op: str) -> None:
    features = HEADS.q_features if op == "o" else CONFIG.intermediate_size
    x, weight = random(3, features).bfloat16(), random(CONFIG.hidden_size, features, seed=1, scale=0.1)
    residual = random(3, CONFIG.hidden_size, seed=2, scale=8.0)
    expected = residual + x.float() @ weight.T
    out, sumsq, stream = getattr(ROUNDED, op)("decode", x, weight, residual)
    assert stream is residual
    assert torch.equal(residual, expected)
    assert torch.equal(out, expected.bfloat16())
    assert_same(sumsq.sum(1), expected.square().sum(1))


def test_the_exact_reference_rounds_no_residual() -> None:
    x, weight = random(3, HEADS.q_features), random(CONFIG.hidden_size, HEADS.q_features, seed=1)
    residual = random(3, CONFIG.hidden_size, seed=2).bfloat16()
    kept = residual.clone()
    out, _, stream = EXACT.o("prefill", x, weight, residual)
    assert stream is out
    assert out.dtype == torch.float32
    assert torch.equal(residual, kept)
    assert_same(out, kept.float() + x @ weight.T)


def test_gate_up_is_the_first_half_of_transformers_mlp() -> None:
    mlp = modeling_llama.LlamaMLP(hugging_face_config())
    x = random(4, CONFIG.hidden_size, scale=5.0)
    weight = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]).detach()
    h = EXACT.gate_up("decode", x, split_sumsq(x), weight)
    assert_same(F.linear(h, mlp.down_proj.weight.detach()), mlp(rms_norm(x)).detach())
    bf16 = x.bfloat16()
    exact = EXACT.gate_up("decode", bf16, split_sumsq(bf16), weight)
    assert torch.equal(ROUNDED.gate_up("decode", bf16, split_sumsq(bf16), weight), exact.bfloat16())


def test_lm_head_returns_float32_logits_as_a_view_of_padded_rows() -> None:
    x, weight = random(3, CONFIG.hidden_size).bfloat16(), random(CONFIG.vocab_size, CONFIG.hidden_size, seed=1)
    logits = ROUNDED.lm_head("prefill", x, split_sumsq(x), weight)
    assert logits.dtype == torch.float32
    assert logits.stride() == (128, 1)
    assert_same(logits, F.linear(rms_norm(x.float()), weight))


def test_a_channel_of_thirty_thousand_stays_finite() -> None:
    x = random(2, CONFIG.hidden_size)
    x[:, 17] = 3e4
    weight = random(CONFIG.vocab_size, CONFIG.hidden_size, seed=1)
    logits = ROUNDED.lm_head("prefill", x.bfloat16(), split_sumsq(x.bfloat16()), weight)
    assert_same(logits, F.linear(rms_norm(x.bfloat16().float()), weight))


# argmax, pack, the tolerance rule


def test_argmax_takes_the_lowest_of_equals_and_never_nan() -> None:
    logits = torch.tensor(
        [[1.0, 3, 3, 2], [torch.nan, -torch.inf, -5, torch.nan], [-torch.inf, torch.inf, 0, torch.inf]]
    )
    best = EXACT.argmax(logits)
    assert best.dtype == torch.int32
    assert best.tolist() == [1, 2, 1]


def test_pack_converts_a_weight_once_for_both_phases() -> None:
    logical = random(8, 8).bfloat16()
    prefill = ROUNDED.pack("o", "prefill", logical)
    assert ROUNDED.pack("o", "decode", logical) is prefill
    assert torch.equal(prefill, logical.float())
    assert ROUNDED.pack("o", "decode", random(8, 8, seed=1).bfloat16()) is not prefill


def test_the_tolerance_rule() -> None:
    precision = get_precision("bf16")
    exact, same_dtype = torch.tensor([1.0, -4.0]), torch.tensor([1.0, -4.125])
    assert allowed_error(same_dtype, exact, precision) == 2 * 0.125 + 2.0**-8 * 4
    assert largest_error(torch.tensor([1.5, -4.0]), exact) == 0.5


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_no_tolerance_admits_what_is_not_finite(bad: float) -> None:
    assert largest_error(torch.tensor([1.0, bad]), torch.tensor([1.0, 2.0])) == math.inf
    assert largest_error(torch.tensor([1.0, 2.0]), torch.tensor([1.0, bad])) == math.inf
