"""Generation with the host out of the way: the same texts as step by step, and rows that have stopped do no harm."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import futransformer.model
from futransformer.decode_step import LOG_STEPS, DecodeStep, Kind
from futransformer.driver import hopper_problem
from futransformer.generation import Generation
from futransformer.generator.config import load_config
from futransformer.generator.errors import InputError
from futransformer.kv_cache import KVCache
from futransformer.model import Llama
from futransformer.reference import ReferenceOps
from futransformer.sampling import GREEDY, Sampling, SamplingRows, choose, pack_seen
from tests.engine.exact import ExactLlama

PROMPTS = [[7, 30, 200], [9] * 64, [1, 2, 3, 4, 5] * 13, [250], [11, 12]]
NEW_TOKENS = 45
SETTINGS = [
    Sampling(1.3, seed=5),
    Sampling(0.9, top_k=9, top_p=0.8, seed=-3),
    GREEDY,
    Sampling(1.1, min_p=0.05, repetition_penalty=1.4, seed=2**40),
    Sampling(0.0, repetition_penalty=1.5),
]

Load = Callable[..., Llama]


@pytest.fixture
def load(tiny_base_model: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Return a function that makes a model; ``ahead`` queues windows of steps, as on a GPU."""

    def capture(step: DecodeStep, pages: int, kind: Kind) -> Any:
        logits = torch.empty(step.tokens.shape[0], 258) if kind == "logits" else None

        class Replay:
            """Runs what was captured, with the arguments of its capture."""

            def replay(self) -> None:
                found = step._run(pages, kind)
                assert (found is None) == (logits is None)
                if logits is not None and found is not None:
                    logits.copy_(found)

        return Replay(), logits

    monkeypatch.setattr(DecodeStep, "_capture", capture)
    monkeypatch.setattr(futransformer.model, "CAPTURED_ROWS", 0)  # prompts are read eagerly

    def made(*, ahead: bool, pages: int = 12) -> Llama:
        config = load_config(tiny_base_model)
        ops = ReferenceOps(config, dtype=torch.float32)
        ops.capturable = ahead
        model = Llama.from_pretrained(tiny_base_model, ops=ops, cache_tokens=64)
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(1)).tolist()
        cache = KVCache(config, pages, page_order=order, dtype=torch.float32)
        cache.pool.fill_(torch.nan)
        return Llama(config, ops, model.weights, cache)

    return made


def step_by_step(
    model: Llama, prompts: Sequence[Sequence[int]], count: int, ends: Sequence[int] = ()
) -> list[list[int]]:
    """Each prompt alone, by the likeliest token of each step's logits."""
    texts = []
    for prompt in prompts:
        text = [int(model.prefill([prompt])[0].argmax())]
        while len(text) < count and text[-1] not in ends:
            text.append(int(model.decode([text[-1]])[0].argmax()))
        texts.append(text)
    model.start(1)
    return texts


def sampled_alone(model: Llama, prompt: list[int], count: int, sampling: Sampling) -> list[int]:
    """One prompt, by futransformer.sampling of each step's logits."""
    text = list(prompt)
    logits = model.prefill([prompt])
    while len(text) < len(prompt) + count:
        position = torch.tensor([len(text)], dtype=torch.int32)
        rows = SamplingRows.of([sampling], position, pack_seen([text], model.config.vocab_size))
        text.append(int(choose(logits, rows)))
        logits = model.decode(text[-1:])
    model.start(1)
    return text[len(prompt) :]


@pytest.mark.parametrize("count", [1, 2, LOG_STEPS, LOG_STEPS + 1, LOG_STEPS + 2, NEW_TOKENS])
def test_windows_give_the_text_of_single_steps(load: Load, count: int) -> None:
    expected = step_by_step(load(ahead=False), PROMPTS, count)
    for ahead in (False, True):
        model = load(ahead=ahead)
        heard: list[list[int]] = [[] for _ in PROMPTS]

        def hear(index: int, token: int, heard: list[list[int]] = heard) -> None:
            heard[index].append(token)

        texts = model.generate(PROMPTS, count, eos_token_ids=[], on_token=hear)
        assert texts == expected
        assert heard == expected
        assert model.cache.free_pages == model.cache.num_pages


