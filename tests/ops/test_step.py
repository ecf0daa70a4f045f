"""The two ends of a decode step: the kernels' own source, and the op beside the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from futransformer.generator.errors import InputError
from futransformer.library import KernelLibrary
from futransformer.ops.interface import Ops, StepRows, Stops
from futransformer.reference import ReferenceOps
from futransformer.sampling import pack_seen
from tests.ops.stand_in import stand_in_library
from tests.ops.test_two_layers import TINY

WIDTH = 3

GpuOps = Callable[[str], KernelLibrary]


def rows_of(lengths: list[int], device: torch.device) -> StepRows:
    """Pages in no order; of every second row the last is missing."""
    batch = len(lengths)
    table = torch.randperm(batch * WIDTH, generator=torch.Generator().manual_seed(0)).int().view(batch, WIDTH)
    table[1::2, -1] = -1

    def garbage(dtype: torch.dtype) -> Tensor:
        return torch.full((batch,), -7, dtype=dtype, device=device)

    given = torch.tensor(lengths, dtype=torch.int32, device=device)
    return StepRows(given, table.to(device), *(garbage(dtype) for dtype in (torch.int32, torch.int64, torch.int32)))


def check_begin(ops: Ops, batch: int) -> None:
    """By the definition, a row at a time; a second step goes on from the first."""
    lengths = [(0, 1, 62, 63, 64, 127, 128, 191, 192, 4000, -1)[row % 11] for row in range(batch)]
    rows = rows_of(lengths, ops.device)
    for _ in range(2):
        ops.begin_step(rows)
        for row, length in enumerate(lengths):
            page = int(rows.block_table[row, length // 64]) if 0 <= length < 64 * WIDTH else -1
            assert rows.seqlens_k[row] == length + 1
            assert rows.positions[row] == max(length, 0)
            assert rows.slots[row] == (page * 64 + length % 64 if page >= 0 else -1)
        lengths = [length + 1 if length >= 0 else -1 for length in lengths]
        assert rows.lengths.tolist() == lengths


def check_end(ops: Ops, vocab_size: int, batch: int) -> None:
    """By the definition, over more steps than the log has rows."""
    device, last = ops.device, vocab_size - 1
    ends = {31, last}
    lengths = torch.tensor([row if row % 5 else -1 for row in range(batch)], dtype=torch.int32, device=device)
    left = torch.tensor([1 + row % 6 for row in range(batch)], dtype=torch.int32, device=device)
    log = torch.full((3, batch), -7, dtype=torch.int32, device=device)
    stops = Stops(left, pack_seen([ends], vocab_size, device)[0], log, torch.zeros(1, dtype=torch.int32, device=device))
    going = {row: 1 + row % 6 for row in range(batch) if row % 5}
    for step in range(5):
        given = [(30, 0, 32, last - 1, 31, last, 1)[(row + step) % 7] for row in range(batch)]
        ops.end_step(torch.tensor(given, dtype=torch.int32, device=device), lengths, stops)
        assert log[step % 3].tolist() == [given[row] if row in going else -1 for row in range(batch)]
        going = {row: more - 1 for row, more in going.items() if more > 1 and given[row] not in ends}
        assert lengths.tolist() == [row if row in going else -1 for row in range(batch)]
        assert all(left[row] == more for row, more in going.items())
    assert stops.steps.item() == 5


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 2, 3, 17, 127, 129, 1088])
def test_both_ends(gpu_ops: GpuOps, batch: int) -> None:
    ops = gpu_ops("smollm2-135m")
    check_begin(ops, batch)
    check_end(ops, ops.config.vocab_size, batch)


def test_both_ends_in_the_emulator(emulate: Callable[..., str]) -> None:
    assert "FAILED" not in emulate("step")


@pytest.mark.parametrize("batch", [1, 30])
def test_both_ends_on_the_reference_and_on_the_stand_in(monkeypatch: pytest.MonkeyPatch, batch: int) -> None:
    config = replace(TINY, vocab_size=70)
    for ops in (ReferenceOps(config), stand_in_library(config, monkeypatch)):
        check_begin(ops, batch)
        check_end(ops, 70, batch)


def test_what_the_ops_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = stand_in_library(TINY, monkeypatch)
    rows = rows_of([1, 2], torch.device("cpu"))
    with pytest.raises(InputError, match=r"begin_step: slots must be torch\.int64, not torch\.int32"):
        ops.begin_step(rows._replace(slots=rows.slots.int()))
    with pytest.raises(InputError, match=r"begin_step: block_table must have shape \[2, any\], not \[1, 3\]"):
        ops.begin_step(rows._replace(block_table=rows.block_table[:1]))
    tokens, one = torch.zeros(2, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    stops = Stops(tokens.clone(), pack_seen([[]], TINY.vocab_size)[0], torch.zeros(3, 2, dtype=torch.int32), one)
    ops.end_step(tokens, rows.lengths, stops)
    with pytest.raises(InputError, match=r"end_step: log must have shape \[any, 2\]"):
        ops.end_step(tokens, rows.lengths, stops._replace(log=stops.log[:, :1].contiguous()))
    with pytest.raises(InputError, match=r"end_step: ends must have shape"):
        ops.end_step(tokens, rows.lengths, stops._replace(ends=stops.ends[:1]))
