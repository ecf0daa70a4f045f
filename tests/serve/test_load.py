"""The closed loop of clients, which measures the server on a GPU, against the scripted engine."""

from __future__ import annotations

from futransformer.tokenizer import Tokenizer
from tests.serve import clients
from tests.serve.serving import ScriptedEngine, serving


def test_clients_count_what_they_are_sent(tokenizer: Tokenizer) -> None:
    """Of 32 clients four run at a time; all texts come whole."""
    engine = ScriptedEngine()
    with serving(lambda: engine, tokenizer, max_queue=28) as running:
        load = clients.run(running.url, clients.random_prompts(32, rounds=3, tokens=9, vocabulary=50), output=20)
    assert (load.tokens, load.wrong) == (32 * 3 * 20, 0)
    assert engine.added == 96
    report = load.report()
    assert len(load.first) == 96
    assert report["events"] <= load.tokens
    assert report["time to first token, p99, ms"] >= report["time to first token, p50, ms"] > 0


def test_clients_count_texts_that_do_not_come_whole(tokenizer: Tokenizer) -> None:
    with serving(lambda: ScriptedEngine(breaks_at=30), tokenizer) as running:
        load = clients.run(running.url, clients.random_prompts(1, rounds=2, tokens=3, vocabulary=50), output=20)
    assert (load.tokens, load.wrong) == (20, 1)
