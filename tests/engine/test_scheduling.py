"""What the engine makes of requests, on the exact model: every text is known, whatever runs beside it."""

from __future__ import annotations

import gc
import random
import time
from pathlib import Path
from typing import Any

import pytest

from futransformer.engine import Engine, RequestOutput, SamplingParams
from futransformer.generator.errors import CheckpointError, InputError
from tests.engine.exact import EOS, VOCABULARY, ExactLlama, next_token, text_after


def make_engine(num_pages: int = 64, *, ahead: int = 0, **options: Any) -> Engine:
    order = list(range(num_pages))
    random.Random(1).shuffle(order)
    engine = Engine(ExactLlama(num_pages, page_order=order), None, **options)
    engine._ahead = ahead
    return engine


def make_prompt(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(VOCABULARY - 1) for _ in range(length)]


def finish(engine: Engine, steps: int = 100_000) -> dict[str, RequestOutput]:
    """Step until nothing is left; whole outputs by id. Pages are checked at every step."""
    whole: dict[str, RequestOutput] = {}
    while engine.has_unfinished():
        for delta in engine.step():
            if delta.request_id in whole:
                whole[delta.request_id].add(delta)
            else:
                whole[delta.request_id] = delta
        check_pages(engine)
        steps -= 1
        assert steps, "the engine does not come to an end"
    return whole


def check_pages(engine: Engine) -> None:
    scheduler = engine._scheduler
    scheduler.pool.check([sequence.cached.pages for sequence in scheduler.running])
    slots = [sequence.slot for sequence in scheduler.running]
    assert len(set(slots)) == len(slots)
    assert scheduler.running == sorted(scheduler.running, key=lambda each: each.order)
    assert scheduler.waiting == sorted(scheduler.waiting, key=lambda each: each.order)


def assert_empty(engine: Engine) -> None:
    """Nothing is left: no request, no page, no slot."""
    stats = engine.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    assert stats.free_pages == stats.num_pages
    assert len(engine._scheduler._slots) == len(engine._runner._lengths) - 1
    engine._scheduler.pool.check([])


GREEDY = SamplingParams(temperature=0, max_tokens=90)


@pytest.mark.parametrize("ahead", [0, 1])
def test_requests_of_unequal_lengths_each_get_their_text(ahead: int) -> None:
    engine = make_engine(ahead=ahead, max_num_batched_tokens=100)
    lengths = (1, 2, 63, 64, 65, 128, 200, 17)
    for index, length in enumerate(lengths):
        engine.add_request(str(index), make_prompt(length, index), GREEDY)
    whole = finish(engine)
    for index, length in enumerate(lengths):
        (output,) = whole[str(index)].outputs
        assert output.token_ids == text_after(make_prompt(length, index), 90)
        assert output.finish_reason == ("stop" if output.token_ids[-1] == EOS else "length")
        assert output.stop_reason is None
    assert_empty(engine)


@pytest.mark.parametrize("budget", [1, 7, 64, 1000])
def test_chunks_change_no_text(budget: int) -> None:
    engine = make_engine(max_num_batched_tokens=budget)
    for index in range(3):
        engine.add_request(str(index), make_prompt(150 + index, index), SamplingParams(temperature=0, max_tokens=5))
    whole = finish(engine)
    for index in range(3):
        assert whole[str(index)].outputs[0].token_ids == text_after(make_prompt(150 + index, index), 5)


def test_decoding_goes_on_while_a_prompt_is_read() -> None:
    engine = make_engine(max_num_batched_tokens=64)
    engine.add_request("a", [1], SamplingParams(temperature=0, max_tokens=50, ignore_eos=True))
    engine.step()
    engine.add_request("b", make_prompt(640), SamplingParams(temperature=0, max_tokens=1))
    for _ in range(9):
        assert [delta.request_id for delta in engine.step()] == ["a"]
    assert {delta.request_id for delta in engine.step()} == {"a", "b"}
    finish(engine)


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("caching", [False, True])
def test_eviction_changes_no_text_and_spares_the_oldest(ahead: int, caching: bool) -> None:
    engine = make_engine(10, ahead=ahead, enable_prefix_caching=caching)
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    for index in range(6):
        engine.add_request(str(index), make_prompt(30 + index, index), params)
    whole = finish(engine)
    assert engine.stats().evictions > 0
    for index in range(6):
        assert whole[str(index)].outputs[0].token_ids == text_after(make_prompt(30 + index, index), 200, ())
    assert whole["0"].metrics.evictions == 0
    ends = [whole[str(index)].metrics.finished_time for index in range(6)]
    assert ends == sorted(ends, key=lambda end: end or 0), "who came first did not end first"
    assert_empty(engine)


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_shared_prefix_is_read_once(ahead: int) -> None:
    prefix = make_prompt(200, 7)
    prompts = [prefix + make_prompt(10 + index, index) for index in range(8)]
    read = {}
    for caching in (False, True):
        engine = make_engine(ahead=ahead, enable_prefix_caching=caching)
        for index, prompt in enumerate(prompts):
            engine.add_request(str(index), prompt, SamplingParams(temperature=0, max_tokens=70, ignore_eos=True))
        whole = finish(engine)
        for index, prompt in enumerate(prompts):
            assert whole[str(index)].outputs[0].token_ids == text_after(prompt, 70, ())
        read[caching] = engine.stats().prefilled_tokens
        assert engine.stats().prefix_hit_tokens == (7 * 192 if caching else 0)
        assert_empty(engine)
    assert read[True] == read[False] - 7 * 192


