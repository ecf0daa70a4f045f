"""The commands run and perplexity, and what the package imports."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tokenizers
import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

import futransformer
from futransformer import small_model as small_model_module
from futransformer.cli import main
from futransformer.decode_step import DecodeStep
from futransformer.driver import hopper_problem
from futransformer.model import Llama
from futransformer.sampling import Sampling
from futransformer.tokenizer import OPEN, TextStream, Tokenizer

Output = pytest.CaptureFixture[str]


def transformers_nll(folder: Path, windows: torch.Tensor, dtype: torch.dtype) -> npt.NDArray[np.float32]:
    """-log p of every token of each window but the first, as transformers computes it."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=dtype)
    with torch.no_grad():
        logits = model(windows).logits.float()
    nll: npt.NDArray[np.float32] = cross_entropy(
        logits[:, :-1].flatten(0, 1), windows[:, 1:].flatten(), reduction="none"
    ).numpy()
    return nll


def run_json(capsys: Output, *arguments: object) -> dict[str, object]:
    """Run a command that must succeed and parse what it prints."""
    assert main([str(argument) for argument in arguments]) == 0
    report: dict[str, object] = json.loads(capsys.readouterr().out)
    return report


def failure(capsys: Output, *arguments: object) -> str:
    """Run a command that must refuse with status 2 and one line; return the line."""
    assert main([str(argument) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


# The package


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys, futransformer; print(futransformer.__version__, 'torch' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.split() == [futransformer.__version__, "False"]


def test_the_package_offers_its_names() -> None:
    assert futransformer.Llama is Llama
    assert futransformer.LLM.__module__ == "futransformer.llm"
    assert futransformer.SamplingParams().temperature == 1
    assert futransformer.load_config("smollm2-135m").num_hidden_layers == 30
    assert futransformer.load_kernels.__module__ == "futransformer.library"
    with pytest.raises(AttributeError, match="has no attribute 'Lama'"):
        futransformer.Lama  # noqa: B018


# run


def test_run_streams_the_text_it_generates(tiny_base_model: Path, capsys: Output) -> None:
    assert main(["run", str(tiny_base_model), "--prompt", "Hello", "--max-new-tokens", "9", "--reference"]) == 0
    captured = capsys.readouterr()
    tokenizer = Tokenizer(tiny_base_model)
    model = Llama.from_pretrained(tiny_base_model, device="cpu")
    (tokens,) = model.generate([tokenizer.encode("Hello")], 9)
    stream = TextStream(tokenizer)
    assert captured.out == "".join(stream.add(token) for token in tokens) + stream.rest() + "\n"
    assert captured.out == tokenizer.decode(tokens) + "\n"
    assert "tiny-base on: CPU reference" in captured.err


def test_run_samples_by_a_seed(tiny_base_model: Path, capsys: Output) -> None:
    run = ("run", tiny_base_model, "--prompt", "Hello", "--max-new-tokens", 9, "--reference", "--json")
    options = ("--temperature", 1.5, "--top-k", 90, "--top-p", 0.9, "--min-p", 0.01, "--repetition-penalty", 1.2)
    texts = [run_json(capsys, *run, *options, "--seed", seed)["tokens"] for seed in (3, 3, 4)]
    model = Llama.from_pretrained(tiny_base_model, device="cpu")
    prompts = [Tokenizer(tiny_base_model).encode("Hello")]
    expected = [model.generate(prompts, 9, sampling=Sampling(1.5, 90, 0.9, 0.01, 1.2, seed))[0] for seed in (3, 3, 4)]
    assert texts == expected
    assert texts[0] != texts[2]
    assert "sampling: top_p must be above 0 and at most 1, not 2.0" in failure(capsys, *run, "--top-p", 2)


@pytest.mark.parametrize(("new", "options"), [(40, ()), (12, ("--temperature", 0.8, "--seed", 3))])
def test_run_speculates(
    tiny_base_model: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch, new: int, options: Any
) -> None:
    """The same text in fewer steps, for it repeats itself; what cannot be is refused before the model is loaded."""
    prompt = "one two three one two three one two"
    run = ("run", tiny_base_model, "--prompt", prompt, "--max-new-tokens", new, "--reference", "--json", *options)
    steps = 0
    launch = DecodeStep._launch

    def counted(step: DecodeStep, *arguments: Any) -> Any:
        nonlocal steps
        steps += 1
        return launch(step, *arguments)

    monkeypatch.setattr(DecodeStep, "_launch", counted)
    plain, alone = run_json(capsys, *run)["tokens"], steps
    steps = 0
    assert run_json(capsys, *run, "--speculate", 5)["tokens"] == plain
    assert steps <= alone if options else steps < alone
    monkeypatch.setattr(Llama, "from_pretrained", None)
    assert "speculate takes 1 to 7 tokens ahead" in failure(capsys, *run, "--speculate", 8)
    assert "cannot penalise repetition" in failure(capsys, *run, "--speculate", 4, "--repetition-penalty", 1.1)


def test_run_reports_json(tiny_base_model: Path, capsys: Output) -> None:
    report = run_json(
        capsys, "run", tiny_base_model, "--prompt", "Hello", "--max-new-tokens", 9, "--reference", "--json"
    )
    tokens = report["tokens"]
    assert isinstance(tokens, list)
    assert report["prompt_tokens"] == 5
    assert report["new_tokens"] == len(tokens)
    assert report["text"] == Tokenizer(tiny_base_model).decode(tokens)
    assert report["chat"] is False
    assert str(report["backend"]).startswith("CPU reference")
    assert report["stopped_by"] == ("eos" if tokens[-1] in (257, 10) else "max_new_tokens")


def test_run_chats_where_there_is_a_template_and_not_where_told(tiny_model: Path, capsys: Output) -> None:
    common = ("run", tiny_model, "--prompt", "Hello", "--max-new-tokens", 1, "--reference", "--json")
    assert run_json(capsys, *common)["prompt_tokens"] == 6  # <s>Hello
    assert run_json(capsys, *common, "--chat")["prompt_tokens"] == 6
    assert run_json(capsys, *common, "--no-chat")["prompt_tokens"] == 5


@pytest.mark.skipif(hopper_problem() is None, reason="this machine has a Hopper GPU")
def test_run_says_that_the_reference_computes_without_a_gpu(tiny_base_model: Path, capsys: Output) -> None:
    assert main(["run", str(tiny_base_model), "--prompt", "Hello", "--max-new-tokens", "1"]) == 0
    assert "on: CPU reference" in capsys.readouterr().err


def test_run_prepares_the_small_model_by_name(
    tiny_base_model: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(small_model_module, "prepare_small_model", lambda **_: tiny_base_model)
    report = run_json(
        capsys, "run", "smollm2-135m", "--prompt", "Hello", "--max-new-tokens", 1, "--reference", "--json"
    )
    assert report["model"] == "tiny-base"


def test_run_refuses(tiny_base_model: Path, tmp_path: Path, capsys: Output) -> None:
    run = ("run", tiny_base_model, "--reference", "--prompt")
    assert "has no chat template" in failure(capsys, *run, "Hello", "--chat")
    assert "--no-chat" in failure(capsys, *run, "Hello", "--chat")
    assert "the prompt is empty" in failure(capsys, *run, "")
    assert "--max-new-tokens must be at least 1" in failure(capsys, *run, "Hello", "--max-new-tokens", 0)
    assert "max_position_embeddings" in failure(capsys, *run, "Hello" * 103)
    assert "there is no folder" in failure(capsys, "run", tmp_path / "none", "--prompt", "Hello")
    assert "smollm2-135m" in failure(capsys, "run", "llama-3.1-8b", "--prompt", "Hello")
    assert "no tokenizer" in failure(capsys, "run", tmp_path, "--prompt", "Hello")
    assert "are for a GPU" in failure(capsys, *run, "Hello", "--kernels", tmp_path)
    assert r"the text is not UTF-8: character 2 is '\udcff'" in failure(capsys, *run, "ab\udcffc")


@pytest.mark.parametrize("template", ["{{ raise_exception('no') }}", "{{ messages[0", "{{ a.b.c }}"])
def test_a_chat_template_that_fails_is_one_message(
    tiny_base_model: Path, tmp_path: Path, capsys: Output, template: str
) -> None:
    folder = Path(shutil.copytree(tiny_base_model, tmp_path / "chat"))
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template}))
    message = failure(capsys, "run", folder, "--reference", "--prompt", "Hello")
    assert f"{folder}: the chat template refuses messages of user: " in message
    assert "--no-chat" in message


def test_text_is_streamed_in_whole_characters(tiny_base_model: Path) -> None:
    tokenizer = Tokenizer(tiny_base_model)
    tokens = tokenizer.encode("é€𝄞!")
    assert len(tokens) == 10
    stream = TextStream(tokenizer)
    assert [stream.add(token) for token in tokens] == ["", "é", "", "", "€", "", "", "", "𝄞", "!"]
    assert stream.text == "é€𝄞!"
    assert stream.rest() == ""


def test_a_text_that_ends_inside_a_character_is_given_to_its_end(tiny_base_model: Path) -> None:
    tokenizer = Tokenizer(tiny_base_model)
    stream = TextStream(tokenizer)
    assert [stream.add(token) for token in tokenizer.encode("a€")[:-1]] == ["a", "", ""]
    assert stream.rest() == "\N{REPLACEMENT CHARACTER}"
    assert stream.rest() == ""


def test_a_stream_in_pieces_is_the_text_of_all_tokens(tiny_base_model: Path) -> None:
    """Of any bytes, characters cut anywhere; a piece that was given is never taken back."""
    tokenizer = Tokenizer(tiny_base_model)
    generator = np.random.default_rng(5)
    for _ in range(30):
        tokens = generator.integers(0, 258, 40).tolist()
        stream = TextStream(tokenizer)
        assert "".join(stream.add(token) for token in tokens) + stream.rest() == tokenizer.decode(tokens)


@pytest.mark.parametrize(
    "tokens",
    [
        *([[256] * 100, [0x80] * 100, [0xE2] * 100, [0xE2, 0x82] * 50, [0xC3] * 15 + [0xA9] * 2 + [0x9D] * 40]),
        [0xF0, 0x9D, 256, 0x84, 256, 256, 0x9E, *([256] * 40), 0x41],  # a character around tokens that have no text
        [*([300] * 60), 0x41, *([300] * 60)],  # beyond the vocabulary, as a model's may be padded
    ],
)
def test_tokens_that_make_no_character_are_not_decoded_again_and_again(
    tiny_base_model: Path, tokens: list[int]
) -> None:
    """Or a text of them would cost more with every token, and a step of an engine with it."""
    tokenizer = Tokenizer(tiny_base_model)
    stream, pieces = TextStream(tokenizer), []
    for token in tokens:
        pieces.append(stream.add(token))
        assert len(stream._open) < OPEN
    assert "".join(pieces) + stream.rest() == tokenizer.decode(tokens)


def test_a_stream_goes_on_from_what_stands_before_it(tiny_base_model: Path) -> None:
    """A tokenizer whose words begin with a space drops that of a text's first word."""
    tokenizer = Tokenizer(tiny_base_model)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "▁a": 1, "▁b": 2}, "<s>"))
    words.add_special_tokens(["<s>"])
    words.decoder = tokenizers.decoders.Metaspace()
    tokenizer._tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    for context, text in (((), "a b"), ((0,), "a b"), ((0, 2), " a b")):
        stream = TextStream(tokenizer, context=context)
        assert "".join(stream.add(token) for token in (1, 2)) + stream.rest() == text, context
    stream = TextStream(tokenizer, context=[0, 2], skip_special_tokens=False)
    assert [stream.add(token) for token in (1, 0)] == [" a", "<s>"]


