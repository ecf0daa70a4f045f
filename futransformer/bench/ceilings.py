"""What the card can do at most, measured in the same run as the cases: about a second.

A read-only stream (the sum of 4 GiB of integers), and PyTorch's BF16 and FP8 matrix products of 8192 x 8192 x 8192, in
bursts (sustained, they run at the clock that the power cap allows), on random data (zeros run faster than any real).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from futransformer.bench.case import Ceilings, Contender
from futransformer.bench.harness import Harness, Timing

STREAM_BYTES = 4 << 30
SIZE = 8192


def measure_ceilings(harness: Harness, device: torch.device) -> Ceilings:
    """Measure all three."""
    stream = torch.randint(-1000, 1000, (STREAM_BYTES // 8,), dtype=torch.int64, device=device)
    read = _time(harness, stream.sum, 0.15)
    del stream
    a, b = (torch.randn(SIZE, SIZE, device=device).bfloat16() for _ in range(2))
    bf16 = _time(harness, lambda: torch.mm(a, b.t()), 0.3, burst=True)
    a8, b8 = (t.to(torch.float8_e4m3fn) for t in (a, b))
    one = torch.ones((), device=device)

    def fp8_product() -> torch.Tensor:
        return torch._scaled_mm(a8, b8.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)

    fp8 = _time(harness, fp8_product, 0.3, burst=True)
    flops = 2 * SIZE**3
    return Ceilings(
        read_tbps=STREAM_BYTES / read.median / 1e12,
        fp8_tflops=flops / fp8.median / 1e12,
        bf16_tflops=flops / bf16.median / 1e12,
    )


def _time(harness: Harness, run: Callable[[], object], seconds: float, *, burst: bool = False) -> Timing:
    contender = Contender(run=run, outputs=tuple)
    return harness.measure("burst" if burst else "steady", {"ceiling": contender}, seconds)["ceiling"]
