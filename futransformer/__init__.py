"""FuTransformer: generated Hopper kernels for Llama-style models, of their own for prefill and for decode.

``LLM(folder)`` writes text for many prompts at a time, as ``SamplingParams`` say; ``Llama.from_pretrained(folder)`` is
the model alone, tokens in and out; ``load_kernels(config, precision)`` gives a library of operations on torch tensors;
``load_config`` reads a model's shape. Names are imported when they are first used: importing this package imports
neither torch nor CUDA.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from futransformer.engine.params import SamplingParams
    from futransformer.generator.config import load_config
    from futransformer.library import load_kernels
    from futransformer.llm import LLM
    from futransformer.model import Llama

__version__ = "0.1.0"
__all__ = ["LLM", "Llama", "SamplingParams", "__version__", "load_config", "load_kernels"]

_HOMES = {
    "LLM": "futransformer.llm",
    "Llama": "futransformer.model",
    "SamplingParams": "futransformer.engine.params",
    "load_config": "futransformer.generator.config",
    "load_kernels": "futransformer.library",
}


def __getattr__(name: str) -> Any:
    """Import what is asked for by name."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
