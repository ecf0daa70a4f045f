"""QuACK: gated GEMMs in CuTe DSL, the best public SwiGLU projection in BF16; post-activation only, or both.

It wants gate and up rows alternating, and its weight as [K, N] with K contiguous. ``tuned`` runs its own autotuner,
which compiles some dozens of kernels; without it the library's default configuration serves.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from futransformer.bench.rivals import require


def interleaved(gate_up: Tensor) -> Tensor:
    """Return [2 I, K] with rows gate, up, gate, up, ... as a transposed view [K, 2 I]."""
    return gate_up.view(2, -1, gate_up.shape[1]).transpose(0, 1).reshape(gate_up.shape).t()


def gated_product(x: Tensor, weight: Tensor, *, store_preact: bool, tuned: bool) -> Callable[[], Tensor]:
    """Return the call; ``weight`` is interleaved."""
    interface = require("quack.gemm_interface", "quack-kernels")

    def run() -> Tensor:
        _, post = interface.gemm_gated(x, weight, activation="swiglu", store_preact=store_preact, tuned=tuned)
        result: Tensor = post
        return result

    return run
