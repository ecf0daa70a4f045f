"""The decode GEMMs that are planned: legal for every shape, and those that were measured to be the fastest."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from futransformer.generator.config import CONFIGS, load_config
from futransformer.generator.decode_heuristics import batch_tiles, decode_gemm_spec
from futransformer.generator.errors import UnsupportedError
from futransformer.generator.plan import make_plan
from futransformer.generator.precision import BF16, INT4, PRECISIONS, get_precision
from futransformer.generator.render import render
from futransformer.generator.schedules import MULTIPROCESSORS
from futransformer.generator.specs import DecodeGemmSpec, Heads
from futransformer.ops.interface import Projection

OPS: tuple[Projection, ...] = ("qkv", "o", "gate_up", "down")  # of a layer
LEGAL = [*PRECISIONS, "int4-g32-asym", "int4-g64", "int4-g256-asym", "int4-channel", "fp8-int4-channel-asym-kv8"]
LEGAL += ["bf16-head8", "int4-head4", "bf16-fp8-head8-kv8", "fp8-int4-g32-asym-head4"]


@pytest.mark.parametrize("precision", LEGAL)
@pytest.mark.parametrize("model", CONFIGS)
def test_every_planned_kernel_is_legal(model: str, precision: str) -> None:
    plan = make_plan(load_config(model), precision)
    specs = [spec for by_batch in plan.decode.values() for spec in by_batch.values()]
    assert len({spec.name for spec in specs}) == len(specs)
    for op, by_batch in plan.decode.items():
        assert tuple(by_batch) == batch_tiles(op, get_precision(precision))
        assert {spec.element for spec in by_batch.values()} == {
            get_precision(precision).head if op == "lm_head" else get_precision(precision).decode
        }
        assert len({spec.weight_shape for spec in by_batch.values()}) == 1, f"{op}: one packed copy serves every batch"
        for batch, spec in by_batch.items():
            assert spec.batch_tile == batch
            assert spec.blocks * spec.block_rows == spec.n * spec.split_k
            assert spec.blocks_per_sm * (spec.shared_bytes + 1024) <= 228 * 1024
            assert -(-spec.blocks_per_sm * spec.threads // 128) * 128 * 40 <= 65536


@pytest.mark.parametrize(
    ("op", "schedule"),
    [
        ("qkv", (6, 128, 1, 4, 2, 4, 2, "lead", False)),
        ("o", (4, 128, 1, 4, 2, 7, 2, "start", False)),
        ("gate_up", (7, 128, 7, 1, 1, 3, 0, "lead", True)),
        ("down", (4, 128, 1, 4, 2, 7, 2, "start", False)),
    ],
)
def test_the_fastest_layer_measured_is_planned(op: str, schedule: tuple[int | str, ...]) -> None:
    """8B at 32 sequences, 144 us: the rule gives what won."""
    spec = make_plan(load_config("llama-3.1-8b"), "bf16").decode[op][32]
    rows = spec.row_tiles, spec.stage_k, spec.warp_rows, spec.warp_split
    assert (*rows, spec.split_k, spec.stages, spec.x_ahead, spec.next_at, spec.rotate) == schedule


@pytest.mark.parametrize("precision", ["bf16", "bf16-fp8-head8"])
@pytest.mark.parametrize("model", CONFIGS)
def test_clusters_up_to_32_sequences_read_x_by_lanes(model: str, precision: str) -> None:
    for by_batch in make_plan(load_config(model), precision).decode.values():
        for batch, spec in by_batch.items():
            if batch > 8:
                assert (spec.x_ahead > 0) == (batch <= 32 and spec.split_k > 1), spec.name
            if spec.next_at == "start":
                assert spec.blocks <= spec.blocks_per_sm * MULTIPROCESSORS, f"{spec.name}: not all blocks run at once"
            assert not spec.rotate or spec.next_at == "lead", f"{spec.name}: x is spread where blocks come in waves"


@pytest.mark.parametrize("n", [6912, 7296, 10272])
def test_the_next_kernel_starts_with_a_cluster_only_where_all_blocks_do(n: int) -> None:
    """Blocks of six row tiles and 32 sequences, of which registers let a multiprocessor hold one, come in waves."""
    spec = decode_gemm_spec("down", n, 4096, 32, get_precision("bf16"))
    assert (spec.row_tiles, spec.split_k, spec.blocks_per_sm, spec.next_at) == (6, 2, 1, "lead")
    assert spec.blocks > MULTIPROCESSORS


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"op": "embed"}, "op must be one of"),
        ({"n": 100}, "out_features must be a multiple of 32"),
        ({"k": 560}, "in_features must be a multiple of 64"),
        ({"batch_tile": 24}, "batch_tile"),
        ({"warp_rows": 4}, "row_tiles must divide among"),
        ({"warp_split": 16}, "1 to 16 warps"),
        ({"split_k": 3}, "split_k must be 1, 2, 4 or 8"),
        ({"split_k": 4}, "row_tiles must divide among"),
        ({"stage_k": 96}, "stage_k must be a multiple of 64"),
        ({"stages": 1}, "two stages"),
        ({"x_ahead": -1}, "x_ahead is a number of stages"),
        ({"in_flight": 5}, "in_flight is a number of stages of the ring"),
        ({"in_flight": -1, "x_ahead": 1}, "in_flight is a number of stages of the ring"),
        ({"fetched": -1}, "fetched is a number of stages"),
        ({"max_registers": 100}, "a multiple of 8"),
        ({"max_registers": 128}, "no second of its kind"),
        ({"next_at": "late"}, "next_at must be start, lead or end"),
        ({"stages": 64}, "shared memory"),
        ({"heads": Heads(9, 3, 64)}, "heads"),
        ({"vocab_size": 500}, "vocab_size belongs to lm_head"),
        ({"op": "lm_head", "vocab_size": 576}, "vocab_size belongs to lm_head, and is less than its n"),
    ],
)
def test_illegal_specs_are_refused(changes: dict[str, Any], message: str) -> None:
    fields: dict[str, Any] = {"op": "o", "element": BF16, "n": 576, "k": 576, "batch_tile": 8}
    fields |= {"row_tiles": 2, "warp_rows": 2, "warp_split": 2, "split_k": 2, "stages": 4, "stage_k": 128}
    DecodeGemmSpec(**fields)
    with pytest.raises(UnsupportedError, match=message):
        DecodeGemmSpec(**{**fields, **changes})


def test_x_of_a_bounded_ring_has_barriers_of_its_own() -> None:
    """Eight bytes a stage, in whole sixteens; with wgmma it has them without a bound."""
    fields: dict[str, Any] = {"op": "o", "element": INT4, "n": 1024, "k": 1024, "batch_tile": 32, "group_k": 128}
    fields |= {"row_tiles": 4, "warp_rows": 2, "warp_split": 1, "split_k": 2, "stages": 3, "stage_k": 256}
    plain = DecodeGemmSpec(**fields)
    assert replace(plain, in_flight=2).shared_bytes == plain.shared_bytes + 32
    assert replace(plain, in_flight=3).shared_bytes == plain.shared_bytes  # what the ring itself sets is no bound
    assert replace(plain, in_flight=2, x_ahead=1).shared_bytes == replace(plain, x_ahead=1).shared_bytes
    warpgroups = replace(plain, row_tiles=8, wgmma=True)
    assert replace(warpgroups, in_flight=2).shared_bytes == warpgroups.shared_bytes
    assert len({replace(plain, in_flight=a, fetched=b).name for a in (0, 2) for b in (0, 4)}) == 4


def test_a_block_is_alone_by_what_it_is_given() -> None:
    """Two no longer fit on a multiprocessor; nothing else is another, in the source neither."""
    by_batch = make_plan(load_config("llama-3.1-8b"), "int4").decode["o"]
    shared, whole = by_batch[8], by_batch[64]
    assert (shared.alone, shared.blocks_per_sm) == (False, 2)
    alone = replace(shared, alone=True)
    assert 2 * (alone.shared_bytes + 1024) > 228 * 1024 >= alone.shared_bytes + 1024 + 112 * 1024
    assert alone.blocks_per_sm == 1
    assert alone.name == shared.name.replace("_f1_", "_f1_alone_")
    assert render(alone).replace(alone.name, shared.name) == render(shared)
    assert replace(whole, alone=True).shared_bytes == whole.shared_bytes, "more than half as it is"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x_ahead": 1}, "wgmma is for INT4 weights, at least 8 sequences and x in the ring"),
        ({"batch_tile": 4}, "wgmma is for INT4 weights"),
        ({"element": BF16, "group_k": 0}, "wgmma is for INT4 weights"),
        ({"stage_k": 384}, "a slice of K must be whole stages"),
        ({"group_k": 64, "stage_k": 64}, "an even number of short units"),
        ({"warp_rows": 5}, "1 to 16 warps"),
    ],
)
def test_wgmma_is_refused_where_it_has_no_kernel(changes: dict[str, Any], message: str) -> None:
    fields: dict[str, Any] = {"op": "o", "element": INT4, "n": 1024, "k": 1024, "batch_tile": 32, "group_k": 128}
    fields |= {
        "row_tiles": 2,
        "warp_rows": 2,
        "warp_split": 1,
        "split_k": 2,
        "stages": 2,
        "stage_k": 256,
        "wgmma": True,
    }
    DecodeGemmSpec(**fields)
    with pytest.raises(UnsupportedError, match=message):
        DecodeGemmSpec(**{**fields, **changes})


@pytest.mark.parametrize("precision", ["int4", "int4-g32-asym", "int4-g64", "int4-channel-asym-head4"])
@pytest.mark.parametrize("model", CONFIGS)
def test_wgmma_multiplies_where_two_warpgroups_have_enough(model: str, precision: str) -> None:
    """Three quarters of the rows that two multiply are a block's own, or each has all 64 and half of K."""
    for op, by_batch in make_plan(load_config(model), precision).decode.items():
        for batch, spec in by_batch.items():
            whole = spec.k % (256 * spec.split_k) == 0 and op != "lm_head"
            by_rows = batch >= 32 and spec.row_tiles in (6, 7, 8, 12, 13, 14, 15, 16)
            pairs = (spec.row_tiles, spec.split_k) == (4, 2) and spec.blocks <= MULTIPROCESSORS
            # at 32 in the place of lanes, which have no units of less than 128 k and no long slices
            short = batch == 32 and spec.group_k == 128 and spec.k <= 4096 * spec.split_k
            by_k = pairs and (batch == 64 or short)
            assert spec.wgmma == (whole and (by_rows or by_k)), f"{op}: {spec.name}"
            if spec.wgmma:
                assert (spec.warp_rows, spec.warp_split) == ((2, 1) if by_rows else (1, 2)), spec.name


