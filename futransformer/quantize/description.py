"""futransformer.json: what a folder of ours says of itself, and whether its files are those that it names."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from futransformer.generator.errors import CheckpointError, ConfigError
from futransformer.generator.json_reader import JsonReader, names_a_file, read_json, shown
from futransformer.generator.precision import Precision

FORMAT = 3  # 2 had no shards of FP8 weights; 1 neither FP8 weights nor BF16 parts
READ_FORMATS = (1, 2, FORMAT)
DESCRIPTION_FILE = "futransformer.json"
INT4_SECTION = "int4_weights"  # of a quantised model's description; a calibration of that model keeps it


def precision_section(precision: Precision) -> dict[str, Any]:
    """What a folder says of the precision that it is made for."""
    return {
        "name": precision.name,
        **{phase: getattr(precision, phase).name for phase in ("prefill", "decode", "kv", "head")},
        "weight_scales": precision.weight_scales,
    }


def named_precision(folder: Path) -> str | None:
    """The precision that a folder of ours is made for; None of any other."""
    path = folder / DESCRIPTION_FILE
    try:
        section = JsonReader(path, read_json(path) if path.is_file() else {}).section("precision")
        return section.text("name") if section.has("name") else None
    except ConfigError as error:
        raise CheckpointError(f"{error}; name a precision, or fetch the file again") from error


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
    for name, digest in signed_files(sums).items():
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name} is missing, which {DESCRIPTION_FILE} names; fetch it again")
        if sha256_of(folder / name) != digest:
            raise CheckpointError(
                f"{folder / name} is not the file that {DESCRIPTION_FILE} names: its sha256 differs; fetch it again, "
                "or quantise again"
            )


def signed_files(sums: JsonReader) -> dict[str, str]:
    """The sha256 of each file; ConfigError where a name is none of a file in this folder."""
    for name in sums.content:
        if not names_a_file(name):
            raise sums.error(shown(name), "is no name of a file in this folder; fetch the file again")
    return {name: sums.text(name) for name in sums.content}


def sha256_of(path: Path) -> str:
    """The file's sha256, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def weight_files(folder: Path) -> list[str]:
    """The safetensors that the model consists of; ``load_checkpoint`` has checked them."""
    from futransformer.checkpoint import INDEX_FILE, SINGLE_FILE  # noqa: PLC0415 - torch, else not needed

    if (folder / SINGLE_FILE).is_file():
        return [SINGLE_FILE]
    return sorted(set(read_json(folder / INDEX_FILE)["weight_map"].values()))
