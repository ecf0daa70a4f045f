"""All layers of a decode step in one launch: the table of layers, the workspace, the launch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from futransformer.blocks import DecodePass, LayerWeights
from futransformer.driver import Kernel
from futransformer.generator.config import LlamaConfig
from futransformer.generator.specs import PAGE_SIZE, DecodeLayersSpec
from futransformer.generator.specs.decode_layers import ROW_TILE
from futransformer.kv_cache import KVCache
from futransformer.ops.interface import Stream


class DecodeLayers:
    """The layers of one model; ``kernels`` is keyed by the most sequences that each serves."""

    def __init__(self, config: LlamaConfig, kernels: Mapping[int, Kernel], layers: Sequence[LayerWeights], cache: KVCache) -> None:
        """Hold the addresses of all weights and pages, which must stay where they are."""
        self.config = config
        self.kernels = {batch: kernels[batch] for batch in sorted(kernels)}
        kernel = next(iter(self.kernels.values()))
        assert isinstance(kernel.spec, DecodeLayersSpec)
        self.device, self.blocks, self.copy = kernel.device, kernel.spec.blocks, kernel.spec.copy
        self._held = layers, cache
        rows = []
        for index, layer in enumerate(layers):
            k_pages, v_pages = cache.layer(index)
            copy = cache.copy_layer(index)
            assert copy is not None
            weights = (layer.qkv, layer.o, layer.gate_up, layer.down)
            rows.append([*(weight["decode"].data_ptr() for weight in weights), k_pages.data_ptr(), v_pages.data_ptr(), copy.data_ptr()])
        self.layers = torch.tensor(rows, dtype=torch.int64, device=self.device)
        self.epoch = torch.zeros(2, dtype=torch.int32, device=self.device)
        self._rooms: dict[tuple[int, int], dict[str, Tensor]] = {}

    def serves(self, rows: int) -> bool:
        """Whether there is a kernel for so many sequences."""
        return rows <= max(self.kernels)

    def _room(self, rows: int, splits: int) -> dict[str, Tensor]:
        if (rows, splits) not in self._rooms:
            config, heads = self.config, self.config.heads

            def words(*shape: int) -> Tensor:
                """Tagged words, of no launch."""
                return torch.zeros(*shape, dtype=torch.int64, device=self.device)

            hidden, dim = config.hidden_size, heads.head_dim
            parts = min(hidden // ROW_TILE, self.blocks)
            copy = self.copy
            scales = copy.groups(dim)
            of_split = heads.num_attention_heads * splits
            self._rooms[rows, splits] = {
                "q_sent": words(rows, heads.q_features // 2),
                "codes_sent": words(rows, heads.num_key_value_heads, dim // 4 + 2 * scales),
                "partial_sent": words(rows, of_split, dim),
                "max_sum_sent": words(rows, of_split, 2),
                "attended_sent": words(rows, heads.q_features // 2),
                "x_middle_sent": words(rows, hidden // 2),
                "sumsq_middle_sent": words(rows, parts),
                "h_sent": words(rows, config.intermediate_size // 2),
                "x_end_sent": words(rows, hidden // 2),
                "sumsq_end_sent": words(rows, parts),
                "sumsq_out": torch.zeros(rows, parts, device=self.device),
            }
        return self._rooms[rows, splits]

    def __call__(self, stream: Stream, rows: DecodePass, rope_table: Tensor, num_layers: int | None = None, pages_per_split: int = 0) -> Stream:
        """x and residual are overwritten."""
        x, sumsq, residual = stream
        m = x.shape[0]
        kernel = next(kernel for batch, kernel in self.kernels.items() if batch >= m)
        pages = max(-(-rows.max_seqlen_k // PAGE_SIZE), 1)
        heads = self.config.heads
        if not pages_per_split:
            most = max(self.blocks // (m * heads.num_key_value_heads), 1)
            pages_per_split = -(-pages // most)
        splits = -(-pages // pages_per_split)
        room = self._room(m, splits)
        kernel.launch(
            (self.blocks, 1, 1),
            layers=self.layers,
            num_layers=len(self.layers) if num_layers is None else num_layers,
            m=m,
            x=x,
            residual=residual,
            sumsq=sumsq,
            sumsq_parts=sumsq.shape[1],
            rms_norm_eps=self.config.rms_norm_eps,
            rope_table=rope_table,
            positions=rows.positions,
            slots=rows.slots,
            block_table=rows.block_table,
            block_table_stride=rows.block_table.shape[1],
            seqlens_k=rows.seqlens_k,
            softmax_scale=heads.head_dim**-0.5,
            splits=splits,
            pages_per_split=pages_per_split,
            epoch=self.epoch,
            **room,
        )
        return Stream(x, room["sumsq_out"], residual)