def test_the_fastest_layer_of_int4_measured_is_planned() -> None:
    """8B at 64 sequences, 81.9 us, over an INT4 copy 110.8: all by wgmma, qkv and gate_up by rows, o and down by K."""
    for precision, of_qkv in (("int4", (6, 2, 1, 3, 0)), ("int4-kv4", (8, 2, 1, 4, 3))):
        by_op = make_plan(load_config("llama-3.1-8b"), precision).decode
        chosen = {op: by_op[op][64] for op in OPS}
        assert all(spec.wgmma and spec.stage_k == 256 for spec in chosen.values())
        assert {
            op: (spec.row_tiles, spec.warp_rows, spec.warp_split, spec.stages, spec.in_flight)
            for op, spec in chosen.items()
        } == {"qkv": of_qkv, "o": (4, 1, 2, 5, 4), "gate_up": (14, 2, 1, 3, 2), "down": (4, 1, 2, 5, 4)}


def test_what_won_the_seventh_and_eighth_rounds_is_planned() -> None:
    """8B at 8, 16 and 32 sequences: 37.0, 46.3 and 58.5 us a layer; over an INT4 copy 45.1, 57.6 and 72.9."""
    by_op, of_copy = (make_plan(load_config("llama-3.1-8b"), precision).decode for precision in ("int4", "int4-kv4"))

    def ring(spec: DecodeGemmSpec) -> tuple[int, ...]:
        return spec.row_tiles, spec.split_k, spec.stages, spec.x_ahead, spec.in_flight, spec.fetched

    assert {(op, batch): ring(by_op[op][batch]) for op, batch in product(OPS, (8, 16, 32))} == {
        ("qkv", 8): (6, 2, 4, 1, 2, 0),
        ("o", 8): (8, 4, 2, 2, 1, 0),
        ("gate_up", 8): (7, 1, 3, 2, 1, 2),
        ("down", 8): (4, 2, 6, 1, 2, 0),
        ("qkv", 16): (6, 2, 4, 1, 1, 0),
        ("o", 16): (4, 2, 4, 1, 1, 0),
        ("gate_up", 16): (7, 1, 5, 0, 2, 0),
        ("down", 16): (4, 2, 3, 1, 1, 0),
        ("qkv", 32): (6, 2, 3, 0, 0, 0),
        ("o", 32): (4, 2, 5, 0, 4, 0),
        ("gate_up", 32): (14, 1, 4, 0, 3, 0),
        ("down", 32): (4, 2, 4, 0, 0, 0),
    }
    specs = [spec for by_batch in by_op.values() for spec in by_batch.values()]
    assert {(spec.op, spec.batch_tile) for spec in specs if spec.alone} == {("qkv", 8), ("down", 8), ("o", 16)}
    assert {batch: ring(of_copy["qkv"][batch]) for batch in (8, 16, 32)} == {
        8: (8, 4, 2, 2, 1, 0),
        16: (4, 2, 4, 1, 1, 0),
        32: (8, 2, 3, 0, 2, 0),
    }
    assert [batch for batch, spec in of_copy["qkv"].items() if spec.wgmma] == [32, 64]
    assert {op: by_batch for op, by_batch in of_copy.items() if op != "qkv"} == {
        op: by_batch for op, by_batch in by_op.items() if op != "qkv"
    }


