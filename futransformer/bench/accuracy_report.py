"""Results of accuracy and of perplexity -> docs/accuracy.md: what quantisation costs each model, tables and plots.

A line of a table is a row that has the baseline in BF16 beside it, over as many windows as its kind was measured on at
most. *Of rounding's rise* is the rise of log-perplexity over that of weights of the same kind rounded to nearest,
window by window; its standard error is that of a ratio of means.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from futransformer.bench import accuracy_plots
from futransformer.bench.case import Row
from futransformer.bench.check_tables import line
from futransformer.bench.report import accuracy_section, provenance

PAGE, PLOTS = "accuracy.md", "accuracy"
INTRODUCTION = "# Accuracy\n"
BASELINE, NEAREST = "reference-bf16", "rtn"
HEADER = (
    "weights",
    "made by",
    "cache",
    "through",
    "windows",
    "perplexity",
    "rise, %",
    "of rounding's rise",
    "KL, nats",
    "same top token, %",
    "kernels - reference",
    "deviation",
)


@dataclass(frozen=True)
class Cost:
    """What one kind of quantisation costs a model."""

    model: str
    weights: str
    label: str
    cache: str
    through: str
    windows: int
    row: Row

    @property
    def kind(self) -> tuple[str, str, str]:
        """What rows of different methods have in common."""
        return self.weights, self.cache, self.through

    @property
    def rise(self) -> tuple[float, float]:
        """Of perplexity, in percent, and its standard error: over windows, of older rows over tokens."""
        difference = self.row[f"nll_minus_{BASELINE}"]
        error = self.row.get("percent_standard_error")
        if error is None:
            error = 100 * math.exp(difference["mean"]) * difference["standard_error"]
        return 100 * math.expm1(difference["mean"]), error


def costs(contents: Sequence[dict[str, Any]]) -> list[Cost]:
    """Every line of the tables, in order."""
    found: dict[tuple[str, ...], Cost] = {}
    for content in contents:
        for row in content["rows"]:
            if BASELINE in row.get("rivals", {}):
                cost = parse(row)
                key = (cost.model, *cost.kind, cost.label)
                if key not in found or found[key].windows < cost.windows:
                    found[key] = cost
    return sorted(found.values(), key=lambda cost: (cost.model, cost.through, cost.weights, cost.cache, cost.label))


def parse(row: Row) -> Cost:
    """Take a row's name apart: perplexity/MODEL/WHAT[/recipe=...]/through=.../ctx=.../windows=...[/...]."""
    _, model, what, *rest = row["case"].split("/")
    options = dict(part.split("=", 1) for part in rest)
    label, cache = options.get("recipe", NEAREST), "bf16"
    if "weights" in row:
        what, label, cache = (row[part] for part in ("weights", "label", "cache"))
    elif f"-{NEAREST}-" in what:
        what, _, cache = what.partition(f"-{NEAREST}-")
    if options.get("scales") == "running":
        label += ", running scales"
    return Cost(model, what, label, cache, options["through"], int(options["windows"]), row)


def share(cost: Cost, nearest: Cost | None) -> tuple[float, float] | None:
    """Which part of the rise of rounding to nearest remains, and its standard error; None where they do not pair."""
    if nearest is None or nearest is cost or nearest.windows != cost.windows:
        return None
    ours, theirs = (of.row.get("windows_minus_bf16") for of in (cost, nearest))
    if not ours or not theirs or len(ours) < 2:
        return None
    mean = statistics.fmean(theirs)
    ratio = statistics.fmean(ours) / mean
    apart = [one - ratio * other for one, other in zip(ours, theirs, strict=True)]
    return ratio, statistics.stdev(apart) / abs(mean) / math.sqrt(len(apart))


def render(contents: Sequence[dict[str, Any]]) -> str:
    """A section a model, then all rows of the files of ``bench accuracy``."""
    every = costs(contents)
    models = dict.fromkeys(cost.model for cost in every)
    parts = [section(model, [cost for cost in every if cost.model == model], contents) for model in models]
    parts += [accuracy_section(content) for content in contents if "model" not in content]
    return "\n".join(parts)


