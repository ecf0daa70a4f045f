"""What the pages say: every bash and python block is run, every figure and link looked up.

A block of bash or python is an example to type; ``console`` and ``text`` are not run. A comment before a block says
otherwise: ``<!-- not run: why -->``, or ``<!-- GPU -->``, whose ``load_kernels`` is the CPU reference where there is no
Hopper GPU. A ``text`` block that follows is what the example prints.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import futransformer
from futransformer.driver import hopper_problem
from futransformer.generator.config import CONFIGS, load_config
from futransformer.generator.precision import get_precision
from futransformer.library import load_kernels
from futransformer.memory import plan_memory
from futransformer.model import CACHE_TOKENS, MAX_ROWS
from futransformer.reference import ReferenceOps

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
BLOCK = re.compile(
    r"(?:<!-- (?P<note>[^\n]*) -->\n)?```(?P<language>bash|python)\n(?P<code>.*?)\n```"
    r"(?:\n\n```text\n(?P<printed>.*?)\n```)?",
    re.DOTALL,
)


@dataclass(frozen=True)
class Example:
    """One block of a page."""

    page: Path
    line: int
    note: str
    language: str
    code: str
    printed: str | None


def examples(page: Path) -> list[Example]:
    """The blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Example(
            page,
            text.count("\n", 0, block.start("code")) + 1,
            block["note"] or "",
            block["language"],
            block["code"],
            block["printed"],
        )
        for block in BLOCK.finditer(text)
    ]


EXAMPLES = [
    pytest.param(
        example,
        id=f"{example.page.relative_to(ROOT)}:{example.line}",
        marks=[] if example.note == "GPU" else [pytest.mark.compile, pytest.mark.model],
    )
    for page in PAGES
    for example in examples(page)
    if not example.note.startswith("not run: ")
]


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_works(
    example: Example,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if example.language == "bash":
        printed = run_bash(example.code, tmp_path)
    elif "torch.compile" in example.code:
        # Its compiler imports setuptools, which wants to be there before whoever else has asked for distutils.
        printed = run_alone(example.code, tmp_path)
    else:
        monkeypatch.chdir(tmp_path)
        if example.note == "GPU":
            monkeypatch.setattr(futransformer, "load_kernels", kernels_of(request), raising=False)
        exec(compile(example.code, f"{example.page}:{example.line}", "exec"), {"__name__": "__main__"})
        printed = capsys.readouterr().out
    assert example.printed is None or printed.strip() == example.printed


def run_alone(code: str, folder: Path) -> str:
    """What a process of its own prints."""
    finished = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def run_bash(code: str, folder: Path) -> str:
    """Run commands as in the activated environment; return what they print."""
    programs = Path(sys.executable).parent
    if not (programs / "futransformer").exists():
        pytest.skip("the command futransformer is not installed beside this Python")
    environment = {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", code],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def kernels_of(request: pytest.FixtureRequest) -> Any:
    """A load_kernels for this machine: of the export that --kernels names, of the cache, or the reference."""
    exports: Path | None = request.config.getoption("--kernels")

    def load(config: str, precision: str = "bf16", *, folder: Path | None = None) -> Any:
        if hopper_problem() is not None:
            return ReferenceOps(load_config(config))
        return load_kernels(config, precision, folder=exports / config if exports else None)

    return load


def test_the_readme_shows_all_three_uses() -> None:
    """Were the pattern to miss a block, the tests above would pass by running nothing."""
    found = [(example.language, example.note[:3]) for example in examples(ROOT / "README.md")]
    of_python = [("python", ""), ("python", ""), ("python", "GPU")]
    plain = [("bash", ""), ("python", ""), ("bash", ""), *of_python, ("bash", "")]
    assert found == [("bash", "not"), *plain]


def test_ci_runs_the_commands_of_the_readme() -> None:
    script = ROOT / ".ci" / "run"
    if not script.exists():
        pytest.skip("a source distribution has no .ci/run")
    commands = examples(ROOT / "README.md")[0].code.splitlines()
    assert commands == ["make demo", "make test"]
    assert [line for line in script.read_text().splitlines() if line.startswith("make ")] == ["make check", *commands]


def test_the_figures_of_the_readme_are_those_that_were_measured() -> None:
    readme = (ROOT / "README.md").read_text()
    measured = json.loads((ROOT / "benchmarks/results/h200/accuracy.json").read_text())
    rows = {row["case"].removeprefix("perplexity/smollm2-135m/bf16/"): row for row in measured["rows"]}
    prefill = rows["through=prefill/ctx=1024/windows=296"]
    decode = rows["through=decode/ctx=1024/windows=296/B=64"]
    for what, value in (
        ("the prefill kernels", prefill["ours"]),
        ("the decode kernels, token by token, 64 windows at a time", decode["ours"]),
        ("the reference with the same rounding points", prefill["rivals"]["reference"]),
    ):
        assert f"| {what} | {value:.3f} |" in readme
    alone, together = (rows[f"generate/smollm2-135m/bf16/prompts=16/new=64/B={batch}"] for batch in (1, 16))
    assert f"{alone['ours']} (one sequence at a time) and {together['ours']} (16 at a time)" in readme
    assert alone["differing_outside_near_ties"] == together["differing_outside_near_ties"] == 0


def test_the_speeds_of_the_readme_are_those_that_were_measured() -> None:
    readme = (ROOT / "README.md").read_text()
    prompts, batches = ("4x2048", "1x8192"), (1, 8, 32)
    for row, subject, cases in (
        ("a layer of prefill", "prefill_block", [f"8b/bf16/{prompt}/burst" for prompt in prompts]),
        ("prefill attention", "attention_prefill", [f"8b/bf16/{prompt}/burst" for prompt in prompts]),
        ("gate and up + SwiGLU", "gateup_swiglu", ["8b/bf16/M=8192/burst"]),
        ("qkv, o, down", "gemm", [f"8b/{op}/bf16/M=8192/burst" for op in ("qkv", "o", "down")]),
        ("a layer of decode", "decode_block", [f"8b/bf16/B={batch}/ctx=1024" for batch in batches]),
    ):
        content = json.loads((ROOT / f"benchmarks/results/h200/{subject}.json").read_text())
        measured = {line["case"].removeprefix(f"{subject}/"): line["ratio"] for line in content["rows"]}
        said = next(line for line in readme.splitlines() if line.startswith(f"| {row}"))
        assert said.split("|")[-2].strip() == ", ".join(f"{measured[case]:.2f}" for case in cases)


def test_the_first_table_of_the_readme_is_what_was_measured() -> None:
    results = ROOT / "benchmarks/results/h200"
    said = [line.strip("| ") for line in (ROOT / "README.md").read_text().splitlines()]
    named = {"torch-fp8": "FP8", "torch-bf16": "BF16", "torch-int4": "INT4"}
    for what, subject, case in (
        ("a prompt of 128 tokens, FP8", "prefill_model-fp8", "8b/fp8/T=128/burst"),
        ("a prompt of 8192 tokens, FP8", "prefill_model-fp8", "8b/fp8/T=8192/burst"),
        ("a step of 1 sequence, INT4", "decode_step-int4-head8-kv4", "8b/int4-kv4/head=fp8/B=1/ctx=1024"),
        ("a step of 32 sequences, INT4", "decode_step-int4-head8-kv4", "8b/int4-kv4/head=fp8/B=32/ctx=1024"),
    ):
        rows = json.loads((results / f"{subject}.json").read_text())["rows"]
        (row,) = (row for row in rows if row["case"].split("/", 1)[1] == case)
        rivals = ", ".join(
            f"{three_digits(row['rivals'][name])} ms ({kind})" for name, kind in named.items() if name in row["rivals"]
        )
        assert f"{what} | {three_digits(row['ours'])} ms | {rivals} | {row['ratio']:.2f}" in said


def three_digits(value: float) -> str:
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}"


def test_the_table_of_models_is_that_of_the_generator() -> None:
    page = (ROOT / "docs/models.md").read_text()
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.count("|") == 10
    ]
    said = {row[0]: row[1:] for row in rows[2:]}
    assert said == {
        config.name: [
            str(config.hidden_size),
            str(config.intermediate_size),
            str(config.num_hidden_layers),
            f"{config.num_attention_heads} / {config.num_key_value_heads} x {config.head_dim}",
            str(config.vocab_size),
            str(config.max_position_embeddings),
            f"{config.rope_theta:.0f}"
            + (f", llama3 x {config.rope_scaling.factor:.0f}" if config.rope_scaling else ""),
            "yes" if config.tie_word_embeddings else "",
        ]
        for config in CONFIGS.values()
    }


