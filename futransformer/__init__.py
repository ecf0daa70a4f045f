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

# What the extra [models] brings, by the names of modules.
MODELS_PACKAGES = ("cuda", "numpy", "safetensors", "tokenizers", "torch", "transformers")
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
    try:
        return getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in MODELS_PACKAGES:
            raise
        raise ModuleNotFoundError(f"futransformer.{name} {models_remedy(error)}", name=error.name) from None


def models_remedy(error: ModuleNotFoundError) -> str:
    """What is missing where the extra [models] is not installed, and the command that brings it."""
    return f"needs {error.name}, which is not installed; run: pip install 'futransformer[models]'"
