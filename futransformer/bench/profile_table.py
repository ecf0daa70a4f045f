"""Profiles of decode steps as rows of a results file, and their table in docs/decode.md.

A row is a stage, or one of three ways to take the whole step: its stages added up, as it runs, with launches apart. Or
what of the step multiprocessors had no bulk copy under way, in the mean.
"""

from __future__ import annotations

from typing import Any

from futransformer.bench.check_tables import CheckTable, line
from futransformer.bench.profile import STAGES, StepProfile

SUBJECT = "profile"
HEADER = ["stage", "launches", "MB", "us each", "us", "% of memory", "% of the step"]
SUM, STEP, APART = "each by itself, added up", "the step as it runs", "the step, launches apart"
GAPS = "of it at most without a bulk copy under way"
FROM_L2 = "* All layers' bytes fit L2, so this stage by itself does not show what memory does."


def rows_of(profile: StepProfile, config: str, batch: int, context: int) -> list[dict[str, Any]]:
    """Rows of a results file: all launches of a stage together, per cent of memory's speed and of the step."""
    whole = {SUM: profile.sum_seconds, STEP: profile.step_seconds}
    if profile.apart_seconds is not None:
        whole[APART] = profile.apart_seconds
    measured = [(each.name, each.launches, each.bytes, each.seconds, each.from_l2) for each in profile.stages]
    measured += [(name, 0, profile.step_bytes, seconds, False) for name, seconds in whole.items()]
    if profile.gap_seconds is not None:
        measured.append((GAPS, 0, 0.0, profile.gap_seconds, False))
    return [
        {
            "case": f"profile/{config}/B={batch}/ctx={context}/{name}",
            "launches": launches,
            "bytes": bytes_read,
            "seconds": seconds,
            "percent_of_memory": round(profile.percent(bytes_read, seconds), 1),
            "percent_of_step": round(100 * seconds / profile.step_seconds, 1),
            "from_l2": from_l2,
        }
        for name, launches, bytes_read, seconds, from_l2 in measured
    ]


def step_of(case: str) -> str:
    """The step that a row's case is of. Its stages may be others than those of before, so it is replaced as a whole."""
    return case.rpartition("/")[0]


def name_of(row: dict[str, Any]) -> str:
    """The stage, or the way in which the whole step was taken."""
    return str(row["case"].rpartition("/")[2])


def cells(row: dict[str, Any]) -> list[str]:
    """What a table has of a row: stage, launches, MB, us each, us, per cent of memory and of the step."""
    launches, read = row["launches"], row["bytes"]
    microseconds = 1e6 * row["seconds"]
    return [
        name_of(row),
        str(launches) if launches else "",
        f"{read / 1e6:.1f}" if read else "",
        f"{microseconds / launches:.1f}" if launches else "",
        f"{microseconds:.1f}",
        f"{row['percent_of_memory']:.0f}{'*' * row['from_l2']}" if read else "",
        f"{row['percent_of_step']:.1f}",
    ]


def _table(content: dict[str, Any]) -> list[str]:
    """Each step's stages in their order, after the batch and the tokens that its sequences have."""
    steps: dict[str, list[dict[str, Any]]] = {}
    for row in content["rows"]:
        steps.setdefault(step_of(row["case"]), []).append(row)
    header = ["step", *HEADER]
    lines = [line(header), line(["---", "---", *["---:"] * (len(header) - 2)])]
    order = [*STAGES.values(), SUM, STEP, APART, GAPS]
    for step in sorted(steps, key=lambda step: [int(part.split("=")[1]) for part in step.split("/")[-2:]]):
        rows = sorted(steps[step], key=lambda row: order.index(name_of(row)))
        lines += [line(["" if index else step.split("/", 1)[1], *cells(row)]) for index, row in enumerate(rows)]
    starred = any(row["from_l2"] for row in content["rows"])
    return lines + (["", FROM_L2.replace("*", "\\*", 1)] if starred else [])


PROFILE = CheckTable(
    frozenset({"ceilings"}),
    frozenset({"case", "launches", "bytes", "seconds", "percent_of_memory", "percent_of_step", "from_l2"}),
    _table,
)
