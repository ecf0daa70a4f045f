"""What an FP8 prefill costs a real model, and whether its kernels agree with the reference of the same quantisation.

    futransformer bench accuracy --precision fp8 --model MODEL --text FILE [--kernels DIR] [--calibration FILE] ...

Scales are calibrated on the kernels with another text, then perplexity is taken on the whole of this one, with frozen
and with running scales, beside the BF16 reference's. With frozen scales kernels and reference are compared token by
token; beside that stands how far two references are apart that round at the same points and differ in how they
accumulate alone, in float32 and in float64: a value near the boundary of two codes falls either way.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from futransformer.bench.accuracy import CONTEXT, perplexity_row, timed_score
from futransformer.fp8_scaling import Fp8Scales, Fp8Scaling
from futransformer.generator.config import load_config
from futransformer.generator.precision import get_precision
from futransformer.model import Llama
from futransformer.perplexity import PerplexityResult
from futransformer.quantize.calibrate import calibrate
from futransformer.quantize.recipe import Fp8Recipe
from futransformer.reference import ReferenceOps
from futransformer.tokenizer import Tokenizer

BATCH = 8  # windows a pass: 8192 rows


class DoubleOps(ReferenceOps):
    """The reference, whose products are summed in float64."""

    def _linear(self, x: Tensor, weight: Tensor, scale: Tensor | None) -> Tensor:
        sums = x.double() @ weight.double().T
        return (sums if scale is None else sums * scale).float()


def perplexity_rows(
    ours: Llama,
    references: dict[str, Llama],
    bf16: Llama,
    tokens: list[int],
    name: str,
    calibration: dict[str, Any],
) -> list[dict[str, Any]]:
    """Frozen, then running scales, told with what they were calibrated on.

    ``references``: "float32" and "float64", of the same quantisation.
    """
    unquantised, _ = timed_score(bf16, tokens, batch=BATCH)
    same = {kind: timed_score(model, tokens, batch=BATCH)[0] for kind, model in references.items()}
    rows = []
    for mode in ("frozen", "running"):
        set_mode(ours, mode)
        result, seconds = timed_score(ours, tokens, batch=BATCH)
        rivals: dict[str, PerplexityResult] = {"reference-bf16": unquantised}
        if mode == "frozen":
            rivals = {"reference": same["float32"], **rivals}
        case = f"perplexity/{name}/fp8/through=prefill/ctx={CONTEXT}/windows={result.windows}/scales={mode}"
        row = perplexity_row(case, result, rivals, seconds)
        row |= {"windows_a_pass": BATCH, "calibration": calibration}
        row["percent_over_bf16"] = round(100 * (result.perplexity / unquantised.perplexity - 1), 3)
        row["saturated"] = sum(scaling_of(ours).saturated().values())
        rows.append(row)
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


def rows(model: Path, text: str, calibration: str, kernels: Path | None) -> list[dict[str, Any]]:
    """Measure a Hugging Face folder on a text; ``kernels`` is a folder of exports, one a config's name and -fp8."""
    config = load_config(model)
    name = config.name.lower().removesuffix("-instruct")
    options: dict[str, Any] = {"cache_tokens": BATCH * (CONTEXT + 64), "precision": get_precision("fp8")}
    tokenizer = Tokenizer(model)
    ours = Llama.from_pretrained(
        model,
        kernels=kernels / f"{name}-fp8" if kernels else None,
        device="cuda",
        recipe=Fp8Recipe.unknown(config.num_hidden_layers),
        **options,
    )
    found = calibrate(ours, tokenizer.encode(calibration), context=CONTEXT)
    described = {
        "text_sha256": hashlib.sha256(calibration.encode()).hexdigest(),
        "windows": found.windows,
        "context": found.context,
    }
    torch.backends.cuda.matmul.allow_tf32 = False
    references = {
        kind: Llama.from_pretrained(model, ops=ops(config, device=ours.ops.device), recipe=found.recipe, **options)
        for kind, ops in (("float32", ReferenceOps), ("float64", DoubleOps))
    }
    bf16 = Llama.from_pretrained(
        model, ops=ReferenceOps(config, device=ours.ops.device), cache_tokens=options["cache_tokens"]
    )
    return perplexity_rows(ours, references, bf16, tokenizer.encode(text), name, described)
