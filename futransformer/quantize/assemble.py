"""What a quantised model's folder holds beside its shards: config, index, tokenizer, and at last its description."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open

from futransformer.checkpoint import INDEX_FILE
from futransformer.formats.codes import Groups
from futransformer.formats.compressed_tensors import packed_config
from futransformer.generator.json_reader import read_json
from futransformer.quantize.description import DESCRIPTION_FILE, FORMAT, sha256_of, weight_files
from futransformer.quantize.folder import DONE, carried_files

UNFINISHED = ".unfinished"


def begin(folder: Path) -> None:
    """Keep of an earlier run its layers alone: what else it has left is half done, or carried from a model of then."""
    for path in folder.iterdir():
        if path.is_file() and path.suffix != ".safetensors" and not path.name.endswith(DONE):
            path.unlink()


def assemble(source: Path, folder: Path, shards: Sequence[str], groups: Groups, *, tied: bool) -> None:
    """Make the finished shards a checkpoint, with all that is carried from ``source``; ``tied``: the embeddings are."""
    for name in carried_files(source, weight_files(source)):
        if name not in (INDEX_FILE, "config.json"):
            shutil.copyfile(source / name, folder / name)
    content = {**read_json(source / "config.json"), "quantization_config": packed_config(groups)}
    if not tied:
        content["tie_word_embeddings"] = False
    write_json(folder / "config.json", content)
    weight_map: dict[str, str] = {}
    size = 0
    for shard in shards:
        with safe_open(str(folder / shard), framework="pt") as opened:
            weight_map |= dict.fromkeys(opened.keys(), shard)
        size += (folder / shard).stat().st_size
    write_json(folder / INDEX_FILE, {"metadata": {"total_size": size}, "weight_map": weight_map})


def seal(folder: Path, description: Mapping[str, Any]) -> None:
    """Write the description, with the sha256 of every file but those that a job keeps for itself."""
    files = sorted(path for path in folder.iterdir() if not path.name.endswith(DONE))
    sums = {path.name: sha256_of(path) for path in files}
    write_json(folder / DESCRIPTION_FILE, {"format": FORMAT, **description, "sha256": sums})


def finish(folder: Path) -> None:
    """Remove what a job has kept for itself, by which it would go on."""
    for path in folder.glob(f"*{DONE}"):
        path.unlink()


def write_whole(path: Path, content: bytes) -> None:
    """Write a file, whole or not at all."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}{UNFINISHED}")
    try:
        unfinished.write_bytes(content)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)  # it may be what has filled the disk


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """The same of an object."""
    write_whole(path, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())
