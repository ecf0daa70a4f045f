"""What quantised checkpoints consist of: codes with scales, and the tensors that hold them.

A projection W [N, K] is INT4 codes with a scale for each group of a row,

    W[n, k] = scales[n, group_of[k]] * (codes[n, k] - zeros[n, group_of[k]])

or E4M3 codes with a scale for the tensor, a row or a block. Codes and scales stay as they are stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from futransformer.generator.errors import CheckpointError, UnsupportedError
from futransformer.generator.precision import CHANNEL, GROUP_SIZES, get_precision
from futransformer.quantize.int4 import Int4Weight
from futransformer.quantize.int4_scales import MIDDLE

FLOATS = ("BF16", "F16", "F32")
WORD = 8  # codes in 32 bits


class Stored(NamedTuple):
    """A tensor that a format asks for: any of these shapes, any of these types (safetensors' names)."""

    shapes: tuple[tuple[int, ...], ...]
    types: tuple[str, ...]


class Tensors(Protocol):
    """A checkpoint's tensors by name."""

    def __contains__(self, name: str) -> bool: ...

    def type_of(self, name: str) -> str:
        """Safetensors' name of its type."""
        ...

    def read(self, name: str) -> Tensor:
        """The tensor."""
        ...


class Codes(Protocol):
    """A projection as it is stored."""

    def dequantise(self) -> Tensor:
        """W [N, K] in float32."""
        ...


class Groups(NamedTuple):
    """How INT4 codes of a checkpoint share scales: ``group_size`` of a row or CHANNEL; with zero points or without."""

    group_size: int
    zero_points: bool

    def count(self, k: int) -> int:
        """Groups in a row of ``k``; the last may be shorter."""
        return 1 if self.group_size == CHANNEL else -(-k // self.group_size)

    def __str__(self) -> str:
        size = "a scale a row" if self.group_size == CHANNEL else f"groups of {self.group_size}"
        return size + " with zero points" * self.zero_points

    @property
    def suffix(self) -> str | None:
        """What the names of INT4 precisions end in for these groups; None where no kernel reads them."""
        if self.group_size not in (*GROUP_SIZES, CHANNEL):
            return None
        default = get_precision("int4").group_size
        size = "-channel" if self.group_size == CHANNEL else f"-g{self.group_size}"
        return ("" if self.group_size == default else size) + "-asym" * self.zero_points


class Format(Protocol):
    """One checkpoint's format, as its config.json describes it."""

    @property
    def title(self) -> str:
        """What a person reads of it."""
        ...

    @property
    def groups(self) -> Groups | None:
        """Of its INT4 codes; None where it has others."""
        ...

    @property
    def mixed(self) -> bool:
        """Whether it may have INT4 codes of several groups, or beside FP8."""
        ...

    @property
    def act_order(self) -> bool:
        """Whether groups are said to be no runs of columns."""
        ...

    def tensors(self, module: str, shape: tuple[int, int], stored: Tensors) -> Mapping[str, Stored] | None:
        """The tensors of a projection; None where it is not quantised."""
        ...

    def read(self, module: str, shape: tuple[int, int], stored: Tensors) -> Codes:
        """The codes of a projection whose tensors are as ``tensors`` says."""
        ...

    def spare(self, name: str) -> bool:
        """Whether this tensor, which no projection has, may be left out: it says nothing about weights."""
        ...


@dataclass(frozen=True)
class GroupedCodes:
    """INT4 codes; G groups a row."""

    module: str
    codes: Tensor  # uint8 [N, K], 0 .. 15
    scales: Tensor  # [N, G], of the type that they are stored in
    zeros: Tensor | None  # uint8 [N, G], 0 .. 15; None: 8
    group_size: int  # of a row, or CHANNEL
    group_of: Tensor | None = None  # int64 [K], the group of each column of act-order; None: k // group_size

    def dequantise(self) -> Tensor:
        """W in float32: exactly, unless scales are float32 of more than 19 bits."""
        k = self.codes.shape[1]
        row_group = k if self.group_size == CHANNEL else min(self.group_size, k)
        group_of = torch.arange(k) // row_group if self.group_of is None else self.group_of
        zeros = MIDDLE if self.zeros is None else self.zeros.float()[:, group_of]
        return (self.codes.float() - zeros).mul_(self.scales.float()[:, group_of])

    def int4(self) -> Int4Weight:
        """The same codes and scales as INT4 kernels take them; refused where float16 does not hold a scale."""
        if self.group_of is not None:
            raise UnsupportedError(
                f"{self.module} has act-order, whose groups are no runs of columns: {DEQUANTISED_INSTEAD}"
            )
        if not self.scales.isfinite().all():
            raise CheckpointError(f"{self.module} has scales that are not finite; fetch the checkpoint again")
        scales = self.scales.half()
        lost = int((scales.float() != self.scales.float()).sum())
        if lost:
            raise UnsupportedError(f"{self.module} has {lost} scales that float16 does not hold: {DEQUANTISED_INSTEAD}")
        return Int4Weight(self.codes, scales, self.zeros, self.group_size)


DEQUANTISED_INSTEAD = 'INT4 kernels cannot keep its codes; precision "bf16" decodes through its dequantised weights'


@dataclass(frozen=True)
class ScaledCodes:
    """E4M3 codes; W = codes * scales, block by block."""

    codes: Tensor  # float8_e4m3fn [N, K]
    scales: Tensor  # [1], [N] or [N, 1]; with ``block`` [ceil(N / rows), ceil(K / columns)]
    block: tuple[int, int] | None = None  # rows, columns

    def dequantise(self) -> Tensor:
        """W in float32; a product is rounded where a scale has more than 20 bits."""
        n, k = self.codes.shape
        scales = self.scales.float()
        if self.block is None:
            return self.codes.float() * scales.view(-1, 1)
        rows, columns = min(self.block[0], n), min(self.block[1], k)
        return self.codes.float() * scales.repeat_interleave(rows, 0)[:n].repeat_interleave(columns, 1)[:, :k]


def nibbles(words: Tensor) -> Tensor:
    """int32 [..., M] -> uint8 [..., 8 M]; the lowest nibble of a word comes first."""
    halves = words.flatten().view(torch.uint8)  # flat, for rows of one word have strides that no view divides
    return torch.stack((halves & 15, halves >> 4), -1).view(*words.shape[:-1], -1)


def words(codes: Tensor) -> Tensor:
    """The inverse of ``nibbles``: uint8 [..., 8 M] -> int32 [..., M]."""
    halves: Tensor = codes[..., 0::2] | codes[..., 1::2] << 4
    return halves.flatten().view(torch.int32).view(*codes.shape[:-1], -1)


def check_rows(module: str, n: int) -> None:
    """Refuse rows whose zero points fill no whole words along N, as GPTQ and AWQ store them."""
    if n % WORD:
        raise UnsupportedError(
            f"{module} has {n} rows, and its zero points stand {WORD} in a word: multiples of {WORD} are supported; "
            "quantise the model again and leave this layer as it is"
        )


def groups_of_columns(name: str, g_idx: Tensor, groups: Groups) -> Tensor | None:
    """The group of each column, int64 [K]; None where they are runs of the group's size, as without act-order."""
    k = len(g_idx)
    group_of = g_idx.long()
    if (group_of < 0).any() or (group_of >= groups.count(k)).any():
        raise CheckpointError(
            f"{name} names groups {int(group_of.min())} to {int(group_of.max())}, and there are {groups.count(k)}; "
            "fetch the checkpoint again"
        )
    row_group = k if groups.group_size == CHANNEL else min(groups.group_size, k)
    return None if torch.equal(group_of, torch.arange(k) // row_group) else group_of


def fp8_tensors(
    module: str, shape: tuple[int, int], stored: Tensors, block: tuple[int, int] | None
) -> Mapping[str, Stored] | None:
    """The tensors of a projection in E4M3; None where its weight is of another type."""
    weight = f"{module}.weight"
    if weight not in stored or stored.type_of(weight) != "F8_E4M3":
        return None
    n, k = shape
    scales = ((-(-n // block[0]), -(-k // block[1])),) if block else ((), (1,), (n,), (n, 1), (1, 1))
    return {weight: Stored((shape,), ("F8_E4M3",)), fp8_scale(module, stored): Stored(scales, FLOATS)}


def fp8_scale(module: str, stored: Tensors) -> str:
    """The name of its scales: both multiply."""
    inverse = f"{module}.weight_scale_inv"
    return inverse if inverse in stored else f"{module}.weight_scale"
