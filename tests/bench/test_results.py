"""What the committed results have to show, whatever they are measured anew to be."""

from __future__ import annotations

import json
import re
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "h200"
# a step or a layer of decode: shape, what decode reads, sequences, tokens in the cache
CASE = re.compile(r"decode_(?:step|block)/(\w+)/([\w-]+)/(?:head=\w+/)?B=(\d+)/ctx=(\d+)")


def test_int4_decode_is_never_slower_than_bf16() -> None:
    """Wherever both were measured, at one batch and context; systems lose to 16 bits at large batches, or far out."""
    compared = 0
    for subject in ("decode_step", "decode_block"):
        rows = [row for path in RESULTS.glob(f"{subject}*.json") for row in json.loads(path.read_text())["rows"]]
        found = [(CASE.fullmatch(row["case"]), row["ours"]) for row in rows]
        bf16 = {(m[1], m[3], m[4]): time for m, time in found if m and m[2] == "bf16"}
        for m, time in found:
            if m and m[2].startswith("int4") and (m[1], m[3], m[4]) in bf16:
                compared += 1
                assert time <= bf16[m[1], m[3], m[4]], m[0]
    assert compared >= 12
