"""Prefill attention: causal attention of all prompts' queries over paged K and V, in one launch."""

from __future__ import annotations

import torch
from torch import Tensor

from futransformer.driver import Kernel
from futransformer.generator.errors import InputError
from futransformer.generator.specs import AttentionPrefillSpec
from futransformer.ops.interface import Fp8Output
from futransformer.ops.pages import check_pages, page_boxes
from futransformer.ops.validate import check_aligned, check_tensor, fp8_arguments
from futransformer.tma import tensor_map_2d

_BOX_COLUMNS = 64  # features of Q of one TMA box: the width of the 128-byte swizzle


class AttentionPrefill:
    """Attention of each sequence's queries, its last rows, over its pages."""

    def __init__(self, kernel: Kernel) -> None:
        assert isinstance(kernel.spec, AttentionPrefillSpec)
        self.spec = kernel.spec
        self.kernel = kernel
        self._tickets = torch.zeros(1, dtype=torch.int32, device=kernel.device)  # every launch leaves zero behind

    def __call__(
        self,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        block_table: Tensor,
        cu_seqlens_q: Tensor,
        seqlens_k: Tensor,
        *,
        max_seqlen_q: int,
        out: Tensor | None = None,
        fp8: Fp8Output | None = None,
        kv_scale: Tensor | None = None,
    ) -> Tensor:
        """See Ops.attention_prefill. ``max_seqlen_q`` only sizes the grid, which need not exceed the work.

        Lengths stay on the device, so that nothing synchronises: a sequence of no queries is skipped, and a query that
        sees no key (seqlens_k below the sequence's queries) gives zeros.
        """
        op, heads, device = "attention_prefill", self.spec.heads, self.kernel.device
        check_tensor(op, "q", q, (None, heads.q_features), torch.bfloat16, device)
        scaled = check_pages(op, self.spec.element, heads, k_pages, v_pages, kv_scale, device)
        check_tensor(op, "block_table", block_table, (None, None), torch.int32, device)
        sequences = block_table.shape[0]
        check_tensor(op, "cu_seqlens_q", cu_seqlens_q, (sequences + 1,), torch.int32, device)
        check_tensor(op, "seqlens_k", seqlens_k, (sequences,), torch.int32, device)
        written = fp8_arguments(op, self.spec.fp8_out, fp8, device)
        dtype = torch.bfloat16 if fp8 is None else torch.float8_e4m3fn
        if out is None:
            out = torch.empty_like(q, dtype=dtype)
        else:
            check_tensor(op, "out", out, tuple(q.shape), dtype, device)
        written["out" if fp8 is None else "out_fp8"] = out
        for name, tensor in (("q", q), ("k_pages", k_pages), ("v_pages", v_pages), ("out", out)):
            check_aligned(op, name, tensor, 16)
        rows = q.shape[0]
        if not min(1, rows) <= max_seqlen_q <= rows:
            raise InputError(
                f"{op}: max_seqlen_q is {max_seqlen_q}, but q has {rows} rows; give the longest sequence's queries"
            )
        if rows == 0 or sequences == 0:
            return out
        if k_pages.shape[0] == 0:
            raise InputError(f"{op}: k_pages holds no page; allocate the cache before the prefill")

        tiles = sequences * -(-max_seqlen_q // self.spec.tile_m)
        blocks = min(self.kernel.sm_count, tiles * heads.num_attention_heads)
        self.kernel.launch(
            (blocks, 1, 1),
            q=tensor_map_2d(q, self.spec.tile_m, _BOX_COLUMNS),
            k_pages=tensor_map_2d(*page_boxes(k_pages)),
            v_pages=tensor_map_2d(*page_boxes(v_pages)),
            **written,
            block_table=block_table,
            block_table_stride=block_table.shape[1],
            cu_seqlens_q=cu_seqlens_q,
            seqlens_k=seqlens_k,
            sequences=sequences,
            tickets=self._tickets,
            softmax_scale=heads.head_dim**-0.5,
            **scaled,
        )
        return out
