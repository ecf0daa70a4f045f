"""Checkpoints: the logical weights against their formulas, and one clear error for every damaged folder."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig as HuggingFaceConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from futransformer.checkpoint import expected_shapes, fold_gain, load_checkpoint, pair_order, rope_table
from futransformer.generator.config import CONFIGS, LlamaConfig, inverse_frequencies
from futransformer.generator.errors import CheckpointError

TINY = LlamaConfig(
    name="tiny",
    hidden_size=128,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    vocab_size=96,
    max_position_embeddings=256,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
)
TIED = replace(TINY, tie_word_embeddings=True)
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
LAST = "model.layers.1.mlp.down_proj.weight"


def random_weights(config: LlamaConfig, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {
        name: (torch.randn(shape, generator=generator) + (len(shape) == 1)).to(dtype)
        for name, shape in expected_shapes(config).items()
    }


def write_single(folder: Path, weights: dict[str, Tensor]) -> Path:
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_shards(folder: Path, weights: dict[str, Tensor]) -> Path:
    """Two shards, in turn."""
    names = sorted(weights)
    weight_map = {name: SHARDS[i % 2] for i, name in enumerate(names)}
    for shard in SHARDS:
        save_file({name: weights[name] for name in names if weight_map[name] == shard}, folder / shard)
    write_index(folder, weight_map)
    return folder


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def read_index(folder: Path) -> dict[str, str]:
    weight_map: dict[str, str] = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    return weight_map


def refused(folder: Path, *words: str, config: LlamaConfig = TINY) -> None:
    """Opening alone must fail, before anything is converted, in one message that holds all these words."""
    with pytest.raises(CheckpointError) as refusal:
        load_checkpoint(folder, config)
    for word in words:
        assert word in str(refusal.value)


# ---- logical weights


def folded(weight: Tensor, gain: Tensor) -> Tensor:
    """The definition: the float32 product, rounded once (float64 holds these products exactly or rounds to float32)."""
    return (weight.double() * gain.double()).float().bfloat16()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_logical_weights_follow_their_definition(tmp_path: Path, dtype: torch.dtype) -> None:
    weights = random_weights(TINY, dtype)
    checkpoint = load_checkpoint(write_single(tmp_path, weights), TINY)
    heads, kv_heads, dim = TINY.num_attention_heads, TINY.num_key_value_heads, TINY.head_dim
    natural = [i // 2 + dim // 2 * (i % 2) for i in range(dim)]  # of each stored feature of a head
    for index in range(TINY.num_hidden_layers):
        prefix = f"model.layers.{index}"
        layer = checkpoint.layer(index)
        gain = weights[f"{prefix}.input_layernorm.weight"]
        q, k, v = (folded(weights[f"{prefix}.self_attn.{name}_proj.weight"], gain) for name in "qkv")
        rows = [q[head * dim + i] for head in range(heads) for i in natural]
        rows += [k[head * dim + i] for head in range(kv_heads) for i in natural]
        assert torch.equal(layer.qkv, torch.stack([*rows, *v]))
        gain = weights[f"{prefix}.post_attention_layernorm.weight"]
        gate, up = (folded(weights[f"{prefix}.mlp.{name}_proj.weight"], gain) for name in ("gate", "up"))
        assert torch.equal(layer.gate_up, torch.stack([*gate, *up]))
        assert torch.equal(layer.o, weights[f"{prefix}.self_attn.o_proj.weight"].bfloat16())
        assert torch.equal(layer.down, weights[f"{prefix}.mlp.down_proj.weight"].bfloat16())
    assert torch.equal(checkpoint.embedding(), weights["model.embed_tokens.weight"].bfloat16())
    assert torch.equal(checkpoint.lm_head(), folded(weights["lm_head.weight"], weights["model.norm.weight"]))
    everything = [layer.qkv, layer.o, layer.gate_up, layer.down, checkpoint.embedding(), checkpoint.lm_head()]
    assert all(tensor.dtype == torch.bfloat16 and tensor.is_contiguous() for tensor in everything)


def test_the_product_is_rounded_once() -> None:
    weight, gain = torch.tensor([[1 + 2**-8]]), torch.tensor([1 + 2**-8])
    assert fold_gain(weight, gain).item() == 1 + 2**-7  # rounding the factors first would give 1
    assert (weight.bfloat16() * gain.bfloat16()).item() == 1


def test_pair_order_keeps_each_rope_pair_side_by_side() -> None:
    rows = torch.arange(2 * 64).view(128, 1)
    ordered = pair_order(rows, 64).flatten().tolist()
    assert ordered[:6] == [0, 32, 1, 33, 2, 34]
    assert ordered[64:68] == [64, 96, 65, 97]
    assert sorted(ordered) == list(range(128))


def test_rope_in_pair_order_gives_the_attention_scores_of_hugging_face(tmp_path: Path) -> None:
    """q k^T of transformers' rotation in natural order equals ours in pair order with our table."""
    positions, dim = 200, TINY.head_dim
    table = rope_table(TINY, positions).double()
    q, k = torch.randn(2, positions, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def rotate_pairs(x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(pair_order(x.T, dim).T.reshape(positions, dim // 2, 2).contiguous())
        return torch.view_as_real(pairs * torch.view_as_complex(table)).flatten(1)

    angles = torch.cat((table, table), dim=1)
    expected_q, expected_k = apply_rotary_pos_emb(
        q[None, None], k[None, None], angles[None, ..., 0], angles[None, ..., 1]
    )
    scores = rotate_pairs(q) @ rotate_pairs(k).T
    assert torch.allclose(scores, (expected_q @ expected_k.transpose(-1, -2))[0, 0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["smollm2-135m", "llama-3.1-8b", "llama-3.2-1b"])
def test_rope_table_agrees_with_transformers(name: str) -> None:
    config = CONFIGS[name]
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling is not None:
        rope |= {"rope_type": "llama3", **vars(config.rope_scaling)}
    embedding = LlamaRotaryEmbedding(
        HuggingFaceConfig(
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters=rope,
        )
    )
    # Transformers multiplies in float32: its angles are off by up to position x 2^-23.
    positions = 4096
    cos, sin = embedding(torch.zeros(1), torch.arange(positions)[None])
    table = rope_table(config, positions)
    assert table.dtype == torch.float32
    assert table.shape == (positions, config.head_dim // 2, 2)
    bound = torch.arange(positions)[:, None] * 2.0**-22 + 2.0**-22
    assert ((table[..., 0] - cos[0, :, : config.head_dim // 2]).abs() <= bound).all()
    assert ((table[..., 1] - sin[0, :, : config.head_dim // 2]).abs() <= bound).all()


def test_the_rope_table_is_exact_far_out() -> None:
    """At position 131071 a float32 angle would be off by up to 2^-8."""
    config = CONFIGS["llama-3.1-8b"]
    row = rope_table(config, 131072)[-1].double()
    for (cos, sin), frequency in zip(row.tolist(), inverse_frequencies(config), strict=True):
        assert abs(cos - math.cos(131071 * frequency)) <= 2.0**-25
        assert abs(sin - math.sin(131071 * frequency)) <= 2.0**-25


def test_shards_read_as_one_file_does(tmp_path: Path) -> None:
    weights = random_weights(TINY)
    (tmp_path / "one").mkdir()
    (tmp_path / "a b").mkdir()
    one = load_checkpoint(write_single(tmp_path / "one", weights), TINY)
    two = load_checkpoint(str(write_shards(tmp_path / "a b", weights)), TINY)
    for index in range(TINY.num_hidden_layers):
        for name, tensor in vars(one.layer(index)).items():
            assert torch.equal(tensor, getattr(two.layer(index), name))
    assert torch.equal(one.lm_head(), two.lm_head())
    assert torch.equal(one.embedding(), two.embedding())


def test_tied_embeddings_with_and_without_a_stored_head(tmp_path: Path) -> None:
    weights = random_weights(TIED)
    del weights["lm_head.weight"]
    expected = folded(weights["model.embed_tokens.weight"], weights["model.norm.weight"])
    without_head = load_checkpoint(write_single(tmp_path, weights), TIED)
    assert torch.equal(without_head.lm_head(), expected)
    assert torch.equal(without_head.embedding(), weights["model.embed_tokens.weight"])  # the gain is in the head alone

    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    assert torch.equal(load_checkpoint(write_single(tmp_path, weights), TIED).lm_head(), expected)

    weights["lm_head.weight"][5, 7] += 1
    checkpoint = load_checkpoint(write_single(tmp_path, weights), TIED)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        checkpoint.lm_head()


def test_old_rope_frequencies_are_passed_over(tmp_path: Path) -> None:
    weights = random_weights(TINY)
    frequencies = "model.layers.0.self_attn.rotary_emb.inv_freq"
    weights[frequencies] = torch.zeros(32)
    load_checkpoint(write_single(tmp_path, weights), TINY)
    (tmp_path / "model.safetensors").unlink()
    write_shards(tmp_path, weights)
    index = read_index(tmp_path)
    del index[frequencies]
    write_index(tmp_path, index)
    load_checkpoint(tmp_path, TINY)


# ---- damaged and foreign folders


def test_a_missing_head_without_tying(tmp_path: Path) -> None:
    weights = random_weights(TINY)
    del weights["lm_head.weight"]
    refused(write_single(tmp_path, weights), "lm_head.weight is missing", '"tie_word_embeddings": true')


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", LAST, "model.norm.weight"])
def test_a_missing_tensor(tmp_path: Path, name: str) -> None:
    weights = random_weights(TINY)
    del weights[name]
    refused(write_single(tmp_path, weights), str(tmp_path), f"{name} is missing")


@pytest.mark.parametrize(
    "name",
    ["model.layers.0.self_attn.q_proj.bias", "model.layers.2.mlp.up_proj.weight", "model.layers.0.q_norm.weight"],
)
def test_an_unexpected_tensor(tmp_path: Path, name: str) -> None:
    weights = {**random_weights(TINY), name: torch.zeros(128)}
    refused(write_single(tmp_path, weights), f"{name} is not a tensor of this config")


def test_a_wrong_shape(tmp_path: Path) -> None:
    weights = random_weights(TINY)
    weights[LAST] = weights[LAST].T.contiguous()
    refused(write_single(tmp_path, weights), LAST, "has shape [192, 128], the config asks for [128, 192]")


def test_another_models_weights(tmp_path: Path) -> None:
    grouped = replace(TINY, num_key_value_heads=1)
    folder = write_single(tmp_path, random_weights(TINY))
    refused(folder, "model.layers.0.self_attn.k_proj.weight", "[128, 128]", "[64, 128]", config=grouped)


def test_a_wrong_type(tmp_path: Path) -> None:
    weights = random_weights(TINY)
    weights[LAST] = weights[LAST].to(torch.float8_e4m3fn)
    refused(write_single(tmp_path, weights), f"{LAST} is stored as F8_E4M3", "BF16, F16, F32")


def test_a_truncated_file_names_the_first_tensor_that_is_cut(tmp_path: Path) -> None:
    path = write_single(tmp_path, random_weights(TINY)) / "model.safetensors"
    content = path.read_bytes()
    header_size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + header_size])
    for name in (LAST, "model.layers.0.self_attn.v_proj.weight"):
        begin, end = header[name]["data_offsets"]
        for cut in (begin, end - 1):
            path.write_bytes(content[: 8 + header_size + cut])
            refused(tmp_path, str(path), "is damaged", f"{name} at byte {8 + header_size + end}", "fetch it again")


@pytest.mark.parametrize("length", [0, 5, 8, 100])
def test_a_file_cut_within_its_header(tmp_path: Path, length: int) -> None:
    path = write_single(tmp_path, random_weights(TINY)) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:length])
    refused(tmp_path, str(path), "is damaged", "fetch it again")


@pytest.mark.parametrize("header", [b"[" * 100_000, b'{"a":' * 100_000])
def test_a_header_that_is_nested_without_end(tmp_path: Path, header: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    refused(tmp_path, "model.safetensors is damaged", "fetch it again")


def test_a_file_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"<!DOCTYPE html><html>not found</html>" * 40)
    refused(tmp_path, "model.safetensors is damaged")


def test_a_git_lfs_pointer(tmp_path: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 269060552\n"
    (tmp_path / "model.safetensors").write_text(pointer)
    refused(tmp_path, "model.safetensors is a git-LFS pointer", "git lfs pull")
    (tmp_path / "model.safetensors").unlink()
    write_shards(tmp_path, random_weights(TINY))
    (tmp_path / SHARDS[1]).write_text(pointer)
    refused(tmp_path, f"{SHARDS[1]} is a git-LFS pointer")


def test_a_missing_shard(tmp_path: Path) -> None:
    write_shards(tmp_path, random_weights(TINY))
    (tmp_path / SHARDS[1]).unlink()
    promised = next(name for name, shard in read_index(tmp_path).items() if shard == SHARDS[1])
    refused(tmp_path, f"{tmp_path / SHARDS[1]} is missing", promised, "fetch it again")


def test_a_truncated_shard(tmp_path: Path) -> None:
    write_shards(tmp_path, random_weights(TINY))
    os.truncate(tmp_path / SHARDS[0], (tmp_path / SHARDS[0]).stat().st_size - 1)
    refused(tmp_path, f"{SHARDS[0]} is damaged: it ends at byte")


def test_a_shard_that_lacks_what_the_index_promises(tmp_path: Path) -> None:
    write_shards(tmp_path, random_weights(TINY))
    index = read_index(tmp_path)
    index[LAST] = SHARDS[1 - SHARDS.index(index[LAST])]
    write_index(tmp_path, index)
    refused(tmp_path, f"{tmp_path / index[LAST]} lacks {LAST}", "index.json promises")


def test_an_index_that_forgets_a_tensor(tmp_path: Path) -> None:
    write_shards(tmp_path, random_weights(TINY))
    index = read_index(tmp_path)
    holder = index.pop(LAST)
    write_index(tmp_path, index)
    refused(tmp_path, f"{tmp_path / holder} holds {LAST}, which model.safetensors.index.json does not list")


def test_a_shard_that_holds_more_than_its_index_lists(tmp_path: Path) -> None:
    """A bias that nobody lists would be left out, and of two copies of a tensor one be chosen by chance."""
    bias = "model.layers.0.self_attn.q_proj.bias"
    write_shards(tmp_path, {**random_weights(TINY), bias: torch.ones(TINY.heads.q_features)})
    index = read_index(tmp_path)
    holder = index.pop(bias)
    write_index(tmp_path, index)
    refused(tmp_path, f"{tmp_path / holder} holds {bias}, which model.safetensors.index.json does not list")

    weights = random_weights(TINY)
    write_shards(tmp_path, weights)
    index = read_index(tmp_path)
    other = SHARDS[1 - SHARDS.index(index[LAST])]
    held = {name: weights[name] for name, shard in index.items() if shard == other}
    save_file({**held, LAST: torch.zeros_like(weights[LAST])}, tmp_path / other)
    refused(tmp_path, f"{tmp_path / other} holds {LAST}, which model.safetensors.index.json keeps in {index[LAST]}")


@pytest.mark.parametrize("shard", ["", "../elsewhere.safetensors", "/elsewhere.safetensors", "sub/model.safetensors"])
def test_an_index_that_leaves_the_folder(tmp_path: Path, shard: str) -> None:
    write_shards(tmp_path, random_weights(TINY))
    write_index(tmp_path, {**read_index(tmp_path), LAST: shard})
    refused(tmp_path, f"{LAST} lies in '{shard}'", "beside the index")


@pytest.mark.parametrize(
    "content", ['{"weight_map": {"a"', "[]", "{}", '{"weight_map": {"a": 1}}', '{"weight_map": []}']
)
def test_a_damaged_index(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    refused(tmp_path, "model.safetensors.index.json")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.Q4_K_M.gguf"])
def test_other_formats_are_never_opened(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"anything")
    refused(tmp_path, f"holds {name} but no model.safetensors", "save_pretrained")


def test_folders_without_weights(tmp_path: Path) -> None:
    refused(tmp_path, f"{tmp_path} holds neither model.safetensors nor model.safetensors.index.json")
    refused(tmp_path / "nowhere", "nowhere is not a folder")


def test_a_type_of_thousands_of_characters_makes_a_short_message(tmp_path: Path) -> None:
    header = json.dumps({"x": {"dtype": "B" * 5000, "shape": [0], "data_offsets": [0, 0]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(CheckpointError, match=r"is damaged: .*; fetch it again") as refusal:
        load_checkpoint(tmp_path, TINY)
    assert len(str(refusal.value)) < 1000
