"""Checkpoints of ``quant_method`` "fp8": E4M3 weights with a scale for the tensor, or for each block.

| tensor | type | shape | content |
| --- | --- | --- | --- |
| weight | E4M3 | [N, K] | codes |
| weight_scale, or weight_scale_inv | float | [1]; [N / rows, K / columns] with weight_block_size | both multiply |
| input_scale | float | [1] | of static activations; left out, for x stays BF16 or has scales of its own |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from futransformer.formats.codes import Groups, ScaledCodes, Stored, Tensors, fp8_scale, fp8_tensors
from futransformer.generator.json_reader import JsonReader

# Of activations and of a quantised cache, which say nothing about weights.
SPARE = (".input_scale", ".output_scale", ".k_scale", ".v_scale", ".kv_scale")


@dataclass(frozen=True)
class Fp8:
    """An FP8 checkpoint's format."""

    block: tuple[int, int] | None

    @property
    def title(self) -> str:
        """See Format.title."""
        return "FP8" + (f" in blocks of {self.block[0]} x {self.block[1]}" if self.block else "")

    @property
    def groups(self) -> Groups | None:
        """See Format.groups."""
        return None

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
        return fp8_tensors(module, shape, stored, self.block)

    def read(self, module: str, shape: tuple[int, int], stored: Tensors) -> ScaledCodes:
        """See Format.read."""
        return ScaledCodes(stored.read(f"{module}.weight"), stored.read(fp8_scale(module, stored)), self.block)

    def spare(self, name: str) -> bool:
        """See Format.spare."""
        return name.endswith(SPARE)


def parse(section: JsonReader) -> Fp8:
    """Read quantization_config."""
    kind = section.text("fmt") if section.has("fmt") else "e4m3"
    if kind != "e4m3":
        raise section.error("fmt", f"is {kind!r}; supported: e4m3")
    return Fp8(block_size(section, "weight_block_size"))


def block_size(section: JsonReader, key: str) -> tuple[int, int] | None:
    """Read rows and columns of a block; absent: None."""
    sizes = section.integers(key)
    if not sizes:
        return None
    if len(sizes) != 2 or min(sizes) < 1:
        raise section.error(key, f"must be two positive integers, not {list(sizes)}")
    return sizes[0], sizes[1]
