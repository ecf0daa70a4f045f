"""AWQ checkpoints of version gemm, 4 bits.

| tensor | type | shape | content |
| --- | --- | --- | --- |
| qweight | int32 | [K, N / 8] | codes; nibble i of a word is column 8 c + ORDER[i] |
| qzeros | int32 | [G, N / 8] | zero points as they are, in the same order |
| scales | float | [G, N] | |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from futransformer.formats.codes import FLOATS, WORD, GroupedCodes, Groups, Stored, Tensors, check_rows, nibbles
from futransformer.formats.gptq import group_size
from futransformer.generator.json_reader import JsonReader

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Awq:
    """An AWQ checkpoint's format."""

    groups: Groups

    @property
    def title(self) -> str:
        """See Format.title."""
        return f"AWQ, {self.groups}"

    @property
    def mixed(self) -> bool:
        """See Format.mixed."""
        return False

    @property
    def act_order(self) -> bool:
        """See Format.act_order."""
        return False

    def tensors(self, module: str, shape: tuple[int, int], stored: Tensors) -> Mapping[str, Stored] | None:
        """See Format.tensors."""
        if f"{module}.weight" in stored:
            return None
        n, k = shape
        check_rows(module, n)
        count = self.groups.count(k)
        return {
            f"{module}.qweight": Stored(((k, n // WORD),), ("I32",)),
            f"{module}.qzeros": Stored(((count, n // WORD),), ("I32",)),
            f"{module}.scales": Stored(((count, n),), FLOATS),
        }

    def read(self, module: str, shape: tuple[int, int], stored: Tensors) -> GroupedCodes:
        """See Format.read."""
        return GroupedCodes(
            module,
            codes=_natural(nibbles(stored.read(f"{module}.qweight"))).T.contiguous(),
            scales=stored.read(f"{module}.scales").T.contiguous(),
            zeros=_natural(nibbles(stored.read(f"{module}.qzeros"))).T.contiguous(),
            group_size=self.groups.group_size,
        )

    def spare(self, name: str) -> bool:
        """See Format.spare."""
        return False


def _natural(stored: Tensor) -> Tensor:
    """Columns [..., N] in their own order."""
    place = torch.tensor(ORDER).argsort()
    return stored.view(len(stored), -1, WORD)[..., place].flatten(1)


def parse(section: JsonReader) -> Awq:
    """Read quantization_config."""
    bits = section.integer("bits")
    if bits != 4:
        raise section.error("bits", f"is {bits}; of AWQ checkpoints those of 4 bits are supported")
    version = section.text("version")
    if version.lower() != "gemm":
        raise section.error("version", f"is {version!r}; supported: gemm")
    if not section.boolean("zero_point"):
        raise section.error("zero_point", "must be true: without it AWQ has no layout of version gemm")
    return Awq(Groups(group_size(section), zero_points=True))
