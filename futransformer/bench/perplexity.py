"""What a quantised model costs in accuracy, beside the model it was made from.

    futransformer bench perplexity --model FOLDER --text FILE --precision int4,int4-kv4 [--baseline MODEL]
        [--label NAME] [--windows N] [--kernels DIR] ...

``--model`` is the baseline itself, whose weights are rounded to nearest as it is loaded, or a folder of codes that was
made from it. Every precision gives a row through decode if decode reads codes, one through prefill if that reads FP8,
both if neither does:

| field | what |
| --- | --- |
| ours | perplexity through the kernels, of all full windows (``--windows``: of the first) |
| rivals | the reference that rounds where the kernels do, and the same of the baseline in BF16 |
| nll_minus_* | paired differences of the tokens' -log p: mean, its standard error over tokens, deviation |
| noise_floor_... | the same of two references that add up in float32 and in float64 |
| agrees_with_reference | whether kernels are as near to it as docs/numerics.md demands |
| percent_over_bf16, percent_standard_error | how far the perplexity rises; its standard error is over windows |
| windows_minus_bf16 | the mean difference of each window, so that rows can be paired with each other |
| kl_divergence, top1_agreement | of the reference beside the baseline: see futransformer.comparison |
| layer_errors | of each layer's output |x - baseline's| / |baseline's|, the median over tokens of the first windows |
| model_sha256, baseline_sha256, text_sha256 | of weights (results.weights_sha256), and of the text |

A rotated residual stream has no layer errors: it is another one.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from futransformer.bench.accuracy import CONTEXT, perplexity_row, timed_score
from futransformer.bench.accuracy_fp8 import DoubleOps
from futransformer.bench.accuracy_int4 import ABREAST, BATCH, DecodeInPasses, DoubleDecodeInPasses, reading_as_decoding
from futransformer.bench.results import weights_sha256
from futransformer.checkpoint import load_checkpoint
from futransformer.comparison import compare, mean_over
from futransformer.generator.config import load_config
from futransformer.generator.errors import InputError
from futransformer.generator.json_reader import read_json
from futransformer.generator.precision import BF16, E4M3, Precision, get_precision
from futransformer.model import Llama
from futransformer.ops.interface import Stream
from futransformer.perplexity import Through, split_windows
from futransformer.quantize.description import DESCRIPTION_FILE, INT4_SECTION
from futransformer.reference import ReferenceOps
from futransformer.tokenizer import Tokenizer
from futransformer.weights import serving

WATCHED_WINDOWS = 4  # whose layers are compared
NEAREST = "rtn"  # how weights are rounded as they are loaded
SAME_ERRORS, SAME_DEVIATION = 3.0, 1.5  # how far kernels may be from the reference: docs/numerics.md


class WatchedOps(ReferenceOps):
    """The reference, which keeps what every layer gives while ``seen`` is a list."""

    seen: list[Tensor] | None = None

    def down(self, *args: Any, **options: Any) -> Stream:
        """See Ops.down."""
        stream = super().down(*args, **options)
        if self.seen is not None:
            self.seen.append(stream.residual.to(torch.float32, copy=True))  # written over by the next
        return stream


class WatchedInPasses(WatchedOps, DecodeInPasses):
    """The same, rounding where decode does."""


@dataclass(frozen=True)
class Contenders:
    """A precision through one phase: the kernels, two references of its rounding, and the baseline's in BF16."""

    ours: Llama
    reference: Llama  # of WatchedOps, as the baseline's
    double: Llama
    baseline: Llama


def through_phases(precision: Precision) -> tuple[Through, ...]:
    """What a precision is measured through."""
    phases: tuple[Through, ...] = ("prefill",) if precision.prefill == E4M3 else ()
    phases += ("decode",) if precision.decodes_codes else ()
    return phases or ("prefill", "decode")


def case_of(model: str, precision: Precision, label: str, through: Through, windows: int) -> dict[str, str]:
    """The row's name, and its parts: what this phase reads, how that was made, and what the cache holds."""
    cache = precision.copy.suffix[1:] if precision.copy is not None and through == "decode" else precision.kv.name
    read = precision.prefill if through == "prefill" else precision.decode
    weights = {E4M3: "fp8", BF16: "bf16"}.get(read) or precision.name.removesuffix(precision.suffix)
    if through == "prefill":
        weights += "-promoted" * (precision.accumulation == "promoted")
    else:
        weights = weights.removeprefix("fp8-")
        weights += "" if precision.head == BF16 else f"-head{precision.head.bits}"
    how = "none" if read == BF16 and label == NEAREST else label  # a folder of codes is read dequantised
    case = f"perplexity/{model}/{weights}-{how}-{cache}/through={through}/ctx={CONTEXT}/windows={windows}"
    return {"case": case, "weights": weights, "label": how, "cache": cache}


def described(folder: Path, through: Through) -> dict[str, Any]:
    """What the folder says of how its weights were made, for this phase; of one that says nothing: nothing."""
    path = folder / DESCRIPTION_FILE
    content = read_json(path) if path.is_file() else {}
    section: dict[str, Any] = content.get("fp8_scales" if through == "prefill" else INT4_SECTION) or {}
    kept = {key: value for key, value in section.items() if key not in ("errors", "effects", "saturated")}
    if through == "prefill" and content.get("bf16_layers"):
        kept["bf16_layers"] = content["bf16_layers"]
    return kept


def label_of(folder: Path, method: dict[str, Any]) -> str:
    """How weights were made: as the folder says, by its format, or to nearest when they are loaded."""
    stored_as = load_checkpoint(folder, load_config(folder)).format
    return str(
        method.get("method")
        or method.get("weights")
        or (NEAREST if stored_as is None else stored_as.title.split()[0].lower())
    )


