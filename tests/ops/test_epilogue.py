"""The epilogue chains of prefill and decode, as a kernel renders them, run on the host against the reference.

What a GEMM does around its chain is repeated in emulated_epilogue.cpp.jinja: which thread holds which column of which
row. The columns of the sums stand in the order of the packed weight's rows, so packing, walk and operations must agree.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from futransformer.generator.config import LlamaConfig
from futransformer.generator.heuristics import BATCH_TILES, decode_gemm_spec, gemm_specs
from futransformer.generator.plan import projections
from futransformer.generator.precision import get_precision
from futransformer.generator.render import _environment
from futransformer.generator.specs import PAGE_SIZE, DecodeGemmSpec, GemmSpec
from futransformer.ops.interface import PROJECTIONS, Phase, Projection
from futransformer.packing import pack_decode, pack_prefill
from futransformer.reference import ReferenceOps

BF16 = get_precision("bf16")
ROWS = (1, 17, 37)  # of the 48 that three warps of the prefill hold
ROOM = 3  # rows behind the last: nobody may write them

# No N is a multiple of its tile; the padding of the vocabulary has columns of its own.
CONFIGS = {
    64: LlamaConfig("narrow", 320, 448, 1, 6, 2, 64, 257, 512, 1e-5, 1e4),
    128: LlamaConfig("wide", 320, 448, 1, 6, 3, 128, 257, 512, 1e-5, 1e4),
}
OPS_OF: dict[int, tuple[Projection, ...]] = {64: PROJECTIONS, 128: ("qkv",)}  # nothing else depends on head_dim


def specs_of(phase: Phase, config: LlamaConfig, op: Projection) -> tuple[GemmSpec | DecodeGemmSpec, ...]:
    """The kernels of one projection: by the number of rows in prefill, one a batch tile in decode."""
    (n, k), heads = projections(config)[op], config.heads if op == "qkv" else None
    if phase == "prefill":
        return tuple(dict.fromkeys(gemm_specs(op, n, k, BF16, heads).values()))
    return tuple(decode_gemm_spec(op, n, k, batch, BF16, heads) for batch in BATCH_TILES)


def packed_rows(phase: Phase, op: Projection, n: int) -> Tensor:
    """Which row of the logical weight each row of the packed one is, [n]."""
    if phase == "prefill":
        return pack_prefill(op, torch.arange(n)[:, None].expand(n, 8))[:, 0]
    # lane 4 g holds rows g (register a0: elements 0 and 1) and g + 8 (a1: 2 and 3) of each tile of sixteen
    fragments = pack_decode(op, torch.arange(n)[:, None].expand(n, 32))[:, 0, ::4]
    return torch.cat([fragments[:, :, 0], fragments[:, :, 2]], 1).flatten()


class Problem:
    """Inputs of one projection, what its chain reads and writes as files, and the reference's answer."""

    def __init__(self, config: LlamaConfig, op: Projection, rows: int) -> None:
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
        angles = torch.rand(99, config.head_dim // 2, generator=generator) * 6.283
        self.rope_table = torch.stack([angles.cos(), angles.sin()], -1).contiguous()
        self.positions = torch.randint(99, (rows,), generator=generator, dtype=torch.int32)
        self.page_shape = (3, config.num_key_value_heads, PAGE_SIZE, config.head_dim)
        self.slots = torch.randperm(3 * PAGE_SIZE, generator=generator)[:rows]
        self.slots[2:4] = torch.tensor([-1, -(2**40)])[: max(rows - 2, 0)]

    def files(self, spec: GemmSpec | DecodeGemmSpec, order: Tensor) -> dict[str, Tensor]:
        """Every parameter of the chain: inputs as they are, outputs poisoned, with room behind their last row."""
        sums = F.linear(self.x.float(), self.logical.float())

        def poisoned(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.full(shape, torch.nan, dtype=dtype)

        room = self.rows + ROOM
        columns = spec.n // 2 if self.op == "gate_up" else spec.n
        out = poisoned(room, columns, dtype=torch.float32 if self.op == "lm_head" else torch.bfloat16)
        return {
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
        }

    def reference(self, phase: Phase) -> dict[str, Tensor]:
        """What the chain must have written, with the room behind it."""
        ops, weight = ReferenceOps(self.config), self.logical.float()
        if self.op == "qkv":
            k_pages, v_pages = (torch.full(self.page_shape, torch.nan, dtype=torch.bfloat16) for _ in range(2))
            row_state = (self.rope_table, self.positions, self.slots, k_pages, v_pages)
            q = ops.qkv("prefill", self.x, self.sumsq, weight, *row_state)
            return {"q": with_room(q), "k_pages": k_pages, "v_pages": v_pages}
        if self.op in ("o", "down"):
            if phase == "prefill":
                return {"out": with_room(ops.o(phase, self.x, weight, self.residual.clone()).x)}
            stream = ops.o(phase, self.x, weight, self.residual_f32.clone())
            return {"out": with_room(stream.x), "residual": with_room(stream.residual)}
        if self.op == "gate_up":
            return {"out": with_room(ops.gate_up("prefill", self.x, self.sumsq, weight))}
        rstd = torch.rsqrt(self.sumsq.sum(1, keepdim=True) / self.x.shape[1] + self.config.rms_norm_eps)
        return {"out": with_room(F.linear(self.x.float(), weight) * rstd)}  # the vocabulary's padding included


def with_room(written: Tensor) -> Tensor:
    return torch.cat([written, torch.full_like(written[:1], torch.nan).expand(ROOM, -1)])


def check(problem: Problem, spec: GemmSpec | DecodeGemmSpec, written: dict[str, Tensor]) -> None:
    """The same sums went in, so a BF16 value may differ by the rounding of one float32 operation falling otherwise."""
    phase: Phase = "prefill" if isinstance(spec, GemmSpec) else "decode"
    for name, want in problem.reference(phase).items():
        actual, poison = written[name], want.isnan()
        assert torch.equal(actual.isnan(), poison), f"{name}: written where nothing may be, or not written"
        actual, want = (tensor.float().masked_fill(poison, 0) for tensor in (actual, want))  # noqa: PLW2901
        unit = 2.0**-21 if problem.op == "lm_head" or name == "residual" else 2.0**-7
        worst = ((actual - want).abs() - unit * want.abs() - 2.0**-20 * want.abs().max()).max()
        assert worst <= 0, f"{name} is off by {worst:.3e}"
    if problem.op in ("o", "down"):
        added = F.linear(problem.x.float(), problem.logical.float())
        added += problem.residual if phase == "prefill" else problem.residual_f32
        width = spec.block_rows if isinstance(spec, DecodeGemmSpec) else spec.tile.n
        parts = torch.stack([part.square().sum(1) for part in torch.split(added, width, 1)], 1)
        torch.testing.assert_close(written["sumsq_out"][: problem.rows], parts, rtol=1e-6, atol=0)
        assert written["sumsq_out"][problem.rows :].isnan().all()


@pytest.mark.compile
@pytest.mark.parametrize("head_dim", CONFIGS)
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_chains_in_the_emulator(emulate: Callable[..., str], tmp_path: Path, phase: Phase, head_dim: int) -> None:
    config = CONFIGS[head_dim]
    cases = [
        (Problem(config, op, rows), spec)
        for op in OPS_OF[head_dim]
        for spec in specs_of(phase, config, op)
        for rows in (ROWS if isinstance(spec, GemmSpec) else (spec.batch_tile - 3,))
    ]
    runs = []
    for index, (problem, spec) in enumerate(cases):
        folder = tmp_path / str(index)
        folder.mkdir()
        for name, tensor in problem.files(spec, packed_rows(phase, problem.op, spec.n)).items():
            (folder / name).write_bytes(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
        runs.append((spec.name, str(problem.rows), str(folder)))
    environment = _environment().overlay()
    template = environment.from_string((Path(__file__).parent / "emulated_epilogue.cpp.jinja").read_text())
    emulate(
        "epilogue",
        "tile_epilogue",
        source=template.render(specs={spec.name: spec for _, spec in cases}.values()),
        runs=runs,
    )
    for index, (problem, spec) in enumerate(cases):
        written = {
            name: torch.frombuffer(bytearray((tmp_path / str(index) / name).read_bytes()), dtype=tensor.dtype).view_as(
                tensor
            )
            for name, tensor in problem.files(spec, torch.arange(spec.n)).items()
        }
        check(problem, spec, written)
