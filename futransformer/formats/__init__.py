"""Checkpoints that come quantised: how config.json says so, and their tensors -> codes and scales as they are stored.

One module a format; each gives a ``Format``, by which futransformer.checkpoint knows what tensors a projection has and
reads them. docs/formats.md has the layouts.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from futransformer.formats import awq, compressed_tensors, fp8, gptq
from futransformer.formats.codes import Format
from futransformer.generator.errors import UnsupportedError
from futransformer.generator.json_reader import JsonReader, read_json

METHODS: dict[str, Callable[[JsonReader], Format]] = {
    "gptq": gptq.parse,
    "awq": awq.parse,
    "compressed-tensors": compressed_tensors.parse,
    "fp8": fp8.parse,
}
CONFIG_KEYS = ("quantization_config", "compression_config")  # the second is of old compressed-tensors


def read_format(folder: Path) -> Format | None:
    """How the checkpoint in ``folder`` is quantised; None: it is not. What is not read is refused by name."""
    path = folder / "config.json"
    whole = JsonReader(path, read_json(path) if path.is_file() else {})
    for key in CONFIG_KEYS:
        section = whole.section(key)
        if not section.content:
            continue
        method = section.text("quant_method") if key == CONFIG_KEYS[0] else "compressed-tensors"
        if method not in METHODS:
            raise UnsupportedError(
                f"{path}: {key}: {method} checkpoints are not supported; supported: {', '.join(METHODS)}, and "
                "unquantised safetensors"
            )
        return METHODS[method](section)
    return None
