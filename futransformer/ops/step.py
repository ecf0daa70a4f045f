"""The two ends of a decode step on generated kernels: where its tokens stand, and whether they end."""

from __future__ import annotations

import torch
from torch import Tensor

from futransformer.driver import Kernel
from futransformer.generator.specs import StepBeginSpec, StepEndSpec
from futransformer.ops.interface import StepRows, Stops
from futransformer.ops.validate import check_tensor


class StepBegin:
    """Lengths, positions and slots of a step's tokens."""

    def __init__(self, kernel: Kernel) -> None:
        """Serve any batch."""
        assert isinstance(kernel.spec, StepBeginSpec)
        self.kernel = kernel

    def __call__(self, rows: StepRows) -> None:
        """See Ops.begin_step."""
        device, batch = self.kernel.device, rows.lengths.shape[0]
        for name in ("lengths", "positions", "seqlens_k"):
            check_tensor("begin_step", name, getattr(rows, name), (batch,), torch.int32, device)
        check_tensor("begin_step", "slots", rows.slots, (batch,), torch.int64, device)
        check_tensor("begin_step", "block_table", rows.block_table, (batch, None), torch.int32, device)
        if batch:
            stride = rows.block_table.shape[1]
            self.kernel.launch((1, 1, 1), **rows._asdict(), block_table_stride=stride, rows=batch)


class StepEnd:
    """Which rows a step's tokens end, and a note of these."""

    def __init__(self, kernel: Kernel) -> None:
        """Serve any batch of the spec's vocabulary."""
        assert isinstance(kernel.spec, StepEndSpec)
        self.spec = kernel.spec
        self.kernel = kernel

    def __call__(self, tokens: Tensor, lengths: Tensor, stops: Stops) -> None:
        """See Ops.end_step."""
        device, batch = self.kernel.device, lengths.shape[0]
        given = {"tokens": tokens, "lengths": lengths, "left": stops.left}
        for name, tensor in given.items():
            check_tensor("end_step", name, tensor, (batch,), torch.int32, device)
        check_tensor("end_step", "ends", stops.ends, (-(-self.spec.vocab_size // 32),), torch.int32, device)
        check_tensor("end_step", "log", stops.log, (None, batch), torch.int32, device)
        check_tensor("end_step", "steps", stops.steps, (1,), torch.int32, device)
        if batch:
            noted = {"ends": stops.ends, "log": stops.log, "steps": stops.steps}
            self.kernel.launch((1, 1, 1), **given, **noted, log_steps=stops.log.shape[0], rows=batch)
