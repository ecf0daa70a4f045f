"""transformers' continuous batching in BF16 under the closed loop of `bench serve`, in a process of its own.

    found = measure(Job(values(config), "cuda:0", streams=64, ...), seconds=150)

A process of its own: compiling and capturing cannot be stopped from outside a thread, and whatever it took of the card
is back when it has ended. ``python -m futransformer.bench.rivals.transformers_batching`` reads a job from standard
input and prints what it found after each loop, in a line of JSON.

Weights are its own random ones. Attention is FlashAttention where transformers finds it, else PyTorch's SDPA, for which
the keys of all that a pass reads are gathered, repeated for every query head and masked, rows x tokens. So its cache is
sized to the load. What transformers takes by itself, nine tenths of what is free, leaves no room for the pass over the
whole cache that it warms up with (5.17 counts neither the repeated keys nor what a mask costs SDPA).
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import futransformer
from futransformer.bench.case import RivalMissingError
from futransformer.generator.config import LlamaConfig

BLOCK = 256  # tokens of a page of its cache
STARTING_SECONDS = 10.0  # at most, of its process before it reads the clock
READ_STEP = 4096  # tokens of the cache that its graphs are padded to; its own 16,384 reads a third more than there is
ROOT = Path(futransformer.__file__).resolve().parent.parent
OWN_ERROR = f"{RivalMissingError.__module__}.{RivalMissingError.__name__}: "
Figures = dict[str, Any]  # tokens_per_second, rounds (0: the first alone), attention, version


@dataclass(frozen=True)
class Job:
    """What to measure: ``streams`` clients, each of which sends ``rounds`` prompts one after another."""

    model: dict[str, Any]  # see values
    device: str
    streams: int
    prompt: int  # tokens
    output: int
    rounds: int  # at most: as many as fit into ``seconds`` behind the first, which compiles and captures
    batch_tokens: int  # rows of a pass
    compile_level: int  # of its four; 0: eager, 1: mode default, dynamic shapes; the others tune products for minutes
    seconds: float


def values(config: LlamaConfig) -> dict[str, Any]:
    """What transformers' LlamaConfig is made of."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "tie_word_embeddings": False,
        "attn_implementation": "sdpa",
    }


def measure(job: Job) -> Figures:
    """Run the job in a process of its own, ended after ``job.seconds``: what it found by then.

    RivalMissingError says why it found nothing.
    """
    command = [sys.executable, "-m", __spec__.name]
    pipe = subprocess.PIPE
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    process = subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True, env=environment
    )
    try:
        told, errors = process.communicate(json.dumps(asdict(job)), timeout=job.seconds)
    except subprocess.TimeoutExpired:
        _end(process)
        told, _ = process.communicate()
        if found := _found(told):
            return found[-1]
        stage = told.splitlines()[-1] if told.strip() else "starting"
        raise RivalMissingError(f"not done in {job.seconds:g} s; its last stage: {stage}") from None
    except BaseException:
        _end(process)
        raise
    if process.returncode:
        raised = re.findall(r"^[\w.]+(?:Error|Exception)\b.*", errors, re.MULTILINE)
        raise RivalMissingError(
            raised[-1].removeprefix(OWN_ERROR)[:300] if raised else f"its process ended with {process.returncode}"
        )
    return _found(told)[-1]


def _found(told: str) -> list[Figures]:
    """What its process has found, one loop after another."""
    return [json.loads(line) for line in told.splitlines() if line.startswith("{")]