def test_a_conversation_finds_what_it_has_said() -> None:
    """Pages of generated tokens are shared too, after everybody who held them has gone."""
    engine = make_engine()
    prompt = make_prompt(70)
    engine.add_request("a", prompt, SamplingParams(temperature=0, max_tokens=130, ignore_eos=True))
    said = finish(engine)["a"].outputs[0].token_ids
    engine.add_request("b", [*prompt, *said, 5], SamplingParams(temperature=0, max_tokens=3))
    whole = finish(engine)["b"]
    assert whole.metrics.cached_tokens == 192
    assert whole.outputs[0].token_ids == text_after([*prompt, *said, 5], 3)


def test_kept_pages_give_way_the_oldest_first() -> None:
    engine = make_engine(6)
    one = SamplingParams(temperature=0, max_tokens=1)
    for name in ("a", "b"):
        engine.add_request(name, make_prompt(129, ord(name)), one)
        finish(engine)
    engine.add_request("c", make_prompt(129, 99), one)  # two pages are blank; the third was a's second
    finish(engine)
    for name, cached in (("b", 128), ("a", 64)):
        engine.add_request(name, make_prompt(129, ord(name)), one)
        assert finish(engine)[name].metrics.cached_tokens == cached


def test_texts_of_one_prompt_share_its_pages() -> None:
    engine = make_engine(max_num_batched_tokens=4096)
    prompt = make_prompt(300)
    engine.add_request("a", prompt, SamplingParams(n=4, temperature=0, max_tokens=40, ignore_eos=True))
    first = engine.step()
    first[0].add(*engine.step())
    assert engine.stats().running == 4
    assert engine.stats().free_pages == 64 - (4 + 4 * 1)
    whole = first[0]
    whole.add(finish(engine)["a"])
    assert [output.index for output in whole.outputs] == [0, 1, 2, 3]
    assert all(output.token_ids == text_after(prompt, 40, ()) for output in whole.outputs)
    assert whole.finished
    assert_empty(engine)


def test_what_ends_a_text() -> None:
    engine = make_engine()
    prompt = make_prompt(20, 3)
    text = text_after(prompt, 60, ())
    first = {token: text.index(token) for token in text}
    stop = max(first, key=lambda token: first[token])
    engine.add_request(
        "stop", prompt, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, stop_token_ids=[stop])
    )
    engine.add_request("length", prompt, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    engine.add_request("one", prompt, SamplingParams(temperature=0, max_tokens=1))
    engine.add_request("all", make_prompt(1000), SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))
    whole = finish(engine)
    (output,) = whole["stop"].outputs
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert output.token_ids == text[: first[stop] + 1]
    assert [len(whole[name].outputs[0].token_ids) for name in ("length", "one", "all")] == [60, 1, 24]
    assert {whole[name].outputs[0].finish_reason for name in ("length", "one", "all")} == {"length"}


