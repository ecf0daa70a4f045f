"""The INT4 copy of the cache in tests: the bytes that it must have, from the BF16 pages beside it."""

from __future__ import annotations

from torch import Tensor

from futransformer.generator.kv_format import PAGE_SIZE, KvFormat
from futransformer.kv_packing import store_tokens
from futransformer.quantize.kv_int4 import quantise_keys, quantise_kv, rotate
from futransformer.reference import natural_order


def copied(before: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor, form: KvFormat) -> Tensor:
    """``before`` [num_pages, heads, page bytes] with the tokens in these slots (negative ones left out)."""
    after, slots = before.clone(), slots[slots >= 0].to(before.device)
    k, v = (pages[slots // PAGE_SIZE, :, slots % PAGE_SIZE] for pages in (k_pages, v_pages))
    keys = quantise_keys(rotate(natural_order(k), form.hadamard), form)
    store_tokens(after, slots, keys, quantise_kv(v, form), form)
    return after
