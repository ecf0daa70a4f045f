"""Stand-ins for the GPU: a clock that contenders advance, kernels that the reference plays, graphs that are loops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from futransformer.bench import graphs, llama
from futransformer.bench.case import Ceilings, Contender
from futransformer.bench.harness import Harness
from futransformer.bench.rivals import attention, torch_bf16, torch_int4
from futransformer.bench.runner import Bench
from futransformer.bench.shapes import shape_config
from futransformer.bench.subjects import prefill_model
from futransformer.generator.config import LlamaConfig
from futransformer.generator.precision import get_precision
from futransformer.reference import ReferenceOps

CEILINGS = Ceilings(read_tbps=4.0, fp8_tflops=1600.0, bf16_tflops=800.0)


class FakeClock:
    """Device time passes when a contender says so; the host's own time does not."""

    def __init__(self) -> None:
        self.time = 0.0
        self.idled: list[float] = []
        self.log: list[str] = []

    def work(self, name: str, seconds: float) -> None:
        """Let a contender take its time."""
        self.time += seconds
        self.log.append(name)

    def mark(self) -> float:
        """See Clock.mark."""
        self.log.append("|")
        return self.time

    def seconds(self, first: float, second: float) -> float:
        """See Clock.seconds."""
        return second - first

    def idle(self, seconds: float) -> None:
        """See Clock.idle."""
        self.log.append("idle")
        self.idled.append(seconds)
        self.time += seconds


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def harness(clock: FakeClock) -> Harness:
    return Harness(clock)


@pytest.fixture
def timed(clock: FakeClock) -> Callable[..., Contender]:
    """Return a function that makes a contender of given seconds a call."""

    def make(name: str, *seconds: float, calls: int = 1, outputs: Sequence[Tensor] = ()) -> Contender:
        turn = 0

        def run() -> None:
            nonlocal turn
            clock.work(name, seconds[turn % len(seconds)] * calls)
            turn += 1

        return Contender(run=run, outputs=lambda: outputs, calls=calls)

    return make


class ReferenceKernels(ReferenceOps):
    """The reference in the place of a kernel library."""

    def __init__(self, config: LlamaConfig, precision: str = "bf16") -> None:
        self.config, self.precision = config, get_precision(precision)
        super().__init__(config, copy=self.precision.copy)


class CpuBench(Bench):
    """A run on the CPU, where the reference plays ours."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), CEILINGS)

    def library(  # type: ignore[override]
        self, shape: str, precision: str = "bf16", *, batch_invariant: bool = False
    ) -> ReferenceKernels:
        """The reference of a shape; a row of it depends on no other anyway."""
        return ReferenceKernels(shape_config(shape), precision)


@pytest.fixture
def cpu_bench(monkeypatch: pytest.MonkeyPatch) -> CpuBench:
    """A bench without GPU, CUDA graphs or compiler."""

    def looped(
        calls: Sequence[Callable[[], object]], floor_seconds: float, context: AbstractContextManager[object]
    ) -> tuple[Callable[[], None], int]:
        assert floor_seconds > 0

        def run() -> None:
            with context:
                for call in calls:
                    call()

        return run, len(calls)

    monkeypatch.setattr(graphs, "captured", looped)
    monkeypatch.setattr(llama, "ROTATION_BYTES", 1)
    monkeypatch.setattr(torch_bf16, "compiled", lambda function: function)
    monkeypatch.setattr(torch_bf16, "fastest_backend", lambda *_: "flash")

    def product(x: Tensor, weight: torch_int4.Weight) -> Tensor:
        """PyTorch's INT4 product on the CPU, which packs otherwise and has the same scales and zeros."""
        state = weight.packed, weight.group_size, weight.scales_and_zeros
        result: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, *state)
        return result

    def packed(codes: Tensor) -> Tensor:
        result: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), torch_int4.INNER_K_TILES)
        return result

    monkeypatch.setattr(torch_int4, "product", product)
    monkeypatch.setattr(torch_int4, "pack", packed)

    def varlen(cu_seqlens: Tensor, longest: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """FlashAttention-4's place, taken by PyTorch prompt by prompt."""
        lengths = tuple(cu_seqlens.diff().tolist())
        assert longest == max(lengths)
        return lambda q, k, v: torch_bf16.attend_prompts(q, k, v, lengths)

    monkeypatch.setattr(attention, "flash_attention_varlen", varlen)
    monkeypatch.setattr(prefill_model, "shape_config", lambda shape: replace(shape_config(shape), num_hidden_layers=3))
    torch.manual_seed(0)
    return CpuBench()
