"""One SVG a subject: a group of bars a case, ours first; the ceiling's share is written on ours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from futransformer.bench.case import RATES, Row, told_beside
from futransformer.generator.errors import InputError

OURS = "#d1495b"
RIVALS = ("#30638e", "#6a994e", "#edae49", "#8d6a9f", "#767676")
ROWS_HIGH = 0.26  # inches of one bar


@contextmanager
def canvas(salt: str, size: tuple[float, float], path: Path) -> Iterator[Any]:
    """A figure of ``size`` inches, written to ``path`` behind the block; a fixed salt and no date: the same bytes."""
    try:
        from matplotlib.backends.backend_svg import FigureCanvasSVG  # noqa: PLC0415 - optional
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError as error:
        raise InputError(
            "plots need matplotlib, which is not installed; run: pip install 'futransformer[bench]'"
        ) from error

    from matplotlib import rc_context  # noqa: PLC0415

    with rc_context({"svg.hashsalt": salt, "font.size": 8, "svg.fonttype": "none"}):
        figure = Figure(figsize=size, layout="constrained")
        yield figure
        FigureCanvasSVG(figure).print_svg(path, metadata={"Date": None})


def draw(content: dict[str, Any], path: Path) -> None:
    """Draw one subject's rows that have rivals; figures of one unit share an axis that starts at zero."""
    rows = [row for row in content["rows"] if row.get("rivals")]
    names = ["ours", *dict.fromkeys(name for row in rows for name in others(row))]
    height = 1 + ROWS_HIGH * sum(len(others(row)) + 1.6 for row in rows)
    with canvas(content["subject"], (8, height), path) as figure:
        axes = figure.add_subplot()
        top = _bars(axes, rows, names, content["subject"])
        axes.set_ylim(top + 0.8, -0.8)
        units = dict.fromkeys(row["unit"] for row in rows)
        better = "longer" if set(units) <= set(RATES) else "shorter"
        axes.set_xlabel(f"{', '.join(units)} ({better} is better)")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(
            handles=[axes.barh([0], [0], color=_colour(name, names), label=name) for name in names],
            loc="lower right",
            frameon=False,
        )


def others(row: Row) -> dict[str, float]:
    """Whoever stands in a row with ours."""
    return {**row["rivals"], **dict(told_beside(row))}


def _colour(name: str, names: Sequence[str]) -> str:
    return OURS if name == "ours" else RIVALS[(names.index(name) - 1) % len(RIVALS)]


def _bars(axes: Any, rows: Sequence[Row], names: Sequence[str], subject: str) -> float:
    """Draw every group; return where the last bar lies."""
    place, ticks, labels = 0.0, [], []
    for row in rows:
        bars = {"ours": row["ours"], **others(row)}
        present = [name for name in names if name in bars]
        ticks.append(place + (len(present) - 1) / 2)
        labels.append(row["case"].removeprefix(f"{subject}/"))
        for name in present:
            low, high = row["spread"] if name == "ours" else (bars[name], bars[name])
            error = [[max(bars[name] - low, 0)], [max(high - bars[name], 0)]] if name == "ours" else None
            axes.barh([place], [bars[name]], height=0.9, color=_colour(name, names), xerr=error, error_kw={"lw": 0.8})
            place += 1
        place += 0.6
    axes.set_yticks(ticks, labels)
    return place - 1.6
