"""The accuracy of INT4 decode weights: what is compared with what, on the reference in the place of the kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from futransformer.bench import accuracy, accuracy_int4
from futransformer.bench.accuracy_fp8 import DoubleOps
from futransformer.bench.accuracy_int4 import DecodeInPasses, DoubleDecodeInPasses, reading_as_decoding
from futransformer.generator.config import load_config
from futransformer.generator.precision import get_precision
from futransformer.model import Llama
from futransformer.perplexity import score
from futransformer.quantize.recipe import Fp8Recipe
from futransformer.reference import ReferenceOps

CONTEXT = 8
F32 = torch.float32
TOKENS: list[int] = torch.randint(256, (34 * CONTEXT + 3,), generator=torch.Generator().manual_seed(3)).tolist()


def load(
    folder: Path, ops: type[ReferenceOps], precision: str = "int4-g32-asym", dtype: torch.dtype = torch.bfloat16
) -> Llama:
    made = ops(load_config(folder), dtype=dtype, copy=get_precision(precision).copy)
    return Llama.from_pretrained(folder, ops=made, precision=precision, cache_tokens=64 * 64)


@pytest.fixture
def rows(tiny_base_model: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    for module in (accuracy, accuracy_int4):
        monkeypatch.setattr(module, "CONTEXT", CONTEXT)
    kinds = {"float32": DecodeInPasses, "float64": DoubleDecodeInPasses}
    references = {kind: reading_as_decoding(load(tiny_base_model, ops)) for kind, ops in kinds.items()}
    ours, bf16 = load(tiny_base_model, ReferenceOps), load(tiny_base_model, ReferenceOps, "bf16")
    return accuracy_int4.perplexity_rows(ours, references, bf16, TOKENS, "tiny/int4-g32-asym-rtn-bf16")


def test_reading_in_passes_is_decoding(tiny_base_model: Path) -> None:
    """Nothing differs but the order of sums, which can move a value across a rounding boundary."""
    options: dict[str, Any] = {"context": 64, "batch": 2}
    decoded = score(load(tiny_base_model, ReferenceOps), TOKENS, through="decode", **options).nll
    read = score(reading_as_decoding(load(tiny_base_model, DecodeInPasses)), TOKENS, **options).nll
    prefill = score(load(tiny_base_model, ReferenceOps), TOKENS, **options).nll
    assert (read - decoded).std() < 0.01 * (prefill - decoded).std()


@pytest.mark.parametrize("precision", ["int4-g32-asym-kv4", "bf16-kv4-min", "bf16-kv8-kv4-head-h64"])
def test_a_copy_is_attended_in_passes_as_in_decode(tiny_base_model: Path, precision: str) -> None:
    """In float32, where no rounding but that to codes hides a difference: what is left is the order of sums, and a code
    that falls the other way by it, for the tokens behind.
    """
    options: dict[str, Any] = {"context": 32, "windows": 4}
    read = reading_as_decoding(load(tiny_base_model, DecodeInPasses, precision, F32))
    one = score(load(tiny_base_model, ReferenceOps, precision, F32), TOKENS, through="decode", **options).nll
    other = score(read, TOKENS, **options).nll
    main = score(load(tiny_base_model, ReferenceOps, precision, F32), TOKENS, **options).nll
    apart = (other - one).abs()
    assert apart.median() < 64 * 2.0**-24 * one.max()
    assert apart.max() < 0.1 * (main - one).abs().max()


def test_every_batch_is_told_beside_the_reference_and_bf16(rows: list[dict[str, Any]]) -> None:
    base = f"perplexity/tiny/int4-g32-asym-rtn-bf16/through=decode/ctx={CONTEXT}/windows"
    assert [row["case"] for row in rows] == [
        f"{base}={windows}/B={batch}" for windows, batch in ((34, 64), (4, 1), (4, 4), (8, 8), (32, 32))
    ]
    for row in rows:
        assert row["nll_minus_reference-bf16"]["deviation"] > 10 * row["nll_minus_reference"]["deviation"]
        apart = 100 * (row["ours"] / row["rivals"]["reference-bf16"] - 1)
        assert row["percent_over_bf16"] == pytest.approx(apart, abs=0.01)
    assert set(rows[0]["noise_floor_reference_float32_minus_float64"]) == {"mean", "standard_error", "deviation"}
    assert all("noise_floor_reference_float32_minus_float64" not in row for row in rows[1:])


def test_the_products_own_path_is_read_written_and_read_again(
    tiny_base_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (accuracy, accuracy_int4):
        monkeypatch.setattr(module, "CONTEXT", 32)

    def load(ops: type[ReferenceOps]) -> Llama:
        made = ops(load_config(tiny_base_model))
        return Llama.from_pretrained(
            tiny_base_model, ops=made, precision="fp8-int4", recipe=Fp8Recipe.unknown(2), cache_tokens=64 * 64
        )

    references = {"float32": load(ReferenceOps), "float64": load(DoubleOps)}
    (row,) = accuracy_int4.turn_rows(load(ReferenceOps), references, TOKENS, "tiny/fp8-int4-rtn-bf16")
    assert row["case"] == "perplexity/tiny/fp8-int4-rtn-bf16/through=turns/ctx=32/windows=8/B=8"
    assert row["tokens"] == 8 * 31
    assert row["nll_minus_reference"] == {"mean": 0, "standard_error": 0, "deviation": 0}
    assert row["noise_floor_reference_float32_minus_float64"].keys() == {"mean", "standard_error", "deviation"}