def measure(
    made: Contenders, tokens: list[int], through: Through, windows: int | None, *, rotated: bool = False
) -> dict[str, Any]:
    """A row without its name; the models read their first ``windows`` windows, None: all."""
    ours, seconds = timed_score(
        made.ours, tokens, windows=windows, batch=ABREAST if through == "decode" else BATCH, through=through
    )
    compared = compare(made.reference, made.baseline, tokens, context=CONTEXT, windows=windows, batch=BATCH)
    double, _ = timed_score(made.double, tokens, windows=windows, batch=BATCH)
    row = perplexity_row("", ours, {"reference": compared.result, "reference-bf16": compared.baseline}, seconds)
    floor = perplexity_row("", compared.result, {"float64": double}, 0)["nll_minus_float64"]
    row["noise_floor_reference_float32_minus_float64"] = floor
    row["agrees_with_reference"] = agrees(row["nll_minus_reference"], floor)
    difference = (ours.nll - compared.baseline.nll).double()
    rise = mean_over(difference, ours.windows)
    row["percent_over_bf16"] = round(100 * math.expm1(difference.mean().item()), 4)
    if rise["standard_error"] is not None:
        row["percent_standard_error"] = round(100 * rise["standard_error"] * math.exp(difference.mean().item()), 4)
    figures = compared.figures()
    row |= {name: figures[name] for name in ("kl_divergence", "top1_agreement")}
    row["windows_minus_bf16"] = [round(mean.item(), 6) for mean in difference.view(ours.windows, -1).mean(1)]
    if not rotated:
        row["layer_errors"] = layer_errors(made.reference, made.baseline, tokens)
    return row


def agrees(difference: dict[str, float], floor: dict[str, float]) -> bool:
    """Whether kernels are as near to the reference as another order of summation would be."""
    near = abs(difference["mean"]) <= SAME_ERRORS * difference["standard_error"]
    return near and difference["deviation"] <= SAME_DEVIATION * floor["deviation"]


def layer_errors(model: Llama, baseline: Llama, tokens: list[int]) -> list[float]:
    """Of every layer the median over tokens of its output's relative distance from the baseline's."""
    windows = split_windows(tokens, CONTEXT, WATCHED_WINDOWS)
    seen: list[list[Tensor]] = []
    for watched in (model, baseline):
        assert isinstance(watched.ops, WatchedOps)
        watched.ops.seen = []
        watched.prefill(windows)
        watched.keep([])
        seen.append(watched.ops.seen)
        watched.ops.seen = None
    # a prefill of several passes goes through all layers in each
    layers = [
        [torch.cat(of[index :: model.config.num_hidden_layers]) for of in seen]
        for index in range(model.config.num_hidden_layers)
    ]
    return [float(f"{((x - y).norm(dim=1) / y.norm(dim=1)).median().item():.4g}") for x, y in layers]


def rows(
    model: Path,
    text: str,
    precisions: Sequence[str],
    *,
    baseline: Path | None = None,
    label: str | None = None,
    windows: int | None = None,
    kernels: Path | None = None,
) -> Iterator[dict[str, Any]]:
    """Measure a folder on a text in several precisions, which give their rows one after another.

    ``kernels`` is a folder of exports, named BASELINE-PRECISION, of BF16 BASELINE.
    """
    origin = baseline or model
    config, checkpoint = load_config(model), load_checkpoint(model, load_config(model))
    if baseline is None and checkpoint.format is not None:
        raise InputError(f"{model} is quantised ({checkpoint.format.title}): name what it was made from by --baseline")
    if load_config(origin).heads != config.heads or load_config(origin).num_hidden_layers != config.num_hidden_layers:
        raise InputError(f"--baseline {origin} has another shape than {model}: name the model that it was made from")
    name = load_config(origin).name.lower().removesuffix("-instruct")
    tokens = Tokenizer(origin).encode(text)
    count = len(split_windows(tokens, CONTEXT, windows))
    known = {
        "model_sha256": weights_sha256(model),
        "baseline_sha256": weights_sha256(origin),
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
    }
    torch.backends.cuda.matmul.allow_tf32 = False
    for asked in map(get_precision, precisions):
        precision, _ = serving(checkpoint, asked)
        exported = name if precision.name == "bf16" else f"{name}-{precision.name}"
        folder = kernels / exported if kernels else None
        options: dict[str, Any] = {"cache_tokens": ABREAST * (CONTEXT + 64), "precision": asked}
        ours = Llama.from_pretrained(model, kernels=folder, device="cuda", **options)
        for through in through_phases(asked):
            method = described(model, through)
            made = contenders(ours, model, origin, asked, through)
            row = measure(made, tokens, through, windows, rotated=any("rotation" in key for key in method))
            case = case_of(name, asked, label or label_of(model, method), through, count)
            yield row | case | known | ({"method": method} if method else {})


def contenders(ours: Llama, model: Path, origin: Path, precision: Precision, through: Through) -> Contenders:
    """Load what ours is compared with, on its device."""
    cache_tokens = BATCH * (CONTEXT + 64)

    def reference(folder: Path, ops: type[ReferenceOps], named: Precision) -> Llama:
        made = ops(ours.config, device=ours.ops.device, copy=named.copy)
        made.query_block = CONTEXT  # a GPU waits for launches here, not for products: half of them are attention's
        loaded = Llama.from_pretrained(folder, ops=made, precision=named, cache_tokens=cache_tokens)
        return reading_as_decoding(loaded) if through == "decode" else loaded

    once, double = (WatchedInPasses, DoubleDecodeInPasses) if through == "decode" else (WatchedOps, DoubleOps)
    return Contenders(
        ours,
        reference(model, once, precision),
        reference(model, double, precision),
        reference(origin, once, get_precision("bf16")),
    )
