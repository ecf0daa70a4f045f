"""Configurations: the table against published sizes, both styles of config.json, and every refusal."""

from __future__ import annotations

import errno
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from futransformer.generator.config import (
    CONFIGS,
    GROUPS,
    PLAIN_VALUES,
    LlamaConfig,
    RopeScaling,
    inverse_frequencies,
    load_config,
)
from futransformer.generator.errors import ConfigError

# Parameters of the published checkpoints (a tied embedding counts once).
PARAMETERS = {
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "tinyllama-1.1b": 1_100_048_384,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b-v0.3": 7_248_023_552,
}

LLAMA3_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}

# config.json of Llama-3.1-8B as transformers 4 writes it.
LLAMA31: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": LLAMA3_SCALING,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}

# The same model as transformers 5 writes it.
LLAMA31_V5 = {key: value for key, value in LLAMA31.items() if key not in ("rope_scaling", "rope_theta", "torch_dtype")}
LLAMA31_V5 |= {"rope_parameters": {**LLAMA3_SCALING, "rope_theta": 500000.0}, "dtype": "bfloat16", "head_dim": 128}

# A model without RoPE scaling.
PLAIN = {**LLAMA31, "rope_scaling": None, "rope_theta": 100000}


def write(folder: Path, config: Any, generation: Any = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_table_has_the_published_number_of_parameters(name: str) -> None:
    config = CONFIGS[name]
    layer = config.hidden_size * (config.heads.qkv_features + config.heads.q_features + 3 * config.intermediate_size)
    embedding = config.vocab_size * config.hidden_size
    total = config.num_hidden_layers * (layer + 2 * config.hidden_size) + config.hidden_size
    assert total + embedding * (1 if config.tie_word_embeddings else 2) == PARAMETERS[name]
    assert config.name == name


def test_the_table_is_complete() -> None:
    assert list(CONFIGS) == list(PARAMETERS)


def test_the_table_knows_rope_and_context() -> None:
    def rope(name: str) -> tuple[float, float | None, int]:
        config = CONFIGS[name]
        return (
            config.rope_theta,
            config.rope_scaling.factor if config.rope_scaling else None,
            config.max_position_embeddings,
        )

    assert rope("smollm2-135m") == (100000.0, None, 8192)
    assert rope("smollm2-1.7b") == (130000.0, None, 8192)
    assert rope("tinyllama-1.1b") == (10000.0, None, 2048)
    assert rope("llama-2-7b") == (10000.0, None, 4096)
    assert rope("llama-3-8b") == (500000.0, None, 8192)
    assert rope("llama-3.1-405b") == (500000.0, 8.0, 131072)
    assert rope("llama-3.2-1b") == (500000.0, 32.0, 131072)
    assert rope("mistral-7b-v0.3") == (1000000.0, None, 32768)


def test_names_are_found_in_any_case_and_typing_errors_are_answered() -> None:
    assert load_config("Llama-3.1-8B") is CONFIGS["llama-3.1-8b"]
    with pytest.raises(ConfigError, match=r"did you mean llama-3\.1-8b\?.*smollm2-135m"):
        load_config("llama-3.1-8bb")
    with pytest.raises(ConfigError, match="must be downloaded first"):
        load_config("someone/some-model")
    with pytest.raises(ConfigError, match=r"^there is no file or folder llama-3\.1-8b; a Path is"):
        load_config(Path("llama-3.1-8b"))


def test_a_path_is_never_taken_for_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "llama-3-8b", PLAIN)
    monkeypatch.chdir(tmp_path)
    assert load_config("llama-3-8b").rope_theta == 500000.0
    assert load_config("./llama-3-8b").rope_theta == 100000.0
    assert load_config(Path("llama-3-8b")).rope_theta == 100000.0


@pytest.mark.parametrize("config", [LLAMA31, LLAMA31_V5], ids=["transformers 4", "transformers 5"])
def test_both_styles_are_the_same_model(tmp_path: Path, config: dict[str, Any]) -> None:
    folder = write(tmp_path / "a folder", config)
    expected = replace(CONFIGS["llama-3.1-8b"], name="a folder")
    assert load_config(folder) == expected
    assert load_config(str(folder / "config.json")) == expected