def test_texts_end_by_themselves_and_batches_shrink(load: Load) -> None:
    """Rows that end at the first token, within a window, at its edge, and in steps that are queued behind their end."""
    free = step_by_step(load(ahead=False), PROMPTS, NEW_TOKENS)
    shapes = set()
    for ends in (
        [free[3][0]],
        [free[0][3], free[2][9]],
        [free[1][8]],
        [free[4][17], free[0][20]],
        [t[5] for t in free],
    ):
        expected = step_by_step(load(ahead=False), PROMPTS, NEW_TOKENS, ends)
        for ahead in (False, True):
            model = load(ahead=ahead)
            assert model.generate(PROMPTS, NEW_TOKENS, eos_token_ids=ends) == expected
            shapes |= {batch for batch, _ in model._steps}
    assert len(shapes) > 2, "no batch has shrunk"


def test_a_row_that_has_stopped_writes_nothing(load: Load) -> None:
    """Its last token, and all that is computed behind it, leave the cache as it was."""
    free = step_by_step(load(ahead=False), PROMPTS[:2], 20)
    model = load(ahead=True, pages=6)
    pages: list[list[int]] = []
    text_of_first = free[0].index(free[0][4]) + 1
    assert free[0][4] not in free[1]

    def remember(index: int, token: int) -> None:
        if not pages and len(model.sequences) == 2:
            pages.extend(list(sequence.pages) for sequence in model.sequences)

    texts = model.generate(PROMPTS[:2], 20, eos_token_ids=[free[0][4]], on_token=remember)
    assert [len(text) for text in texts] == [text_of_first, 20]
    lengths = [len(prompt) + len(text) - 1 for prompt, text in zip(PROMPTS, texts, strict=False)]
    written = ~model.cache.pool[0, 0, :, 0, :, 0].isnan()  # by page and slot
    expected = torch.zeros_like(written)
    for row, length in zip(pages, lengths, strict=True):
        for token in range(length):
            expected[row[token // 64], token % 64] = True
    assert torch.equal(written, expected)


def test_samples_do_not_depend_on_the_batch(load: Load) -> None:
    """Each prompt with its own settings, together, alone, and by the steps' logits; greedy ones among them."""
    alone = load(ahead=False)
    expected = [sampled_alone(alone, *each) for each in zip(PROMPTS, [20] * len(PROMPTS), SETTINGS, strict=True)]
    for ahead in (False, True):
        model = load(ahead=ahead)
        assert model.generate(PROMPTS, 20, eos_token_ids=[], sampling=SETTINGS) == expected
        backwards = model.generate(PROMPTS[::-1], 20, eos_token_ids=[], sampling=SETTINGS[::-1])
        assert backwards[::-1] == expected
        assert model.generate(PROMPTS[1:2], 20, eos_token_ids=[], sampling=SETTINGS[1]) == expected[1:2]
        # greedy again, with the graphs and tensors that sampling has left
        assert model.generate(PROMPTS[2:3], 20, eos_token_ids=[], sampling=GREEDY) == expected[2:3]


def test_samples_go_on_when_others_end(load: Load) -> None:
    """What a smaller batch goes on with is what the larger one has seen."""
    model = load(ahead=True)
    together = model.generate(PROMPTS, 30, eos_token_ids=[], sampling=SETTINGS)
    ends = [together[1][2], together[4][12]]
    ended = model.generate(PROMPTS, 30, eos_token_ids=ends, sampling=SETTINGS)
    for text, free in zip(ended, together, strict=True):
        stops = [place for place, token in enumerate(free) if token in ends]
        assert text == (free[: stops[0] + 1] if stops else free)
    assert len({len(text) for text in ended}) > 2


def test_seeds_change_texts(load: Load) -> None:
    model = load(ahead=True)
    texts = {
        tuple(model.generate([[1, 2]], 12, eos_token_ids=[], sampling=Sampling(seed=seed))[0]) for seed in range(9)
    }
    assert len(texts) > 5


def test_settings_that_fit_no_prompt_are_refused(load: Load) -> None:
    model = load(ahead=False)
    with pytest.raises(InputError, match="3 settings of sampling for 2 prompts: give one for each, or one"):
        model.generate(PROMPTS[:2], 4, sampling=SETTINGS[:3])
    assert model.sequences == []


def test_a_listener_that_fails_leaves_the_model_as_it_was(load: Load) -> None:
    model = load(ahead=True)

    def fail(index: int, token: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.generate(PROMPTS, 30, on_token=fail)
    assert model.cache.free_pages == model.cache.num_pages
    expected = step_by_step(load(ahead=False), PROMPTS, 9)
    assert model.generate(PROMPTS, 9, eos_token_ids=[]) == expected


# On generated kernels


@pytest.fixture(scope="module")
def on_kernels(small_model: Path, request: pytest.FixtureRequest) -> Llama:
    """The real model; a sequence decodes to the same bits at any small batch."""
    problem = hopper_problem()
    if problem is not None:
        pytest.skip(problem)
    exports: Path | None = request.config.getoption("--kernels")
    kernels = exports / "smollm2-135m" if exports else None
    return Llama.from_pretrained(small_model, device="cuda", kernels=kernels, cache_tokens=8192, batch_invariant=True)


@pytest.mark.gpu
@pytest.mark.model
def test_two_thousand_tokens_are_those_of_single_launches(on_kernels: Llama) -> None:
    """Replayed, queued and overlapping, three times, and launched one kernel after the other: the same tokens."""
    ops: Any = on_kernels.ops
    prompt, count = [1, 504, 253, 9, 77], 2000
    texts = [on_kernels.generate([prompt], count, eos_token_ids=[])[0] for _ in range(3)]
    assert texts[1:] == texts[:1] * 2
    assert len(texts[0]) == count
    try:
        ops.capturable = ops.launch_chain.enabled = False
        assert on_kernels.generate([prompt], count, eos_token_ids=[])[0] == texts[0]
        tokens = ops.argmax(on_kernels.prefill([prompt]))
        single: list[Tensor] = [tokens.clone()]
        for _ in range(count - 1):
            tokens = ops.argmax(on_kernels.decode(tokens))
            single.append(tokens)
        assert torch.cat(single).tolist() == texts[0]
    finally:
        ops.capturable = ops.launch_chain.enabled = True


@pytest.mark.gpu
@pytest.mark.model
def test_samples_on_kernels_do_not_depend_on_the_batch(on_kernels: Llama) -> None:
    prompts = [[1, 504, 253 + row] + [9] * (4 * row) for row in range(5)]  # read by one kernel, together and alone
    together = on_kernels.generate(prompts, 90, eos_token_ids=[], sampling=SETTINGS)
    assert on_kernels.generate(prompts, 90, eos_token_ids=[], sampling=SETTINGS) == together
    for prompt, sampling, text in zip(prompts, SETTINGS, together, strict=True):
        assert on_kernels.generate([prompt], 90, eos_token_ids=[], sampling=sampling) == [text]
    ended = on_kernels.generate(prompts, 90, eos_token_ids=[together[0][11], together[1][40]], sampling=SETTINGS)
    assert all(text == free[: len(text)] for text, free in zip(ended, together, strict=True))
    assert len(ended[0]) <= 12


def test_a_token_takes_the_host_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Python functions: the replay of its step, and a share of what each window takes."""

    class Replay:
        def replay(self) -> None:
            pass

    monkeypatch.setattr(DecodeStep, "_capture", lambda step, pages, kind: (Replay(), None))
    monkeypatch.setattr(ExactLlama, "_decode_tokens", lambda *_, **__: None)
    model = ExactLlama(32)
    model.ops.capturable = True
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    for new in (256, 256):  # the first captures
        model.start(1)
        model.reserve([100 + new])
        model.sequences[0].length = 100
        generation = Generation(model, [[0] * 100], new, [], None, None)
        sys.setprofile(count)
        try:
            generation.run(torch.zeros(1, model.config.vocab_size))
        finally:
            sys.setprofile(None)
        before, calls = calls, 0
    assert before <= 3 * 256 + 200
