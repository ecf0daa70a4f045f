"""Random blocks of a real shape: weights, activations and caches, in the layouts of ours and of everybody else.

*Natural* is what PyTorch code computes with: heads' features in the checkpoint's order, K and V [B, kv heads, T, D].
Ours keeps Q and K in pair order and K and V in pages (docs/architecture.md). The RMSNorm gains are ones, so a logical
weight is the natural one, reordered. Weights are N(0, 1 / K): every activation keeps the scale of its input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from futransformer.blocks import DecodePass, LayerWeights, PrefillPass
from futransformer.checkpoint import pair_order, rope_table
from futransformer.generator.config import LlamaConfig
from futransformer.generator.kv_format import KvFormat
from futransformer.generator.plan import projections
from futransformer.generator.specs import PAGE_SIZE
from futransformer.kv_cache import pages_for, token_slots
from futransformer.kv_packing import store_tokens
from futransformer.ops.interface import Ops, Phase, Projection
from futransformer.quantize.kv_int4 import quantise_keys, quantise_kv, rotate
from futransformer.reference import natural_order

# Distinct weights and caches that a rotation should cycle through: some thirty times the 60 MB of an H200's L2.
ROTATION_BYTES = 2 << 30
MAX_SETS = 64
PAGES_AT_ONCE = 256  # that are rounded to INT4 together


def sets_for(bytes_each: float) -> int:
    """How many distinct sets make a rotation cold; a set that fills it alone is cold by itself."""
    return max(1, min(MAX_SETS, -int(-ROTATION_BYTES // bytes_each)))


def random_tensor(*shape: int, device: torch.device, scale: float = 1.0) -> Tensor:
    """BF16 normal values."""
    return torch.randn(*shape, device=device).mul_(scale).bfloat16()


def random_weight(config: LlamaConfig, op: Projection, device: torch.device) -> Tensor:
    """A natural weight [N, K]; gate rows, then up rows; no padding of the vocabulary."""
    n, k = projections(config)[op]
    return random_tensor(config.vocab_size if op == "lm_head" else n, k, device=device, scale=k**-0.5)


def logical(config: LlamaConfig, op: Projection, natural: Tensor) -> Tensor:
    """Return the natural weight as ``ops.pack`` takes it: the rows of Q and K in pair order."""
    if op != "qkv":
        return natural
    rotated = config.heads.q_features + config.heads.kv_features
    return torch.cat((pair_order(natural[:rotated], config.head_dim), natural[rotated:]))


def to_pair_order(features: Tensor, head_dim: int) -> Tensor:
    """Reorder the last dimension, heads x D or D, from natural order."""
    halves = features.reshape(*features.shape[:-1], -1, 2, head_dim // 2)
    return halves.transpose(-1, -2).reshape(features.shape)


class NaturalBlock(NamedTuple):
    """The four weights of one layer, in natural order, and the gains that a rival multiplies with."""

    qkv: Tensor
    o: Tensor
    gate_up: Tensor
    down: Tensor
    gain: Tensor

    @classmethod
    def random(cls, config: LlamaConfig, device: torch.device, *, added: float = 1.0) -> NaturalBlock:
        """Draw one; what it adds to the residual stream is scaled by ``added``."""
        qkv, o, gate_up, down = (random_weight(config, op, device) for op in ("qkv", "o", "gate_up", "down"))
        gain = torch.ones(config.hidden_size, dtype=torch.bfloat16, device=device)
        return cls(qkv, o.mul_(added), gate_up, down.mul_(added), gain)

    def packed(self, config: LlamaConfig, ops: Ops, phase: Phase) -> LayerWeights:
        """The same weights as ``ops`` reads them in one phase; for the reference, without a float32 copy."""

        def pack(op: Projection, natural: Tensor) -> dict[Phase, Tensor]:
            return {phase: ops.pack(op, phase, logical(config, op, natural))}

        return LayerWeights(
            qkv=pack("qkv", self.qkv),
            o=pack("o", self.o),
            gate_up=pack("gate_up", self.gate_up),
            down=pack("down", self.down),
        )


@dataclass(frozen=True)
class Cache:
    """K and V of one layer in natural order, and the pages that hold the same."""

    k: Tensor
    v: Tensor
    k_pages: Tensor
    v_pages: Tensor


class Paging:
    """Where sequences of equal length lie: pages in shuffled order, the same for every layer."""

    def __init__(self, sequences: int, tokens: int, device: torch.device) -> None:
        self.sequences, self.tokens, self.device = sequences, tokens, device
        self.pages = sequences * pages_for(tokens)
        order = torch.randperm(self.pages, device=device, dtype=torch.int32)
        self.block_table = order.view(sequences, -1)

    def empty(self, config: LlamaConfig) -> Tensor:
        """Pages of K or V, full of NaN."""
        shape = (self.pages, config.num_key_value_heads, PAGE_SIZE, config.head_dim)
        return torch.full(shape, torch.nan, dtype=torch.bfloat16, device=self.device)

    def store(self, natural: Tensor, config: LlamaConfig, *, pairs: bool) -> Tensor:
        """Put natural [B, kv heads, T, D] into pages; ``pairs`` for K."""
        pages = self.empty(config)
        for sequence in range(self.sequences):
            tokens = natural[sequence]
            if pairs:
                tokens = to_pair_order(tokens, config.head_dim)
            padded = torch.nn.functional.pad(tokens, (0, 0, 0, -self.tokens % PAGE_SIZE), value=torch.nan)
            pages[self.block_table[sequence].long()] = padded.view(
                padded.shape[0], -1, PAGE_SIZE, config.head_dim
            ).transpose(0, 1)
        return pages

    def cache(self, config: LlamaConfig) -> Cache:
        """A random cache."""
        shape = (self.sequences, config.num_key_value_heads, self.tokens, config.head_dim)
        k, v = (random_tensor(*shape, device=self.device) for _ in range(2))
        return Cache(k, v, self.store(k, config, pairs=True), self.store(v, config, pairs=False))

    def coded_cache(self, config: LlamaConfig, form: KvFormat) -> Cache:
        """A random cache of what INT4 codes are worth, rounded to BF16: a copy of it is worth nearly the same."""
        shape = (self.sequences, config.num_key_value_heads, self.tokens, config.head_dim)
        k, v = (random_tensor(*shape, device=self.device) for _ in range(2))
        for keys, values in zip(k, v, strict=True):
            keys.copy_(rotate(quantise_keys(rotate(keys, form.hadamard), form).worth(), form.hadamard))
            values.copy_(quantise_kv(values, form).worth())
        return Cache(k, v, self.store(k, config, pairs=True), self.store(v, config, pairs=False))

    def decode_pass(self) -> DecodePass:
        """Every sequence appends the last of its tokens."""
        position = torch.full((self.sequences,), self.tokens - 1, dtype=torch.int32, device=self.device)
        return DecodePass(
            positions=position,
            slots=token_slots(self.block_table, torch.arange(self.sequences, device=self.device), position),
            block_table=self.block_table,
            seqlens_k=position + 1,
            max_seqlen_k=self.tokens,
        )


def copy_of(cache: Cache, form: KvFormat) -> Tensor:
    """The INT4 copy of a layer's pages, of whatever they hold."""
    num_pages, heads, _, head_dim = cache.k_pages.shape
    kv_copy = cache.k_pages.new_empty(num_pages, heads, form.page_bytes(head_dim), dtype=torch.uint8)
    slots = torch.arange(PAGES_AT_ONCE * PAGE_SIZE, device=kv_copy.device)
    parts = (torch.split(each, PAGES_AT_ONCE) for each in (kv_copy, cache.k_pages, cache.v_pages))
    for target, k_pages, v_pages in zip(*parts, strict=True):
        k, v = (pages.transpose(1, 2).flatten(0, 1) for pages in (k_pages, v_pages))
        keys = quantise_keys(rotate(natural_order(k), form.hadamard), form)
        store_tokens(target, slots[: len(k)], keys, quantise_kv(v, form), form)
    return kv_copy


