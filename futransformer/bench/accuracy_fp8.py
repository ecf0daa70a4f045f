"""What an FP8 prefill costs a real model, and whether its kernels agree with the reference of the same quantisation.

    futransformer bench accuracy --precision fp8 --model MODEL --text FILE [--kernels DIR] [--calibration FILE]
        [--recipe RECIPE ...]

Each recipe (how weights are rounded, and what stays in BF16: rtn, gptq+auto:4) is made on the kernels from another
text. Then perplexity is taken on the whole of this one, with frozen and with running scales, beside the BF16 reference.
With the last recipe's frozen scales kernels and reference are compared token by token; beside that stands how far two
references are apart that round at the same points and differ in how they accumulate alone, in float32 and in float64: a
value near the boundary of two codes falls either way.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast, get_args

import torch
from torch import Tensor

from futransformer.bench.accuracy import CONTEXT, perplexity_row, timed_score
from futransformer.checkpoint import load_checkpoint
from futransformer.fp8_scaling import Fp8Scales, Fp8Scaling
from futransformer.generator.config import LlamaConfig, load_config
from futransformer.generator.errors import InputError
from futransformer.generator.precision import get_precision
from futransformer.layer_parts import Part, format_parts
from futransformer.model import MAX_ROWS, Llama, make_ops, pick_device
from futransformer.perplexity import PerplexityResult
from futransformer.quantize.make import Method, Weights, make_recipe, parse_bf16
from futransformer.quantize.recipe import Fp8Recipe
from futransformer.reference import ReferenceOps
from futransformer.tokenizer import Tokenizer

BATCH = 8  # windows a pass: 8192 rows
SAMPLES = 32  # windows of the calibration text, of which GPTQ reads all in one pass
NEAREST = "rtn"  # what `futransformer calibrate` does without options


class DoubleOps(ReferenceOps):
    """The reference, whose products are summed in float64."""

    def _linear(self, x: Tensor, weight: Tensor, scale: Tensor | None) -> Tensor:
        sums = x.double() @ weight.double().T
        return (sums if scale is None else sums * scale).float()


def parse_recipe(text: str, config: LlamaConfig) -> Method:
    """WEIGHTS or WEIGHTS+PARTS, parts as `futransformer calibrate --bf16-layers` takes them."""
    weights, _, parts = text.partition("+")
    if weights not in get_args(Weights):
        raise InputError(f"--recipe {text}: begin with {' or '.join(get_args(Weights))}, as in gptq+auto:4")
    bf16 = parse_bf16(parts, config.num_hidden_layers)
    return Method(bf16, cast("Weights", weights), context=CONTEXT, samples=SAMPLES)


def perplexity_rows(
    ours: Llama,
    references: dict[str, Llama],
    unquantised: PerplexityResult,
    tokens: list[int],
    name: str,
    calibration: dict[str, Any],
) -> list[dict[str, Any]]:
    """Frozen, then running scales, told with what they were calibrated on.

    ``references``: "float32" and "float64", of the same quantisation, or none to compare with.
    """
    same = {kind: timed_score(model, tokens, batch=BATCH)[0] for kind, model in references.items()}
    rows = []
    for mode in ("frozen", "running"):
        set_mode(ours, mode)
        result, seconds = timed_score(ours, tokens, batch=BATCH)
        rivals: dict[str, PerplexityResult] = {"reference-bf16": unquantised}
        if same and mode == "frozen":
            rivals = {"reference": same["float32"], **rivals}
        case = f"perplexity/{name}/through=prefill/ctx={CONTEXT}/windows={result.windows}/scales={mode}"
        row = perplexity_row(case, result, rivals, seconds)
        row |= {"windows_a_pass": BATCH, "calibration": calibration}
        row["percent_over_bf16"] = round(100 * (result.perplexity / unquantised.perplexity - 1), 3)
        row["saturated"] = sum(scaling_of(ours).saturated().values())
        rows.append(row)
    if same:
        floor = perplexity_row("", same["float32"], {"float64": same["float64"]}, 0)["nll_minus_float64"]
        rows[0]["noise_floor_reference_float32_minus_float64"] = floor
    return rows


def set_mode(model: Llama, mode: Fp8Scales) -> None:
    """Begin anew from the calibrated scales, which stay or follow what is read."""
    scaling = scaling_of(model)
    scaling.mode = mode
    scaling.reset()


def scaling_of(model: Llama) -> Fp8Scaling:
    """The scales of a model with an FP8 prefill."""
    assert model.scaling is not None
    return model.scaling


def rows(
    model: Path, text: str, calibration: str, kernels: Path | None, recipes: Sequence[str] = (NEAREST,)
) -> list[dict[str, Any]]:
    """Measure a Hugging Face folder on a text; ``kernels`` is a folder of exports, one a config's name and -fp8."""
    config, precision = load_config(model), get_precision("fp8")
    methods = {recipe: parse_recipe(recipe, config) for recipe in recipes}
    name = config.name.lower().removesuffix("-instruct")
    tokenizer, checkpoint = Tokenizer(model), load_checkpoint(model, config)
    tokens, calibration_tokens = tokenizer.encode(text), tokenizer.encode(calibration)
    least = BATCH * (CONTEXT + 64)
    torch.backends.cuda.matmul.allow_tf32 = False
    ops = make_ops(
        config,
        precision,
        pick_device("cuda"),
        kernels=kernels / f"{name}-fp8" if kernels else None,
        mixed=any(method.bf16 for method in methods.values()),
    )

    def load(recipe: Fp8Recipe, cache_tokens: int, max_rows: int) -> Llama:
        return Llama.from_pretrained(
            model,
            ops=ops,
            precision=precision,
            recipe=recipe,
            cache_tokens=max(least, cache_tokens),
            max_rows=max(MAX_ROWS, max_rows),
        )

    def reference(kind: type[ReferenceOps], recipe: Fp8Recipe | None = None) -> Llama:
        named = "bf16" if recipe is None else precision
        made = kind(config, device=ops.device)
        return Llama.from_pretrained(model, ops=made, precision=named, recipe=recipe, cache_tokens=least)

    unquantised, _ = timed_score(reference(ReferenceOps), tokens, batch=BATCH)
    effects: Mapping[Part, float] = {}
    measured: list[dict[str, Any]] = []
    for recipe, method in methods.items():
        start = time.perf_counter()
        made = make_recipe(load, checkpoint, config, precision, calibration_tokens, method, effects=effects)
        effects = effects or made.effects
        found = made.calibration.recipe
        described = {
            "text_sha256": hashlib.sha256(calibration.encode()).hexdigest(),
            "recipe": recipe,
            "bf16_layers": format_parts(found.bf16),
            "seconds": round(time.perf_counter() - start, 1),
            **made.described(),
        }
        kinds = {"float32": ReferenceOps, "float64": DoubleOps} if recipe == recipes[-1] else {}
        references = {kind: reference(made_of, found) for kind, made_of in kinds.items()}
        of = f"{name}/fp8" if recipe == NEAREST else f"{name}/fp8/recipe={recipe}"
        measured += perplexity_rows(made.model, references, unquantised, tokens, of, described)
    return measured
