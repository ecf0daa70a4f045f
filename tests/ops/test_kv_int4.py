"""What kernels make of K and V for the INT4 copy, on the host: the bytes of whole pages, against the reference's."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path

import jinja2
import pytest
import torch

from futransformer.generator.kv_format import BLOCKS, GROUPS, KvFormat
from futransformer.generator.specs import PAGE_SIZE
from futransformer.kv_packing import pack_page, unpack_pages
from futransformer.quantize.kv_int4 import quantise_keys, quantise_kv, rotate

CASES = {
    f"{form}-d{head_dim}": (form, head_dim)
    for group, minimum, block, head_dim in product(GROUPS, (False, True), BLOCKS, (64, 128))
    if block <= head_dim
    for form in [KvFormat(group, minimum=minimum, hadamard=block)]
}


def some_kv(head_dim: int) -> torch.Tensor:
    """K and V [2, 64, D] in BF16: of every size that float16 scales have, constant groups, outliers, and ties."""
    generator = torch.Generator().manual_seed(head_dim)
    kv = torch.randn(2, PAGE_SIZE, head_dim, generator=generator) * torch.logspace(-8, 4, PAGE_SIZE)[:, None]
    kv[:, 1] = 0
    kv[:, 2] = 0.7
    kv[:, 3:40, 17] *= 50
    kv[:, 40:48] = kv[:, 40:48].round()
    kv[:, 40:48, 5::32] = -8
    kv[:, 44:48, 6::32] = 8
    kv[:, 48] = 100 + kv[:, 48] * 2.0**-10  # far from zero
    return kv.bfloat16()


@pytest.mark.compile
def test_pages_in_the_emulator(emulate: Callable[..., str], tmp_path: Path) -> None:
    for head_dim in (64, 128):
        kv = some_kv(head_dim)
        (tmp_path / f"kv{head_dim}").write_bytes(kv.view(torch.uint8).numpy().tobytes())
    template = jinja2.Template((Path(__file__).parent / "emulated_kv_int4.cpp.jinja").read_text())
    source = template.render(cases=[(name, *case) for name, case in CASES.items()])
    runs = [(name, str(tmp_path / f"kv{head_dim}"), str(tmp_path / name)) for name, (_, head_dim) in CASES.items()]
    emulate("kv_int4", source=source, runs=[("exact",), *runs])
    for name, (form, head_dim) in CASES.items():
        keys, values = some_kv(head_dim).float()
        want = pack_page(quantise_keys(rotate(keys, form.hadamard), form), quantise_kv(values, form), form)
        page = torch.frombuffer(bytearray((tmp_path / name).read_bytes()), dtype=torch.uint8)
        both = (unpack_pages(each, head_dim, form) for each in (page, want))
        for part, (written, wanted) in zip("KV", zip(*both, strict=True), strict=True):
            assert torch.equal(written.codes, wanted.codes), f"{name}: codes of {part}"
        assert torch.equal(page, want), name
