"""The server over the generated kernels of the small model, in a thread of its own: its texts are those of LLM."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest

from futransformer.engine import Engine
from futransformer.tokenizer import Tokenizer
from tests.engine.test_kernels import GREEDY, TEXTS, load, tokens_of
from tests.serve.serving import eventually, serving

pytestmark = [pytest.mark.gpu, pytest.mark.model]

OPTIONS: Any = {"num_pages": 400, "max_num_seqs": 8, "max_num_batched_tokens": 64, "enable_prefix_caching": False}


def test_clients_have_the_models_texts(small_model: Path, request: pytest.FixtureRequest) -> None:
    """Whole and streamed, ten at once of which eight run: in batch-invariant mode no neighbour changes a bit."""
    expected = load(small_model, request, **OPTIONS).generate(TEXTS, GREEDY)
    assert len(set(map(tuple, tokens_of(expected)))) == len(TEXTS)
    texts = [output.outputs[0].text for output in expected]

    async def ask(client: openai.AsyncOpenAI, text: str, stream: bool) -> str:
        asked: Any = {"model": "tiny", "prompt": text, "temperature": 0, "max_tokens": GREEDY.max_tokens}
        if stream:
            chunks = await client.completions.create(**asked, stream=True)
            return "".join([chunk.choices[0].text async for chunk in chunks])
        return (await client.completions.create(**asked)).choices[0].text  # type: ignore[no-any-return]

    async def ask_all(url: str) -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            asked = [ask(client, text, stream) for stream in (False, True) for text in TEXTS]
            return list(await asyncio.gather(*asked))

    def make() -> Engine:
        return load(small_model, request, **OPTIONS).engine

    with serving(make, Tokenizer(small_model), max_model_len=8192, max_num_seqs=8) as running:
        for _ in range(3):
            assert asyncio.run(ask_all(running.url)) == texts * 2
        stats = running.server.runner.stats
        assert (stats.running, stats.waiting) == (0, 0)
        eventually(lambda: running.server.runner.stats.free_pages == stats.num_pages)
