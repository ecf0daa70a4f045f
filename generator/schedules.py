"""Measured schedules of the prefill GEMMs: what a sweep on one kind of card found, which comes before any rule.

```
{"card": "NVIDIA H200", "multiprocessors": 132,
 "rows": [{"op": "down", "element": "bf16", "n": 4096, "k": 14336, "rows": null, "tile": [256, 128, 64],
           "cluster": [1, 2, 1], "stages": 4, "schedule": "cooperative", "raster": 8}]}
```

``rows``: the most rows of x that the kernel serves, 64, 128 or 256, or null for any number; the cluster's third number
splits K. The shipped table, gemm_table.json, is an H200's. `futransformer tune` writes such tables.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypedDict

from .errors import ConfigError, UnsupportedError
from .json_reader import JsonReader, read_json
from .kv_format import KvFormat
from .precision import BF16, PRECISIONS, Element, Precision
from .specs import GemmSpec, Heads, Tile
from .specs.base import EPILOGUES, MAX_SHARED_BYTES

SHIPPED = Path(__file__).parent / "gemm_table.json"
FEW_ROWS = (64, 128, 256)  # the most rows that a prefill GEMM of few rows serves
MULTIPROCESSORS = 132  # of an H100 or H200 (SXM): what waves are counted by; launches read the card's own number

_MOST_STAGES = 12
_RASTER = 8  # (cluster) tiles along M in flight: both operands then come about as often from L2
_DRIVERS_BYTES = 1024  # of shared memory that is left free: alignment

_ELEMENTS: dict[str, Element] = {row.prefill.name: row.prefill for row in PRECISIONS.values()}


class Schedule(TypedDict):
    """The fields of a GemmSpec that do not change what it computes."""

    tile: Tile
    cluster_m: int
    cluster_n: int
    splits: int
    stages: int
    schedule: str
    raster: int


@dataclass(frozen=True)
class Place:
    """What a row of a table is for: a projection's shape, and the most rows that the kernel serves (None: any)."""

    op: str
    element: str
    n: int
    k: int
    rows: int | None

    def __str__(self) -> str:
        rows = "any number of rows" if self.rows is None else f"up to {self.rows} rows"
        return f"{self.op} {self.n} x {self.k} ({self.element}), {rows}"


@dataclass(frozen=True)
class ScheduleTable:
    """The measured schedules of one kind of card, and the multiprocessors that the rules count waves by."""

    card: str
    multiprocessors: int = MULTIPROCESSORS
    schedules: Mapping[Place, Schedule] = field(default_factory=dict)

    def find(self, op: str, element: str, n: int, k: int) -> dict[int | None, Schedule]:
        """The schedules of a shape, by the most rows that each serves."""
        wanted = (op, element, n, k)
        return {
            place.rows: schedule
            for place, schedule in self.schedules.items()
            if (place.op, place.element, place.n, place.k) == wanted
        }

    def with_schedules(self, found: Mapping[Place, Schedule]) -> ScheduleTable:
        """The same table with some rows added, or replaced."""
        return ScheduleTable(self.card, self.multiprocessors, {**self.schedules, **found})

    def to_json(self) -> dict[str, Any]:
        """As it stands in a file; rows by shape, so that the same schedules give the same text."""
        places = sorted(self.schedules, key=lambda place: (place.op, place.element, place.n, place.k, place.rows or 0))
        rows = [row_of(place, self.schedules[place]) for place in places]
        return {"card": self.card, "multiprocessors": self.multiprocessors, "rows": rows}

    def text(self) -> str:
        """The file: a row a line."""
        content = self.to_json()
        rows = ",\n".join(f"    {json.dumps(row)}" for row in content["rows"])
        head = f'  "card": {json.dumps(self.card)},\n  "multiprocessors": {self.multiprocessors},\n'
        return f'{{\n{head}  "rows": [\n{rows}\n  ]\n}}\n'


def file_name(card: str, multiprocessors: int) -> str:
    """The name of a card's table among others: nvidia-h200-132.json."""
    return f"{re.sub(r'[^a-z0-9]+', '-', card.lower()).strip('-')}-{multiprocessors}.json"


def row_of(place: Place, schedule: Schedule) -> dict[str, Any]:
    """One row of a file."""
    tile = schedule["tile"]
    return {
        "op": place.op,
        "element": place.element,
        "n": place.n,
        "k": place.k,
        "rows": place.rows,
        "tile": [tile.m, tile.n, tile.k],
        "cluster": [schedule["cluster_m"], schedule["cluster_n"], schedule["splits"]],
        "stages": schedule["stages"],
        "schedule": schedule["schedule"],
        "raster": schedule["raster"],
    }


