"""What INT4 decode weights cost a real model, and whether its kernels agree with the reference of that quantisation.

    futransformer bench accuracy --precision int4-g32-asym --model MODEL --text FILE [--kernels DIR] ...

Every token of the text is decoded, 64 windows abreast, and the first windows at 1, 4, 8 and 32 abreast. The reference
has decode's weights and rounding points, but reads a window in one pass, which is faster by far. Beside the difference
of each token stands how far two references are apart that accumulate in float32 and in float64: a value near a rounding
boundary falls either way.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from futransformer.bench.accuracy import CONTEXT, first, perplexity_row, timed_score
from futransformer.bench.accuracy_fp8 import DoubleOps
from futransformer.blocks import LayerWeights
from futransformer.generator.config import load_config
from futransformer.generator.precision import get_precision
from futransformer.model import Llama
from futransformer.ops.interface import Fp8Output, Phase, Stream
from futransformer.reference import ReferenceOps
from futransformer.tokenizer import Tokenizer

BATCH = 8  # windows a pass of a reference
ABREAST = 64  # windows that are decoded together
PARTS = (1, 4, 8, 32)
PART_WINDOWS = 16  # of a part, or as many as it has abreast


class DecodeInPasses(ReferenceOps):
    """The reference, whose prefill rounds where decode does: the residual stream is float32, x its rounded copy."""

    def gather_rows(
        self,
        phase: Phase,
        table: Tensor,
        indices: Tensor,
        *,
        fp8: Fp8Output | None = None,
        gain: Tensor | None = None,
    ) -> Stream:
        """See Ops.gather_rows."""
        return super().gather_rows("decode", table, indices, fp8=fp8, gain=gain)

    def _add_linear(self, phase: Phase, *rest: Any) -> Stream:
        return super()._add_linear("decode", *rest)

    def lm_head(self, phase: Phase, x: Tensor, sumsq: Tensor, weight: Tensor) -> Tensor:
        """See Ops.lm_head; x is the residual stream, which a prefill's head reads."""
        return super().lm_head(phase, x.to(self.dtype), sumsq, weight)


class DoubleDecodeInPasses(DecodeInPasses, DoubleOps):
    """The same, whose products are summed in float64."""


def reading_as_decoding(model: Llama) -> Llama:
    """Let a model on such a reference read by the weights that it decodes by."""
    layers = []
    for layer in model.weights.layers:
        parts = {name: {**packed, "prefill": packed["decode"]} for name, packed in vars(layer).items()}
        layers.append(LayerWeights(**parts))
    model.weights = replace(model.weights, layers=layers)
    return model


def perplexity_rows(
    ours: Llama, references: dict[str, Llama], bf16: Llama, tokens: list[int], name: str
) -> list[dict[str, Any]]:
    """The whole text, then its first windows in other batches; ``name`` names model, weights, method and cache.

    ``references``: "float32" and "float64", which read as they decode; ``bf16`` reads through unquantised weights.
    """
    unquantised, _ = timed_score(bf16, tokens, batch=BATCH)
    same = {kind: timed_score(model, tokens, batch=BATCH)[0] for kind, model in references.items()}
    floor = perplexity_row("", same["float32"], {"float64": same["float64"]}, 0)["nll_minus_float64"]
    rows, windows = [], unquantised.windows
    for batch in (ABREAST, *PARTS):
        count = windows if batch == ABREAST else min(windows, max(PART_WINDOWS, batch))
        result, seconds = timed_score(ours, tokens, windows=count, batch=batch, through="decode")
        rivals = {"reference": first(same["float32"], count), "reference-bf16": first(unquantised, count)}
        case = f"perplexity/{name}/through=decode/ctx={CONTEXT}/windows={count}/B={batch}"
        row = perplexity_row(case, result, rivals, seconds)
        row["percent_over_bf16"] = round(100 * (result.perplexity / rivals["reference-bf16"].perplexity - 1), 3)
        rows.append(row)
    rows[0]["noise_floor_reference_float32_minus_float64"] = floor
    return rows


def rows(model: Path, text: str, precision: str, kernels: Path | None) -> list[dict[str, Any]]:
    """Measure a Hugging Face folder on a text; ``kernels`` is a folder of exports, named NAME-PRECISION."""
    config, row = load_config(model), get_precision(precision)
    name = config.name.lower().removesuffix("-instruct")
    options: dict[str, Any] = {"cache_tokens": ABREAST * (CONTEXT + 64), "precision": row}
    folder = kernels / f"{name}-{row.name}" if kernels else None
    ours = Llama.from_pretrained(model, kernels=folder, device="cuda", **options)
    torch.backends.cuda.matmul.allow_tf32 = False
    references = {
        kind: reading_as_decoding(Llama.from_pretrained(model, ops=ops(config, device=ours.ops.device), **options))
        for kind, ops in (("float32", DecodeInPasses), ("float64", DoubleDecodeInPasses))
    }
    bf16 = Llama.from_pretrained(
        model, ops=ReferenceOps(config, device=ours.ops.device), cache_tokens=options["cache_tokens"]
    )
    tokens = Tokenizer(model).encode(text)
    return perplexity_rows(ours, references, bf16, tokens, f"{name}/{row.name}-rtn-bf16")
