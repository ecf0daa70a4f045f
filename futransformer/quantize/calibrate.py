"""The recipe of an FP8 prefill, from a text: the scales of what is written in FP8, and weights by GPTQ if asked for.

The text is read by the FP8 operations themselves, on kernels as on the reference, so nothing else needs to be built.
They record magnitudes before these saturate; but a result that saturates, or whose scale is far too coarse, falsifies
all that come after it. So each operation that writes one is called twice: to learn its largest magnitude, and again to
write by the scale of that. A second reading, by the scales that the windows have led to together, adds what it finds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from futransformer.checkpoint import Checkpoint
from futransformer.fp8_scaling import HEADROOM, ActivationScales, Fp8Scaling, result_name
from futransformer.generator.errors import CheckpointError, InputError
from futransformer.generator.precision import Granularity
from futransformer.model import Llama, check_numbers
from futransformer.ops.interface import Fp8Output, Ops
from futransformer.perplexity import split_windows
from futransformer.quantize.recipe import Fp8Recipe, WeightCodes
from futransformer.quantize.sequential import SequentialOps

RULE = f"scale = {HEADROOM} x amax / 448, amax the largest magnitude of the calibration text"

Progress = Callable[[str], object]


@dataclass(frozen=True)
class Calibration:
    """A recipe, and how it came about."""

    recipe: Fp8Recipe
    windows: int
    context: int
    saturated: int  # values in the last reading

    @property
    def scales(self) -> ActivationScales:
        """Of the recipe."""
        return self.recipe.scales


def choose_windows(tokens: Sequence[int], context: int, samples: int) -> list[Sequence[int]]:
    """At most ``samples`` full windows, spread evenly over the text; a text shorter than one window is one."""
    if samples < 1:
        raise InputError(f"a calibration takes at least 1 window, not {samples}")
    windows = split_windows(tokens, context)
    count = min(samples, len(windows))
    return [windows[index * len(windows) // count] for index in range(count)]


def calibrate(
    model: Llama,
    tokens: Sequence[int],
    *,
    context: int = 1024,
    samples: int = 8,
    progress: Progress = lambda line: None,
    gptq: tuple[Checkpoint, Granularity] | None = None,
) -> Calibration:
    """Find the recipe for a text and leave the model with it. What scales it had before does not matter.

    ``gptq``: round the FP8 weights by GPTQ, from the checkpoint's, with scales of this granularity; the model must then
    take all windows in one pass. ``progress`` hears a line now and then.
    """
    scaling = model.scaling
    if scaling is None:
        raise InputError("calibration is of an FP8 prefill: load the model with precision fp8")
    windows = choose_windows(tokens, context, samples)
    ops, mode = model.ops, scaling.mode
    scaling.mode = "frozen"
    scaling.use(ActivationScales.unknown(model.config.num_hidden_layers))
    weights: WeightCodes = {}
    try:
        model.ops = cast("Ops", LearningOps(ops, scaling))
        if gptq is None:
            first = _read(model, scaling, windows, progress, 0, 2 * len(windows))
        else:
            first, weights = _read_by_gptq(model, scaling, windows, progress, *gptq)
        model.ops = ops
        scaling.use(ActivationScales.from_amax(first))
        second = _read(model, scaling, windows, progress, len(windows), 2 * len(windows))
    finally:
        model.ops, scaling.mode = ops, mode
    saturated = sum(scaling.saturated().values())
    scales = ActivationScales.from_amax(torch.maximum(first, second))
    scaling.use(scales)
    return Calibration(Fp8Recipe(scales, scaling.bf16, weights), len(windows), len(windows[0]), saturated)


def _read(
    model: Llama, scaling: Fp8Scaling, windows: Sequence[Sequence[int]], progress: Progress, before: int, total: int
) -> Tensor:
    """Read each window by itself, ``before`` others having been read; the largest magnitudes of all of them."""
    for done, window in enumerate(windows, before + 1):
        check_numbers(model.config.name, model.prefill([window]))
        progress(f"{done} of {total} readings")
    model.keep([])
    return _largest(model, scaling)


def _read_by_gptq(
    model: Llama,
    scaling: Fp8Scaling,
    windows: Sequence[Sequence[int]],
    progress: Progress,
    checkpoint: Checkpoint,
    granularity: Granularity,
) -> tuple[Tensor, WeightCodes]:
    """Read all windows in one pass, in which every FP8 weight is rounded; the largest magnitudes, and the weights."""
    rows = sum(map(len, windows))
    if rows > model.max_rows:
        raise InputError(
            f"GPTQ reads all windows in one pass: {rows} tokens, and this model takes at most {model.max_rows} "
            "(max_rows): load it with as many, or take fewer or shorter windows"
        )
    sequential = SequentialOps(model.ops, model, checkpoint, granularity, progress)
    model.ops = cast("Ops", sequential)
    check_numbers(model.config.name, model.prefill(windows))
    model.keep([])
    return _largest(model, scaling), sequential.weights


def _largest(model: Llama, scaling: Fp8Scaling) -> Tensor:
    """The largest magnitudes so far; CheckpointError if one is not finite."""
    amax = scaling.largest()
    if not amax.isfinite().all():
        place = result_name(int((~amax.isfinite()).nonzero()[0]), len(amax))
        raise CheckpointError(
            f"{model.config.name}: {place}: values that are not finite cannot be calibrated; fetch the checkpoint again"
        )
    return amax


class LearningOps:
    """Ops whose FP8 results are written by the scale of their own largest magnitude."""

    capturable = False  # nor replayed: a pass that was captured before would learn nothing

    def __init__(self, ops: Ops, scaling: Fp8Scaling) -> None:
        self._ops = ops
        self._scaling = scaling

    def chain(self) -> AbstractContextManager[None]:
        """No chain: scales are written between its operations."""
        return nullcontext()

    def __getattr__(self, name: str) -> Any:
        """Any other operation: called twice if it writes an FP8 result."""
        operation = getattr(self._ops, name)

        def learning(*inputs: Any, **options: Any) -> Any:
            fp8: Fp8Output | None = options.get("fp8")
            if fp8 is not None:
                adds = name in ("o", "down")  # to their last input, in place: to a copy of it the first time
                operation(*inputs[:-1], inputs[-1].clone() if adds else inputs[-1], **options)
                fp8.scale.copy_(ActivationScales.from_amax(fp8.amax).scale)
                self._scaling.scale_sums()
            return operation(*inputs, **options)

        return learning if callable(operation) else operation