@pytest.mark.parametrize("precision", ["int4", "int4-g32-asym", "int4-g64", "int4-head4"])
@pytest.mark.parametrize("model", CONFIGS)
def test_few_stages_are_under_way_where_lanes_load_x(model: str, precision: str) -> None:
    """Of INT4 weights, and where all blocks run at once; a bound that the ring itself sets is not told."""
    for by_batch in make_plan(load_config(model), precision).decode.values():
        for batch, spec in by_batch.items():
            bounded = spec.element == INT4 and not spec.x_in_ring and spec.next_at == "start"
            few = spec.k <= 8 * spec.split_k * spec.stage_k and (batch == 16 or (batch == 8 and not spec.alone))
            most = (1 if few else 2) if bounded else spec.stages
            if not spec.x_in_ring:
                assert spec.in_flight == (most if most < spec.stages else 0), spec.name


@pytest.mark.parametrize(
    "precision", ["bf16-fp8-head8", "int4", "int4-g32-asym", "int4-g64", "int4-kv4", "int4-asym-kv4"]
)
@pytest.mark.parametrize("model", CONFIGS)
def test_what_was_measured_of_8b_is_planned_where_the_reason_holds(model: str, precision: str) -> None:
    """Bounds of x's ring, stages asked into L2 and blocks alone, of INT4 weights, if all blocks run at once."""
    for op, by_batch in make_plan(load_config(model), precision).decode.items():
        for batch, spec in by_batch.items():
            changed = spec.alone or spec.fetched or (spec.x_in_ring and spec.in_flight)
            assert not changed or (spec.element == INT4 and spec.next_at == "start"), spec.name
            if spec.alone:  # one a multiprocessor, in pairs, for which there are places
                assert (op, batch) in (("qkv", 8), ("down", 8), ("o", 16)), spec.name
                assert (spec.split_k, spec.copy) == (2, None), spec.name
                assert spec.blocks <= MULTIPROCESSORS, spec.name
                assert not spec.x_in_ring, spec.name
            assert not spec.fetched or (op, batch) == ("gate_up", 8), spec.name
            if spec.x_in_ring and spec.in_flight:
                assert (op, batch) == ("gate_up", 16) or (spec.wgmma and (op != "qkv" or spec.copy)), spec.name


