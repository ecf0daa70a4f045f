"""Hugging Face safetensors -> the logical weights of docs/architecture.md, one layer at a time.

``load_checkpoint`` opens a folder (one model.safetensors, or the shards that model.safetensors.index.json lists) and
checks every name, shape and type against the configuration before anything is converted. What it returns then reads
lazily: at no time is more than one layer held in float32. Weights may be stored in BF16, F16 or F32; the product with
the gain is taken in float32 and rounded to BF16 once. Nothing is unpickled, ever.

Checkpoints that come quantised (futransformer.formats) are read either way: as logical weights like any other, from the
dequantised values; or, where they are INT4 codes that decode's kernels can keep, as these codes, without gains.
"""

from __future__ import annotations

import json
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from futransformer.formats import read_format
from futransformer.formats.codes import DEQUANTISED_INSTEAD, FLOATS, Format, GroupedCodes, Groups, Stored
from futransformer.generator.config import LlamaConfig, inverse_frequencies
from futransformer.generator.errors import CheckpointError, ConfigError, UnsupportedError
from futransformer.generator.json_reader import names_a_file, read_json
from futransformer.quantize.int4 import Int4Weight

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
OLD_ROPE = "rotary_emb.inv_freq"  # RoPE frequencies in old Llama checkpoints, which follow from the config
LFS_POINTER = b"version https://git-lfs"
MOST_WORDS = 300  # characters of safetensors' own message, which repeats whatever a header holds
LONGEST_HEADER = 100_000_000  # bytes: what safetensors reads


def pair_order(weight: Tensor, head_dim: int) -> Tensor:
    """Reorder the rows of each head [heads * head_dim, K]: row 2i is natural row i, row 2i + 1 is i + head_dim / 2."""
    halves = weight.view(-1, 2, head_dim // 2, weight.shape[-1])
    return halves.transpose(1, 2).reshape(weight.shape)


def fold_gain(weight: Tensor, gain: Tensor) -> Tensor:
    """Return W diag(gain): the product in float32, rounded to BF16 once."""
    return (weight.float() * gain.float()).to(torch.bfloat16)


def rope_table(config: LlamaConfig, positions: int) -> Tensor:
    """Return (cos, sin) of positions 0, 1, ...: float32 [positions, head_dim / 2, 2], computed in float64."""
    frequencies = torch.tensor(inverse_frequencies(config), dtype=torch.float64)
    angles = torch.outer(torch.arange(positions, dtype=torch.float64), frequencies)
    return torch.stack((angles.cos(), angles.sin()), dim=-1).float()


@dataclass(frozen=True)
class LogicalLayer:
    """One layer's logical weights, BF16 [N, K]: gains folded in, the rows of Q and K in pair order."""

    qkv: Tensor
    o: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True)
class CodedLayer:
    """One layer's INT4 codes as the checkpoint has them: rows as in LogicalLayer, no gain in them."""

    qkv: Int4Weight
    o: Int4Weight
    gate_up: Int4Weight
    down: Int4Weight


def load_checkpoint(folder: Path | str, config: LlamaConfig) -> Checkpoint:
    """Open the folder's safetensors and check them against ``config``."""
    folder = Path(os.path.expanduser(folder))
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; name the Hugging Face folder that holds config.json")
    return Checkpoint(folder, config, _locate(folder), read_format(folder))


