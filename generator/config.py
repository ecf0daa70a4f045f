"""Llama-style model configurations: the table of named models, and the parsing of Hugging Face's config.json.

``load_config`` accepts a name of the table, a Hugging Face folder or a config.json in either style: transformers 4
(``rope_theta``, ``rope_scaling``) or transformers 5 (``rope_parameters``). Nothing that changes what a model computes
is guessed: a missing theta or epsilon, an unknown RoPE type, a bias or a sliding window is refused by name, with the
file, the key and what is supported. Every refusal is a ConfigError.
"""

from __future__ import annotations

import difflib
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import ConfigError
from .json_reader import JsonReader, read_json, shown
from .specs.base import Heads

HEAD_DIMS = (64, 128)
GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 16)  # query heads a key/value head
COUNTS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
)
FEATURE_MULTIPLE = 64  # of hidden_size and intermediate_size: one K step of the prefill GEMMs
MAX_LAYERS = 4096  # thirty times the deepest Llama; whatever lists a model's tensors stays a short list
MAX_COUNT = 2**29  # kernels count in 32 bits, and a projection may have twice as many rows (gate and up)


@dataclass(frozen=True)
class RopeScaling:
    """Llama-3 RoPE scaling (rope_type "llama3")."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        _require(self.factor >= 1, "llama3 RoPE scaling", f"factor must be at least 1, not {self.factor}")
        _require(
            0 < self.low_freq_factor < self.high_freq_factor,
            "llama3 RoPE scaling",
            f"low_freq_factor ({self.low_freq_factor}) must be positive and below "
            f"high_freq_factor ({self.high_freq_factor})",
        )
        _require(
            0 < self.original_max_position_embeddings <= MAX_COUNT,
            "llama3 RoPE scaling",
            f"original_max_position_embeddings must be positive and at most {MAX_COUNT}, "
            f"not {self.original_max_position_embeddings}",
        )


@dataclass(frozen=True)
class LlamaConfig:
    """A Llama-style decoder that the kernels can serve. Field names are those of Hugging Face's config.json."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for key in COUNTS:
            count: int = getattr(self, key)
            _require(count > 0, self.name, f"{key} must be positive, not {count}")
            _require(count <= MAX_COUNT, self.name, f"{key} must not exceed {MAX_COUNT}, and is {count}")
        _require(
            self.num_hidden_layers <= MAX_LAYERS,
            self.name,
            f"num_hidden_layers must not exceed {MAX_LAYERS}, and is {self.num_hidden_layers}",
        )
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        _require(
            heads % kv_heads == 0,
            self.name,
            f"num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({kv_heads})",
        )
        _require(
            heads // kv_heads in GROUPS,
            self.name,
            f"{heads} query heads over {kv_heads} key/value heads are groups of {heads // kv_heads}; "
            f"kernels exist for groups of {_listing(GROUPS)}",
        )
        _require(
            self.head_dim in HEAD_DIMS,
            self.name,
            f"head_dim {self.head_dim} is not supported; kernels exist for head_dim {_listing(HEAD_DIMS)}",
        )
        _require(
            self.heads.qkv_features <= MAX_COUNT,
            self.name,
            f"q, k and v have {self.heads.qkv_features} features together, which must not exceed {MAX_COUNT}",
        )
        for key in ("hidden_size", "intermediate_size"):
            _require(
                getattr(self, key) % FEATURE_MULTIPLE == 0,
                self.name,
                f"{key} {getattr(self, key)} is not supported; kernels exist for multiples of {FEATURE_MULTIPLE}",
            )
        _require(
            math.isfinite(self.rms_norm_eps) and self.rms_norm_eps > 0,
            self.name,
            f"rms_norm_eps must be positive, not {self.rms_norm_eps}",
        )
        _require(
            math.isfinite(self.rope_theta) and self.rope_theta > 1,
            self.name,
            f"rope_theta must be above 1, not {self.rope_theta}",
        )
        for token in self.eos_token_ids if self.bos_token_id is None else (self.bos_token_id, *self.eos_token_ids):
            _require(
                0 <= token < self.vocab_size,
                self.name,
                f"token id {token} (bos or eos) is outside the vocabulary of {self.vocab_size}",
            )

    @property
    def heads(self) -> Heads:
        """Attention geometry, as the specs take it."""
        return Heads(self.num_attention_heads, self.num_key_value_heads, self.head_dim)


