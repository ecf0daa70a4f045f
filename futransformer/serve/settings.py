"""What a server is told when it starts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from futransformer.generator.errors import InputError

MAX_BODY_BYTES = 16 << 20  # 128k tokens as JSON numbers take under 1 MiB, as text half of that
READ_SECONDS = 30.0  # for a whole head, and for a whole body
WRITE_SECONDS = 60.0  # for a client to take what the socket's buffer cannot hold


@dataclass(frozen=True)
class ServeSettings:
    """Names, limits and the key; checked when it is made."""

    names: tuple[str, ...]  # of the model, as requests call it; answers carry the first
    max_num_seqs: int = 64  # sequences that run at a time, the engine's
    max_queue: int = 256  # sequences that wait beyond those; more are sent away
    max_tokens_limit: int | None = None  # new tokens of a text that a request may ask for; None: what fits
    api_key: str | None = field(default=None, repr=False)
    max_body_bytes: int = MAX_BODY_BYTES
    read_seconds: float = READ_SECONDS
    write_seconds: float = WRITE_SECONDS
    grace_seconds: float = 30.0  # that answers under way have when the server is asked to end
    sampling: Mapping[str, Any] = field(default_factory=dict)  # SamplingParams where a request leaves them out

    def __post_init__(self) -> None:
        """Refuse limits that would let nothing through."""
        if not self.names or "" in self.names:
            raise InputError("a served model has a name: give --served-model-name at least one character")
        for name, value, least in (
            ("--max-queue", self.max_queue, 0),
            ("--max-tokens-limit", self.max_tokens_limit, 1),
            ("--grace-seconds", self.grace_seconds, 0),
        ):
            if value is not None and not least <= value < math.inf:  # nor NaN
                raise InputError(f"{name} must be at least {least}, and finite, not {value}")
        if self.api_key is not None and (not self.api_key.isascii() or not self.api_key.strip()):
            raise InputError("the API key must be of ASCII characters and not be empty: it travels in a header")

    @property
    def capacity(self) -> int:
        """Sequences at work or waiting, at most."""
        return self.max_num_seqs + self.max_queue
