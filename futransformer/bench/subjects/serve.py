"""serve/8b/{fp8-int4-head8,bf16,...}/{streams=64,prefix=2000}: an engine under load, as a server's clients meet it.

*streams*: a closed loop. 64 clients send a prompt of 512 random tokens each, read 256 tokens, and send the next, four
times. Rows are told of the whole run, the prompts that were read in it included:

| row | |
| --- | --- |
| total | generated tokens a second, from the first request to the last token, and transformers' continuous batching's |
| first-token | from a request's arrival to its first token |
| between-tokens | from one token of a request to its next, what others' prompts take of it included |
| step | a step of 64 sequences that reads no prompt, beside the same at 768 tokens each, replayed alone |
| host | what the host takes for such a step: its time less what it waits for the device |
| warm-up, graphs | seconds and memory for all graphs of such lengths, workspaces included; none on a CPU |

The rival is run eagerly and compiled, each in a process of its own once our model has left the card.

*prefix*: 64 requests that share their first 2000 tokens arrive at once; the time to the first token beside that without
shared pages.

Medians, with the tenth and ninetieth percentile; ``p99`` is told in the file. The model is random, so nothing ends by
itself. A row's error counts requests that did not come to their end with all their tokens.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from futransformer.bench.case import HostCase, Row
from futransformer.bench.harness import percentile
from futransformer.bench.random_model import random_llama
from futransformer.bench.rivals import transformers_batching
from futransformer.bench.runner import Bench, free
from futransformer.bench.shapes import shape_config
from futransformer.engine import Engine, SamplingParams
from futransformer.generator.precision import get_precision
from futransformer.kv_cache import page_bucket, pages_for
from futransformer.model import Llama

PRECISIONS = ("fp8-int4-head8", "bf16", "fp8-int4-head8-kv4")
DEFAULT = PRECISIONS[:2]
STREAMS, PROMPT, OUTPUT, ROUNDS = 64, 512, 256, 4
ALONE_CONTEXT = 768
PREFIX, SUFFIX, PREFIX_OUTPUT = 2000, 16, 4
ALONE_STEPS = 200
WARM_UP_SECONDS = 60.0
BATCH_TOKENS = 2048  # rows of a pass that reads prompts, as our engine's are
# By its compile level, and the seconds that each may take, less than four minutes together, unless a run says more.
RIVALS = {"transformers": (0, 65.0), "transformers-compiled": (1, 170.0)}


def cases() -> Sequence[HostCase]:
    """See futransformer.bench.subjects."""
    kinds = {f"streams={STREAMS}": measure_streams, f"prefix={PREFIX}": measure_prefix}
    return [
        HostCase(f"serve/8b/{precision}/{kind}", partial(measure, "8b", precision), precision in DEFAULT, precision)
        for precision in PRECISIONS
        for kind, measure in kinds.items()
    ]


def load(shape: str, precision: str, bench: Bench, tokens: int) -> Llama:
    """A random model with room for so many tokens of 64 sequences, and a page more for each."""
    ops = bench.library(shape, precision)
    pages = STREAMS * (pages_for(tokens) + 1)
    return random_llama(shape_config(shape), get_precision(precision), ops, pages)


def measure_streams(shape: str, precision: str, bench: Bench) -> Sequence[Row]:
    """The closed loop, and then its rivals: they need the memory that our model has held."""
    rows = our_rows(shape, precision, bench)
    free(bench.device)
    total = rows[0]
    figures, notes = bench.once(f"serve/{shape}/rivals", partial(rivals, shape, bench))
    total["rivals"], total["notes"] = dict(figures), list(notes)
    if figures:
        total["ratio"] = round(total["ours"] / max(figures.values()), 3)
    return rows


def our_rows(shape: str, precision: str, bench: Bench) -> list[Row]:
    """What our engine does."""
    model = load(shape, precision, bench, PROMPT + OUTPUT)
    name = f"serve/{shape}/{precision}/streams={STREAMS}"
    graphs = graph_rows(model, name)
    alone = seconds_alone(model, STREAMS, ALONE_CONTEXT)
    load_of(model, 1).run()  # captures what the next one replays
    loop = load_of(model, ROUNDS)
    loop.run()
    step = row(f"{name}/step", loop.steps, 1e-3, "ms", loop.wrong)
    step["beside"] = {"a decode step alone": alone * 1e3}
    return [
        row(f"{name}/total", [loop.generated / loop.seconds], 1.0, "tokens/s", loop.wrong),
        row(f"{name}/first-token", loop.first, 1e-3, "ms", loop.wrong),
        row(f"{name}/between-tokens", loop.between, 1e-3, "ms", loop.wrong),
        step,
        row(f"{name}/host", loop.host, 1e-3, "ms", loop.wrong),
        *graphs,
    ]


def graph_rows(model: Llama, name: str) -> list[Row]:
    """What an engine of these lengths captures before its first request; shapes that are left are wrong."""
    engine = Engine(model, None, max_num_seqs=STREAMS, max_model_len=PROMPT + OUTPUT)
    warmed = engine.warm_up(WARM_UP_SECONDS)
    engine.close()
    if not warmed.shapes:
        return []
    left = warmed.shapes - warmed.captured
    return [
        row(f"{name}/warm-up", [warmed.seconds], 1.0, "s", left),
        row(f"{name}/graphs", [warmed.memory], 1e9, "GB", left),
    ]


def rivals(shape: str, bench: Bench) -> tuple[dict[str, float], list[str]]:
    """Tokens a second of each way to run transformers' batching, and what must be said of them."""
    figures, notes = {}, []
    for name, (level, seconds) in RIVALS.items():
        job = transformers_batching.Job(
            transformers_batching.values(shape_config(shape)),
            str(bench.device),
            streams=STREAMS,
            prompt=PROMPT,
            output=OUTPUT,
            rounds=ROUNDS,
            batch_tokens=BATCH_TOKENS,
            compile_level=level,
            seconds=bench.compile_seconds if level and bench.compile_seconds else seconds,
        )
        try:
            found = transformers_batching.measure(job)
        except Exception as error:  # a rival may fail in any way
            notes.append(f"{name} left out: {type(error).__name__}: {str(error).partition(chr(10))[0][:300]}")
            continue
        rounds = found["rounds"]
        if not rounds:
            notes.append(f"{name} left out: it ended one round alone, in which it compiles and captures")
            continue
        figures[name] = found["tokens_per_second"]
        measured = f"{rounds} of {ROUNDS} rounds"
        notes.append(
            f"{name}: {found['version']}, attention {found['attention']}, a cache for the load alone, in a process of "
            f"its own; {measured}"
        )
    return figures, notes


