"""A kernel library on the CPU whose kernels are the reference: everything but the device code is the real thing.

Packing, validation, launch geometry and arguments run as on a GPU; a launch is answered by PyTorch from its arguments
alone. So what the GPU tests do can be run, and shown to fail, where there is no GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from futransformer import library
from futransformer.generator.config import LlamaConfig
from futransformer.generator.plan import make_plan
from futransformer.generator.precision import get_precision
from futransformer.generator.specs import (
    PAGE_SIZE,
    ArgmaxSpec,
    AttentionDecodeSpec,
    AttentionPrefillSpec,
    DecodeGemmSpec,
    GatherRowsSpec,
    GemmSpec,
    KernelSpec,
)
from futransformer.library import KernelLibrary
from futransformer.ops import attention_decode, attention_prefill, decode_gemm, gemm
from futransformer.ops.decode_gemm import ROW_ARGUMENTS
from futransformer.ops.interface import Phase
from futransformer.packing import unpack_decode, unpack_prefill
from futransformer.reference import ReferenceOps

CPU = torch.device("cpu")


class StandInKernel:
    """One kernel: checks that its arguments are those of the ABI, and computes what they ask for."""

    def __init__(self, spec: KernelSpec, ops: ReferenceOps) -> None:
        self.spec, self.ops, self.device, self.sm_count = spec, ops, CPU, 132

    def launch(self, grid: tuple[int, int, int], **arguments: Any) -> None:
        """Answer a launch."""
        spec = self.spec
        assert set(arguments) == {param.name for param in spec.params}
        if isinstance(spec, (GemmSpec, DecodeGemmSpec)):
            self._project(spec, **arguments)
        elif isinstance(spec, GatherRowsSpec):
            stream = self.ops.gather_rows("prefill", arguments["table"], arguments["indices"])
            arguments["out"].copy_(stream.x)
            arguments["sumsq_out"].copy_(stream.sumsq)
            if spec.residual:
                arguments["residual"].copy_(stream.x)
        elif isinstance(spec, ArgmaxSpec):
            arguments["out"].copy_(self.ops.argmax(arguments["logits"]))
        else:
            assert isinstance(spec, (AttentionPrefillSpec, AttentionDecodeSpec))
            self._attend(spec, **arguments)

    def _project(self, spec: GemmSpec | DecodeGemmSpec, *, x: Tensor, weight: Tensor, m: int, **arguments: Any) -> None:
        """One row at a time: as with the kernels, a row's bits depend on nothing else in the batch."""
        assert x.shape == (m, spec.k)
        unpack = unpack_prefill if isinstance(spec, GemmSpec) else unpack_decode
        logical = unpack(spec.op, weight, spec.n).float()  # type: ignore[arg-type]
        for row in range(m):
            by_row = {name: value[row : row + 1] for name, value in arguments.items() if name in ROW_ARGUMENTS}
            self._project_row(spec, x[row : row + 1], logical, **{**arguments, **by_row})

    def _project_row(self, spec: GemmSpec | DecodeGemmSpec, x: Tensor, logical: Tensor, **arguments: Any) -> None:
        if spec.op == "qkv":
            state = (arguments[name] for name in ("rope_table", "positions", "slots", "k_pages", "v_pages"))
            arguments["q"].copy_(self.ops.qkv("prefill", x, arguments["sumsq"], logical, *state))
        elif spec.op in ("o", "down"):
            phase: Phase = "prefill" if isinstance(spec, GemmSpec) else "decode"
            residual = arguments["residual"].clone()
            stream = self.ops.o(phase, x, logical, residual.clone())
            if phase == "decode":
                arguments["residual"].copy_(stream.residual)
            arguments["out"].copy_(stream.x)
            width = spec.tile.n if isinstance(spec, GemmSpec) else spec.n // spec.sumsq_parts
            added = F.linear(x.float(), logical) + residual
            parts = [part.square().sum(1) for part in torch.split(added, width, 1)]
            arguments["sumsq_out"].copy_(torch.stack(parts, 1))
        elif spec.op == "gate_up":
            arguments["out"].copy_(self.ops.gate_up("prefill", x, arguments["sumsq"], logical))
        else:
            mean = arguments["sumsq"].sum(1, keepdim=True) / spec.k
            rstd = torch.rsqrt(mean + self.ops.rms_norm_eps)
            arguments["out"].copy_(F.linear(x.float(), logical) * rstd)

    def _attend(
        self, spec: AttentionPrefillSpec | AttentionDecodeSpec, *, q: Tensor, out: Tensor, **arguments: Any
    ) -> None:
        shape = (-1, spec.heads.num_key_value_heads, PAGE_SIZE, spec.heads.head_dim)
        k_pages, v_pages = (arguments[name].view(shape) for name in ("k_pages", "v_pages"))
        table, lengths = arguments["block_table"], arguments["seqlens_k"]
        assert arguments["block_table_stride"] == table.shape[1]
        if isinstance(spec, AttentionPrefillSpec):
            offsets = arguments["cu_seqlens_q"]
            self.ops.attention_prefill(q, k_pages, v_pages, table, offsets, lengths, max_seqlen_q=q.shape[0], out=out)
        else:
            self.ops.attention_decode(
                q, k_pages, v_pages, table, lengths, max_seqlen_k=table.shape[1] * PAGE_SIZE, out=out
            )


def stand_in_library(
    config: LlamaConfig, monkeypatch: pytest.MonkeyPatch, kernel: type[StandInKernel] = StandInKernel
) -> KernelLibrary:
    """Build the library of a model on stand-ins; tensor maps are the tensors themselves while the patch lasts."""
    ops = ReferenceOps(config)
    monkeypatch.setattr(library, "Kernel", lambda spec, *_: kernel(spec, ops))
    for module in (attention_decode, attention_prefill, gemm):
        monkeypatch.setattr(module, "tensor_map_2d", lambda tensor, *_: tensor)
    monkeypatch.setattr(decode_gemm, "tensor_map_column_groups", lambda tensor, *_: tensor)
    plan = make_plan(config, "bf16")
    nothing_built: Any = {spec.name: () for spec in plan.specs()}
    built = KernelLibrary(config, get_precision("bf16"), plan, nothing_built, CPU)
    built.capturable = False  # there are no graphs without a GPU
    return with_poisoned_outputs(built)


def with_poisoned_outputs(ops: KernelLibrary) -> KernelLibrary:
    """Let every output that a projection allocates begin as NaN, so that what a kernel leaves out shows."""

    def poisoned(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        return torch.full((rows, columns), torch.nan, dtype=dtype, device=ops.device)

    ops._projections._empty = poisoned  # type: ignore[method-assign]
    return ops
