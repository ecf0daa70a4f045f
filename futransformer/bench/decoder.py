"""A random model that can decode and nothing else: beside a prefill's weights 70B would not fit one card."""

from __future__ import annotations

import torch

from futransformer.bench.coded import CodedBlock, rounded
from futransformer.bench.llama import NaturalBlock, device_rope_table, random_tensor, random_weight
from futransformer.generator.config import LlamaConfig
from futransformer.generator.precision import E4M3, Precision
from futransformer.kv_cache import KVCache, pages_for
from futransformer.model import Llama
from futransformer.ops.interface import Ops
from futransformer.ops.validate import DTYPES
from futransformer.weights import LlamaWeights


def random_decoder(
    config: LlamaConfig, ops: Ops, precision: Precision, batch: int, context: int, new_tokens: int, device: torch.device
) -> Llama:
    """Sequences of ``context`` tokens in shuffled pages, with room for the new ones; the cache holds zeros.

    What a layer adds is scaled by 1 / sqrt(2 layers), so that activations stay finite at any depth.
    """
    added = (2 * config.num_hidden_layers) ** -0.5
    layers = [
        CodedBlock.of(NaturalBlock.random(config, device, added=added), precision).packed(config, ops, "decode")
        for _ in range(config.num_hidden_layers)
    ]
    one = torch.ones(config.hidden_size, device=device)
    weights = LlamaWeights(
        embedding=random_tensor(config.vocab_size, config.hidden_size, device=device),
        rope_table=device_rope_table(config, context + new_tokens, device),
        layers=layers,
        lm_head={
            "decode": ops.pack(
                "lm_head", "decode", rounded("lm_head", random_weight(config, "lm_head", device), precision)
            )
        },
        gains=(one,) * (2 * config.num_hidden_layers + 1) if precision.gain_in_x else (),
    )
    pages = batch * pages_for(context + new_tokens)
    cache = KVCache(
        config,
        pages,
        device=device,
        dtype=DTYPES[precision.kv],
        page_order=torch.randperm(pages).tolist(),
        scales=torch.ones(config.num_hidden_layers, 2) if precision.kv == E4M3 else None,
        copy=precision.copy,
    )
    for memory in (cache.pool, cache.copy):
        if memory is not None:
            memory.view(torch.uint8).zero_()
    model = Llama(config, ops, weights, cache)
    model.start(batch)
    model.reserve([context + new_tokens] * batch)
    for sequence in model.sequences:
        sequence.length = context
    return model
