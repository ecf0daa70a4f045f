"""transformers' continuous batching in BF16, as its users run it: compiled, in CUDA graphs where it makes them.

    with manager(config, device, streams) as running:
        running.add_request(prompt, request_id=..., max_new_tokens=...)

Weights are its own random ones. Attention is FlashAttention where transformers finds it, else PyTorch's SDPA.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from futransformer.bench.case import RivalMissingError
from futransformer.generator.config import LlamaConfig

COMPILE_LEVEL = 1  # of its three: mode default, dynamic shapes; the others tune products for minutes


@contextmanager
def manager(config: LlamaConfig, device: torch.device, streams: int, longest: int) -> Iterator[Any]:
    """A running manager of a random model, for ``streams`` requests of up to ``longest`` tokens each at a time."""
    import transformers as hf  # noqa: PLC0415 - takes seconds to import

    hub_config = hf.LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )
    with torch.device(device):
        model = hf.AutoModelForCausalLM.from_config(hub_config, dtype=torch.bfloat16).eval()
    on_gpu = device.type == "cuda"
    batching = hf.ContinuousBatchingConfig(
        max_requests_per_batch=streams,
        allow_block_sharing=False,
        default_compile_level=COMPILE_LEVEL if on_gpu else 0,
        use_cuda_graph=True if on_gpu else None,
        num_blocks=None if on_gpu else streams * (longest // 256 + 2),
        max_batch_tokens=None if on_gpu else 512,
        seed=0,
    )
    generation = hf.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=longest)
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=batching, timeout=30
    ) as running:
        yield running


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
