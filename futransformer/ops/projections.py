"""The five projections of a Llama step: check the tensors, allocate the outputs, name the epilogue's arguments.

The epilogue chains of both phases take the same arguments; a ``ProjectionGemm`` hides how each launches.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from futransformer.arguments import Argument
from futransformer.generator.config import LlamaConfig
from futransformer.generator.errors import InputError
from futransformer.generator.kv_format import KvFormat
from futransformer.generator.precision import Element
from futransformer.generator.specs import Heads
from futransformer.ops.interface import Fp8Output, Phase, Projection, Stream
from futransformer.ops.pages import check_copy, check_pages
from futransformer.ops.validate import check_phase, check_tensor, fp8_arguments, gain_argument

BF16, FP32, E4M3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn


class ProjectionGemm(Protocol):
    """A GEMM of one projection and phase, ready to launch."""

    def weight_shape(self) -> tuple[int, ...]:
        """Shape of the packed weight."""
        ...

    def sumsq_parts(self, rows: int) -> int:
        """Columns of sumsq_out for this many rows."""
        ...

    @property
    def operand(self) -> torch.dtype:
        """Type of x."""
        ...

    @property
    def weight_type(self) -> torch.dtype:
        """Type of the packed weight; uint8 where scales are inside it."""
        ...

    @property
    def element(self) -> Element:
        """What the weight consists of."""
        ...

    @property
    def kv(self) -> Element:
        """What qkv writes to the pages."""
        ...

    @property
    def copy(self) -> KvFormat | None:
        """The form of the INT4 copy that qkv writes beside them."""
        ...

    @property
    def scales(self) -> int:
        """Scales of its sums: 1, one for each row of the packed weight, or 0 where the operands are not scaled."""
        ...

    @property
    def gain_in_x(self) -> bool:
        """Whether what it writes of the residual stream is times a gain."""
        ...

    def launch(self, x: Tensor, weight: Tensor, **epilogue: Argument) -> None:
        """Run on x [m, k] with m >= 1."""
        ...


class Projections:
    """qkv, o, gate_up, down and lm_head of one model in both phases; ``gemms`` is keyed by (phase, projection).

    ``bf16`` are of a prefill whose ``gemms`` read FP8, for parts of layers that do not: the type of x chooses.
    """

    def __init__(
        self,
        config: LlamaConfig,
        heads: Heads,
        gemms: dict[tuple[Phase, Projection], ProjectionGemm],
        device: torch.device,
        bf16: dict[Projection, ProjectionGemm] | None = None,
    ) -> None:
        self.config = config
        self.heads = heads
        self.gemms = gemms
        self.bf16 = bf16 or {}
        self.device = device

    def gemm(self, phase: Phase, op: Projection, operand: torch.dtype | None) -> ProjectionGemm:
        """The one that reads this type, or that of the phase, which will refuse it."""
        beside = phase == "prefill" and operand != E4M3 and op in self.bf16
        return self.bf16[op] if beside else self.gemms[phase, op]

    def _checked(
        self, phase: Phase, op: Projection, x: Tensor, k: int, weight: Tensor, scale: Tensor | None
    ) -> tuple[ProjectionGemm, dict[str, Argument]]:
        """The GEMM, and the argument that scales its sums, if its operands are scaled."""
        check_phase(op, phase)
        gemm = self.gemm(phase, op, getattr(x, "dtype", None))
        check_tensor(op, "x", x, (None, k), gemm.operand, self.device)
        check_tensor(op, "weight", weight, gemm.weight_shape(), gemm.weight_type, self.device)
        if (scale is None) != (gemm.scales == 0):
            needs = "needs the scale of its sums" if scale is None else "takes no scale: its operands are not scaled"
            raise InputError(f"{op}: the {phase} kernel {needs}")
        if scale is None:
            return gemm, {}
        check_tensor(op, "scale", scale, (gemm.scales,), FP32, self.device)
        return gemm, {"scale": scale}

    def _fp8(self, op: str, written: bool, fp8: Fp8Output | None, shape: tuple[int, int]) -> dict[str, Tensor]:
        """The arguments that write an FP8 result, its tensor first."""
        arguments = fp8_arguments(op, written, fp8, self.device)
        return {"out_fp8": self._empty(*shape, E4M3), **arguments} if written else {}

    def _rowscale(self, op: Projection, x: Tensor, sumsq: Tensor) -> dict[str, Argument]:
        check_tensor(op, "sumsq", sumsq, (x.shape[0], None), FP32, self.device)
        return {"sumsq": sumsq, "sumsq_parts": sumsq.shape[1], "rms_norm_eps": self.config.rms_norm_eps}

    def _empty(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(rows, columns, dtype=dtype, device=self.device)

    def qkv(
        self,
        phase: Phase,
        x: Tensor,
        sumsq: Tensor,
        weight: Tensor,
        rope_table: Tensor,
        positions: Tensor,
        slots: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        *,
        scale: Tensor | None = None,
        kv_scale: Tensor | None = None,
        kv_copy: Tensor | None = None,
    ) -> Tensor:
        """See Ops.qkv."""
        gemm, scaled = self._checked(phase, "qkv", x, self.config.hidden_size, weight, scale)
        heads, rows = self.heads, x.shape[0]
        rowscale = self._rowscale("qkv", x, sumsq)
        check_tensor("qkv", "rope_table", rope_table, (None, heads.head_dim // 2, 2), FP32, self.device)
        check_tensor("qkv", "positions", positions, (rows,), torch.int32, self.device)
        check_tensor("qkv", "slots", slots, (rows,), torch.int64, self.device)
        of_pages = check_pages("qkv", gemm.kv, heads, k_pages, v_pages, kv_scale, self.device)
        of_pages |= check_copy("qkv", gemm.copy, heads, kv_copy, k_pages.shape[0], self.device)
        q = self._empty(rows, heads.q_features, BF16)
        if rows:
            gemm.launch(
                x,
                weight,
                **rowscale,
                **scaled,
                rope_table=rope_table,
                positions=positions,
                q=q,
                k_pages=k_pages,
                v_pages=v_pages,
                slots=slots,
                **of_pages,
            )
        return q

    def add_to_residual(
        self,
        phase: Phase,
        op: Projection,
        x: Tensor,
        weight: Tensor,
        residual: Tensor,
        *,
        scale: Tensor | None = None,
        fp8: Fp8Output | None = None,
        gain: Tensor | None = None,
    ) -> Stream:
        """See Ops.o and Ops.down."""
        k = self.heads.q_features if op == "o" else self.config.intermediate_size
        gemm, scaled = self._checked(phase, op, x, k, weight, scale)
        rows = x.shape[0]
        hidden, dtype = self.config.hidden_size, BF16 if phase == "prefill" else FP32
        check_tensor(op, "residual", residual, (rows, hidden), dtype, self.device)
        out = residual if phase == "prefill" else self._empty(rows, hidden, BF16)
        sumsq = self._empty(rows, gemm.sumsq_parts(rows), FP32)
        written = self._fp8(op, gemm.operand == E4M3, fp8, (rows, hidden))
        gained = gain_argument(op, gemm.gain_in_x, gain, hidden, self.device)
        if rows:
            gemm.launch(x, weight, **scaled, residual=residual, out=out, sumsq_out=sumsq, **written, **gained)
        return Stream(written.get("out_fp8", out), sumsq, residual)

    def gate_up(
        self,
        phase: Phase,
        x: Tensor,
        sumsq: Tensor,
        weight: Tensor,
        *,
        scale: Tensor | None = None,
        fp8: Fp8Output | None = None,
    ) -> Tensor:
        """See Ops.gate_up."""
        gemm, scaled = self._checked(phase, "gate_up", x, self.config.hidden_size, weight, scale)
        rowscale = self._rowscale("gate_up", x, sumsq)
        shape = (x.shape[0], self.config.intermediate_size)
        written = self._fp8("gate_up", gemm.operand == E4M3, fp8, shape) or {"out": self._empty(*shape, BF16)}
        if x.shape[0]:
            gemm.launch(x, weight, **rowscale, **scaled, **written)
        return next(iter(written.values()))

    def lm_head(self, phase: Phase, x: Tensor, sumsq: Tensor, weight: Tensor, padded_vocab: int) -> Tensor:
        """See Ops.lm_head."""
        if phase == "decode":
            return self.decode_head(x, sumsq, weight, padded_vocab, logits=True)[0]
        gemm, _ = self._checked(phase, "lm_head", x, self.config.hidden_size, weight, None)
        rowscale = self._rowscale("lm_head", x, sumsq)
        out = self._empty(x.shape[0], padded_vocab, FP32)
        if x.shape[0]:
            gemm.launch(x, weight, **rowscale, out=out)
        return out[:, : self.config.vocab_size]

    def decode_head(
        self, x: Tensor, sumsq: Tensor, weight: Tensor, padded_vocab: int, *, logits: bool
    ) -> tuple[Tensor, Tensor]:
        """The logits of decode [T, vocab_size], of no rows if nobody asks for them; and the best of each part of them,
        float32 [T, parts, 2], as ArgmaxParts reads it.
        """
        gemm, _ = self._checked("decode", "lm_head", x, self.config.hidden_size, weight, None)
        rowscale, rows = self._rowscale("lm_head", x, sumsq), x.shape[0]
        parts = gemm.sumsq_parts(rows)
        out = self._empty(rows if logits else 0, padded_vocab, FP32)  # an empty tensor's address is null
        best = self._empty(rows, 2 * parts, FP32).view(rows, parts, 2)
        if rows:
            gemm.launch(x, weight, **rowscale, out=out, best=best)
        return out[:, : self.config.vocab_size], best