def test_the_old_name_of_rope_type(tmp_path: Path) -> None:
    scaling = {**without(LLAMA3_SCALING, "rope_type"), "type": "llama3"}
    assert load_config(write(tmp_path, {**LLAMA31, "rope_scaling": scaling})).rope_scaling == RopeScaling(8, 1, 4, 8192)


@pytest.mark.parametrize("section", [None, {"rope_type": "default"}, {"type": "default"}])
def test_plain_rope(tmp_path: Path, section: Any) -> None:
    config = load_config(write(tmp_path, {**PLAIN, "rope_scaling": section}))
    assert (config.rope_theta, config.rope_scaling) == (100000.0, None)


def test_plain_rope_of_transformers_5(tmp_path: Path) -> None:
    plain = {**LLAMA31_V5, "rope_parameters": {"rope_theta": 130000.0, "rope_type": "default"}}
    config = load_config(write(tmp_path, plain))
    assert (config.rope_theta, config.rope_scaling) == (130000.0, None)


def test_a_theta_beside_rope_parameters_without_one(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, {**LLAMA31_V5, "rope_parameters": LLAMA3_SCALING, "rope_theta": 7e5}))
    assert config.rope_theta == 7e5
    assert config.rope_scaling == RopeScaling(8, 1, 4, 8192)


@pytest.mark.parametrize("config", [without(LLAMA31, "rope_theta"), {**LLAMA31_V5, "rope_parameters": LLAMA3_SCALING}])
def test_a_missing_theta_is_never_10000(tmp_path: Path, config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r'config\.json: rope_theta is missing.*add "rope_theta": 10000\.0'):
        load_config(write(tmp_path, config))


def test_absent_key_value_heads_are_as_many_as_heads(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, without(PLAIN, "num_key_value_heads"))).num_key_value_heads == 32
    assert load_config(write(tmp_path, {**PLAIN, "num_key_value_heads": None})).num_key_value_heads == 32


def test_head_dim_may_differ_from_hidden_size_over_heads(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, {**PLAIN, "hidden_size": 5120, "head_dim": 128})).heads.q_features == 4096
    assert load_config(write(tmp_path, {**PLAIN, "head_dim": None})).head_dim == 128


@pytest.mark.parametrize(
    ("eos", "generation", "expected"),
    [
        (2, None, (2,)),
        ([2, 3], None, (2, 3)),
        (None, None, ()),
        (2, {"eos_token_id": [4, 5]}, (4, 5)),
        ([2, 3], {"eos_token_id": 6}, (6,)),
        ([2, 3], {"temperature": 0.6}, (2, 3)),
        (2, {"eos_token_id": None}, (2,)),
    ],
)
def test_eos_is_one_token_or_several(tmp_path: Path, eos: Any, generation: Any, expected: tuple[int, ...]) -> None:
    assert load_config(write(tmp_path, {**PLAIN, "eos_token_id": eos}, generation)).eos_token_ids == expected


@pytest.mark.parametrize(
    ("bos", "generation", "expected"), [(1, None, 1), (1, {"bos_token_id": 3}, 3), (None, {}, None)]
)
def test_bos_is_that_of_the_generation_config_if_it_names_one(
    tmp_path: Path, bos: Any, generation: Any, expected: int | None
) -> None:
    assert load_config(write(tmp_path, {**PLAIN, "bos_token_id": bos}, generation)).bos_token_id == expected


def test_mistral(tmp_path: Path) -> None:
    mistral = without(LLAMA31, "rope_scaling", "attention_bias", "mlp_bias", "pretraining_tp")
    mistral |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": None}
    mistral |= {"rope_theta": 1e6, "vocab_size": 32768, "max_position_embeddings": 32768}
    mistral |= {"bos_token_id": 1, "eos_token_id": 2}
    assert load_config(write(tmp_path, mistral)) == replace(CONFIGS["mistral-7b-v0.3"], name=tmp_path.name)
    with pytest.raises(ConfigError, match=r"sliding_window is 4096: sliding-window attention is not supported"):
        load_config(write(tmp_path, {**mistral, "sliding_window": 4096}))
    with pytest.raises(ConfigError, match=r"sliding_window is missing, which means 4096"):
        load_config(write(tmp_path, without(mistral, "sliding_window")))


