"""A calibrated model as a folder that a person can read.

| file | content |
| --- | --- |
| config.json, the tokenizer's files, licences | those of the model, unchanged |
| safetensors | the model's weights, unchanged: hard links where the file system has them, else copies |
| fp8_scales.safetensors | ``scale`` and ``amax``, float32 [4 L + 1], in the order of futransformer.fp8_scaling |
| fp8_weights*.safetensors | if there are FP8 weights of its own: futransformer.quantize.stored |
| futransformer.json | format version, precision of each phase, layers in BF16, origin of the scales, sha256 of files |

The folder appears by one rename, complete. When an FP8 prefill is loaded from it, the sha256 of scales, FP8 weights and
of what else is read (``CHECKED``) must be those that it names, so that scales do not meet a model that they are not of.
The model's weights are not checked, unless they are INT4 codes that we wrote (futransformer.quantize.write), nor are
licences and the like.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save

from futransformer.build.cache import storage_errors
from futransformer.checkpoint import INDEX_FILE, SINGLE_FILE
from futransformer.formats import read_format
from futransformer.fp8_scaling import ActivationScales
from futransformer.generator.config import LlamaConfig
from futransformer.generator.errors import CheckpointError, ConfigError, InputError
from futransformer.generator.json_reader import JsonReader, names_a_file, read_json
from futransformer.generator.precision import Precision
from futransformer.layer_parts import format_parts, parse_parts
from futransformer.quantize.description import (
    DESCRIPTION_FILE,
    FORMAT,
    INT4_SECTION,
    READ_FORMATS,
    precision_section,
    sha256_of,
    signed_files,
    weight_files,
)
from futransformer.quantize.recipe import Fp8Recipe
from futransformer.quantize.stored import StoredWeights, save_weights

SCALES_FILE = "fp8_scales.safetensors"
WEIGHTS_FILE = "fp8_weights.safetensors"
CHECKED = ("*.json", "*.model", "*.jinja")  # what is read beside the weights: the config, the tokenizer, their index
DONE = ".errors.json"  # beside a finished layer's shard, until all are: its errors, and the sha256 of its files
CARRIED = (*CHECKED, "*.txt", "*.md", "LICENSE*", "NOTICE*")


def check_output(source: Path, output: Path, *, force: bool, what: str = "calibrated model") -> None:
    """Refuse a folder that cannot be written, or must not be, before what is to lie there is computed.

    What it may replace is what we wrote, and nothing else with it, and that only by ``force``.
    """
    here, there = source.resolve(), output.resolve()
    if here == there or here in there.parents or there in here.parents:
        raise InputError(f"--output {output} overlaps the model's folder {source}: name a folder beside it")
    if there == Path.cwd() or there.is_mount():
        where = "the current folder" if there == Path.cwd() else "a mount point"
        raise InputError(f"--output {output} is {where}, which no other can replace: name a folder inside it")
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        if not (output / DESCRIPTION_FILE).is_file():
            raise InputError(f"--output {output} holds something else than a {what}: name a new folder")
        if not force:
            raise InputError(
                f"--output {output} holds a model written before: replace it with --force, or name a new folder"
            )
        if others := _others(output):
            raise InputError(
                f"--output {output} holds {others[0]}, which its {DESCRIPTION_FILE} does not name, and would lose it: "
                "move it elsewhere, or name a new folder"
            )
    with scratch_beside(output, next(parent for parent in there.parents if parent.exists()), what):
        pass


def _others(folder: Path) -> list[str]:
    """What lies in a folder of ours beside the files that its description names; all, if it names none."""
    try:
        sums = JsonReader(folder / DESCRIPTION_FILE, read_json(folder / DESCRIPTION_FILE)).section("sha256").content
    except ConfigError:
        sums = {}
    names = {path.name for path in folder.iterdir() if not path.name.endswith(DONE)}
    return sorted(names - {DESCRIPTION_FILE, *sums})


def write_folder(
    source: Path,
    output: Path,
    recipe: Fp8Recipe,
    precision: Precision,
    calibration: Mapping[str, Any],
    *,
    force: bool = False,
) -> None:
    """Write the model of ``source`` with its recipe; ``calibration`` says where that comes from, in JSON's types."""
    check_output(source, output, force=force)
    there = output.resolve()  # a link stays one
    with scratch_beside(output, there.parent) as scratch:
        written = scratch / "written"
        written.mkdir()
        weights = weight_files(source)
        for name in carried_files(source, weights):
            shutil.copyfile(source / name, written / name)
        for name in weights:
            _link_or_copy((source / name).resolve(), written / name)
        save_scales(recipe.scales, written / SCALES_FILE)
        if recipe.weights:
            save_weights(recipe.weights, written / WEIGHTS_FILE)
            shutil.copymode(written / SCALES_FILE, written / WEIGHTS_FILE)
        description = {
            "format": FORMAT,
            "precision": precision_section(precision),
            "bf16_layers": format_parts(recipe.bf16),
            "fp8_scales": {"file": SCALES_FILE, **calibration},
            "fp8_weights": {"files": [WEIGHTS_FILE]} if recipe.weights else None,
            **_int4_section(source),
            "sha256": {path.name: sha256_of(path) for path in sorted(written.iterdir())},
        }
        text = json.dumps(description, indent=2, ensure_ascii=False) + "\n"
        (written / DESCRIPTION_FILE).write_text(text, encoding="utf-8")
        publish(written, there, scratch / "replaced")


