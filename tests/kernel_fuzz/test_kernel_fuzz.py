"""The fuzzing of kernels, with the reference in their place: right answers pass, and every planted fault is found."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from futransformer.driver import hopper_problem
from futransformer.generator.specs import (
    ArgmaxSpec,
    AttentionDecodeSpec,
    AttentionPrefillSpec,
    DecodeGemmSpec,
    GatherRowsSpec,
    GemmSpec,
    KernelSpec,
    StepEndSpec,
)
from tests.kernel_fuzz import cases
from tests.kernel_fuzz.__main__ import Loaded, main
from tests.kernel_fuzz.exact import Draw, Rooms, WrongResultError, hold, same
from tests.ops.stand_in import CPU, StandInKernel, stand_in_library
from tests.ops.test_two_layers import TINY

PRECISIONS = (
    "bf16",
    "fp8",
    "fp8-promoted",
    "int4-g32-asym",
    "int4-channel-asym-head4",
    "bf16-fp8-head8",
    "bf16-kv8",
    "bf16-kv4-head-min-h64",
    "fp8-int4-kv8-kv4-min",
)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_right_answers_pass(monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    fuzzed = cases.of_library(stand_in_library(TINY, monkeypatch, precision=precision))
    for index, fuzz in enumerate(fuzzed.values()):
        with torch.no_grad():
            fuzz(Draw(1, index, CPU))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_approximate_instructions_lose_passes(monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    class Approximate(StandInKernel):
        sign = 1

        def launch(self, grid: tuple[int, int, int], **arguments: Any) -> None:
            if "sumsq" in arguments:  # four units of 2^-23, of which rsqrt makes half
                arguments["sumsq"] = arguments["sumsq"] * (1 + self.sign * 2.0**-21)
            super().launch(grid, **arguments)

    for sign in (-1, 1):
        monkeypatch.setattr(Approximate, "sign", sign)
        ops = stand_in_library(TINY, monkeypatch, Approximate, precision)
        for name, fuzz in cases.of_library(ops).items():
            if "/" in name:
                with torch.no_grad():
                    fuzz(Draw(2 + sign, len(name), CPU))


# Faults of one launch: what each changes of the arguments, or does behind it


def lose_a_product(arguments: dict[str, Any]) -> None:
    arguments["x"] = arguments["x"].clone()
    arguments["x"][-1, -1] = 0


def miss_a_key(arguments: dict[str, Any]) -> None:
    arguments["seqlens_k"] = (arguments["seqlens_k"] - 1).clamp_min(0)


def read_a_page_twice(arguments: dict[str, Any]) -> None:
    table = arguments["block_table"].clone()
    table[:, 1] = table[:, 0]
    arguments["block_table"] = table


def count_one_more(arguments: dict[str, Any]) -> None:
    if "saturated" in arguments:
        arguments["saturated"] += 1


def write_behind(arguments: dict[str, Any]) -> None:
    out: Tensor = arguments["out"]
    out.as_strided((out.shape[0] + 1, out.shape[1]), out.stride())[-1, 0] = 0


def take_another_of_equals(arguments: dict[str, Any]) -> None:
    logits, out = arguments["logits"], arguments["out"]
    equal = logits == logits.gather(1, out[:, None].long())
    out.copy_(logits.shape[1] - 1 - equal.flip(1).int().argmax(1))


def give_one_more(arguments: dict[str, Any]) -> None:
    arguments["left"] += 1


Fault = Callable[[dict[str, Any]], None]
FAULTS: dict[str, tuple[str, type[KernelSpec], Fault | None, Fault | None]] = {
    "prefill/o": ("fp8", GemmSpec, lose_a_product, None),
    "decode/gate_up": ("int4-g32-asym", DecodeGemmSpec, lose_a_product, None),
    "gather": ("fp8", GatherRowsSpec, None, count_one_more),
    "attention_prefill": ("bf16-kv8", AttentionPrefillSpec, read_a_page_twice, None),
    "attention_prefill/key": ("bf16", AttentionPrefillSpec, miss_a_key, None),
    "attention_decode": ("bf16", AttentionDecodeSpec, read_a_page_twice, None),
    "attention_decode/key": ("bf16-kv4", AttentionDecodeSpec, miss_a_key, None),
    "attention_decode/row": ("bf16", AttentionDecodeSpec, None, write_behind),
    "argmax": ("bf16", ArgmaxSpec, None, take_another_of_equals),
    "step": ("bf16", StepEndSpec, None, give_one_more),
}


def library_with(fault: str, patch: pytest.MonkeyPatch, *, planted: bool) -> Loaded:
    precision, of_spec, before, behind = FAULTS[fault]

    class Faulty(StandInKernel):
        def launch(self, grid: tuple[int, int, int], **arguments: Any) -> None:
            faulty = planted and isinstance(self.spec, of_spec)
            if faulty and before is not None:
                before(arguments)
            super().launch(grid, **dict(arguments))
            if faulty and behind is not None:
                behind(arguments)

    fuzzed = cases.of_library(stand_in_library(TINY, patch, Faulty, precision))
    return {"tiny": {name: fuzz for name, fuzz in fuzzed.items() if fault.startswith(name)}}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_and_its_line_runs_it_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, fault: str
) -> None:
    def run(options: Sequence[str], *, planted: bool) -> tuple[int, str]:
        loaded = library_with(fault, monkeypatch, planted=planted)
        status = main(options, load=lambda *_: (loaded, CPU))
        return status, capsys.readouterr().out

    output = ["--output", str(tmp_path), "--commit", "abc"]
    status, said = run(["--cases", "8", "--seed", "3", *output], planted=True)
    assert status == 1
    line = re.search(r"python -m tests\.kernel_fuzz (.*)", said)
    assert line is not None
    content = json.loads((tmp_path / "fuzz.json").read_text())
    assert content["failures"]
    assert sum(row["wrong"] for row in content["rows"]) == len(content["failures"])
    again = shlex.split(line[1])
    assert run(again, planted=True)[0] == 1
    status, said = run(again, planted=False)
    assert status == 0, said
    assert "1 of 1 cases" in said


def test_what_a_case_raises_ends_a_run_that_nothing_works_behind(capsys: pytest.CaptureFixture[str]) -> None:
    def broken(_: Draw) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nand more")

    loaded: Loaded = {"odd": {"rows": broken}}
    assert main(["--cases", "9"], load=lambda *_: (loaded, CPU)) == 1
    assert "RuntimeError: CUDA error: an illegal memory access was encountered" in capsys.readouterr().out


def test_cases_for_which_there_is_no_time_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    loaded: Loaded = {"odd": {"rows": lambda _: None}}
    assert main(["--cases", "9", "--seconds", "0"], load=lambda *_: (loaded, CPU)) == 1
    assert "0 of 9 cases" in capsys.readouterr().out
    assert main(["--cases", "9"], load=lambda *_: (loaded, CPU)) == 0


@pytest.mark.skipif(hopper_problem() is None, reason="there is a Hopper GPU")
def test_without_a_gpu_it_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "cannot run here: " in capsys.readouterr().out


# What results are held to


def test_a_value_between_the_roundings_of_its_ends_is_right() -> None:
    tie = torch.tensor([257.0, 1.0, torch.nan])  # BF16 has 256 and 258
    low, high = torch.tensor([256.0, 1, torch.nan]).bfloat16(), torch.tensor([258.0, 1, torch.nan]).bfloat16()
    hold("even", low, tie)
    with pytest.raises(WrongResultError, match=r"odd: 1 of 3 values are wrong, first \[0\]: 258.0 instead of 257.0"):
        hold("odd", high, tie)
    hold("either", high, tie, 2.0**-18)
    with pytest.raises(WrongResultError, match="nan"):
        hold("nan", torch.ones(3), torch.tensor([1.0, torch.nan, 1.0]))
    hold("cut off", torch.tensor([448.0]).to(torch.float8_e4m3fn), torch.tensor([500.0]))
    with pytest.raises(WrongResultError, match="bits: 1 of 2"):
        same("bits", torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]))


def test_rows_behind_an_output_are_watched() -> None:
    rooms = Rooms(CPU)
    out = rooms.empty(3, 4, torch.bfloat16).fill_(1)
    rooms.check()
    out = rooms.holding(torch.ones(3, 4))
    out.as_strided((4, 4), (4, 1))[3, 3] = 0
    with pytest.raises(WrongResultError, match="rows behind an output of 3 were written"):
        rooms.check()
    assert rooms.empty(0, 4, torch.float32).data_ptr() == 0


def test_a_case_follows_from_its_seed_and_index() -> None:
    exports: Loaded = {name: {"rows": print, "step": print} for name in "abcdefgh"}
    drawn = [(cases.pick(draw := Draw(seed, 7, CPU), exports), draw.integers(0, 99, 9).tolist()) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
