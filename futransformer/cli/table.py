"""Plain text for people: aligned tables and sizes."""

from __future__ import annotations

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Align columns; the first to the left, the others, which hold figures, to the right."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]

    def aligned(line: Sequence[str]) -> str:
        first, *others = zip(line, widths, strict=True)
        return "  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)])

    return "\n".join(aligned(line) for line in lines)


def megabytes(size_bytes: int) -> str:
    """Return a size in MB (10^6 bytes)."""
    return f"{size_bytes / 1e6:.2f} MB"