def measure_prefix(shape: str, precision: str, bench: Bench) -> Sequence[Row]:
    """Requests that share their first tokens, with shared pages and without."""
    model = load(shape, precision, bench, PREFIX + SUFFIX + PREFIX_OUTPUT)
    prefix = random_prompt(model, PREFIX, seed=1)
    name = f"serve/{shape}/{precision}/prefix={PREFIX}/first-token"
    figures = {}
    wrong = 0
    for shared in (False, True):
        for turn in range(2):  # the first captures what the second replays
            engine = Engine(model, None, max_num_seqs=STREAMS, enable_prefix_caching=shared)
            prompts = [prefix + random_prompt(model, SUFFIX, seed=2 + index) for index in range(STREAMS)]
            loop = Loop(engine, [[prompt] for prompt in prompts], PREFIX_OUTPUT)
            loop.run()
            wrong += loop.wrong * turn
            figures[shared] = loop.first
    found = row(name, figures[True], 1e-3, "ms", wrong)
    found["beside"] = {"without shared pages": sum(figures[False]) / len(figures[False]) * 1e3}
    return [found]


def load_of(model: Llama, rounds: int) -> Loop:
    """The clients of the closed loop."""
    engine = Engine(model, None, max_num_seqs=STREAMS, enable_prefix_caching=False)
    prompts = [random_prompt(model, PROMPT, seed=seed) for seed in range(STREAMS * rounds)]
    return Loop(engine, [prompts[client::STREAMS] for client in range(STREAMS)], OUTPUT)


