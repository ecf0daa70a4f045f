"""What a sweep compiles and times: a model's own kernels, and for each projection and number of rows some candidates.

An export of a sweep is one of a model, with candidates.json beside its manifest:

    {"config": "llama-3.1-8b", "precision": "bf16", "rows": [... as in a table, several for each place ...]}
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from futransformer.build.cache import storage_errors
from futransformer.build.compile import BuildEvent, build_kernels
from futransformer.build.export import export, read_export, write_atomically
from futransformer.build.machine import default_jobs
from futransformer.build.manifest import KernelRecord, ModelManifest
from futransformer.build.settings import BuildSettings
from futransformer.generator.config import LlamaConfig
from futransformer.generator.errors import ArtifactError, BuildError, ConfigError, InputError
from futransformer.generator.heuristics import MAX_ROWS
from futransformer.generator.json_reader import JsonReader, read_json
from futransformer.generator.plan import Plan, make_plan, projections
from futransformer.generator.precision import Precision, get_precision
from futransformer.generator.schedules import (
    Place,
    ScheduleTable,
    row_of,
    rows_from_json,
    schedule_of,
    spec_of,
)
from futransformer.generator.search import BUCKETS, candidates
from futransformer.generator.specs import GemmSpec, KernelSpec

OPS = ("qkv", "o", "gate_up", "down")  # the head computes a prompt's last row alone
CANDIDATES = "candidates.json"


@dataclass(frozen=True)
class Sweep:
    """The kernels that are used now, planned by ``table``, and those that might be better, by place."""

    config: LlamaConfig
    precision: Precision
    table: ScheduleTable
    candidates: dict[Place, tuple[GemmSpec, ...]]

    @property
    def plan(self) -> Plan:
        """The model's kernels as they are now."""
        return make_plan(self.config, self.precision, self.table)

    def incumbent(self, place: Place) -> GemmSpec:
        """The kernel that serves a place now."""
        return self.plan.prefill[place.op][MAX_ROWS if place.rows is None else place.rows]

    def specs(self) -> tuple[KernelSpec, ...]:
        """Every kernel once: the model's, then the candidates."""
        found = (spec for specs in self.candidates.values() for spec in specs)
        return tuple(dict.fromkeys((*self.plan.specs(), *found)))

    def without(self, names: frozenset[str]) -> Sweep:
        """The same sweep less some candidates."""
        kept = {
            place: tuple(spec for spec in specs if spec.name not in names) for place, specs in self.candidates.items()
        }
        return replace(self, candidates=kept)


def make_sweep(config: LlamaConfig, precision: str, table: ScheduleTable, ops: Sequence[str], count: int) -> Sweep:
    """Propose ``count`` candidates for each projection and number of rows; InputError says what cannot be asked for."""
    unknown = [op for op in ops if op not in OPS]
    if unknown or not ops:
        raise InputError(f"--ops must name some of {', '.join(OPS)}, not {', '.join(unknown) or 'nothing'}")
    if count < 1:
        raise InputError(f"--candidates must be at least 1, not {count}")
    row, shapes = get_precision(precision), projections(config)
    if row.accumulation == "promoted":
        raise InputError(
            f"kernels of {row.name} are not tuned: a table's rows are tiles of sums that are not promoted; tune fp8"
        )
    if row.copy is not None:
        plain = row.name.removesuffix(row.copy.suffix)
        raise InputError(
            f"kernels of {row.name} are not tuned: a table's rows serve those that write no INT4 copy; tune {plain}, "
            "whose schedules are taken here as well where their tiles hold whole groups"
        )
    sweep = Sweep(config, row, table, {})
    for op in dict.fromkeys(ops):
        n, k = shapes[op]
        heads = config.heads if op == "qkv" else None
        for most, numbers in BUCKETS.items():
            place = Place(op, row.prefill.name, n, k, most)
            proposed = candidates(op, row, n, k, heads, numbers[-1], table.multiprocessors, count)
            now = sweep.incumbent(place)
            sweep.candidates[place] = tuple(spec for spec in proposed if schedule_of(spec) != schedule_of(now))
    return sweep


def build(
    sweep: Sweep, settings: BuildSettings, progress: Callable[[BuildEvent], None]
) -> tuple[tuple[KernelRecord, ...], dict[str, str]]:
    """Compile everything into the cache; also the reason why, for each candidate that does not compile.

    The model's own kernels must. A candidate may spill registers, which the build refuses, and is then none.
    """
    own = sweep.plan.specs()
    records = build_kernels(own, settings=settings, progress=progress)
    others = [spec for spec in sweep.specs() if spec not in own]
    alone = replace(settings, jobs=1)

    def attempt(spec: KernelSpec) -> KernelRecord | BuildError:
        try:
            return build_kernels([spec], settings=alone, progress=progress)[0]
        except BuildError as error:
            return error

    with ThreadPoolExecutor(settings.jobs or default_jobs(), thread_name_prefix="candidate") as pool:
        results = list(pool.map(attempt, others))
    built = [result for result in results if isinstance(result, KernelRecord)]
    refused = {
        spec.name: str(result).partition("\n")[0]
        for spec, result in zip(others, results, strict=True)
        if isinstance(result, BuildError)
    }
    return (*records, *built), refused


def export_sweep(sweep: Sweep, records: Sequence[KernelRecord], folder: Path) -> None:
    """Write the kernels of a sweep and what they are for, to be timed on a machine without a compiler."""
    export(ModelManifest(sweep.config.name, sweep.precision.name, tuple(records), sweep.table), folder)
    rows = [row_of(place, schedule_of(spec)) for place, specs in sweep.candidates.items() for spec in specs]
    content = {"config": sweep.config.name, "precision": sweep.precision.name, "rows": rows}
    with storage_errors("the output folder", folder, "choose another with --build-only"):
        write_atomically(folder / CANDIDATES, (json.dumps(content, indent=1) + "\n").encode())


def load_sweep(folder: Path, config: LlamaConfig, precision: str) -> Sweep:
    """Read back what ``export_sweep`` wrote; an error names the folder and says how to write it."""
    manifest = read_export(folder)
    again = f"write one with: futransformer tune {config.name} --build-only {folder}"
    if manifest.table is None or not (folder / CANDIDATES).is_file():
        raise ArtifactError(f"{folder} is an export of kernels, but not of a sweep; {again}")
    path = folder / CANDIDATES
    reader = JsonReader(path, read_json(path))
    built_for = reader.text("config"), reader.text("precision")
    if built_for != (config.name, precision):
        raise ConfigError(
            f"{folder} is a sweep of {' in '.join(built_for)}, not of {config.name} in {precision}; {again}"
        )
    row, found = get_precision(precision), dict[Place, list[GemmSpec]]()
    for place, schedule in rows_from_json(reader.content.get("rows"), path):
        heads = config.heads if place.op == "qkv" else None
        found.setdefault(place, []).append(spec_of(place, schedule, heads, row))
    return Sweep(config, row, manifest.table, {place: tuple(specs) for place, specs in found.items()})
