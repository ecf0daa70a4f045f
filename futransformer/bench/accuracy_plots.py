"""The two plots of docs/accuracy.md: how far perplexity rises, a bar a method, and the error behind each layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from futransformer.bench.plots import OURS, RIVALS, canvas

COLOURS = (OURS, *RIVALS)
STYLES = ("-", "--", ":", "-.")
BAR_HIGH = 0.22  # inches


@contextmanager
def axes_of(title: str, size: tuple[float, float], path: Path) -> Iterator[Any]:
    """Axes to draw on; the file is written behind the block, the same bytes for the same figures."""
    with canvas(title, size, path) as figure:
        axes = figure.add_subplot()
        yield axes
        axes.spines[["top", "right"]].set_visible(False)


def draw_rises(model: str, bars: Sequence[tuple[str, str, float, float]], path: Path) -> None:
    """Draw ``bars``: kind of weights, method, rise in percent, its standard error; methods of a kind stand together."""
    labels = list(dict.fromkeys(label for _, label, _, _ in bars))
    kinds = list(dict.fromkeys(kind for kind, _, _, _ in bars))
    with axes_of(model, (8, 1 + BAR_HIGH * (len(bars) + len(kinds))), path) as axes:
        place, ticks = 0.0, []
        for kind in kinds:
            group = [bar for bar in bars if bar[0] == kind]
            ticks.append(place + (len(group) - 1) / 2)
            for _, label, rise, error in group:
                colour = COLOURS[labels.index(label) % len(COLOURS)]
                axes.barh([place], [rise], height=0.9, color=colour, xerr=[error], error_kw={"lw": 0.8})
                axes.annotate(f" {rise:.2f}  {label}", (max(rise, 0) + error, place), va="center", fontsize=7)
                place += 1
            place += 0.6
        axes.set_yticks(ticks, kinds)
        axes.set_ylim(place - 0.8, -0.8)
        axes.margins(x=0.35)
        axes.set_xlabel(f"{model}: rise of perplexity over BF16, % (shorter is better)")


def draw_layers(model: str, curves: Mapping[str, Sequence[float]], path: Path) -> None:
    """Draw ``curves``: of each row the relative error of the residual stream behind every layer."""
    with axes_of(f"{model}-layers", (8, 4.5), path) as axes:
        for index, (name, errors) in enumerate(curves.items()):
            style = STYLES[index // len(COLOURS) % len(STYLES)]
            axes.plot(range(1, len(errors) + 1), errors, style, color=COLOURS[index % len(COLOURS)], label=name, lw=1.2)
        axes.set_ylim(bottom=0)
        axes.set_xlabel(f"{model}: layer")
        axes.set_ylabel("|x - x of BF16| / |x of BF16|, median over tokens")
        axes.legend(frameon=False, fontsize=7)
