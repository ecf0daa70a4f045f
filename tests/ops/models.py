"""The shapes that the kernels are tested at, and their exports for a machine with a GPU and no tool chain.

``python -m tests.ops.models FOLDER [NAME...]`` builds and exports the kernels of every model that the GPU tests name,
or of those named here, for ``pytest -m gpu --kernels FOLDER``.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from futransformer.build.compile import build_kernels
from futransformer.build.export import export
from futransformer.build.manifest import ModelManifest
from futransformer.build.settings import BuildSettings
from futransformer.generator.config import LlamaConfig, load_config
from futransformer.generator.heuristics import BATCH_TILES, MAX_ROWS, gemm_specs
from futransformer.generator.plan import Plan, make_plan
from futransformer.generator.precision import BF16, E4M3, Accumulation, Granularity, Precision, get_precision
from futransformer.generator.specs import GemmSpec, KernelSpec, Tile

# Shapes that no one has published, each for several oddities at once.
MADE_UP: dict[str, LlamaConfig] = {
    config.name: config
    for config in (
        # 16 query heads a key/value head; hidden_size 2048
        replace(load_config("llama-3.2-1b"), name="group16", num_attention_heads=32, num_key_value_heads=2),
        # 5 query heads a key/value head; hidden_size 5120
        replace(load_config("llama-2-13b"), name="group5", num_key_value_heads=8),
        # Attention is wider than the residual stream (24 heads over 3 of 64 features), gate_up and the head end in a
        # part of a tile, and the vocabulary is not even
        replace(
            load_config("smollm2-360m"),
            name="odd",
            intermediate_size=2624,
            num_attention_heads=24,
            num_key_value_heads=3,
            vocab_size=32_001,
        ),
    )
}

# The same shapes where a prompt is read in FP8, parts of layers in BF16; the odd one with a scale a weight row and
# promoted sums.
_BF16, _FP8 = get_precision("bf16"), get_precision("fp8")
FP8: dict[str, Precision] = {
    "smollm2-135m-fp8": _FP8,
    "llama-3.1-8b-fp8": _FP8,
    "odd-fp8": get_precision("fp8-promoted"),
}
# The same over a cache of E4M3; the larger one's prompts are read in FP8 as well.
KV8: dict[str, Precision] = {
    "smollm2-135m-kv8": get_precision("bf16-kv8"),
    "group16-kv8": get_precision("bf16-kv8"),
    "llama-3.1-8b-kv8": get_precision("fp8-kv8"),
}

# Of these every kernel is tested; of the others, which are there for their shapes, the prefill GEMM of the most rows
# and the decode GEMM of the fewest serve all. That saves two kernels of three.
WHOLE = ("smollm2-135m", "llama-3.1-8b", "odd", "smollm2-135m-fp8", "llama-3.1-8b-fp8")
MODELS = (*WHOLE, "odd-fp8", "llama-2-7b", "llama-3-70b", "llama-3.2-3b", "group16", "group5", *KV8)

# Prefill GEMMs alone, of shapes that no model may have: the last step of K is a part of 64 (40, 8 and 16 of it), and so
# is the last tile of N. All kernels that are chosen for them, and one of every kind of cluster and schedule; a split of
# K = 1000 gives each half eight steps, of K = 72 one.


def _tail(op: str, n: int, k: int, tile: tuple[int, int], cluster: tuple[int, int, int], schedule: str) -> GemmSpec:
    return GemmSpec(op, BF16, n, k, Tile(*tile, 64), *cluster, stages=3, schedule=schedule, raster=2)


# Of FP8 the same in steps of 128: 576 and 144 end in a half and an eighth of one.
def _fp8_tail(
    op: str,
    tile: tuple[int, int],
    cluster: tuple[int, int, int],
    schedule: str,
    weight_scales: Granularity,
    accumulation: Accumulation = "fast",
) -> GemmSpec:
    n, k = (896, 144) if op == "gate_up" else (416, 576)
    plain = GemmSpec(op, E4M3, n, k, Tile(*tile, 128), *cluster, stages=3, schedule=schedule, raster=2)
    return replace(plain, weight_scales=weight_scales, accumulation=accumulation)


TAILS: tuple[GemmSpec, ...] = tuple(
    dict.fromkeys(
        (
            *gemm_specs("o", 416, 1000, _BF16).values(),
            *gemm_specs("gate_up", 896, 72, _BF16).values(),
            *gemm_specs("lm_head", 5312, 4112, _BF16).values(),
            _tail("o", 416, 1000, (128, 160), (1, 2, 1), "pingpong"),
            _tail("o", 416, 1000, (192, 128), (2, 1, 1), "pingpong"),
            _tail("o", 416, 1000, (256, 160), (1, 2, 1), "cooperative"),
            _tail("o", 416, 1000, (256, 96), (1, 1, 2), "cooperative"),
            _tail("o", 416, 1000, (64, 64), (1, 1, 2), "cooperative"),
            _tail("gate_up", 896, 72, (128, 192), (2, 1, 1), "pingpong"),
            _tail("gate_up", 896, 72, (128, 128), (1, 1, 2), "cooperative"),
            _fp8_tail("o", (128, 160), (1, 2, 1), "pingpong", "tensor"),
            _fp8_tail("o", (192, 128), (2, 1, 1), "pingpong", "channel"),
            _fp8_tail("o", (256, 160), (1, 2, 1), "cooperative", "tensor"),
            _fp8_tail("o", (256, 96), (1, 1, 2), "cooperative", "channel"),
            _fp8_tail("o", (64, 64), (1, 1, 2), "cooperative", "tensor"),
            _fp8_tail("gate_up", (128, 192), (2, 1, 1), "pingpong", "channel"),
            _fp8_tail("gate_up", (128, 128), (1, 1, 2), "cooperative", "tensor"),
            _fp8_tail("o", (128, 128), (2, 1, 1), "cooperative", "tensor", "promoted"),
            _fp8_tail("o", (128, 96), (1, 2, 1), "pingpong", "channel", "promoted"),
            _fp8_tail("gate_up", (64, 64), (1, 1, 2), "cooperative", "tensor", "promoted"),
        )
    )
)
TAILS_NAME = "tails"


def model_config(name: str) -> LlamaConfig:
    """Return a named configuration, published or made up here."""
    name = name.removesuffix("-fp8").removesuffix("-kv8")
    return MADE_UP[name] if name in MADE_UP else load_config(name)


def precision_of(name: str) -> Precision:
    """The precision of a model's tested kernels."""
    return {**FP8, **KV8}.get(name, _BF16)


def tested_plan(name: str) -> Plan:
    """The kernels of a model that are tested."""
    precision = precision_of(name)
    plan = make_plan(model_config(name), precision, mixed=name in FP8)
    if name in WHOLE:
        return plan
    prefill, prefill_bf16 = (
        {op: {MAX_ROWS: by_rows[MAX_ROWS]} for op, by_rows in gemms.items()}
        for gemms in (plan.prefill, plan.prefill_bf16)
    )
    decode = {op: {BATCH_TILES[0]: by_batch[BATCH_TILES[0]]} for op, by_batch in plan.decode.items()}
    return replace(plan, prefill=prefill, prefill_bf16=prefill_bf16, decode=decode)


def specs_of(name: str) -> tuple[KernelSpec, ...]:
    """The kernels of one export."""
    return TAILS if name == TAILS_NAME else tested_plan(name).specs()


def main(folder: Path, names: tuple[str, ...]) -> None:
    """Build and export."""
    settings = BuildSettings.from_environment()
    for name in names or (*MODELS, TAILS_NAME):
        records = build_kernels(specs_of(name), settings=settings, progress=print)
        export(ModelManifest(name, precision_of(name).name, records), folder / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]), tuple(sys.argv[2:]))
