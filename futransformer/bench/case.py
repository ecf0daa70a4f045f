"""What a case is: the least work it asks for, who competes, and what all of them must compute."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from futransformer.bench.runner import Bench

Regime = Literal["burst", "sustained", "steady"]
Unit = Literal["TFLOP/s", "ms", "us", "s"]
Row = dict[str, Any]  # one row of a results file

COMPUTE_BOUND: tuple[Regime, ...] = ("burst", "sustained")
MEMORY_BOUND: tuple[Regime, ...] = ("steady",)
SECONDS_PER_UNIT = {"ms": 1e-3, "us": 1e-6, "s": 1.0}


class RivalMissingError(Exception):
    """A rival cannot compete here; the message says why. It is left out with a note, never replaced."""


@dataclass(frozen=True)
class Ceilings:
    """What the card reached in this run: a read-only stream, and large matrix products."""

    read_tbps: float
    fp8_tflops: float
    bf16_tflops: float


@dataclass(frozen=True)
class Work:
    """The least that one call must do: matrix operations in BF16, and bytes through memory, each once."""

    flops: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.bytes + other.bytes)

    def times(self, count: float) -> Work:
        """Return the work of ``count`` such calls."""
        return Work(self.flops * count, self.bytes * count)

    def floor_seconds(self, ceilings: Ceilings) -> float:
        """Time at the measured ceilings: matrix units and memory overlap, so the slower of the two decides."""
        return max(self.flops / (ceilings.bf16_tflops * 1e12), self.bytes / (ceilings.read_tbps * 1e12))


@dataclass(frozen=True)
class Contender:
    """One implementation, ready to be timed: ``run`` enqueues ``calls`` calls and waits for nothing.

    ``outputs`` makes one call on the inputs that the check knows, and returns what that wrote.
    """

    run: Callable[[], object]
    outputs: Callable[[], Sequence[Tensor]]
    calls: int = 1


@dataclass(frozen=True)
class Expected:
    """One output as the float32 reference has it, and as PyTorch has it in the storage type."""

    exact: Tensor
    same_dtype: Tensor


@dataclass(frozen=True)
class Problem:
    """A case with its tensors in memory; ``rivals`` are made one by one, so that one that fails hurts nobody."""

    work: Work
    ours: Contender
    rivals: Mapping[str, Callable[[], Contender]]
    expected: Callable[[], Sequence[Expected]]


@dataclass(frozen=True)
class Case:
    """A named case. ``default`` cases run unless --only asks for others; ``open`` allocates."""

    name: str
    unit: Unit
    regimes: tuple[Regime, ...]
    open: Callable[[Bench], Problem] = field(repr=False)
    default: bool = True

    @property
    def subject(self) -> str:
        """The first part of the name."""
        return self.name.split("/", 1)[0]

    def value(self, seconds: float, work: Work) -> float:
        """Convert the time of one call into the case's unit."""
        return work.flops / seconds / 1e12 if self.unit == "TFLOP/s" else seconds / SECONDS_PER_UNIT[self.unit]


@dataclass(frozen=True)
class HostCase:
    """A named case that a host's clock times, and that makes its rows itself."""

    name: str
    measure: Callable[[Bench], Sequence[Row]] = field(repr=False)
    default: bool = True
