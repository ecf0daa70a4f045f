"""Two layers from tokens to logits at the hidden sizes of real models; decode steps replayed from graphs, and padded.

Weights are random: what is tested is that the operations fit together at a shape, not what a model knows. Without a GPU
the same checks run on the stand-in library, where a step is never replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from futransformer.blocks import BlockScales, DecodePass, LayerWeights, Packed, PrefillPass, llama_block
from futransformer.checkpoint import rope_table
from futransformer.fp8_scaling import READERS, block_scales
from futransformer.generator.config import LlamaConfig
from futransformer.generator.decode_heuristics import decode_element
from futransformer.generator.plan import projections
from futransformer.generator.precision import E4M3, E4M3_MAX, Granularity, Precision, get_precision
from futransformer.kv_cache import CachedSequence, KVCache, pages_for, token_slots, upload
from futransformer.layer_parts import HALF_OF, Part, Parts, parse_parts
from futransformer.library import KernelLibrary
from futransformer.model import Llama
from futransformer.ops.interface import Fp8Output, Ops, Projection
from futransformer.reference import ReferenceOps, allowed_error, largest_error
from futransformer.weights import LlamaWeights, as_decoded
from tests.ops.fp8 import E4M3_ROUNDING, KV_SCALE, fp8_output, quantised, unbounded
from tests.ops.stand_in import stand_in_library

# hidden_size 2048, 3072, 5120, 8192, and one that is no power of two
EVERY_WIDTH = ("group16", "llama-3.2-3b", "group5", "llama-3-70b", "odd")
BOTH_HEAD_DIMS = ("smollm2-135m", "llama-3.1-8b")
KV8_MODELS = ("smollm2-135m-kv8", "group16-kv8")
FP8_MODELS = ("smollm2-135m-fp8", "llama-3.1-8b-fp8", "odd-fp8")
CODED_MODELS = ("smollm2-135m-int4-g32-asym", "llama-3.1-8b-int4", "smollm2-135m-bf16-fp8-head8", "odd-bf16-fp8-head4")
KV4_MODELS = ("smollm2-135m-kv4", "smollm2-135m-int4-g32-asym-kv4", "group16-kv4", "llama-3.2-3b-kv4")
TINY = LlamaConfig("tiny", 128, 192, 2, 4, 2, 64, 300, 4096, 1e-5, 1e4)
POSITIONS = 4096
# every kind of neighbours: BF16 first and last, FP8 after it within a layer and across layers, and nothing but BF16
SOME_IN_BF16 = ("0.attention", "0.mlp", "1.attention", "1.mlp", "0", "0.mlp, 1.attention", "0, 1")

LENGTHS = (1, 17, 129, 300)
STEPS = 300  # of decode: every sequence crosses several pages
STARTS = (60, 1, 126)  # tokens in the cache before the first step; 64 fill a page

GpuOps = Callable[[str], KernelLibrary]


class RandomModel:
    """Logical weights of two layers, and the model that they are on any backend, decoding as ``precision`` does."""

    def __init__(self, config: LlamaConfig, device: torch.device, precision: Precision | str = "bf16") -> None:
        self.precision = get_precision(precision)
        self.config = replace(config, num_hidden_layers=2, max_position_embeddings=POSITIONS, eos_token_ids=())
        generator = torch.Generator(device).manual_seed(1)

        def normal(rows: int, columns: int, scale: float) -> Tensor:
            return (torch.randn(rows, columns, generator=generator, device=device) * scale).bfloat16()

        shapes = {**projections(config), "lm_head": (config.vocab_size, config.hidden_size)}
        self.layers: list[dict[str, Tensor]] = [
            {op: normal(n, k, k**-0.5) for op, (n, k) in shapes.items() if op != "lm_head"} for _ in range(2)
        ]
        self.embedding = normal(config.vocab_size, config.hidden_size, 1)
        self.lm_head = normal(config.vocab_size, config.hidden_size, config.hidden_size**-0.5)
        self.rope_table = rope_table(self.config, POSITIONS).to(device)

    def weights(self, ops: Ops) -> LlamaWeights:
        """Everything packed for a backend."""

        def pack(op: Projection, logical: Tensor) -> Packed:
            decoded = as_decoded(op, logical, decode_element(op, self.precision), self.precision)
            return {"prefill": ops.pack(op, "prefill", logical), "decode": ops.pack(op, "decode", decoded)}

        layers = [
            LayerWeights(
                qkv=pack("qkv", layer["qkv"]),
                o=pack("o", layer["o"]),
                gate_up=pack("gate_up", layer["gate_up"]),
                down=pack("down", layer["down"]),
            )
            for layer in self.layers
        ]
        return LlamaWeights(self.embedding, self.rope_table, layers, pack("lm_head", self.lm_head))

    def on(self, ops: Ops, weights: LlamaWeights, tokens: int = 1024) -> Llama:
        """The model with a cache of its own, all of it NaN; codes of E4M3 the exact reference does not round."""
        codes = self.precision.kv == E4M3
        dtype = ops.dtype if isinstance(ops, ReferenceOps) else torch.bfloat16
        scales = torch.tensor([KV_SCALE, KV_SCALE[::-1]]) if codes else None
        if codes and dtype == torch.bfloat16:
            dtype = torch.float8_e4m3fn
        pages, copy = pages_for(tokens), self.precision.copy
        cache = KVCache(self.config, pages, device=ops.device, dtype=dtype, scales=scales, copy=copy)
        cache.pool.fill_(torch.nan)
        if cache.copy is not None:
            cache.copy.fill_(255)  # scales of NaN
        return Llama(self.config, ops, weights, cache)


# Logits


def check_logits(ops: KernelLibrary, lengths: Sequence[int]) -> None:
    """Prefill of unequal prompts, three steps of decode, another turn: the two-times rule against the exact reference.

    That of an INT4 copy rounds K and V to codes, and nothing else.
    """
    random = RandomModel(ops.config, ops.device, ops.precision)
    references = [
        ReferenceOps(ops.config, device=ops.device, dtype=dtype, copy=ops.precision.copy)
        for dtype in (torch.float32, torch.bfloat16)
    ]
    shared = random.weights(references[0])  # float32, whatever is rounded
    exact, rounded = (random.on(reference, shared) for reference in references)
    ours = random.on(ops, random.weights(ops))
    generator = torch.Generator().manual_seed(2)

    def tokens(count: int) -> list[int]:
        return torch.randint(ops.config.vocab_size, (count,), generator=generator).tolist()

    def check(where: str, actual: Tensor, want: Tensor, same_type: Tensor) -> None:
        error, allowed = largest_error(actual, want), allowed_error(same_type, want, get_precision("bf16"))
        assert error <= allowed, f"{where}: error {error:.3e}, allowed {allowed:.3e}"

    prompts = [tokens(length) for length in lengths]
    check("prefill", *(model.prefill(prompts, rows="all") for model in (ours, exact, rounded)))
    for step in range(3):
        column = tokens(len(lengths))
        check(f"decode step {step}", *(model.decode(column) for model in (ours, exact, rounded)))
    prompts = [tokens(length % 40 + 1) for length in lengths]
    check("another turn", *(model.extend(prompts, rows="all") for model in (ours, exact, rounded)))
    column = tokens(len(lengths))
    check("a step after it", *(model.decode(column) for model in (ours, exact, rounded)))


@pytest.mark.gpu
@pytest.mark.parametrize("model", EVERY_WIDTH + KV8_MODELS + CODED_MODELS + KV4_MODELS)
def test_logits(gpu_ops: GpuOps, model: str) -> None:
    check_logits(gpu_ops(model), LENGTHS)


@pytest.mark.parametrize(
    "precision",
    [
        *("bf16", "bf16-kv8", "int4", "int4-g32-asym-head4", "int4-g64-asym-kv8", "bf16-fp8-head8"),
        *("bf16-kv4", "int4-g32-asym-kv8-kv4-min", "bf16-fp8-head8-kv4"),
    ],
)
def test_logits_on_the_stand_in(monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    check_logits(stand_in_library(TINY, monkeypatch, precision=precision), (1, 17, 65))


# FP8 prefill


class Fp8Prefill:
    """Prompts through two layers whose GEMMs read FP8: weights in codes, and a scale for each of nine results.

    Result 4 l + i is read by projection i of layer l; the last is read by nobody. Parts in ``bf16`` read BF16.
    """

    def __init__(
        self,
        random: RandomModel,
        granularity: Granularity,
        lengths: Sequence[int],
        device: torch.device,
        bf16: Parts = frozenset(),
    ) -> None:
        self.random, self.lengths, self.device, self.bf16 = random, lengths, device, bf16
        self.layers = [
            {op: quantised(weight, by_row=granularity == "channel") for op, weight in layer.items()}
            for layer in random.layers
        ]
        generator = torch.Generator().manual_seed(2)
        tokens = torch.randint(random.config.vocab_size, (sum(lengths),), generator=generator)
        self.tokens = tokens.to(device, torch.int32)

    def results(self, scales: Sequence[Tensor]) -> list[Fp8Output]:
        return [fp8_output(scale) for scale in scales]

    def logits(self, ops: Ops, results: Sequence[Fp8Output]) -> Tensor:
        """Of every row."""
        config, device = self.random.config, self.device
        cache = KVCache(config, pages_for(1024), device=device, dtype=getattr(ops, "dtype", torch.bfloat16))
        cache.pool.fill_(torch.nan)
        sequences = [CachedSequence() for _ in self.lengths]
        cache.reserve(sequences, list(self.lengths))
        table = cache.block_table(sequences)
        counts = torch.tensor(self.lengths)
        of_row = torch.repeat_interleave(torch.arange(len(counts)), counts).to(device)
        positions = torch.cat([torch.arange(length) for length in self.lengths]).to(device, torch.int32)
        offsets = torch.tensor([0, *self.lengths]).cumsum(0).to(device, torch.int32)
        slots, seqlens = token_slots(table, of_row, positions), counts.to(device, torch.int32)
        rows = PrefillPass(positions, slots, table, offsets, seqlens, max(self.lengths))
        blocks = [self._block(ops, index, results) for index in range(len(self.layers))]
        lm_head = ops.pack("lm_head", "prefill", self.random.lm_head)
        everything = torch.arange(sum(self.lengths), device=device, dtype=torch.int32)
        first = None if Part(0, "attention") in self.bf16 else results[0]
        with ops.chain():
            stream = ops.gather_rows("prefill", self.random.embedding, self.tokens, fp8=first)
            for index, (weights, scales) in enumerate(blocks):
                pages = cache.layer(index)
                stream = llama_block(ops, weights, stream, rows, self.random.rope_table, *pages, scales)
            last = ops.gather_rows("prefill", stream.residual, everything)
            return ops.lm_head("prefill", last.x, last.sumsq, lm_head)

    def _block(self, ops: Ops, index: int, results: Sequence[Fp8Output]) -> tuple[LayerWeights, BlockScales]:
        layer = self.layers[index]
        packed: dict[str, Packed] = {}
        sums: list[Tensor] = []
        for read, op in zip(results[4 * index :], READERS, strict=False):
            codes, scale = layer[op]
            plain = Part(index, HALF_OF[op]) in self.bf16
            weight = self.random.layers[index][op] if plain else codes
            packed[op] = {"prefill": ops.pack(op, "prefill", weight)}
            sums.append(ops.pack_scale(op, read.scale * scale))
        order = torch.arange(sum(self.lengths), device=self.device, dtype=torch.int32)
        scales = block_scales(index, self.bf16, sums, results[4 * index : 4 * index + 5], order)
        return LayerWeights(**packed), scales


def check_fp8_prefill(
    ops: KernelLibrary, lengths: Sequence[int], repetitions: int = 1, bf16: Parts = frozenset()
) -> None:
    """The two-times rule, with what is written in FP8 rounded and not; maxima and scales each of its own result.

    Kernels of a pass overlap, which must not show in any of the ``repetitions``.
    """
    prefill = Fp8Prefill(RandomModel(ops.config, ops.device), ops.precision.weight_scales, lengths, ops.device, bf16)
    exact, rounded = (ReferenceOps(ops.config, device=ops.device, dtype=d) for d in (torch.float32, torch.bfloat16))
    one = torch.ones(1, device=ops.device)
    unknown = prefill.results([unbounded(one)] * 9)  # which the exact reference does not mind: it rounds no code
    want = prefill.logits(exact, unknown)
    scales = [torch.where(result.amax > 0, result.amax / E4M3_MAX, 1) for result in unknown]
    own, same_type = prefill.results(scales), prefill.logits(rounded, prefill.results(scales))
    actual = prefill.logits(ops, own)
    error, allowed = largest_error(actual, want), allowed_error(same_type, want, ops.precision)
    assert error <= allowed, f"error {error:.3e}, allowed {allowed:.3e}"
    for index, (result, reference) in enumerate(zip(own, unknown, strict=True)):
        if result.amax == reference.amax == 0:  # of parts in BF16
            continue
        assert abs(result.amax / reference.amax - 1) <= 2 * E4M3_ROUNDING, f"result {index}: amax {result.amax.item()}"
    for _ in range(repetitions):
        again = prefill.results(scales)
        assert same_bits(prefill.logits(ops, again), actual)
        assert [t.item() for result in again for t in result] == [t.item() for result in own for t in result]


@pytest.mark.gpu
@pytest.mark.parametrize("model", FP8_MODELS)
def test_fp8_prefill(gpu_ops: GpuOps, monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    ops = gpu_ops(model)
    monkeypatch.delattr(ops._projections, "_empty")  # filling outputs in between would keep launches from overlapping
    check_fp8_prefill(ops, LENGTHS, repetitions=20)


@pytest.mark.gpu
@pytest.mark.parametrize("model", FP8_MODELS)
@pytest.mark.parametrize("parts", SOME_IN_BF16)
def test_fp8_prefill_with_parts_in_bf16(
    gpu_ops: GpuOps, monkeypatch: pytest.MonkeyPatch, model: str, parts: str
) -> None:
    ops = gpu_ops(model)
    monkeypatch.delattr(ops._projections, "_empty")
    check_fp8_prefill(ops, LENGTHS, repetitions=20, bf16=parse_parts(parts, 2))


@pytest.mark.parametrize("parts", SOME_IN_BF16)
def test_fp8_prefill_with_parts_in_bf16_on_the_stand_in(monkeypatch: pytest.MonkeyPatch, parts: str) -> None:
    ops = stand_in_library(TINY, monkeypatch, precision="fp8", mixed=True)
    check_fp8_prefill(ops, (1, 17, 65), bf16=parse_parts(parts, 2))


@pytest.mark.parametrize("granularity", ["tensor", "channel"])
def test_fp8_prefill_on_the_stand_in(monkeypatch: pytest.MonkeyPatch, granularity: Granularity) -> None:
    precision = replace(get_precision("fp8"), weight_scales=granularity)
    check_fp8_prefill(stand_in_library(TINY, monkeypatch, precision=precision), (1, 17, 65))


# Replayed steps


def check_replays(ops: KernelLibrary, steps: int) -> None:
    """Steps replayed from graphs, across pages, have the bits of eager ones, and leave no counter behind."""
    random = RandomModel(ops.config, ops.device, ops.precision)
    weights = random.weights(ops)
    eager, replayed = (random.on(ops, weights, 2048) for _ in range(2))
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(ops.config.vocab_size, (start,), generator=generator).tolist() for start in STARTS]
    for model in (eager, replayed):
        model.prefill(prompts)
    capturable = ops.capturable
    try:
        for step in range(steps):
            tokens = torch.randint(ops.config.vocab_size, (len(STARTS),), generator=generator).tolist()
            ops.capturable = False
            want = eager.decode(tokens)
            ops.capturable = capturable
            assert want.isfinite().all()
            assert same_bits(replayed.decode(tokens), want), f"step {step}"
    finally:
        ops.capturable = capturable
    assert not ops._attention_decode.workspace.arrivals.any()


@pytest.mark.gpu
@pytest.mark.parametrize("model", BOTH_HEAD_DIMS + KV8_MODELS[:1] + CODED_MODELS + KV4_MODELS[:2])
def test_replayed_steps_equal_eager_ones(gpu_ops: GpuOps, monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    ops = gpu_ops(model)
    monkeypatch.delattr(ops._projections, "_empty")  # filling outputs in between would keep launches from overlapping
    check_replays(ops, STEPS)


def test_the_check_of_replays_on_the_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    check_replays(stand_in_library(TINY, monkeypatch), 10)


# Padded rows


def check_padding(ops: KernelLibrary) -> None:
    """A padded row may hold anything: a token that is none makes it NaN throughout, and the others do not notice."""
    random = RandomModel(ops.config, ops.device, ops.precision)
    weights = random.weights(ops)
    finite, poisoned = (padded_step(random.on(ops, weights), last_token) for last_token in (9, -1))
    assert finite[:3].isfinite().all()
    assert poisoned[3].isnan().all()
    assert same_bits(finite[:3], poisoned[:3])


def padded_step(model: Llama, last_token: int) -> Tensor:
    """Logits of a step of three sequences and a padded row, which must write nothing to the cache."""
    device = model.cache.device
    sequences = [CachedSequence() for _ in range(4)]
    model.cache.reserve(sequences, [64] * 4)
    table = model.cache.block_table(sequences)
    positions = torch.zeros(4, dtype=torch.int32, device=device)
    slots = token_slots(table, torch.arange(4, device=device), positions)
    slots[3] = -1
    lengths = upload([1, 1, 1, 0], torch.int32, device)
    rows = DecodePass(positions, slots, table, lengths, max_seqlen_k=64)
    logits = model._decode_tokens(upload([1, 5, 7, last_token], torch.int32, device), rows, logits=True)
    assert logits is not None
    written = ~model.cache.pool.isnan().flatten(3).all(-1)  # [K or V, layer, page]
    expected = torch.zeros(model.cache.num_pages, dtype=torch.bool, device=device)
    expected[table[:3, 0].long()] = True
    assert torch.equal(written, expected.expand_as(written)), "another page was written, or one was not"
    return logits


@pytest.mark.gpu
@pytest.mark.parametrize("model", BOTH_HEAD_DIMS + CODED_MODELS + KV4_MODELS[:1])
def test_padded_rows_do_no_harm(gpu_ops: GpuOps, model: str) -> None:
    check_padding(gpu_ops(model))


def test_the_check_of_padding_on_the_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    check_padding(stand_in_library(TINY, monkeypatch))


def same_bits(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.contiguous().view(torch.int32), right.contiguous().view(torch.int32))
