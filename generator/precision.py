"""The precisions that kernels are generated for: one row each, read by specs, ops and tests.

A precision names four things: what the prefill GEMMs read, what the decode GEMMs read, what the KV cache holds,
and what decode's head reads; of the cache also the form of an INT4 copy that decode reads in its place, of an FP8
prefill how weights are scaled and how products are summed, of INT4 how many of a row's weights share a scale, and
whether they share a zero point.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

from .errors import UnsupportedError
from .kv_format import BLOCKS, HEAD, KvFormat
from .kv_format import DEFAULT as DEFAULT_COPY


@dataclass(frozen=True)
class Element:
    """A storage type: its CUTLASS name, and the bits of one element."""

    name: str  # as in kernel names
    cutlass: str  # C++ type
    bits: int


BF16 = Element("bf16", "cutlass::bfloat16_t", 16)
E4M3 = Element("e4m3", "cutlass::float_e4m3_t", 8)
INT4 = Element("int4", "cutlass::uint4b_t", 4)  # codes 0 .. 15; symmetric ones stand for code - 8

E4M3_MAX = 448.0  # conversions saturate here

# One scale for a whole weight, or one for each of its rows (output channels).
Granularity = Literal["tensor", "channel"]
# FP8 wgmma adds its products to about 14 bits. "fast" leaves a whole row of K to it; "promoted" adds up every 128 of K
# in float32 registers.
Accumulation = Literal["fast", "promoted"]

GROUP_SIZES = (32, 64, 128, 256)  # of a row's INT4 weights that share a scale
CHANNEL = -1  # the group is a whole row, which is how GPTQ and compressed-tensors write it


@dataclass(frozen=True)
class Precision:
    """Which element each phase of the model reads; ``weight_scales`` and ``accumulation`` are of FP8 prefill GEMMs.

    ``head`` is what decode reads its logits by; a prefill's head is BF16. E4M3 weights of decode have a scale a row.
    ``group_size`` (one of ``GROUP_SIZES``, or ``CHANNEL``) and ``zero_points`` are of INT4 decode weights and of an
    INT4 head. The last group of a row is shorter where K is no multiple of it. With ``gain_in_x`` INT4 projections keep
    the codes that a checkpoint came with, and the gains of norms are in the x that decode writes.
    ``copy`` is the form of the INT4 copy of the cache, which both phases write beside it and decode alone reads.

    ``atol`` and ``rtol_factor`` are the tolerance rule of the kernels' tests: the error against a float32 reference
    may be at most ``rtol_factor`` times that of PyTorch in the same element type, plus ``atol`` times the largest
    reference value (one unit in the last place of the output element).
    """

    name: str
    prefill: Element
    decode: Element
    kv: Element
    head: Element
    rtol_factor: float
    atol: float
    weight_scales: Granularity = "tensor"
    accumulation: Accumulation = "fast"
    group_size: int = 128
    zero_points: bool = False
    gain_in_x: bool = False
    copy: KvFormat | None = None

    @property
    def decodes_codes(self) -> bool:
        """Whether decode reads codes that a prefill does not: of its projections, of its head, or of the cache."""
        return self.decode != BF16 or self.head != BF16 or self.copy is not None

    @property
    def suffix(self) -> str:
        """The end of its name, behind what the projections read: that of the head, then that of the cache."""
        head = next((suffix for suffix, element in _HEADS.items() if element == self.head), "")
        return head + (_KV8 if self.kv == E4M3 else "") + ("" if self.copy is None else self.copy.suffix)


_HEADS = {"-head8": E4M3, "-head4": INT4}
_GAIN, _KV8 = "-gain", "-kv8"

PRECISIONS: dict[str, Precision] = {
    "bf16": Precision("bf16", prefill=BF16, decode=BF16, kv=BF16, head=BF16, rtol_factor=2.0, atol=2.0**-8),
    # FP8 where a prompt is read, BF16 where tokens are generated.
    "fp8": Precision("fp8", prefill=E4M3, decode=BF16, kv=BF16, head=BF16, rtol_factor=2.0, atol=2.0**-8),
    # The same two over a KV cache of half the bytes (docs/notebook/kv_cache.md).
    "bf16-kv8": Precision("bf16-kv8", prefill=BF16, decode=BF16, kv=E4M3, head=BF16, rtol_factor=2.0, atol=2.0**-8),
    "fp8-kv8": Precision("fp8-kv8", prefill=E4M3, decode=BF16, kv=E4M3, head=BF16, rtol_factor=2.0, atol=2.0**-8),
    # FP8 prefill, slower by a fifth: its sums lose no more than float32's do, and every output channel has a scale.
    "fp8-promoted": Precision(
        "fp8-promoted",
        prefill=E4M3,
        decode=BF16,
        kv=BF16,
        head=BF16,
        rtol_factor=2.0,
        atol=2.0**-8,
        weight_scales="channel",
        accumulation="promoted",
    ),
    # INT4 weights where tokens are generated: symmetric, a scale for 128. Other groups by name: see get_precision.
    "int4": Precision("int4", prefill=BF16, decode=INT4, kv=BF16, head=BF16, rtol_factor=2.0, atol=2.0**-8),
    "fp8-int4": Precision("fp8-int4", prefill=E4M3, decode=INT4, kv=BF16, head=BF16, rtol_factor=2.0, atol=2.0**-8),
    # E4M3 weights there: what INT4 is compared with.
    "bf16-fp8": Precision("bf16-fp8", prefill=BF16, decode=E4M3, kv=BF16, head=BF16, rtol_factor=2.0, atol=2.0**-8),
    "fp8-fp8": Precision("fp8-fp8", prefill=E4M3, decode=E4M3, kv=BF16, head=BF16, rtol_factor=2.0, atol=2.0**-8),
}

# a row of INT4 weights, their groups, and where gains are: int4-g32-asym-gain
_INT4_NAME = re.compile(r"(.*int4)(?:-g([1-9]\d*)|-(channel))?(-asym)?(-gain)?")
# a row, and its copy's form where that is not the default: bf16-kv4-head-min-h64
_COPY_NAME = re.compile(r"(.+)-kv4(-head)?(-min)?(?:-h(0|[1-9]\d*))?")
PRECISION_NAMES = (
    f"{', '.join(PRECISIONS)} (int4 also with -g32, -g64, -g256 or -channel, then -asym, then -gain; all with -head8 "
    "or -head4, then -kv8, then -kv4, -head, -min, -h0, -h64 or -h128)"
)


def get_precision(name: str | Precision) -> Precision:
    """Look a precision up by name; UnsupportedError lists what exists.

    The rows of INT4 weights take other groups by suffix, zero points, and gains in x: int4-g32, int4-channel-asym,
    fp8-int4-g64, int4-gain. Behind these any row takes a head of E4M3 or INT4 in decode (-head8, -head4; in the row's
    groups), behind that pages of E4M3, fp8-int4-g32-head8-kv8, and last an INT4 copy of its pages, with what differs
    from the default form: int4-kv8-kv4, bf16-kv4-head-min-h64.
    """
    if isinstance(name, Precision):
        return name
    if name in PRECISIONS:
        return PRECISIONS[name]
    copied = _COPY_NAME.fullmatch(name)
    if copied is not None:
        block = int(copied[4] or DEFAULT_COPY.hadamard)
        if block in BLOCKS and (row := get_precision(copied[1])).copy is None:
            shared = HEAD if copied[2] else DEFAULT_COPY.group
            copy = KvFormat(shared, minimum=copied[3] is not None, hadamard=block)
            return replace(row, name=row.name + copy.suffix, copy=copy)
    base = name.removesuffix(_KV8)
    if base != name and (row := get_precision(base)).kv == BF16 and row.copy is None:
        return replace(row, name=row.name + _KV8, kv=E4M3)
    for suffix, element in _HEADS.items():
        base = name.removesuffix(suffix)
        if base != name and (row := get_precision(base)).suffix == "":
            return replace(row, name=row.name + suffix, head=element)
    parts = _INT4_NAME.fullmatch(name)
    if parts is not None and parts[1] in PRECISIONS:
        row = PRECISIONS[parts[1]]
        size = CHANNEL if parts[3] else int(parts[2] or row.group_size)
        if size in (*GROUP_SIZES, CHANNEL):
            group = "" if size == row.group_size else "-channel" if size == CHANNEL else f"-g{size}"
            return replace(
                row,
                name=f"{row.name}{group}{parts[4] or ''}{parts[5] or ''}",
                group_size=size,
                zero_points=parts[4] is not None,
                gain_in_x=parts[5] is not None,
            )
    raise UnsupportedError(f"precision {name!r} is not implemented; choose one of: {PRECISION_NAMES}")


def gains_in_x(row: Precision) -> Precision:
    """The same row of INT4 weights, with the gains of norms in the x that decode writes."""
    if row.gain_in_x:
        return row
    base = row.name.removesuffix(row.suffix)
    return replace(row, name=base + _GAIN + row.suffix, gain_in_x=True)
