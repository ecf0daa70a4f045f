"""Tables of measured schedules: read, written, refused; and what they change in a plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from futransformer.build.fingerprint import source_key
from futransformer.build.nvcc import NVCC_FLAGS
from futransformer.build.settings import HEADERS
from futransformer.generator.config import load_config
from futransformer.generator.errors import ConfigError
from futransformer.generator.heuristics import MAX_ROWS
from futransformer.generator.plan import make_plan
from futransformer.generator.render import render
from futransformer.generator.schedules import (
    SHIPPED,
    Place,
    ScheduleTable,
    file_name,
    read_table,
    schedule_of,
    shipped_table,
    spec_of,
)
from futransformer.generator.specs import Tile

CONFIG = load_config("llama-3.1-8b")
SMALL = load_config("smollm2-135m")
ROW: dict[str, Any] = {
    "op": "qkv",
    "element": "bf16",
    "n": 960,
    "k": 576,
    "rows": 256,
    "tile": [64, 96, 64],
    "cluster": [1, 2, 1],
    "stages": 4,
    "schedule": "cooperative",
    "raster": 8,
}


def written(folder: Path, *rows: dict[str, Any], **changes: Any) -> Path:
    path = folder / "table.json"
    path.write_text(json.dumps({"card": "NVIDIA H100", "multiprocessors": 132, "rows": list(rows), **changes}))
    return path


def test_the_shipped_table_is_an_h200s() -> None:
    table = read_table(SHIPPED)
    assert (table.card, table.multiprocessors) == ("NVIDIA H200", 132)
    assert json.loads(table.text()).keys() == json.loads(SHIPPED.read_text(encoding="utf-8")).keys()
    assert table.schedules


def test_a_table_survives_being_written(tmp_path: Path) -> None:
    table = read_table(written(tmp_path, ROW, {**ROW, "rows": None, "raster": 4}))
    (tmp_path / "again.json").write_text(table.text())
    assert read_table(tmp_path / "again.json") == table
    assert len(table.schedules) == 2


@pytest.mark.parametrize("op", ["qkv", "o", "gate_up", "down", "lm_head"])
def test_every_planned_schedule_has_a_row(op: str) -> None:
    heads = CONFIG.heads if op == "qkv" else None
    for rows, spec in make_plan(CONFIG, "bf16").prefill[op].items():
        place = Place(op, "bf16", spec.n, spec.k, rows)
        assert spec_of(place, schedule_of(spec), heads) == spec


@pytest.mark.parametrize("rows", [64, 256, None])
def test_a_row_comes_before_every_rule_and_changes_the_kernel(tmp_path: Path, rows: int | None) -> None:
    """Another name, source and key: nothing that was built before is taken for it."""
    table = read_table(written(tmp_path, {**ROW, "rows": rows}))
    bucket = MAX_ROWS if rows is None else rows
    before, after = (make_plan(SMALL, "bf16", choice).prefill["qkv"] for choice in (None, table))
    assert (after[bucket].tile, after[bucket].cluster) == (Tile(64, 96, 64), (1, 2, 1))
    assert {most: spec for most, spec in after.items() if most != bucket} == {
        most: spec for most, spec in before.items() if most != bucket
    }
    keys = {source_key(spec, render(spec), NVCC_FLAGS, HEADERS) for spec in (before[bucket], after[bucket])}
    assert len(keys) == 2


def test_sums_that_are_promoted_take_no_row_of_those_that_are_not(tmp_path: Path) -> None:
    """They do not fit into the tile of this one."""
    row = {**ROW, "element": "e4m3", "rows": None, "tile": [128, 192, 128], "cluster": [1, 1, 1]}
    table = read_table(written(tmp_path, row))
    assert make_plan(SMALL, "fp8", table).prefill["qkv"][MAX_ROWS].tile == Tile(128, 192, 128)
    assert make_plan(SMALL, "fp8-promoted", table) == make_plan(SMALL, "fp8-promoted")


def test_rules_count_the_waves_of_the_tables_card() -> None:
    """o of 8B, 64 rows: 128 blocks of half of K are one wave on 132 multiprocessors, and two on 114."""
    here, smaller = (make_plan(CONFIG, "bf16", ScheduleTable("any", count)).prefill["o"][64] for count in (132, 114))
    assert -(-here.n // here.tile.n) * here.splits == 128
    assert -(-smaller.n // smaller.tile.n) * smaller.splits <= 114


def test_the_default_is_the_shipped_table() -> None:
    assert make_plan(CONFIG, "bf16") == make_plan(CONFIG, "bf16", shipped_table())
    assert make_plan(CONFIG, "bf16") != make_plan(CONFIG, "bf16", ScheduleTable("any"))


@pytest.mark.parametrize(
    ("rows", "changes", "message"),
    [
        ([], {"multiprocessors": 0}, r"multiprocessors must be positive, not 0"),
        ([], {"multiprocessors": "many"}, r"multiprocessors must be an integer"),
        ([], {"card": None}, r"card must be a string"),
        ([], {"rows": {}}, r"rows must be a list of schedules; write the file with: futransformer tune"),
        (["x"], {}, r"rows\[0\]\.op must be a string, but is missing"),
        ([{**ROW, "op": "query"}], {}, r"rows\[0\]\.op must be one of qkv, o, gate_up, down, lm_head, not 'query'"),
        ([{**ROW, "element": "fp4"}], {}, r"rows\[0\]\.element must be one of bf16"),
        ([ROW, {**ROW, "tile": [64, 96]}], {}, r"rows\[1\]\.tile must be a list of three integers"),
        ([{**ROW, "stages": 40}], {}, r"rows\[0\] is no kernel that can be generated: .*shared memory"),
        ([{**ROW, "rows": "all"}], {}, r"rows\[0\]\.rows must be an integer"),
        ([{**ROW, "rows": 100}], {}, r"rows\[0\]\.rows must be one of 64, 128, 256 or null, not 100"),
        ([{**ROW, "rows": 0}], {}, r"rows\[0\]\.rows must be one of 64, 128, 256 or null, not 0"),
        ([{**ROW, "n": 0}], {}, r"rows\[0\] is no kernel .*out_features must be a positive multiple"),
        ([{**ROW, "k": -576}], {}, r"rows\[0\] is no kernel .*in_features must be a positive multiple"),
        ([ROW, {**ROW, "stages": 3}], {}, r"rows hold two schedules for qkv 960 x 576 \(bf16\), up to 256 rows"),
    ],
)
def test_what_is_no_table_is_refused(tmp_path: Path, rows: list[Any], changes: dict[str, Any], message: str) -> None:
    path = written(tmp_path, *rows, **changes)
    with pytest.raises(ConfigError, match=message) as caught:
        read_table(path)
    assert str(path) in str(caught.value)


def test_a_table_is_named_after_its_card() -> None:
    assert file_name("NVIDIA H100 80GB HBM3", 132) == "nvidia-h100-80gb-hbm3-132.json"
