"""Continuous batching: many requests of any lengths, at any time, through one model and its paged cache.

``Engine`` (core.py) takes requests and steps; ``futransformer.LLM`` drives it from a script. docs/engine.md.
"""

from futransformer.engine.core import Engine
from futransformer.engine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from futransformer.engine.params import SamplingParams
from futransformer.engine.stats import EngineStats

__all__ = [
    "CompletionOutput",
    "Engine",
    "EngineStats",
    "Logprob",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
]