def test_the_table_of_memory_is_what_the_plan_counts() -> None:
    rows = re.findall(r"^\| (\S+) \| ([\d.]+) GiB \| ([\d.]+) \|$", (ROOT / "docs/models.md").read_text(), re.MULTILINE)
    assert len(rows) >= 5
    for name, total, cache in rows:
        plan = plan_memory(load_config(name), get_precision("bf16"), cache_tokens=CACHE_TOKENS, rows=MAX_ROWS)
        assert (total, cache) == (f"{plan.total / 2**30:.1f}", f"{plan.kv_cache / 2**30:.1f}"), name


def test_the_table_of_memory_by_precision_is_what_the_plan_counts() -> None:
    page = (ROOT / "docs/models.md").read_text()
    precisions = ("fp8", "int4", "fp8-int4", "fp8-int4-head8", "fp8-int4-head4", "bf16-fp8", "fp8-fp8")
    table = page.split(f"| model | {' | '.join(precisions)} |")[1].split("\n\n")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if re.search(r"\d", line)]
    assert len(rows) == 2
    for name, *totals in rows:
        for precision, total in zip(precisions, totals, strict=True):
            row = get_precision(precision)
            plan = plan_memory(load_config(name), row, cache_tokens=CACHE_TOKENS, rows=MAX_ROWS)
            assert total == f"{plan.total / 2**30:.1f}", (name, precision)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    local = [target for target in targets if not target.startswith("https://")]
    assert [target for target in local if not (page.parent / target).exists()] == []


def test_the_table_of_contents_names_every_page() -> None:
    docs = ROOT / "docs"
    contents = (docs / "README.md").read_text()
    pages = {str(page.relative_to(docs)) for page in docs.glob("**/*.md")} - {"README.md"}
    assert {page for page in pages if f"({page})" not in contents} == set()
