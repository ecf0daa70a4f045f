"""What an engine is doing and has done, for logs and metrics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineStats:
    """One moment; counters are since the engine was made."""

    running: int  # sequences that hold pages
    waiting: int  # sequences that do not: not begun, or evicted
    num_pages: int
    free_pages: int  # those that hold a prefix for others to reuse included
    prompt_tokens: int  # of the requests that were taken
    prefilled_tokens: int  # rows read, those read again after an eviction included
    prefix_hit_tokens: int  # that shared pages spared
    generated_tokens: int
    finished_requests: int
    aborted_requests: int
    evictions: int
    steps: int
    tokens_per_second: float  # generated, over the last 64 steps
