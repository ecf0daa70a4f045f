"""Results files: one JSON a subject and precision, nothing in it typed by hand.

    {"subject": ..., "precision": ..., "card": ..., "driver": ..., "commit": ..., "dirty": ..., "date": ...,
     "versions": {...}, "ceilings": {...}, "rows": [...], "notes": [...]}

What names no precision is BF16. ``notes`` says which rivals, or cases, were left out, and why.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import futransformer
from futransformer.bench.case import Ceilings
from futransformer.generator.errors import CheckpointError, InputError
from futransformer.quantize.description import sha256_of

BF16 = "bf16"
NUMBERS = re.compile(r"\[[-+.e\d,\s]+\]")
SOURCE = Path(__file__).resolve().parent


def environment(commit: str | None) -> dict[str, Any]:
    """What was measured, on what, when. ``commit`` is for machines that hold the tree without its git history."""
    measured = commit or _output("git", "rev-parse", "HEAD")
    if not measured:
        raise InputError("this tree has no git history to name the measured commit from: give it with --commit")
    return {
        "card": card_name(),
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "commit": measured,
        "dirty": bool(_output("git", "status", "--porcelain")) if commit is None else False,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "versions": {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "futransformer": futransformer.__version__,
        },
    }


def card_name() -> str:
    """The GPU's name, or cpu."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def default_folder() -> Path:
    """benchmarks/results/h200 for an NVIDIA H200, from where the command runs."""
    model = card_name().lower().removeprefix("nvidia ")
    return Path("benchmarks") / "results" / re.sub(r"[^a-z0-9]+", "-", model)


def weights_sha256(folder: Path) -> str:
    """What names a model's weights: the sha256 of its safetensors file, or of what `sha256sum *.safetensors` prints.

    CheckpointError where there is none.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} holds no safetensors: name the folder of a Hugging Face model")
    sums = [sha256_of(path) for path in files]
    if len(files) == 1:
        return sums[0]
    printed = "".join(f"{digest}  {path.name}\n" for digest, path in zip(sums, files, strict=True))
    return hashlib.sha256(printed.encode()).hexdigest()


def document(
    subject: str,
    environment: dict[str, Any],
    rows: Sequence[dict[str, Any]],
    *,
    precision: str = BF16,
    ceilings: Ceilings | None = None,
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """Put a file's content together."""
    content = {"subject": subject} | ({} if precision == BF16 else {"precision": precision}) | environment
    if ceilings is not None:
        content["ceilings"] = {name: float(f"{value:.4g}") for name, value in asdict(ceilings).items()}
    content["rows"] = list(rows)
    if notes:
        content["notes"] = list(notes)
    return content


def write(folder: Path, content: dict[str, Any]) -> Path:
    """Write ``folder``/SUBJECT.json, of another precision than BF16 SUBJECT-PRECISION.json, and return its path.

    A file of a model, SUBJECT-MODEL.json, has long lists of numbers on one line.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{stem(content)}.json"
    text = json.dumps(content, indent=1)
    text = NUMBERS.sub(lambda numbers: " ".join(numbers[0].split()), text) if "model" in content else text
    path.write_text(text + "\n")
    return path


def merge(folder: Path, content: dict[str, Any], whole: Callable[[str], str] = str) -> Path:
    """``write``, but keep the file's rows of other cases: each says itself when and of which commit it was measured.

    ``whole`` is what of a case's name is replaced as a whole: all of it, or what several rows have in common.
    """
    path = folder / f"{stem(content)}.json"
    before = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"rows": []}
    new = {whole(row["case"]) for row in content["rows"]}
    kept = [_told(before) | row for row in before["rows"] if whole(row["case"]) not in new]
    rows = [*kept, *(row | _told(content) for row in content["rows"])]
    return write(folder, content | {"rows": sorted(rows, key=_in_order)})


def _in_order(row: dict[str, Any]) -> list[tuple[int, str]]:
    """Where a row stands by its case: numbers by their size."""
    parts = re.split(r"(\d+)", row["case"])
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]


def _told(content: dict[str, Any]) -> dict[str, Any]:
    """When, and of which commit, a file's rows were measured that do not say so themselves."""
    return {key: content[key] for key in ("commit", "dirty", "date") if key in content}


def precision_of(content: dict[str, Any]) -> str:
    """The precision of a file's rows."""
    precision: str = content.get("precision", BF16)
    return precision


def stem(content: dict[str, Any]) -> str:
    """The name of a file and of its plot."""
    parts = [content["subject"], content.get("model", ""), precision_of(content)]
    return "-".join(part for part in parts if part and part != BF16)


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, cwd=SOURCE, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
