"""All layers of a decode step in one launch: the table of layers, what blocks leave for one another, the launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from futransformer.driver import Kernel
from futransformer.generator.config import LlamaConfig
from futransformer.generator.errors import InputError
from futransformer.generator.specs import PAGE_SIZE, DecodeLayersSpec
from futransformer.ops.interface import LayerPages, Stream
from futransformer.ops.streams import StreamOrder

if TYPE_CHECKING:
    from futransformer.blocks import DecodePass, LayerWeights

# Single kernels attend faster: all layers of 8B on an H200 take 13 ns a token here, 8.6 there. Of version 6 a step over
# 4,096 tokens took 1.37 ms here and 1.57 there, over 131,072 3.06 and 2.66; later ones were not measured so far out.
MOST_KEYS = 32_768
PAGES_AT_ONCE = 2  # that a block attends to, a set of its warps each


def address_table(rows: Sequence[Sequence[Tensor]], device: torch.device) -> Tensor:
    """Where tensors lie, int64 [rows, tensors of each]; it keeps none of them alive."""
    return torch.tensor([[tensor.data_ptr() for tensor in row] for row in rows], dtype=torch.int64, device=device)


class DecodeLayers:
    """The layers of one model and cache, of one sequence.

    Weights and pages must stay where they are: the kernel reads their addresses from a table. What blocks leave for one
    another is kept from call to call, for a captured graph holds its address. One launch at a time.
    """

    def __init__(self, config: LlamaConfig, kernel: Kernel, layers: Sequence[LayerWeights], cache: LayerPages) -> None:
        self.config, self.kernel = config, kernel
        assert isinstance(kernel.spec, DecodeLayersSpec)
        self.spec, self.device = kernel.spec, kernel.device
        self._held = [self._tensors(layer, cache, index) for index, layer in enumerate(layers)]
        self._table = address_table(self._held, self.device)
        self._epoch = torch.zeros(1, dtype=torch.int32, device=self.device)
        # Of a build for profiling: the clocks that each block took, and those with copies under way.
        clocks = torch.zeros(self.spec.blocks, 2, dtype=torch.int64, device=self.device)
        self.clocks = clocks if self.spec.clocked else None
        self._exchanges: dict[int, dict[str, Tensor]] = {}
        self._streams = StreamOrder(self.device)

    @staticmethod
    def _tensors(layer: LayerWeights, cache: LayerPages, index: int) -> tuple[Tensor, ...]:
        """In the order of the kernel's Layer."""
        copy = cache.copy_layer(index)
        assert copy is not None, "the plan has this kernel where the cache has a copy"
        weights = (layer.qkv, layer.o, layer.gate_up, layer.down)
        return (*(weight["decode"] for weight in weights), *cache.layer(index), copy)

    def serves(self, rows: int, most_keys: int) -> bool:
        """See WalkLayers.serves."""
        return rows == 1 and most_keys <= MOST_KEYS

    def splits(self, pages: int) -> tuple[int, int]:
        """Blocks that share the pages of a head, and the pages of each: at most one share a block, by whole turns."""
        most = self.spec.blocks // self.spec.heads.num_key_value_heads
        of_each = -(-pages // (most * PAGES_AT_ONCE)) * PAGES_AT_ONCE
        return -(-pages // of_each), of_each

    def __call__(self, stream: Stream, rows: DecodePass, rope_table: Tensor) -> Stream:
        """Run all layers on x [1, H] in BF16 and residual [1, H] in float32, which are overwritten.

        A length of 0 attends nothing, one beyond the block table gives NaN.
        """
        self._streams.follow()
        x, _, residual = stream  # the kernel adds up the squares of x itself
        assert len(x) == 1
        splits, pages_per_split = self.splits(max(-(-rows.max_seqlen_k // PAGE_SIZE), 1))
        exchange = self._exchange(splits)
        self.kernel.launch(
            (self.spec.blocks, 1, 1),
            layers=self._table,
            num_layers=len(self._table),
            x=x,
            residual=residual,
            rms_norm_eps=self.config.rms_norm_eps,
            rope_table=rope_table,
            positions=rows.positions,
            slots=rows.slots,
            block_table=rows.block_table,
            block_table_stride=rows.block_table.shape[1],
            seqlens_k=rows.seqlens_k,
            softmax_scale=self.config.head_dim**-0.5,
            splits=splits,
            pages_per_split=pages_per_split,
            epoch=self._epoch,
            **({} if self.clocks is None else {"clocks": self.clocks}),
            **exchange,
        )
        return Stream(x, exchange["sumsq_out"][None], residual)

    def _exchange(self, splits: int) -> dict[str, Tensor]:
        """Words of 32 bits with tags of as many, of no launch: zero."""
        if splits not in self._exchanges:
            if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise InputError(
                    "decode_layers: its words must be made while a CUDA graph is captured; run it once with so many "
                    "pages before capturing"
                )
            shapes = self.spec.exchanged(splits)
            words = {
                f"{name}_sent": torch.zeros(shape, dtype=torch.int64, device=self.device)
                for name, shape in shapes.items()
            }
            sums = torch.zeros(self.spec.sumsq_parts, dtype=torch.float32, device=self.device)
            self._exchanges[splits] = {**words, "sumsq_out": sums}
        return self._exchanges[splits]