def random_prompt(model: Llama, tokens: int, seed: int) -> list[int]:
    """Tokens of a prompt."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(model.config.vocab_size, (tokens,), generator=generator).tolist()


class Loop:
    """Clients that send their prompts one after another, each when the one before has been answered."""

    def __init__(self, engine: Engine, clients: Sequence[Sequence[list[int]]], output: int) -> None:
        self.engine, self.clients, self.output = engine, clients, output
        self.params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
        self.first: list[float] = []
        self.between: list[float] = []
        self.steps: list[float] = []  # of those that decode all clients and read nothing, nor did the one before
        self.host: list[float] = []  # of the same
        self.generated = self.wrong = 0
        self.seconds = 0.0

    def run(self) -> None:
        """Until every client has all its answers."""
        begin = time.monotonic()
        sent = [0] * len(self.clients)
        tokens: dict[str, int] = {}
        last: dict[str, float] = {}
        for client in range(len(self.clients)):
            self._send(client, sent, tokens)
        pure, read = 0, 0
        while self.engine.has_unfinished():
            start = time.perf_counter()
            deltas = self.engine.step()
            took, now = time.perf_counter() - start, time.monotonic()
            stats = self.engine.stats()
            pure = pure + 1 if stats.prefilled_tokens == read and len(deltas) == len(self.clients) else 0
            read = stats.prefilled_tokens
            if pure > 2:
                self.steps.append(took)
                self.host.append(took - self.engine.waited)
            for delta in deltas:
                name = delta.request_id
                if name in last:
                    self.between.append(now - last[name])
                else:
                    self.first.append(now - delta.metrics.arrival_time)
                last[name] = now
                tokens[name] += len(delta.outputs[0].token_ids)
                if delta.finished:
                    self.generated += tokens[name]
                    self.wrong += tokens[name] != self.output
                    self._send(int(name.split("/")[0]), sent, tokens)
        self.seconds = time.monotonic() - begin
        self.wrong += sum(map(len, self.clients)) - sum(sent)
        self.engine.close()

    def _send(self, client: int, sent: list[int], tokens: dict[str, int]) -> None:
        if sent[client] < len(self.clients[client]):
            name = f"{client}/{sent[client]}"
            tokens[name] = 0
            self.engine.add_request(name, self.clients[client][sent[client]], self.params)
            sent[client] += 1


@torch.inference_mode()  # as the engine's steps are made, whose tensors these may be
def seconds_alone(model: Llama, batch: int, context: int) -> float:
    """A decode step of the engine's own kind, one after another with nothing between: seconds of one."""
    device = model.cache.device
    width = page_bucket(pages_for(context))
    step = model.decode_step(batch, width)
    pages = torch.arange(batch * width, dtype=torch.int32, device=device) % model.cache.num_pages
    step.block_table.copy_(pages.view(batch, width))
    step.tokens.zero_()

    def run(count: int) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(count):
            step.lengths.fill_(context - 1)
            step.run(context, logits=False)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - begin) / count

    run(3)  # the second captures
    return run(ALONE_STEPS)


def row(name: str, seconds: Sequence[float], unit_seconds: float, unit: str, wrong: int) -> Row:
    """One row: the median, and how far figures lie apart."""
    ordered = sorted(value / unit_seconds for value in seconds)

    def figure(fraction: float) -> Any:
        return float(f"{percentile(ordered, fraction):.5g}")

    return {
        "case": name,
        "ours": figure(0.5),
        "unit": unit,
        "spread": [figure(0.1), figure(0.9)],
        "p99": figure(0.99),
        "samples": len(ordered),
        "rivals": {},
        "ratio": None,
        "percent_of_ceiling": None,
        "error": wrong,
        "tolerance": 0,
    }
