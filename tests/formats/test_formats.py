"""Quantised checkpoints: codes and scales exactly as they were written, and one clear error for what is not read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from futransformer.checkpoint import Checkpoint, fold_gain, load_checkpoint, pair_order, projections_of
from futransformer.formats import METHODS, read_format
from futransformer.formats.codes import GroupedCodes, Groups, ScaledCodes, groups_of_columns, nibbles, words
from futransformer.generator.config import load_config
from futransformer.generator.errors import CheckpointError, ConfigError, UnsupportedError
from futransformer.generator.json_reader import JsonReader
from futransformer.quantize.fp8 import quantize_weight
from tests.formats.writers import KINDS, Drawn, Kind, draw, edit, packed_section, quantise, set_config, with_section

Q = "model.layers.0.self_attn.q_proj"
DOWN = "model.layers.1.mlp.down_proj"


def opened(folder: Path) -> Checkpoint:
    return load_checkpoint(folder, load_config(folder))


@pytest.fixture
def written(tiny_base_model: Path, tmp_path: Path) -> Callable[[Kind], tuple[Path, dict[str, Drawn]]]:
    def write(kind: Kind) -> tuple[Path, dict[str, Drawn]]:
        return tmp_path / "quantised", quantise(tiny_base_model, tmp_path / "quantised", kind)

    return write


Written = Callable[[Kind], tuple[Path, dict[str, Drawn]]]


def test_words_are_the_inverse_of_nibbles() -> None:
    codes = torch.randint(16, (3, 5, 24), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    assert torch.equal(nibbles(words(codes)), codes)
    assert nibbles(torch.tensor([-2023406815], dtype=torch.int32)).tolist() == [1, 2, 3, 4, 5, 6, 7, 8]  # 0x87654321


@pytest.mark.parametrize("name", KINDS)
def test_weights_are_those_of_the_definition(name: str, written: Written) -> None:
    """Dequantised bit for bit; folded and in our row order as any other checkpoint's."""
    folder, drawn = written(KINDS[name])
    checkpoint = opened(folder)
    for module, weight in drawn.items():
        assert torch.equal(checkpoint.projection(module).double(), weight.weight())
    head_dim = checkpoint.config.head_dim
    for index in range(2):
        q, k, v, o, gate, up, down = (drawn[module].weight().float() for module in projections_of(index))
        first, second = checkpoint.norm_gains()[2 * index : 2 * index + 2]
        layer = checkpoint.layer(index)
        rows = [fold_gain(weight, first) for weight in (pair_order(q, head_dim), pair_order(k, head_dim), v)]
        assert torch.equal(layer.qkv, torch.cat(rows))
        assert torch.equal(layer.gate_up, torch.cat([fold_gain(gate, second), fold_gain(up, second)]))
        assert torch.equal(layer.o, o.bfloat16())
        assert torch.equal(layer.down, down.bfloat16())


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.precision])
def test_codes_and_scales_stay_as_they_are(name: str, written: Written) -> None:
    kind = KINDS[name]
    folder, drawn = written(kind)
    checkpoint = opened(folder)
    checkpoint.check_codes()
    for index in range(2):
        layer = checkpoint.codes(index)
        modules = dict(zip(("q", "k", "v", "o", "gate", "up", "down"), projections_of(index), strict=True))
        for parts, weight in (
            ("qkv", layer.qkv),
            ("o", layer.o),
            (("gate", "up"), layer.gate_up),
            (("down",), layer.down),
        ):

            def expected(field: str, parts: Any = parts, modules: Any = modules) -> Tensor:
                rows = [(part, getattr(drawn[modules[part]], field)) for part in parts]
                return torch.cat([pair_order(x, checkpoint.config.head_dim) if p in "qk" else x for p, x in rows])

            assert torch.equal(weight.codes.long(), expected("codes"))
            assert weight.scales.dtype == torch.float16
            assert torch.equal(weight.scales.float(), expected("scales").float())
            assert weight.group_size == kind.group
            if kind.symmetric:
                assert weight.zeros is None
            else:
                assert weight.zeros is not None
                assert torch.equal(weight.zeros.long(), expected("zeros"))


