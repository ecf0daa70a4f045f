"""A calibrated model as a folder that a person can read.

| file | content |
| --- | --- |
| config.json, the tokenizer's files, licences | those of the model, unchanged |
| safetensors | the model's weights, unchanged: hard links where the file system has them, else copies |
| fp8_scales.safetensors | ``scale`` and ``amax``, float32 [4 L + 1], in the order of futransformer.fp8_scaling |
| futransformer.json | format version, precision of each phase, origin of the scales, sha256 of every other file |

The folder appears by one rename, complete. What it says is checked when it is read, but for the sha256 of the weights:
they are as large as the model.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from futransformer.build.cache import storage_errors
from futransformer.checkpoint import INDEX_FILE, SINGLE_FILE
from futransformer.fp8_scaling import RESULTS, ActivationScales
from futransformer.generator.config import LlamaConfig
from futransformer.generator.errors import CheckpointError, ConfigError, InputError
from futransformer.generator.json_reader import JsonReader, read_json
from futransformer.generator.precision import Precision

FORMAT = 1
DESCRIPTION_FILE = "futransformer.json"
SCALES_FILE = "fp8_scales.safetensors"
CARRIED = ("*.json", "*.model", "*.jinja", "*.txt", "*.md", "LICENSE*", "NOTICE*")  # beside the weights


def check_output(source: Path, output: Path, *, force: bool) -> None:
    """Refuse a folder that cannot be written, or must not be, before what is to lie there is computed."""
    here, there = source.resolve(), output.resolve()
    if here == there or here in there.parents or there in here.parents:
        raise InputError(f"--output {output} overlaps the model's folder {source}: name a folder beside it")
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not (output / DESCRIPTION_FILE).is_file():
        raise InputError(f"--output {output} holds something else than a calibrated model: name a new folder")
    if not force:
        raise InputError(f"--output {output} holds a calibrated model: replace it with --force, or name a new folder")


def write_folder(
    source: Path,
    output: Path,
    scales: ActivationScales,
    precision: Precision,
    calibration: Mapping[str, Any],
    *,
    force: bool = False,
) -> None:
    """Write the model of ``source`` with its scales; ``calibration`` says where they come from, in JSON's types."""
    check_output(source, output, force=force)
    with storage_errors("the calibrated model", output, "choose another with --output"):
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{output.name}-", dir=output.parent) as scratch:
            written = Path(scratch) / "written"
            written.mkdir()
            weights = _weight_files(source)
            for name in _carried_files(source, weights):
                shutil.copyfile(source / name, written / name)
            for name in weights:
                _link_or_copy((source / name).resolve(), written / name)
            save_file({"scale": scales.scale, "amax": scales.amax}, written / SCALES_FILE)
            description = {
                "format": FORMAT,
                "precision": {
                    "name": precision.name,
                    **{phase: getattr(precision, phase).name for phase in ("prefill", "decode", "kv", "head")},
                    "weight_scales": precision.weight_scales,
                },
                "fp8_scales": {"file": SCALES_FILE, **calibration},
                "sha256": {path.name: sha256_of(path) for path in sorted(written.iterdir())},
            }
            text = json.dumps(description, indent=2, ensure_ascii=False) + "\n"
            (written / DESCRIPTION_FILE).write_text(text, encoding="utf-8")
            _publish(written, output, Path(scratch) / "replaced")


def read_scales(folder: Path, config: LlamaConfig) -> ActivationScales:
    """Read a calibrated folder's scales; CheckpointError says what is wrong with them and how to calibrate."""
    again = f"calibrate again: futransformer calibrate {folder} --output NEW"
    path = folder / DESCRIPTION_FILE
    if not path.is_file():
        raise CheckpointError(
            f"{folder} has no FP8 scales, it holds no {DESCRIPTION_FILE}; calibrate it first, and name what that "
            f"writes: futransformer calibrate {folder} --output {folder.resolve().name}-fp8"
        )
    try:
        description = JsonReader(path, read_json(path))
        version = description.integer("format")
        wanted = description.section("sha256").text(SCALES_FILE)
    except ConfigError as error:
        raise CheckpointError(f"{error}; {again}") from error
    if version != FORMAT:
        raise CheckpointError(f"{path} is of format {version}, this version reads format {FORMAT}; {again}")
    scales = folder / SCALES_FILE
    if not scales.is_file():
        raise CheckpointError(f"{scales} is missing; {again}")
    if sha256_of(scales) != wanted:
        raise CheckpointError(f"{scales} is not the file that {DESCRIPTION_FILE} names: its sha256 differs; {again}")
    try:
        tensors = load_file(scales)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{scales} cannot be read: {error}; {again}") from error
    results = len(RESULTS) * config.num_hidden_layers + 1
    for name in ("scale", "amax"):
        tensor = tensors.get(name)
        if tensor is None or tensor.dtype != torch.float32 or tensor.shape != (results,):
            found = "is missing" if tensor is None else f"is {tensor.dtype} {list(tensor.shape)}"
            raise CheckpointError(f"{scales}: {name} must be float32 [{results}], but {found}; {again}")
        if not _sound(tensor, positive=name == "scale"):
            raise CheckpointError(f"{scales}: {name} holds values that no scale can be; {again}")
    return ActivationScales(tensors["scale"], tensors["amax"])


def sha256_of(path: Path) -> str:
    """The file's sha256, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _sound(tensor: Tensor, *, positive: bool) -> bool:
    return bool((tensor.isfinite() & ((tensor > 0) if positive else (tensor >= 0))).all())


def _weight_files(folder: Path) -> list[str]:
    """The safetensors that the model consists of; ``load_checkpoint`` has checked them."""
    if (folder / SINGLE_FILE).is_file():
        return [SINGLE_FILE]
    return sorted(set(read_json(folder / INDEX_FILE)["weight_map"].values()))


def _carried_files(folder: Path, weights: list[str]) -> list[str]:
    """All else that belongs to the model; an index without its shards does not, nor an earlier calibration."""
    left_out = {DESCRIPTION_FILE, *([INDEX_FILE] if weights == [SINGLE_FILE] else [])}
    names = {path.name for pattern in CARRIED for path in folder.glob(pattern) if path.is_file()}
    return sorted(name for name in names - left_out if not name.startswith("."))


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(source, target)


def _publish(written: Path, output: Path, replaced: Path) -> None:
    """Move the finished folder into place; one that lies there leaves by the rename just before."""
    moved = output.exists()
    if moved:
        output.rename(replaced)
    try:
        written.rename(output)
    except OSError:
        if moved:
            replaced.rename(output)
        raise
