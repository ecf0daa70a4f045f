"""The subjects: each module offers ``cases()``, every case it has in a fixed order, without allocating anything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module

from futransformer.bench.case import Case
from futransformer.generator.errors import UnsupportedError

# In the order in which docs/performance.md tells them.
SUBJECTS: tuple[str, ...] = (
    "gateup_swiglu",
    "gemm",
    "attention_prefill",
    "prefill_block",
    "prefill_model",
    "decode_gemm",
    "attention_decode",
    "decode_block",
    "decode_step",
    "sample",
    "decode_host",
    "serve",
    "quantize",
    "load",
    "build",
)
HOST_SUBJECTS = frozenset({"build"})  # these need no GPU


def subject_cases(subject: str) -> Sequence[Case]:
    """Return all cases of a subject; UnsupportedError lists the subjects."""
    if subject not in SUBJECTS:
        raise UnsupportedError(f"there is no subject {subject!r}; choose from: {', '.join(SUBJECTS)}")
    cases: Callable[[], Sequence[Case]] = import_module(f"{__name__}.{subject}").cases
    return cases()