def _end(process: subprocess.Popen[str]) -> None:
    """End it and the compilers that it has started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


def run(job: Job, begin: float) -> Iterator[Figures]:
    """Measure in this process, which began at ``begin`` of time.monotonic(): what was found, after each loop.

    The first loop compiles and captures, and so may the second, of one round as well. The third has as many rounds as
    there is time for.
    """
    with manager(job) as (running, found):

        def loop(rounds: int) -> tuple[float, float]:
            """Tokens a second, and seconds."""
            _say(f"{rounds} rounds after {time.monotonic() - begin:.0f} s")
            generated, wrong, seconds = timed_loop(running, job, rounds)
            if wrong:
                raise RivalMissingError(f"{wrong} of its answers were short")
            return float(f"{generated / seconds:.5g}"), seconds

        speed, _ = loop(1)
        yield {**found, "tokens_per_second": speed, "rounds": 0}
        speed, seconds = loop(1)
        yield {**found, "tokens_per_second": speed, "rounds": 1}
        left = begin + job.seconds - STARTING_SECONDS - time.monotonic()
        rounds = min(job.rounds, int(left / seconds))
        if rounds > 1:
            speed, _ = loop(rounds)
            yield {**found, "tokens_per_second": speed, "rounds": rounds}


def timed_loop(running: Any, job: Job, rounds: int) -> tuple[int, int, float]:
    """Tokens generated, requests that went wrong, and seconds of a closed loop."""
    prompts = clients(job, rounds)
    begin = time.monotonic()
    generated, wrong = closed_loop(running, prompts, job.output)
    return generated, wrong, time.monotonic() - begin


def clients(job: Job, rounds: int) -> list[list[list[int]]]:
    """Each client's prompts, of random tokens."""
    generator = torch.Generator().manual_seed(0)
    shape = (job.streams, rounds, job.prompt)
    tokens: list[list[list[int]]] = torch.randint(job.model["vocab_size"], shape, generator=generator).tolist()
    return tokens


@contextmanager
def manager(job: Job) -> Iterator[tuple[Any, Figures]]:
    """A running manager of a random model for the job's load, and what it is."""
    _say("importing")
    import transformers as hf  # noqa: PLC0415 - takes seconds to import

    device = torch.device(job.device)
    _say("drawing weights")
    with torch.device(device):
        config = hf.LlamaConfig(**job.model)
        model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    on_gpu = device.type == "cuda"
    batching = hf.ContinuousBatchingConfig(
        max_requests_per_batch=job.streams,
        allow_block_sharing=False,
        default_compile_level=job.compile_level,
        use_cuda_graph=True if on_gpu else None,
        kv_padding_interval_size=READ_STEP if on_gpu else 0,
        num_blocks=job.streams * (-(-(job.prompt + job.output) // BLOCK) + 2),
        max_batch_tokens=job.batch_tokens,
        seed=0,
    )
    generation = hf.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=job.output)
    _say("warming up")
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=batching, timeout=30
    ) as running:
        yield running, {"attention": model.config._attn_implementation, "version": hf.__version__}


def closed_loop(running: Any, clients: Sequence[Sequence[list[int]]], output: int) -> tuple[int, int]:
    """Clients that send their prompts one after another: tokens generated, and requests that went wrong."""
    sent = [0] * len(clients)

    def send(client: int) -> None:
        if sent[client] < len(clients[client]):
            prompt = clients[client][sent[client]]
            running.add_request(prompt, request_id=f"{client}/{sent[client]}", max_new_tokens=output, eos_token_id=-1)
            sent[client] += 1

    for client in range(len(clients)):
        send(client)
    generated = wrong = ended = 0
    for result in running:
        if not result.is_finished():
            continue
        if result.error is not None:
            raise RivalMissingError(f"a request failed: {result.error}")
        generated += len(result.generated_tokens)
        wrong += len(result.generated_tokens) != output
        ended += 1
        send(int(result.request_id.split("/")[0]))
        if ended == sum(map(len, clients)):
            return generated, wrong
    raise RivalMissingError("its thread ended before the last request")


def _say(stage: str) -> None:
    print(stage, flush=True)


if __name__ == "__main__":
    _begin = time.monotonic()
    for _figures in run(Job(**json.load(sys.stdin)), _begin):
        _say(json.dumps(_figures))