def inverse_frequencies(config: LlamaConfig) -> tuple[float, ...]:
    """Return the angle a position, in radians, of each RoPE pair (i, i + head_dim / 2); head_dim / 2 float64 values.

    Llama-3 scaling slows the pairs whose wavelength exceeds the original context by ``factor``, leaves the fast ones,
    and blends in between.
    """
    frequencies = [config.rope_theta ** (-2 * i / config.head_dim) for i in range(config.head_dim // 2)]
    scaling = config.rope_scaling
    if scaling is None:
        return tuple(frequencies)
    scaled = []
    for frequency in frequencies:
        turns = scaling.original_max_position_embeddings * frequency / (2 * math.pi)  # in the original context
        blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        blend = min(max(blend, 0.0), 1.0)
        scaled.append((1 - blend) * frequency / scaling.factor + blend * frequency)
    return tuple(scaled)


def load_config(name_or_path: str | Path) -> LlamaConfig:
    """Return the named configuration, or parse a Hugging Face folder or a config.json.

    A string that is a name of the table means the table; write ``./name`` for a folder of that name.
    """
    if isinstance(name_or_path, str) and name_or_path.lower() in CONFIGS:
        return CONFIGS[name_or_path.lower()]
    try:
        path = _config_file(name_or_path)
        generation_path = path.with_name("generation_config.json")
        generation = JsonReader(generation_path, read_json(generation_path)) if generation_path.is_file() else None
    except OSError as error:  # a folder that may not be entered, a name that is too long
        raise ConfigError(f"{name_or_path} cannot be read: {error.strerror}") from error
    return _parse(JsonReader(path, read_json(path)), generation, name=_name_of(path.parent.resolve()))


def _name_of(folder: Path) -> str:
    """The folder's name; of a snapshot in the Hub's cache, models--OWNER--NAME/snapshots/COMMIT, the model's."""
    repository = folder.parent.parent.name
    if folder.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.rpartition("--")[2]
    return folder.name


def _config_file(name_or_path: str | Path) -> Path:
    """Return the config.json that is named, or that lies in the folder that is named."""
    path = Path(os.path.expanduser(name_or_path))  # a ~user whom nobody knows stays as it is, and is not found
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise ConfigError(f"{path} does not exist; a Hugging Face folder holds config.json beside its weights")
    elif not path.is_file():
        if isinstance(name_or_path, Path):
            raise ConfigError(
                f"there is no file or folder {path}; a Path is a Hugging Face folder or a config.json, never the name "
                "of a shape. A model of the Hub must be downloaded first (hf download)"
            )
        close = difflib.get_close_matches(str(name_or_path).lower(), CONFIGS, n=1, cutoff=0.7)
        hint = f"; did you mean {close[0]}?" if close else "."
        raise ConfigError(
            f"{name_or_path} is neither a named model nor a file or folder{hint} "
            f"Named models: {', '.join(CONFIGS)}. A model of the Hub must be downloaded first (hf download)"
        )
    return path


def _parse(reader: JsonReader, generation: JsonReader | None, name: str) -> LlamaConfig:
    """Build the configuration; generation_config.json, where it names tokens, overrides config.json."""
    _refuse_other_models(reader)
    heads = reader.integer("num_attention_heads")
    hidden_size = reader.integer("hidden_size")
    if not reader.has("head_dim") and heads > 0 and hidden_size % heads:
        raise reader.error("head_dim", f"is missing, and hidden_size {hidden_size} / {heads} heads is no whole number")
    rope_theta, rope_scaling = _parse_rope(reader)
    bos = generation if generation and generation.has("bos_token_id") else reader
    eos = generation if generation and generation.has("eos_token_id") else reader
    values: dict[str, Any] = {
        "hidden_size": hidden_size,
        "num_attention_heads": heads,
        "num_key_value_heads": reader.integer("num_key_value_heads", default=heads),
        "head_dim": reader.integer("head_dim", default=hidden_size // max(heads, 1)),
        "rms_norm_eps": reader.number("rms_norm_eps"),
        "rope_theta": rope_theta,
        "rope_scaling": rope_scaling,
        "tie_word_embeddings": reader.boolean("tie_word_embeddings"),
        "bos_token_id": bos.integer("bos_token_id") if bos.has("bos_token_id") else None,
        "eos_token_ids": eos.integers("eos_token_id"),
    }
    for key in ("intermediate_size", "num_hidden_layers", "vocab_size", "max_position_embeddings"):
        values[key] = reader.integer(key)
    try:
        return LlamaConfig(name=name, **values)
    except ConfigError as error:
        raise ConfigError(f"{reader.path}: {error}") from error


# Features that change what is computed: the values under which a model is still the plain Llama that the kernels
# compute (absent and null always are), and what the feature is called.
PLAIN_VALUES: dict[str, tuple[tuple[Any, ...], str]] = {
    "hidden_act": (("silu", "swish"), "another activation"),
    "attention_bias": ((False,), "a bias in the attention projections"),
    "mlp_bias": ((False,), "a bias in the MLP projections"),
    "rope_interleaved": ((False,), "interleaved RoPE"),
    "partial_rotary_factor": ((1,), "RoPE on a part of each head"),
    "num_local_experts": ((), "a mixture of experts"),
    "num_experts": ((), "a mixture of experts"),
    "use_qk_norm": ((False,), "a norm on Q and K"),
    "qk_norm": ((False,), "a norm on Q and K"),
}


def _refuse_other_models(reader: JsonReader) -> None:
    """Refuse what is not a plain Llama, by name."""
    model_type = reader.text("model_type")
    if model_type not in ("llama", "mistral"):
        raise reader.error("model_type", f"{model_type!r} is not a Llama; supported: llama, mistral")
    architectures = reader.content.get("architectures") or ["LlamaForCausalLM"]
    if architectures not in (["LlamaForCausalLM"], ["MistralForCausalLM"]):
        raise reader.error(
            "architectures",
            f"{shown(architectures)} is not supported; supported: LlamaForCausalLM, MistralForCausalLM",
        )
    for key, (plain, feature) in PLAIN_VALUES.items():
        if reader.has(key) and reader.content[key] not in plain:
            raise reader.error(key, f"is {shown(reader.content[key])}: {feature} is not supported")
    # In a Mistral config an absent key means 4096 (transformers' default), and null means no window.
    if reader.has("sliding_window") or (model_type == "mistral" and "sliding_window" not in reader.content):
        missing = "missing, which means 4096 for model_type mistral"
        window = shown(reader.content["sliding_window"]) if "sliding_window" in reader.content else missing
        raise reader.error("sliding_window", f"is {window}: sliding-window attention is not supported, only null is")
    kinds = reader.content.get("layer_types")
    if kinds is not None and not (isinstance(kinds, list) and all(kind == "full_attention" for kind in kinds)):
        raise reader.error("layer_types", "must all be full_attention; no other attention is supported")


LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def _parse_rope(reader: JsonReader) -> tuple[float, RopeScaling | None]:
    """Read theta and scaling in either style; a config may hold both if they agree."""
    old, new = reader.section("rope_scaling"), reader.section("rope_parameters")
    holders = [holder for holder in (new, old, reader) if holder.has("rope_theta")]
    if not holders:
        raise reader.error(
            "rope_theta",
            "is missing (also from rope_parameters), and no default is assumed; Llama 1 and 2 checkpoints of before "
            'transformers 4.33 meant 10000: if this is one, add "rope_theta": 10000.0',
        )
    thetas = [holder.number("rope_theta") for holder in holders]
    if len(set(thetas)) > 1:
        places = ", ".join(
            f"{theta} in {holder.prefix}rope_theta" for holder, theta in zip(holders, thetas, strict=True)
        )
        raise reader.error("rope_theta", f"contradicts itself: {places}")
    scalings = [_parse_scaling(section) for section in (new, old) if section.content]
    if len(set(scalings)) > 1:
        raise reader.error("rope_scaling", "contradicts rope_parameters")
    return thetas[0], scalings[0] if scalings else None


def _parse_scaling(section: JsonReader) -> RopeScaling | None:
    """Read one rope_scaling or rope_parameters object; null for plain RoPE."""
    kinds = {key: section.text(key) for key in ("rope_type", "type") if section.has(key)}
    if not kinds and section.prefix.startswith("rope_scaling"):
        raise section.error("rope_type", "is missing; supported: default, llama3")
    if len(set(kinds.values())) > 1:
        raise section.error("rope_type", f"({kinds['rope_type']}) contradicts type ({kinds['type']})")
    kind = next(iter(kinds.values()), "default")
    if kind not in ("default", "llama3"):
        raise section.error("rope_type", f"{kind!r} is not supported; supported: default, llama3")
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *(LLAMA3_KEYS if kind == "llama3" else ())}
    for key, value in section.content.items():
        if key not in known and value is not None:
            raise section.error(key, f"is not a parameter of rope_type {kind}; supported: default, llama3")
    if section.content.get("partial_rotary_factor") not in (None, 1):
        raise section.error("partial_rotary_factor", "must be 1; RoPE on a part of each head is not supported")
    if kind == "default":
        return None
    values: dict[str, Any] = {key: section.number(key) for key in LLAMA3_KEYS[:3]}
    values[LLAMA3_KEYS[3]] = section.integer(LLAMA3_KEYS[3])
    try:
        return RopeScaling(**values)
    except ConfigError as error:
        raise ConfigError(f"{section.path}: {error}") from error


def _require(condition: bool, where: str, message: str) -> None:
    if not condition:
        raise ConfigError(f"{where}: {message}")


def _listing(values: tuple[int, ...]) -> str:
    return ", ".join(str(value) for value in values)


def _named(
    name: str,
    hidden_size: int,
    intermediate_size: int,
    layers: int,
    heads: tuple[int, int, int],
    vocab_size: int,
    positions: int,
    theta: float,
    **rest: Any,
) -> LlamaConfig:
    """Build one row of the table; ``heads``: query heads, key/value heads, head_dim. All have an epsilon of 1e-5."""
    return LlamaConfig(name, hidden_size, intermediate_size, layers, *heads, vocab_size, positions, 1e-5, theta, **rest)


_SMOLLM2: dict[str, Any] = {
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_ids": (2,),
}  # the Instruct models
_LLAMA2: dict[str, Any] = {"bos_token_id": 1, "eos_token_ids": (2,)}
_LLAMA3: dict[str, Any] = {"bos_token_id": 128000, "eos_token_ids": (128001,)}
_LLAMA31: dict[str, Any] = {**_LLAMA3, "rope_scaling": RopeScaling(8.0, 1.0, 4.0, 8192)}
_LLAMA32: dict[str, Any] = {**_LLAMA3, "rope_scaling": RopeScaling(32.0, 1.0, 4.0, 8192), "tie_word_embeddings": True}

# The values are those of the published config.json of each model.
_TABLE = (
    #      name              hidden  inter. layers  (q, kv, dim)  vocab.  positions    theta
    _named("smollm2-135m", 576, 1536, 30, (9, 3, 64), 49152, 8192, 1e5, **_SMOLLM2),
    _named("smollm2-360m", 960, 2560, 32, (15, 5, 64), 49152, 8192, 1e5, **_SMOLLM2),
    _named("smollm2-1.7b", 2048, 8192, 24, (32, 32, 64), 49152, 8192, 130000.0, **_SMOLLM2),
    _named("tinyllama-1.1b", 2048, 5632, 22, (32, 4, 64), 32000, 2048, 1e4, **_LLAMA2),
    _named("llama-2-7b", 4096, 11008, 32, (32, 32, 128), 32000, 4096, 1e4, **_LLAMA2),
    _named("llama-2-13b", 5120, 13824, 40, (40, 40, 128), 32000, 4096, 1e4, **_LLAMA2),
    _named("llama-2-70b", 8192, 28672, 80, (64, 8, 128), 32000, 4096, 1e4, **_LLAMA2),
    _named("llama-3-8b", 4096, 14336, 32, (32, 8, 128), 128256, 8192, 5e5, **_LLAMA3),
    _named("llama-3-70b", 8192, 28672, 80, (64, 8, 128), 128256, 8192, 5e5, **_LLAMA3),
    _named("llama-3.1-8b", 4096, 14336, 32, (32, 8, 128), 128256, 131072, 5e5, **_LLAMA31),
    _named("llama-3.1-70b", 8192, 28672, 80, (64, 8, 128), 128256, 131072, 5e5, **_LLAMA31),
    _named("llama-3.1-405b", 16384, 53248, 126, (128, 8, 128), 128256, 131072, 5e5, **_LLAMA31),  # fits no single GPU
    _named("llama-3.2-1b", 2048, 8192, 16, (32, 8, 64), 128256, 131072, 5e5, **_LLAMA32),
    _named("llama-3.2-3b", 3072, 8192, 28, (24, 8, 128), 128256, 131072, 5e5, **_LLAMA32),
    _named("mistral-7b-v0.3", 4096, 14336, 32, (32, 8, 128), 32768, 32768, 1e6, **_LLAMA2),
)
CONFIGS: dict[str, LlamaConfig] = {config.name: config for config in _TABLE}
