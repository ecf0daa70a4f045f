"""The scales of an FP8 KV cache, from a text: of each layer's K and V the largest magnitude, and room above it.

E4M3 is a floating-point format: within its 18 binades a scale changes next to nothing, and without a calibration 1 is
as good on the models that were measured (docs/notebook/kv_cache.md). A scale matters to a model whose V is small
throughout a layer, below 2^-6, or whose K or V exceeds 448.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from futransformer.fp8_scaling import HEADROOM
from futransformer.generator.errors import CheckpointError
from futransformer.model import Llama, check_numbers
from futransformer.quantize.fp8 import scale_of


def calibrate_kv(model: Llama, windows: Sequence[Sequence[int]]) -> Tensor:
    """Read each window by itself; ``kv_scales`` of ``Llama.from_pretrained``, float32 [layers, 2] on the CPU.

    Best through a cache of BF16: what an FP8 cache holds has been rounded, and cut off at 448 of its scales.
    """
    largest = torch.zeros(model.config.num_hidden_layers, 2)
    for window in windows:
        check_numbers(model.config.name, model.prefill([window]))
        largest = torch.maximum(largest, model.cache.largest(model.sequences))
    model.keep([])
    if not largest.isfinite().all():
        raise CheckpointError(f"{model.config.name}: K or V is not finite; fetch the checkpoint again")
    return scale_of(HEADROOM * largest)