# perplexity


def test_perplexity_prints_what_it_measured(tiny_base_model: Path, tmp_path: Path, capsys: Output) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(b"abc\r\n" * 20)
    common = ("perplexity", tiny_base_model, "--text", text, "--context", 32, "--reference")
    report = run_json(capsys, *common, "--json", "--nll", tmp_path / "nll.npy")
    assert report["windows"] == 3
    assert report["tokens_scored"] == 93
    assert report["tokens_left_out"] == 4
    assert (report["context"], report["stride"], report["bos"]) == (32, 32, "none added")
    nll = np.load(tmp_path / "nll.npy")
    assert nll.dtype == np.float32
    assert nll.shape == (93,)
    assert report["perplexity"] == pytest.approx(float(np.exp(nll.astype(np.float64).mean())))

    assert main([str(argument) for argument in common]) == 0
    captured = capsys.readouterr()
    assert f"perplexity       {report['perplexity']:.4f}" in captured.out
    assert "tokens scored    93" in captured.out
    assert "reading 3 x 32 tokens\n" in captured.err
    assert "3 of 3 windows" in captured.err
    assert main([str(argument) for argument in (*common, "--through", "decode", "--windows", 1)]) == 0
    assert "reading 1 x 32 tokens, token by token\n" in capsys.readouterr().err


