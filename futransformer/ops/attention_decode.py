"""Decode attention: choose how to split the sequences, keep the workspace, launch."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from futransformer.arguments import Argument
from futransformer.driver import Kernel
from futransformer.generator.errors import InputError
from futransformer.generator.specs import PAGE_SIZE, AttentionDecodeSpec
from futransformer.ops.pages import check_copy, check_pages, page_boxes
from futransformer.ops.streams import StreamOrder
from futransformer.ops.validate import check_aligned, check_tensor
from futransformer.tma import tensor_map_2d

# What a block costs beside its pages (first loads, merging its warps, combining the splits), in pages. An estimate: the
# first page arrives some 2 us after a block's start; a page of an 8B model is about 1 us of a block's share of memory,
# in INT4 a quarter of that.
BLOCK_OVERHEAD_PAGES = 2
INT4_BLOCK_OVERHEAD_PAGES = 7

# Where a row's bits may not depend on its batch. Two pages a block: a short context still has blocks for the whole card
# at a batch of eight, and one sequence of 4k tokens for all but a few multiprocessors.
INVARIANT_PAGES_PER_SPLIT = 2

MAX_SEQUENCES = 65_535  # the grid's third dimension


@lru_cache(maxsize=4096)
def choose_pages_per_split(
    max_pages: int, sequence_heads: int, block_slots: int, overhead_pages: int = BLOCK_OVERHEAD_PAGES
) -> int:
    """Return the pages of one block, for the longest sequence's pages and B x num_key_value_heads.

    ``block_slots`` blocks run at a time. Every number of splits is weighed as waves of blocks times the pages (and
    overhead) of one; the fewest splits win among equals. The rule sees the batch's size and longest sequence, never the
    other lengths, so a neighbour that grows without being the longest changes nothing.
    """

    def cost(pages: int) -> tuple[int, int]:
        splits = -(-max_pages // pages)
        waves = -(-splits * sequence_heads // block_slots)
        return waves * (pages + overhead_pages), splits

    return min(range(1, max_pages + 1), key=cost)


class Workspace:
    """What the splits of a sequence hand to the block that combines them.

    It belongs to one op and serves one launch at a time. Launches on one stream follow each other anyway; when the
    stream changes, the new one first waits for the old. A captured graph holds the addresses of its capture: buffers
    are therefore never freed while the op lives, only replaced by larger ones (at least twice the size, which bounds
    the sum), and never replaced during a capture. Replays of such a graph must not overlap other uses of the op.
    """

    def __init__(self, device: torch.device) -> None:
        """Start empty."""
        self.device = device
        self.out = torch.empty(0, dtype=torch.float32, device=device)
        self.max_sum = torch.empty(0, dtype=torch.float32, device=device)
        self.arrivals = torch.empty(0, dtype=torch.int32, device=device)
        self._retired: list[Tensor] = []
        self._streams = StreamOrder(device)

    def reserve(self, rows: int, head_dim: int, sequence_heads: int) -> None:
        """Make room for ``rows`` partial results (query heads x splits) and a counter a sequence and key/value head."""
        self._streams.follow()
        self.out = self._grown(self.out, rows * head_dim)
        self.max_sum = self._grown(self.max_sum, rows * 2)
        self.arrivals = self._grown(self.arrivals, sequence_heads)

    def _grown(self, buffer: Tensor, size: int) -> Tensor:
        if size <= buffer.numel():
            return buffer
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise InputError(
                "attention_decode: its workspace must grow while a CUDA graph is captured; "
                "run it once with this batch size and max_seqlen_k before capturing"
            )
        self._retired.append(buffer)
        return torch.zeros(max(size, 2 * buffer.numel()), dtype=buffer.dtype, device=self.device)


class AttentionDecode:
    """Attention of one query a sequence over its pages."""

    def __init__(self, kernel: Kernel, *, pages_per_split: int | None = None) -> None:
        """Serve the geometry of the kernel's spec; ``pages_per_split`` fixes what is otherwise chosen a launch."""
        assert isinstance(kernel.spec, AttentionDecodeSpec)
        self.spec = kernel.spec
        self.kernel = kernel
        self.pages_per_split = pages_per_split
        self.workspace = Workspace(kernel.device)

    def __call__(
        self,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        block_table: Tensor,
        seqlens_k: Tensor,
        *,
        max_seqlen_k: int,
        out: Tensor | None = None,
        kv_scale: Tensor | None = None,
        kv_copy: Tensor | None = None,
        pages_per_split: int | None = None,
    ) -> Tensor:
        """See Ops.attention_decode. With a fixed ``pages_per_split`` a row's bits do not depend on its batch.

        A sequence longer than ``max_seqlen_k`` is still computed right, only slower; one longer than its row of the
        block table gives NaN.
        """
        op, heads, device = "attention_decode", self.spec.heads, self.kernel.device
        check_tensor(op, "q", q, (None, heads.q_features), torch.bfloat16, device)
        sequences = q.shape[0]
        pages: dict[str, Argument] = {**check_copy(op, self.spec.copy, heads, kv_copy, None, device)}
        scaled = {}
        if self.spec.copy is None:  # else the copy is all that is read
            scaled = check_pages(op, self.spec.element, heads, k_pages, v_pages, kv_scale, device)
        check_tensor(op, "block_table", block_table, (sequences, None), torch.int32, device)
        check_tensor(op, "seqlens_k", seqlens_k, (sequences,), torch.int32, device)
        if out is None:
            out = torch.empty_like(q)
        else:
            check_tensor(op, "out", out, (sequences, heads.q_features), torch.bfloat16, device)
        for name, tensor in (("q", q), ("out", out)):
            check_aligned(op, name, tensor, 16)
        if sequences > MAX_SEQUENCES:
            raise InputError(f"{op}: {sequences} sequences, at most {MAX_SEQUENCES} fit in a grid; split the batch")
        held, cache = ("k_pages", k_pages) if kv_copy is None else ("kv_copy", kv_copy)
        if cache.shape[0] == 0:
            raise InputError(f"{op}: {held} holds no page; a cache needs at least one")
        if not 0 <= max_seqlen_k <= block_table.shape[1] * PAGE_SIZE:
            raise InputError(
                f"{op}: max_seqlen_k is {max_seqlen_k}, but block_table names {block_table.shape[1]} pages of "
                f"{PAGE_SIZE} tokens a sequence; give the longest sequence's length, and a block_table that holds it"
            )
        if pages_per_split is not None and pages_per_split < 1:
            raise InputError(
                f"{op}: pages_per_split must be at least 1, not {pages_per_split}; None lets the op choose"
            )
        if sequences == 0:
            return out

        max_pages = max(-(-max_seqlen_k // PAGE_SIZE), 1)
        sequence_heads = sequences * heads.num_key_value_heads
        pages_per_split = pages_per_split or self.pages_per_split
        if pages_per_split is None:
            block_slots = self.kernel.sm_count * self.spec.blocks_per_sm
            overhead = BLOCK_OVERHEAD_PAGES if self.spec.copy is None else INT4_BLOCK_OVERHEAD_PAGES
            pages_per_split = choose_pages_per_split(max_pages, sequence_heads, block_slots, overhead)
        splits = -(-max_pages // pages_per_split)
        # A single split writes its result directly.
        self.workspace.reserve(
            sequences * heads.num_attention_heads * splits if splits > 1 else 0, heads.head_dim, sequence_heads
        )
        if self.spec.copy is None:
            pages = {"k_pages": tensor_map_2d(*page_boxes(k_pages)), "v_pages": tensor_map_2d(*page_boxes(v_pages))}
        self.kernel.launch(
            (splits, heads.num_key_value_heads, sequences),
            q=q,
            **pages,
            out=out,
            block_table=block_table,
            block_table_stride=block_table.shape[1],
            seqlens_k=seqlens_k,
            softmax_scale=heads.head_dim**-0.5,
            pages_per_split=pages_per_split,
            partial_out=self.workspace.out,
            partial_max_sum=self.workspace.max_sum,
            arrivals=self.workspace.arrivals,
            **scaled,
        )
        return out