def section(model: str, lines: Sequence[Cost], contents: Sequence[dict[str, Any]]) -> str:
    """One model: where its rows are from, the table, the plots."""
    rows = [cost.row for cost in lines]
    sources = [content for content in contents if any(row in content["rows"] for row in rows)]
    text = [f"## What quantisation costs: {model}", ""]
    text += [f"- {provenance(content)}" for content in sources]
    for name, title in (("baseline_sha256", "weights"), ("text_sha256", "text")):
        if sums := dict.fromkeys(row[name] for row in rows if name in row):
            text.append(f"- sha256 of the {title}: {', '.join(sums)}.")
    older = dict.fromkeys(f"{row['commit'][:12]}, {row['date']}" for row in rows if "commit" in row)
    if len(older) > 1:
        text.append(f"- Rows are of several commits: {'; '.join(older)}.")
    text += ["", *table(lines), ""]
    text.append(f"![{model}: how far the perplexity rises, by method]({PLOTS}/{model}.svg)")
    if any("layer_errors" in row for row in rows):
        text += ["", f"![{model}: error of the residual stream by layer]({PLOTS}/{model}-layers.svg)"]
    return "\n".join(text) + "\n"


def table(lines: Sequence[Cost]) -> list[str]:
    """The table; columns that no row has a figure for are left out."""
    rows = [cells(cost, nearest_of(cost, lines)) for cost in lines]
    kept = [index for index in range(len(HEADER)) if any(row[index] for row in rows)]
    ruler = ["---" if index < 4 else "---:" for index in kept]
    return [line([HEADER[index] for index in kept]), line(ruler)] + [
        line([row[index] for index in kept]) for row in rows
    ]


def nearest_of(cost: Cost, lines: Sequence[Cost]) -> Cost | None:
    """The line of the same kind whose weights are rounded to nearest."""
    return next((other for other in lines if other.kind == cost.kind and other.label == NEAREST), None)


def cells(cost: Cost, nearest: Cost | None) -> list[str]:
    """A line of the table, in HEADER's order."""
    row = cost.row
    kl, top = row.get("kl_divergence"), row.get("top1_agreement")
    off = row.get("nll_minus_reference")
    floor = row.get("noise_floor_reference_float32_minus_float64")
    remains = share(cost, nearest)
    return [
        cost.weights,
        cost.label,
        cost.cache,
        cost.through,
        str(cost.windows),
        f"{row['ours']:.3f}",
        with_error(*cost.rise, 2),
        "" if remains is None else with_error(*remains, 3),
        "" if kl is None else with_error(kl["mean"], kl["standard_error"], 5),
        "" if top is None else with_error(100 * top["mean"], 100 * (top["standard_error"] or 0), 2),
        "" if off is None else with_error(off["mean"], off["standard_error"], 5),
        "" if floor is None or off is None else f"{off['deviation']:.3f} of {floor['deviation']:.3f}",
    ]


def with_error(value: float, error: float | None, digits: int) -> str:
    """A figure and its standard error."""
    return f"{value:.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}")


def draw(contents: Sequence[dict[str, Any]], docs: Path) -> None:
    """Write every plot that ``render`` names."""
    every = costs(contents)
    for model in dict.fromkeys(cost.model for cost in every):
        (docs / PLOTS).mkdir(parents=True, exist_ok=True)
        lines = [cost for cost in every if cost.model == model]
        bars = [(" ".join(cost.kind), cost.label, *cost.rise) for cost in lines]
        accuracy_plots.draw_rises(model, bars, docs / PLOTS / f"{model}.svg")
        curves = {
            f"{cost.weights} {cost.label} {cost.cache}, {cost.through}": cost.row["layer_errors"]
            for cost in lines
            if "layer_errors" in cost.row
        }
        if curves:
            accuracy_plots.draw_layers(model, curves, docs / PLOTS / f"{model}-layers.svg")