def scaled(**change: Any) -> dict[str, Any]:
    return {"rope_scaling": {**LLAMA3_SCALING, **change}}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "not a Llama": ({"model_type": "qwen2"}, "model_type 'qwen2' is not a Llama; supported: llama, mistral"),
    "another head": ({"architectures": ["LlamaForSequenceClassification"]}, "architectures .*LlamaForSequence"),
    "attention bias": ({"attention_bias": True}, "attention_bias is true: a bias in the attention projections"),
    "mlp bias": ({"mlp_bias": True}, "mlp_bias is true"),
    "activation": ({"hidden_act": "gelu"}, 'hidden_act is "gelu"'),
    "experts": ({"num_local_experts": 8}, "num_local_experts is 8: a mixture of experts"),
    "window": ({"sliding_window": 4096}, "sliding_window is 4096"),
    "layer types": ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types must all be full_attention"),
    "layer types of another type": ({"layer_types": "full_attention"}, "layer_types must all be full_attention"),
    "layer types of no kind": ({"layer_types": 32}, "layer_types must all be full_attention"),
    "partial RoPE": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    "interleaved RoPE": ({"rope_interleaved": True}, "rope_interleaved is true"),
    "rope type": (scaled(rope_type="yarn"), r"rope_scaling\.rope_type 'yarn' is not supported; .*default, llama3"),
    "no rope type": ({"rope_scaling": {"factor": 8.0}}, r"rope_scaling\.rope_type is missing"),
    "two rope types": (scaled(type="linear"), r"rope_scaling\.rope_type \(llama3\) contradicts type \(linear\)"),
    "rope parameter": (scaled(attention_factor=0.1), r"rope_scaling\.attention_factor is not a parameter"),
    "no factor": (scaled(factor=None), r"rope_scaling\.factor must be a finite number, not null"),
    "factors": (scaled(low_freq_factor=4.0), r"low_freq_factor \(4\.0\) must be positive and below"),
    "small factor": (scaled(factor=0.5), "factor must be at least 1"),
    "original context": (
        scaled(original_max_position_embeddings=0),
        "original_max_position_embeddings must be positive",
    ),
    "two thetas": (
        {"rope_parameters": {"rope_theta": 1e4}},
        "rope_theta contradicts itself: 10000.0 in rope_parameters",
    ),
    "two scalings": (
        {"rope_parameters": {"rope_theta": 5e5, **LLAMA3_SCALING, "factor": 9.0}},
        "rope_scaling contradicts rope_parameters",
    ),
    "rope section": ({"rope_scaling": "llama3"}, "rope_scaling must be an object"),
    "head_dim": ({"head_dim": 80}, "head_dim 80 is not supported; kernels exist for head_dim 64, 128"),
    "derived head_dim": ({"hidden_size": 3072}, "head_dim 96 is not supported"),
    "no whole head_dim": ({"num_attention_heads": 28}, "head_dim is missing, and hidden_size 4096 / 28 heads"),
    "group": ({"num_attention_heads": 36, "num_key_value_heads": 4, "head_dim": 128}, "groups of 9; .* 7, 8, 16"),
    "uneven heads": ({"num_key_value_heads": 5}, r"num_attention_heads \(32\) must be a multiple of .* \(5\)"),
    "hidden": ({"hidden_size": 4128, "head_dim": 128}, "hidden_size 4128 is not supported; .* multiples of 64"),
    "intermediate": ({"intermediate_size": 11000}, "intermediate_size 11000 is not supported"),
    "no layers": ({"num_hidden_layers": 0}, "num_hidden_layers must be positive, not 0"),
    "negative heads": ({"num_attention_heads": -32}, "num_attention_heads must be positive, not -32"),
    "zero heads": ({"num_attention_heads": 0, "head_dim": 128}, "num_attention_heads must be positive, not 0"),
    "string": ({"hidden_size": "4096"}, 'hidden_size must be an integer, not "4096"'),
    "float": ({"num_hidden_layers": 32.0}, r"num_hidden_layers must be an integer, not 32\.0"),
    "bool": ({"vocab_size": True}, "vocab_size must be an integer, not true"),
    "null": ({"intermediate_size": None}, "intermediate_size must be an integer, not null"),
    "epsilon": ({"rms_norm_eps": "1e-5"}, "rms_norm_eps must be a finite number"),
    "no epsilon": ({"rms_norm_eps": None}, "rms_norm_eps must be a finite number"),
    "zero epsilon": ({"rms_norm_eps": 0.0}, "rms_norm_eps must be positive"),
    "NaN epsilon": ({"rms_norm_eps": math.nan}, "rms_norm_eps must be a finite number"),
    "theta": ({"rope_theta": 0}, "rope_theta must be above 1"),
    "tie": ({"tie_word_embeddings": "yes"}, 'tie_word_embeddings must be true or false, not "yes"'),
    "eos": ({"eos_token_id": [1, "</s>"]}, "eos_token_id must be an integer or a list of integers"),
    "eos outside": ({"eos_token_id": 128256}, "token id 128256 .* is outside the vocabulary of 128256"),
    "bos": ({"bos_token_id": [1]}, r"bos_token_id must be an integer, not \[1\]"),
    "more than 32 bits": ({"hidden_size": 2**32}, "hidden_size must not exceed 536870912, and is 4294967296"),
    "more than 32 bits of layers": ({"num_hidden_layers": 10**30}, "num_hidden_layers must not exceed 536870912"),
    "more than 32 bits of heads": (
        {"num_attention_heads": 2**24, "num_key_value_heads": 2**21, "head_dim": 128},
        "q, k and v have 2684354560 features together",
    ),
    "epsilon beyond float64": ({"rms_norm_eps": 10**400}, "rms_norm_eps must be a finite number"),
    "theta beyond float64": ({"rope_theta": 10**400}, "rope_theta must be a finite number"),
    "original context beyond float64": (
        scaled(original_max_position_embeddings=10**400),
        "original_max_position_embeddings must be positive and at most 536870912",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_served_is_refused_by_file_and_key(tmp_path: Path, case: str) -> None:
    change, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message) as refusal:
        load_config(write(tmp_path, {**LLAMA31, **change}))
    assert str(tmp_path / "config.json") in str(refusal.value)


