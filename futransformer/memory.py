"""What a model keeps in memory, counted from its config before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields

import torch

from futransformer.build.machine import available_memory
from futransformer.generator.config import LlamaConfig
from futransformer.generator.errors import OutOfMemoryError
from futransformer.generator.int4 import packed_bytes
from futransformer.generator.plan import projections
from futransformer.generator.precision import BF16, INT4, Precision
from futransformer.generator.specs import PAGE_SIZE

FLOAT32_BITS = 32


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes resident while the model runs."""

    prefill_weights: int
    decode_weights: int
    embedding: int
    kv_cache: int
    activations: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(getattr(self, part.name) for part in fields(self))

    def __str__(self) -> str:
        """The total, and its parts in brackets."""
        parts = (f"{part.name.replace('_', ' ')} {gib(getattr(self, part.name))}" for part in fields(self))
        return f"{gib(self.total)} ({', '.join(parts)})"


def plan_memory(
    config: LlamaConfig, precision: Precision, *, cache_tokens: int, rows: int, reference: bool = False
) -> MemoryPlan:
    """Count a model with a cache of ``cache_tokens`` and at most ``rows`` tokens a pass.

    Kernels read one packing of every projection and of the head in prefill and another in decode; the reference holds
    one float32 copy for both, or one a phase of projections whose weights differ. Scales of FP8 are not
    counted, those of INT4 are.
    """
    heads, layers = config.heads, config.num_hidden_layers
    shapes = [shape for op, shape in projections(config).items() if op != "lm_head"]
    layer = sum(n * k for n, k in shapes)
    head = config.vocab_size * config.hidden_size

    def weights(bits: int, head_bits: int) -> int:
        return (layers * layer * bits + head * head_bits) // 8

    rope = config.max_position_embeddings * config.head_dim * 4
    features = layers * heads.kv_features
    pages = -(-cache_tokens // PAGE_SIZE)
    # of every row x (once more where GEMMs read it in FP8), q, attention's output and h; float32 logits of a few rows
    quantised = precision.prefill != BF16
    read_by_gemms = heads.q_features + config.intermediate_size + config.hidden_size * quantised
    row_bits = (config.hidden_size + heads.q_features) * 16 + read_by_gemms * precision.prefill.bits
    if reference:
        prefill_weights = weights(FLOAT32_BITS, FLOAT32_BITS)
        decode_weights = weights(FLOAT32_BITS, 0) if precision.prefill != precision.decode else 0
    else:
        prefill_weights = weights(precision.prefill.bits, precision.head.bits)
        decode_weights = weights(precision.decode.bits, precision.head.bits)
        if precision.decode == INT4:
            groups = precision.group_size, precision.zero_points
            decode_weights = layers * sum(packed_bytes(*shape, *groups) for shape in shapes) + weights(
                0, precision.head.bits
            )
    return MemoryPlan(
        prefill_weights=prefill_weights,
        decode_weights=decode_weights,
        embedding=head * 2 + rope,
        kv_cache=2 * pages * PAGE_SIZE * features * precision.kv.bits // 8,
        activations=rows * row_bits // 8,
    )


def check_memory(name: str, plan: MemoryPlan, device: torch.device) -> None:
    """Refuse a plan that exceeds the device's free memory, with the numbers."""
    available = available_bytes(device)
    if available is not None and plan.total > available:
        where = "this machine" if device.type == "cpu" else str(device)
        raise OutOfMemoryError(
            f"{name} needs {plan}, but {where} has {gib(available)} free; "
            "use a smaller model or a smaller cache (cache_tokens)"
        )


def available_bytes(device: torch.device) -> int | None:
    """Free memory of a GPU, or what this machine or container has left; None where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_memory()


@contextmanager
def allocation_errors(what: str, remedy: str) -> Iterator[None]:
    """Turn an allocation that the device refuses into an OutOfMemoryError that says what was going on."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(f"{what}: {str(error).partition(chr(10))[0]} {remedy}") from error


def gib(count: int) -> str:
    """Bytes as GiB, with enough digits for a small model."""
    return f"{count / 2**30:.2f} GiB"
