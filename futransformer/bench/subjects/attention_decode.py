"""attention_decode/{8b,70b}/{bf16,bf16-kv8}/B=.../ctx=...: a query a sequence over its cache; ours over shuffled pages.

Caches are cold: calls walk over several of them, in a graph. Rivals read contiguous caches, in BF16: over a cache of
E4M3 the values that its codes are worth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

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
from futransformer.generator.precision import E4M3, get_precision
from futransformer.ops.interface import Ops
from futransformer.reference import ReferenceOps

PRECISIONS = ("bf16", "bf16-kv8")
KV_SCALE = 2.0**-6  # of K and V, which are about 1: a power of two
BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (512, 1024, 4096, 32768, 131072)
DEFAULT = {(1, 1024), (8, 1024), (32, 1024), (1, 4096), (32, 4096), (1, 32768)}


def cases() -> Sequence[Case]:
    """See futransformer.bench.subjects."""
    return [
        Case(
            f"attention_decode/{shape}/{precision}/B={batch}/ctx={context}",
            "us",
            MEMORY_BOUND,
            partial(open_case, shape, batch, context, precision=precision),
            default=shape == "8b" and (batch, context) in DEFAULT,
            precision=precision,
        )
        for precision in PRECISIONS
        for shape in ("8b", "70b")
        for batch in BATCHES
        for context in CONTEXTS
    ]


def in_codes(cache: Cache) -> Cache:
    """The same cache, rounded: pages of codes, and what these are worth, which BF16 holds exactly."""
    k, v = ((tensor / KV_SCALE).to(torch.float8_e4m3fn).bfloat16() * KV_SCALE for tensor in (cache.k, cache.v))
    pages = ((pages / KV_SCALE).to(torch.float8_e4m3fn) for pages in (cache.k_pages, cache.v_pages))
    return Cache(k, v, *pages)


def open_case(shape: str, batch: int, context: int, bench: Bench, precision: str = "bf16") -> Problem:
    """Draw queries and caches."""
    ops, config, device = bench.library(shape, precision), shape_config(shape), bench.device
    work = decode_attention_work(config, batch, context, precision)
    floor = work.floor_seconds(bench.ceilings)
    paging = Paging(batch, context, device)
    kv_scale = torch.full((2,), KV_SCALE, device=device) if get_precision(precision).kv == E4M3 else None
    drawn = (paging.cache(config) for _ in range(sets_for(work.bytes)))
    caches = [cache if kv_scale is None else in_codes(cache) for cache in drawn]
    q = random_tensor(batch, config.num_attention_heads, config.head_dim, device=device)
    paired = to_pair_order(q, config.head_dim).flatten(1)
    rows = paging.decode_pass()

    def attend(by: Ops, cache: Cache) -> Tensor:
        return rows.attention(by, paired, cache.k_pages, cache.v_pages, kv_scale=kv_scale)

    def our_outputs() -> Sequence[Tensor]:
        poison(device, (tuple(paired.shape), torch.bfloat16))
        return [attend(ops, caches[0])]

    def expected() -> Sequence[Expected]:
        exact, same = (
            attend(ReferenceOps(config, device=device, dtype=dtype), caches[0])
            for dtype in (torch.float32, torch.bfloat16)
        )
        return [Expected(exact, same)]

    def rival(make: Callable[[Tensor, Tensor, Tensor], Callable[[], Tensor]]) -> Contender:
        calls = [make(q, cache.k, cache.v) for cache in caches]
        return graphed(calls, lambda: [calls[0]()], floor)

    return Problem(
        work=work,
        ours=graphed([partial(attend, ops, cache) for cache in caches], our_outputs, floor),
        rivals={
            "torch-bf16": lambda: rival(sdpa_decode),
            "cudnn": lambda: rival(partial(sdpa_decode, backend=SDPBackend.CUDNN_ATTENTION)),
            "flash-attn-4": lambda: rival(flash_attention_decode),
        },
        expected=expected,
    )
