"""attention_prefill/{8b,70b}/bf16/{4x2048,1x8192,1x32768}: causal attention; ours over shuffled pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from futransformer.bench.case import COMPUTE_BOUND, Case, Contender, Expected, Problem
from futransformer.bench.check import poison
from futransformer.bench.llama import Prompts, random_tensor, to_pair_order
from futransformer.bench.rivals.attention import cudnn_prefill, flash_attention_varlen
from futransformer.bench.runner import Bench
from futransformer.bench.shapes import prefill_attention_work, shape_config
from futransformer.generator.config import LlamaConfig
from futransformer.generator.specs import PAGE_SIZE
from futransformer.ops.interface import Ops
from futransformer.reference import ReferenceOps

PROMPTS = {"4x2048": (2048,) * 4, "1x8192": (8192,), "1x32768": (32768,)}


def cases() -> Sequence[Case]:
    """See futransformer.bench.subjects."""
    return [
        Case(
            f"attention_prefill/{shape}/bf16/{name}",
            "TFLOP/s",
            COMPUTE_BOUND,
            partial(open_case, shape, lengths),
            default=shape == "8b" or name == "4x2048",
        )
        for shape in ("8b", "70b")
        for name, lengths in PROMPTS.items()
    ]


class Inputs:
    """Natural q, k, v [T, heads, D], and the same as ours reads them."""

    def __init__(self, config: LlamaConfig, lengths: Sequence[int], device: torch.device) -> None:
        self.config, self.prompts, heads = config, Prompts(lengths, device), config.heads
        rows = self.prompts.rows
        self.q = random_tensor(rows, heads.num_attention_heads, heads.head_dim, device=device)
        self.k, self.v = (
            random_tensor(rows, heads.num_key_value_heads, heads.head_dim, device=device) for _ in range(2)
        )
        self.paired_q = to_pair_order(self.q, heads.head_dim).flatten(1)
        self.rows = self.prompts.prefill_pass()
        slots = self.rows.slots
        self.k_pages, self.v_pages = (self.prompts.empty_pages(config) for _ in range(2))
        self.k_pages[slots // PAGE_SIZE, :, slots % PAGE_SIZE] = to_pair_order(self.k, heads.head_dim)
        self.v_pages[slots // PAGE_SIZE, :, slots % PAGE_SIZE] = self.v

    def attend(self, ops: Ops) -> Tensor:
        """One call of ours, or of the reference."""
        return self.rows.attention(ops, self.paired_q, self.k_pages, self.v_pages)

    def poisoned(self, ops: Ops) -> Sequence[Tensor]:
        """One checked call of ours."""
        poison(self.q.device, (tuple(self.paired_q.shape), torch.bfloat16))
        return [self.attend(ops)]

    def expected(self) -> Sequence[Expected]:
        """The references' answers."""
        exact, same = (
            self.attend(ReferenceOps(self.config, device=self.q.device, dtype=dtype))
            for dtype in (torch.float32, torch.bfloat16)
        )
        return [Expected(exact, same)]


def open_case(shape: str, lengths: Sequence[int], bench: Bench) -> Problem:
    """Draw inputs; K and V are few enough to stay in L2 for everybody, as they do in a model."""
    ops, config = bench.library(shape), shape_config(shape)
    inputs = Inputs(config, lengths, bench.device)

    def contender(call: Callable[[], Tensor]) -> Contender:
        return Contender(run=call, outputs=lambda: [call()])

    def flash() -> Contender:
        attend = flash_attention_varlen(inputs.prompts.cu_seqlens, max(lengths))
        return contender(partial(attend, inputs.q, inputs.k, inputs.v))

    return Problem(
        work=prefill_attention_work(config, lengths),
        ours=Contender(run=lambda: inputs.attend(ops), outputs=lambda: inputs.poisoned(ops)),
        rivals={
            "flash-attn-4": flash,
            "cudnn": lambda: contender(cudnn_prefill(inputs.q, inputs.k, inputs.v, lengths)),
        },
        expected=inputs.expected,
    )
