"""FuTransformer: generated Hopper kernels for Llama-style models, of their own for prefill and for decode.

``load_kernels(config, precision)`` gives a library of operations on torch tensors; ``Llama.from_pretrained(folder)`` a
model that reads prompts and writes text; ``load_config`` reads a model's shape. Names are imported when they are first
used: importing this package imports neither torch nor CUDA.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from futransformer.generator.config import load_config
    from futransformer.library import load_kernels
    from futransformer.model import Llama

__version__ = "0.1.0"
__all__ = ["Llama", "__version__", "load_config", "load_kernels"]

_HOMES = {
    "Llama": "futransformer.model",
    "load_config": "futransformer.generator.config",
    "load_kernels": "futransformer.library",
}


def __getattr__(name: str) -> Any:
    """Import what is asked for by name."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
