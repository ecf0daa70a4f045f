"""Packed weights: exact inverses, the documented order element by element, and fragments against CuTe's own traits."""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from futransformer.generator.config import load_config
from futransformer.generator.decode_heuristics import decode_gemm_spec
from futransformer.generator.errors import ConfigError, InputError, UnsupportedError
from futransformer.generator.int4 import packed_group, unit_bytes
from futransformer.generator.plan import make_plan, projections
from futransformer.generator.precision import CHANNEL, GROUP_SIZES, get_precision
from futransformer.ops.interface import Projection
from futransformer.packing import (
    pack_decode,
    pack_e4m3,
    pack_int4,
    pack_prefill,
    unpack_decode,
    unpack_e4m3,
    unpack_int4,
    unpack_prefill,
)
from futransformer.quantize.fp8 import Fp8Weight
from futransformer.quantize.int4 import Int4Weight, round_to_nearest

OPS: tuple[Projection, ...] = ("qkv", "o", "gate_up", "down", "lm_head")
PACKINGS = {"prefill": (pack_prefill, unpack_prefill), "decode": (pack_decode, unpack_decode)}


def numbered(n: int, k: int) -> Tensor:
    """A weight whose every element tells its place."""
    return torch.arange(n * k).view(n, k)


@pytest.mark.parametrize("shape", [(64, 32), (128, 96), (192, 576)])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("phase", PACKINGS)
def test_unpacking_is_the_exact_inverse(phase: str, op: Projection, shape: tuple[int, int]) -> None:
    pack, unpack = PACKINGS[phase]
    logical = numbered(*shape)
    packed = pack(op, logical)
    assert packed.is_contiguous()
    assert torch.equal(unpack(op, packed, shape[0]), logical)


