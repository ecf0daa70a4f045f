"""The tables of what checks of kernels found: compute-sanitizer's tools, and random cases.

``CHECKS`` says of each subject what the report reads of a file and of its rows, and makes its lines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

LINES_TOLD = 20  # of what a check said
COUNTED = ("cases", "launches", "errors", "warnings")  # of a kernel under compute-sanitizer
FUZZED = ("cases", "wrong")  # of an operation of an export


@dataclass(frozen=True)
class CheckTable:
    """One subject's."""

    fields: frozenset[str]
    row_fields: frozenset[str]
    table: Callable[[dict[str, Any]], list[str]]


def _sanitize_table(content: dict[str, Any]) -> list[str]:
    """A line a tool: what it ran over, how much it said, whether it finds what is planted; then what it said."""
    totals: dict[str, dict[str, int]] = {}
    for row in content["rows"]:
        total = totals.setdefault(row["case"].split("/")[1], dict.fromkeys(("kernels", *COUNTED), 0))
        total["kernels"] += 1
        for key in COUNTED:
            total[key] += row[key]
    header = ["tool", "kernels", *COUNTED, "planted faults found"]
    lines = [f"Version {content['version']}, {content['seconds']:g} s.", ""]
    lines += [line(header), line(["---", *["---:"] * (len(header) - 1)])]
    for tool, total in totals.items():
        planted = [row for row in content["planted"] if row["tool"] == tool and "required" in row]
        found = sum(row["errors"] + row["warnings"] > 0 for row in planted)
        lines.append(line([tool, *map(str, total.values()), f"{found} of {len(planted)}"]))
    whole = [*content["failures"], *content["left_out"], *content["messages"]]  # of messages there may be many
    said = list(dict.fromkeys(line.partition("; ")[0] for line in whole))  # the rest of a message is its places
    lines += ([""] if said else []) + [f"- {told}" for told in said[:LINES_TOLD]]
    more = len(said) - LINES_TOLD
    return lines + ([f"- and {more} more, in sanitize.json"] if more > 0 else [])


def _fuzz_table(content: dict[str, Any]) -> list[str]:
    """A line an operation, of all exports together; then the cases that were wrong."""
    totals: dict[str, dict[str, int]] = {}
    for row in content["rows"]:
        operation = row["case"].split("/", 2)[2]
        operation = operation.rpartition("/")[2] if operation.endswith("attention_decode") else operation
        total = totals.setdefault(operation, dict.fromkeys(("exports", *FUZZED), 0))
        total["exports"] += 1
        for key in FUZZED:
            total[key] += row[key]
    ran = sum(total["cases"] for total in totals.values())
    lines = [f"Seed {content['seed']}: {ran} of {content['asked']} cases, {content['seconds']:g} s.", ""]
    header = ["operation", "exports", *FUZZED]
    lines += [line(header), line(["---", *["---:"] * (len(header) - 1)])]
    lines += [line([name, *map(str, total.values())]) for name, total in sorted(totals.items())]
    failures = content["failures"]
    lines += ([""] if failures else []) + [f"- {each['case']}: {each['message']}" for each in failures[:LINES_TOLD]]
    more = len(failures) - LINES_TOLD
    return lines + ([f"- and {more} more, in fuzz.json"] if more > 0 else [])


def line(cells: Sequence[str]) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


CHECKS = {
    "sanitize": CheckTable(
        frozenset({"version", "seconds", "planted", "messages", "failures", "left_out"}),
        frozenset({"case", *COUNTED}),
        _sanitize_table,
    ),
    "fuzz": CheckTable(frozenset({"seed", "asked", "seconds", "failures"}), frozenset({"case", *FUZZED}), _fuzz_table),
}
