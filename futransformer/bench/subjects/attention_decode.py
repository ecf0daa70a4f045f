"""attention_decode/{8b,70b}/{bf16,bf16-kv8,int4}/B=.../ctx=...: a query a sequence over its cache, in shuffled pages.

Caches are cold: calls walk over several of them, in a graph. Rivals read contiguous caches, in BF16: over a cache of
E4M3, or an INT4 copy, the values that its codes are worth. Beside an INT4 copy ours over BF16 pages is timed as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from futransformer.bench.case import MEMORY_BOUND, Case, Contender, Expected, Problem
from futransformer.bench.check import poison
from futransformer.bench.graphs import graphed
from futransformer.bench.llama import Cache, Paging, random_tensor, sets_for, to_pair_order
from futransformer.bench.rivals.attention import flash_attention_decode, sdpa_decode
from futransformer.bench.runner import Bench
from futransformer.bench.shapes import decode_attention_work, shape_config
from futransformer.generator.config import LlamaConfig
from futransformer.generator.kv_format import PAGE_SIZE, KvFormat
from futransformer.generator.precision import E4M3, get_precision
from futransformer.kv_packing import store_tokens
from futransformer.ops.interface import Ops
from futransformer.quantize.kv_int4 import Int4Kv, quantise_kv
from futransformer.reference import ReferenceOps

PRECISIONS = {"bf16": "bf16", "bf16-kv8": "bf16-kv8", "int4": "bf16-kv4"}  # by what a row is named after
KV_SCALE = 2.0**-6  # of K and V, which are about 1: a power of two
BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (512, 1024, 4096, 32768, 131072)
DEFAULT = {(1, 1024), (8, 1024), (32, 1024), (1, 4096), (32, 4096), (1, 32768)}


def cases() -> Sequence[Case]:
    """See futransformer.bench.subjects."""
    return [
        Case(
            f"attention_decode/{shape}/{name}/B={batch}/ctx={context}",
            "us",
            MEMORY_BOUND,
            partial(open_case, shape, batch, context, precision=precision),
            default=shape == "8b" and (batch, context) in DEFAULT,
            precision=precision,
        )
        for name, precision in PRECISIONS.items()
        for shape in ("8b", "70b")
        for batch in BATCHES
        for context in CONTEXTS
    ]


class Held(NamedTuple):
    """A cache, and its INT4 copy, if what is timed reads one."""

    cache: Cache
    kv_copy: Tensor | None = None


def in_codes(cache: Cache) -> Cache:
    """The same cache, rounded: pages of codes, and what these are worth, which BF16 holds exactly."""
    k, v = ((tensor / KV_SCALE).to(torch.float8_e4m3fn).bfloat16() * KV_SCALE for tensor in (cache.k, cache.v))
    pages = ((pages / KV_SCALE).to(torch.float8_e4m3fn) for pages in (cache.k_pages, cache.v_pages))
    return Cache(k, v, *pages)


def coarse(codes: Int4Kv) -> Int4Kv:
    """Scales of five significant bits: what codes are worth then is exact in BF16."""
    fraction, exponent = torch.frexp(codes.scales.float())
    return Int4Kv(codes.codes, torch.ldexp((fraction * 32).round() / 32, exponent).half(), codes.minima)


def copied(paging: Paging, config: LlamaConfig, form: KvFormat) -> Held:
    """A random cache of what INT4 codes are worth, and the codes; K as it is rotated, as rivals read it."""
    shape = (paging.sequences, config.num_key_value_heads, paging.tokens, config.head_dim)
    k, v = (torch.empty(shape, dtype=torch.bfloat16, device=paging.device) for _ in range(2))
    page_bytes = form.page_bytes(config.head_dim)
    kv_copy = torch.full((paging.pages, shape[1], page_bytes), 255, dtype=torch.uint8, device=paging.device)
    position = torch.arange(paging.tokens, device=paging.device)
    for sequence in range(paging.sequences):
        keys, values = (
            coarse(quantise_kv(random_tensor(paging.tokens, shape[1], config.head_dim, device=paging.device), form))
            for _ in range(2)
        )
        k[sequence], v[sequence] = keys.worth().transpose(0, 1), values.worth().transpose(0, 1)
        pages = paging.block_table[sequence, position // PAGE_SIZE].long()
        store_tokens(kv_copy, pages * PAGE_SIZE + position % PAGE_SIZE, keys, values, form)
    return Held(Cache(k, v, paging.store(k, config, pairs=True), paging.store(v, config, pairs=False)), kv_copy)


def open_case(shape: str, batch: int, context: int, bench: Bench, precision: str = "bf16") -> Problem:
    """Draw queries and caches."""
    ops, config, device = bench.library(shape, precision), shape_config(shape), bench.device
    row = get_precision(precision)
    work = decode_attention_work(config, batch, context, precision)
    floor = work.floor_seconds(bench.ceilings)
    paging = Paging(batch, context, device)
    kv_scale = torch.full((2,), KV_SCALE, device=device) if row.kv == E4M3 else None

    def drawn() -> Held:
        if row.copy is not None:
            return copied(paging, config, row.copy)
        cache = paging.cache(config)
        return Held(cache if kv_scale is None else in_codes(cache))

    held = [drawn() for _ in range(sets_for(work.bytes))]
    q = random_tensor(batch, config.num_attention_heads, config.head_dim, device=device)
    paired = to_pair_order(q, config.head_dim).flatten(1)
    rows = paging.decode_pass()

    def attend(by: Ops, held: Held) -> Tensor:
        of_copy = held.kv_copy is not None  # whose K, and so whose q, has the natural order
        query, pages = q.flatten(1) if of_copy else paired, (held.cache.k_pages, held.cache.v_pages)
        return rows.attention(by, query, *pages, kv_scale=kv_scale, kv_copy=held.kv_copy)

    def our_outputs() -> Sequence[Tensor]:
        poison(device, (tuple(paired.shape), torch.bfloat16))
        return [attend(ops, held[0])]

    def expected() -> Sequence[Expected]:
        exact, same = (
            attend(ReferenceOps(config, device=device, dtype=dtype, copy=row.copy), held[0])
            for dtype in (torch.float32, torch.bfloat16)
        )
        return [Expected(exact, same)]

    def rival(make: Callable[[Tensor, Tensor, Tensor], Callable[[], Tensor]]) -> Contender:
        calls = [make(q, each.cache.k, each.cache.v) for each in held]
        return graphed(calls, lambda: [calls[0]()], floor)

    def ours_over_bf16() -> Contender:
        plain = [partial(attend, bench.library(shape), Held(each.cache)) for each in held]
        return graphed(plain, lambda: [plain[0]()], floor)

    return Problem(
        work=work,
        ours=graphed([partial(attend, ops, each) for each in held], our_outputs, floor),
        rivals={
            "torch-bf16": lambda: rival(sdpa_decode),
            "cudnn": lambda: rival(partial(sdpa_decode, backend=SDPBackend.CUDNN_ATTENTION)),
            "flash-attn-4": lambda: rival(flash_attention_decode),
        },
        expected=expected,
        beside={} if row.copy is None else {"ours-bf16": ours_over_bf16},
    )
