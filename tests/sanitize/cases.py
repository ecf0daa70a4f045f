"""Every kernel of an export at a few small, odd shapes, checked against the reference: what runs under each tool.

``python -m tests.sanitize.cases --kernels FOLDER --export NAME --tool TOOL --seconds N --claims FOLDER`` writes JSON,
an object a line: ``{"begin": case}`` before a case, and after it ``{"case": ..., "kernels": {name: launches},
"seconds": ..., "failure": null or what was wrong}``; ``{"left_out": case}`` once the seconds are spent. Cheap cases
come first; every kernel of an export is launched by some case.

Exports share kernels, and one may have two processes: a case runs where it is the first to claim something that it
covers, by a file in the folder of claims, which the processes of a tool share. ``--only PATTERN``, as often as wanted:
the cases of such kernels alone.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple, cast

import pytest
import torch

from futransformer.build.load import load_or_build
from futransformer.driver import Kernel
from futransformer.generator.errors import FuTransformerError
from futransformer.generator.plan import projections
from futransformer.generator.precision import E4M3
from futransformer.generator.specs import GemmSpec, KernelSpec
from futransformer.library import KernelLibrary
from futransformer.ops.attention_decode import AttentionDecode
from futransformer.ops.interface import PROJECTIONS, Projection
from tests.ops import test_attention_decode as decode_attention
from tests.ops import test_attention_prefill as prefill_attention
from tests.ops import test_decode_gemm as decode_gemm
from tests.ops import test_decode_layers as decode_layers
from tests.ops import test_gemm as prefill_gemm
from tests.ops import test_next_tokens as next_tokens
from tests.ops import test_odd_shapes as odd_shapes
from tests.ops import test_sampling as sampling
from tests.ops import test_step as step
from tests.ops.models import (
    COPIES,
    COPIES_NAME,
    LAYERS_ALONE,
    LAYERS_NAME,
    LAYERS_SPECS,
    TAILS,
    TAILS_NAME,
    model_config,
    precision_of,
    tested_plan,
)
from tests.ops.stand_in import CPU
from tests.sanitize import planted
from tests.sanitize.remote import RemoteKernel, layers_library, map_on_the_host, remote_kernel, remote_library
from tests.sanitize.runner import is_chosen

PROMPTS = ((0, 0), (1, 1), (65, 65), (17, 81), (129, 130), (3, 67))  # (queries, keys)
LENGTHS = (0, 1, 63, 64, 65, 200)  # of the sequences of a decode batch
MOST_ROWS = 300  # of a prefill: two tiles of 128 and a part
EMPTY_ROWS = 3  # of a decode kernel's batch tile
TAIL_ROWS = (127, 300)
CONTEXTS = (700, 130, 1)  # tokens of the one sequence that all layers are launched for
LARGE_LAYERS = 10_000  # features of an MLP from which on a tool has time for the first alone
RING_TURNS = 8

Launched = Callable[[str], None]


class Case(NamedTuple):
    """One thing to run, and the kernels that it covers; an AssertionError says that a result was wrong."""

    name: str
    run: Callable[[], None]
    covers: tuple[str, ...]  # names of kernels, behind which it may be told how they are launched

    def is_chosen(self, only: Sequence[str]) -> bool:
        """Whether it covers a kernel whose name is like one of the patterns."""
        return any(is_chosen(re.split(r"[/ ]", what)[0], only) for what in self.covers)


def cases_of(export: str, kernels: Path, tool: str, patch: pytest.MonkeyPatch, launched: Launched) -> Iterator[Case]:
    """The cases of one export; the kernels are loaded when the first is asked for."""
    folder = kernels / export
    if export == planted.EXPORT:
        built = load_or_build(planted.SPECS, folder=folder)
        for planted_spec in planted.specs_for(tool):
            kernel = remote_kernel(planted_spec, built, launched)
            yield Case(planted_spec.name, partial(run_planted, planted_spec.fault, kernel), (planted_spec.name,))
    elif export == TAILS_NAME:
        map_on_the_host(patch)
        built = load_or_build(TAILS, folder=folder)
        for spec in TAILS:
            tail = cast(Kernel, remote_kernel(spec, built, launched))
            for rows in TAIL_ROWS:
                run = partial(odd_shapes.check_tails, spec, tail, CPU, rows)
                yield Case(f"{spec.name}/M={rows}", run, (f"{spec.name}/M={rows}",))
    elif export == COPIES_NAME:
        built = load_or_build(tuple(COPIES.values()), folder=folder)
        for name, attention in COPIES.items():
            over_copy = AttentionDecode(cast(Kernel, remote_kernel(attention, built, launched)))
            yield Case(f"attention_decode/{name}", partial(check_attention_decode, over_copy), (attention.name,))
    elif export == LAYERS_NAME:
        built = load_or_build(tuple(LAYERS_SPECS.values()), folder=folder)
        for name, layers in LAYERS_SPECS.items():
            library = partial(layers_library, *LAYERS_ALONE[name], layers, built, patch, launched)
            yield Case(f"decode_layers/{name}", partial(check_layers, library), (layers.name,))
    else:
        plan = tested_plan(export)
        built = load_or_build(plan.specs(), folder=folder)
        yield from model_cases(remote_library(model_config(export), precision_of(export), plan, built, patch, launched))


def model_cases(ops: KernelLibrary) -> Iterator[Case]:
    """Each operation of a model; projections in the order of their weights' sizes."""
    plan = ops.plan

    def case(name: str, run: Callable[[], None], *specs: KernelSpec) -> Case:
        return Case(name, run, tuple(spec.name for spec in specs))

    yield case("rows", partial(odd_shapes.check_rows, ops), *plan.gather_rows.values(), plan.argmax)
    yield case("sample", partial(sampling.check_sample, ops, 5), plan.sample)
    yield case("step", partial(check_step, ops), plan.step_begin, plan.step_end)
    yield case("attention_decode", partial(check_attention_decode, ops._attention_decode), plan.attention_decode)
    yield case("attention_prefill", partial(check_attention_prefill, ops), plan.attention_prefill)
    if plan.decode_layers is not None:
        yield case("decode_layers", partial(check_layers, lambda: ops), plan.decode_layers)
    shapes = projections(ops.config)
    for op in sorted(PROJECTIONS, key=lambda op: shapes[op][0] * shapes[op][1]):
        for spec, rows in rows_of_each_kernel(ops, op).items():
            yield case(f"prefill/{op}/M={rows}", partial(odd_shapes.check_prefill, ops, op, rows), spec)
        for tile, kernel in plan.decode[op].items():
            yield case(f"decode/{op}/B={tile - EMPTY_ROWS}", partial(check_decode, ops, op, tile), kernel)
        if op == "lm_head":  # whose logits nobody may ask for
            head = min(plan.decode[op].items())[1]
            run = partial(next_tokens.check_tokens, ops, 1)
            yield Case("decode/next_tokens/B=1", run, (f"{head.name} without logits", plan.argmax_parts.name))


