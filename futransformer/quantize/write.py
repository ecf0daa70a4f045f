"""A model whose projections are INT4 codes, written as a folder, layer by layer.

The folder is a compressed-tensors checkpoint (pack-quantized), which other engines read as well: the gains of the
layers' norms are folded into the weights before they are quantised, and their weights are ones; the last norm, the
embedding and the head stay as they are. futransformer.json beside it has the method and the sha256 of every file.

One shard a layer, written whole or not at all, into a folder beside OUT whose name is of the job; what is there when a
job begins again is kept. One process at a time works on a job. At no time is more than one layer in memory.
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
from safetensors.torch import load_file, save
from torch import Tensor

from futransformer.build.cache import lock_at, storage_errors
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
from futransformer.formats.compressed_tensors import packed_config, packed_tensors, unpacked
from futransformer.generator.config import load_config
from futransformer.generator.errors import BuildError, ConfigError, InputError
from futransformer.generator.json_reader import JsonReader, read_json
from futransformer.quantize.description import (
    DESCRIPTION_FILE,
    FORMAT,
    INT4_SECTION,
    sha256_of,
    weight_files,
)
from futransformer.quantize.folder import carried_files, check_output, publish, scratch_beside
from futransformer.quantize.layers import Errors, LayerQuantiser

WHAT = "quantised model"
DONE = ".errors.json"  # beside a finished shard, until all are: its errors and its sha256
UNFINISHED = ".unfinished"
NORMS = ("input_layernorm", "post_attention_layernorm")


class Progress(NamedTuple):
    """How far a job is."""

    layers: int  # done
    of: int
    seconds_left: float


def write_quantised(
    source: Path,
    output: Path,
    quantiser: Callable[[Checkpoint], LayerQuantiser],
    groups: Groups,
    method: Mapping[str, Any],
    *,
    force: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> dict[str, Errors]:
    """Quantise the projections of ``source`` and write the folder; the errors of each, by name (see ``Quantised``).

    ``method`` says in JSON's types what the quantiser does: a job that was interrupted goes on where ``source``,
    ``groups`` and ``method`` are the same.
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
    with (
        _interruption(kept),
        storage_errors(f"the {WHAT}", output, "choose another with --output", kept),
        _alone(partial, output),
    ):
        errors: dict[str, Errors] = {}
        working = quantiser(checkpoint)
        spent, written = 0.0, 0
        for index, shard in enumerate(shards[:-1]):
            start = time.perf_counter()
            weights = _folded(checkpoint, index)
            found = _finished(partial / shard)
            if found is None:
                found = _write_layer(checkpoint, index, weights, partial / shard, working)
                written += 1
                spent += time.perf_counter() - start
            else:
                codes = unpacked(load_file(partial / shard), projections_of(index), groups)
                working.passed(index, weights, codes)
            errors |= found
            if progress is not None:
                progress(Progress(index + 1, layers, spent / max(written, 1) * (layers - index - 1)))
        ends = [EMBEDDING, FINAL_NORM, *([HEAD] if HEAD in checkpoint else [])]
        _write_whole(partial / shards[-1], save({name: checkpoint.read(name) for name in ends}, {"format": "pt"}))
        _describe(source, partial, shards, groups, method, errors)
        check_output(source, output, force=force, what=WHAT)  # another job may have been faster
        with scratch_beside(output, there.parent, WHAT) as scratch:
            publish(partial, there, scratch / "replaced")
    return errors


@contextmanager
def _alone(partial: Path, output: Path) -> Iterator[None]:
    """Make the job's folder and hold its lock; BuildError where another process does."""
    partial.mkdir(parents=True, exist_ok=True)
    held = lock_at(partial)
    if held is None:
        raise BuildError(f"another process is writing this model to {output}: wait for it, or end it and try again")
    try:
        yield
    finally:
        os.close(held)


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


def _folded(checkpoint: Checkpoint, index: int) -> dict[str, Tensor]:
    """The weights of a layer's projections, BF16 [N, K], by their modules' names, gains folded in."""
    input_gain, mlp_gain = (checkpoint.read(f"model.layers.{index}.{norm}.weight") for norm in NORMS)
    folded = {}
    for module in projections_of(index):
        gain = None if module.endswith(("o_proj", "down_proj")) else mlp_gain if ".mlp." in module else input_gain
        weight = checkpoint.projection(module)
        folded[module] = weight.to(torch.bfloat16) if gain is None else fold_gain(weight, gain)
    return folded


def _write_layer(
    checkpoint: Checkpoint, index: int, weights: Mapping[str, Tensor], shard: Path, quantiser: LayerQuantiser
) -> Mapping[str, Errors]:
    ones = torch.ones(checkpoint.config.hidden_size, dtype=torch.bfloat16)
    tensors = {f"model.layers.{index}.{norm}.weight": ones.clone() for norm in NORMS}
    quantised = quantiser.quantise(index, weights)
    for module in weights:
        tensors |= packed_tensors(module, quantised[module].codes)
    errors = {module: quantised[module].errors for module in weights}
    content = save(tensors, {"format": "pt"})
    _write_whole(shard, content)
    finished = {"errors": errors, "sha256": hashlib.sha256(content).hexdigest()}
    _write_json(shard.with_name(f"{shard.name}{DONE}"), finished)
    return errors


def _finished(shard: Path) -> Mapping[str, Errors] | None:
    """The errors of a layer that an earlier run finished; None where it did not, or a crash has damaged it since."""
    done = shard.with_name(f"{shard.name}{DONE}")
    try:
        finished = JsonReader(done, read_json(done))
        errors = finished.section("errors")
        modules = [(module, errors.section(module)) for module in errors.content]
        read = {module: {name: said.number(name) for name in said.content} for module, said in modules}
        return read if sha256_of(shard) == finished.text("sha256") else None
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
    errors: Mapping[str, Errors],
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
