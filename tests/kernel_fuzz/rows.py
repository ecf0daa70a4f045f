"""gather_rows, argmax, sample and the two ends of a step: the reference's answers, every bit of them."""

from __future__ import annotations

import torch
from torch import Tensor

from futransformer.generator.heuristics import padded_vocab
from futransformer.library import KernelLibrary
from futransformer.ops.interface import Ops, Phase, StepRows, Stops
from futransformer.reference import ReferenceOps
from futransformer.sampling import SamplingRows, pack_seen
from tests.kernel_fuzz.exact import Draw, hold, same
from tests.ops.fp8 import fp8_output
from tests.ops.test_sampling import random_rows

TABLE_ROWS = 500
MOST_ROWS = 400
MOST_SAMPLED = 40  # rows: the reference sorts each
STEPS = 3


def reference_of(ops: KernelLibrary) -> ReferenceOps:
    """On the library's device, rounding where it does."""
    return ReferenceOps(ops.config, device=ops.device)


def gather(draw: Draw, ops: KernelLibrary) -> None:
    """Rows of integers, their squares summed exactly; NaN for an index outside."""
    rows, hidden = draw.note("rows", draw.random.randint(1, MOST_ROWS)), ops.config.hidden_size
    table = (draw.integers(-15, 15, TABLE_ROWS, hidden).float() * draw.powers(-6, 6, TABLE_ROWS, 1)).bfloat16()
    indices = draw.integers(0, TABLE_ROWS - 1, rows)
    outside = torch.tensor([-1, TABLE_ROWS, 2**31 - 1, -(2**31)], device=draw.device)
    indices = indices.where(draw.integers(0, 9, rows) > 0, outside[draw.integers(0, 3, rows)]).int()
    phase: Phase = draw.random.choice(("prefill", "decode"))
    in_fp8 = phase == "prefill" and "prefill_fp8" in ops.plan.gather_rows and draw.choose("fp8", (0, 1)) == 1
    gain = None
    if phase == "decode" and ops.precision.gain_in_x:
        gain = draw.powers(-1, 1, hidden)
    for _ in range(2):
        scale = torch.full((1,), 2.0, device=draw.device)  # of the largest rows some values saturate
        fp8, expected = (fp8_output(scale) if in_fp8 else None for _ in range(2))
        stream = ops.gather_rows(phase, table, indices, fp8=fp8, gain=gain)
        want = reference_of(ops).gather_rows(phase, table, indices, fp8=expected, gain=gain)
        for name in ("x", "residual", "sumsq"):
            hold(name, getattr(stream, name), getattr(want, name).float())
        if fp8 is not None and expected is not None:
            hold("amax", fp8.amax, expected.amax)
            same("saturated", fp8.saturated, expected.saturated)


def argmax(draw: Draw, ops: KernelLibrary) -> None:
    """Of few values, so that there are ties; with NaN and infinities; in rows that start anywhere."""
    rows = draw.note("rows", draw.random.randint(1, MOST_SAMPLED))
    logits = _in_room(draw, _few_values(draw, rows, ops.config.vocab_size), ops.config.vocab_size)
    want = reference_of(ops).argmax(logits)
    for _ in range(2):
        same("tokens", ops.argmax(logits), want)


def sample(draw: Draw, ops: KernelLibrary) -> None:
    """Any settings; the tokens seen before grow by the one chosen."""
    vocab_size = ops.config.vocab_size
    rows = draw.note("rows", draw.random.randint(1, MOST_SAMPLED))
    logits = torch.randn(rows, vocab_size, generator=draw.generator, device=draw.device)
    logits *= torch.tensor([0.01, 1, 3, 30], device=draw.device)[draw.integers(0, 3, rows, 1)]
    some = draw.integers(0, 2, rows, 1)  # of a row: as it is, many ties, or few values and NaN
    logits = torch.where(some == 0, logits, torch.where(some == 1, logits.round(), _few_values(draw, rows, vocab_size)))
    logits = _in_room(draw, logits, vocab_size)
    with_seen = draw.choose("seen", (0, 1)) == 1
    seed = draw.random.getrandbits(31)
    for _ in range(2):
        mine, theirs = (random_rows(rows, vocab_size, seed, draw.device, with_seen=with_seen) for _ in range(2))
        out = torch.full((rows,), -1, dtype=torch.int32, device=draw.device)
        ops.sample(logits, mine, out=out)
        same("tokens", out, reference_of(ops).sample(logits, theirs))
        _same_seen(mine, theirs)


