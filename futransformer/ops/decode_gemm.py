"""The decode GEMM: which of the batch tiles runs, and its launch. Which epilogue runs is the spec's business."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from futransformer.arguments import Argument
from futransformer.driver import Kernel
from futransformer.generator.kv_format import KvFormat
from futransformer.generator.precision import BF16, Element
from futransformer.generator.specs import DecodeGemmSpec
from futransformer.ops.validate import check_vector_arguments
from futransformer.tma import tensor_map_column_groups

# Arguments with one row a sequence; any other tensor belongs to all sequences together.
ROW_ARGUMENTS = frozenset({"x", "sumsq", "positions", "q", "slots", "residual", "out", "sumsq_out", "best"})


class DecodeGemm:
    """One projection over a batch of sequences; ``kernels`` is keyed by batch tile.

    The smallest tile that holds the batch runs. A batch beyond the largest tile runs as several launches of that tile,
    each of which reads the weights again.
    """

    def __init__(self, kernels: Mapping[int, Kernel]) -> None:
        self.kernels = {batch: kernels[batch] for batch in sorted(kernels)}
        self._largest = max(kernels)

    def _choose(self, rows: int) -> tuple[Kernel, DecodeGemmSpec]:
        batch = next((batch for batch in self.kernels if batch >= rows), self._largest)
        kernel = self.kernels[batch]
        assert isinstance(kernel.spec, DecodeGemmSpec)
        return kernel, kernel.spec

    def weight_shape(self) -> tuple[int, ...]:
        """Shape of the packed weight: the same for every batch tile."""
        return self._choose(1)[1].weight_shape

    def sumsq_parts(self, rows: int) -> int:
        """Columns of sumsq_out for this many rows."""
        return self._choose(rows)[1].sumsq_parts

    @property
    def operand(self) -> torch.dtype:
        """Type of x, whatever the weight's."""
        return torch.bfloat16

    @property
    def weight_type(self) -> torch.dtype:
        """See ProjectionGemm.weight_type."""
        return torch.bfloat16 if self.element == BF16 else torch.uint8

    @property
    def element(self) -> Element:
        """See ProjectionGemm.element."""
        return self._choose(1)[1].element

    @property
    def kv(self) -> Element:
        """See ProjectionGemm.kv."""
        return self._choose(1)[1].kv

    @property
    def copy(self) -> KvFormat | None:
        """See ProjectionGemm.copy."""
        return self._choose(1)[1].copy

    @property
    def scales(self) -> int:
        """See ProjectionGemm.scales."""
        return 0

    @property
    def gain_in_x(self) -> bool:
        """See ProjectionGemm.gain_in_x."""
        return self._choose(1)[1].gain_in_x

    def launch(self, x: Tensor, weight: Tensor, **epilogue: Argument) -> None:
        """Run on x [m, k] with m >= 1."""
        kernel, spec = self._choose(x.shape[0])
        arguments: dict[str, Argument] = {"x": x, "weight": weight, **epilogue}
        check_vector_arguments(spec.op, arguments)
        for first in range(0, x.shape[0], self._largest):
            rows = slice(first, min(first + self._largest, x.shape[0]))
            part = {
                name: value[rows] if isinstance(value, Tensor) and name in ROW_ARGUMENTS else value
                for name, value in arguments.items()
            }
            if spec.x_in_ring:
                part["x"] = tensor_map_column_groups(x[rows], spec.x_box)
            kernel.launch((spec.blocks, 1, 1), m=rows.stop - rows.start, **part)
