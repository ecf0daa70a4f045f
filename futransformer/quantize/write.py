"""A model whose projections are INT4 codes, written as a folder, layer by layer.

The folder is a compressed-tensors checkpoint (pack-quantized), which other engines read as well: the gains of the
layers' norms are folded into the weights before they are quantised, and their weights are ones; the last norm, the
embedding and the head stay as they are. futransformer.json beside it has the method and the sha256 of every file.

One shard a layer, written whole or not at all, into a folder beside OUT whose name is of the job; what is there when a
job begins again is kept. At no time is more than one layer in memory.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from futransformer.build.cache import storage_errors
from futransformer.checkpoint import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    INDEX_FILE,
    Checkpoint,
    fold_gain,
    load_checkpoint,
    projections_of,
)
from futransformer.formats.codes import Groups
from futransformer.formats.compressed_tensors import packed_config, packed_tensors
from futransformer.generator.config import load_config
from futransformer.generator.errors import CheckpointError, ConfigError, InputError
from futransformer.generator.json_reader import JsonReader, read_json
from futransformer.quantize.folder import (
    DESCRIPTION_FILE,
    FORMAT,
    INT4_SECTION,
    READ_FORMATS,
    carried_files,
    check_output,
    publish,
    scratch_beside,
    sha256_of,
    weight_files,
)
from futransformer.quantize.int4 import Int4Weight

WHAT = "quantised model"
DONE = ".errors.json"  # beside a finished shard, until all are: its errors and its sha256
UNFINISHED = ".unfinished"
NORMS = ("input_layernorm", "post_attention_layernorm")

Quantiser = Callable[[str, Tensor], Int4Weight]  # a projection's name and its weight, gain folded in -> codes


class Progress(NamedTuple):
    """How far a job is."""

    layers: int  # done
    of: int
    seconds_left: float


def write_quantised(
    source: Path,
    output: Path,
    quantise: Quantiser,
    groups: Groups,
    method: Mapping[str, Any],
    *,
    force: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> dict[str, float]:
    """Quantise the projections of ``source`` and write the folder; the relative error of each, by name.

    The error is |W - quantised| / |W|, in the norm of all elements. ``method`` says in JSON's types what ``quantise``
    does: a job that was interrupted goes on where ``source``, ``groups`` and ``method`` are the same.
    """
    check_output(source, output, force=force, what=WHAT)
    config = load_config(source)
    checkpoint = load_checkpoint(source, config)
    if checkpoint.format is not None:
        raise InputError(
            f"{source} is quantised already ({checkpoint.format.title}): give the model that it was made from"
        )
    layers, there = config.num_hidden_layers, output.resolve()
    shards = [f"model-{index + 1:05}-of-{layers + 1:05}.safetensors" for index in range(layers + 1)]
    partial = there.parent / f".{there.name}-{_job(source, groups, method)}.partial"
    kept = f"finished layers are kept in {partial}, for the same command to go on from them"
    with _interruption(kept), storage_errors(f"the {WHAT}", output, "choose another with --output", kept):
        partial.mkdir(parents=True, exist_ok=True)
        errors: dict[str, float] = {}
        start, written = time.perf_counter(), 0
        for index, shard in enumerate(shards[:-1]):
            found = _finished(partial / shard)
            if found is None:
                found = _write_layer(checkpoint, index, partial / shard, quantise)
                written += 1
            errors |= found
            if progress is not None:
                left = (time.perf_counter() - start) / max(written, 1) * (layers - index - 1)
                progress(Progress(index + 1, layers, left))
        ends = [EMBEDDING, FINAL_NORM, *([HEAD] if HEAD in checkpoint else [])]
        _write_whole(partial / shards[-1], save({name: checkpoint.read(name) for name in ends}, {"format": "pt"}))
        _describe(source, partial, shards, groups, method, errors)
        with scratch_beside(output, there.parent, WHAT) as scratch:
            publish(partial, there, scratch / "replaced")
    return errors


@contextmanager
def _interruption(kept: str) -> Iterator[None]:
    """Let an interruption say what is left of the block."""
    try:
        yield
    except KeyboardInterrupt as interruption:
        raise KeyboardInterrupt(kept) from interruption


def _job(source: Path, groups: Groups, method: Mapping[str, Any]) -> str:
    """What an interrupted job is known by: groups and method, and the source's files by size and time of change."""
    files = [(name, (source / name).stat()) for name in ("config.json", *weight_files(source))]
    known = [groups, method, [[name, stat.st_size, stat.st_mtime_ns] for name, stat in files], FORMAT]
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:12]