@pytest.mark.parametrize("key", PLAIN_VALUES)
def test_every_feature_that_changes_the_answer_is_refused(tmp_path: Path, key: str) -> None:
    plain, feature = PLAIN_VALUES[key]
    with pytest.raises(ConfigError, match=f'config.json: {key} is "other": {feature} is not supported'):
        load_config(write(tmp_path, {**LLAMA31, key: "other"}))
    for value in (None, *plain):
        load_config(write(tmp_path, {**LLAMA31, key: value}))


def test_the_features_that_change_the_answer() -> None:
    features = ["hidden_act", "attention_bias", "mlp_bias", "rope_interleaved", "partial_rotary_factor"]
    assert list(PLAIN_VALUES) == [*features, "num_local_experts", "num_experts", "use_qk_norm", "qk_norm"]


@pytest.mark.parametrize("key", ["model_type", "hidden_size", "intermediate_size", "vocab_size", "rms_norm_eps"])
def test_a_missing_key_is_named(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError, match=f"config.json: {key} .* but is missing"):
        load_config(write(tmp_path, without(LLAMA31, key)))


@pytest.mark.parametrize("length", [0, 1, 97, 388, len(json.dumps(LLAMA31)) - 1])
def test_a_truncated_file(tmp_path: Path, length: int) -> None:
    with pytest.raises(ConfigError, match=r"config\.json is not valid JSON"):
        load_config(write(tmp_path, json.dumps(LLAMA31)[:length]))


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, '{"hidden_size": ' + "1" * 5000 + "}"])
def test_json_that_python_will_not_read(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"config\.json is not valid JSON"):
        load_config(write(tmp_path, text))


def test_absurd_integers_and_long_values_make_short_messages(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="an integer of 1001 digits"):
        load_config(write(tmp_path, json.dumps({**LLAMA31, "vocab_size": 10**1000})))
    for key in ("rms_norm_eps", "architectures", "sliding_window", "hidden_act"):
        with pytest.raises(ConfigError, match=key) as refusal:
            load_config(write(tmp_path, json.dumps({**LLAMA31, key: ["x" * 10_000]})))
        assert len(str(refusal.value)) < 1000


def test_more_layers_than_any_model_has_are_refused_before_their_tensors_are_listed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="num_hidden_layers must not exceed 4096, and is 4097"):
        load_config(write(tmp_path, json.dumps({**LLAMA31, "num_hidden_layers": 4097})))