class Checkpoint:
    """An opened, checked checkpoint: the logical weights, read when asked for."""

    def __init__(
        self, folder: Path, config: LlamaConfig, files: dict[str, Any], stored_as: Format | None = None
    ) -> None:
        """Check all of ``files``, tensor name -> opened file, against the configuration and the format of its codes."""
        self.folder = folder
        self.config = config
        self.format = stored_as
        self._files = files
        self._coded: dict[str, tuple[int, int]] = {}  # module -> N, K of what is stored as codes
        self._check()

    def embedding(self) -> Tensor:
        """Return the embedding table [vocab_size, hidden_size]."""
        return self._read(EMBEDDING).to(torch.bfloat16)

    def layer(self, index: int) -> LogicalLayer:
        """Return the four projections of one layer."""
        prefix = f"model.layers.{index}"
        input_gain = self._read(f"{prefix}.input_layernorm.weight")
        mlp_gain = self._read(f"{prefix}.post_attention_layernorm.weight")
        q, k, v = (fold_gain(self._weight(f"{prefix}.self_attn.{name}_proj"), input_gain) for name in "qkv")
        gate, up = (fold_gain(self._weight(f"{prefix}.mlp.{name}_proj"), mlp_gain) for name in ("gate", "up"))
        head_dim = self.config.head_dim
        return LogicalLayer(
            qkv=torch.cat((pair_order(q, head_dim), pair_order(k, head_dim), v)),
            o=self._weight(f"{prefix}.self_attn.o_proj").to(torch.bfloat16),
            gate_up=torch.cat((gate, up)),
            down=self._weight(f"{prefix}.mlp.down_proj").to(torch.bfloat16),
        )

    @property
    def groups(self) -> Groups | None:
        """Of the INT4 codes that all projections of all layers are stored as; None where they are not."""
        return self.format.groups if self.format is not None else None

    @property
    def may_keep_codes(self) -> bool:
        """Whether INT4 kernels can keep its codes, as far as that takes no weight to be read."""
        coded = (
            module in self._coded for index in range(self.config.num_hidden_layers) for module in projections_of(index)
        )
        return self.groups is not None and self.format is not None and not self.format.act_order and all(coded)

    def check_codes(self) -> None:
        """Refuse INT4 codes that decode's kernels cannot keep, as far as that takes no weight to be read."""
        assert self.format is not None
        for index in range(self.config.num_hidden_layers):
            for module in projections_of(index):
                if module not in self._coded:
                    raise UnsupportedError(
                        f"{self.folder}: {module} is not quantised, as others are ({self.format.title}): "
                        f"{DEQUANTISED_INSTEAD}"
                    )

    def codes(self, index: int) -> CodedLayer:
        """Return the codes of one layer's projections, exactly as they are stored."""
        q, k, v, o, gate, up, down = (self._int4(module) for module in projections_of(index))
        head_dim = self.config.head_dim
        pairs = (weight.map_rows(lambda rows: pair_order(rows, head_dim)) for weight in (q, k))
        return CodedLayer(qkv=Int4Weight.cat((*pairs, v)), o=o, gate_up=Int4Weight.cat((gate, up)), down=down)

    def norm_gains(self) -> list[Tensor]:
        """Return the gains of each layer's two norms, in order: 2 num_hidden_layers of float32 [hidden_size]."""
        return [
            self._read(f"model.layers.{index}.{norm}.weight").to(torch.float32, copy=True)
            for index in range(self.config.num_hidden_layers)
            for norm in ("input_layernorm", "post_attention_layernorm")
        ]

    def projection(self, module: str) -> Tensor:
        """Return W [N, K] of a linear layer as the checkpoint has it, dequantised; no gain in it."""
        return self._weight(module)

    def lm_head(self) -> Tensor:
        """Return the head [vocab_size, hidden_size] with the final norm's gain folded in; a tied one is a copy."""
        weight = self._read(EMBEDDING) if self.config.tie_word_embeddings else self._weight("lm_head")
        if self.config.tie_word_embeddings and HEAD in self._files and not torch.equal(weight, self._read(HEAD)):
            raise CheckpointError(
                f"{self.folder}: the config ties the embeddings, yet {HEAD} differs from {EMBEDDING}; "
                'if the head was trained apart, set "tie_word_embeddings": false'
            )
        return fold_gain(weight, self._read(FINAL_NORM))

    def rope_table(self) -> Tensor:
        """Return (cos, sin) of every position that the model knows."""
        return rope_table(self.config, self.config.max_position_embeddings)

    def __contains__(self, name: str) -> bool:
        """Whether there is a tensor of this name."""
        return name in self._files

    def type_of(self, name: str) -> str:
        """Safetensors' name of a tensor's type."""
        kind: str = self._files[name].get_slice(name).get_dtype()
        return kind

    def read(self, name: str) -> Tensor:
        """Return a tensor as it is stored."""
        return self._read(name)

    def _weight(self, module: str) -> Tensor:
        """W [N, K] of a linear layer; float32 where it is stored as codes."""
        if module not in self._coded:
            return self._read(f"{module}.weight")
        assert self.format is not None
        return self.format.read(module, self._coded[module], self).dequantise()

    def _int4(self, module: str) -> Int4Weight:
        assert self.format is not None
        codes = self.format.read(module, self._coded[module], self)
        assert isinstance(codes, GroupedCodes)
        return codes.int4()

    def _read(self, name: str) -> Tensor:
        try:
            tensor: Tensor = self._files[name].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.folder}: {name} cannot be read: {error}; fetch the file again") from error
        return tensor

    def _check(self) -> None:
        """Refuse missing, unexpected, misshapen and mistyped tensors."""
        expected = self._expected()
        for name, (shapes, types) in expected.items():
            if name not in self._files:
                if name == HEAD and self.config.tie_word_embeddings:
                    continue
                hint = '; if the embeddings are tied, set "tie_word_embeddings": true' if name == HEAD else ""
                raise CheckpointError(
                    f"{self.folder}: {name} is missing; the checkpoint is incomplete, or not of this config{hint}"
                )
            view = self._files[name].get_slice(name)
            if tuple(view.get_shape()) not in shapes:
                wanted = " or ".join(str(list(shape)) for shape in shapes)
                raise CheckpointError(
                    f"{self.folder}: {name} has shape {list(view.get_shape())}, the config asks for {wanted}; "
                    "the weights and config.json belong to different models"
                )
            if view.get_dtype() not in types:
                raise CheckpointError(
                    f"{self.folder}: {name} is stored as {view.get_dtype()}; supported: {', '.join(types)}"
                )
        for name in sorted(self._files):
            spare = name.endswith(OLD_ROPE) or (self.format is not None and self.format.spare(name))
            if name not in expected and not spare:
                raise CheckpointError(
                    f"{self.folder}: {name} is not a tensor of this config (a bias, a further norm, or a layer beyond "
                    f"num_hidden_layers = {self.config.num_hidden_layers}); leaving it out would give wrong answers"
                )

    def _expected(self) -> dict[str, Stored]:
        """Every tensor, the format's in place of the weights that it holds as codes."""
        expected: dict[str, Stored] = {}
        for name, shape in expected_shapes(self.config).items():
            module = name.removesuffix(".weight")
            tied = name == HEAD and self.config.tie_word_embeddings
            if self.format is not None and len(shape) == 2 and name != EMBEDDING and not tied:
                tensors = self.format.tensors(module, (shape[0], shape[1]), self)
                if tensors is not None:
                    expected.update(tensors)
                    self._coded[module] = shape[0], shape[1]
                    continue
            expected[name] = Stored((shape,), FLOATS)
        return expected