def _write_layer(checkpoint: Checkpoint, index: int, shard: Path, quantise: Quantiser) -> dict[str, float]:
    first, second = checkpoint.norm_gains()[2 * index : 2 * index + 2]
    tensors: dict[str, Tensor] = {
        f"model.layers.{index}.{norm}.weight": torch.ones_like(first, dtype=torch.bfloat16) for norm in NORMS
    }
    errors: dict[str, float] = {}
    for module in projections_of(index):
        gain = None if module.endswith(("o_proj", "down_proj")) else second if ".mlp." in module else first
        weight = checkpoint.projection(module)
        weight = weight.to(torch.bfloat16) if gain is None else fold_gain(weight, gain)
        codes = quantise(module, weight)
        tensors |= packed_tensors(module, codes)
        exact = weight.float()
        errors[module] = ((codes.dequantise() - exact).norm() / exact.norm().clamp_min(1e-30)).item()
    content = save(tensors, {"format": "pt"})
    _write_whole(shard, content)
    finished = {"errors": errors, "sha256": hashlib.sha256(content).hexdigest()}
    _write_json(shard.with_name(f"{shard.name}{DONE}"), finished)
    return errors


def _finished(shard: Path) -> dict[str, float] | None:
    """The errors of a layer that an earlier run finished; None where it did not, or a crash has damaged it since."""
    done = shard.with_name(f"{shard.name}{DONE}")
    try:
        finished = JsonReader(done, read_json(done))
        errors = finished.section("errors")
        sound = sha256_of(shard) == finished.text("sha256")
        return {name: errors.number(name) for name in errors.content} if sound else None
    except (ConfigError, OSError):
        return None


def _write_whole(path: Path, content: bytes) -> None:
    unfinished = path.with_name(f"{path.name}.{os.getpid()}{UNFINISHED}")
    unfinished.write_bytes(content)
    unfinished.replace(path)


def _describe(
    source: Path,
    folder: Path,
    shards: list[str],
    groups: Groups,
    method: Mapping[str, Any],
    errors: Mapping[str, float],
) -> None:
    """Write all that is not weights."""
    for name in carried_files(source, weight_files(source)):
        if name not in (INDEX_FILE, "config.json"):
            shutil.copyfile(source / name, folder / name)
    content = {**read_json(source / "config.json"), "quantization_config": packed_config(groups)}
    _write_json(folder / "config.json", content)
    weight_map: dict[str, str] = {}
    size = 0
    for shard in shards:
        with safe_open(str(folder / shard), framework="pt") as opened:
            weight_map |= dict.fromkeys(opened.keys(), shard)
        size += (folder / shard).stat().st_size
    _write_json(folder / INDEX_FILE, {"metadata": {"total_size": size}, "weight_map": weight_map})
    for path in (*folder.glob(f"*{DONE}"), *folder.glob(f"*{UNFINISHED}")):
        path.unlink()
    files = sorted(path for path in folder.iterdir() if path.name != DESCRIPTION_FILE)
    _write_json(
        folder / DESCRIPTION_FILE,
        {
            "format": FORMAT,
            INT4_SECTION: {
                **method,
                "group_size": groups.group_size,
                "zero_points": groups.zero_points,
                "errors": errors,
            },
            "sha256": {path.name: sha256_of(path) for path in files},
        },
    )


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    _write_whole(path, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())


def check_sums(folder: Path) -> None:
    """Refuse a folder of INT4 weights of ours of which a file has changed: safetensors has no checksums."""
    path = folder / DESCRIPTION_FILE
    description = JsonReader(path, read_json(path) if path.is_file() else {})
    if not description.has(INT4_SECTION):
        return
    version = description.integer("format")
    if version not in READ_FORMATS:
        raise CheckpointError(f"{path} is of format {version}, this version reads formats up to {FORMAT}")
    sums = description.section("sha256")
    for name in ("config.json", *weight_files(folder)):
        if not sums.has(name):
            raise CheckpointError(
                f"{folder / name} is no file that {DESCRIPTION_FILE} names, so it may be of another model; remove it "
                "if it does not belong there, or quantise again"
            )
    for name, digest in _texts(sums):
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name} is missing, which {DESCRIPTION_FILE} names; fetch it again")
        if sha256_of(folder / name) != digest:
            raise CheckpointError(
                f"{folder / name} is not the file that {DESCRIPTION_FILE} names: its sha256 differs; fetch it again, "
                "or quantise again"
            )


def _texts(section: JsonReader) -> Iterator[tuple[str, str]]:
    return ((name, section.text(name)) for name in section.content)
