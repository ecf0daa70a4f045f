"""How a model's authors recommend that its tokens are chosen: ``generation_config.json``, as vLLM reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from futransformer.engine.params import SamplingParams
from futransformer.generator.errors import ConfigError, InputError

NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def recommended_sampling(folder: Path) -> dict[str, Any]:
    """Those of the folder's fields that ``SamplingParams`` has too; empty where there are none."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        fields = json.loads(path.read_bytes())
        values = {name: fields[name] for name in NAMES if fields.get(name) is not None}
        SamplingParams(**values)
    except (ValueError, AttributeError, TypeError) as error:  # InputError is a ValueError
        what = str(error) if isinstance(error, InputError) else f"this is no JSON object of settings ({error})"
        raise ConfigError(f"{path}: {what}; correct the file, or remove it") from error
    return values