def test_perplexity_through_decode_is_that_through_prefill(
    tiny_base_model: Path, tmp_path: Path, capsys: Output
) -> None:
    """The two round the residual stream in different places, so each is held to float32, no farther than BF16 is."""
    common = ("perplexity", tiny_base_model, "--context", 16, "--windows", 3, "--reference", "--json", "--nll")
    prefill = run_json(capsys, *common, tmp_path / "prefill.npy")
    decode = run_json(capsys, *common, tmp_path / "decode.npy", "--through", "decode", "--batch", 2)
    assert (prefill["through"], decode["through"]) == ("prefill", "decode")
    assert prefill["text"] == "sample.txt"
    sample = (resources.files("futransformer") / "data" / "sample.txt").read_bytes().decode()
    tokens = torch.tensor(Tokenizer(tiny_base_model).encode(sample)[:48]).view(3, 16)
    exact = transformers_nll(tiny_base_model, tokens, torch.float32)
    allowed = np.abs(transformers_nll(tiny_base_model, tokens, torch.bfloat16) - exact)
    for ours in (np.load(tmp_path / "prefill.npy"), np.load(tmp_path / "decode.npy")):
        error = np.abs(ours - exact)
        assert error.max() < allowed.max()
        assert error.mean() < allowed.mean()


