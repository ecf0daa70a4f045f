"""The row kernels: gather rows of a table (embedding, last rows of a prefill), argmax of logits, or of their parts."""

from __future__ import annotations

import torch
from torch import Tensor

from futransformer.driver import Kernel
from futransformer.generator.specs import ArgmaxPartsSpec, ArgmaxSpec, GatherRowsSpec
from futransformer.ops.interface import Fp8Output, Stream
from futransformer.ops.validate import check_aligned, check_tensor, fp8_arguments, gain_argument


class GatherRows:
    """Rows of a table by index, and their sums of squares; also in float32 or in FP8 if the kernel writes that."""

    def __init__(self, kernel: Kernel) -> None:
        """Serve the row width of the kernel's spec."""
        assert isinstance(kernel.spec, GatherRowsSpec)
        self.spec = kernel.spec
        self.kernel = kernel

    def __call__(
        self, table: Tensor, indices: Tensor, fp8: Fp8Output | None = None, gain: Tensor | None = None
    ) -> Stream:
        """See Ops.gather_rows. An index outside the table gives a row, and a sum of squares, of NaN."""
        device = self.kernel.device
        check_tensor("gather_rows", "table", table, (None, self.spec.k), torch.bfloat16, device)
        check_aligned("gather_rows", "table", table, 16)
        check_tensor("gather_rows", "indices", indices, (None,), torch.int32, device)
        rows = indices.shape[0]
        x = torch.empty(rows, self.spec.k, dtype=torch.bfloat16, device=device)
        sumsq = torch.empty(rows, 1, dtype=torch.float32, device=device)
        written = {"out": x, "sumsq_out": sumsq}
        arguments = fp8_arguments("gather_rows", self.spec.fp8, fp8, device)
        if self.spec.fp8:
            written["out_fp8"] = torch.empty(rows, self.spec.k, dtype=torch.float8_e4m3fn, device=device)
            written |= arguments
        if self.spec.residual:
            written["residual"] = torch.empty(rows, self.spec.k, dtype=torch.float32, device=device)
        written |= gain_argument("gather_rows", self.spec.gain, gain, self.spec.k, device)
        if rows:
            self.kernel.launch((rows, 1, 1), table=table, table_rows=table.shape[0], indices=indices, **written)
        return Stream(written.get("out_fp8", x), sumsq, written.get("residual", x))


class Argmax:
    """The lowest index of each row's largest logit."""

    def __init__(self, kernel: Kernel) -> None:
        """Serve the vocabulary of the kernel's spec."""
        assert isinstance(kernel.spec, ArgmaxSpec)
        self.spec = kernel.spec
        self.kernel = kernel

    def __call__(self, logits: Tensor, out: Tensor | None = None) -> Tensor:
        """See Ops.argmax. Rows may stand apart (a view of padded rows); NaN never wins over a number."""
        device = self.kernel.device
        # Of rows that stand apart, each must be contiguous; all else must be so as a whole.
        apart = isinstance(logits, Tensor) and logits.dim() == 2 and logits.stride(0) >= self.spec.vocab_size
        checked = logits[:1] if apart else logits
        check_tensor("argmax", "logits", checked, (None, self.spec.vocab_size), torch.float32, device)
        rows = logits.shape[0]
        if out is None:
            out = torch.empty(rows, dtype=torch.int32, device=device)
        else:
            check_tensor("argmax", "out", out, (rows,), torch.int32, device)
        if rows:
            self.kernel.launch((rows, 1, 1), logits=logits, logits_stride=logits.stride(0), out=out)
        return out


class ArgmaxParts:
    """The index of the best of each row's candidates, which the blocks of decode's head have found."""

    def __init__(self, kernel: Kernel) -> None:
        """Serve any number of parts."""
        assert isinstance(kernel.spec, ArgmaxPartsSpec)
        self.kernel = kernel

    def __call__(self, best: Tensor, out: Tensor | None = None) -> Tensor:
        """Write ``out`` int32 [T] from ``best`` float32 [T, parts, 2]: values, and the bits of their int32 indices."""
        device = self.kernel.device
        rows, parts, _ = best.shape
        if out is None:
            out = torch.empty(rows, dtype=torch.int32, device=device)
        else:
            check_tensor("next_tokens", "out", out, (rows,), torch.int32, device)
        if rows:
            self.kernel.launch((rows, 1, 1), best=best, parts=parts, out=out)
        return out