def save_scales(scales: ActivationScales, path: Path) -> None:
    """Write the scales of activations."""
    path.write_bytes(save({"scale": scales.scale, "amax": scales.amax}))  # save_file would let nobody else read it


def _int4_section(folder: Path) -> dict[str, Any]:
    """What a quantised model says of its codes, by which ``check_sums`` knows that every file is to be checked."""
    path = folder / DESCRIPTION_FILE
    if read_format(folder) is None or not path.is_file():
        return {}
    return {key: value for key, value in read_json(path).items() if key == INT4_SECTION}


def read_recipe(folder: Path, config: LlamaConfig) -> Fp8Recipe:
    """Read a calibrated folder's recipe; CheckpointError says what is wrong with it and how to calibrate."""
    command = f"futransformer calibrate {shlex.quote(str(folder))} --output OUT"
    again = f"calibrate again: {command}"
    path = folder / DESCRIPTION_FILE
    first = f"calibrate it first, and then name OUT, a folder beside it: {command}"
    if not path.is_file():
        raise CheckpointError(f"{folder} has no FP8 scales, it holds no {DESCRIPTION_FILE}; {first}")
    try:
        description = JsonReader(path, read_json(path))
        if description.has(INT4_SECTION) and not description.has("fp8_scales"):
            raise CheckpointError(f"{folder} has no FP8 scales, it holds INT4 weights alone; {first}")
        version = description.integer("format")
        sums = description.section("sha256")
        beside = (name for name in signed_files(sums) if any(fnmatch(name, pattern) for pattern in CHECKED))
        stored = _weights_files(description)
        wanted = {name: sums.text(name) for name in dict.fromkeys((SCALES_FILE, *stored, "config.json", *beside))}
        parts = description.text("bf16_layers") if version > 1 else ""
    except ConfigError as error:
        raise CheckpointError(f"{error}; {again}") from error
    if version not in READ_FORMATS:
        raise CheckpointError(f"{path} is of format {version}, this version reads formats up to {FORMAT}; {again}")
    scales = folder / SCALES_FILE
    try:
        for name, digest in wanted.items():
            file = folder / name
            if not file.is_file():
                raise CheckpointError(f"{file} is missing, which {DESCRIPTION_FILE} names; {again}")
            if sha256_of(file) != digest:
                raise CheckpointError(
                    f"{file} is not the file that {DESCRIPTION_FILE} names: its sha256 differs; {again}"
                )
        tensors = load_file(scales)
        recipe = Fp8Recipe(
            ActivationScales(tensors["scale"], tensors["amax"]),
            parse_parts(parts, config.num_hidden_layers) if parts else frozenset(),
            StoredWeights([folder / name for name in stored], config) if stored else {},
        )
        recipe.check(config.num_hidden_layers)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{folder}: the scales cannot be read: {error}; {again}") from error
    except KeyError as error:
        raise CheckpointError(f"{scales} lacks {error}; {again}") from error
    except InputError as error:
        raise CheckpointError(f"{folder}: {error}; {again}") from error
    return recipe


def _weights_files(description: JsonReader) -> list[str]:
    """The files of FP8 weights, in any format; ConfigError where they are not named as they must be."""
    if not description.has("fp8_weights"):
        return []
    section = description.section("fp8_weights")
    names = section.content.get("files", [section.content.get("file")])
    if not isinstance(names, list) or not all(isinstance(name, str) and names_a_file(name) for name in names):
        raise section.error("files", "must be a list of names of files in this folder")
    return names


@contextmanager
def scratch_beside(output: Path, parent: Path, what: str = "calibrated model") -> Iterator[Path]:
    """A temporary folder on the file system of ``output``, in ``parent``; what goes wrong within is a BuildError."""
    with storage_errors(f"the {what}", output, "choose another with --output"):
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{output.name}-", dir=parent) as scratch:
            yield Path(scratch)


def carried_files(folder: Path, weights: list[str]) -> list[str]:
    """All else that belongs to the model; an index without its shards does not, nor an earlier calibration."""
    left_out = {DESCRIPTION_FILE, *([INDEX_FILE] if weights == [SINGLE_FILE] else [])}
    names = {path.name for pattern in CARRIED for path in folder.glob(pattern) if path.is_file()}
    return sorted(name for name in names - left_out if not name.startswith("."))


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(source, target)


def publish(written: Path, output: Path, replaced: Path) -> None:
    """Move the finished folder into place; one that lies there leaves by the rename just before."""
    try:
        if output.exists():
            output.rename(replaced)
        written.rename(output)
    except BaseException:  # an interrupt too
        if replaced.exists() and not output.exists():
            replaced.rename(output)
        raise