def test_a_folder_that_may_not_be_entered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Permission bits would not do: they do not bind root."""

    def refuse(path: Path) -> bool:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "is_file", refuse)
    with pytest.raises(ConfigError, match="model cannot be read: Permission denied"):
        load_config(write(tmp_path / "model", PLAIN))
    with pytest.raises(ConfigError, match=r"cannot be read: File name too long|is neither a named model"):
        load_config("a" * 5000)


def test_a_linked_config_is_named_after_its_folder(tmp_path: Path) -> None:
    """Not after the folder of what it links to, which in the Hub's cache is blobs for all models."""
    blobs, snapshot = tmp_path / "models--meta--Mine-1B" / "blobs", tmp_path / "models--meta--Mine-1B/snapshots/abc"
    for folder in (blobs, snapshot, tmp_path / "plain"):
        folder.mkdir(parents=True)
    write(blobs, LLAMA31)
    for folder, name in ((snapshot, "Mine-1B"), (tmp_path / "plain", "plain")):
        (folder / "config.json").symlink_to(blobs / "config.json")
        assert load_config(folder).name == name


def test_the_home_of_nobody() -> None:
    with pytest.raises(ConfigError, match="~nobody-we-know/model is neither a named model nor a file or folder"):
        load_config("~nobody-we-know/model")


def test_files_that_hold_something_else(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json must hold a JSON object, not \[1, 2\]"):
        load_config(write(tmp_path, [1, 2]))
    (tmp_path / "config.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(ConfigError, match=r"config\.json is not UTF-8 text"):
        load_config(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        load_config(tmp_path)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        load_config(tmp_path)


def test_a_broken_generation_config_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path, PLAIN, {"eos_token_id": "</s>"})
    with pytest.raises(ConfigError, match=r"generation_config\.json: eos_token_id must be an integer"):
        load_config(folder)
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"generation_config\.json is not valid JSON"):
        load_config(folder)


def test_a_config_made_in_python_is_held_to_the_same_rules() -> None:
    llama = CONFIGS["llama-3.2-1b"]
    for group in GROUPS:
        assert replace(llama, num_attention_heads=2 * group, num_key_value_heads=2).heads.group == group
    with pytest.raises(ConfigError, match=r"llama-3\.2-1b: head_dim 256 is not supported"):
        replace(llama, head_dim=256)


def published_frequencies(config: LlamaConfig) -> list[float]:
    """RoPE as the papers state it: by wavelength, in three cases."""
    result = []
    for i in range(config.head_dim // 2):
        frequency = 1.0 / config.rope_theta ** (2 * i / config.head_dim)
        scaling = config.rope_scaling
        if scaling is not None:
            wavelength = 2 * math.pi / frequency
            longest = scaling.original_max_position_embeddings / scaling.low_freq_factor
            shortest = scaling.original_max_position_embeddings / scaling.high_freq_factor
            if wavelength > longest:
                frequency /= scaling.factor
            elif wavelength >= shortest:
                smooth = (scaling.original_max_position_embeddings / wavelength - scaling.low_freq_factor) / (
                    scaling.high_freq_factor - scaling.low_freq_factor
                )
                frequency = (1 - smooth) * frequency / scaling.factor + smooth * frequency
        result.append(frequency)
    return result


@pytest.mark.parametrize("name", CONFIGS)
def test_inverse_frequencies(name: str) -> None:
    config = CONFIGS[name]
    assert inverse_frequencies(config) == pytest.approx(published_frequencies(config), rel=1e-14)


def test_llama3_scaling_reaches_all_three_of_its_cases() -> None:
    scaled, plain = (
        inverse_frequencies(config)
        for config in (CONFIGS["llama-3.1-8b"], replace(CONFIGS["llama-3.1-8b"], rope_scaling=None))
    )
    ratios = [a / b for a, b in zip(scaled, plain, strict=True)]
    assert ratios[0] == 1
    assert ratios[-1] == pytest.approx(1 / 8, rel=1e-15)
    assert any(0.2 < ratio < 0.9 for ratio in ratios)
    assert ratios == sorted(ratios, reverse=True)


def test_the_module_is_pure_python() -> None:
    code = "import sys, futransformer.generator.config; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
