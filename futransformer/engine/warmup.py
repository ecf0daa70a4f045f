"""Graphs captured before the first requests come, so that none of them pays for one.

Shapes are those that the runner pads to (runner.py, prefill_step.py): steps of 1, 2, 3, 4, 6, 8, ... sequences and
pages, each with logits and without, and short passes of few prompts. Those of short texts come first: whatever time or
memory does not allow is captured when it comes, as without.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch

from futransformer.generator.specs import PAGE_SIZE
from futransformer.kv_cache import page_bucket
from futransformer.model import Llama
from futransformer.prefill_step import CAPTURED_ROWS, PassShape

PROMPTS = 4  # at most, of a short pass that is captured ahead
TOLD_EVERY = 2.0  # seconds


class WarmedUp(NamedTuple):
    """How many shapes there are, how many of them have a graph now, and what those took."""

    captured: int
    shapes: int
    seconds: float
    memory: int  # bytes of the device, the eager runs' workspaces included


def buckets(most: int) -> list[int]:
    """What ``page_bucket`` makes of 1 .. most."""
    return list(dict.fromkeys(map(page_bucket, range(1, most + 1))))


def shapes(model: Llama, slots: int, pages: int, width: int, rows: int) -> Iterator[Callable[[], None]]:
    """What captures each shape: steps of up to ``slots`` sequences of up to ``pages`` pages; passes of up to ``rows``
    rows, whose block tables are ``width`` pages wide.
    """
    for length in buckets(-(-min(rows, CAPTURED_ROWS, width * PAGE_SIZE) // PAGE_SIZE)):
        for prompts in buckets(min(PROMPTS, slots)):
            yield partial(model.warm_up_pass, PassShape(length * PAGE_SIZE, prompts, width, prompts))
    for length in buckets(pages):
        for batch in buckets(slots):
            for logits in (False, True):
                yield partial(model.warm_up_step, batch, length, logits=logits)


def warm_up(
    model: Llama,
    captures: Iterator[Callable[[], None]],
    seconds: float,
    progress: Callable[[str], None] | None = None,
    now: Callable[[], float] = time.monotonic,
) -> WarmedUp:
    """Capture for so many seconds at most; nothing where steps are no graphs."""
    begin = told = now()
    waiting = list(captures) if model.ops.capturable else []
    done, free = 0, _free(model.cache.device)
    with torch.inference_mode():
        for capture in waiting:
            if now() - begin >= seconds or model.graph_pool.full:
                break
            capture()
            done += not model.graph_pool.full
            if progress is not None and now() - told >= TOLD_EVERY:
                told = now()
                progress(f"captured {done} of {len(waiting)} shapes of steps and passes")
    return WarmedUp(done, len(waiting), now() - begin, free - _free(model.cache.device))


def _free(device: torch.device) -> int:
    """Bytes of a GPU that nobody has; 0 of a CPU."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    return int(torch.cuda.mem_get_info(device)[0])