def _same_seen(mine: SamplingRows, theirs: SamplingRows) -> None:
    if mine.seen is not None and theirs.seen is not None:
        same("seen", mine.seen, theirs.seen)


def _few_values(draw: Draw, rows: int, vocab_size: int) -> Tensor:
    logits = draw.integers(-40, 40, rows, vocab_size).float()
    special = torch.tensor([torch.nan, -torch.inf, torch.inf, 0.0, -0.0], device=draw.device)
    which = special[draw.integers(0, len(special) - 1, rows, 1)].expand(rows, vocab_size)
    share = torch.tensor([0.0, 0.0, 0.01, 0.5, 1.0], device=draw.device)[draw.integers(0, 4, rows, 1)]
    where = torch.rand(rows, vocab_size, generator=draw.generator, device=draw.device)
    return torch.where(where < share, which, logits)


def _in_room(draw: Draw, logits: Tensor, vocab_size: int) -> Tensor:
    """The same in rows of another stride, starting anywhere, among values that are larger."""
    stride, offset = vocab_size, 0
    if draw.choose("apart", (0, 1)) == 1:
        stride = draw.random.choice((padded_vocab(vocab_size), vocab_size + 1, vocab_size + 64))
        offset = draw.random.randint(0, 3)
    room = torch.full((logits.shape[0] * stride + offset,), torch.inf, device=draw.device)
    view = room[offset:].as_strided((logits.shape[0], vocab_size), (stride, 1))
    return view.copy_(logits)


def step(draw: Draw, ops: KernelLibrary) -> None:
    """Some steps one after another, of rows of which some have no sequence, no page, or all that they may have."""
    rows, width = draw.note("rows", draw.random.randint(1, MOST_ROWS)), draw.random.randint(1, 5)
    lengths = draw.integers(-1, width * 64 + 3, rows).int()
    table = draw.integers(-1, 1000, rows, width).int()
    left = draw.integers(1, STEPS + 1, rows).int()
    vocab_size = ops.config.vocab_size
    ending = draw.integers(0, vocab_size - 1, 3)
    ends = pack_seen([set(ending.tolist())], vocab_size, draw.device)[0]
    tokens = draw.integers(0, vocab_size - 1, STEPS, rows)
    ended = ending[draw.integers(0, 2, STEPS, rows)]
    tokens = tokens.where(draw.integers(0, 3, STEPS, rows) > 0, ended).int()
    states = [_stepped(each, lengths, table, left, ends, tokens) for each in (ops, reference_of(ops))]
    for name, mine in states[0].items():
        same(name, mine, states[1][name])


def _stepped(ops: Ops, lengths: Tensor, table: Tensor, left: Tensor, ends: Tensor, tokens: Tensor) -> dict[str, Tensor]:
    batch, device = len(lengths), lengths.device

    def garbage(dtype: torch.dtype) -> Tensor:
        return torch.full((batch,), -7, dtype=dtype, device=device)

    rows = StepRows(lengths.clone(), table, *(garbage(dtype) for dtype in (torch.int32, torch.int64, torch.int32)))
    log = torch.full((2, batch), -7, dtype=torch.int32, device=device)  # fewer than steps
    stops = Stops(left.clone(), ends, log, torch.zeros(1, dtype=torch.int32, device=device))
    written: dict[str, Tensor] = {}
    for index, given in enumerate(tokens):
        ops.begin_step(rows)
        written |= {f"{name} of step {index}": getattr(rows, name).clone() for name in rows._fields}
        ops.end_step(given, rows.lengths, stops)
        written |= {f"{name} behind step {index}": getattr(stops, name).clone() for name in stops._fields}
    return written
