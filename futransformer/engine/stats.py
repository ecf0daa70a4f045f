"""What an engine is doing and has done, for logs and metrics."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

LOOKS = 64


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


class Rate:
    """Tokens a second over the last looks at a step's tokens."""

    def __init__(self) -> None:
        """Begin at nothing."""
        self._looks: deque[tuple[float, int]] = deque(maxlen=LOOKS)

    def add(self, tokens: int) -> None:
        """So many have come."""
        self._looks.append((time.monotonic(), tokens))

    def per_second(self) -> float:
        """From the first of the last looks until now; 0 before two."""
        if len(self._looks) < 2:
            return 0.0
        seconds = time.monotonic() - self._looks[0][0]
        return (sum(tokens for _, tokens in self._looks) - self._looks[0][1]) / max(seconds, 1e-9)
