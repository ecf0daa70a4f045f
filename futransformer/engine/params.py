"""How a request's tokens are chosen and when they end: names, defaults and meanings are those of vLLM."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from futransformer.generator.errors import InputError

MAX_LOGPROBS = 20  # alternatives of a token, as OpenAI's API allows
SMALLEST_TEMPERATURE = 1e-5  # below it, as in vLLM, the likeliest token
SEEDS = 2**63  # a seed is -2^63 .. 2^63 - 1


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Of one request; checked when it is made.

    Logits are changed in this order: repetition penalty, temperature, top-k, top-p, min-p.

    | field | values | |
    | --- | --- | --- |
    | n | at least 1 | texts for the prompt, each a sample of its own |
    | max_tokens | at least 1, None | new tokens of each text, the one that ends it included; None: as many as fit |
    | min_tokens | 0 .. max_tokens | so many come before anything but the length ends a text |
    | temperature | 0 .. | 0 (below 1e-5): the likeliest token, whatever top_p, top_k, min_p and seed say |
    | top_p | above 0, at most 1 | the fewest tokens whose probabilities sum to at least this |
    | top_k | -1, 0: all | the likeliest so many |
    | min_p | 0 .. 1 | tokens at least this fraction of the likeliest one's probability |
    | repetition_penalty | above 0 | divides positive logits of tokens in the prompt and the text, multiplies others |
    | stop | strings | end the text, which is cut before them |
    | stop_token_ids | token ids | end the text like EOS |
    | ignore_eos | | the model's EOS ends nothing |
    | seed | 64 bits, signed | the same samples in any batch; None: drawn from the engine's seed |
    | logprobs | None, 0 .. 20 | log-probabilities of each chosen token, and of so many of the likeliest |
    | skip_special_tokens | | leave EOS and the like out of the text |
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        """Refuse values outside their range, with the field, the value and the range."""
        self._integer("n", 1)
        if self.max_tokens is not None:
            self._integer("max_tokens", 1)
        self._integer("min_tokens", 0, self.max_tokens)
        self._integer("top_k", -1)
        if self.seed is not None:
            self._integer("seed", -SEEDS, SEEDS - 1)
        if self.logprobs is not None:
            self._integer("logprobs", 0, MAX_LOGPROBS)
        self._number("temperature", 0.0)
        self._number("top_p", 0.0, 1.0, above=True)
        self._number("min_p", 0.0, 1.0)
        self._number("repetition_penalty", 0.0, above=True)
        stop = (self.stop,) if isinstance(self.stop, str) else self._tuple("stop", "strings", str)
        if "" in stop:
            raise InputError("stop: an empty string would end every text before it begins; leave it out")
        object.__setattr__(self, "stop", stop)
        ids = self._tuple("stop_token_ids", "token ids", int)
        if min(ids, default=0) < 0:
            raise InputError(f"stop_token_ids are not negative: {list(ids)}")
        object.__setattr__(self, "stop_token_ids", ids)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature < SMALLEST_TEMPERATURE

    def _integer(self, name: str, least: int, most: int | None = None) -> None:
        value = getattr(self, name)
        limits = f"at least {least}" if most is None else f"{least} .. {most}"
        try:
            number = operator.index(value)
        except TypeError:
            raise InputError(f"{name} is a whole number, {limits}, not {value!r}") from None
        if isinstance(value, bool) or number < least or (most is not None and number > most):
            raise InputError(f"{name} is {limits}, not {value!r}")
        object.__setattr__(self, name, number)

    def _number(self, name: str, least: float, most: float = math.inf, *, above: bool = False) -> None:
        value = getattr(self, name)
        limits = f"{'above' if above else 'at least'} {least:g}" + ("" if most == math.inf else f", at most {most:g}")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise InputError(f"{name} is a number, {limits}, not {value!r}")
        if not math.isfinite(value) or value < least or value > most or (above and value == least):
            raise InputError(f"{name} is {limits}, not {value!r}")
        object.__setattr__(self, name, float(value))

    def _tuple(self, name: str, what: str, kind: type) -> tuple[Any, ...]:
        value = getattr(self, name)
        values = () if value is None else tuple(value) if isinstance(value, (list, tuple, set, frozenset)) else None
        if values is None or not all(isinstance(each, kind) and not isinstance(each, bool) for each in values):
            raise InputError(f"{name} is a list of {what}, not {value!r}")
        return tuple(sorted(values)) if isinstance(value, (set, frozenset)) else values

    def __repr__(self) -> str:
        """What differs from the defaults."""
        changed = (f for f in fields(self) if getattr(self, f.name) != f.default)
        return f"SamplingParams({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in changed)})"