def int4_weight(n: int, k: int, group_size: int, zero_points: bool) -> Int4Weight:
    """Any codes, scales that are small integers, any zero points."""
    generator = torch.Generator().manual_seed(n + k + group_size)
    groups = -(-k // (k if group_size == CHANNEL else group_size))

    def integers(low: int, high: int, columns: int) -> Tensor:
        return torch.randint(low, high, (n, columns), generator=generator, dtype=torch.uint8)

    zeros = integers(0, 16, groups) if zero_points else None
    return Int4Weight(integers(0, 16, k), integers(1, 9, groups).half(), zeros, group_size)


@pytest.mark.parametrize("phase", PACKINGS)
def test_the_vocabulary_is_padded_with_zero_rows(phase: str) -> None:
    pack, unpack = PACKINGS[phase]
    logical = numbered(100, 64) + 1
    packed = pack("lm_head", logical)
    assert torch.equal(unpack("lm_head", packed, 100), logical)
    assert torch.equal(unpack("lm_head", packed, 128)[100:], torch.zeros(28, 64, dtype=torch.int64))


def test_prefill_order_of_plain_operations() -> None:
    packed = pack_prefill("down", numbered(96, 8))
    for group in range(3):
        for j in range(4):
            for t in range(4):
                for e in range(2):
                    assert packed[32 * group + 8 * j + 2 * t + e, 0] == (32 * group + 8 * t + 2 * j + e) * 8


def test_prefill_order_of_swiglu() -> None:
    intermediate = 96
    packed = pack_prefill("gate_up", numbered(2 * intermediate, 8))
    for group in range(3):
        for j in range(8):
            for t in range(4):
                for e in range(2):
                    row = e * intermediate + 32 * group + 8 * t + j
                    assert packed[64 * group + 8 * j + 2 * t + e, 0] == row * 8


@pytest.mark.parametrize("op", ["o", "gate_up"])
def test_decode_order(op: Projection) -> None:
    n, k = 64, 96
    packed = pack_decode(op, numbered(n, k))
    assert packed.shape == (n // 16, k // 16, 32, 8)
    for tile in range(n // 16):
        for step in range(k // 16):
            for lane in range(32):
                g, t = divmod(lane, 4)
                for value in range(8):
                    register, e = divmod(value, 2)
                    column = 16 * tile + g + 8 * (register % 2)
                    row = column // 2 + column % 2 * (n // 2) if op == "gate_up" else column
                    feature = 32 * (step // 2) + 8 * t + 4 * (step % 2) + 2 * (register // 2) + e
                    assert packed[tile, step, lane, value] == row * k + feature


def e4m3_weight(n: int, k: int) -> Fp8Weight:
    """Any codes, and a scale a row."""
    generator = torch.Generator().manual_seed(n + k)
    codes = torch.randint(0, 256, (n, k), generator=generator, dtype=torch.uint8)
    codes[codes % 128 == 127] = 0  # which are not numbers
    return Fp8Weight(codes.view(torch.float8_e4m3fn), torch.rand(n, generator=generator) + 0.5)


@pytest.mark.parametrize("op", ["o", "gate_up"])
def test_e4m3_order(op: Projection) -> None:
    """A word is four codes of a row: bit moves make BF16's sign of it, and behind that E4M3's exponent and mantissa."""
    n, k = 32, 96
    weight = e4m3_weight(n, k)
    codes, packed = weight.codes.view(torch.uint8), pack_e4m3(op, weight)
    assert packed.shape == (n * (k + 4),)
    scales = packed[n * k :].view(torch.float32)
    words = packed[: n * k].view(torch.int32).view(n // 16, k // 32, 8, 4, 2, 2).tolist()
    for tile, group, g, t, mma, half in itertools.product(range(n // 16), range(k // 32), *map(range, (8, 4, 2, 2))):
        column = 16 * tile + g + 8 * half
        row = column // 2 + column % 2 * (n // 2) if op == "gate_up" else column
        assert scales[column] == weight.scale[row]
        word = words[tile][group][g][t][mma][half] & 0xFFFFFFFF
        first, second = word & 0x87F087F0, word << 4 & 0x80F080F0 | word >> 4 & 0x07000700
        operands = [operand >> 16 * e & 0xFFFF for operand in (first, second) for e in (0, 1)]
        k_of_lane = 32 * group + 8 * t + 4 * mma
        assert [bits >> 8 & 0x80 | bits >> 4 & 0x7F for bits in operands] == codes[row, k_of_lane:][:4].tolist()


@pytest.mark.parametrize("op", ["o", "gate_up", "lm_head"])
@pytest.mark.parametrize("k", [32, 576])
def test_e4m3_unpacking_is_the_exact_inverse(k: int, op: Projection) -> None:
    weight = e4m3_weight(100 if op == "lm_head" else 96, k)
    unpacked = unpack_e4m3(op, pack_e4m3(op, weight), len(weight.codes))
    assert torch.equal(unpacked.codes.view(torch.uint8), weight.codes.view(torch.uint8))
    assert torch.equal(unpacked.scale, weight.scale)
    if op == "lm_head":
        padded = unpack_e4m3(op, pack_e4m3(op, weight), 128)
        assert not padded.codes[100:].float().any()
        assert not padded.scale[100:].any()


def test_e4m3_weights_that_no_kernel_reads_are_refused() -> None:
    weight = e4m3_weight(32, 64)
    for wrong in (Fp8Weight(weight.codes, weight.scale[:1]), Fp8Weight(weight.codes.float(), weight.scale)):
        with pytest.raises(InputError, match=r'o: FP8 weights of decode are .* with a scale a row .*"channel"'):
            pack_e4m3("o", wrong)
    with pytest.raises(InputError, match="in_features of 32"):
        pack_e4m3("o", e4m3_weight(32, 48))


@pytest.mark.parametrize("op", ["o", "gate_up"])
@pytest.mark.parametrize(("group_size", "k", "group_k"), [(32, 96, 32), (64, 192, 64), (128, 256, 128), (256, 320, 64)])
def test_int4_order(op: Projection, group_size: int, k: int, group_k: int) -> None:
    n = 32
    weight = int4_weight(n, k, group_size, zero_points=True)
    assert weight.zeros is not None
    packed = pack_int4(op, weight)
    assert packed.shape == (n // 16, k // group_k, unit_bytes(group_k, True))
    for tile, unit in itertools.product(range(n // 16), range(k // group_k)):
        found = packed[tile, unit].tolist()
        for g, half in itertools.product(range(8), range(2)):
            column = 16 * tile + g + 8 * half
            row = column // 2 + column % 2 * (n // 2) if op == "gate_up" else column
            group = unit * group_k // group_size
            scale = torch.tensor(found[8 * group_k :][4 * g + 2 * half :][:2], dtype=torch.uint8).view(torch.float16)
            assert scale == weight.scales[row, group]
            assert found[8 * group_k + 32 + 2 * g + half] == weight.zeros[row, group]
            for group32, t in itertools.product(range(group_k // 32), range(4)):
                lane_bytes = 8 if group_k == 32 else 16
                words = group32 // 2 * 512 + (4 * g + t) * lane_bytes + group32 % 2 * 8
                word = int.from_bytes(bytes(found[words + 4 * half :][:4]), "little")
                for i in range(4):
                    pair = word >> 4 * i & 0x000F000F
                    first = unit * group_k + 32 * group32 + 8 * t + 2 * i
                    assert [pair & 0xFFFF, pair >> 16] == weight.codes[row, first : first + 2].tolist()


@pytest.mark.parametrize("op", ["o", "gate_up", "lm_head"])
@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize("group_size", [*GROUP_SIZES, CHANNEL])
@pytest.mark.parametrize("k", [96, 512, 576, 1536])
def test_int4_unpacking_is_the_exact_inverse(k: int, group_size: int, zero_points: bool, op: Projection) -> None:
    weight = int4_weight(100 if op == "lm_head" else 96, k, group_size, zero_points)
    packed = pack_int4(op, weight)
    assert packed.is_contiguous()
    unpacked = unpack_int4(op, packed, len(weight.codes), group_size)
    for ours, original in ((unpacked.codes, weight.codes), (unpacked.scales, weight.scales)):
        assert torch.equal(ours, original)
    assert unpacked.zeros is weight.zeros is None or torch.equal(unpacked.zeros, weight.zeros)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("k", "group_size", "group_k"),
    [(4096, 128, 128), (4096, 256, 128), (14336, CHANNEL, 128), (576, 128, 64), (576, 32, 32), (96, CHANNEL, 32)],
)
def test_the_packed_group_divides_the_logical_one_and_k(k: int, group_size: int, group_k: int) -> None:
    assert packed_group(k, group_size) == group_k


@pytest.mark.parametrize("k", [576, 7392, 10944])
@pytest.mark.parametrize("groups", ["-g32", "-g64", "", "-g256", "-channel"])
def test_lengths_of_k_that_end_in_a_part_of_a_group(k: int, groups: str) -> None:
    """Each has a kernel at every batch that reads what is packed, and loses no code; a model of 7392 is refused."""
    precision = get_precision(f"int4{groups}")
    size = precision.group_size
    weight = round_to_nearest("down", torch.randn(1056, k, generator=torch.Generator().manual_seed(k)), size)
    packed = pack_int4("down", weight)
    assert torch.equal(unpack_int4("down", packed, 1056, size).dequantise(), weight.dequantise())
    for batch in (4, 8, 16, 32, 64):
        assert decode_gemm_spec("down", 1056, k, batch, precision, None, None).weight_shape == packed.shape
    if k % 64:
        with pytest.raises(
            ConfigError, match="intermediate_size 7392 is not supported; kernels exist for multiples of"
        ):
            replace(load_config("smollm2-135m"), intermediate_size=k)


def test_int4_weights_that_no_kernel_reads_are_refused() -> None:
    with pytest.raises(InputError, match="in_features of 32"):
        pack_int4("o", int4_weight(16, 48, 32, False))
    with pytest.raises(UnsupportedError, match="multiple of 32, not 48"):
        packed_group(48, CHANNEL)


@pytest.mark.parametrize("model", ["smollm2-135m", "llama-3.1-8b"])
def test_packed_shapes_are_what_the_kernels_read(model: str) -> None:
    config = load_config(model)
    plan, fp8 = make_plan(config, "bf16"), make_plan(config, "bf16-fp8-head8")
    for op in OPS:
        n, k = projections(config)[op]
        for decode_spec in fp8.decode[op].values():
            assert decode_spec.weight_shape == (n * k + 4 * n,)
        logical = torch.empty(n, k, dtype=torch.bfloat16, device="meta")
        for spec in plan.prefill[op].values():
            assert pack_prefill(op, logical).shape == (spec.n, spec.k)
        for decode_spec in plan.decode[op].values():
            assert pack_decode(op, logical).shape == decode_spec.weight_shape


@pytest.mark.parametrize(
    ("pack", "op", "shape", "message"),
    [
        (pack_decode, "o", (24, 64), "out_features must be a positive multiple of 16"),
        (pack_decode, "o", (64, 48), "in_features of 32"),
        (pack_decode, "lm_head", (0, 64), "positive"),
        (pack_prefill, "gate_up", (96, 64), "multiple of 64"),
        (pack_prefill, "down", (32, 12), "in_features of 8"),
        (pack_prefill, "down", (32, 8, 8), "must be"),
    ],
)
def test_shapes_that_no_kernel_reads_are_refused(
    pack: Callable[[Projection, Tensor], Tensor], op: Projection, shape: tuple[int, ...], message: str
) -> None:
    with pytest.raises(InputError, match=rf"{op}: .*{message}"):
        pack(op, torch.zeros(shape))


@pytest.mark.compile
@pytest.mark.parametrize(("n", "k", "m"), [(16, 32, 8), (48, 96, 16), (64, 576, 64)])
def test_fragments_against_cute(with_cute: Callable[[str], Path], tmp_path: Path, n: int, k: int, m: int) -> None:
    """Packed weights, the kernel's fragment arithmetic and CuTe's MMA layouts together are x W^T, exactly."""
    generator = torch.Generator().manual_seed(n + k + m)
    weight = torch.randint(-8, 9, (n, k), generator=generator).bfloat16()
    x = torch.randint(-8, 9, (m, k), generator=generator).bfloat16()
    files = [tmp_path / name for name in ("weight", "x", "out")]
    for file, tensor in zip(files, (pack_decode("o", weight), x), strict=False):
        file.write_bytes(tensor.view(torch.int16).numpy().tobytes())
    subprocess.run([with_cute("fragments"), "bf16", str(n), str(k), str(m), *files], check=True)
    out = torch.frombuffer(bytearray(files[2].read_bytes()), dtype=torch.float32).view(m, n)
    assert torch.equal(out, x.float() @ weight.float().T)


@pytest.mark.compile
@pytest.mark.parametrize("k", [32, 576])
def test_e4m3_fragments_against_cute(with_cute: Callable[[str], Path], tmp_path: Path, k: int) -> None:
    """The same of E4M3, every code: what operands and scales are worth; sums are those of float32."""
    n, m = 48, 8
    weight = e4m3_weight(n, k)
    x = torch.randint(-8, 9, (m, k), generator=torch.Generator().manual_seed(k)).bfloat16()
    files = [tmp_path / name for name in ("weight", "x", "out")]
    files[0].write_bytes(pack_e4m3("o", weight).numpy().tobytes())
    files[1].write_bytes(x.view(torch.int16).numpy().tobytes())
    subprocess.run([with_cute("fragments"), "e4m3", str(n), str(k), str(m), *files], check=True)
    out = torch.frombuffer(bytearray(files[2].read_bytes()), dtype=torch.float32).view(m, n)
    dequantised = weight.codes.double() * weight.scale[:, None]
    limit = (x.double().abs() @ dequantised.abs().T) * (k + 4) * 2.0**-24
    assert ((out - x.double() @ dequantised.T).abs() <= limit).all()


@pytest.mark.compile
@pytest.mark.parametrize(
    ("group_size", "zero_points", "k"), [(32, False, 96), (64, True, 576), (CHANNEL, False, 256), (256, True, 512)]
)
def test_int4_fragments_against_cute(
    with_cute: Callable[[str], Path], tmp_path: Path, k: int, group_size: int, zero_points: bool
) -> None:
    """The same of INT4: codes, scales and zero points of every unit, exactly."""
    n, m = 48, 8
    weight = int4_weight(n, k, group_size, zero_points)
    x = torch.randint(-8, 9, (m, k), generator=torch.Generator().manual_seed(k)).bfloat16()
    files = [tmp_path / name for name in ("weight", "x", "out")]
    files[0].write_bytes(pack_int4("o", weight).numpy().tobytes())
    files[1].write_bytes(x.view(torch.int16).numpy().tobytes())
    kind = f"int4-{packed_group(k, group_size)}{'z' * zero_points}"
    subprocess.run([with_cute("fragments"), kind, str(n), str(k), str(m), *files], check=True)
    out = torch.frombuffer(bytearray(files[2].read_bytes()), dtype=torch.float32).view(m, n)
    assert torch.equal(out, x.float() @ weight.dequantise().T)


@pytest.mark.compile
def test_operands_of_wgmma_against_cute(with_cute: Callable[[str], Path]) -> None:
    ran = subprocess.run([with_cute("wgmma_operands")], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout
    assert ran.stdout.count(": 0 mismatches") == 4


@pytest.mark.compile
def test_accumulators_against_cute(with_cute: Callable[[str], Path]) -> None:
    """Prefill's store order rests on this: columns 8 j + 2 t + {0, 1} of a quad's lane t, rows eight apart."""
    ran = subprocess.run([with_cute("accumulators")], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout
    assert ran.stdout.count(" 0 mismatches") == 16