def test_perplexity_of_int4_is_decoded(tiny_base_model: Path, tmp_path: Path, capsys: Output) -> None:
    """A prompt is read without INT4: decode is what --precision int4 asks about, and prefill's type is told."""
    common = ("perplexity", tiny_base_model, "--context", 16, "--windows", 2, "--reference", "--json", "--precision")
    int4 = run_json(capsys, *common, "int4-g32-asym")
    assert (int4["precision"], int4["through"], int4["batch"]) == ("int4-g32-asym", "decode", 2)
    prefill = run_json(capsys, *common, "int4-g32-asym", "--through", "prefill")
    plain = run_json(capsys, *common, "bf16")
    assert prefill["prefill"] == "bf16"
    assert int4["perplexity"] != prefill["perplexity"] == plain["perplexity"]
    assert not {"prefill", "decode"} & (int4.keys() | plain.keys())
    assert (
        "(int4 also with -g32, -g64, -g256 or -channel, then -asym, then -gain; all with -head8 or -head4, then -kv8, "
        in failure(capsys, *common, "int4-g48")
    )


def test_run_decodes_in_int4(tiny_base_model: Path, capsys: Output) -> None:
    run = ("run", tiny_base_model, "--prompt", "Hello", "--max-new-tokens", 9, "--reference", "--json", "--precision")
    report = run_json(capsys, *run, "int4-channel")
    assert report["precision"] == "int4-channel"
    model = Llama.from_pretrained(tiny_base_model, device="cpu", precision="int4-channel")
    assert [report["tokens"]] == model.generate([Tokenizer(tiny_base_model).encode("Hello")], 9)


def test_perplexity_refuses(tiny_base_model: Path, tmp_path: Path, capsys: Output) -> None:
    perplexity = ("perplexity", tiny_base_model, "--reference")
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    (tmp_path / "short").write_text("a")
    assert "there is no such file" in failure(capsys, *perplexity, "--text", tmp_path / "none")
    assert "cannot be read: Is a directory; name a file" in failure(capsys, *perplexity, "--text", tmp_path)
    assert "the text has 0 tokens" in failure(capsys, *perplexity, "--text", "/dev/null")
    assert "is not UTF-8" in failure(capsys, *perplexity, "--text", binary)
    assert "the text has 1 tokens" in failure(capsys, *perplexity, "--text", tmp_path / "short")
    for wrong in (tmp_path / "nowhere" / "nll.npy", tmp_path):
        assert f"--nll {wrong}: give the name of a file" in failure(capsys, *perplexity, "--nll", wrong)
    assert "a window must be at least 2 tokens, not 1" in failure(capsys, *perplexity, "--context", 1)
    assert "--batch must be at least 1" in failure(capsys, *perplexity, "--batch", 0)
    assert "max_position_embeddings" in failure(capsys, *perplexity, "--context", 1024, "--windows", 1)
