"""What INT4 or E4M3 decode weights cost a real model, and whether kernels agree with the reference of that rounding.

    futransformer bench accuracy --precision int4-g32-asym --model MODEL --text FILE [--kernels DIR] ...
    futransformer bench accuracy --precision fp8-int4-g32-asym ... [--calibration FILE]

Every token of the text is decoded, 64 windows abreast, and the first windows at 1, 4, 8 and 32 abreast. The reference
has decode's weights and rounding points, but reads a window in one pass, which is faster by far. Beside the difference
of each token stands how far two references are apart that accumulate in float32 and in float64: a value near a rounding
boundary falls either way.

With an FP8 prefill it is the product's own path that is measured, on a few windows: half of each is read in FP8, three
eighths are decoded on the cache that this wrote, and the rest is read as another turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
from futransformer.quantize.calibrate import calibrate
from futransformer.quantize.recipe import Fp8Recipe
from futransformer.reference import ReferenceOps
from futransformer.tokenizer import Tokenizer

BATCH = 8  # windows a pass of a reference
ABREAST = 64  # windows that are decoded together
PARTS = (1, 4, 8, 32)
PART_WINDOWS = 4  # of a part, or as many as it has abreast: at one abreast each is a thousand steps
TURN_WINDOWS = 8  # through both phases, where the references decode token by token


class DecodeInPasses(ReferenceOps):
    """The reference, whose prefill rounds where decode does: the residual stream is float32, x its rounded copy.

    Where the cache has an INT4 copy, a prefill attends that, as decode would.
    """

    gains: tuple[Tensor, ...] = ()  # of norms, where decode has them in x: in the order in which x is written
    _left: Iterator[Tensor] = iter(())
    _x: Tensor  # what decode's next projection reads; a prefill's reads the residual stream
    _written: Tensor | None = None  # the copy that qkv wrote last: attention is of the same layer

    def qkv(self, phase: Phase, x: Tensor, *rest: Any, kv_copy: Tensor | None = None, **options: Any) -> Tensor:
        """See Ops.qkv."""
        self._written = kv_copy
        return super().qkv("decode", self._x, *rest, kv_copy=kv_copy, **options)

    def gate_up(self, phase: Phase, x: Tensor, *rest: Any, **options: Any) -> Tensor:
        """See Ops.gate_up."""
        return super().gate_up("decode", self._x, *rest, **options)

    def _attention_to(
        self, k_pages: Tensor, v_pages: Tensor, kv_scale: Tensor | None, _: Tensor | None, *rest: Any
    ) -> Callable[[Tensor, int], Tensor]:
        return super()._attention_to(k_pages, v_pages, kv_scale, self._written, *rest)

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
        self._left = iter(self.gains)
        return self._keep(super().gather_rows("decode", table, indices, fp8=fp8, gain=next(self._left, gain)))

    def _add_linear(self, phase: Phase, *rest: Any) -> Stream:
        rest = (*rest[:-1], next(self._left, rest[-1]))  # the last is a gain
        return self._keep(super()._add_linear("decode", *rest))

    def _keep(self, stream: Stream) -> Stream:
        self._x = stream.x
        return stream

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
    head = {**model.weights.lm_head, "prefill": model.weights.lm_head["decode"]}
    model.weights = replace(model.weights, layers=layers, lm_head=head)
    assert isinstance(model.ops, DecodeInPasses)
    model.ops.gains = tuple(model.weights.gains)
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


def turn_rows(ours: Llama, references: dict[str, Llama], tokens: list[int], name: str) -> list[dict[str, Any]]:
    """The first windows through both phases; ``references``: "float32" and "float64", of the same recipe."""
    options: dict[str, Any] = {"windows": TURN_WINDOWS, "batch": TURN_WINDOWS, "through": "turns"}
    result, seconds = timed_score(ours, tokens, **options)
    same = {kind: timed_score(model, tokens, **options)[0] for kind, model in references.items()}
    case = f"perplexity/{name}/through=turns/ctx={CONTEXT}/windows={result.windows}/B={TURN_WINDOWS}"
    row = perplexity_row(case, result, {"reference": same["float32"]}, seconds)
    floor = perplexity_row("", same["float32"], {"float64": same["float64"]}, 0)["nll_minus_float64"]
    return [row | {"noise_floor_reference_float32_minus_float64": floor}]


def rows(
    model: Path, text: str, precision: str, kernels: Path | None, calibration: str | None = None
) -> list[dict[str, Any]]:
    """Measure a Hugging Face folder on a text; ``kernels`` is a folder of exports, named NAME-PRECISION.

    ``calibration`` is the text for the scales of an FP8 prefill.
    """
    config, row = load_config(model), get_precision(precision)
    name = config.name.lower().removesuffix("-instruct")
    options: dict[str, Any] = {"cache_tokens": ABREAST * (CONTEXT + 64), "precision": row}
    folder, called = kernels / f"{name}-{row.name}" if kernels else None, f"{name}/{row.name}-rtn-{row.kv.name}"
    tokens = Tokenizer(model).encode(text)
    torch.backends.cuda.matmul.allow_tf32 = False
    if calibration is not None:
        unknown = Fp8Recipe.unknown(config.num_hidden_layers)
        ours = Llama.from_pretrained(model, kernels=folder, device="cuda", recipe=unknown, **options)
        scales = calibrate(ours, Tokenizer(model).encode(calibration), context=CONTEXT).scales
        references = {
            kind: Llama.from_pretrained(
                model, ops=ops(config, device=ours.ops.device, copy=row.copy), recipe=Fp8Recipe(scales), **options
            )
            for kind, ops in (("float32", ReferenceOps), ("float64", DoubleOps))
        }
        return turn_rows(ours, references, tokens, called)
    ours = Llama.from_pretrained(model, kernels=folder, device="cuda", **options)
    references = {
        kind: reading_as_decoding(
            Llama.from_pretrained(model, ops=ops(config, device=ours.ops.device, copy=row.copy), **options)
        )
        for kind, ops in (("float32", DecodeInPasses), ("float64", DoubleDecodeInPasses))
    }
    bf16 = Llama.from_pretrained(
        model,
        precision="bf16",
        ops=ReferenceOps(config, device=ours.ops.device),
        cache_tokens=options["cache_tokens"],
    )
    return perplexity_rows(ours, references, bf16, tokens, called)