@pytest.mark.parametrize("name", ["gptq-act-order", "packed-act-order"])
def test_act_order_keeps_no_codes(name: str, written: Written) -> None:
    folder, _ = written(KINDS[name])
    with pytest.raises(UnsupportedError, match=f'{Q} has act-order.*precision "bf16" decodes through its dequantised'):
        opened(folder).codes(0)


def test_scales_that_float16_does_not_hold(written: Written) -> None:
    folder, _ = written(KINDS["packed"])

    def shrink(weights: dict[str, Tensor]) -> None:
        weights[f"{Q}.weight_scale"][3, 0] = 1.0078125 * 2.0**-20  # eight bits, of which float16 has five left
        weights[f"{DOWN}.weight_scale"][3, 0] = 2.0**17

    edit(folder, shrink)
    checkpoint = opened(folder)
    for index, module in ((0, Q), (1, DOWN)):
        with pytest.raises(UnsupportedError, match=f"{module} has 1 scales that float16 does not hold"):
            checkpoint.codes(index)
        assert checkpoint.projection(module).isfinite().all()


@pytest.mark.parametrize("scale", [float("nan"), float("inf")])
def test_scales_that_are_not_finite(written: Written, scale: float) -> None:
    folder, _ = written(KINDS["packed"])
    edit(folder, put(f"{Q}.weight_scale", lambda x: x.fill_(scale)))
    with pytest.raises(CheckpointError, match=f"{Q} has scales that are not finite; fetch the checkpoint again"):
        opened(folder).codes(0)


def test_a_layer_that_is_not_quantised(written: Written) -> None:
    """Read as it is; but kernels of one kind of weight cannot keep both."""
    folder, drawn = written(KINDS["packed"])
    plain = torch.randn(128, 192).bfloat16()

    def replace(weights: dict[str, Tensor]) -> None:
        for name in [name for name in weights if name.startswith(DOWN)]:
            del weights[name]
        weights[f"{DOWN}.weight"] = plain

    edit(folder, replace)
    checkpoint = opened(folder)
    assert torch.equal(checkpoint.layer(1).down, plain)
    assert torch.equal(checkpoint.projection(Q).double(), drawn[Q].weight())
    with pytest.raises(UnsupportedError, match=f"{DOWN} is not quantised, as others are"):
        checkpoint.check_codes()


# FP8

FP8_SCALES: dict[str, tuple[dict[str, Any], str, Callable[[int, int], tuple[int, ...]]]] = {
    "tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, "weight_scale", lambda _n, _k: ()),
    "one": ({"quant_method": "fp8", "activation_scheme": "dynamic"}, "weight_scale", lambda _n, _k: (1,)),
    "blocks": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        "weight_scale_inv",
        lambda n, k: (-(-n // 128), -(-k // 128)),
    ),
    "rows": (
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {
                "group_0": {
                    "targets": [r"re:.*_proj$"],
                    "weights": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"},
                    "input_activations": {"num_bits": 8, "type": "float", "dynamic": True},
                }
            },
            "ignore": ["lm_head"],
        },
        "weight_scale",
        lambda n, _k: (n, 1),
    ),
}


