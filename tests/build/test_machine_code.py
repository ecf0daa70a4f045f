"""Every kind of kernel, compiled: it is made of the instructions that its spec promises, and keeps to its registers.

The small model gives one kernel of every kind, epilogue and batch tile; 8B adds what only larger shapes have: clusters,
head_dim 128, many row tiles a block. All are compiled together, by as many compilers as the machine can run.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import TypeVar

import pytest

from futransformer.build.compile import BuildEvent, build_kernels
from futransformer.build.manifest import KernelRecord
from futransformer.build.sass import count_instructions, instructions, occurrences
from futransformer.build.settings import BuildSettings
from futransformer.generator.config import load_config
from futransformer.generator.heuristics import MAX_ROWS
from futransformer.generator.plan import Plan, make_plan
from futransformer.generator.precision import BF16
from futransformer.generator.specs import GemmSpec, KernelSpec
from futransformer.generator.specs.decode_gemm import SCHEDULER_REGISTERS
from tests.ops.models import TAILS

SomeSpec = TypeVar("SomeSpec", bound=KernelSpec)


def one_of_each(plan: Plan) -> tuple[KernelSpec, ...]:
    """All of a plan but most GEMMs, of which each projection gives the next batch tile or number of rows."""

    def in_turn(gemms: Mapping[str, Mapping[int, SomeSpec]]) -> list[SomeSpec]:
        return [list(by_rows.values())[index % len(by_rows)] for index, by_rows in enumerate(gemms.values())]

    return (
        *plan.gather_rows.values(),
        *in_turn(plan.prefill),
        plan.attention_prefill,
        *in_turn(plan.decode),
        plan.attention_decode,
        plan.argmax,
        plan.argmax_parts,
        plan.sample,
        plan.step_begin,
        plan.step_end,
    )


SMALL = make_plan(load_config("smollm2-135m"), "bf16")
LARGE, LARGE_FP8, LARGE_INT4, LARGE_KV8, LARGE_KV4 = (
    make_plan(load_config("llama-3.1-8b"), precision) for precision in ("bf16", "fp8", "int4", "fp8-kv8", "bf16-kv4")
)
ASYMMETRIC = make_plan(load_config("llama-3.1-8b"), "int4-g64-asym")
INT4_DECODE = (
    LARGE_INT4.decode["gate_up"][4],
    LARGE_INT4.decode["qkv"][8],
    LARGE_INT4.decode["gate_up"][8],
    LARGE_INT4.decode["o"][16],
    LARGE_INT4.decode["gate_up"][16],
    LARGE_INT4.decode["down"][32],
    ASYMMETRIC.decode["down"][8],
    LARGE_INT4.decode["qkv"][32],
    LARGE_INT4.decode["gate_up"][32],
    LARGE_INT4.decode["gate_up"][64],
    ASYMMETRIC.decode["gate_up"][64],
    # Units of less than 128 k, and zero points, leave lanes that load x the fewest registers.
    ASYMMETRIC.decode["o"][8],
    ASYMMETRIC.decode["o"][32],
    make_plan(load_config("llama-3-70b"), "int4-g64-asym").decode["qkv"][16],
    make_plan(load_config("llama-3.2-3b"), "int4-asym").decode["down"][8],
    make_plan(load_config("llama-3.1-8b"), "int4-g32-kv4-head").decode["qkv"][16],
    make_plan(load_config("llama-3.1-405b"), "int4-g32").decode["qkv"][32],
    make_plan(load_config("llama-3.1-8b"), "int4-g64-gain").decode["o"][8],
    # Of a copy too: by lanes, of which two blocks share a multiprocessor, and by warpgroups.
    make_plan(load_config("llama-3.1-8b"), "int4-asym-kv4").decode["qkv"][16],
    make_plan(load_config("llama-3.1-8b"), "int4-g64-asym-kv4").decode["qkv"][32],
)
# Prefill's writers of an INT4 copy: a tile's sums, and K and V behind them, in the registers that there are.
COPIES = tuple(
    make_plan(load_config(model), precision).prefill["qkv"][MAX_ROWS]
    for model, precision in (
        ("llama-3.1-8b", "bf16-kv4"),
        ("llama-3.1-8b", "fp8-kv8-kv4-min"),
        ("llama-3.1-8b", "fp8-kv4-head-h128"),
        ("smollm2-135m", "bf16-kv4"),
    )
)
LARGE_FP8_DECODE = make_plan(load_config("llama-3.1-8b"), "bf16-fp8-head8")
FP8_DECODE = (
    LARGE_FP8_DECODE.decode["gate_up"][16],
    LARGE_FP8_DECODE.decode["o"][16],
    LARGE_FP8_DECODE.decode["qkv"][32],
    LARGE_FP8_DECODE.decode["gate_up"][32],
    LARGE_FP8_DECODE.decode["down"][64],
    LARGE_FP8_DECODE.decode["lm_head"][8],
)
LAYERS = [
    make_plan(load_config(model), precision).decode_layers
    for model, precision in (
        ("llama-3.1-8b", "int4-kv4"),
        ("llama-3-70b", "int4-kv4"),
        ("llama-3.2-1b", "int4-g32-asym-kv4-head-h64"),
    )
]
assert all(LAYERS)
PLANNED = (
    *one_of_each(SMALL),
    *(spec for spec in LAYERS if spec is not None),
    *LARGE.prefill["qkv"].values(),
    *LARGE.prefill["gate_up"].values(),
    LARGE.prefill["down"][MAX_ROWS],
    LARGE.attention_prefill,
    LARGE.decode["qkv"][32],
    LARGE.decode["gate_up"][32],
    LARGE.attention_decode,
    LARGE_FP8.prefill["gate_up"][MAX_ROWS],
    LARGE_FP8.prefill["down"][MAX_ROWS],
    LARGE_FP8.gather_rows["prefill_fp8"],
    LARGE_FP8.attention_prefill,
    *INT4_DECODE,
    *FP8_DECODE,
    LARGE_KV8.prefill["qkv"][MAX_ROWS],
    LARGE_KV8.attention_prefill,
    LARGE_KV8.decode["qkv"][32],
    LARGE_KV8.attention_decode,
    LARGE_KV4.decode["qkv"][32],
    LARGE_KV4.attention_decode,
    *COPIES,
)


def schedule(spec: KernelSpec) -> tuple[str, tuple[int, int, int]] | None:
    """How a prefill GEMM shares out its work; None of other kernels."""
    return (spec.schedule, spec.cluster) if isinstance(spec, GemmSpec) else None


# Schedules that the plans happen not to choose, each once; and one that adds its stages in float32.
IN_BF16 = [spec for spec in TAILS if spec.element == BF16]
OTHERS = {schedule(spec): spec for spec in IN_BF16 if schedule(spec) not in map(schedule, PLANNED)}
PROMOTED = next(spec for spec in TAILS if spec.accumulation == "promoted")
CHOSEN = tuple(dict.fromkeys((*PLANNED, *OTHERS.values(), PROMOTED)))  # numbers of rows may share a kernel


@pytest.fixture(scope="module")
def built(request: pytest.FixtureRequest) -> Mapping[str, KernelRecord]:
    capture = request.config.pluginmanager.getplugin("capturemanager")

    def progress(event: BuildEvent) -> None:
        if not event.cached:  # minutes, the first time
            with capture.global_and_fixture_disabled() if capture else nullcontext():
                print(f"\n{event}", end="", flush=True)

    records = build_kernels(CHOSEN, settings=BuildSettings.from_environment(), progress=progress)
    return {record.name: record for record in records}


@pytest.mark.compile
@pytest.mark.parametrize("spec", CHOSEN, ids=lambda spec: spec.name)
def test_a_kernel_is_made_of_what_its_spec_promises(built: Mapping[str, KernelRecord], spec: KernelSpec) -> None:
    record = built[spec.name]
    counts = count_instructions(record.cubin, BuildSettings.from_environment())
    for instruction in spec.instructions:
        assert occurrences(counts, instruction), f"no {instruction}"
    for instruction in ("LDL", "STL"):
        assert not occurrences(counts, instruction), f"{instruction}: local memory"
    if isinstance(spec, GemmSpec):
        assert occurrences(counts, spec.wgmma)
        shares_tiles = spec.cluster[0] * spec.cluster[1] > 1
        assert bool(occurrences(counts, "UTMALDG.2D.MULTICAST")) == shares_tiles
    resources = record.resources
    assert (resources.spill_store_bytes, resources.spill_load_bytes, resources.stack_bytes) == (0, 0, 0)
    assert resources.registers * spec.threads * spec.blocks_per_sm <= 65_536


@pytest.mark.compile
@pytest.mark.parametrize("plan", [LARGE, LARGE_KV8, LARGE_KV4, LARGE_FP8_DECODE], ids=["bf16", "kv8", "kv4", "fp8"])
def test_attentions_blocks_may_start_beside_those_of_qkv(built: Mapping[str, KernelRecord], plan: Plan) -> None:
    """One scheduler holds two of the five warps of qkv's block: a warp of attention fits there as well."""
    warps = [plan.decode["qkv"][32]] * 2 + [plan.attention_decode]
    taken = sum(-(-built[spec.name].resources.registers // 8) * 8 for spec in warps)  # handed out by eights
    assert taken <= SCHEDULER_REGISTERS


@pytest.mark.compile
@pytest.mark.parametrize("spec", [*INT4_DECODE, *FP8_DECODE], ids=lambda spec: spec.name)
def test_codes_become_operands_in_registers(built: Mapping[str, KernelRecord], spec: KernelSpec) -> None:
    """From the first product to the last nothing is stored, and codes are read sixteen bytes at a time."""
    found = instructions(built[spec.name].cubin, BuildSettings.from_environment())
    multiply = spec.instructions[0]
    products = [index for index, mnemonic in enumerate(found) if mnemonic.startswith(multiply)]
    between = found[products[0] : products[-1]]
    assert "LDS.128" in between
    for store in ("STS", "ST", "STG", "STL"):
        assert not any(mnemonic == store or mnemonic.startswith(store + ".") for mnemonic in between), store


def test_every_kind_of_kernel_and_every_epilogue_is_among_them() -> None:
    """What a plan holds is compiled here at least once: another kind of kernel must be added to the choice."""
    kinds = {(spec.template, getattr(spec, "op", None)) for spec in CHOSEN}
    plans = (SMALL, LARGE, make_plan(load_config("llama-3.1-8b"), "int4-kv4"))
    assert kinds == {(spec.template, getattr(spec, "op", None)) for plan in plans for spec in plan.specs()}
    tiles = {getattr(spec, "batch_tile", None) for spec in CHOSEN} - {None}
    assert tiles == {*SMALL.decode["o"], *LARGE_INT4.decode["o"]}
    clusters = ((1, 1, 1), (2, 1, 1), (1, 2, 1))
    every = {(kind, cluster) for kind in ("cooperative", "pingpong") for cluster in clusters}
    assert {schedule(spec) for spec in CHOSEN} - {None} == {*every, ("cooperative", (1, 1, 2))}
    assert {spec.tile.m for spec in CHOSEN if isinstance(spec, GemmSpec)} >= {64, 128, 256}
