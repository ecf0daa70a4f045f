"""GPTQ checkpoints, 4 bits: versions 1 and 2, with act-order and without.

| tensor | type | shape | content |
| --- | --- | --- | --- |
| qweight | int32 | [K / 8, N] | codes, nibble k % 8 |
| qzeros | int32 | [G, N / 8] | zero points, nibble n % 8: v1 stores them less 1, v2 as they are |
| scales | float | [G, N] | |
| g_idx | int32 | [K] | the group of each k; without act-order k // group_size, and may be absent |

The version (checkpoint_format) is often absent and sometimes wrong. Symmetric zero points are all 8, so there the words
themselves say it; elsewhere an absent version means 1. In v1 a stored 15 is 16 to some engines and 0 to others, and is
refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from futransformer.formats.codes import (
    FLOATS,
    WORD,
    GroupedCodes,
    Groups,
    Stored,
    Tensors,
    check_rows,
    groups_of_columns,
    nibbles,
)
from futransformer.generator.errors import CheckpointError
from futransformer.generator.json_reader import JsonReader
from futransformer.quantize.int4_scales import MIDDLE

VERSIONS = {"gptq": 1, "gptq_v2": 2}
OTHER_LAYOUTS = ("is_marlin_format", "dynamic")  # keys that mean one, where they are not false or empty


@dataclass(frozen=True)
class Gptq:
    """A GPTQ checkpoint's format."""

    groups: Groups
    version: int
    needs_g_idx: bool  # act-order without static groups

    @property
    def title(self) -> str:
        """See Format.title; of symmetric codes the version is theirs, whatever the config says."""
        version = f" v{self.version}" if self.groups.zero_points else ""
        return f"GPTQ{version}, {self.groups}"

    @property
    def mixed(self) -> bool:
        """See Format.mixed."""
        return False

    @property
    def act_order(self) -> bool:
        """See Format.act_order."""
        return self.needs_g_idx

    def tensors(self, module: str, shape: tuple[int, int], stored: Tensors) -> Mapping[str, Stored] | None:
        """See Format.tensors."""
        if f"{module}.weight" in stored:
            return None
        n, k = shape
        check_rows(module, n)
        count = self.groups.count(k)
        wanted = {
            f"{module}.qweight": Stored(((k // WORD, n),), ("I32",)),
            f"{module}.qzeros": Stored(((count, n // WORD),), ("I32",)),
            f"{module}.scales": Stored(((count, n),), FLOATS),
        }
        if self.needs_g_idx or f"{module}.g_idx" in stored:
            wanted[f"{module}.g_idx"] = Stored(((k,),), ("I32", "I64"))
        if f"{module}.bias" in stored:
            wanted[f"{module}.bias"] = Stored(((n,),), FLOATS)
        return wanted

    def read(self, module: str, shape: tuple[int, int], stored: Tensors) -> GroupedCodes:
        """See Format.read."""
        if f"{module}.bias" in stored and stored.read(f"{module}.bias").any():  # quantisers write zeros
            raise CheckpointError(f"{module}.bias is not zero: biases are not supported")
        g_idx = f"{module}.g_idx"
        return GroupedCodes(
            module,
            codes=nibbles(stored.read(f"{module}.qweight").T),
            scales=stored.read(f"{module}.scales").T.contiguous(),
            zeros=self._zeros(f"{module}.qzeros", nibbles(stored.read(f"{module}.qzeros")).T.contiguous()),
            group_size=self.groups.group_size,
            group_of=groups_of_columns(g_idx, stored.read(g_idx), self.groups) if g_idx in stored else None,
        )

    def _zeros(self, name: str, stored: Tensor) -> Tensor | None:
        if not self.groups.zero_points:
            if ((stored == MIDDLE - 1).all() or (stored == MIDDLE).all()).item():
                return None
            raise CheckpointError(
                f"{name} holds zero points other than 8, yet the config says sym: the checkpoint is damaged, or sym "
                "must be false"
            )
        if self.version == 2:
            return stored
        if (stored == 15).any():
            raise CheckpointError(
                f"{name} stores 15 in version 1, which engines read as a zero point of 16 or of 0; save the checkpoint "
                'in version 2, or if it is one, set "checkpoint_format": "gptq_v2"'
            )
        return stored + 1

    def spare(self, name: str) -> bool:
        """See Format.spare."""
        return False


def parse(section: JsonReader) -> Gptq:
    """Read quantization_config."""
    bits = section.integer("bits")
    if bits != 4:
        raise section.error("bits", f"is {bits}; of GPTQ checkpoints those of 4 bits are supported")
    key = "checkpoint_format" if section.has("checkpoint_format") else "format"
    version = section.text(key) if section.has(key) else "gptq"
    if version not in VERSIONS:
        raise section.error(key, f"is {version!r}; supported: {', '.join(VERSIONS)}")
    for other in OTHER_LAYOUTS:
        if section.content.get(other):
            raise section.error(other, "is not supported; save the checkpoint in one layout, gptq or gptq_v2")
    if section.has("pack_dtype") and section.text("pack_dtype") != "int32":
        raise section.error("pack_dtype", f"is {section.text('pack_dtype')!r}; supported: int32")
    if not section.has("sym"):
        raise section.error("sym", "is missing; true where all zero points are 8")
    groups = Groups(group_size(section), zero_points=not section.boolean("sym"))
    return Gptq(groups, VERSIONS[version], section.boolean("desc_act") and not section.boolean("static_groups"))


def group_size(section: JsonReader) -> int:
    """Read it; -1 means a whole row."""
    size = section.integer("group_size")
    if size != -1 and (size < 1 or size % WORD):
        raise section.error("group_size", f"is {size}; supported: multiples of {WORD}, and -1")
    return size