@pytest.mark.parametrize("name", FP8_SCALES)
def test_fp8_weights_are_codes_times_scales(name: str, written: Written) -> None:
    section, scale, shape_of = FP8_SCALES[name]
    generator = torch.Generator().manual_seed(3)
    expected: dict[str, Tensor] = {}

    def write(module: str, drawn: Drawn) -> dict[str, Tensor]:
        n, k = drawn.codes.shape
        codes = (torch.randn(n, k, generator=generator) * 64).to(torch.float8_e4m3fn)
        scales = (torch.rand(shape_of(n, k), generator=generator) * 2**-8).bfloat16()
        each = [
            [
                float(scales[i // 128, j // 128] if name == "blocks" else scales.flatten()[i * (name == "rows")])
                for j in range(k)
            ]
            for i in range(n)
        ]
        expected[module] = codes.double() * torch.tensor(each, dtype=torch.float64)
        more = {f"{module}.input_scale": torch.ones(1)} if name in ("tensor", "rows") else {}
        return {f"{module}.weight": codes, f"{module}.{scale}": scales, **more}

    folder, _ = written(Kind(section, write, 128, True))
    checkpoint = opened(folder)
    assert checkpoint.groups is None
    for module, weight in expected.items():
        assert torch.equal(checkpoint.projection(module).double(), weight)
    assert torch.equal(checkpoint.layer(1).down, expected[DOWN].bfloat16())


def test_fp8_codes_that_no_gain_multiplies_survive(written: Written) -> None:
    """A scale a tensor, the largest code used: an FP8 prefill makes those codes of the dequantised weight."""
    codes: dict[str, Tensor] = {}

    def write(module: str, drawn: Drawn) -> dict[str, Tensor]:
        codes[module] = (torch.randn(drawn.codes.shape, generator=generator) * 64).to(torch.float8_e4m3fn)
        codes[module][0, 0] = 448
        return {f"{module}.weight": codes[module], f"{module}.weight_scale": torch.tensor([0.00123])}

    generator = torch.Generator().manual_seed(3)
    folder, _ = written(Kind(FP8_SCALES["one"][0], write, 128, True))
    again = quantize_weight("down", opened(folder).layer(1).down, "tensor")
    assert torch.equal(again.codes.float(), codes[DOWN].float())


# Refusals


def change(name: str, key: str, to: Any) -> tuple[str, Callable[[Kind], Kind]]:
    return name, lambda kind: with_section(kind, **{key: to})


def nested(key: str, to: Any, **section: Any) -> Callable[[Kind], Kind]:
    def of(kind: Kind) -> Kind:
        group = packed_section(128, symmetric=True)["config_groups"]["group_0"]
        if key in ("input_activations", "targets"):
            group[key] = to
        else:
            group["weights"][key] = to
        return with_section(kind, config_groups={"group_0": group}, **section)

    return of


@pytest.mark.parametrize(
    ("name", "of", "words"),
    [
        (*change("gptq-v1", "quant_method", "hqq"), "hqq checkpoints are not supported; supported: gptq, awq"),
        (*change("gptq-v1", "bits", 3), "quantization_config.bits is 3"),
        (*change("gptq-v1", "checkpoint_format", "marlin"), "checkpoint_format is 'marlin'; supported: gptq, gptq_v2"),
        (*change("gptq-v1", "is_marlin_format", True), "is_marlin_format is not supported"),
        (*change("gptq-v1", "dynamic", {"-:.*down.*": {}}), "dynamic is not supported"),
        (*change("gptq-v1", "sym", None), "sym is missing"),
        (*change("gptq-v1", "group_size", 0), "group_size is 0"),
        (*change("awq", "version", "gemv"), "version is 'gemv'; supported: gemm"),
        (*change("awq", "zero_point", False), "zero_point must be true"),
        (*change("awq", "bits", 8), "bits is 8"),
        (*change("packed", "format", "marlin-24"), "format is 'marlin-24'; supported: pack-quantized"),
        (*change("packed", "sparsity_config", {"format": "sparse-24-bitmask"}), "sparsity_config is not supported"),
        (*change("packed", "transform_config", {"config_groups": {}}), "transform_config is not supported"),
        (*change("packed", "config_groups", {}), "config_groups is missing"),
        ("packed", nested("num_bits", 8), "weights.num_bits and type are 8, 'int'"),
        ("packed", nested("strategy", "tensor_group"), "strategy is 'tensor_group'"),
        ("packed", nested("actorder", "sideways"), "actorder is 'sideways'"),
        ("packed", nested("targets", ["re:["]), 'group_0.targets holds "[" after re:, which is no pattern'),
        ("packed", nested("targets", ["re:a{99999999999999999999}"]), "which is no pattern: the repetition number"),
        ("packed", nested("targets", ["re:" + "(" * 5000 + ")" * 5000]), "which is no pattern: maximum"),
        ("packed", nested("input_activations", {"num_bits": 8}), "input_activations are not supported"),
    ],
)
def test_what_is_not_read_is_refused_by_name(
    name: str, of: Callable[[Kind], Kind], words: str, written: Written
) -> None:
    folder, _ = written(of(KINDS[name]))
    with pytest.raises((ConfigError, UnsupportedError)) as refusal:
        opened(folder)
    assert words in str(refusal.value)
    assert str(folder / "config.json") in str(refusal.value)


@pytest.mark.parametrize("size", [256, 2**62, 10**30])
def test_groups_and_blocks_beyond_a_weight_are_one_group_and_one_block(size: int) -> None:
    """And take no more memory than the weight: a scale is repeated as often as there are rows."""
    codes = torch.arange(16, dtype=torch.uint8).view(2, 8)
    scales = torch.tensor([[0.5], [2.0]])
    assert torch.equal(GroupedCodes("x", codes, scales, None, size).dequantise(), (codes.float() - 8) * scales)
    assert groups_of_columns("x", torch.zeros(8), Groups(size, zero_points=False)) is None
    e4m3 = codes.float().to(torch.float8_e4m3fn)
    assert torch.equal(ScaledCodes(e4m3, scales[1:], (size, size)).dequantise(), codes.float() * 2)


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_rows_that_fill_no_whole_words_of_zero_points_are_refused(method: str) -> None:
    section = {"bits": 4, "group_size": 32, "sym": False, "version": "gemm", "zero_point": True}
    parse = METHODS[method](JsonReader(Path("config.json"), section))
    with pytest.raises(UnsupportedError, match=r"lm_head has 20 rows, .* multiples of 8"):
        parse.tensors("lm_head", (20, 64), NoTensors())


class NoTensors:
    """A checkpoint of nothing."""

    def __contains__(self, name: str) -> bool:
        return False

    def type_of(self, name: str) -> str:
        raise KeyError(name)

    def read(self, name: str) -> Tensor:
        raise KeyError(name)


def without(name: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda weights: weights.__delitem__(name)


def put(name: str, make: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    return lambda weights: weights.update({name: make(weights[name]).contiguous()})


def bias(value: float) -> Callable[[dict[str, Tensor]], None]:
    return lambda weights: weights.update({f"{Q}.bias": torch.full((256,), value)})


@pytest.mark.parametrize(
    ("name", "damage", "words"),
    [
        ("gptq-act-order", without(f"{Q}.g_idx"), f"{Q}.g_idx is missing"),
        ("gptq-v1", without(f"{Q}.scales"), f"{Q}.scales is missing"),
        ("gptq-v1", without(f"{Q}.qweight"), f"{Q}.qweight is missing"),
        (
            "gptq-v1",
            put(f"{Q}.qweight", lambda x: x[1:]),
            f"{Q}.qweight has shape [15, 256], the config asks for [16, 256]",
        ),
        ("gptq-v1", put(f"{Q}.qzeros", lambda x: x[:, 1:]), f"{Q}.qzeros has shape [1, 31]"),
        ("gptq-v1", put(f"{Q}.qweight", Tensor.long), f"{Q}.qweight is stored as I64; supported: I32"),
        ("gptq-v1", put(f"{Q}.qzeros", lambda x: x - 1), f"{Q}.qzeros holds zero points other than 8"),
        ("gptq-v1-asym", put(f"{Q}.qzeros", lambda x: x | 15), f"{Q}.qzeros stores 15 in version 1"),
        ("gptq-v1", put(f"{Q}.g_idx", lambda x: x + 1), f"{Q}.g_idx names groups 1 to 1, and there are 1"),
        ("gptq-v1", bias(0.5), f"{Q}.bias is not zero"),
        (
            "awq",
            put(f"{DOWN}.scales", lambda x: x[1:]),
            f"{DOWN}.scales has shape [2, 128], the config asks for [3, 128]",
        ),
        ("packed", without(f"{DOWN}.weight_shape"), f"{DOWN}.weight_shape is missing"),
        ("packed", put(f"{DOWN}.weight_shape", lambda x: x + 1), f"{DOWN}.weight_shape is [129, 193]"),
        ("packed-asym", without(f"{DOWN}.weight_zero_point"), f"{DOWN}.weight_zero_point is missing"),
        ("packed-act-order", without(f"{DOWN}.weight_g_idx"), f"{DOWN}.weight_g_idx is missing"),
        ("packed", lambda weights: weights.update({f"{DOWN}.weight_thing": torch.ones(1)}), "is not a tensor of this"),
    ],
)
def test_damaged_checkpoints(
    name: str, damage: Callable[[dict[str, Tensor]], None], words: str, written: Written
) -> None:
    folder, _ = written(KINDS[name])
    edit(folder, damage)
    with pytest.raises(CheckpointError) as refusal:
        read_all(folder)
    assert words in str(refusal.value)


def read_all(folder: Path) -> None:
    checkpoint = opened(folder)
    for index in range(2):
        checkpoint.layer(index)


def test_a_truncated_file(written: Written) -> None:
    folder, _ = written(KINDS["awq"])
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged: it ends at byte"):
        opened(folder)


def test_biases_of_zeros_change_nothing(written: Written) -> None:
    folder, drawn = written(KINDS["gptq-v1"])
    edit(folder, bias(0.0))
    assert torch.equal(opened(folder).projection(Q).double(), drawn[Q].weight())


def test_patterns_choose_a_scheme(written: Written) -> None:
    """Two groups of config_groups: attention in groups of 128, the MLP in groups of 32."""
    section = packed_section(128, symmetric=True)
    small = packed_section(32, symmetric=True)["config_groups"]["group_0"]
    section["config_groups"] = {
        "attention": {**section["config_groups"]["group_0"], "targets": [r"re:.*self_attn\..*"]},
        "mlp": {**small, "targets": [r"re:.*mlp\.(gate|up|down)_proj"]},
    }
    again: dict[str, Drawn] = {}

    def write(module: str, drawn: Drawn) -> dict[str, Tensor]:
        n, k = drawn.codes.shape
        again[module] = draw(9, (n, k), 32 if "mlp" in module else 128, symmetric=True)
        return KINDS["packed"].write(module, again[module])

    folder, _ = written(Kind(section, write, 128, True))
    checkpoint = opened(folder)
    for module, drawn in again.items():
        assert torch.equal(checkpoint.projection(module).double(), drawn.weight())
    assert checkpoint.groups is None


def absent(*keys: str, **weights: Any) -> dict[str, Any]:
    """config_groups whose weights lack these keys."""
    group = packed_section(128, symmetric=True)["config_groups"]["group_0"]
    group["weights"] = {key: value for key, value in (group["weights"] | weights).items() if key not in keys}
    return {"group_0": group}


def test_what_compressed_tensors_leaves_out_is_its_default(written: Written) -> None:
    """Symmetric; of FP8 a scale a tensor."""
    folder, drawn = written(with_section(KINDS["packed"], config_groups=absent("symmetric", "strategy")))
    assert torch.equal(opened(folder).projection(Q).double(), drawn[Q].weight())
    fp8 = {"num_bits": 8, "type": "float"}
    set_config(
        folder,
        quantization_config={
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": absent("strategy", "group_size", **fp8),
        },
    )
    stored_as = read_format(folder)
    assert stored_as is not None
    assert stored_as.title == "compressed-tensors (FP8)"


def test_the_older_key_is_read(written: Written) -> None:
    folder, drawn = written(KINDS["packed"])
    section = {key: value for key, value in KINDS["packed"].section.items() if key != "quant_method"}
    set_config(folder, quantization_config=None, compression_config=section)
    assert torch.equal(opened(folder).projection(Q).double(), drawn[Q].weight())
