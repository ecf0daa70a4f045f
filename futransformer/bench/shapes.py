"""The shapes that cases name, and the least work of each operation on them."""

from __future__ import annotations

from collections.abc import Sequence

from futransformer.bench.case import Work
from futransformer.generator.config import LlamaConfig, load_config
from futransformer.generator.plan import projections
from futransformer.ops.interface import Projection

# 70b is the shape of every Llama of that size from 3 on; only max_position_embeddings differs.
SHAPES = {"8b": "llama-3.1-8b", "70b": "llama-3-70b"}
BYTES = 2  # of a BF16 element
BLOCK_OPS: tuple[Projection, ...] = ("qkv", "o", "gate_up", "down")


def shape_config(shape: str) -> LlamaConfig:
    """Return the config behind a case's shape."""
    return load_config(SHAPES.get(shape, shape))


def gemm_work(config: LlamaConfig, op: str, rows: int) -> Work:
    """Weights once, x in, the result out (half as wide behind a SwiGLU, read as well where it is added to)."""
    n, k = projections(config)[op]
    columns = {"gate_up": n // 2, "o": 2 * n, "down": 2 * n, "lm_head": 2 * n}.get(op, n)
    return Work(2.0 * rows * n * k, BYTES * (float(n) * k + rows * k + rows * columns))


def prefill_attention_work(config: LlamaConfig, lengths: Sequence[int]) -> Work:
    """Two products over the causal half of the scores; Q, K, V in, the result out."""
    heads, rows = config.heads, sum(lengths)
    scores = sum(length * length / 2 for length in lengths)
    features = 2 * heads.q_features + 2 * heads.kv_features
    return Work(4.0 * heads.q_features * scores, float(BYTES * rows * features))


def decode_attention_work(config: LlamaConfig, batch: int, context: int) -> Work:
    """Every K and V once."""
    heads = config.heads
    return Work(4.0 * heads.q_features * batch * context, float(BYTES * 2 * heads.kv_features) * batch * context)


def block_gemm_work(config: LlamaConfig, rows: int) -> Work:
    """The four projections."""
    return sum((gemm_work(config, op, rows) for op in BLOCK_OPS), Work())


def decode_block_work(config: LlamaConfig, batch: int, context: int) -> Work:
    """One layer of a decode step: weights and cache once; activations stay in L2."""
    weights = sum(n * k for n, k in (projections(config)[op] for op in BLOCK_OPS))
    return Work(2.0 * batch * weights, float(BYTES * weights)) + decode_attention_work(config, batch, context)


def decode_step_work(config: LlamaConfig, batch: int, context: int) -> Work:
    """All layers and the head; the embedding is a gather of a few rows."""
    head = float(config.vocab_size * config.hidden_size)
    return decode_block_work(config, batch, context).times(config.num_hidden_layers) + Work(
        2 * batch * head, BYTES * head
    )
