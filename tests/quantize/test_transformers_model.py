"""transformers' own generate on a folder of ours: the tokens of Llama.generate; other folders are as they were."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from futransformer.cli import main
from futransformer.generator.errors import InputError
from futransformer.model import Llama
from futransformer.transformers_model import FuTransformerForCausalLM, register

NEW = 12


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    register()
    yield
    AutoModelForCausalLM._model_mapping._extra_content.pop(LlamaConfig)


@pytest.fixture(scope="module")
def folder(tiny_base_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("quantised") / "int4"
    options = ["--group-size", "64", "--device", "cpu", "--lm-head", "fp8", "--kv", "fp8"]
    assert main(["quantize", str(tiny_base_model), "-o", str(out), *options]) == 0
    return out


@pytest.fixture(scope="module")
def llama(folder: Path) -> Llama:
    return Llama.from_pretrained(folder, device="cpu", cache_tokens=1024)


def load(folder: Path, **options: Any) -> FuTransformerForCausalLM:
    model = AutoModelForCausalLM.from_pretrained(folder, device_map="cpu", cache_tokens=1024, **options)
    assert isinstance(model, FuTransformerForCausalLM)
    return model


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(11, 250, (length,), generator=generator).tolist() for length in lengths]


def padded(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    """On the left, with a token that would be another text if it were read."""
    width = max(map(len, rows))
    ids = torch.tensor([[99] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("lengths", [(9,), (5, 70, 1)])
def test_greedy_tokens_are_those_of_our_own_generate(folder: Path, llama: Llama, lengths: tuple[int, ...]) -> None:
    rows = prompts(*lengths)
    expected = llama.generate(rows, NEW)
    assert max(map(len, expected)) > 3
    given = padded(rows)
    written = load(folder).generate(**given, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    assert torch.equal(written[:, : given["input_ids"].shape[1]], given["input_ids"])
    for row, text in zip(written[:, given["input_ids"].shape[1] :].tolist(), expected, strict=True):
        assert row[: len(text)] == text
        assert not any(row[len(text) :])


def test_a_token_is_a_decode_step_and_nothing_else_is(
    folder: Path, llama: Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt is read once; after another batch, or a call to the model below, everything is read again."""
    model, read = load(folder), list[Any]()
    prefill = model.llama.prefill

    def noted(prompts: list[list[int]], **options: Any) -> torch.Tensor:
        read.append(prompts)
        return prefill(prompts, **options)

    monkeypatch.setattr(model.llama, "prefill", noted)
    row = prompts(20)[0]
    model.generate(torch.tensor([row]), max_new_tokens=NEW, do_sample=False, eos_token_id=257, pad_token_id=0)
    assert read == [[row]]
    ids = torch.tensor(prompts(6, 6))
    model(ids, logits_to_keep=1)
    assert len(read) == 2
    longer = torch.cat((ids, torch.tensor([[40], [41]])), 1)
    step = model(longer, logits_to_keep=1).logits
    assert len(read) == 2
    anew = model(longer, logits_to_keep=1).logits  # not a token more
    assert len(read) == 3
    llama.prefill(ids.tolist())
    assert torch.equal(step[:, 0], llama.decode([40, 41]))
    assert torch.equal(anew[:, 0], llama.prefill(longer.tolist()))
    model(longer.flip(0), logits_to_keep=1)
    model.llama.start(2)
    model(torch.cat((longer.flip(0), longer[:, :1]), 1), logits_to_keep=1)
    assert len(read) == 5


def test_all_logits_stand_where_their_tokens_do(folder: Path, llama: Llama) -> None:
    rows = prompts(3, 8)
    given = padded(rows)
    logits = load(folder)(**given).logits
    assert logits.shape == (2, 8, 258)
    assert torch.equal(logits[given["attention_mask"].bool()], llama.prefill(rows, rows="all"))
    assert torch.equal(load(folder)(**given, logits_to_keep=2).logits, logits[:, -2:])


def test_beams_are_read_again_as_they_are_reordered(folder: Path, llama: Llama) -> None:
    """The best of three beams is at least as likely as the greedy text, by the model's own logits."""
    row = prompts(9)[0]
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": 257}
    model = load(folder)
    best, greedy = (model.generate(torch.tensor([row]), num_beams=n, **options)[0].tolist() for n in (3, 1))

    def likelihood(text: list[int]) -> float:
        picked = llama.prefill([text], rows="all").log_softmax(1)[len(row) - 1 : -1]
        return picked.gather(1, torch.tensor(text[len(row) :])[:, None]).sum().item()

    assert likelihood(best) >= likelihood(greedy) - 0.05


def test_other_folders_are_loaded_by_transformers(tiny_base_model: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_base_model, dtype=torch.float32)
    assert type(model) is LlamaForCausalLM
    assert model.dtype == torch.float32


def test_what_means_nothing_here_is_refused(folder: Path) -> None:
    with pytest.raises(InputError, match=r"dtype is BF16 beside what is quantised, not torch.float32"):
        load(folder, dtype=torch.float32)
    with pytest.raises(InputError, match="offload_folder means nothing to a model of ours"):
        load(folder, offload_folder="x")
    with pytest.raises(InputError, match="one device"):
        AutoModelForCausalLM.from_pretrained(folder, device_map={"model": "cpu", "lm_head": "cpu"})
    model, ids = load(folder), torch.tensor(prompts(4))
    with pytest.raises(InputError, match="not labels"):
        model(ids, labels=ids)
    with pytest.raises(InputError, match="pad on the left"):
        model(ids, attention_mask=torch.tensor([[1, 1, 1, 0]]), logits_to_keep=1)
    with pytest.raises(InputError, match="copy the folder"):
        model.save_pretrained("x")
