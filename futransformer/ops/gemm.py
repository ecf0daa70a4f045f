"""The prefill GEMM: launch geometry and tensor maps. Which epilogue runs is the spec's business."""

from __future__ import annotations

from torch import Tensor

from futransformer.arguments import Argument
from futransformer.driver import Kernel
from futransformer.generator.specs import GemmSpec
from futransformer.ops.validate import check_vector_arguments
from futransformer.tma import tensor_map_2d


class PrefillGemm:
    """One projection over any number of prompt tokens."""

    def __init__(self, kernel: Kernel) -> None:
        assert isinstance(kernel.spec, GemmSpec)
        self.spec = kernel.spec
        self.kernel = kernel

    def weight_shape(self) -> tuple[int, ...]:
        """Shape of the packed weight."""
        return (self.spec.n, self.spec.k)

    def sumsq_parts(self, rows: int) -> int:
        """Columns of sumsq_out for this many rows."""
        return self.spec.sumsq_parts

    def launch(self, x: Tensor, weight: Tensor, **epilogue: Argument) -> None:
        """Run on x [m, k] (m >= 1); one block (or cluster) a multiprocessor walks the tiles."""
        check_vector_arguments(self.spec.op, {"x": x, "weight": weight, **epilogue})
        tile, cluster_m = self.spec.tile, self.spec.cluster_m
        m = x.shape[0]
        tiles = -(-m // (tile.m * cluster_m)) * -(-self.spec.n // tile.n)
        clusters = min(tiles, self.kernel.sm_count // cluster_m)
        self.kernel.launch(
            (clusters * cluster_m, 1, 1),
            x=tensor_map_2d(x, tile.m, tile.k),
            weight=tensor_map_2d(weight, tile.n // cluster_m, tile.k),
            m=m,
            **epilogue,
        )
