"""Attention over ragged sequences in shuffled pages, whose answer is a mean of integers.

Every key is one of 16 rows of a Hadamard matrix, and a query is 16 times one of them or one that no key is: scores are
0, or so much that 2^x of the difference is nothing. So a query's result is the mean of V over the visible keys of its
class, and over all visible ones where there is none; sums of V are exact, a division is left. Whatever is read that is
not a visible key, or is not read that is one, shows. Slots that hold no token are NaN, entries of the block table
behind a sequence are pages of NaN and numbers that are no page.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from futransformer.generator.kv_format import KvFormat
from futransformer.generator.precision import E4M3
from futransformer.generator.specs import PAGE_SIZE, Heads
from futransformer.kv_packing import store_tokens
from futransformer.library import KernelLibrary
from futransformer.ops.attention_decode import AttentionDecode
from futransformer.ops.interface import Fp8Output
from futransformer.quantize.kv_int4 import LOWEST, Int4Kv, rotate
from futransformer.reference import as_bytes
from tests.kernel_fuzz.exact import Draw, Rooms, WrongResultError, hold, same
from tests.ops.fp8 import check_fp8_statistics, fp8_output

CLASSES, NO_CLASS = 16, 17
SHARPNESS = 16.0  # x sqrt(D) / ln 2 is 184 or more: float32 ends at 2^-149
# Scores are 262 at most, in which float32's last place is 2^-15, half of it lost: e^that of each weight, and of a mean
# what the splits' means are combined by.
MEAN = 2.0**-14
LARGEST_V = 16.0
TOKENS = 12_000  # of all sequences
MOST_QUERIES = 700
LENGTHS = (0, 1, 2, 63, 64, 65, 127, 128, 129, 200, 1000, 4097)
SPLITS = (0, 0, 1, 2, 5, 1000)  # pages; 0 as the op chooses


class Cache:
    """K and V of ragged sequences as classes and integers, and the pages that hold them."""

    def __init__(
        self, draw: Draw, heads: Heads, lengths: list[int], *, codes: bool = False, copy: KvFormat | None = None
    ) -> None:
        self.draw, self.heads, self.lengths, self.copy = draw, heads, lengths, copy
        device, head_dim, kv_heads = draw.device, heads.head_dim, heads.num_key_value_heads
        tokens = sum(lengths)
        self.rows = rotate(torch.eye(head_dim, device=device), head_dim).sign()  # of a Hadamard matrix
        self.rows = self.rows[draw.order(head_dim)] * draw.signs(head_dim)
        self.classes = draw.integers(0, CLASSES - 1, tokens, kv_heads)
        self.kv_scale = draw.powers(-2, 0, 2) if codes else None
        self.kv_copy: Tensor | None = None
        self._fill_table()
        spans = [torch.arange(length, device=device) for length in lengths]
        sequence = torch.repeat_interleave(
            torch.arange(len(lengths), device=device), torch.tensor(lengths, device=device)
        )
        position = torch.cat(spans) if spans else sequence
        slots = self.block_table[sequence, position // PAGE_SIZE].long() * PAGE_SIZE + position % PAGE_SIZE
        if copy is not None:
            self._fill_copy(slots, copy)
            return
        self.values = draw.integers(-8, 8, tokens, kv_heads, head_dim).float()
        dtype = torch.bfloat16 if self.kv_scale is None else torch.float8_e4m3fn
        shape = (self.pages, kv_heads, PAGE_SIZE, head_dim)
        self.k_pages, self.v_pages = (torch.full(shape, torch.nan, dtype=dtype, device=device) for _ in range(2))
        for part, (pages, dense) in enumerate(((self.k_pages, self.rows[self.classes]), (self.v_pages, self.values))):
            stored = (dense if self.kv_scale is None else dense / self.kv_scale[part]).to(dtype)
            as_bytes(pages)[slots // PAGE_SIZE, :, slots % PAGE_SIZE] = as_bytes(stored)

    def _fill_table(self) -> None:
        draw, device = self.draw, self.draw.device
        counts = [-(-length // PAGE_SIZE) for length in self.lengths]
        self.pages = sum(counts) + 3
        shuffled = draw.order(self.pages).int()
        garbage = torch.cat((shuffled[:3], torch.tensor([-1, 2**31 - 1, -(2**31)], dtype=torch.int32, device=device)))
        width = max(counts, default=0) + draw.random.randint(1, 3)
        self.block_table = garbage[draw.integers(0, len(garbage) - 1, len(counts), width)]
        first = 3
        for sequence, count in enumerate(counts):
            self.block_table[sequence, :count] = shuffled[first : first + count]
            first += count

    def _fill_copy(self, slots: Tensor, form: KvFormat) -> None:
        draw, heads = self.draw, self.heads
        tokens, kv_heads, groups = len(slots), heads.num_key_value_heads, form.groups(heads.head_dim)
        scales = draw.powers(0, 1, tokens, kv_heads, groups)
        low = 0 if form.minimum else LOWEST
        codes = draw.integers(0, 15, tokens, kv_heads, heads.head_dim)
        minima = (LOWEST * scales).half() if form.minimum else None  # so that V is the same either way
        values = Int4Kv(codes.to(torch.uint8), scales.half(), minima)
        self.values = values.worth()
        signs = self.rows[self.classes]  # of K: codes of -1 and 1, or 0 and 1 times 2, less 1
        ones = torch.ones_like(scales).half()
        if form.minimum:
            keys = Int4Kv(((signs + 1) / 2).to(torch.uint8), 2 * ones, -ones)
        else:
            keys = Int4Kv((signs - low).to(torch.uint8), ones, None)
        shape = (self.pages, kv_heads, form.page_bytes(heads.head_dim))
        self.kv_copy = torch.full(shape, 255, dtype=torch.uint8, device=draw.device)
        store_tokens(self.kv_copy, slots, keys, values, form)
        no_page = (0, kv_heads, PAGE_SIZE, heads.head_dim)
        self.k_pages = self.v_pages = torch.empty(no_page, dtype=torch.bfloat16, device=draw.device)

    def queries(self, count: int) -> tuple[Tensor, Tensor]:
        """Classes int64 [count, query heads], and q BF16 [count, features]."""
        classes = self.draw.integers(0, NO_CLASS, count, self.heads.num_attention_heads)
        return classes, (SHARPNESS * self.rows[classes]).bfloat16().flatten(1)

    def mean(self, sequence: int, classes: Tensor) -> Tensor:
        """What a sequence's last queries must find, float32 [queries, features]: causal, zeros where no key is seen."""
        first, length = sum(self.lengths[:sequence]), self.lengths[sequence]
        queries, kv_heads = classes.shape[0], self.heads.num_key_value_heads
        if 0 in (length, queries):
            return torch.zeros(queries, self.heads.q_features, device=classes.device)
        keys, values = (t[first : first + length].transpose(0, 1) for t in (self.classes, self.values))
        grouped = classes.view(queries, kv_heads, self.heads.group).permute(1, 2, 0)[..., None]
        sees = torch.ones(queries, length, dtype=torch.bool, device=classes.device).tril_(length - queries)
        found = (grouped == keys.view(kv_heads, 1, 1, length).transpose(1, 2)) & sees
        found = torch.where(found.any(-1, keepdim=True), found, sees)
        count = found.sum(-1, keepdim=True)
        total = found.float().flatten(1, 2) @ values
        mean = total.view(kv_heads, self.heads.group, queries, -1) / count.clamp_min(1)
        return mean.permute(2, 0, 1, 3).reshape(queries, self.heads.q_features)


