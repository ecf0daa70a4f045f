"""A random model as a Hugging Face folder, of any config: what takes a checkpoint can be timed without one."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from futransformer.checkpoint import HEAD, INDEX_FILE, expected_shapes
from futransformer.generator.config import LlamaConfig


def write_random_model(config: LlamaConfig, folder: Path, device: torch.device) -> None:
    """Normal BF16 weights of variance 1 / K, norms of ones; a shard a layer, and one for the rest. No tokenizer.

    Values are drawn on ``device``, which a GPU does a hundred times as fast.
    """
    folder.mkdir()
    plain = {key: value for key, value in dataclasses.asdict(config).items() if key not in ("name", "eos_token_ids")}
    plain |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "eos_token_id": list(config.eos_token_ids)}
    if config.rope_scaling is not None:
        plain["rope_scaling"] = {"rope_type": "llama3", **dataclasses.asdict(config.rope_scaling)}
    (folder / "config.json").write_text(json.dumps(plain))
    generator = torch.Generator(device).manual_seed(0)
    weight_map: dict[str, str] = {}
    shards: dict[str, list[str]] = {}
    shapes = expected_shapes(config)
    if config.tie_word_embeddings:
        del shapes[HEAD]
    for name in shapes:
        shard = f"model-{name.split('.')[2] if '.layers.' in name else 'ends'}.safetensors"
        weight_map[name] = shard
        shards.setdefault(shard, []).append(name)

    def drawn(shape: tuple[int, ...]) -> Tensor:
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16)
        values = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
        return values.mul_(shape[1] ** -0.5).cpu()

    for shard, names in shards.items():
        save_file({name: drawn(shapes[name]) for name in names}, folder / shard)
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
