"""The five projections of both phases at any number of rows: sums of integers, behind every epilogue.

Weights are -1, 0 and 1, some 300 of them a row not 0, activations -1 and 1: sums are integers below 256, which BF16
holds. RMSNorm multiplies by a power of two (nearly: rsqrt is approximate), RoPE's table holds -1, 0 and 1, and scales
are powers of two. Of gate_up one column of x is large, so that every gate is beyond 29 or below -29 and SiLU is the
identity, or nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from futransformer.generator.plan import projections
from futransformer.generator.precision import CHANNEL, E4M3, INT4
from futransformer.generator.specs import PAGE_SIZE
from futransformer.library import KernelLibrary
from futransformer.ops.interface import DecodeWeight, Fp8Output, Phase, Projection
from futransformer.quantize.fp8 import Fp8Weight
from futransformer.quantize.int4 import Int4Weight
from futransformer.reference import ReferenceOps
from tests.kernel_fuzz.exact import APPROXIMATE, Draw, Rooms, WrongResultError, hold, same
from tests.ops.fp8 import UNBOUNDED, check_fp8_statistics, fp8_output, unbounded

NONZERO = 300  # of a row of a weight
POSITIONS = 4096
MOST_ROWS = 1200
MOST_ROWS_OF_A_HEAD = 300  # whose logits are many
BEYOND_A_TILE = 70  # rows of decode: a launch for 64, and one for the rest
TANH = 2.0**-10  # relative: tanh.approx is good to 2^-11, and gates of an FP8 prefill are times it and 1
NOTHING = 2.0**-30  # what SiLU leaves of a gate below -29, times any up, at most
CANCELLED = 2.0**-20  # of the largest q: what sums of a Hadamard block have of an rstd that is no power of two
SUM_OF_SQUARES = 2.0**-16  # 256 additions of what has more digits than float32

Outputs = dict[str, Tensor]


class Weight(NamedTuple):
    """What the kernel reads, and what it is worth: BF16 [N, K], and a scale of FP8 sums, [1] or [N]."""

    packed: Tensor
    logical: Tensor
    scale: Tensor | None
    large: int  # the column of x that makes gates large
    largest: float  # that column, where the others are -1 and 1


def make_weight(ops: KernelLibrary, op: Projection, phase: Phase) -> Weight:
    """The weight of a projection; every case of it has the same."""
    draw = Draw(len(op), 0 if phase == "prefill" else 1, ops.device)
    n, k = projections(ops.config)[op]
    n = ops.config.vocab_size if op == "lm_head" else n
    precision = ops.precision
    element = precision.prefill if phase == "prefill" else ops._projections.gemms["decode", op].element
    fp8 = phase == "prefill" and element == E4M3 and op != "lm_head"
    values = draw.integers(-1, 1, n, k).to(torch.int8)
    values *= torch.rand(n, k, generator=draw.generator, device=ops.device) < 1.5 * NONZERO / k
    large, largest = int(draw.integers(0, k - 1, 1)), 256.0 if fp8 else 512.0
    if op == "gate_up":  # gates are 2048, give or take what they are without this
        values[: n // 2, large] = (draw.signs(n // 2) * (2048 / largest)).to(torch.int8)
        values[n // 2 :, large] = 0
    if fp8:
        scale = draw.powers(-1, 1, n if precision.weight_scales == "channel" else 1)
        return Weight(ops.pack(op, phase, values.to(torch.float8_e4m3fn)), values.bfloat16(), scale, large, largest)
    if phase == "prefill":
        return Weight(ops.pack(op, phase, values.bfloat16()), values.bfloat16(), None, large, largest)
    decoded: DecodeWeight = values.bfloat16()
    if element == INT4:
        decoded = _in_groups(draw, values, precision.group_size, zero_points=precision.zero_points)
    elif element == E4M3:
        decoded = Fp8Weight((values * 4.0).to(torch.float8_e4m3fn), draw.powers(-3, -2, n))
    logical = decoded if isinstance(decoded, Tensor) else decoded.dequantise().bfloat16()
    return Weight(ops.pack(op, phase, decoded), logical, None, large, largest)


def _in_groups(draw: Draw, values: Tensor, group_size: int, *, zero_points: bool) -> Int4Weight:
    """Codes that are worth ``values``, each group times 1 or 2, without zero points with either sign."""
    n, k = values.shape
    group = k if group_size == CHANNEL else group_size
    shape = (n, -(-k // group))
    zeros = draw.integers(4, 11, *shape).to(torch.uint8) if zero_points else None
    scales = (draw.powers(0, 1, *shape) * (1 if zero_points else draw.signs(*shape))).half()
    of_values = 8 if zeros is None else zeros.repeat_interleave(group, 1)[:, :k]
    sign = scales.sign().to(torch.int8).repeat_interleave(group, 1)[:, :k]
    return Int4Weight((values * sign + of_values).to(torch.uint8), scales, zeros, group_size)


class Projections:
    """The cases of one library's projections; weights are made once."""

    def __init__(self, ops: KernelLibrary) -> None:
        self.ops = ops
        self.rooms = Rooms(ops.device)
        ops._projections._empty = self.rooms.empty  # type: ignore[method-assign]
        self._weights: dict[tuple[Phase, Projection], Weight] = {}

    def run(self, draw: Draw, phase: Phase, op: Projection) -> None:
        """One case."""
        self.rooms.begin()
        key = phase, op
        if key not in self._weights:
            self._weights[key] = make_weight(self.ops, op, phase)
        rows = draw.note("rows", rows_of(draw, phase, op))
        problem = Problem(self.ops, self.rooms, draw, phase, op, self._weights[key], rows)
        outputs = problem.run(self.ops)
        self.rooms.check()
        problem.check(outputs)
        for name, again in problem.run(self.ops).items():
            same(f"{name} of a second run", again, outputs[name])
        self.rooms.check()


