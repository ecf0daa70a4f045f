"""A kernel library on the CPU whose kernels are the reference: everything but the device code is the real thing.

Packing, validation, launch geometry and arguments run as on a GPU; a launch is answered by PyTorch from its arguments
alone. So what the GPU tests do can be run, and shown to fail, where there is no GPU.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from futransformer import library
from futransformer.blocks import DecodePass, LayerWeights, Packed, llama_block
from futransformer.generator.config import LlamaConfig
from futransformer.generator.int4 import ROW_TILE, unit_bytes
from futransformer.generator.plan import make_plan
from futransformer.generator.precision import E4M3, INT4, Precision, get_precision
from futransformer.generator.specs import (
    PAGE_SIZE,
    ArgmaxPartsSpec,
    ArgmaxSpec,
    AttentionDecodeSpec,
    AttentionPrefillSpec,
    DecodeGemmSpec,
    DecodeLayersSpec,
    GatherRowsSpec,
    GemmSpec,
    KernelSpec,
    SampleSpec,
    StepBeginSpec,
    StepEndSpec,
)
from futransformer.library import KernelLibrary
from futransformer.ops import attention_decode, attention_prefill, decode_gemm, gemm
from futransformer.ops.decode_gemm import ROW_ARGUMENTS
from futransformer.ops.interface import Fp8Output, Phase, Projection, StepRows, Stops, Stream
from futransformer.packing import unpack_decode, unpack_e4m3, unpack_int4, unpack_prefill
from futransformer.reference import ReferenceOps, scaled_linear, with_gain
from futransformer.sampling import SamplingRows
from tests.ops.int4 import SPLIT_BATCH, as_integers

CPU = torch.device("cpu")
NO_INDEX = 2**31 - 1  # of parts that have no number
FP8_ARGUMENTS = ("out_scale", "amax", "saturated")  # as Fp8Output has them


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
            fp8 = fp8_output(arguments)
            stream = self.ops.gather_rows("prefill", arguments["table"], arguments["indices"], fp8=fp8)
            arguments["out"].copy_(with_gain(stream.residual, arguments.get("gain")))
            arguments["sumsq_out"].copy_(stream.sumsq)
            if spec.residual:
                arguments["residual"].copy_(stream.residual)
            if fp8 is not None:
                arguments["out_fp8"].copy_(stream.x)
        elif isinstance(spec, ArgmaxSpec):
            arguments["out"].copy_(self.ops.argmax(arguments["logits"]))
        elif isinstance(spec, ArgmaxPartsSpec):
            values, bits = arguments["best"].unbind(2)
            assert arguments["parts"] == values.shape[1]
            index = bits.contiguous().view(torch.int32)
            part = self.ops.argmax(values.masked_fill(index == NO_INDEX, torch.nan)).long()
            chosen = index.gather(1, part[:, None])[:, 0]
            arguments["out"].copy_(chosen.where(chosen < NO_INDEX, 0))
        elif isinstance(spec, SampleSpec):
            logits, out = arguments.pop("logits"), arguments.pop("out")
            assert grid == (spec.blocks, len(logits), 1)
            assert arguments.pop("logits_stride") == logits.stride(0)
            seen = arguments.pop("seen")
            rows = SamplingRows(**arguments, seen=seen if seen.numel() else None)
            self.ops.sample(logits, rows, out=out)
        elif isinstance(spec, StepBeginSpec):
            assert arguments.pop("block_table_stride") == arguments["block_table"].shape[1]
            assert arguments.pop("rows") == len(arguments["lengths"])
            self.ops.begin_step(StepRows(**arguments))
        elif isinstance(spec, StepEndSpec):
            assert arguments.pop("log_steps") == len(arguments["log"])
            assert arguments.pop("rows") == len(arguments["lengths"])
            tokens, lengths = arguments.pop("tokens"), arguments.pop("lengths")
            self.ops.end_step(tokens, lengths, Stops(**arguments))
        elif isinstance(spec, DecodeLayersSpec):
            assert grid == (spec.blocks, 1, 1)
            self._walk(spec, **arguments)
        else:
            assert isinstance(spec, (AttentionPrefillSpec, AttentionDecodeSpec))
            self._attend(spec, **arguments)

    def _project(self, spec: GemmSpec | DecodeGemmSpec, *, x: Tensor, weight: Tensor, m: int, **arguments: Any) -> None:
        """One row at a time: as with the kernels, a row's bits depend on nothing else in the batch."""
        assert x.shape == (m, spec.k)
        op = cast(Projection, spec.op)
        if isinstance(spec, GemmSpec):
            logical = unpack_prefill(op, weight, spec.n).float()
        elif spec.element == INT4:
            logical = unpack_int4(op, weight, spec.n, spec.group_k).dequantise()
            if spec.batch_tile <= SPLIT_BATCH:
                x = as_integers(x, spec.group_k)
        elif spec.element == E4M3:
            logical = unpack_e4m3(op, weight, spec.n).dequantise()
        else:
            logical = unpack_decode(op, weight, spec.n).float()
        scale = arguments.get("scale")
        if scale is not None and scale.numel() > 1 and spec.op == "gate_up":
            arguments["scale"] = scale.view(-1, 2).T.reshape(-1)  # gate, up, gate, up, ...
        by_rows = ROW_ARGUMENTS | {"out_fp8"}
        for row in range(m):
            by_row = {name: value[row : row + 1] for name, value in arguments.items() if name in by_rows}
            self._project_row(spec, x[row : row + 1], logical, **{**arguments, **by_row})

    def _project_row(self, spec: GemmSpec | DecodeGemmSpec, x: Tensor, logical: Tensor, **arguments: Any) -> None:
        scale, fp8 = arguments.get("scale"), fp8_output(arguments)
        written = arguments["out" if fp8 is None else "out_fp8"] if spec.op != "qkv" else arguments["q"]
        if spec.op == "qkv":
            state = (arguments[name] for name in ("rope_table", "positions", "slots", "k_pages", "v_pages"))
            cache: dict[str, Any] = {name: arguments.get(name) for name in ("kv_scale", "kv_copy")}
            of_phase: Phase = "prefill" if isinstance(spec, GemmSpec) else "decode"
            q = self.ops.qkv(of_phase, x, arguments["sumsq"], logical, *state, scale=scale, **cache)
            written.copy_(q)
        elif spec.op in ("o", "down"):
            phase: Phase = "prefill" if isinstance(spec, GemmSpec) else "decode"
            residual = arguments["residual"].clone()
            stream = self.ops.o(phase, x, logical, residual.clone(), scale=scale, fp8=fp8, gain=arguments.get("gain"))
            if phase == "decode":
                arguments["residual"].copy_(stream.residual)
            elif fp8 is not None:
                arguments["out"].copy_(stream.residual)
            written.copy_(stream.x)
            width = spec.tile.n if isinstance(spec, GemmSpec) else spec.n // spec.sumsq_parts
            added = scaled_linear(x, logical, scale) + residual
            parts = [part.square().sum(1) for part in torch.split(added, width, 1)]
            arguments["sumsq_out"].copy_(torch.stack(parts, 1))
        elif spec.op == "gate_up":
            written.copy_(self.ops.gate_up("prefill", x, arguments["sumsq"], logical, scale=scale, fp8=fp8))
        else:
            mean = arguments["sumsq"].sum(1, keepdim=True) / spec.k
            rstd = torch.rsqrt(mean + self.ops.rms_norm_eps)
            logits = F.linear(x.float(), logical) * rstd
            if len(written):  # nobody may have asked for them
                written.copy_(logits)
            if isinstance(spec, DecodeGemmSpec):
                arguments["best"].copy_(best_of_parts(logits, spec))

    def _walk(self, spec: DecodeLayersSpec, *, layers: Tensor, x: Tensor, residual: Tensor, **arguments: Any) -> None:
        """All layers, of what lies at the addresses of the table; what blocks send one another nobody sends."""
        table, lengths = arguments["block_table"], arguments["seqlens_k"]
        assert arguments["block_table_stride"] == table.shape[1]
        assert len(layers) == arguments["num_layers"]
        if lengths > table.numel() * PAGE_SIZE:
            for out in (x, residual, arguments["sumsq_out"]):
                out.fill_(torch.nan)
            return
        rows = DecodePass(arguments["positions"], arguments["slots"], table, lengths, int(lengths))
        stream = Stream(x, x.float().square().sum(1, keepdim=True), residual)
        pages, heads = int(table.max()) + 1, spec.heads
        page = (pages, heads.num_key_value_heads, PAGE_SIZE, heads.head_dim)
        for row in layers.tolist():
            weights: dict[str, Packed] = {}
            for op, address in zip(spec.projections, row, strict=False):
                unit = unit_bytes(spec.group_k, spec.zero_points)
                packed = at_address(address, op.n // ROW_TILE, op.k // spec.group_k, unit)
                logical = unpack_int4(cast(Projection, op.op), packed, op.n, spec.group_k).dequantise()
                weights[op.op] = {"decode": logical.float()}
            k_pages, v_pages = (
                at_address(address, *page[:3], 2 * page[3]).view(torch.bfloat16) for address in row[4:6]
            )
            kv_copy = at_address(row[6], *page[:2], spec.copy.page_bytes(heads.head_dim))
            pages_of_layer = arguments["rope_table"], k_pages, v_pages
            stream = llama_block(self.ops, LayerWeights(**weights), stream, rows, *pages_of_layer, kv_copy=kv_copy)
        x.copy_(stream.x)
        residual.copy_(stream.residual)
        arguments["sumsq_out"].zero_()[0] = residual.square().sum()

    def _attend(self, spec: AttentionPrefillSpec | AttentionDecodeSpec, *, q: Tensor, **arguments: Any) -> None:
        shape = (-1, spec.heads.num_key_value_heads, PAGE_SIZE, spec.heads.head_dim)
        kv_copy = arguments.get("kv_copy")
        no_pages = torch.empty(0)  # beside a copy nobody reads them
        k_pages, v_pages = (arguments.get(name, no_pages).view(shape) for name in ("k_pages", "v_pages"))
        table, lengths = arguments["block_table"], arguments["seqlens_k"]
        assert arguments["block_table_stride"] == table.shape[1]
        state, kv_scale = (q, k_pages, v_pages, table), arguments.get("kv_scale")
        if isinstance(spec, AttentionPrefillSpec):
            fp8, offsets = fp8_output(arguments), arguments["cu_seqlens_q"]
            out = arguments["out" if fp8 is None else "out_fp8"]
            most = q.shape[0]
            self.ops.attention_prefill(*state, offsets, lengths, max_seqlen_q=most, out=out, fp8=fp8, kv_scale=kv_scale)
        else:
            most = table.shape[1] * PAGE_SIZE
            out = arguments["out"]
            self.ops.attention_decode(*state, lengths, max_seqlen_k=most, out=out, kv_scale=kv_scale, kv_copy=kv_copy)


def at_address(address: int, *shape: int) -> Tensor:
    """The bytes that lie there, to be read and written."""
    return torch.frombuffer((ctypes.c_uint8 * math.prod(shape)).from_address(address), dtype=torch.uint8).view(shape)


def best_of_parts(logits: Tensor, spec: DecodeGemmSpec) -> Tensor:
    """The largest number of each block's columns and the bits of its lowest index; of none -inf, and NO_INDEX."""
    real = logits[:, : spec.vocab_size or spec.n]
    parts = F.pad(real, (0, spec.n - real.shape[1]), value=torch.nan).view(len(logits), spec.blocks, -1)
    numbers = parts.isnan().logical_not()
    values = parts.masked_fill(~numbers, -torch.inf).amax(2)
    column = ((parts == values[..., None]) & numbers).int().argmax(2)
    index = column + torch.arange(spec.blocks) * parts.shape[2]
    index = index.where(numbers.any(2), NO_INDEX).int()
    return torch.stack((values, index.view(torch.float32)), 2)


def fp8_output(arguments: dict[str, Any]) -> Fp8Output | None:
    """How a launch writes an FP8 result, if it does."""
    return Fp8Output(*(arguments[name] for name in FP8_ARGUMENTS)) if "out_fp8" in arguments else None


def stand_in_library(
    config: LlamaConfig,
    monkeypatch: pytest.MonkeyPatch,
    kernel: type[StandInKernel] = StandInKernel,
    precision: str | Precision = "bf16",
    *,
    mixed: bool = False,
) -> KernelLibrary:
    """Build the library of a model on stand-ins; tensor maps are the tensors themselves while the patch lasts."""
    precision = get_precision(precision)
    ops = ReferenceOps(config, copy=precision.copy)
    monkeypatch.setattr(library, "Kernel", lambda spec, *_: kernel(spec, ops))
    for module in (attention_decode, attention_prefill, gemm):
        monkeypatch.setattr(module, "tensor_map_2d", lambda tensor, *_: tensor)
    monkeypatch.setattr(decode_gemm, "tensor_map_column_groups", lambda tensor, *_: tensor)
    # layers are walked one by one, unless a test asks for the launch for all
    plan = replace(make_plan(config, precision, mixed=mixed), decode_layers=None)
    nothing_built: Any = {spec.name: () for spec in plan.specs()}
    built = KernelLibrary(config, precision, plan, nothing_built, CPU)
    built.capturable = False  # there are no graphs without a GPU
    return with_poisoned_outputs(built)


def with_poisoned_outputs(ops: KernelLibrary) -> KernelLibrary:
    """Let every output that a projection allocates begin as NaN, so that what a kernel leaves out shows."""

    def poisoned(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        return torch.full((rows, columns), torch.nan, dtype=dtype, device=ops.device)

    ops._projections._empty = poisoned  # type: ignore[method-assign]
    return ops
