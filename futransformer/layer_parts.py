"""The two parts of a layer, attention (qkv, o) and MLP (gate_up, down): what an FP8 prefill may leave in BF16.

A part begins and ends at the residual stream, which is BF16 in either case, so it needs no kernel of its own: its GEMMs
and its attention are those of a BF16 prefill.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Literal, NamedTuple, get_args

from futransformer.generator.errors import InputError
from futransformer.ops.interface import Projection

Half = Literal["attention", "mlp"]
HALVES: tuple[Half, ...] = get_args(Half)
PROJECTIONS_OF: dict[Half, tuple[Projection, ...]] = {"attention": ("qkv", "o"), "mlp": ("gate_up", "down")}
HALF_OF: dict[Projection, Half] = {op: half for half, ops in PROJECTIONS_OF.items() for op in ops}


class Part(NamedTuple):
    """One part of one layer."""

    layer: int
    half: Half


Parts = frozenset[Part]


def all_parts(layers: int) -> list[Part]:
    """Every part of so many layers, in the order in which they are read."""
    return [Part(layer, half) for layer in range(layers) for half in HALVES]


def parse_parts(text: str, layers: int) -> Parts:
    """Parts as a person writes them: "0, 2.mlp, 29" is layer 0, the MLP of layer 2, and layer 29."""
    parts: set[Part] = set()
    for word in text.split(","):
        found = re.fullmatch(rf"\s*(\d+)(?:\.({'|'.join(HALVES)}))?\s*", word)
        if found is None or int(found[1]) >= layers:
            raise InputError(
                f"{word.strip()!r} is none of the parts of {layers} layers: give 0 to {layers - 1} for a layer, or one "
                f"of its parts, as in 0.{HALVES[0]} or 0.{HALVES[1]}, separated by commas"
            )
        parts |= {part for part in all_parts(layers) if part.layer == int(found[1]) and found[2] in (None, part.half)}
    return frozenset(parts)


def format_parts(parts: Collection[Part]) -> str:
    """The inverse of ``parse_parts``: sorted, a layer by its number where both of its parts are there."""
    words = []
    for layer in sorted({part.layer for part in parts}):
        halves = [half for half in HALVES if Part(layer, half) in parts]
        words += [str(layer)] if len(halves) == len(HALVES) else [f"{layer}.{half}" for half in halves]
    return ", ".join(words)
