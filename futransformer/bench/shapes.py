"""The shapes that cases name, and the least work of each operation on them."""

from __future__ import annotations

from collections.abc import Sequence

from futransformer.bench.case import Work
from futransformer.generator.config import LlamaConfig, load_config
from futransformer.generator.decode_heuristics import decode_element
from futransformer.generator.packed import decode_bytes
from futransformer.generator.plan import projections
from futransformer.generator.precision import E4M3, get_precision
from futransformer.ops.interface import Projection

# 70b is the shape of every Llama of that size from 3 on; only max_position_embeddings differs.
SHAPES = {"8b": "llama-3.1-8b", "70b": "llama-3-70b"}
DECODE_PRECISIONS = {"bf16": "bf16", "int4": "int4", "fp8": "bf16-fp8"}  # by what decode reads, as cases name it
BYTES = 2  # of a BF16 element
FP8_BYTES = 1
BLOCK_OPS: tuple[Projection, ...] = ("qkv", "o", "gate_up", "down")

# 64 prompts as a server meets them: drawn once from a log-normal distribution, cut to 16 .. 2048 tokens; 507 on
# average, 32,439 in all. Padded to the longest they are four times as many.
RAGGED = (
    63, 1171, 389, 1202, 574, 204, 519, 863, 566, 290, 252, 1671, 213, 1622, 281, 678,
    96, 297, 877, 884, 16, 123, 214, 713, 710, 110, 158, 1106, 122, 2048, 384, 683,
    186, 166, 2010, 112, 155, 801, 150, 410, 458, 106, 403, 909, 220, 368, 145, 186,
    209, 440, 803, 382, 87, 399, 465, 692, 26, 303, 170, 71, 429, 319, 675, 1085,
)  # fmt: skip


def shape_config(shape: str) -> LlamaConfig:
    """Return the config behind a case's shape."""
    return load_config(SHAPES.get(shape, shape))


def gemm_work(config: LlamaConfig, op: str, rows: int, precision: str = "bf16") -> Work:
    """Weights once, x in, the result out (half as wide behind a SwiGLU, read as well where it is added to).

    In FP8 weights and x are of one byte, and so is h; what is added to stays BF16, beside its FP8 copy.
    """
    n, k = projections(config)[op]
    flops, operands = 2.0 * rows * n * k, float(n) * k + rows * k
    if get_precision(precision).prefill == E4M3:
        row = {"qkv": BYTES * n, "gate_up": FP8_BYTES * n // 2}.get(op, (2 * BYTES + FP8_BYTES) * n)
        return Work(bytes=FP8_BYTES * operands + rows * row, fp8_flops=flops)
    columns = {"gate_up": n // 2, "o": 2 * n, "down": 2 * n, "lm_head": 2 * n}.get(op, n)
    return Work(flops, BYTES * (operands + rows * columns))


def prefill_attention_work(config: LlamaConfig, lengths: Sequence[int]) -> Work:
    """Two products over the causal half of the scores; Q, K, V in, the result out."""
    heads, rows = config.heads, sum(lengths)
    scores = sum(length * length / 2 for length in lengths)
    features = 2 * heads.q_features + 2 * heads.kv_features
    return Work(4.0 * heads.q_features * scores, float(BYTES * rows * features))


def decode_attention_work(config: LlamaConfig, batch: int, context: int, precision: str = "bf16") -> Work:
    """Every K and V once, as the precision's cache holds them."""
    heads, row = config.heads, get_precision(precision)
    bits = row.kv.bits if row.copy is None else row.copy.bits(heads.head_dim)
    return Work(4.0 * heads.q_features * batch * context, bits / 8 * 2 * heads.kv_features * batch * context)


def block_gemm_work(config: LlamaConfig, rows: int, precision: str = "bf16") -> Work:
    """The four projections."""
    return sum((gemm_work(config, op, rows, precision) for op in BLOCK_OPS), Work())


def prefill_model_work(config: LlamaConfig, rows: int, precision: str) -> Work:
    """All layers of one prompt, and the head's BF16 product for its last row."""
    head = float(config.vocab_size * config.hidden_size)
    layer = block_gemm_work(config, rows, precision) + prefill_attention_work(config, (rows,))
    return layer.times(config.num_hidden_layers) + Work(2 * head, BYTES * head)


def decode_weight_bytes(config: LlamaConfig, op: str, precision: str = "bf16") -> int:
    """A projection's weight as decode reads it, scales and all; of the head without padding."""
    n, k = projections(config)[op]
    row = get_precision(precision)
    return decode_bytes(decode_element(op, row), config.vocab_size if op == "lm_head" else n, k, row)


def decode_gemm_work(config: LlamaConfig, op: str, batch: int, precision: str = "bf16") -> Work:
    """As ``gemm_work`` in BF16, but for the weight."""
    n, k = projections(config)[op]
    return gemm_work(config, op, batch) + Work(bytes=decode_weight_bytes(config, op, precision) - BYTES * n * k)


def decode_chain_work(config: LlamaConfig, batch: int, precision: str = "bf16") -> Work:
    """The four projections."""
    return sum((decode_gemm_work(config, op, batch, precision) for op in BLOCK_OPS), Work())


def decode_block_work(config: LlamaConfig, batch: int, context: int, precision: str = "bf16") -> Work:
    """One layer of a decode step: weights and cache once; activations stay in L2."""
    flops = sum(2.0 * batch * n * k for n, k in (projections(config)[op] for op in BLOCK_OPS))
    weights = sum(decode_weight_bytes(config, op, precision) for op in BLOCK_OPS)
    return Work(flops, float(weights)) + decode_attention_work(config, batch, context, precision)


def decode_step_work(config: LlamaConfig, batch: int, context: int, precision: str = "bf16") -> Work:
    """All layers and the head; the embedding is a gather of a few rows."""
    head = float(config.vocab_size * config.hidden_size)
    layers = decode_block_work(config, batch, context, precision).times(config.num_hidden_layers)
    return layers + Work(2 * batch * head, decode_weight_bytes(config, "lm_head", precision))
