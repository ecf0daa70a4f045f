"""A picture of a decode step: one layer's launches in a row, and the whole beside what memory alone would take."""

from __future__ import annotations

from pathlib import Path

from futransformer.bench.profile import LAYER, StepProfile
from futransformer.generator.errors import InputError

COLOURS = ("#30638e", "#6a994e", "#edae49", "#d1495b", "#8d6a9f", "#767676", "#003d5b", "#a3b18a", "#c9ada7", "#b5838d")


def draw(profile: StepProfile, title: str, path: Path) -> None:
    """Write a PNG; InputError where matplotlib is not there."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - optional
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError as error:
        raise InputError(
            "pictures need matplotlib, which is not installed; run: pip install 'futransformer[bench]'"
        ) from error

    figure = Figure(figsize=(10, 4.5), dpi=150, layout="constrained")
    layer, step = figure.subplots(2, 1)
    colours = {stage.name: COLOURS[place % len(COLOURS)] for place, stage in enumerate(profile.stages)}
    memory = 1 / (profile.read_tbps * 1e6)  # microseconds a byte

    at = at_memory = 0.0
    for stage in profile.stages:
        if stage.name not in LAYER:
            continue
        each, least = 1e6 * stage.seconds / stage.launches, memory * stage.bytes / stage.launches
        layer.barh([1], [each], left=at, color=colours[stage.name])
        layer.barh([0], [least], left=at_memory, color=colours[stage.name], alpha=0.6)
        layer.text(at + each / 2, 1, f"{stage.name}\n{each:.1f}", ha="center", va="center", fontsize=7, color="white")
        at, at_memory = at + each, at_memory + least
    layer.set_yticks([1, 0], ["each by itself", "memory alone"])
    layer.set_xlabel("microseconds of one layer")
    layer.set_title(title, fontsize=9)

    at = at_memory = 0.0
    for stage in profile.stages:
        milliseconds, least = 1e3 * stage.seconds, 1e-3 * memory * stage.bytes
        step.barh([3], [milliseconds], left=at, color=colours[stage.name], label=stage.name)
        step.barh([0], [least], left=at_memory, color=colours[stage.name], alpha=0.6)
        at, at_memory = at + milliseconds, at_memory + least
    for place, seconds in ((1, profile.step_seconds), (2, profile.apart_seconds)):
        step.barh([place], [1e3 * (seconds or 0)], color="#444444")
    step.set_yticks([3, 2, 1, 0], ["stages, each by itself", "launches apart", "as it runs", "memory alone"])
    step.set_xlabel("milliseconds of the step")
    step.legend(ncols=len(profile.stages), fontsize=6, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.25))
    for axes in (layer, step):
        axes.spines[["top", "right"]].set_visible(False)
    FigureCanvasAgg(figure).print_png(path)