def deepest(element: Element, tile: Tile, cluster: tuple[int, int, int], schedule: str) -> Schedule:
    """A tile and cluster with as many stages as fit into shared memory; the cluster's third number splits K."""
    stage = (tile.m + tile.n) * tile.k * element.bits // 8 + 16
    exchange = tile.m * tile.n * 2 + 16 if cluster[2] == 2 else 0
    return Schedule(
        tile=tile,
        cluster_m=cluster[0],
        cluster_n=cluster[1],
        splits=cluster[2],
        stages=min((MAX_SHARED_BYTES - _DRIVERS_BYTES - exchange) // stage, _MOST_STAGES),
        schedule=schedule,
        raster=_RASTER,
    )


def schedule_of(spec: GemmSpec) -> Schedule:
    """How a spec is scheduled."""
    return Schedule(
        tile=spec.tile,
        cluster_m=spec.cluster_m,
        cluster_n=spec.cluster_n,
        splits=spec.splits,
        stages=spec.stages,
        schedule=spec.schedule,
        raster=spec.raster,
    )


def spec_of(place: Place, schedule: Schedule, heads: Heads | None, precision: Precision | None = None) -> GemmSpec:
    """The kernel of a row; UnsupportedError when there is no such kernel.

    ``precision`` says how an FP8 kernel scales and sums, and what qkv writes to the pages; by default one scale a
    tensor, summed fast, and BF16.
    """
    plain = GemmSpec(place.op, _ELEMENTS[place.element], place.n, place.k, **schedule, heads=heads)
    if precision is None:
        return plain
    plain = replace(plain, kv=written_kv(place.op, precision), copy=written_copy(place.op, precision))
    if plain.element == BF16:
        return plain
    return replace(plain, weight_scales=precision.weight_scales, accumulation=precision.accumulation)


def written_kv(op: str, precision: Precision) -> Element:
    """What a projection's kernel writes to the pages; all but qkv write none."""
    return precision.kv if op == "qkv" else BF16


def written_copy(op: str, precision: Precision) -> KvFormat | None:
    """The form of the INT4 copy that a projection's kernel writes."""
    return precision.copy if op == "qkv" else None


@lru_cache(maxsize=1)
def shipped_table() -> ScheduleTable:
    """The table that comes with this version."""
    return read_table(SHIPPED)


def read_table(path: Path) -> ScheduleTable:
    """Read a table; ConfigError names the file, the row and what is wrong with it."""
    return table_from_json(read_json(path), path)


def table_from_json(content: Mapping[str, Any], path: Path) -> ScheduleTable:
    """Check what a file held. Every row must be a kernel that the generator can write."""
    reader = JsonReader(path, content)
    multiprocessors = reader.integer("multiprocessors")
    if multiprocessors < 1:
        raise reader.error("multiprocessors", f"must be positive, not {multiprocessors}")
    schedules: dict[Place, Schedule] = {}
    for place, schedule in rows_from_json(content.get("rows"), path):
        if place in schedules:
            raise reader.error("rows", f"hold two schedules for {place}; keep one")
        schedules[place] = schedule
    return ScheduleTable(reader.text("card"), multiprocessors, schedules)


def rows_from_json(rows: object, path: Path) -> Iterator[tuple[Place, Schedule]]:
    """Check the rows of a file, one by one."""
    if not isinstance(rows, list):
        raise ConfigError(f"{path}: rows must be a list of schedules; write the file with: futransformer tune CONFIG")
    for index, row in enumerate(rows):
        reader = JsonReader(path, row if isinstance(row, dict) else {}, f"rows[{index}].")
        place = _place(reader)
        tile, cluster = (_triple(reader, key) for key in ("tile", "cluster"))
        schedule = Schedule(
            tile=Tile(*tile),
            cluster_m=cluster[0],
            cluster_n=cluster[1],
            splits=cluster[2],
            stages=reader.integer("stages"),
            schedule=reader.text("schedule"),
            raster=reader.integer("raster"),
        )
        try:
            # Whose heads they are makes no difference to what is legal.
            spec_of(place, schedule, Heads(1, 1, 64) if place.op == "qkv" else None)
        except UnsupportedError as error:
            raise ConfigError(f"{path}: rows[{index}] is no kernel that can be generated: {error}") from None
        yield place, schedule


def _place(reader: JsonReader) -> Place:
    op, element = reader.text("op"), reader.text("element")
    if op not in EPILOGUES:
        raise reader.error("op", f"must be one of {', '.join(EPILOGUES)}, not {op!r}")
    if element not in _ELEMENTS:
        raise reader.error("element", f"must be one of {', '.join(_ELEMENTS)}, not {element!r}")
    rows = reader.integer("rows") if reader.has("rows") else None
    if rows not in (*FEW_ROWS, None):
        raise reader.error("rows", f"must be one of {', '.join(map(str, FEW_ROWS))} or null, not {rows}")
    return Place(op, element, reader.integer("n"), reader.integer("k"), rows)


def _triple(reader: JsonReader, key: str) -> tuple[int, int, int]:
    values = reader.integers(key)
    if len(values) != 3:
        raise reader.error(key, "must be a list of three integers")
    return (values[0], values[1], values[2])
