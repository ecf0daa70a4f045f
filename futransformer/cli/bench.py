"""The command that measures: ``bench SUBJECT...``, ``accuracy``, ``perplexity``, ``list``, and ``report``.

Rows go to one JSON file a subject and precision; what was left out, and why, to standard error and into the file.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from futransformer.generator.errors import InputError
from futransformer.generator.precision import BF16, get_precision

if TYPE_CHECKING:
    from futransformer.bench.case import Ceilings
    from futransformer.bench.harness import Harness

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

DEFAULT_SECONDS = 240.0  # a subject
ACCURACY, PERPLEXITY, LIST, REPORT = "accuracy", "perplexity", "list", "report"


def add_parsers(subparsers: Subparsers) -> None:
    """Add the command of this module."""
    bench = subparsers.add_parser(
        "bench",
        help="measure the kernels beside what else one could run, or report what was measured",
        description="Measure subjects: each case is checked against the reference first, then timed beside its rivals "
        "in one process. Needs a Hopper GPU; list, report and the subject build do not.",
    )
    bench.add_argument(
        "subjects",
        nargs="+",
        metavar="SUBJECT",
        help="what to measure, the first part of the names that `bench list` prints; or alone: all (of them); accuracy "
        "(on a model: --model and --text); perplexity (of a quantised model beside its --baseline); list (print every "
        "case); report (the results, into docs/performance.md and docs/accuracy.md)",
    )
    bench.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="PATTERN",
        help="cases with these parts in their names, such as 8b/*/M=16",
    )
    bench.add_argument(
        "--seconds", type=float, default=DEFAULT_SECONDS, metavar="N", help="time for each subject (default: 240)"
    )
    bench.add_argument(
        "--kernels",
        type=Path,
        metavar="DIR",
        help="a folder of exports, each in a folder of its config's name, or name-precision (default: the cache)",
    )
    bench.add_argument("--quick-rivals", action="store_true", help="do not let rivals tune themselves first")
    bench.add_argument(
        "--compile-seconds",
        type=float,
        metavar="N",
        help="serve: time for transformers' compiled batching, most of which it compiles (default: 170)",
    )
    bench.add_argument("--commit", metavar="SHA", help="the commit measured, where there is no git history")
    bench.add_argument(
        "--output", type=Path, metavar="FOLDER", help="the results' folder (default: benchmarks/results/CARD)"
    )
    bench.add_argument("--json", action="store_true", help="print the results files instead of a line a row")
    bench.add_argument("--model", metavar="MODEL", help="accuracy, perplexity: a Hugging Face folder, or smollm2-135m")
    bench.add_argument(
        "--text", type=Path, metavar="FILE", help="accuracy, perplexity: UTF-8 text to score, or wikitext2"
    )
    bench.add_argument(
        "--precision",
        default="bf16",
        help="accuracy: bf16, fp8 (of the prefill), or one of codes in decode; perplexity: any, "
        "several with commas between",
    )
    bench.add_argument(
        "--baseline",
        metavar="MODEL",
        help="perplexity: the model in BF16 that --model was made from (default: --model)",
    )
    bench.add_argument(
        "--label",
        metavar="NAME",
        help="perplexity: how the weights were made, for the rows' names (default: as the folder says)",
    )
    bench.add_argument("--windows", type=int, metavar="N", help="perplexity: score the first N windows (default: all)")
    bench.add_argument(
        "--calibration", type=Path, metavar="FILE", help="accuracy: UTF-8 text for FP8 scales (default: a page of ours)"
    )
    bench.add_argument(
        "--recipe",
        action="append",
        default=[],
        metavar="RECIPE",
        help="accuracy of fp8: rtn or gptq, and after a + what stays in BF16, as in gptq+auto:4; several are measured "
        "one after another, the last in full (default: rtn)",
    )
    bench.set_defaults(handler=_bench)


def _bench(args: argparse.Namespace) -> int:
    if not args.seconds > 0:  # nor NaN
        raise InputError(f"--seconds must be positive, not {args.seconds:g}")
    if args.compile_seconds is not None and not args.compile_seconds > 0:
        raise InputError(f"--compile-seconds must be positive, not {args.compile_seconds:g}")
    if REPORT in args.subjects:
        return _report(args)
    if LIST in args.subjects:
        return _list(args)
    if ACCURACY in args.subjects:
        return _accuracy(args)
    if PERPLEXITY in args.subjects:
        return _perplexity(args)
    return _measure(args)


def _alone(args: argparse.Namespace, action: str) -> None:
    if len(args.subjects) > 1:
        others = " ".join(subject for subject in args.subjects if subject != action)
        raise InputError(f"bench {action} stands alone; name it once, and run it apart from: {others or action}")


def _report(args: argparse.Namespace) -> int:
    _alone(args, REPORT)
    from futransformer.bench import report, results  # noqa: PLC0415 - see futransformer.cli

    card = results.default_folder()
    folder = args.output or (card if card.is_dir() else card.parent / "h200")
    for page in report.write(folder, Path("docs")):
        print(page)
    return 0


def _list(args: argparse.Namespace) -> int:
    from futransformer.bench.subjects import SUBJECTS, subject_cases  # noqa: PLC0415 - see futransformer.cli

    _alone(args, LIST)
    for subject in SUBJECTS:
        for case in subject_cases(subject):
            print(f"{case.name}{'' if case.default else '  (with --only)'}")
    return 0


def _accuracy(args: argparse.Namespace) -> int:
    from futransformer.bench import accuracy, accuracy_fp8, accuracy_int4, results  # noqa: PLC0415 - see futransformer.cli
    from futransformer.cli.model import model_folder, read_text  # noqa: PLC0415

    _alone(args, ACCURACY)
    if args.model is None or args.text is None:
        raise InputError("bench accuracy needs --model MODEL and --text FILE")
    precision = get_precision(args.precision)
    coded = precision.decodes_codes
    if not coded and precision.name not in ("bf16", "fp8"):
        raise InputError(f"bench accuracy measures bf16, fp8, and codes that decode reads, not {precision.name}")
    _, text = read_text(args.text, named=True)
    where = results.environment(args.commit)
    model = model_folder(args.model)
    if coded:
        calibration = None if precision.prefill == BF16 else read_text(args.calibration)[1]
        rows = accuracy_int4.rows(model, text, precision.name, args.kernels, calibration)
    elif precision.name == "fp8":
        _, calibration = read_text(args.calibration)
        recipes = list(dict.fromkeys(args.recipe)) or [accuracy_fp8.NEAREST]
        rows = accuracy_fp8.rows(model, text, calibration, args.kernels, recipes)
    else:
        rows = accuracy.rows(model, text, args.kernels)
    content = results.document(ACCURACY, where, rows, precision=precision.name)
    path = results.write(args.output or results.default_folder(), content)
    print(json.dumps(content, indent=1) if args.json else path)
    return 0


def _perplexity(args: argparse.Namespace) -> int:
    from futransformer.bench import perplexity, results  # noqa: PLC0415 - see futransformer.cli
    from futransformer.cli.model import model_folder, read_text  # noqa: PLC0415

    _alone(args, PERPLEXITY)
    if args.model is None or args.text is None:
        raise InputError("bench perplexity needs --model MODEL and --text FILE")
    precisions = [get_precision(name).name for name in args.precision.split(",")]
    _, text = read_text(args.text, named=True)
    where = results.environment(args.commit)
    rows: list[dict[str, Any]] = []
    for row in perplexity.rows(
        model_folder(args.model),
        text,
        precisions,
        baseline=None if args.baseline is None else model_folder(args.baseline),
        label=args.label,
        windows=args.windows,
        kernels=args.kernels,
    ):
        rows.append(row)
        content = results.document(PERPLEXITY, where, rows) | {"model": row["case"].split("/")[1]}
        path = results.merge(args.output or results.default_folder(), content)  # what is measured is kept
    print(json.dumps(content, indent=1) if args.json else path)
    return 0


def _measure(args: argparse.Namespace) -> int:
    import torch  # noqa: PLC0415 - see futransformer.cli

    from futransformer.bench import results, runner  # noqa: PLC0415
    from futransformer.bench.subjects import HOST_SUBJECTS, SUBJECTS, subject_cases  # noqa: PLC0415

    subjects = list(SUBJECTS) if args.subjects == ["all"] else list(dict.fromkeys(args.subjects))
    chosen = {subject: runner.select(subject_cases(subject), args.only) for subject in subjects}
    where = results.environment(args.commit)
    on_host = HOST_SUBJECTS.issuperset(subjects)
    device = torch.device("cpu") if on_host else _device()
    harness = _harness()
    ceilings = None if on_host else _ceilings(harness, device)
    bench = runner.Bench(
        device,
        ceilings,
        kernels=args.kernels,
        tuned=not args.quick_rivals,
        compile_seconds=args.compile_seconds,
    )
    folder = args.output or results.default_folder()
    contents: list[dict[str, Any]] = []
    failed = False

    def content(subject: str, precision: str, outcome: runner.Outcome) -> dict[str, Any]:
        return results.document(
            subject, where, outcome.rows, precision=precision, ceilings=ceilings, notes=outcome.notes
        )

    with torch.no_grad():
        for subject, precision, cases in runner.by_file(chosen):

            def save(outcome: runner.Outcome, subject: str = subject, precision: str = precision) -> None:
                results.write(folder, content(subject, precision, outcome))

            seconds = args.seconds * len(cases) / len(chosen[subject])
            outcome = runner.run_cases(cases, bench, harness, seconds=seconds, say=_say, save=save)
            failed |= outcome.failed
            contents.append(content(subject, precision, outcome))
            _say(f"wrote {results.write(folder, contents[-1])}")
    if args.json:
        print(json.dumps(contents, indent=1))
    else:
        for measured in contents:
            for row in measured["rows"]:
                print(runner.describe(row))
    return 1 if failed else 0


def _device() -> Any:
    from futransformer.driver import require_hopper  # noqa: PLC0415

    return require_hopper()


def _harness() -> Harness:
    from futransformer.bench.harness import CudaClock, Harness  # noqa: PLC0415

    return Harness(CudaClock())


def _ceilings(harness: Harness, device: Any) -> Ceilings:
    from futransformer.bench.ceilings import measure_ceilings  # noqa: PLC0415

    ceilings = measure_ceilings(harness, device)
    _say(
        f"ceilings: {ceilings.read_tbps:.2f} TB/s read, {ceilings.bf16_tflops:.0f} TFLOP/s BF16, "
        f"{ceilings.fp8_tflops:.0f} TFLOP/s FP8"
    )
    return ceilings


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
