"""The INT4 copy of the KV cache as a format: what a code is worth, and the bytes of a page.

Of each token and key/value head, K (after RoPE) and V are taken in their natural order of features, rotated in blocks
of ``hadamard`` features (times H / sqrt(block); 0: not at all), and rounded in groups. A group has a float16 scale,
which takes the sign that gives the largest magnitude the code -8, or, with ``minimum``, a float16 scale and minimum:

    worth = scale code, codes -8 .. 7        or        worth = scale code + minimum, codes 0 .. 15

Attention rotates Q as K is rotated; V's rotation is folded into W_v and W_o. docs/notebook/kv_cache.md says what the
forms cost, and why ``DEFAULT`` is the default.
"""

from __future__ import annotations

from dataclasses import dataclass

from .errors import UnsupportedError

PAGE_SIZE = 64  # tokens a KV-cache page holds
HEAD = -1  # the group is all of a head
CODE_BITS = 4
SCALE_BYTES = 2  # of float16: a scale, or a minimum
GROUPS = (32, HEAD)
BLOCKS = (0, 32, 64, 128)
UNIT = 64  # columns of K, in pair order, that hold whole groups of 32: one of the even and one of the odd ones


@dataclass(frozen=True)
class KvFormat:
    """One form of four-bit K and V."""

    group: int = 32  # features that share a scale, or HEAD
    minimum: bool = False
    hadamard: int = 32  # features that a rotation mixes; 0: none

    def __post_init__(self) -> None:
        if self.group not in GROUPS:
            raise UnsupportedError(f"a group of INT4 K and V is 32 features or a head ({HEAD}), not {self.group}")
        if self.hadamard not in BLOCKS:
            raise UnsupportedError(f"a Hadamard block has one of {BLOCKS} features, not {self.hadamard}")

    def __str__(self) -> str:
        group = "head" if self.group == HEAD else f"g{self.group}"
        return f"int4-{group}{'-min' if self.minimum else ''}{f'-h{self.hadamard}' if self.hadamard else ''}"

    @property
    def suffix(self) -> str:
        """As a precision's name ends in it: what differs from the default."""
        rotation = "" if self.hadamard == DEFAULT.hadamard else f"-h{self.hadamard}"
        return f"-kv4{'-head' * (self.group == HEAD)}{'-min' * self.minimum}{rotation}"

    @property
    def cpp(self) -> str:
        """The C++ type; a group of 0 features is a head."""
        group = 0 if self.group == HEAD else self.group
        return f"futransformer::KvFormat<{group}, {str(self.minimum).lower()}, {self.hadamard}>"

    def unit(self, head_dim: int) -> int:
        """Columns of the projection that must be finished together: a head, where a group or a block spans one."""
        return UNIT if self.group != HEAD and self.hadamard <= self.group else head_dim

    def groups(self, head_dim: int) -> int:
        """Groups of a head; UnsupportedError where its features are not whole groups, or whole blocks."""
        group = head_dim if self.group == HEAD else self.group
        if head_dim % 64:
            raise UnsupportedError(f"heads of {head_dim} features: INT4 K and V need a multiple of 64")
        if self.hadamard and head_dim % self.hadamard:
            raise UnsupportedError(f"{self}: heads of {head_dim} features are no whole Hadamard blocks")
        return head_dim // group

    def bits(self, head_dim: int) -> float:
        """Bits of an element, scales and minima counted."""
        return 8 * self.part_bytes(head_dim) / (PAGE_SIZE * head_dim)

    def part_bytes(self, head_dim: int) -> int:
        """Bytes of K, or of V, of one page and key/value head: codes, then scales, then minima."""
        scales = PAGE_SIZE * self.groups(head_dim) * SCALE_BYTES
        return PAGE_SIZE * head_dim * CODE_BITS // 8 + scales * (2 if self.minimum else 1)

    def page_bytes(self, head_dim: int) -> int:
        """Bytes of one page and key/value head: K, then V."""
        return 2 * self.part_bytes(head_dim)


DEFAULT = KvFormat()
