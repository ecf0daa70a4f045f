"""Safetensors files and their index: a typed error, or the tensors that the bytes hold."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from futransformer.checkpoint import EMBEDDING, Checkpoint, expected_shapes, load_checkpoint
from futransformer.generator.config import LlamaConfig
from tests.fuzz.damage import damaged, edited, json_text, unless_refused

CONFIG = LlamaConfig(
    name="least",
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=1,
    num_key_value_heads=1,
    head_dim=64,
    vocab_size=24,
    max_position_embeddings=16,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
)
WEIGHTS = {
    name: torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    for name, shape in expected_shapes(CONFIG).items()
}
FILE = save(WEIGHTS)
HEADER_BYTES = struct.unpack("<Q", FILE[:8])[0]
HEADER: dict[str, Any] = json.loads(FILE[8 : 8 + HEADER_BYTES])
DATA = FILE[8 + HEADER_BYTES :]
LENGTHS = [0, 1, 24, 64, 128, 2**32, 2**63, 2**64 - 1]
SIZES = [0, 1, 7, 2**31, 2**32, 100_000_000, 100_000_001, 2**63 - 8, 2**63, 2**64 - 1]
TYPES = ["BF16", "F16", "F32", "F64", "BOOL", "U8", "I64", "F8_E4M3", "F8_E8M0", "F4", "F6_E2M3", "C64", "x"]
SHARDS = ("one.safetensors", "two.safetensors")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoint")


@st.composite
def lying_headers(draw: st.DrawFn) -> bytes:
    """A header whose types, shapes and offsets are others than the tensors', with a length of its own."""
    header = json.loads(json.dumps(HEADER))
    for name in draw(st.lists(st.sampled_from(list(header)), min_size=1, max_size=3)):
        entry, other = header[name], header[draw(st.sampled_from(list(header)))]
        match draw(st.sampled_from(("type", "shape", "offsets", "swap", "shift"))):
            case "type":
                entry["dtype"] = draw(st.sampled_from(TYPES))
            case "shape":
                entry["shape"] = draw(st.lists(st.sampled_from(LENGTHS), max_size=4))
            case "offsets":
                entry["data_offsets"] = draw(st.lists(st.sampled_from((0, 128, len(DATA), 2**63, 2**64)), max_size=3))
            case "swap":
                entry["data_offsets"], other["data_offsets"] = other["data_offsets"], entry["data_offsets"]
            case "shift":
                entry["data_offsets"] = [at + draw(st.sampled_from((-2, 2, 8192))) for at in entry["data_offsets"]]
    text = draw(st.just(json.dumps(header).encode()) | json_text(edited(header)))
    size = draw(st.just(len(text)) | st.sampled_from(SIZES))
    return struct.pack("<Q", size) + text + DATA


def assert_holds(checkpoint: Checkpoint, content: bytes) -> None:
    """Read all of it; the embedding and the last projection are the bytes that the header names, in BF16."""
    layer = checkpoint.layer(0)
    assert [list(t.shape) for t in (layer.qkv, layer.o, layer.gate_up, layer.down)] == [
        [192, 64],
        [64, 64],
        [128, 64],
        [64, 64],
    ]
    assert checkpoint.lm_head().shape == (24, 64)
    assert len(checkpoint.norm_gains()) == 2
    (size,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + size])
    for name, read in ((EMBEDDING, checkpoint.embedding()), ("model.layers.0.mlp.down_proj.weight", layer.down)):
        first, last = header[name]["data_offsets"]
        kind = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}[header[name]["dtype"]]
        held = torch.frombuffer(bytearray(content[8 + size + first : 8 + size + last]), dtype=kind).view(-1, 64)
        assert torch.equal(read.view(torch.int16), held.to(torch.bfloat16).view(torch.int16))


@given(content=damaged(FILE) | damaged(FILE, within=8 + HEADER_BYTES) | damaged(FILE, within=8) | lying_headers())
def test_a_file_is_refused_or_read_as_it_stands(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    checkpoint = unless_refused(lambda: load_checkpoint(folder, CONFIG))
    if checkpoint is None:
        return
    assert_holds(checkpoint, content)


def halves() -> dict[str, str]:
    """The shard of each tensor, in turn."""
    return {name: SHARDS[place % 2] for place, name in enumerate(sorted(WEIGHTS))}


INDEX = {"metadata": {"total_size": len(DATA)}, "weight_map": halves()}


@given(index=json_text(edited(INDEX, ("x", EMBEDDING))), hidden=st.sampled_from((None, None, None, *SHARDS)))
def test_an_index_is_refused_or_names_every_tensor(folder: Path, index: bytes, hidden: str | None) -> None:
    sharded = folder / "sharded"
    sharded.mkdir(exist_ok=True)
    for shard in SHARDS:
        held = {name: WEIGHTS[name] for name, place in halves().items() if place == shard}
        (sharded / shard).write_bytes(save(held))
    if hidden is not None:
        (sharded / hidden).unlink()
    (sharded / "model.safetensors.index.json").write_bytes(index)
    checkpoint = unless_refused(lambda: load_checkpoint(sharded, CONFIG))
    if checkpoint is None:
        return
    assert hidden is None
    assert all(torch.equal(checkpoint.read(name), tensor) for name, tensor in WEIGHTS.items())
