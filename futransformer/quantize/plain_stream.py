"""The unquantised model beside a pass of the quantised one, operation by operation: what each projection should read.

In float32, whatever the other computes with, on one layer's pages at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from futransformer.checkpoint import LogicalLayer
from futransformer.generator.config import LlamaConfig
from futransformer.ops.interface import Stream
from futransformer.reference import ReferenceOps


class PlainStream:
    """One pass, advanced by the arguments of the other's operations."""

    def __init__(self, config: LlamaConfig, device: torch.device) -> None:
        """Begin before the embedding."""
        self._ops = ReferenceOps(config, device=device, dtype=torch.float32)
        self._stream: Stream | None = None
        self._pages: tuple[Tensor, Tensor] | None = None
        self._q = self._attended = self._h = torch.empty(0)

    @property
    def stream(self) -> Stream:
        """x before the projection that is next: of qkv and of gate_up, and sumsq with it."""
        assert self._stream is not None
        return self._stream

    @property
    def attended(self) -> Tensor:
        """What o reads."""
        return self._attended

    @property
    def h(self) -> Tensor:
        """What down reads."""
        return self._h

    def begin(self, table: Tensor, indices: Tensor) -> None:
        """Gather the embedding, unless that was done before."""
        if self._stream is None:
            self._stream = self._ops.gather_rows("prefill", table, indices)

    def qkv(
        self,
        layer: LogicalLayer,
        rope_table: Tensor,
        positions: Tensor,
        slots: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
    ) -> None:
        """Project, and write K and V to pages of its own."""
        if self._pages is None:
            self._pages = torch.zeros_like(k_pages, dtype=torch.float32), torch.zeros_like(v_pages, dtype=torch.float32)
        x, sumsq, _ = self.stream
        weight = self._weight(layer.qkv)
        self._q = self._ops.qkv("prefill", x, sumsq, weight, rope_table, positions, slots, *self._pages)

    def attention_prefill(self, *lengths: Tensor, **options: Any) -> None:
        """Attend, by the block table and lengths of the other."""
        assert self._pages is not None
        self._attended = self._ops.attention_prefill(self._q, *self._pages, *lengths, **options)

    def o(self, layer: LogicalLayer) -> None:
        """Add what attention gives."""
        self._stream = self._ops.o("prefill", self._attended, self._weight(layer.o), self.stream.residual)

    def gate_up(self, layer: LogicalLayer) -> None:
        """Compute h."""
        self._h = self._ops.gate_up("prefill", self.stream.x, self.stream.sumsq, self._weight(layer.gate_up))

    def down(self, layer: LogicalLayer) -> None:
        """Add what the MLP gives."""
        self._stream = self._ops.down("prefill", self._h, self._weight(layer.down), self.stream.residual)

    def _weight(self, logical: Tensor) -> Tensor:
        return logical.to(self._ops.device, torch.float32)
