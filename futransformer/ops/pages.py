"""The pages of one layer's KV cache as operations take them: BF16, or E4M3 codes and scales; an INT4 copy."""

from __future__ import annotations

import torch
from torch import Tensor

from futransformer.generator.errors import InputError
from futransformer.generator.kv_format import KvFormat
from futransformer.generator.precision import BF16, Element
from futransformer.generator.specs import PAGE_SIZE, Heads
from futransformer.ops.validate import DTYPES, check_aligned, check_tensor
from futransformer.tma import SWIZZLE_BYTES


def check_pages(
    op: str,
    element: Element,
    heads: Heads,
    k_pages: Tensor,
    v_pages: Tensor,
    kv_scale: Tensor | None,
    device: torch.device,
) -> dict[str, Tensor]:
    """Require pages of this element, and scales of codes; return the argument by which kernels take these."""
    shape = (None, heads.num_key_value_heads, PAGE_SIZE, heads.head_dim)
    check_tensor(op, "k_pages", k_pages, shape, DTYPES[element], device)
    check_tensor(op, "v_pages", v_pages, tuple(k_pages.shape), DTYPES[element], device)
    if (kv_scale is None) != (element == BF16):
        needs = "holds no codes: leave kv_scale out" if kv_scale is not None else "holds codes and needs kv_scale"
        raise InputError(f"{op}: the cache of this kernel {needs}")
    if kv_scale is None:
        return {}
    check_tensor(op, "kv_scale", kv_scale, (2,), torch.float32, device)
    return {"kv_scale": kv_scale}


def check_copy(
    op: str, copy: KvFormat | None, heads: Heads, kv_copy: Tensor | None, pages: int | None, device: torch.device
) -> dict[str, Tensor]:
    """Require an INT4 copy, of that many pages if given, where the kernel has one; return it as kernels take it."""
    if (kv_copy is None) != (copy is None):
        needs = "has an INT4 copy of the cache and needs kv_copy" if kv_copy is None else "has none: leave kv_copy out"
        raise InputError(f"{op}: the kernel {needs}")
    if kv_copy is None or copy is None:
        return {}
    shape = (pages, heads.num_key_value_heads, copy.page_bytes(heads.head_dim))
    check_tensor(op, "kv_copy", kv_copy, shape, torch.uint8, device)
    check_aligned(op, "kv_copy", kv_copy, 16)
    return {"kv_copy": kv_copy}


def page_boxes(pages: Tensor) -> tuple[Tensor, int, int]:
    """The pages as rows, and the boxes that attention fetches: of BF16 a page's 64 features, of codes a whole page."""
    head_dim, width = pages.shape[-1], pages.element_size()
    columns = SWIZZLE_BYTES // width
    if width > 1:
        return pages.view(-1, head_dim), PAGE_SIZE, columns
    return pages.view(-1, columns), PAGE_SIZE * head_dim // columns, columns
