"""The INT4 copy as decode's qkv writes it: whole kernels in the emulator, against the main pages and the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from futransformer.generator.config import CONFIGS, LlamaConfig
from futransformer.generator.decode_heuristics import batch_tiles, decode_gemm_spec
from futransformer.generator.errors import UnsupportedError
from futransformer.generator.kv_format import BLOCKS, GROUPS, HEAD, PAGE_SIZE, KvFormat
from futransformer.generator.plan import projections
from futransformer.generator.precision import BF16, E4M3, INT4, Element, get_precision
from futransformer.generator.render import _environment
from futransformer.generator.specs import DecodeGemmSpec
from futransformer.packing import pack_decode, pack_int4
from futransformer.quantize.int4 import round_to_nearest
from futransformer.reference import ReferenceOps
from tests.ops.int4 import SPLIT_BATCH, as_integers
from tests.ops.kv4 import copied
from tests.ops.test_epilogue import with_room
from tests.ops.tolerance import e4m3_step

# 768 columns of Q, K and V
MODELS = {
    64: replace(CONFIGS["smollm2-135m"], hidden_size=512, num_attention_heads=8, num_key_value_heads=2, head_dim=64),
    128: replace(CONFIGS["llama-3.1-8b"], hidden_size=512, num_attention_heads=4, num_key_value_heads=1, head_dim=128),
}
PAGES = 3
LOUD = 12.0  # of K's first head, what one feature is larger than the others: a group has an outlier


def spec_of(
    head_dim: int, form: KvFormat, element: Element, batch: int, tiling: tuple[int, ...], kv: Element = BF16
) -> DecodeGemmSpec:
    """``tiling``: row tiles, warps, blocks, stages and their k, stages of x ahead."""
    config = MODELS[head_dim]
    n, k = projections(config)["qkv"]
    rows, warp_rows, warp_split, split_k, stages, stage_k, ahead = tiling
    group = 64 if element == INT4 else 0
    return DecodeGemmSpec(
        "qkv",
        element,
        n,
        k,
        batch,
        rows,
        warp_rows,
        warp_split,
        split_k,
        stages,
        stage_k,
        config.heads,
        ahead,
        group_k=group,
        kv=kv,
        copy=form,
    )


CASES = {
    "8 of BF16, clusters of four": spec_of(64, KvFormat(), BF16, 8, (4, 1, 4, 4, 2, 128, 1)),
    "16, clusters of two, minima": spec_of(64, KvFormat(minimum=True), BF16, 16, (4, 1, 4, 2, 2, 128, 2)),
    "64, x in the ring": spec_of(64, KvFormat(), BF16, 64, (4, 2, 2, 2, 2, 128, 0)),
    "32, one block, over E4M3": spec_of(128, KvFormat(), BF16, 32, (8, 4, 2, 1, 2, 128, 0), E4M3),
    "8, a head with a rotation": spec_of(64, KvFormat(HEAD, hadamard=64), BF16, 8, (4, 1, 4, 2, 2, 128, 1)),
    "8, whole heads": spec_of(128, KvFormat(HEAD, minimum=True, hadamard=128), BF16, 8, (8, 1, 4, 2, 2, 128, 1)),
    "16, blocks of two groups": spec_of(128, KvFormat(minimum=True, hadamard=64), BF16, 16, (8, 2, 4, 1, 2, 128, 0)),
    "4 of INT4, clusters of four": spec_of(64, KvFormat(), INT4, 4, (12, 1, 2, 4, 2, 128, 1)),
    "8 of INT4, no rotation": spec_of(64, KvFormat(hadamard=0), INT4, 8, (4, 1, 4, 1, 2, 256, 1)),
    "64, by wgmma": replace(spec_of(64, KvFormat(), INT4, 64, (8, 4, 1, 2, 2, 256, 0)), warp_rows=2, wgmma=True),
    "16 of INT4, units across parts": spec_of(128, KvFormat(), INT4, 16, (12, 2, 2, 2, 2, 128, 0)),
}


class Problem:
    """What one kernel reads, poison for what it writes, and what it must have written."""

    def __init__(self, spec: DecodeGemmSpec, rows: int) -> None:
        assert spec.heads is not None
        assert spec.copy is not None
        self.spec, self.rows, self.form = spec, rows, spec.copy
        self.config = MODELS[spec.heads.head_dim]
        generator = torch.Generator().manual_seed(spec.batch_tile)
        heads, k = spec.heads, spec.k
        self.x = (torch.randn(rows, k, generator=generator) * torch.linspace(0.1, 8, rows)[:, None]).bfloat16()
        logical = torch.randn(spec.n, k, generator=generator) * k**-0.5
        logical[heads.q_features + 7] *= LOUD
        if spec.element == INT4:
            int4 = round_to_nearest("qkv", logical.bfloat16(), spec.group_k)
            self.packed, self.logical = pack_int4("qkv", int4), int4.dequantise()
        else:
            self.packed, self.logical = pack_decode("qkv", logical.bfloat16()), logical.bfloat16().float()
        self.sumsq = self.x.float().square().view(rows, 4, -1).sum(-1)
        angles = torch.rand(99, heads.head_dim // 2, generator=generator) * 6.283
        self.rope_table = torch.stack([angles.cos(), angles.sin()], -1).contiguous()
        self.positions = torch.randint(99, (rows,), generator=generator, dtype=torch.int32)
        self.slots = torch.randperm(PAGES * PAGE_SIZE, generator=generator)[:rows]
        if rows > 2:
            self.slots[1] = -1
        self.shape = (PAGES, heads.num_key_value_heads, PAGE_SIZE, heads.head_dim)
        copy_shape = (*self.shape[:2], self.form.page_bytes(heads.head_dim))
        self.copy_before = torch.randint(256, copy_shape, generator=generator, dtype=torch.uint8)
        self.kv_scale = torch.tensor([0.5, 0.02]) if spec.kv == E4M3 else None

    def files(self) -> dict[str, Tensor]:
        assert self.spec.heads is not None
        dtype = torch.float8_e4m3fn if self.spec.kv == E4M3 else torch.bfloat16
        files = {
            "x": self.x,
            "weight": self.packed,
            "sumsq": self.sumsq,
            "sumsq_parts": torch.tensor(4, dtype=torch.int32),
            "rms_norm_eps": torch.tensor(self.config.rms_norm_eps),
            "rope_table": self.rope_table,
            "positions": self.positions,
            "slots": self.slots,
            "q": with_room(torch.full((self.rows, self.spec.heads.q_features), torch.nan, dtype=torch.bfloat16)),
            "k_pages": torch.full(self.shape, torch.nan, dtype=dtype),
            "v_pages": torch.full(self.shape, torch.nan, dtype=dtype),
            "kv_copy": self.copy_before,
        }
        return files if self.kv_scale is None else {**files, "kv_scale": self.kv_scale}

    def check(self, written: dict[str, Tensor]) -> None:
        """q and pages as the reference has them, but for sums in another order; the copy to the byte."""
        x = as_integers(self.x, self.spec.group_k) if self._of_integers else self.x
        ops = ReferenceOps(self.config, copy=self.form)
        pages = [torch.full(self.shape, torch.nan) for _ in range(2)]
        copy = self.copy_before.clone()
        state = (self.rope_table, self.positions, self.slots, *pages)
        q = ops.qkv("decode", x, self.sumsq, self.logical, *state, kv_scale=self.kv_scale, kv_copy=copy)
        for name, want in {"q": with_room(q), "k_pages": pages[0], "v_pages": pages[1]}.items():
            actual, poison = written[name].float(), want.isnan()
            assert torch.equal(actual.isnan(), poison), f"{name}: written where nothing may be, or not written"
            actual, want = (tensor.float().masked_fill(poison, 0) for tensor in (actual, want))  # noqa: PLW2901
            unit = 2.0**-7 * want.abs() if name == "q" or self.kv_scale is None else e4m3_step(want) / 2
            worst = ((actual - want).abs() - unit - 2.0**-16 * want.abs().max()).max()
            assert worst <= 0, f"{name} is off by {worst:.3e}"
        if self.kv_scale is None:
            want = copied(self.copy_before, written["k_pages"], written["v_pages"], self.slots, self.form)
            assert torch.equal(written["kv_copy"], want)
        else:  # of values that the pages do not have: few codes fall otherwise
            assert (written["kv_copy"] != copy).float().mean() < 0.005
        token = self.slots[self.slots >= 0]
        changed = (written["kv_copy"] != self.copy_before).any(-1).any(-1)
        assert torch.equal(changed, torch.bincount(token // PAGE_SIZE, minlength=PAGES) > 0)

    @property
    def _of_integers(self) -> bool:
        return self.spec.element == INT4 and self.spec.batch_tile <= SPLIT_BATCH


@pytest.mark.compile
def test_whole_kernels_in_the_emulator(emulate: Callable[..., str], tmp_path: Path) -> None:
    """Full batches, and those that leave blocks of a cluster without a row."""
    problems = [Problem(spec, rows) for spec in CASES.values() for rows in (1, spec.batch_tile - 1)]
    runs = []
    for index, problem in enumerate(problems):
        folder = tmp_path / str(index)
        folder.mkdir()
        for name, tensor in problem.files().items():
            (folder / name).write_bytes(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
        runs.append((problem.spec.name, str(problem.rows), str(folder)))
    template = (
        _environment().overlay().from_string((Path(__file__).parent / "emulated_copy_of_rows.cpp.jinja").read_text())
    )
    decode = ("unit_scales", "split_activations", "decode_ring", "decode_block", "decode_gemm", "decode_gemm_wgmma")
    headers = (*decode, "epilogue", "epilogue_fp8", "kv_int4", "epilogue_kv_decode")
    emulate("fragment", *headers, source=template.render(specs=CASES.values()), runs=runs)
    for index, problem in enumerate(problems):
        written = {}
        for name, tensor in problem.files().items():
            content = bytearray((tmp_path / str(index) / name).read_bytes())
            written[name] = torch.frombuffer(content, dtype=tensor.dtype).view_as(tensor)
        problem.check(written)


FORMS = [
    KvFormat(group, minimum=minimum, hadamard=block) for group, minimum, block in product(GROUPS, (False, True), BLOCKS)
]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=list(CONFIGS))
@pytest.mark.parametrize("precision", ["bf16", "int4", "int4-g32-asym", "int4-channel", "bf16-kv8"])
def test_every_model_has_kernels_of_every_form(config: LlamaConfig, precision: str) -> None:
    """Legal ones, whose weights are those of the kernels without a copy."""
    n, k = projections(config)["qkv"]
    row = get_precision(precision)
    for form, batch in product(FORMS, batch_tiles("qkv", row)):
        if form.hadamard > config.head_dim:
            continue
        spec = decode_gemm_spec("qkv", n, k, batch, replace(row, copy=form), config.heads)
        plain = decode_gemm_spec("qkv", n, k, batch, row, config.heads)
        assert (spec.copy, spec.kv, spec.weight_shape) == (form, row.kv, plain.weight_shape)
        assert spec.block_rows % form.unit(config.head_dim) == 0
        assert 32 * spec.warps * spec.split_k >= 4 * batch
        assert spec.params[-1].name == "kv_copy"


@pytest.mark.parametrize(
    ("tiling", "batch", "message"),
    [
        ((6, 1, 4, 2, 2, 128, 1), 8, "row_tiles must hold whole units of 64 rows to write a copy of int4-g32-h32"),
        ((4, 4, 1, 1, 2, 128, 0), 64, "leave four lanes for each of a block's sequences"),
        ((8, 1, 4, 8, 2, 64, 1), 4, "split_k must divide batch_tile"),
    ],
)
def test_shapes_that_cannot_finish_units_are_refused(tiling: tuple[int, ...], batch: int, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        spec_of(64, KvFormat(), INT4 if batch == 4 else BF16, batch, tiling)
