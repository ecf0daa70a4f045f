"""A recipe from a text, whole: the parts that stay in BF16, then the scales and the weights of the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from futransformer.checkpoint import Checkpoint
from futransformer.generator.config import LlamaConfig
from futransformer.generator.errors import InputError
from futransformer.generator.precision import Precision
from futransformer.generator.specs import PAGE_SIZE
from futransformer.kv_cache import pages_for
from futransformer.layer_parts import Part, Parts, all_parts, format_parts, parse_parts
from futransformer.model import Llama
from futransformer.quantize import choose
from futransformer.quantize.calibrate import RULE, Calibration, Progress, calibrate, choose_windows
from futransformer.quantize.recipe import Fp8Recipe

AUTO = "auto:"

Weights = Literal["rtn", "gptq"]  # rounded to nearest, or by GPTQ
Load = Callable[[Fp8Recipe, int, int], Llama]  # a recipe to begin with, tokens of the cache, rows of a pass


@dataclass(frozen=True)
class Method:
    """How a recipe is made."""

    bf16: Parts | float = frozenset()  # those parts, or the costliest, as large as so many layers
    weights: Weights = "rtn"
    context: int = 1024
    samples: int = 8


@dataclass(frozen=True)
class Made:
    """A model with its recipe, and how that came about."""

    model: Llama
    calibration: Calibration
    method: Method
    effects: Mapping[Part, float]  # nats a token, where parts were chosen by them

    def described(self) -> dict[str, Any]:
        """In JSON's types."""
        effects = {format_parts([part]): round(effect, 7) for part, effect in self.effects.items()}
        return {
            "rule": RULE,
            "weights": self.method.weights,
            "windows": self.calibration.windows,
            "context": self.calibration.context,
            "backend": self.model.ops.describe(),
            "saturated": self.calibration.saturated,
            **({"effects": effects} if effects else {}),
        }


def parse_bf16(text: str | None, layers: int) -> Parts | float:
    """What ``Method.bf16`` should be: parts by name, or N of "auto:N"."""
    if not text:
        return frozenset()
    if not text.startswith(AUTO.rstrip(":")):
        return parse_parts(text, layers)
    try:
        count = float(text.removeprefix(AUTO))
    except ValueError:
        count = 0
    if not 0 < count <= layers:  # nor NaN
        raise InputError(f"{text}: give {AUTO}N with N above 0 and at most {layers} layers, as in {AUTO}0.5")
    return count


def make_recipe(
    load: Load,
    checkpoint: Checkpoint,
    config: LlamaConfig,
    precision: Precision,
    tokens: Sequence[int],
    method: Method,
    progress: Progress = lambda line: None,
    *,
    effects: Mapping[Part, float] = MappingProxyType({}),
) -> Made:
    """Choose the parts if they are not named, then calibrate; ``load`` may be called twice.

    ``effects``: those that were measured before, if they were.
    """
    layers = config.num_hidden_layers
    if isinstance(method.bf16, frozenset):
        bf16, effects = method.bf16, {}
    elif effects:
        bf16 = choose.choose_parts(effects, config, method.bf16)
    else:
        short = choose_windows(tokens, min(method.context, choose.CONTEXT), choose.WINDOWS)
        plain = _loaded_for(load, Fp8Recipe.unknown(layers, frozenset(all_parts(layers))), short, len(short))
        effects = choose.measure_parts(plain, checkpoint, precision.weight_scales, short, progress)
        del plain  # before the next is loaded
        bf16 = choose.choose_parts(effects, config, method.bf16)
        progress(f"in BF16: {format_parts(bf16) or 'nothing'}")
    windows = choose_windows(tokens, method.context, method.samples)
    by_gptq = method.weights == "gptq"
    model = _loaded_for(load, Fp8Recipe.unknown(layers, bf16), windows, len(windows) if by_gptq else 1)
    calibration = calibrate(
        model,
        tokens,
        context=method.context,
        samples=method.samples,
        progress=progress,
        gptq=(checkpoint, precision.weight_scales) if by_gptq else None,
    )
    return Made(model, calibration, method, effects)


def _loaded_for(load: Load, recipe: Fp8Recipe, windows: Sequence[Sequence[int]], at_once: int) -> Llama:
    """A model that takes so many of these windows in one pass."""
    window = len(windows[0])
    return load(recipe, at_once * pages_for(window) * PAGE_SIZE, at_once * window)
