"""What a model keeps in memory, counted from its config before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields

import torch

from futransformer.build.machine import available_memory
from futransformer.generator.config import LlamaConfig
from futransformer.generator.errors import OutOfMemoryError
from futransformer.generator.packed import decode_bytes
from futransformer.generator.plan import projections
from futransformer.generator.precision import BF16, Precision
from futransformer.generator.specs import PAGE_SIZE
from futransformer.layer_parts import Half, Parts

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
    config: LlamaConfig,
    precision: Precision,
    *,
    cache_tokens: int,
    rows: int,
    reference: bool = False,
    bf16: Parts = frozenset(),
) -> MemoryPlan:
    """Count a model with a cache of ``cache_tokens`` and at most ``rows`` tokens a pass.

    Kernels read one packing of every projection and of the head in prefill and another in decode; the reference holds
    one float32 copy for both, or one a phase of projections whose weights differ. Of an FP8 prefill the parts in
    ``bf16`` are in BF16. Scales of an FP8 prefill are not counted, those of decode's weights are.
    """
    heads, layers = config.heads, config.num_hidden_layers
    part = part_weights(config)
    weights = layers * sum(part.values())
    plain = sum(part[half] for _, half in bf16)
    head = config.vocab_size * config.hidden_size
    rope = config.max_position_embeddings * config.head_dim * 4
    pages = -(-cache_tokens // PAGE_SIZE)
    of_head = 2 * PAGE_SIZE * heads.head_dim * precision.kv.bits // 8
    of_copy = 0 if precision.copy is None else precision.copy.page_bytes(heads.head_dim)
    # of every row x (once more where GEMMs read it in FP8), q, attention's output and h; float32 logits of a few rows
    quantised = precision.prefill != BF16
    read_by_gemms = heads.q_features + config.intermediate_size
    read_bits = read_by_gemms * (BF16 if bf16 else precision.prefill).bits
    read_bits += config.hidden_size * precision.prefill.bits * quantised
    row_bits = (config.hidden_size + heads.q_features) * 16 + read_bits
    if reference:
        prefill_weights = (weights + head) * FLOAT32_BITS
        apart = weights if precision.decode != BF16 else weights - plain if quantised else 0  # the others are one copy
        decode_weights = (apart + head * (precision.head != BF16)) * FLOAT32_BITS
    else:
        prefill_weights = (weights - plain) * precision.prefill.bits + plain * BF16.bits
        prefill_weights += head * BF16.bits
        shapes = [shape for op, shape in projections(config).items() if op != "lm_head"]
        packed = layers * sum(decode_bytes(precision.decode, *shape, precision) for shape in shapes)
        packed += decode_bytes(precision.head, config.vocab_size, config.hidden_size, precision)
        decode_weights = packed * 8
    return MemoryPlan(
        prefill_weights=prefill_weights // 8,
        decode_weights=decode_weights // 8,
        embedding=head * 2 + rope,
        kv_cache=layers * pages * heads.num_key_value_heads * (of_head + of_copy),
        activations=rows * row_bits // 8,
    )


def pages_that_fit(
    config: LlamaConfig,
    precision: Precision,
    *,
    rows: int,
    bf16: Parts = frozenset(),
    memory: tuple[int, int],
    utilization: float,
) -> int:
    """Pages of a cache that fills ``utilization`` of a GPU, whose ``memory`` is (free, total) bytes, beside the model.

    What is left is for logits, graphs and whatever the driver and others take.
    """
    plan, page = (plan_memory(config, precision, cache_tokens=n, rows=rows, bf16=bf16) for n in (0, PAGE_SIZE))
    free, total = memory
    pages = int(utilization * total - (total - free) - plan.total) // page.kv_cache
    if pages < 1:
        raise OutOfMemoryError(
            f"{config.name} needs {plan} and a cache, but {utilization:.0%} of the GPU's memory are "
            f"{gib(int(utilization * total))}, of which {gib(total - free)} are in use; use a smaller model, or more "
            "memory (gpu_memory_utilization)"
        )
    return pages


def part_weights(config: LlamaConfig) -> dict[Half, int]:
    """Weights of the two parts of a layer."""
    heads = config.heads
    return {
        "attention": config.hidden_size * (heads.qkv_features + heads.q_features),
        "mlp": config.hidden_size * 3 * config.intermediate_size,
    }


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
