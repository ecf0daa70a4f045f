"""Inputs whose answers float32 holds exactly, whatever the order of the sums, and the comparison that follows.

Operands are small integers times powers of two, so that a product that is lost, doubled or taken from a neighbour moves
a result by far more than any rounding does, and so does one stale or misplaced value: no tolerance has to be wide
enough for 14,000 roundings.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from futransformer.generator.precision import E4M3_MAX
from futransformer.reference import as_bytes

# What an approximate instruction (rsqrt, reciprocal, 2^x) and the roundings beside it may be off by, relative; each is
# good to two units of 2^-23, and at most eight follow each other.
APPROXIMATE = 2.0**-18


class WrongResultError(AssertionError):
    """A kernel's result is not what it must be."""


class Draw:
    """All that is random of one case, from its seed and index: choices on the host, tensors on the device."""

    def __init__(self, seed: int, index: int, device: torch.device) -> None:
        self.random = random.Random(f"{seed}/{index}")
        self.device = device
        self.generator = torch.Generator(device).manual_seed(self.random.getrandbits(62))
        self.chosen: dict[str, object] = {}

    def choose(self, name: str, values: Sequence[int]) -> int:
        """One of these, noted under this name for whoever reads of a failure."""
        return self.note(name, self.random.choice(values))

    def note(self, name: str, value: int) -> int:
        """Note what was chosen."""
        self.chosen[name] = value
        return value

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """From low to high, both of them among what may come: int64."""
        return torch.randint(low, high + 1, shape, generator=self.generator, device=self.device)

    def signs(self, *shape: int) -> Tensor:
        """-1 or 1, float32."""
        return self.integers(0, 1, *shape).float() * 2 - 1

    def powers(self, low: int, high: int, *shape: int) -> Tensor:
        """2^low to 2^high, float32."""
        return (self.integers(low, high, *shape) + 127 << 23).int().view(torch.float32)

    def order(self, count: int) -> Tensor:
        """0 to count - 1 in some order, int64."""
        return torch.randperm(count, generator=self.generator, device=self.device)


def hold(name: str, actual: Tensor, want: Tensor, relative: float = 0.0, absolute: float | Tensor = 0.0) -> None:
    """Every value lies between what ``want`` (float32) less and plus its slack are rounded to; NaN is where NaN is.

    So with no slack it is ``want``, rounded once to the type of ``actual``; and a tie may fall either way with some.
    """
    if actual.shape != want.shape:
        raise WrongResultError(f"{name}: {list(actual.shape)} values, not {list(want.shape)}")
    slack = want.abs() * relative + absolute
    least, most = (_rounded(end, actual.dtype) for end in (want - slack, want + slack))
    values = actual.float()
    _refuse(name, ((values >= least) & (values <= most)) | (values.isnan() & want.isnan()), values, want)


def same(name: str, actual: Tensor, want: Tensor) -> None:
    """The same bits."""
    if actual.shape != want.shape or actual.dtype != want.dtype:
        raise WrongResultError(f"{name}: {actual.dtype} {list(actual.shape)}, not {want.dtype} {list(want.shape)}")
    bits = {2: torch.int16, 4: torch.int32}
    one, other = (as_bytes(t.contiguous()) for t in (actual, want))
    if one.is_floating_point():
        one, other = (t.view(bits[t.element_size()]) for t in (one, other))
    _refuse(name, one == other, actual, want)


def _rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype == torch.float8_e4m3fn:
        values = values.clamp(-E4M3_MAX, E4M3_MAX)
    return values.to(dtype).float()


def _refuse(name: str, right: Tensor, actual: Tensor, want: Tensor) -> None:
    wrong = (~right).nonzero()
    if len(wrong):
        first = tuple(wrong[0].tolist())
        raise WrongResultError(
            f"{name}: {len(wrong)} of {right.numel()} values are wrong, first {list(first)}: "
            f"{actual[first].item()} instead of {want[first].item()}"
        )


class Rooms:
    """Outputs that begin as NaN and have rows behind them, which nothing may write.

    ``empty`` stands in for the library's own allocation, which projections make of what they return.
    """

    BEHIND = 130  # rows: more than a tile

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._rooms: list[tuple[Tensor, int]] = []

    def empty(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """[rows, columns] of NaN; of no rows, without an address."""
        if rows == 0:
            return torch.empty(0, columns, dtype=dtype, device=self.device)
        room = torch.full((rows + self.BEHIND, columns), torch.nan, dtype=dtype, device=self.device)
        self._rooms.append((room, rows))
        return room[:rows]

    def holding(self, values: Tensor) -> Tensor:
        """These values, to be written over."""
        return self.empty(values.shape[0], values.shape[1], values.dtype).copy_(values)

    def begin(self) -> None:
        """Forget what a case before has left unchecked."""
        self._rooms = []

    def check(self) -> None:
        """Whether what lies behind is NaN still; begins anew."""
        rooms, self._rooms = self._rooms, []
        for room, rows in rooms:
            if not bool(room[rows:].float().isnan().all()):
                raise WrongResultError(f"rows behind an output of {rows} were written")
