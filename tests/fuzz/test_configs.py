"""config.json, generation_config.json and tables of schedules: a typed error, or what the file says."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from futransformer.generator.config import FEATURE_MULTIPLE, GROUPS, HEAD_DIMS, inverse_frequencies, load_config
from futransformer.generator.plan import make_plan
from futransformer.generator.schedules import SHIPPED, read_table, table_from_json
from tests.fuzz.damage import edited, json_text, unless_refused

COUNTS = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
COMMON: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    **COUNTS,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "hidden_act": "silu",
    "attention_bias": False,
}
OLD = {**COMMON, "rope_theta": 1e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}}
NEW = {**COMMON, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}}
PLAIN = {**COMMON, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
MORE = (
    "sliding_window",
    "layer_types",
    "rope_scaling",
    "rope_theta",
    "type",
    "mlp_bias",
    "pretraining_tp",
    "rope_type",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("config")


@given(text=json_text(st.sampled_from((OLD, NEW, PLAIN)).flatmap(lambda content: edited(content, MORE))))
def test_a_config_is_refused_or_means_what_it_says(folder: Path, text: bytes) -> None:
    (folder / "config.json").write_bytes(text)
    config = unless_refused(lambda: load_config(folder))
    if config is None:
        return
    said = json.loads(text)
    for key in COUNTS:
        if said.get(key) is not None:
            assert getattr(config, key) == said[key] > 0
    assert config.hidden_size % FEATURE_MULTIPLE == config.intermediate_size % FEATURE_MULTIPLE == 0
    assert config.num_attention_heads / config.num_key_value_heads in GROUPS
    assert config.head_dim in HEAD_DIMS
    assert config.rms_norm_eps == said["rms_norm_eps"] > 0
    assert config.tie_word_embeddings is bool(said.get("tie_word_embeddings"))
    assert all(math.isfinite(value) and value >= 0 for value in inverse_frequencies(config))


@given(content=edited(PLAIN, MORE), precision=st.sampled_from(("bf16", "fp8-int4", "int4-kv4")))
def test_what_is_accepted_is_planned_or_refused(folder: Path, content: Any, precision: str) -> None:
    (folder / "config.json").write_text(json.dumps(content))
    plan = unless_refused(lambda: make_plan(load_config(folder), precision))
    assert plan is None or plan.specs()


@given(text=json_text(edited({"bos_token_id": 1, "eos_token_id": [2, 3], "temperature": 0.5})))
def test_generation_config_is_refused_or_names_the_tokens(folder: Path, text: bytes) -> None:
    with_generation = folder / "generation"
    with_generation.mkdir(exist_ok=True)
    (with_generation / "config.json").write_text(json.dumps(PLAIN))
    (with_generation / "generation_config.json").write_bytes(text)
    config = unless_refused(lambda: load_config(with_generation))
    if config is None:
        return
    eos = json.loads(text).get("eos_token_id")
    assert list(config.eos_token_ids) == (
        PLAIN["eos_token_id"] if eos is None else eos if isinstance(eos, list) else [eos]
    )


TABLE = {**json.loads(SHIPPED.read_text()), "rows": json.loads(SHIPPED.read_text())["rows"][:4]}


@given(text=json_text(edited(TABLE)))
def test_a_table_of_schedules_is_refused_or_reads_back(folder: Path, text: bytes) -> None:
    path = folder / "table.json"
    path.write_bytes(text)
    table = unless_refused(lambda: read_table(path))
    if table is None:
        return
    assert len(table.schedules) == len(json.loads(text)["rows"])
    assert table_from_json(json.loads(table.text()), path) == table
