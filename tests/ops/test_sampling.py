"""The sampling kernel: on the GPU and in the emulator it chooses what the reference chooses, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from futransformer.generator.errors import InputError, UnsupportedError
from futransformer.generator.specs import SampleSpec
from futransformer.library import KernelLibrary
from futransformer.sampling import SamplingRows, choose, mark_seen
from tests.ops.stand_in import stand_in_library
from tests.ops.test_two_layers import TINY

NAN, INF = math.nan, math.inf
SETTINGS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "position")

Emulate = Callable[..., str]
GpuOps = Callable[[str], KernelLibrary]


def random_rows(rows: int, vocab_size: int, seed: int, device: torch.device, *, with_seen: bool) -> SamplingRows:
    """Settings of every kind, alone and together."""
    generator = torch.Generator().manual_seed(seed)

    def pick(*values: float) -> Tensor:
        return torch.tensor(values, dtype=torch.float64)[torch.randint(len(values), (rows,), generator=generator)]

    seen = torch.randint(-(2**31), 2**31, (rows, -(-vocab_size // 32)), generator=generator).int()
    return SamplingRows(
        temperature=pick(0, 0.3, 1, 1, 2.5).float().to(device),
        top_k=pick(0, -1, 1, 2, 7, 40, vocab_size, 2**31 - 1).int().to(device),
        top_p=pick(1, 1, 0.999999, 0.95, 0.5, 0.01).float().to(device),
        min_p=pick(0, 0, 0.02, 1).float().to(device),
        repetition_penalty=pick(1, 1.3, 0.7).float().to(device),
        seed=torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator).to(device),
        position=torch.randint(2**17, (rows,), generator=generator).int().to(device),
        seen=seen.to(device) if with_seen else None,
    )


def random_logits(rows: int, vocab_size: int, seed: int, device: torch.device) -> Tensor:
    """Rows of many spreads, some of them of few values or with NaN and infinities."""
    generator = torch.Generator().manual_seed(seed)
    logits = (
        torch.randn(rows, vocab_size, generator=generator)
        * torch.tensor([0.01, 1, 3, 30])[torch.randint(4, (rows, 1), generator=generator)]
    )
    logits[1::5] = logits[1::5].round()  # many ties
    where = torch.rand(rows, vocab_size, generator=generator)
    logits[2::5] = torch.where(where[2::5] < 0.3, NAN, logits[2::5])
    logits[3::5] = torch.where(where[3::5] < 0.3, -INF, logits[3::5])
    special = [NAN, -INF, 1.5]
    for row, value in zip(range(4, rows, 5), special, strict=False):
        logits[row] = value
    if rows > 20:
        logits[20, vocab_size // 2 :: 7] = INF
    return logits.to(device)


def write_rows(path: Path, logits: Tensor, rows: SamplingRows, misalignment: int) -> None:
    """The file that emulated_sampling.cpp reads."""
    count, vocab_size = logits.shape
    words = torch.empty(0, dtype=torch.int32) if rows.seen is None else rows.seen
    header = torch.tensor([vocab_size, count, logits.stride(0), misalignment, len(words) > 0], dtype=torch.int32)
    padded = torch.full((count, logits.stride(0)), INF)
    padded[:, :vocab_size] = logits
    parts = [header, *(getattr(rows, name) for name in SETTINGS), words, padded]
    path.write_bytes(b"".join(part.contiguous().numpy().tobytes() for part in parts))


def test_the_kernels_source_chooses_what_the_reference_does(emulate: Emulate, tmp_path: Path) -> None:
    """Blocks without a token, slices that end within four, rows at any alignment; and what has been seen grows."""
    cpu = torch.device("cpu")
    files: list[tuple[str]] = []
    expected: list[list[int]] = []
    for vocab_size, count, padding, misalignment, with_seen in (
        (37, 8, 3, 0, True),
        (37, 3, 0, 1, False),
        (1003, 15, 21, 0, True),
        (4096, 2, 1, 3, True),
        (4096, 2, 0, 0, False),
    ):
        room = torch.empty(count, vocab_size + padding)
        logits = room[:, :vocab_size].copy_(random_logits(count, vocab_size, vocab_size, cpu))
        rows = random_rows(count, vocab_size, count, cpu, with_seen=with_seen)
        files.append((str(tmp_path / f"rows{len(files)}"),))
        write_rows(Path(files[-1][0]), logits, rows, misalignment)
        chosen = choose(logits, rows)
        assert len(set(chosen.tolist())) > count // 4, "the rows choose different tokens"
        seen: list[int] = []
        if rows.seen is not None:
            mark_seen(rows.seen, chosen)
            seen = (rows.seen.long() & 0xFFFFFFFF).flatten().tolist()
        expected.append([*chosen.tolist(), *seen])
    printed = emulate("sampling", "candidate", "sampling_numbers", runs=files)
    assert [[int(word) for word in line.split()] for line in printed.splitlines()] == expected


def check_sample(ops: KernelLibrary, rows: int, padding: int = 0) -> None:
    """Tokens are those of futransformer.sampling on the CPU, beside whatever else, and two runs give the same."""
    vocab_size, device, cpu = ops.config.vocab_size, ops.device, torch.device("cpu")
    logits = random_logits(rows, vocab_size, rows, cpu)
    room = torch.full((rows, vocab_size + padding), INF, device=device)
    view = room[:, :vocab_size].copy_(logits)
    for with_seen in (False, True):
        asked = random_rows(rows, vocab_size, rows, cpu, with_seen=with_seen)
        expected = choose(logits, asked)
        for _ in range(2):
            mine = random_rows(rows, vocab_size, rows, device, with_seen=with_seen)
            out = torch.full((rows,), -1, dtype=torch.int32, device=device)
            assert ops.sample(view, mine, out=out) is out
            assert out.tolist() == expected.tolist()
            if mine.seen is not None and asked.seen is not None:
                marked = asked.seen.clone()
                mark_seen(marked, expected)
                assert torch.equal(mine.seen.cpu(), marked), "the chosen token counts as seen, and no other"


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "padding"), [(1, 0), (2, 1), (3, 64), (17, 1), (33, 0), (129, 64)])
@pytest.mark.parametrize("model", ["smollm2-135m", "llama-3.1-8b", "odd"])
def test_the_kernel_chooses_what_the_reference_does(gpu_ops: GpuOps, model: str, rows: int, padding: int) -> None:
    check_sample(gpu_ops(model), rows, padding)


@pytest.mark.gpu
def test_torch_on_the_gpu_chooses_what_it_does_on_the_cpu(gpu_ops: GpuOps) -> None:
    """Every operation of futransformer.sampling rounds alike on both."""
    vocab_size, device, cpu = 49_152, gpu_ops("smollm2-135m").device, torch.device("cpu")
    logits = random_logits(40, vocab_size, 5, cpu)
    chosen = [
        choose(logits.to(there), random_rows(40, vocab_size, 6, there, with_seen=True)).tolist()
        for there in (cpu, device)
    ]
    assert chosen[0] == chosen[1]


@pytest.mark.parametrize("padding", [0, 1])
def test_the_check_on_the_stand_in(monkeypatch: pytest.MonkeyPatch, padding: int) -> None:
    check_sample(stand_in_library(TINY, monkeypatch), 24, padding)


def test_what_the_op_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = stand_in_library(TINY, monkeypatch)
    vocab_size, cpu = TINY.vocab_size, torch.device("cpu")
    logits, rows = torch.zeros(3, vocab_size), random_rows(3, vocab_size, 0, cpu, with_seen=True)
    assert ops.sample(logits[:0], rows.keep(torch.empty(0, dtype=torch.int64))).shape == (0,)
    with pytest.raises(InputError, match=rf"sample: logits must have shape \[any, {vocab_size}\]"):
        ops.sample(torch.zeros(3, vocab_size + 1), rows)
    with pytest.raises(InputError, match=r"sample: top_k must be torch\.int32, not torch\.int64; convert it with"):
        ops.sample(logits, replace(rows, top_k=rows.top_k.long()))
    with pytest.raises(InputError, match=r"sample: seed must have shape \[3\], not \[2\]"):
        ops.sample(logits, replace(rows, seed=rows.seed[:2]))
    with pytest.raises(InputError, match=r"sample: seen must have shape"):
        ops.sample(logits, replace(rows, seen=torch.zeros(3, 1, dtype=torch.int32)))
    with pytest.raises(InputError, match=r"sample: out must be torch\.int32"):
        ops.sample(logits, rows, out=torch.zeros(3))
    with pytest.raises(InputError, match=r"sample: 65536 rows are more than the 65535 of a launch"):
        ops.sample(torch.zeros(65_536, vocab_size), rows)


def test_a_vocabulary_that_no_cluster_holds_is_refused() -> None:
    SampleSpec(400_000)
    with pytest.raises(UnsupportedError, match="slice of the vocabulary must fit shared memory"):
        SampleSpec(450_000)
