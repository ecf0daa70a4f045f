"""Connections that send no request: uvicorn bounds the time between requests, but not that of a head."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class Heads:
    """When each connection without a request under way was first seen so; those that stay so too long are closed."""

    def __init__(self, seconds: float) -> None:
        """``seconds`` for a whole head, from the connection or the end of the answer before."""
        self._seconds = seconds
        self._idle: dict[Any, tuple[Any, float]] = {}  # by connection: its last request, and since when

    def sweep(self, connections: Iterable[Any], now: float) -> None:
        """Look at uvicorn's connections; to be called more often than ``seconds``."""
        idle = {}
        for connection in connections:
            last = connection.cycle
            if last is not None and not last.response_complete:
                continue
            before, since = self._idle.get(connection, (last, now))
            idle[connection] = (last, since if before is last else now)
            if now - idle[connection][1] > self._seconds:
                connection.transport.close()
        self._idle = idle
