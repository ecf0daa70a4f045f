"""What a case is: the least work it asks for, who competes, and what all of them must compute."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from futransformer.bench.runner import Bench

Regime = Literal["burst", "sustained", "steady"]
Unit = Literal["TFLOP/s", "ms", "us", "s", "GB"]
RATES = ("TFLOP/s", "tokens/s")  # of which more is better; of the other units less is
Row = dict[str, Any]  # one row of a results file

COMPUTE_BOUND: tuple[Regime, ...] = ("burst", "sustained")
MEMORY_BOUND: tuple[Regime, ...] = ("steady",)
SECONDS_PER_UNIT = {"ms": 1e-3, "us": 1e-6, "s": 1.0}


def told_beside(row: Row) -> list[tuple[str, float]]:
    """What was timed beside the rivals of a row, if anything was: names and figures."""
    return list(row.get("beside", {}).items())


def ratio_to(other: float, row: Row) -> float:
    """How many times as fast as a figure of the row's unit ours is."""
    ours: float = row["ours"]
    return ours / other if row["unit"] in RATES else other / ours


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
    """The least that one call must do: matrix operations in BF16 and in FP8, and bytes through memory, each once."""

    flops: float = 0.0
    bytes: float = 0.0
    fp8_flops: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.bytes + other.bytes, self.fp8_flops + other.fp8_flops)

    def times(self, count: float) -> Work:
        """Return the work of ``count`` such calls."""
        return Work(self.flops * count, self.bytes * count, self.fp8_flops * count)

    def floor_seconds(self, ceilings: Ceilings) -> float:
        """Time at the measured ceilings: matrix units and memory overlap, so the slower of the two decides."""
        matrix = self.flops / (ceilings.bf16_tflops * 1e12) + self.fp8_flops / (ceilings.fp8_tflops * 1e12)
        return max(matrix, self.bytes / (ceilings.read_tbps * 1e12))


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
    """One output as the float32 reference has it, and as PyTorch has it in the storage type.

    Of an FP8 output both are in codes; the exact ones are not rounded.
    """

    exact: Tensor
    same_dtype: Tensor


@dataclass(frozen=True)
class Problem:
    """A case with its tensors in memory; ``rivals`` are made one by one, so that one that fails hurts nobody.

    What runs ``beside`` them is timed and told as they are, but has no part in the ratio: it does less, or reads
    another type.
    """

    work: Work
    ours: Contender
    rivals: Mapping[str, Callable[[], Contender]]
    expected: Callable[[], Sequence[Expected]]
    beside: Mapping[str, Callable[[], Contender]] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """A named case. ``default`` cases run unless --only asks for others; ``open`` allocates.

    ``precision`` names the row that its kernels are of, whose tolerance it obeys and in whose file its rows stand.
    """

    name: str
    unit: Unit
    regimes: tuple[Regime, ...]
    open: Callable[[Bench], Problem] = field(repr=False)
    default: bool = True
    precision: str = "bf16"

    @property
    def subject(self) -> str:
        """The first part of the name."""
        return self.name.split("/", 1)[0]

    def value(self, seconds: float, work: Work) -> float:
        """Convert the time of one call into the case's unit."""
        if self.unit == "TFLOP/s":
            return (work.flops + work.fp8_flops) / seconds / 1e12
        return seconds / SECONDS_PER_UNIT[self.unit]


@dataclass(frozen=True)
class HostCase:
    """A named case that a host's clock times, and that makes its rows itself.

    What was left out of a row it says in the row's ``notes``.
    """

    name: str
    measure: Callable[[Bench], Sequence[Row]] = field(repr=False)
    default: bool = True
    precision: str = "bf16"
