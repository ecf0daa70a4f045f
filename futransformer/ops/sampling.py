"""Sampling on a generated kernel: next tokens of logits, by what each row asks for."""

from __future__ import annotations

import torch
from torch import Tensor

from futransformer.driver import Kernel
from futransformer.generator.errors import InputError
from futransformer.generator.specs import SampleSpec
from futransformer.ops.validate import check_tensor
from futransformer.sampling import SamplingRows

# What a row asks for, as the kernel's parameters are named.
TYPES = {
    "temperature": torch.float32,
    "top_k": torch.int32,
    "top_p": torch.float32,
    "min_p": torch.float32,
    "repetition_penalty": torch.float32,
    "seed": torch.int64,
    "position": torch.int32,
}

MOST_ROWS = 65_535  # a grid dimension


class Sample:
    """A token of each row of logits."""

    def __init__(self, kernel: Kernel) -> None:
        """Serve the vocabulary of the kernel's spec."""
        assert isinstance(kernel.spec, SampleSpec)
        self.spec = kernel.spec
        self.kernel = kernel
        self._none_seen = torch.empty(0, dtype=torch.int32, device=kernel.device)

    def __call__(self, logits: Tensor, rows: SamplingRows, out: Tensor | None = None) -> Tensor:
        """See Ops.sample. Rows of logits may stand apart (a view of padded rows)."""
        device, vocab_size = self.kernel.device, self.spec.vocab_size
        apart = isinstance(logits, Tensor) and logits.dim() == 2 and logits.stride(0) >= vocab_size
        check_tensor("sample", "logits", logits[:1] if apart else logits, (None, vocab_size), torch.float32, device)
        count = logits.shape[0]
        if count > MOST_ROWS:
            raise InputError(f"sample: {count} rows are more than the {MOST_ROWS} of a launch; split them")
        arguments = {name: getattr(rows, name) for name in TYPES}
        for name, dtype in TYPES.items():
            check_tensor("sample", name, arguments[name], (count,), dtype, device)
        seen = rows.seen
        if seen is not None:
            check_tensor("sample", "seen", seen, (count, -(-vocab_size // 32)), torch.int32, device)
        if out is None:
            out = torch.empty(count, dtype=torch.int32, device=device)
        else:
            check_tensor("sample", "out", out, (count,), torch.int32, device)
        if count:
            self.kernel.launch(
                (self.spec.blocks, count, 1),
                logits=logits,
                logits_stride=logits.stride(0),
                seen=self._none_seen if seen is None else seen,
                out=out,
                **arguments,
            )
        return out
