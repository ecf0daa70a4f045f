"""Quantising takes memory for a layer, however many there are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from futransformer.checkpoint import expected_shapes
from futransformer.generator.config import load_config

FEW, MANY, HIDDEN, INNER = 4, 16, 256, 768
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
# Every tensor of 64 KiB and more in pages of its own, which the system gets back as soon as it is freed: by default the
# C library raises that limit to the largest tensor freed so far, and what lies in the heap between two live ones stays.
ALLOCATOR = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(64 * 1024)}
# In a process of its own, whose memory nobody has used before. Pages of mapped files are not counted: the system takes
# them back when it needs them.
SCRIPT = """
import sys, threading, time
from futransformer.cli import main
from futransformer.quantize import write, stream

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))

def watch():
    while not done:
        peaks.append(anonymous())
        time.sleep(0.002)

before, peaks, done = anonymous(), [], []
watcher = threading.Thread(target=watch)
watcher.start()
status = main(sys.argv[1:])
done.append(True)
watcher.join()
print("peak", max(peaks) - before)
sys.exit(status)
"""


def write_model(folder: Path, layers: int) -> Path:
    """A random model of many shards, of a layer each."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}))
    generator = torch.Generator().manual_seed(0)
    shards: dict[str, dict[str, Tensor]] = {}
    for name, shape in expected_shapes(load_config(folder)).items():
        if name != "lm_head.weight":
            shard = f"model-{name.split('.')[2] if '.layers.' in name else 'ends'}.safetensors"
            values = torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * HIDDEN**-0.5
            shards.setdefault(shard, {})[name] = values.bfloat16()
    for shard, tensors in shards.items():
        save_file(tensors, folder / shard)
    weight_map = {name: shard for shard, tensors in shards.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def peak_of(model: Path, method: str) -> int:
    """Bytes that quantising it takes, of anonymous memory, beyond those of the process that has imported all."""
    text = ["--calibration", "random", "--samples", "4", "--seqlen", "64"] if method == "gptq" else []
    options = ["-o", str(model.with_name(f"{model.name}-out")), "--method", method, "--device", "cpu", *text]
    command = ["quantize", str(model), *options]
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, *command],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **ALLOCATOR, "OMP_NUM_THREADS": "1"},
    )
    return int(ran.stdout.rpartition("peak ")[2]) * 1024


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_no_layer_adds_to_it(tmp_path: Path, method: str) -> None:
    """Twelve layers more, and less than two of them. Kept in BF16 they would take six, in float32 twelve."""
    few, many = (peak_of(write_model(tmp_path / str(layers), layers), method) for layers in (FEW, MANY))
    layer = 4 * (4 * HIDDEN**2 + 3 * HIDDEN * INNER)  # in float32
    assert few > layer, "what is measured must be there"
    assert many - few < 2 * layer
