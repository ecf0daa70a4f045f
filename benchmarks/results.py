"""Writing measured rows: one JSON file a subject, nothing in it typed by hand."""

from __future__ import annotations

import datetime
import json
import subprocess
from pathlib import Path
from typing import Any

import torch

import futransformer

ROOT = Path(__file__).resolve().parent.parent


def environment(commit: str | None) -> dict[str, Any]:
    """What was measured, on what, when. ``commit`` is for machines that hold the tree without its git history."""
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {
        "card": card,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "commit": commit or _output("git", "rev-parse", "HEAD"),
        "dirty": bool(_output("git", "status", "--porcelain")) if commit is None else False,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "versions": {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "futransformer": futransformer.__version__,
        },
    }


def write(folder: Path, subject: str, commit: str | None, rows: list[dict[str, Any]]) -> Path:
    """Write ``folder``/``subject``.json and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{subject}.json"
    path.write_text(json.dumps({"subject": subject, **environment(commit), "rows": rows}, indent=1) + "\n")
    return path


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