def rows_of(draw: Draw, phase: Phase, op: Projection) -> int:
    """Of prefill about the ends of tiles, or any number; of decode mostly those of one launch."""
    if phase == "decode":
        return draw.random.randint(1, draw.random.choice((8, 64, BEYOND_A_TILE)))
    most = MOST_ROWS_OF_A_HEAD if op == "lm_head" else MOST_ROWS
    end = draw.random.choice([tile for tile in (8, 32, 64, 128, 192, 256, 512, 1024) if tile < most])
    return draw.random.choice((max(end + draw.random.randint(-1, 1), 1), draw.random.randint(1, most)))


class Problem:
    """One projection's inputs, and the reference's answers to them."""

    def __init__(
        self,
        ops: KernelLibrary,
        rooms: Rooms,
        draw: Draw,
        phase: Phase,
        op: Projection,
        weight: Weight,
        rows: int,
    ) -> None:
        config, device = ops.config, ops.device
        self.ops, self.rooms, self.phase, self.op, self.weight, self.rows = ops, rooms, phase, op, weight, rows
        k = weight.logical.shape[1]
        fp8 = weight.scale is not None
        size = draw.powers(-3, 0 if fp8 else 3, rows, 1)  # of a row
        self.x = draw.signs(rows, k) * size
        if op == "gate_up":
            self.x[:, weight.large] = weight.largest * size[:, 0]
        self.x = rooms.holding(self.x.to(torch.float8_e4m3fn if fp8 else torch.bfloat16))
        # Gates are 64 of what they are times; other sums are divided by 16 to 256.
        divisor = 32 * size if op == "gate_up" else draw.powers(4, 8, rows, 1)
        self.sumsq = torch.zeros(rows, draw.choose("parts", (1, 8, 11)), device=device)
        self.sumsq[:, : max(self.sumsq.shape[1] // 8 * 8, 1)] = divisor.square() * k
        self.sumsq /= max(self.sumsq.shape[1] // 8 * 8, 1)
        self.sumsq = rooms.holding(self.sumsq[:, draw.order(self.sumsq.shape[1])])
        residual = draw.integers(-32, 32, rows, config.hidden_size).float() * size
        self.residual = residual if phase == "decode" else residual.bfloat16()
        self.rope_table = draw.integers(-1, 1, POSITIONS, config.heads.head_dim // 2, 2).float()
        self.positions = draw.integers(0, POSITIONS - 1, rows).int()
        pages = -(-rows // PAGE_SIZE) + 2
        self.slots = draw.order(pages * PAGE_SIZE)[:rows].where(draw.integers(0, 7, rows) > 0, -1)
        self.pages = (pages, config.heads.num_key_value_heads, PAGE_SIZE, config.heads.head_dim)
        self.kv_scale = draw.powers(-2, 0, 2) if ops.precision.kv == E4M3 else None
        self.copy = ops.precision.copy if op == "qkv" else None
        if self.copy is not None:
            shape = (*self.pages[:2], self.copy.page_bytes(config.heads.head_dim))
            self.copy_before = draw.integers(0, 255, *shape).to(torch.uint8)
        self.out_scale = draw.powers(-2, -2, 1) if fp8 and op != "qkv" else None

    def run(self, ops: KernelLibrary | ReferenceOps) -> Outputs:
        """All that is written, in fresh memory; of the exact reference FP8 codes are neither rounded nor cut off."""
        reference = isinstance(ops, ReferenceOps)
        dtype = ops.dtype if isinstance(ops, ReferenceOps) else torch.bfloat16
        exact = reference and dtype == torch.float32
        weight = self.weight.logical.float() if reference else self.weight.packed
        options: dict[str, Any] = {}
        written: Outputs = {}
        if self.weight.scale is not None:
            options["scale"] = ops.pack_scale(self.op, self.weight.scale)
        fp8: Fp8Output | None = None
        if self.out_scale is not None:
            fp8 = options["fp8"] = fp8_output(unbounded(self.out_scale) if exact else self.out_scale)
        if self.op == "qkv":
            of_pages = torch.float8_e4m3fn if self.kv_scale is not None and not exact else dtype
            pages = [torch.full(self.pages, torch.nan, dtype=of_pages, device=ops.device) for _ in range(2)]
            if self.copy is not None:
                options["kv_copy"] = written["kv_copy"] = self.copy_before.clone()
            state = (self.rope_table, self.positions, self.slots, *pages)
            q = ops.qkv(self.phase, self.x, self.sumsq, weight, *state, kv_scale=self.kv_scale, **options)
            return {"q": q, "k_pages": pages[0], "v_pages": pages[1], **written}
        if self.op in ("o", "down"):
            residual = self.residual.float().clone() if exact else self.rooms.holding(self.residual)
            stream = getattr(ops, self.op)(self.phase, self.x, weight, residual, **options)
            written = {"x": stream.x, "residual": stream.residual, "sumsq": stream.sumsq}
        elif self.op == "gate_up":
            written = {"h": ops.gate_up(self.phase, self.x, self.sumsq, weight, **options)}
        else:
            written = {"logits": ops.lm_head(self.phase, self.x, self.sumsq, weight)}
            if self.phase == "decode":
                written["tokens"] = ops.next_tokens(self.x, self.sumsq, weight).tokens
        if fp8 is not None:
            codes = "h" if self.op == "gate_up" else "x"
            written[codes] = written[codes] * UNBOUNDED if exact else written[codes]
            written |= {"amax": fp8.amax, "saturated": fp8.saturated}
        return written

    def check(self, outputs: Outputs) -> None:
        """Against the reference, rounded as often as a result is."""
        ops = self.ops
        exact = self.run(ReferenceOps(ops.config, device=ops.device, dtype=torch.float32, copy=self.copy))
        exactly: dict[str, Callable[[Tensor, Tensor], None]] = {
            "tokens": lambda actual, want: same("tokens", actual, want),
            "sumsq": self._check_sumsq,
            "kv_copy": lambda actual, _: self._check_copy(actual),
        }
        for name in outputs.keys() - {"amax", "saturated"}:
            if name in exactly:
                exactly[name](outputs[name], exact[name])
            elif self.op in ("o", "down"):
                hold(name, outputs[name], exact[name])
            elif name == "h":
                hold(name, outputs[name], exact[name], APPROXIMATE if self.out_scale is None else TANH, NOTHING)
            else:
                rotated = name == "q" and self.copy is not None and self.phase == "decode"
                absolute = CANCELLED * exact[name].abs().amax() if rotated else 0.0
                hold(name, outputs[name], exact[name], APPROXIMATE, absolute)
        if self.out_scale is not None:
            gated = self.op == "gate_up"
            written = Fp8Output(self.out_scale, outputs["amax"], outputs["saturated"])
            try:
                check_fp8_statistics(written, exact["h" if gated else "x"], TANH if gated else 0.0)
            except AssertionError as error:
                raise WrongResultError(str(error)) from error

    def _check_sumsq(self, actual: Tensor, want: Tensor) -> None:
        """Of a whole row; parts are those of blocks. By FP8 scales values have more digits than float32 squares."""
        relative = 0.0 if self.weight.scale is None else SUM_OF_SQUARES
        hold("sumsq", actual.double().sum(1).float(), want.double().sum(1).float(), max(relative, 2.0**-23))

    def _check_copy(self, actual: Tensor) -> None:
        reference = ReferenceOps(self.ops.config, device=self.ops.device, copy=self.copy)
        same("kv_copy", actual, self.run(reference)["kv_copy"])