def test_other_models_keep_what_was_measured_of_none() -> None:
    """70B has no clusters to be alone or to share K, and its gate_up comes in waves; its qkv has 80 blocks by wgmma."""
    for precision in ("int4", "int4-kv4"):
        for by_batch in make_plan(load_config("llama-3-70b"), precision).decode.values():
            for spec in by_batch.values():
                assert not spec.alone, spec.name
                assert not spec.fetched, spec.name
                assert not (spec.x_in_ring and spec.in_flight), spec.name
                assert spec.op != "qkv" or not spec.wgmma, spec.name


@pytest.mark.parametrize("precision", ["int4-g32", "int4-g32-asym"])
@pytest.mark.parametrize("model", CONFIGS)
def test_units_of_32_come_with_x_beyond_eight_sequences(model: str, precision: str) -> None:
    """By lanes they spill (8B, qkv at 16: 252 bytes), so that the build refuses the kernel."""
    for by_batch in make_plan(load_config(model), precision).decode.values():
        for batch, spec in by_batch.items():
            assert spec.element != INT4 or batch <= 8 or spec.x_in_ring, spec.name


def test_down_of_int4_reads_x_through_the_ring_at_32_sequences() -> None:
    """8B, down alone: by lanes 19.0 us, through the ring by eight warps 16.6, by two warpgroups 16.9."""
    down = make_plan(load_config("llama-3.1-8b"), "int4").decode["down"][32]
    assert (down.x_ahead, down.warp_rows, down.warp_split, down.stages) == (0, 2, 4, 4)
    assert not down.wgmma


def test_the_fastest_rings_measured_are_planned() -> None:
    """8B: E4M3's kernels for 16 serve fewer too; where K is long and all of a multiprocessor a block's, six stages."""
    e4m3, bf16 = (make_plan(load_config("llama-3.1-8b"), precision).decode for precision in ("bf16-fp8-head8", "bf16"))
    assert {op: min(by_batch) for op, by_batch in e4m3.items()} == {**dict.fromkeys(OPS, 16), "lm_head": 8}
    assert [e4m3[op][batch].stages for op, batch in (("gate_up", 32), ("down", 64))] == [6, 6]
    assert {op: bf16[op][64].stages for op in OPS} == {"qkv": 3, "o": 3, "gate_up": 3, "down": 6}
