"""A run over some of the kernels put into the results of an earlier run over more.

What the file says of a kernel is replaced where that kernel was launched under that tool again; all else stays. The
file is of the commit that it was of: a row that is put in says its own, and its card, driver and version if they are
others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.sanitize.runner import TOOLS, Run

ALL_TOOLS = "all tools"
TOLD = ("commit", "dirty", "date")
OF_THE_MACHINE = ("card", "driver", "version", "versions")


def read(folder: Path) -> dict[str, Any] | None:
    """The results in the folder, if there are any."""
    path = folder / "sanitize.json"
    content: dict[str, Any] | None = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    return content


def into(earlier: dict[str, Any], content: dict[str, Any], runs: Sequence[Run]) -> dict[str, Any]:
    """The earlier results with those of ``runs``, which ``content`` is of, in the place of what they replace."""
    told = {key: content[key] for key in TOLD}
    told |= {key: content[key] for key in OF_THE_MACHINE if content[key] != earlier[key]}
    rows = {row["case"]: row for row in earlier["rows"]}
    rows |= {row["case"]: row | told for row in content["rows"]}
    planted = {(row["tool"], row["kernel"]): row for row in (*earlier["planted"], *content["planted"])}
    launched = {tuple(row["case"].split("/")[1:]) for row in content["rows"] if row["launches"]}
    ended = {case for run in runs for case in run.ended}
    said = {
        kind: [*(line for line in earlier[kind] if not is_replaced(line, launched, ended)), *content[kind]]
        for kind in ("messages", "failures", "left_out")
    }
    return earlier | {
        "rows": [rows[case] for case in sorted(rows)],
        "planted": list(planted.values()),
        **{kind: list(dict.fromkeys(lines)) for kind, lines in said.items()},
        "seconds": round(earlier["seconds"] + content["seconds"], 1),
    }


def is_replaced(line: str, launched: set[tuple[str, ...]], ended: set[str]) -> bool:
    """Whether a line of an earlier file is about a case that has ended since, or a kernel that has been launched.

    Lines name a case (``TOOL/EXPORT/CASE``), a kernel (``TOOL/KERNEL: ...``, ``TOOL/EXPORT: kernel KERNEL ...``), or
    what the names of kernels begin with (``all tools/BEGINNING: ...``).
    """
    about = line.partition(": ")[0]
    if about in ended:
        return True
    tool, _, name = about.partition("/")
    if tool == ALL_TOOLS:
        return all(any(of == each and kernel.startswith(name) for of, kernel in launched) for each in TOOLS)
    kernel = re.search(r": kernel (\w+) was not launched$", line)
    return (tool, kernel[1] if kernel else name) in launched
