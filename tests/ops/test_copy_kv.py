"""The INT4 copy that prefill's qkv writes, run on the host: whole pages, byte by byte.

What is in a copy is a function of K and V in BF16, so it must be that of the pages that the same kernel has written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from futransformer.generator.precision import BF16, E4M3, get_precision
from futransformer.generator.specs import PAGE_SIZE, GemmSpec, Tile
from futransformer.kv_packing import token_bytes, unpack_pages
from tests.ops.kv4 import copied
from tests.ops.test_epilogue import CONFIGS, ROWS, Problem, run_chains, specs_of

PRECISIONS = {
    64: ("bf16-kv4", "bf16-kv4-head-min-h64", "fp8-kv4-min-h0", "bf16-kv8-kv4", "fp8-promoted-kv8-kv4"),
    128: ("bf16-kv4", "fp8-kv4", "bf16-kv4-head", "bf16-kv4-min-h64", "fp8-kv8-kv4-h128"),
}


def wide_tiles(spec: GemmSpec, unit: int) -> list[GemmSpec]:
    """The same kernel with tiles that hold Q and K, or K and V, and end beyond N."""
    wide = replace(spec, schedule="cooperative", accumulation="fast", stages=2)
    return [replace(wide, tile=Tile(128, width, spec.tile.k)) for width in (192, 256) if width % unit == 0]


@pytest.mark.compile
@pytest.mark.parametrize("head_dim", CONFIGS)
def test_a_copy_is_of_the_pages_beside_it(emulate: Callable[..., str], tmp_path: Path, head_dim: int) -> None:
    config = CONFIGS[head_dim]
    cases = []
    for name in PRECISIONS[head_dim]:
        precision = get_precision(name)
        specs = [spec for spec in specs_of("prefill", config, "qkv", precision) if isinstance(spec, GemmSpec)]
        assert precision.copy is not None
        for spec in dict.fromkeys((*specs, *wide_tiles(specs[-1], precision.copy.unit(head_dim)))):
            cases += [
                (Problem(config, "qkv", rows, replace(precision, kv=kv)), replace(spec, kv=kv))
                for kv in dict.fromkeys((spec.kv, BF16))  # beside pages of E4M3 the copy is that of BF16 ones
                for rows in ROWS
            ]
    written = run_chains(emulate, tmp_path, cases)
    plain = {(spec, problem.rows): files for (problem, spec), files in zip(cases, written, strict=True)}
    for (problem, spec), files in zip(cases, written, strict=True):
        pages = plain[replace(spec, kv=BF16), problem.rows]
        assert spec.copy is not None
        assert problem.copy_poison is not None
        want = copied(problem.copy_poison, pages["k_pages"], pages["v_pages"], problem.slots, spec.copy)
        copy = files["kv_copy"]
        if spec.element == E4M3 and problem.rows > 1:  # the last row is not a number: codes are any, scales say so
            page, token = divmod(int(problem.slots[-1]), PAGE_SIZE)
            of_token = token_bytes(head_dim, spec.copy)[token]
            for part in unpack_pages(copy[page], head_dim, spec.copy):
                assert part.scales[:, token].isnan().all()
            want[page, :, of_token] = copy[page, :, of_token]
        assert torch.equal(copy, want), f"{spec.name}, {problem.rows} rows"
