"""load/<config>: seconds from exported cubins to kernels that can be launched, every cubin's sha256 checked.

Without --kernels the cubins come from the cache; what it lacks is built before anything is timed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import torch

from futransformer.bench.case import HostCase, Row
from futransformer.bench.harness import Timing
from futransformer.bench.llama import random_tensor
from futransformer.bench.runner import Bench, host_row
from futransformer.bench.shapes import SHAPES, shape_config
from futransformer.generator.config import CONFIGS
from futransformer.library import KernelLibrary, load_kernels

LOADS = 5


def cases() -> Sequence[HostCase]:
    """See futransformer.bench.subjects."""
    return [HostCase(f"load/{name}", partial(measure, name), default=name in SHAPES.values()) for name in CONFIGS]


def measure(name: str, bench: Bench) -> Sequence[Row]:
    """Load several times; the first, which brings the context and the pages of the files, is not counted."""
    config, folder = shape_config(name), bench.folder(name)
    library = load_kernels(config, "bf16", folder=folder)
    error = gathered_wrong(library)
    seconds = []
    for _ in range(LOADS):
        start = time.perf_counter()
        load_kernels(config, "bf16", folder=folder)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return [host_row(f"load/{name}", Timing.of(seconds), error=error)]


def gathered_wrong(library: KernelLibrary) -> int:
    """Launch the simplest kernel: how many gathered elements differ from the table's."""
    table = random_tensor(64, library.config.hidden_size, device=library.device)
    indices = torch.randperm(64, dtype=torch.int32, device=library.device)
    gathered = library.gather_rows("prefill", table, indices).x
    return int((gathered != table[indices.long()]).sum())