def test_nothing_ends_before_min_tokens() -> None:
    prompt = next(p for seed in range(10_000) if next_token(p := make_prompt(5, seed)) == EOS)
    engine = make_engine()
    engine.add_request("a", prompt, SamplingParams(temperature=0, max_tokens=9, min_tokens=4))
    (output,) = finish(engine)["a"].outputs
    assert len(output.token_ids) >= 4
    assert EOS not in output.token_ids[:4]
    assert output.token_ids[0] == 0, "of logits that are equal below it the lowest index follows"


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "prompt is empty"),
        ([1, VOCABULARY], {}, "token 101 is outside the vocabulary of 101"),
        ([1.5], {}, "not a list of token ids"),
        ("text", {}, "needs a tokenizer"),
        ([1] * 640, {}, r"the prompt has 640 tokens, and this engine serves 640 .*the cache holds 640.*larger cache"),
        ([1], {"stop": ["x"]}, "stop strings need a tokenizer"),
        ([1], {"stop_token_ids": [200]}, "token 200 is outside"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_alone(prompt: Any, options: Any, message: str) -> None:
    engine = make_engine(10)
    engine.add_request("good", [1, 2, 3], GREEDY)
    with pytest.raises(InputError, match=message):
        engine.add_request("bad", prompt, SamplingParams(**options))
    engine.add_request("longest", [1] * 639, SamplingParams(max_tokens=9))
    whole = finish(engine)
    assert set(whole) == {"good", "longest"}
    assert whole["good"].outputs[0].token_ids == text_after([1, 2, 3], 90)
    assert_empty(engine)


def test_an_id_in_use_is_refused_and_free_afterwards() -> None:
    engine = make_engine()
    engine.add_request("a", [1], GREEDY)
    with pytest.raises(InputError, match="'a' is not finished"):
        engine.add_request("a", [2])
    finish(engine)
    engine.add_request("a", [2], GREEDY)
    assert finish(engine)["a"].outputs[0].token_ids == text_after([2], 90)


def test_an_engine_has_its_models_cache_until_it_is_closed() -> None:
    engine = make_engine(10)
    engine.add_request("a", [1], GREEDY)
    engine.step()
    with pytest.raises(InputError, match="0 of the KV cache's 10"):
        engine.model.generate([[1, 2]], 3)
    engine.close()
    assert engine.model.cache.free_pages == 10
    again = Engine(engine.model, None)
    again.add_request("a", [2], GREEDY)
    assert finish(again)["a"].outputs[0].token_ids == text_after([2], 90)


@pytest.mark.parametrize("options", [{"max_num_seqs": 0}, {"max_model_len": 1}, {"max_model_len": 4097}])
def test_limits_that_make_no_engine_are_refused(options: Any) -> None:
    with pytest.raises(InputError, match=next(iter(options))):
        make_engine(**options)


@pytest.mark.parametrize("ahead", [0, 1])
def test_logits_that_are_no_numbers_fail_their_request_alone(ahead: int) -> None:
    engine = make_engine(ahead=ahead)
    model: Any = engine.model
    logits = model._logits
    model._logits = lambda pages, length: logits(pages, length) * (float("nan") if length == 77 else 1)
    engine.add_request("bad", make_prompt(77), GREEDY)
    engine.add_request("good", make_prompt(20), SamplingParams(temperature=0, max_tokens=30))
    whole = finish(engine)
    assert isinstance(whole["bad"].error, CheckpointError)
    assert whole["bad"].finished
    assert whole["bad"].outputs == []
    assert whole["good"].outputs[0].token_ids == text_after(make_prompt(20), 30)
    assert_empty(engine)


@pytest.mark.parametrize("ahead", [0, 1])
def test_random_traffic(ahead: int, request: pytest.FixtureRequest) -> None:
    """Arrivals, lengths, stops and aborts at random, in a cache that is too small: every text is right, memory flat."""
    seconds = request.config.getoption("--soak-seconds")
    end = time.monotonic() + seconds / 2
    seed = before = 0
    evictions = hits = aborts = 0
    while seed < 5 or time.monotonic() < end:
        if seed == 5:
            before = resident_bytes()
        stats = run_traffic(seed, ahead)
        evictions += stats.evictions
        hits += stats.prefix_hit_tokens
        aborts += stats.aborted_requests
        seed += 1
    assert min(evictions, hits, aborts) > 10, "the traffic tests nothing"
    assert seed == 5 or resident_bytes() - before < 16 << 20, f"memory grew in {seed - 5} runs"


def resident_bytes() -> int:
    """What this process has in memory."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def run_traffic(seed: int, ahead: int) -> Any:
    draw = random.Random(seed)
    engine = make_engine(
        draw.choice((8, 9, 12, 30)),
        ahead=ahead,
        max_num_seqs=draw.choice((3, 8, 20)),
        max_num_batched_tokens=draw.choice((16, 100, 2048)),
        enable_prefix_caching=draw.random() < 0.8,
    )
    roots = [make_prompt(200, index) for index in range(3)]
    asked: dict[str, tuple[list[int], SamplingParams]] = {}
    texts: dict[str, RequestOutput] = {}
    left = 30
    while left or engine.has_unfinished():
        while left and draw.random() < 0.4:
            prompt = draw.choice(roots)[: draw.randrange(200)] + make_prompt(
                draw.randrange(1, 90), draw.randrange(10**6)
            )
            params = SamplingParams(
                n=draw.choice((1, 1, 1, 3)),
                temperature=0,
                max_tokens=draw.randrange(1, 220),
                ignore_eos=draw.random() < 0.5,
                stop_token_ids=[draw.randrange(VOCABULARY)] if draw.random() < 0.2 else [],
            )
            engine.add_request(str(left), prompt, params)
            asked[str(left)] = prompt, params
            left -= 1
        for delta in engine.step():
            if delta.request_id in texts:
                texts[delta.request_id].add(delta)
            else:
                texts[delta.request_id] = delta
        if draw.random() < 0.01:
            name = draw.choice(list(asked)) if asked else ""
            if engine.abort(name):
                del asked[name]
        check_pages(engine)
    for name, (prompt, params) in asked.items():
        ends = (*params.stop_token_ids, *(() if params.ignore_eos else (EOS,)))
        most = engine.max_model_len - len(prompt)
        assert params.max_tokens is not None
        expected = text_after(prompt, min(params.max_tokens, most), ends)
        assert texts[name].finished
        assert [output.token_ids for output in texts[name].outputs] == [expected] * params.n, f"seed {seed}, {name}"
    assert_empty(engine)
    return engine.stats()
