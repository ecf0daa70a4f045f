"""The command that tunes the prefill GEMMs for this card: ``tune CONFIG``.

Candidates are compiled, checked against the reference, and timed beside what is used now; what wins goes into the table
that later builds for this kind of card go by. Compiling and timing can be done on two machines.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from futransformer.build.compile import BuildEvent
from futransformer.build.manifest import load_cubin
from futransformer.build.settings import BuildSettings
from futransformer.generator.config import LlamaConfig, load_config
from futransformer.generator.errors import DeviceError, InputError
from futransformer.generator.precision import PRECISION_NAMES
from futransformer.generator.schedules import MULTIPROCESSORS, ScheduleTable
from futransformer.tables import schedule_table, tuned_path, write_table

if TYPE_CHECKING:
    from futransformer.build.load import LoadedKernels
    from futransformer.tune.measure import Outcome
    from futransformer.tune.sweep import Sweep

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

DEFAULT_CANDIDATES = 8
DEFAULT_SECONDS = 180.0
DEFAULT_OPS = "qkv,o,gate_up,down"


def add_parsers(subparsers: Subparsers) -> None:
    """Add the command of this module."""
    tune = subparsers.add_parser(
        "tune",
        help="find the fastest prefill GEMMs for a model on this card",
        description="Compile, check and time schedules of the prefill GEMMs; later builds use what wins.",
    )
    tune.add_argument("config", metavar="CONFIG", help="a model's name, a Hugging Face folder, or a config.json")
    tune.add_argument("--precision", default="bf16", help=f"one of: {PRECISION_NAMES} (default: bf16)")
    tune.add_argument(
        "--ops", default=DEFAULT_OPS, metavar="LIST", help=f"projections to tune (default: {DEFAULT_OPS})"
    )
    tune.add_argument(
        "--candidates",
        type=int,
        default=DEFAULT_CANDIDATES,
        metavar="N",
        help=f"schedules to try for each projection and number of rows (default: {DEFAULT_CANDIDATES})",
    )
    tune.add_argument(
        "--seconds", type=float, default=DEFAULT_SECONDS, metavar="N", help="time for measuring, in all (default: 180)"
    )
    where = tune.add_mutually_exclusive_group()
    where.add_argument("--build-only", type=Path, metavar="DIR", help="only compile, and export there; needs no GPU")
    where.add_argument(
        "--kernels", type=Path, metavar="DIR", help="only time what --build-only exported there; needs no nvcc"
    )
    tune.add_argument(
        "--multiprocessors",
        type=int,
        metavar="N",
        help=f"of the card that --build-only is for (default: this machine's card, else {MULTIPROCESSORS})",
    )
    tune.add_argument(
        "--jobs", type=int, metavar="N", help="compilers at once (default: as cores and free memory allow)"
    )
    tune.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="where to write the table (default: this card's, in the cache folder)",
    )
    tune.add_argument("--json", action="store_true", help="print JSON instead of text")
    tune.set_defaults(handler=_tune)


def _tune(args: argparse.Namespace) -> int:
    config = load_config(args.config)
    if not args.seconds > 0:  # nor NaN
        raise InputError(f"--seconds must be positive, not {args.seconds:g}")
    if args.multiprocessors is not None and (args.multiprocessors < 1 or not args.build_only):
        raise InputError("--multiprocessors needs a positive number, and belongs to --build-only")
    settings = BuildSettings.from_environment(jobs=args.jobs)
    if args.build_only:
        return _build_only(args, config, settings)
    return _measure(args, config, settings)


def _build_only(args: argparse.Namespace, config: LlamaConfig, settings: BuildSettings) -> int:
    from futransformer.card import current_card  # noqa: PLC0415 - see futransformer.cli
    from futransformer.tune.sweep import build, export_sweep  # noqa: PLC0415

    card = current_card()
    here = card.multiprocessors if card else MULTIPROCESSORS
    table = schedule_table(settings)
    base = ScheduleTable(card.name if card else "any", args.multiprocessors or here, table.schedules)
    sweep = _sweep(args, config, base)
    start = time.monotonic()
    records, refused = build(sweep, settings, _progress)
    _say_refused(refused)
    export_sweep(sweep.without(frozenset(refused)), records, args.build_only)
    print(f"{len(records)} kernels of {config.name} in {args.build_only}, {time.monotonic() - start:.1f} s")
    precision = "" if args.precision == "bf16" else f" --precision {args.precision}"
    print(f"Time them: futransformer tune {args.config}{precision} --kernels {args.build_only}")
    return 0


def _measure(args: argparse.Namespace, config: LlamaConfig, settings: BuildSettings) -> int:
    import torch  # noqa: PLC0415 - see futransformer.cli

    from futransformer.card import Card  # noqa: PLC0415
    from futransformer.driver import hopper_problem  # noqa: PLC0415
    from futransformer.tune.sweep import build, load_sweep  # noqa: PLC0415

    if args.kernels:
        sweep = load_sweep(args.kernels, config, args.precision)
    problem = hopper_problem()
    if problem is not None:
        raise DeviceError(
            f"{problem}; tune where there is an H100 or H200, and compile here for it with --build-only DIR"
        )
    device = torch.device("cuda", torch.cuda.current_device())
    properties = torch.cuda.get_device_properties(device)
    card = Card(properties.name, properties.multi_processor_count)
    if args.kernels:
        from futransformer.build.load import load_or_build  # noqa: PLC0415

        if sweep.table.multiprocessors != card.multiprocessors:
            raise DeviceError(
                f"{args.kernels} was built for {sweep.table.multiprocessors} multiprocessors, this {card.name} has "
                f"{card.multiprocessors}: build with --multiprocessors {card.multiprocessors}"
            )
        built = load_or_build(sweep.specs(), folder=args.kernels)
    else:
        base = ScheduleTable(card.name, card.multiprocessors, schedule_table(settings, device.index).schedules)
        sweep = _sweep(args, config, base)
        records, refused = build(sweep, settings, _progress)
        _say_refused(refused)
        sweep = sweep.without(frozenset(refused))
        built = {record.name: (record, load_cubin(record)) for record in records}
    outcome = _run(args, sweep, built, device)
    table = ScheduleTable(card.name, card.multiprocessors, sweep.table.schedules).with_schedules(outcome.changes())
    path = args.output or tuned_path(settings, card)
    write_table(table, path)
    _report(args, outcome, path)
    return 0


def _run(args: argparse.Namespace, sweep: Sweep, built: LoadedKernels, device: Any) -> Outcome:
    import torch  # noqa: PLC0415

    from futransformer.bench.ceilings import measure_ceilings  # noqa: PLC0415
    from futransformer.bench.harness import CudaClock, Harness  # noqa: PLC0415
    from futransformer.driver import Kernel  # noqa: PLC0415
    from futransformer.library import KernelLibrary  # noqa: PLC0415
    from futransformer.tune.measure import run_sweep  # noqa: PLC0415

    library = KernelLibrary(sweep.config, sweep.precision, sweep.plan, built, device)
    harness = Harness(CudaClock())
    with torch.no_grad():
        return run_sweep(
            sweep,
            args.config,
            library,
            lambda spec: Kernel(spec, *built[spec.name], device, library.launch_chain),
            harness,
            measure_ceilings(harness, device),
            seconds=args.seconds,
            say=_say,
        )


def _sweep(args: argparse.Namespace, config: LlamaConfig, table: ScheduleTable) -> Sweep:
    from futransformer.tune.sweep import make_sweep  # noqa: PLC0415

    ops = [op.strip() for op in args.ops.split(",") if op.strip()]
    return make_sweep(config, args.precision, table, ops, args.candidates)


def _report(args: argparse.Namespace, outcome: Outcome, path: Path) -> None:
    changed = len(outcome.changes())
    if not args.json:
        print(f"{changed} of {len(outcome.results)} schedules changed; the table: {path}")
        return
    results = [
        {
            "op": result.place.op,
            "n": result.place.n,
            "k": result.place.k,
            "rows": result.place.rows,
            "incumbent": result.incumbent.name,
            "winner": result.winner.name,
            "times": {spec.name: round(ratio, 4) for spec, ratio in result.times},
            "layer": round(result.layer, 4) if result.layer and math.isfinite(result.layer) else None,
            "refused": result.refused,
        }
        for result in outcome.results
    ]
    left_out = [str(place) for place in outcome.left_out]
    print(json.dumps({"table": str(path), "changed": changed, "results": results, "left_out": left_out}, indent=1))


def _say_refused(refused: dict[str, str]) -> None:
    for name, reason in refused.items():
        _say(f"{name} is no candidate: {reason}")


def _progress(event: BuildEvent) -> None:
    if not event.cached:
        _say(f"{event.record.name} ({event.record.compile_seconds:.1f} s)")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
