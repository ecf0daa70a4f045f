"""Random traffic through the server, for three seconds or ``--soak-seconds``: nothing leaks, no text changes."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import openai
import pytest

from futransformer import SamplingParams
from futransformer.tokenizer import Tokenizer
from tests.serve.serving import eventually, serving
from tests.serve.test_engine import load

PROMPTS = [chr(ord("a") + index) * (1 + 40 * index) for index in range(7)]  # 1 .. 241 tokens
LONGEST = 60
KINDS = ("whole", "streamed", "left", "cancelled")
PAGES = 24  # fewer than eight of them take, so that some are evicted
LOST = "\N{REPLACEMENT CHARACTER}"  # of a character that is cut off with the text


async def client(url: str, seed: int, end: float, texts: list[str], seen: Counter[str]) -> None:
    """Ask until the end, and until all have been seen: whole answers, streams, streams that are left, and answers that
    are not waited for.
    """
    draw = random.Random(seed)
    transport = openai.DefaultAsyncHttpxClient(verify=False)
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=transport) as asking:
        while time.monotonic() < end or not all(seen[kind] for kind in KINDS):
            which, tokens = draw.randrange(len(PROMPTS)), draw.randint(1, LONGEST)
            request: Any = {"model": "tiny", "prompt": PROMPTS[which], "max_tokens": tokens, "temperature": 0}
            request |= {"n": draw.choice((1, 1, 2)), "extra_body": {"ignore_eos": True}}
            kind = draw.choice(KINDS)
            said = [""] * request["n"]
            try:
                if kind == "whole":
                    said = [choice.text for choice in (await asking.completions.create(**request)).choices]
                elif kind == "cancelled":
                    await asyncio.wait_for(asking.completions.create(**request), draw.random() / 5)
                else:
                    stream = await asking.completions.create(**request, stream=True)
                    left = draw.randint(1, 9) if kind == "left" else -1
                    async for chunk in stream:
                        said[chunk.choices[0].index] += chunk.choices[0].text
                        left -= 1
                        if left == 0:
                            break
                    await stream.close()
            except openai.RateLimitError:
                kind = "sent away"
                await asyncio.sleep(0.05)
            except asyncio.TimeoutError:
                pass
            seen[kind] += 1
            assert all(texts[which].startswith(text.rstrip(LOST)) for text in said), kind


def test_random_traffic(chat_model: Path, tokenizer: Tokenizer, request: pytest.FixtureRequest) -> None:
    params = SamplingParams(temperature=0, max_tokens=LONGEST, ignore_eos=True)
    texts = [output.outputs[0].text for output in load(chat_model).generate(PROMPTS, params)]
    seen: Counter[str] = Counter()

    async def all_clients(url: str) -> None:
        end = time.monotonic() + max(3.0, request.config.getoption("--soak-seconds"))
        await asyncio.gather(*(client(url, seed, end, texts, seen) for seed in range(10)))

    def make() -> Any:
        return load(chat_model, max_num_seqs=8, num_pages=PAGES).engine

    with serving(make, tokenizer, max_model_len=512, max_num_seqs=8, max_queue=4) as running:
        asyncio.run(all_clients(running.url))
        runner = running.server.runner
        eventually(lambda: (runner.in_flight, runner._jobs, runner._held) == (0, {}, set()))
        eventually(lambda: runner.stats.free_pages == PAGES)
        assert (runner.stats.running, runner.stats.waiting) == (0, 0)
    assert all(seen[kind] for kind in KINDS), seen