class Prompts:
    """Prompts of given lengths, concatenated, and the pages that they fill."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.lengths, self.device = tuple(lengths), device
        self.rows = sum(lengths)
        counts = [pages_for(length) for length in lengths]
        self.pages = sum(counts)
        order = torch.randperm(self.pages, dtype=torch.int32).tolist()
        table = [[order.pop() for _ in range(count)] + [-1] * (max(counts) - count) for count in counts]
        self.block_table = torch.tensor(table, dtype=torch.int32, device=device)
        ends = torch.tensor(lengths, device=device).cumsum(0)
        self.cu_seqlens = torch.cat((ends.new_zeros(1), ends)).int()
        self.owners = torch.repeat_interleave(
            torch.arange(len(lengths), device=device), torch.tensor(lengths, device=device)
        )
        self.positions = torch.cat([torch.arange(length, device=device) for length in lengths]).int()

    def empty_pages(self, config: LlamaConfig) -> Tensor:
        """Pages of K or V, full of NaN."""
        shape = (self.pages, config.num_key_value_heads, PAGE_SIZE, config.head_dim)
        return torch.full(shape, torch.nan, dtype=torch.bfloat16, device=self.device)

    def prefill_pass(self) -> PrefillPass:
        """All prompts in one pass."""
        return PrefillPass(
            positions=self.positions,
            slots=token_slots(self.block_table, self.owners, self.positions),
            block_table=self.block_table,
            cu_seqlens_q=self.cu_seqlens,
            seqlens_k=torch.tensor(self.lengths, dtype=torch.int32, device=self.device),
            max_seqlen_q=max(self.lengths),
        )


def device_rope_table(config: LlamaConfig, positions: int, device: torch.device) -> Tensor:
    """Ours: float32 [positions, D / 2, 2]."""
    return rope_table(config, positions).to(device)


def natural_rope(table: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Everybody else's: BF16 cos and sin [T, D], the half repeated."""
    cos_sin = table[positions.long()]
    cos, sin = (torch.cat((half, half), -1).bfloat16() for half in cos_sin.unbind(-1))
    return cos, sin