def lengths_of(draw: Draw, sequences: int) -> list[int]:
    """Ragged: about the ends of pages, any, or nothing, of at most TOKENS tokens together."""
    most = max(TOKENS // max(sequences, 1), 2)
    return [
        min(draw.random.choice((draw.random.choice(LENGTHS), draw.random.randint(0, most))), most)
        for _ in range(sequences)
    ]


def decode(draw: Draw, op: AttentionDecode, rooms: Rooms) -> None:
    """One query a sequence."""
    spec, sequences = op.spec, draw.note("sequences", draw.random.randint(1, draw.random.choice((4, 16, 64))))
    cache = Cache(draw, spec.heads, lengths_of(draw, sequences), codes=spec.element == E4M3, copy=spec.copy)
    classes, q = cache.queries(sequences)
    rooms.begin()
    q = rooms.holding(q)
    longest, room = max(cache.lengths), cache.block_table.shape[1] * PAGE_SIZE
    options: dict[str, Any] = {"kv_scale": cache.kv_scale, "kv_copy": cache.kv_copy}
    options["max_seqlen_k"] = draw.choose("max_seqlen_k", (longest, longest, longest // 2, room))
    options["pages_per_split"] = draw.choose("pages_per_split", SPLITS) or None
    outs = []
    for _ in range(2):
        out = rooms.empty(sequences, spec.heads.q_features, torch.bfloat16)
        seqlens = torch.tensor(cache.lengths, dtype=torch.int32, device=draw.device)
        op(q, cache.k_pages, cache.v_pages, cache.block_table, seqlens, out=out, **options)
        outs.append(out)
    rooms.check()
    want = torch.cat([cache.mean(sequence, classes[sequence : sequence + 1]) for sequence in range(sequences)])
    hold("out", outs[0], want, MEAN, _slack(want))
    same("out of a second run", outs[1], outs[0])


def prefill(draw: Draw, ops: KernelLibrary, rooms: Rooms) -> None:
    """Prompts, later turns, and sequences that bring no query, in one launch."""
    heads, sequences = ops.config.heads, draw.note("sequences", draw.random.choice((1, 1, 2, 5, 12)))
    keys = lengths_of(draw, sequences)
    queries: list[int] = []
    for length in keys:
        some = draw.random.randint(0, length)
        chosen = draw.random.choice((length, some, min(1, length), 0, length + 3))
        queries.append(min(chosen, MOST_QUERIES // sequences))
    rows = draw.note("rows", sum(queries))
    cache = Cache(draw, heads, keys, codes=ops.precision.kv == E4M3)
    classes, q = cache.queries(rows)
    rooms.begin()
    q = rooms.holding(q)
    offsets = torch.tensor([0, *queries], device=draw.device).cumsum(0).int()
    seqlens = torch.tensor(keys, dtype=torch.int32, device=draw.device)
    fp8_out = ops.plan.attention_prefill.fp8_out and (not ops.plan.prefill_bf16 or draw.choose("fp8", (0, 1)) == 1)
    scale = torch.full((1,), 2.0**-6, device=draw.device)  # 448 of which are 7
    outs, written = [], [fp8_output(scale) if fp8_out else None for _ in range(2)]
    for fp8 in written:
        out = rooms.empty(rows, heads.q_features, torch.bfloat16 if fp8 is None else torch.float8_e4m3fn)
        ops.attention_prefill(
            q,
            cache.k_pages,
            cache.v_pages,
            cache.block_table,
            offsets,
            seqlens,
            max_seqlen_q=draw.choose("max_seqlen_q", (max(queries), rows)),
            out=out,
            fp8=fp8,
            kv_scale=cache.kv_scale,
        )
        outs.append(out)
    rooms.check()
    starts = offsets.tolist()
    want = torch.cat([cache.mean(s, classes[starts[s] : starts[s + 1]]) for s in range(sequences)])
    scaled = want if written[0] is None else want / scale
    slack = _slack(want) if written[0] is None else _slack(want) / scale
    hold("out", outs[0], scaled, MEAN, slack)
    same("out of a second run", outs[1], outs[0])
    for fp8 in written:
        _check_statistics(fp8, scaled)


def _slack(want: Tensor) -> Tensor:
    """What combining splits may lose, of the largest value; nothing where no key is seen."""
    return MEAN * LARGEST_V * (want != 0).any(1, keepdim=True)


def _check_statistics(fp8: Fp8Output | None, codes: Tensor) -> None:
    if fp8 is None or codes.numel() == 0:
        return
    try:
        check_fp8_statistics(fp8, codes, 4 * MEAN)
    except AssertionError as error:
        raise WrongResultError(str(error)) from error
