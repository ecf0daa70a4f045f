"""The epilogue chains of prefill and decode, as a kernel renders them, run on the host against the reference.

What a GEMM does around its chain is repeated in emulated_epilogue.cpp.jinja: which thread holds which column of which
row. The columns of the sums stand in the order of the packed weight's rows, so packing, walk and operations must agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from futransformer.generator.config import LlamaConfig
from futransformer.generator.decode_heuristics import BATCH_TILES, decode_gemm_spec
from futransformer.generator.heuristics import gemm_specs
from futransformer.generator.plan import projections
from futransformer.generator.precision import E4M3, E4M3_MAX, Precision, get_precision
from futransformer.generator.render import _environment
from futransformer.generator.specs import PAGE_SIZE, DecodeGemmSpec, GemmSpec
from futransformer.ops.interface import PROJECTIONS, Fp8Output, Phase, Projection
from futransformer.packing import pack_decode, pack_e4m3, pack_prefill, pack_scale
from futransformer.quantize.fp8 import Fp8Weight, quantize_weight
from futransformer.reference import ReferenceOps, scaled_linear
from tests.ops.fp8 import EARLIER_COUNT, fp8_output, quantised
from tests.ops.tolerance import e4m3_step

BF16, FP8, GAIN = get_precision("bf16"), get_precision("fp8"), get_precision("int4-gain")
BY_CHANNEL = replace(FP8, weight_scales="channel")
DECODE_FP8 = get_precision("bf16-fp8-head8")
KV8, FP8_KV8 = get_precision("bf16-kv8"), get_precision("fp8-kv8")
ROWS = (1, 17, 37)  # of the 48 that three warps of the prefill hold
E4M3_OPERAND = 2.0**-120  # what a code of 1 is worth as an operand
ROOM = 3  # rows behind the last: nobody may write them

# No N is a multiple of its tile; the padding of the vocabulary has columns of its own.
CONFIGS = {
    64: LlamaConfig("narrow", 320, 448, 1, 6, 2, 64, 257, 512, 1e-5, 1e4),
    128: LlamaConfig("wide", 320, 448, 1, 6, 3, 128, 257, 512, 1e-5, 1e4),
}
OPS_OF: dict[int, tuple[Projection, ...]] = {64: PROJECTIONS, 128: ("qkv",)}  # nothing else depends on head_dim
CHAINS: dict[str, tuple[Phase, Precision]] = {
    "prefill": ("prefill", BF16),
    "decode": ("decode", BF16),
    "decode-gain": ("decode", GAIN),
    "decode-fp8": ("decode", DECODE_FP8),
    "prefill-fp8-tensor": ("prefill", FP8),
    "prefill-fp8-channel": ("prefill", BY_CHANNEL),
    "prefill-kv8": ("prefill", KV8),
    "decode-kv8": ("decode", KV8),
    "prefill-fp8-kv8": ("prefill", FP8_KV8),
}


def specs_of(
    phase: Phase, config: LlamaConfig, op: Projection, precision: Precision
) -> tuple[GemmSpec | DecodeGemmSpec, ...]:
    """The kernels of one projection: by the number of rows in prefill, one a batch tile in decode."""
    (n, k), heads = projections(config)[op], config.heads if op == "qkv" else None
    if phase == "prefill":
        return tuple(dict.fromkeys(gemm_specs(op, n, k, precision, heads).values()))
    tokens = config.vocab_size if op == "lm_head" else None
    return tuple(decode_gemm_spec(op, n, k, batch, precision, heads, tokens) for batch in BATCH_TILES)


def packed_rows(phase: Phase, op: Projection, n: int) -> Tensor:
    """Which row of the logical weight each row of the packed one is, [n]."""
    if phase == "prefill":
        return pack_prefill(op, torch.arange(n)[:, None].expand(n, 8))[:, 0]
    # lane 4 g holds rows g (register a0: elements 0 and 1) and g + 8 (a1: 2 and 3) of each tile of sixteen
    fragments = pack_decode(op, torch.arange(n)[:, None].expand(n, 32))[:, 0, ::4]
    return torch.cat([fragments[:, :, 0], fragments[:, :, 2]], 1).flatten()


class Problem:
    """Inputs of one projection, what its chain reads and writes as files, and the reference's answer.

    FP8 operands are the BF16 ones at scales of their own. Some of the results are beyond the largest code, and the last
    of several rows is not a number.
    """

    def __init__(self, config: LlamaConfig, op: Projection, rows: int, precision: Precision = BF16) -> None:
        self.config, self.op, self.rows = config, op, rows
        n, k = projections(config)[op]
        generator = torch.Generator().manual_seed(rows)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        self.x = (normal(rows, k) * torch.linspace(0.1, 8, rows)[:, None]).bfloat16()
        self.logical = (normal(n, k) * k**-0.5).bfloat16()
        parts = self.x.float().square().view(rows, 4, -1).sum(-1)
        self.sumsq = torch.cat([parts, torch.zeros(rows, 3)], 1)
        self.residual_f32 = normal(rows, config.hidden_size) * 4
        self.residual = self.residual_f32.bfloat16()
        self.gain = torch.rand(config.hidden_size, generator=generator) + 0.5 if precision.gain_in_x else None
        self.weight: Fp8Weight | None = None
        if precision.decode == E4M3:
            self.weight = quantize_weight(op, self.logical, "channel")
            self.logical = self.weight.dequantise()
        self.scale: Tensor | None = None
        if precision.prefill == E4M3:
            self._quantise(precision)
        # some of K and V, which are about 1, lie beyond 448 of these: 1.8 and 1.3
        self.kv_scale = torch.tensor([0.004, 0.003]) if precision.kv == E4M3 else None
        angles = torch.rand(99, config.head_dim // 2, generator=generator) * 6.283
        self.rope_table = torch.stack([angles.cos(), angles.sin()], -1).contiguous()
        self.positions = torch.randint(99, (rows,), generator=generator, dtype=torch.int32)
        self.page_shape = (3, config.num_key_value_heads, PAGE_SIZE, config.head_dim)
        self.slots = torch.randperm(3 * PAGE_SIZE, generator=generator)[:rows]
        self.slots[2:4] = torch.tensor([-1, -(2**40)])[: max(rows - 2, 0)]
        self.copy_poison: Tensor | None = None  # what the INT4 copy holds before
        if precision.copy is not None:
            shape = (*self.page_shape[:2], precision.copy.page_bytes(config.head_dim))
            self.copy_poison = torch.randint(256, shape, generator=generator, dtype=torch.uint8)

    def _quantise(self, precision: Precision) -> None:
        """Make the operands FP8, the weight's at a scale for all of it or for each of its rows."""
        self.logical, of_weight = quantised(self.logical, by_row=precision.weight_scales == "channel")
        self.x, of_x = quantised(self.x)
        self.scale = of_weight * of_x
        if self.rows > 1:
            self.sumsq[-1, 0] = torch.nan
            self.residual[-1] = torch.nan

    def fp8(self) -> Fp8Output:
        """How the result is written: some values lie beyond 448 scales, 1.3 for h and 7.6 for the residual stream."""
        return fp8_output(torch.tensor([0.003 if self.op == "gate_up" else 0.017]))

    def files(self, spec: GemmSpec | DecodeGemmSpec, order: Tensor) -> dict[str, Tensor]:
        """Every parameter of the chain: inputs as they are, outputs poisoned, with room behind their last row."""
        sums = scaled_linear(self.x, self.logical, None)

        def poisoned(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.full(shape, torch.nan, dtype=dtype)

        room = self.rows + ROOM
        columns = spec.n // 2 if self.op == "gate_up" else spec.n
        out = poisoned(room, columns, dtype=torch.float32 if self.op == "lm_head" else torch.bfloat16)
        files = {
            "sums": sums[:, order].contiguous(),
            "sumsq": self.sumsq,
            "sumsq_parts": torch.tensor(self.sumsq.shape[1], dtype=torch.int32),
            "rms_norm_eps": torch.tensor(self.config.rms_norm_eps),
            "rope_table": self.rope_table,
            "positions": self.positions,
            "slots": self.slots,
            "residual": self.residual if isinstance(spec, GemmSpec) else with_room(self.residual_f32),
            "q": poisoned(room, self.config.heads.q_features),
            "k_pages": poisoned(*self.page_shape),
            "v_pages": poisoned(*self.page_shape),
            "out": out,
            "sumsq_out": poisoned(room, spec.sumsq_parts, dtype=torch.float32),
            "best": poisoned(room, spec.sumsq_parts, 2, dtype=torch.float32),
        }
        if self.weight is not None:
            files["sums"] = scaled_linear(self.x, self.weight.codes, None)[:, order].contiguous() * E4M3_OPERAND
            files["weight"] = pack_e4m3(self.op, self.weight)
        if self.gain is not None:
            files["gain"] = self.gain
        if self.scale is not None:
            fp8 = self.fp8()
            files["scale"] = pack_scale(self.op, self.scale)
            files["out_fp8"] = poisoned(room, columns, dtype=torch.float8_e4m3fn)
            files |= {"out_scale": fp8.scale, "amax": fp8.amax, "saturated": fp8.saturated}
        if self.kv_scale is not None:
            pages = {name: poisoned(*self.page_shape, dtype=torch.float8_e4m3fn) for name in ("k_pages", "v_pages")}
            files |= {"kv_scale": self.kv_scale, **pages}
        if self.copy_poison is not None:
            files["kv_copy"] = self.copy_poison
        return files

    def reference(self, phase: Phase) -> dict[str, Tensor]:
        """What the chain must have written, with the room behind it."""
        ops, weight = ReferenceOps(self.config), self.logical.float()
        if self.op == "qkv":
            # codes that are not rounded
            dtype = torch.bfloat16 if self.kv_scale is None else torch.float32
            k_pages, v_pages = (torch.full(self.page_shape, torch.nan, dtype=dtype) for _ in range(2))
            row_state = (self.rope_table, self.positions, self.slots, k_pages, v_pages)
            q = ops.qkv("prefill", self.x, self.sumsq, weight, *row_state, scale=self.scale, kv_scale=self.kv_scale)
            return {"q": with_room(q), "k_pages": k_pages, "v_pages": v_pages}
        if self.scale is not None:
            return self._fp8_reference()
        if self.op in ("o", "down"):
            if phase == "prefill":
                return {"out": with_room(ops.o(phase, self.x, weight, self.residual.clone()).x)}
            stream = ops.o(phase, self.x, weight, self.residual_f32.clone(), gain=self.gain)
            return {"out": with_room(stream.x), "residual": with_room(stream.residual)}
        if self.op == "gate_up":
            return {"out": with_room(ops.gate_up("prefill", self.x, self.sumsq, weight))}
        rstd = torch.rsqrt(self.sumsq.sum(1, keepdim=True) / self.x.shape[1] + self.config.rms_norm_eps)
        return {"out": with_room(F.linear(self.x.float(), weight) * rstd)}  # the vocabulary's padding included

    def _fp8_reference(self) -> dict[str, Tensor]:
        """``out_fp8`` are codes that are not rounded."""
        fp8, residual = self.fp8(), self.residual.clone()
        written: dict[str, Tensor] = {}
        ops = ReferenceOps(self.config, dtype=torch.float32)
        if self.op == "gate_up":
            codes = ops.gate_up("prefill", self.x, self.sumsq, self.logical, scale=self.scale, fp8=fp8)
        else:
            codes, _, stored = ops.o("prefill", self.x, self.logical, residual, scale=self.scale, fp8=fp8)
            written["out"] = with_room(stored.bfloat16())
        return {**written, "out_fp8": with_room(codes), "amax": fp8.amax, "saturated": fp8.saturated}


def with_room(written: Tensor) -> Tensor:
    return torch.cat([written, torch.full_like(written[:1], torch.nan).expand(ROOM, -1)])


def check(problem: Problem, spec: GemmSpec | DecodeGemmSpec, written: dict[str, Tensor]) -> None:
    """The same sums went in, so a value may differ by the rounding of one float32 operation falling otherwise."""
    phase: Phase = "prefill" if isinstance(spec, GemmSpec) else "decode"
    reference = problem.reference(phase)
    for name, want in reference.items():
        actual, poison = written[name].float(), want.isnan()
        assert torch.equal(actual.isnan(), poison), f"{name}: written where nothing may be, or not written"
        actual, want = (tensor.float().masked_fill(poison, 0) for tensor in (actual, want))  # noqa: PLW2901
        unit = 2.0**-21 * want.abs()
        if name == "out_fp8" or (problem.kv_scale is not None and name in ("k_pages", "v_pages")):
            unit = e4m3_step(want) / 2
            if name != "out_fp8":
                assert (want.abs() == E4M3_MAX).any(), f"the problem saturates nothing of {name}"
        elif name == "saturated":
            assert want > EARLIER_COUNT, "the problem saturates nothing"
            unit = torch.zeros_like(want)
        elif problem.op != "lm_head" and name not in ("residual", "amax"):
            unit = 2.0**-7 * want.abs()
        worst = ((actual - want).abs() - unit - 2.0**-20 * want.abs().max()).max()
        assert worst <= 0, f"{name} is off by {worst:.3e}"
    if problem.op == "lm_head" and phase == "decode":
        check_best(problem, spec, written)
    if problem.op in ("o", "down"):
        added = scaled_linear(problem.x, problem.logical, problem.scale)
        added += problem.residual if phase == "prefill" else problem.residual_f32
        width = spec.block_rows if isinstance(spec, DecodeGemmSpec) else spec.tile.n
        parts = torch.stack([part.square().sum(1) for part in torch.split(added, width, 1)], 1)
        torch.testing.assert_close(written["sumsq_out"][: problem.rows], parts, rtol=1e-6, atol=0, equal_nan=True)
        assert written["sumsq_out"][problem.rows :].isnan().all()


def run_chains(
    emulate: Callable[..., str], folder: Path, cases: Sequence[tuple[Problem, GemmSpec | DecodeGemmSpec]]
) -> list[dict[str, Tensor]]:
    """All parameters of each chain after it has run."""
    runs = []
    for index, (problem, spec) in enumerate(cases):
        (folder / str(index)).mkdir()
        phase: Phase = "prefill" if isinstance(spec, GemmSpec) else "decode"
        for name, tensor in problem.files(spec, packed_rows(phase, problem.op, spec.n)).items():
            (folder / str(index) / name).write_bytes(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
        runs.append((spec.name, str(problem.rows), str(folder / str(index))))
    template = _environment().overlay().from_string((Path(__file__).parent / "emulated_epilogue.cpp.jinja").read_text())
    emulate(
        "epilogue",
        "e4m3_operand",
        "epilogue_fp8",
        "weight_scale",
        "candidate",
        "store_logits",
        "kv_int4",
        "epilogue_kv",
        "tile_epilogue",
        source=template.render(specs={spec.name: spec for _, spec in cases}.values()),
        runs=runs,
    )
    return [
        {
            name: torch.frombuffer(bytearray((folder / str(index) / name).read_bytes()), dtype=tensor.dtype).view_as(
                tensor
            )
            for name, tensor in problem.files(spec, torch.arange(spec.n)).items()
        }
        for index, (problem, spec) in enumerate(cases)
    ]


def check_best(problem: Problem, spec: GemmSpec | DecodeGemmSpec, written: dict[str, Tensor]) -> None:
    """Of every block's logits, padding left out, the largest and its lowest index; none where all is padding."""
    rows, vocabulary = problem.rows, problem.config.vocab_size
    padding = spec.n - vocabulary
    logits = F.pad(written["out"][:rows, :vocabulary], (0, padding), value=-torch.inf)
    parts = logits.view(rows, spec.sumsq_parts, -1)
    values, bits = written["best"][:rows].unbind(2)
    index = bits.contiguous().view(torch.int32)
    best = parts.max(2)
    first = torch.arange(spec.sumsq_parts) * parts.shape[2]
    assert torch.equal(values, best.values)
    assert torch.equal(index, (best.indices + first).int().where(best.values > -torch.inf, 2**31 - 1))
    assert written["best"][rows:].isnan().all()


@pytest.mark.compile
@pytest.mark.parametrize("head_dim", CONFIGS)
@pytest.mark.parametrize("chains", CHAINS)
def test_chains_in_the_emulator(emulate: Callable[..., str], tmp_path: Path, chains: str, head_dim: int) -> None:
    config, (phase, precision) = CONFIGS[head_dim], CHAINS[chains]
    cases = [
        (Problem(config, op, rows, precision), spec)
        for op in OPS_OF[head_dim]
        # the head is BF16 in all, and a gain belongs to what o and down write
        if (op == "qkv" or (precision.kv != E4M3 and (op != "lm_head" or precision in (BF16, DECODE_FP8))))
        and (op in ("o", "down") or not precision.gain_in_x)
        for spec in specs_of(phase, config, op, precision)
        for rows in (ROWS if isinstance(spec, GemmSpec) else (spec.batch_tile - 3,))
    ]
    for (problem, spec), written in zip(cases, run_chains(emulate, tmp_path, cases), strict=True):
        check(problem, spec, written)
