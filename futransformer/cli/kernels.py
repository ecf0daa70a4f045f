"""The commands about kernels: generate, build, cache list, cache clear. None of them needs torch or a GPU."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from futransformer.build.cache import KernelCache, file_stem
from futransformer.build.compile import BuildEvent, build_kernels
from futransformer.build.export import export
from futransformer.build.manifest import KernelRecord, ModelManifest
from futransformer.build.nvcc import nvcc_options
from futransformer.build.settings import BuildSettings
from futransformer.build.wheel import write_wheel
from futransformer.cli.table import megabytes
from futransformer.cli.table import table as text_table
from futransformer.generator.config import CONFIGS, LlamaConfig, load_config
from futransformer.generator.errors import UnsupportedError
from futransformer.generator.plan import kernel_specs, make_plan, profiling_specs
from futransformer.generator.precision import BF16, PRECISION_NAMES
from futransformer.generator.render import render
from futransformer.generator.schedules import ScheduleTable
from futransformer.generator.specs import AttentionPrefillSpec, DecodeGemmSpec, GemmSpec, KernelSpec
from futransformer.quantize.description import named_precision
from futransformer.tables import recorded, schedule_table

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_parsers(subparsers: Subparsers) -> None:
    """Add the commands of this module."""
    generate = subparsers.add_parser(
        "generate",
        help="write the kernels' CUDA sources; needs no nvcc",
        description="Write the CUDA source of every kernel that a model needs; needs no nvcc, torch or GPU.",
    )
    _add_model(generate)
    generate.add_argument(
        "-o", "--output", type=Path, metavar="DIR", help="where to write them (default: kernels-CONFIG-PRECISION)"
    )
    generate.set_defaults(handler=_generate)

    build = subparsers.add_parser(
        "build",
        help="compile the kernels into the cache",
        description="Compile every kernel that a model needs and the cache lacks, and print what each takes; "
        "needs no GPU.",
    )
    _add_model(build)
    build.add_argument(
        "-o", "--output", type=Path, metavar="DIR", help="also export cubins and manifest, for a machine without nvcc"
    )
    build.add_argument("--wheel", type=Path, metavar="DIR", help="also write them there as a wheel that pip installs")
    build.add_argument(
        "--jobs", type=int, metavar="N", help="compilers at once (default: as cores and free memory allow)"
    )
    build.add_argument("--profiling", action="store_true", help="also what `futransformer profile --gaps` runs")
    build.add_argument("--json", action="store_true", help="print JSON instead of a table")
    build.set_defaults(handler=_build)

    cache = subparsers.add_parser(
        "cache",
        help="list or clear the kernel cache",
        description="The cache of compiled kernels: FUTRANSFORMER_CACHE, else XDG_CACHE_HOME/futransformer, "
        "else ~/.cache/futransformer.",
    )
    actions = cache.add_subparsers(title="actions", metavar="ACTION", required=True)
    for name, handler, text in (
        ("list", _cache_list, "list the kernels in the cache"),
        ("clear", _cache_clear, "remove all kernels from the cache; the small model stays"),
    ):
        action = actions.add_parser(name, help=text, description=f"{text.capitalize()}.")
        action.add_argument("--json", action="store_true", help="print JSON instead of text")
        action.set_defaults(handler=handler)


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="a model's name, a Hugging Face folder, or a config.json")
    parser.add_argument(
        "--precision", help=f"one of: {PRECISION_NAMES} (default: what a folder of ours names, else bf16)"
    )
    parser.add_argument(
        "--mixed",
        action="store_true",
        help="of an FP8 prefill, also the kernels for layers that a calibration left in BF16",
    )


def _generate(args: argparse.Namespace) -> int:
    settings = BuildSettings.from_environment()
    config, _, specs = _plan(args, settings)
    folder: Path = args.output or Path(f"kernels-{config.name}-{args.precision}")
    folder.mkdir(parents=True, exist_ok=True)
    for spec in specs:
        (folder / f"{file_stem(spec.name)}.cu").write_text(render(spec), encoding="utf-8")
    command = shlex.join(["nvcc", *nvcc_options([settings.include_dir, Path("CUTLASS/include")])])
    print(f"{len(specs)} sources for {config.name}, {args.precision}, in {folder}")
    print(
        f"To compile one by hand (CUTLASS/include: the headers that `futransformer doctor` names): {command} KERNEL.cu"
    )
    return 0


def _build(args: argparse.Namespace) -> int:
    settings = BuildSettings.from_environment(jobs=args.jobs)
    config, table, specs = _plan(args, settings)
    if args.profiling:
        profiling = profiling_specs(make_plan(config, args.precision, table))
        if not profiling:
            raise UnsupportedError(f"--profiling: no kernel of {config.name} in {args.precision} has a build for it")
        specs += profiling
    events: list[BuildEvent] = []

    def progress(event: BuildEvent) -> None:
        events.append(event)
        if not event.cached:
            print(event, file=sys.stderr, flush=True)

    start = time.monotonic()
    records = build_kernels(specs, settings=settings, progress=progress)
    seconds = time.monotonic() - start
    manifest = ModelManifest(config.name, args.precision, records, recorded(table))
    wheel = write_wheel(manifest, args.wheel) if args.wheel else None
    if args.output:
        records = export(manifest, args.output).kernels
    compiled = sum(not event.cached for event in events)
    if args.json:
        print(
            json.dumps(
                {
                    "config": config.name,
                    "precision": args.precision,
                    "output": str(args.output) if args.output else None,
                    "wheel": str(wheel) if wheel else None,
                    "cache": str(settings.cache_root),
                    "seconds": round(seconds, 3),
                    "compiled": compiled,
                    "kernels": [_described(spec, record) for spec, record in zip(specs, records, strict=True)],
                },
                indent=2,
            )
        )
        return 0
    header = ("kernel", "tile", "stages", "registers", "shared B", "spill B", "seconds")
    print(text_table(header, [_row(spec, record) for spec, record in zip(specs, records, strict=True)]))
    where = args.output or settings.cache_root
    print(f"{len(records)} kernels of {config.name} ({args.precision}) in {where}: {compiled} built, {seconds:.1f} s")
    if wheel:
        print(f"{wheel}, {megabytes(wheel.stat().st_size)}: pip install it where they are to run")
    return 0


def _cache_list(args: argparse.Namespace) -> int:
    cache = KernelCache(BuildSettings.from_environment().cache_root)
    with cache.errors():
        entries = cache.entries()
    total = sum(entry.size_bytes for entry in entries)
    if args.json:
        listed = [
            {
                "name": entry.record.name if entry.record else None,
                "folder": str(entry.folder),
                "size_bytes": entry.size_bytes,
                "readable": entry.record is not None,
                "nvcc_version": entry.record.nvcc_version if entry.record else None,
                "compile_seconds": entry.record.compile_seconds if entry.record else None,
            }
            for entry in entries
        ]
        print(json.dumps({"cache": str(cache.root), "size_bytes": total, "kernels": listed}, indent=2))
        return 0
    rows = [
        (
            entry.record.name
            if entry.record
            else f"{entry.folder.parent.name} (unreadable: of another version, or damaged)",
            entry.folder.name,
            entry.record.nvcc_version if entry.record else "",
            megabytes(entry.size_bytes),
            f"{entry.record.compile_seconds:.1f}" if entry.record else "",
        )
        for entry in entries
    ]
    if rows:
        print(text_table(("kernel", "source-tool chain", "nvcc", "size", "seconds"), rows))
    print(f"{len(entries)} kernels, {megabytes(total)}, in {cache.root}")
    return 0


def _cache_clear(args: argparse.Namespace) -> int:
    cache = KernelCache(BuildSettings.from_environment().cache_root)
    with cache.errors():
        cleared = cache.clear()
    if args.json:
        print(
            json.dumps(
                {
                    "cache": str(cache.root),
                    "removed": cleared.kernels,
                    "size_bytes": cleared.size_bytes,
                    "busy": cleared.busy,
                },
                indent=2,
            )
        )
        return 0
    print(f"removed {cleared.kernels} kernels, {megabytes(cleared.size_bytes)}, from {cache.root}")
    if cleared.busy:
        print(f"left {cleared.busy} that another process is building now")
    return 0


def _plan(
    args: argparse.Namespace, settings: BuildSettings
) -> tuple[LlamaConfig, ScheduleTable, tuple[KernelSpec, ...]]:
    config, table = load_config(args.config), schedule_table(settings)
    if args.precision is None:
        path = Path(args.config).expanduser()
        named = None if args.config.lower() in CONFIGS else named_precision(path if path.is_dir() else path.parent)
        args.precision = named or BF16.name
    return config, table, kernel_specs(config, args.precision, table, mixed=args.mixed)


def _row(spec: KernelSpec, record: KernelRecord) -> tuple[str, ...]:
    resources = record.resources
    stages = getattr(spec, "stages", None)
    return (
        record.name,
        tile_of(spec),
        "" if stages is None else str(stages),
        str(resources.registers),
        str(record.shared_bytes + resources.static_shared_bytes),
        str(resources.spill_store_bytes + resources.spill_load_bytes),
        f"{record.compile_seconds:.1f}",
    )


def _described(spec: KernelSpec, record: KernelRecord) -> dict[str, Any]:
    return {
        **record.to_json(),
        "cubin": str(record.cubin),
        "tile": tile_of(spec),
        "stages": getattr(spec, "stages", None),
    }


def tile_of(spec: KernelSpec) -> str:
    """Rows x columns (x depth) that a block computes at a time; in decode, output columns x sequences."""
    if isinstance(spec, GemmSpec):
        return str(spec.tile)
    if isinstance(spec, AttentionPrefillSpec):
        return f"{spec.tile_m}x{spec.tile_n}"
    if isinstance(spec, DecodeGemmSpec):
        return f"{16 * spec.row_tiles}x{spec.batch_tile}"
    return ""