def rows_of_each_kernel(ops: KernelLibrary, op: Projection) -> dict[GemmSpec, int]:
    """One number for each kernel: one more than half of the most that it serves, as a bucket begins."""
    return {spec: min(most // 2 + 1, MOST_ROWS) for most, spec in ops.plan.prefill[op].items()}


def check_step(ops: KernelLibrary) -> None:
    """Its two ends, of more rows than threads."""
    step.check_begin(ops, 300)
    step.check_end(ops, ops.config.vocab_size, 300)


def check_decode(ops: KernelLibrary, op: Projection, tile: int) -> None:
    """A batch that leaves some rows of its tile empty."""
    rows = tile - EMPTY_ROWS
    if op == "qkv" and (ops.precision.kv == E4M3 or ops.precision.copy is not None):
        writing_codes = prefill_gemm.Problem(ops, op, rows, "decode")
        prefill_gemm.check_against_reference(writing_codes, writing_codes.run(ops))
        return
    problem = decode_gemm.problem_of(ops, op)
    decode_gemm.assert_close(problem, problem.launch(0, rows, tile), rows)


def check_attention_decode(op: AttentionDecode) -> None:
    """As the op splits the sequences, a split a page, and one split."""
    spec = op.spec
    batch = decode_attention.Problem(op, spec.heads, LENGTHS, codes=spec.element == E4M3, copy=spec.copy)
    for options in decode_attention.CHOSEN_AND_FIXED:
        batch.check(batch.run(**options))


def check_attention_prefill(ops: KernelLibrary) -> None:
    """Prompts and later turns in one launch."""
    spec = ops.plan.attention_prefill
    codes = ops.precision.kv == E4M3
    prompts = prefill_attention.Problem(ops, spec.heads, PROMPTS, fp8=spec.fp8_out, codes=codes)
    prompts.check(prompts.run())


def check_layers(library: Callable[[], KernelLibrary]) -> None:
    """Texts of many pages, a few and one; the library is made when the case is run."""
    ops = library()
    large = ops.config.intermediate_size >= LARGE_LAYERS
    decode_layers.check_layers(ops, CONTEXTS[: 1 if large else None])


def run_planted(fault: str, kernel: RemoteKernel) -> None:
    """Launch; what a faulty kernel computes is nothing to rely on."""
    values, out = torch.arange(planted.THREADS, dtype=torch.float32), torch.zeros(planted.THREADS)
    kernel.launch((1, 1, 1), values=values, copies=RING_TURNS, out=out)
    if fault == planted.SOUND:
        assert out.tolist() == [0.0] * 32 + [RING_TURNS * (planted.THREADS - 1.0)] * 32, "the sound kernel is not"


def claim(claims: Path, covers: Iterable[str]) -> bool:
    """Claim all of it; whether something was not claimed before."""
    new = 0
    for what in covers:
        with suppress(FileExistsError):
            claims.joinpath(hashlib.sha256(what.encode()).hexdigest()).touch(exist_ok=False)
            new += 1
    return new > 0


def run_cases(
    cases: Iterable[Case], launches: Counter[str], seconds: float, claims: Path
) -> Iterator[dict[str, object]]:
    """Run what begins within ``seconds`` and is not claimed; yield the lines of the module's docstring."""
    end = time.monotonic() + seconds
    for case in cases:
        if not claim(claims, case.covers):
            continue
        start = time.monotonic()
        if start >= end:
            yield {"left_out": case.name}
            continue
        yield {"begin": case.name}
        launches.clear()
        failure = None
        try:
            case.run()
        except (AssertionError, FuTransformerError, RuntimeError) as error:
            failure = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        took = round(time.monotonic() - start, 3)
        yield {"case": case.name, "kernels": dict(launches), "seconds": took, "failure": failure}


def main() -> None:
    """Run one export's cases."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kernels", type=Path, required=True)
    parser.add_argument("--export", required=True)
    parser.add_argument("--tool", required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--claims", type=Path, required=True)
    parser.add_argument("--only", action="append", default=[])
    args = parser.parse_args()
    launches: Counter[str] = Counter()

    def launched(name: str) -> None:
        launches[name] += 1

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        cases = cases_of(args.export, args.kernels, args.tool, patch, launched)
        chosen = (case for case in cases if case.is_chosen(args.only))
        for line in run_cases(chosen, launches, args.seconds, args.claims):
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
