"""CODA: GEMM-plus-epilogue programs in CuTe DSL. Its SwiGLU writes both the pre-activation and the result.

It tunes itself at the first call of a shape, and takes the same weight as QuACK, which it is built on.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from futransformer.bench.rivals import require


def gated_product(x: Tensor, weight: Tensor) -> Callable[[], Tensor]:
    """Return the call; ``weight`` is interleaved (futransformer.bench.rivals.quack)."""
    functional = require("coda.core.gemm.functional", "coda-kernels")

    def run() -> Tensor:
        _, post = functional.gemm_swiglu(x, weight)
        result: Tensor = post
        return result

    return run