def projections_of(index: int) -> tuple[str, ...]:
    """The linear layers of a layer: q, k, v, o, gate, up, down."""
    return tuple(
        f"model.layers.{index}.{part}_proj"
        for part in (
            "self_attn.q",
            "self_attn.k",
            "self_attn.v",
            "self_attn.o",
            "mlp.gate",
            "mlp.up",
            "mlp.down",
        )
    )


def expected_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Return every tensor of a Hugging Face Llama checkpoint and its shape; lm_head.weight, the last, may be tied."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.heads.q_features, config.heads.kv_features
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    return {
        EMBEDDING: (config.vocab_size, hidden),
        **{
            f"model.layers.{index}.{part}.weight": shape
            for index in range(config.num_hidden_layers)
            for part, shape in layer.items()
        },
        FINAL_NORM: (hidden,),
        HEAD: (config.vocab_size, hidden),
    }


def _locate(folder: Path) -> dict[str, Any]:
    """Return tensor name -> opened file."""
    if (folder / SINGLE_FILE).is_file():
        opened = open_safetensors(folder / SINGLE_FILE)
        return dict.fromkeys(opened.keys(), opened)
    if (folder / INDEX_FILE).is_file():
        return _locate_shards(folder)
    others = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pth", ".pt", ".gguf"))
    if others:
        raise CheckpointError(
            f"{folder} holds {others[0]} but no {SINGLE_FILE}; only safetensors are read (pickled files can run code): "
            "load it with transformers and save_pretrained it, or fetch the safetensors of the model"
        )
    raise CheckpointError(f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}; the download is incomplete")


def _locate_shards(folder: Path) -> dict[str, Any]:
    index = folder / INDEX_FILE
    try:
        weight_map = read_json(index).get("weight_map")
    except ConfigError as error:
        raise CheckpointError(str(error)) from error
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(f"{index}: weight_map must map each tensor to its file; fetch the file again")
    opened: dict[str, Any] = {}
    held: dict[str, set[str]] = {}
    for name, shard in weight_map.items():
        if shard not in opened:
            if not names_a_file(shard):
                raise CheckpointError(f"{index}: {name} lies in {shard!r}; shards must lie beside the index")
            if not (folder / shard).is_file():
                raise CheckpointError(f"{folder / shard} is missing; {INDEX_FILE} keeps {name} in it: fetch it again")
            opened[shard] = open_safetensors(folder / shard)
            held[shard] = set(opened[shard].keys())
        if name not in held[shard]:
            raise CheckpointError(f"{folder / shard} lacks {name}, which {INDEX_FILE} promises; fetch both again")
    for shard, names in held.items():
        for name in sorted(names):
            if weight_map.get(name) != shard and not name.endswith(OLD_ROPE):
                elsewhere = f"keeps in {weight_map[name]}" if name in weight_map else "does not list"
                raise CheckpointError(
                    f"{folder / shard} holds {name}, which {INDEX_FILE} {elsewhere}; leaving it out could give wrong "
                    "answers: fetch both again"
                )
    return {name: opened[shard] for name, shard in weight_map.items()}


def open_safetensors(path: Path) -> Any:
    """Open one safetensors file; nothing is read but its header."""
    try:
        with path.open("rb") as stream:
            if stream.read(len(LFS_POINTER)) == LFS_POINTER:
                raise CheckpointError(f"{path} is a git-LFS pointer, not the weights; run: git lfs pull")
        return safe_open(str(path), framework="pt")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except SafetensorError as error:
        raise CheckpointError(
            f"{path} is damaged: {_damage(path) or str(error)[:MOST_WORDS]}; fetch it again"
        ) from error


def _damage(path: Path) -> str | None:
    """Name the first tensor that lies beyond the end of a truncated file; None where even the header is unreadable."""
    size = path.stat().st_size
    try:
        with path.open("rb") as stream:
            (header_size,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(min(header_size, LONGEST_HEADER)))
        ends = {
            name: 8 + header_size + entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"
        }
    except (struct.error, ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        return None
    cut = sorted((end, name) for name, end in ends.items() if end > size)
    return f"it ends at byte {size}, and {cut[0][1]} at byte {cut[0][0]}" if cut else None
