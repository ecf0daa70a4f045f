"""Clients in a closed loop over HTTP: each sends a prompt, reads its stream to the end, and sends the next.

They speak plain HTTP over sockets: OpenAI's client takes longer for an event than a GPU does for a token. Run
``python -m tests.serve.clients URL`` against any server of OpenAI's interface; results are one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from futransformer.bench.harness import percentile


@dataclass
class Load:
    """What the clients saw."""

    first: list[float] = field(default_factory=list)  # seconds to the first event of a text
    between: list[float] = field(default_factory=list)  # seconds between two events, of a token or more each
    tokens: int = 0
    wrong: int = 0  # texts that did not come whole
    seconds: float = 0.0

    def report(self) -> dict[str, Any]:
        """Medians and tails."""
        times = {"time to first token": self.first, "between events": self.between}
        return {
            "tokens/s": round(self.tokens / self.seconds, 1),
            **{
                f"{name}, {label}, ms": round(percentile(sorted(seconds), fraction) * 1e3, 2)
                for name, seconds in times.items()
                for label, fraction in (("p50", 0.5), ("p99", 0.99))
                if seconds
            },
            "tokens": self.tokens,
            "events": len(self.first) + len(self.between),
            "wrong": self.wrong,
            "seconds": round(self.seconds, 3),
        }


def run(url: str, clients: Sequence[Sequence[Sequence[int]]], output: int, model: str | None = None) -> Load:
    """Let each client send its prompts (token ids) one after another, for ``output`` tokens each."""

    async def all_clients() -> Load:
        load = Load()
        start = time.monotonic()
        await asyncio.gather(*(_client(url, prompts, output, model, load) for prompts in clients))
        load.seconds = time.monotonic() - start
        return load

    return asyncio.run(all_clients())


async def _client(url: str, prompts: Sequence[Sequence[int]], output: int, model: str | None, load: Load) -> None:
    for prompt in prompts:
        request = {
            "prompt": list(prompt),
            "max_tokens": output,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({} if model is None else {"model": model}),
        }
        written = 0
        try:
            written = await _ask(url, json.dumps(request).encode(), load)
        finally:
            load.tokens += written
            load.wrong += written != output


async def _ask(url: str, body: bytes, load: Load) -> int:
    """One request; tokens that were written."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port, limit=1 << 20)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    last = time.monotonic()
    began, written = False, 0
    try:
        writer.write(head.encode() + body)
        async for line in reader:  # an event is one line, those of HTTP's chunks are others
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[len(b"data: ") :])
            if event.get("usage"):
                written = event["usage"]["completion_tokens"]
            elif event.get("choices"):
                now = time.monotonic()
                (load.between if began else load.first).append(now - last)
                began, last = True, now
    finally:
        writer.close()
    return written


def random_prompts(clients: int, rounds: int, tokens: int, vocabulary: int) -> list[list[list[int]]]:
    """Prompts of each client, of random tokens, the same at each call."""
    draw = random.Random(1)
    return [[draw.choices(range(vocabulary), k=tokens) for _ in range(rounds)] for _ in range(clients)]


def main() -> None:
    """Run the clients that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="http://HOST:PORT")
    parser.add_argument("--model", help="its name, where a server needs one")
    for name, default in (("streams", 64), ("rounds", 4), ("prompt", 512), ("output", 256), ("vocabulary", 32000)):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"(default: {default})")
    args = parser.parse_args()
    prompts = random_prompts(args.streams, args.rounds, args.prompt, args.vocabulary)
    print(json.dumps(run(args.url, prompts, args.output, args.model).report(), indent=2))


if __name__ == "__main__":
    main()
