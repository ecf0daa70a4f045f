"""The prefill GEMMs: which kernel, launch geometry and tensor maps. The epilogue is the spec's business."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from futransformer.arguments import Argument
from futransformer.driver import Kernel
from futransformer.generator.precision import BF16
from futransformer.generator.specs import GemmSpec
from futransformer.ops.validate import DTYPES, check_vector_arguments
from futransformer.tma import tensor_map_2d


class PrefillGemm:
    """One projection over any number of prompt tokens; ``kernels`` by the largest number of rows that each serves.

    A row's bits depend on the kernel, so on the bucket that the number of rows falls into, and on nothing else.
    """

    def __init__(self, kernels: Mapping[int, Kernel]) -> None:
        self.kernels = dict(sorted(kernels.items()))
        _, spec = self._choose(1)
        self._weight_shape = spec.n, spec.k
        self.element = spec.element
        self.operand = self.weight_type = DTYPES[spec.element]
        self.gain_in_x = False
        self.kv, self.copy = spec.kv, spec.copy
        self.scales = 0 if spec.element == BF16 else 1 if spec.weight_scales == "tensor" else spec.n

    def _choose(self, rows: int) -> tuple[Kernel, GemmSpec]:
        kernel = next(kernel for most, kernel in self.kernels.items() if rows <= most)
        assert isinstance(kernel.spec, GemmSpec)
        return kernel, kernel.spec

    def weight_shape(self) -> tuple[int, ...]:
        """Shape of the packed weight."""
        return self._weight_shape

    def sumsq_parts(self, rows: int) -> int:
        """Columns of sumsq_out for this many rows."""
        return self._choose(rows)[1].sumsq_parts

    def launch(self, x: Tensor, weight: Tensor, **epilogue: Argument) -> None:
        """Run on x [m, k] (m >= 1): as many clusters as the card holds at a time walk the tiles."""
        m = x.shape[0]
        kernel, spec = self._choose(m)
        check_vector_arguments(spec.op, {"x": x, "weight": weight, **epilogue})
        tile, blocks = spec.tile, spec.cluster_m * spec.cluster_n * spec.splits
        tiles = -(-m // (tile.m * spec.cluster_m)) * -(-spec.n // (tile.n * spec.cluster_n))
        clusters = min(tiles, kernel.sm_count * spec.blocks_per_sm // blocks)
        kernel.launch(
            (clusters * spec.cluster_m, spec.cluster_n, spec.splits),
            x=tensor_map_2d(x, spec.box_rows(m), tile.k),
            weight=tensor_map_2d(weight, tile.n // spec.cluster_m, tile.k),
            m=m,
            **epilogue,
        )
