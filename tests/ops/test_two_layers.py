"""Two layers from tokens to logits at the hidden sizes of real models, and decode steps replayed from a captured graph.

Weights are random: what is tested is that the operations fit together at a shape, not what a model knows. Without a GPU
the same checks run on the stand-in library, where a "captured" step is the step itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from futransformer.blocks import DecodePass, LayerWeights, Packed
from futransformer.checkpoint import rope_table
from futransformer.generator.config import LlamaConfig
from futransformer.generator.plan import projections
from futransformer.generator.precision import get_precision
from futransformer.kv_cache import CachedSequence, KVCache, pages_for, token_slots, upload
from futransformer.library import KernelLibrary
from futransformer.model import PHASES, Llama, LlamaWeights
from futransformer.ops.interface import Ops, Projection
from futransformer.reference import ReferenceOps, allowed_error, largest_error
from tests.ops.stand_in import stand_in_library

# hidden_size 2048, 3072, 5120, 8192, and one that is no power of two
EVERY_WIDTH = ("group16", "llama-3.2-3b", "group5", "llama-3-70b", "odd")
BOTH_HEAD_DIMS = ("smollm2-135m", "llama-3.1-8b")
TINY = LlamaConfig("tiny", 128, 192, 2, 4, 2, 64, 300, 4096, 1e-5, 1e4)
POSITIONS = 4096

LENGTHS = (1, 17, 129, 300)
STEPS = 300  # of decode: every sequence crosses several pages
STARTS = (60, 1, 126)  # tokens in the cache before the first step; 64 fill a page

GpuOps = Callable[[str], KernelLibrary]
Capture = Callable[[Callable[[], None]], Callable[[], None]]


class RandomModel:
    """Logical weights of two layers, and the model that they are on any backend."""

    def __init__(self, config: LlamaConfig, device: torch.device) -> None:
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
            return {phase: ops.pack(op, phase, logical) for phase in PHASES}

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
        """The model with a cache of its own, all of it NaN."""
        dtype = ops.dtype if isinstance(ops, ReferenceOps) else torch.bfloat16
        cache = KVCache(self.config, pages_for(tokens), device=ops.device, dtype=dtype)
        cache.pool.fill_(torch.nan)
        return Llama(self.config, ops, weights, cache)


# Logits


def check_logits(ops: KernelLibrary, lengths: Sequence[int]) -> None:
    """Prefill of unequal prompts, then three steps of decode: the two-times rule against the exact reference."""
    random = RandomModel(ops.config, ops.device)
    references = [ReferenceOps(ops.config, device=ops.device, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
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


@pytest.mark.gpu
@pytest.mark.parametrize("model", EVERY_WIDTH)
def test_logits(gpu_ops: GpuOps, model: str) -> None:
    check_logits(gpu_ops(model), LENGTHS)


def test_logits_on_the_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    check_logits(stand_in_library(TINY, monkeypatch), (1, 17, 65))


# Captured steps


@dataclass
class Step:
    """One decode step on tensors that stay where they are; row i of the batch is padding where ``active[i]`` is 0."""

    model: Llama
    active: Tensor

    def __post_init__(self) -> None:
        batch, device = len(self.active), self.active.device
        sequences = [CachedSequence() for _ in range(batch)]
        starts = [start * int(alive) for start, alive in zip((*STARTS, 0), self.active.tolist(), strict=False)]
        self.model.cache.reserve(sequences, [start + STEPS for start in starts])
        self.table = self.model.cache.block_table(sequences)
        self.lengths = upload(starts, torch.int32, device)
        self.max_seqlen_k = max(starts) + STEPS
        self.tokens, self.positions = (torch.zeros(batch, dtype=torch.int32, device=device) for _ in range(2))
        self.slots = torch.zeros(batch, dtype=torch.int64, device=device)
        self._fill_cache(starts)

    def _fill_cache(self, starts: Sequence[int]) -> None:
        """Random K and V of the tokens before the first step; the rest stays NaN."""
        pool = self.model.cache.pool
        generator = torch.Generator(pool.device).manual_seed(3)
        for row, start in enumerate(starts):
            shape = (*pool.shape[:2], start, pool.shape[3], pool.shape[5])
            values = torch.randn(shape, generator=generator, device=pool.device).to(pool.dtype)
            for position in range(start):
                pool[:, :, self.table[row, position // 64], :, position % 64] = values[:, :, position]

    def advance(self, tokens: Tensor) -> None:
        """Set the next tokens, and where they stand."""
        rows = torch.arange(len(self.active), device=self.active.device)
        self.tokens.copy_(tokens)
        self.positions.copy_(self.lengths)
        slots = token_slots(self.table, rows, self.positions)
        self.slots.copy_(torch.where(self.active > 0, slots, -1))
        self.lengths += self.active

    def run(self) -> None:
        """From tokens to logits and the next tokens."""
        model = self.model
        rows = DecodePass(self.positions, self.slots, self.table, self.lengths, self.max_seqlen_k)
        x, sumsq = model._forward(self.tokens, rows)
        self.logits = model.ops.lm_head("decode", x, sumsq, model.weights.lm_head["decode"])
        self.chosen = model.ops.argmax(self.logits)


def capture_graph(step: Callable[[], None]) -> Callable[[], None]:
    """Run once, so that workspaces exist, then capture."""
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def same_bits(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.contiguous().view(torch.int32), right.contiguous().view(torch.int32))


def check_replays(ops: KernelLibrary, capture: Capture, steps: int) -> None:
    """A step captured once and replayed gives the bits of eager steps, across pages, and leaves no counter behind."""
    random = RandomModel(ops.config, ops.device)
    weights = random.weights(ops)
    active = torch.ones(3, dtype=torch.int32, device=ops.device)
    eager, replayed = (Step(random.on(ops, weights, 2048), active) for _ in range(2))
    replayed.advance(torch.zeros_like(active))
    replay = capture(replayed.run)
    replayed.lengths -= active  # what the capture wrote stands in the first step's own slots
    tokens = torch.tensor([1, 2, 3], dtype=torch.int32, device=ops.device)
    for step in range(steps):
        for each in (eager, replayed):
            each.advance(tokens)
        eager.run()
        replay()
        assert eager.logits.isfinite().all()
        assert same_bits(eager.logits, replayed.logits), f"step {step}"
        assert torch.equal(eager.chosen, replayed.chosen)
        # argmax of random logits soon repeats itself: let the step's number choose as well
        tokens = (eager.chosen + step * 7) % ops.config.vocab_size
    assert not ops._attention_decode.workspace.arrivals.any()


@pytest.mark.gpu
@pytest.mark.parametrize("model", BOTH_HEAD_DIMS)
def test_replayed_steps_equal_eager_ones(gpu_ops: GpuOps, model: str) -> None:
    check_replays(gpu_ops(model), capture_graph, STEPS)


def test_the_check_of_replays_on_the_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    check_replays(stand_in_library(TINY, monkeypatch), lambda step: step, 10)


def test_a_replay_of_stale_arguments_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that holds the first step's logits: what a launch with a copied length or token would give."""

    def capture(step: Callable[[], None]) -> Callable[[], None]:
        step()
        return lambda: None

    with pytest.raises(AssertionError, match="step 0"):
        check_replays(stand_in_library(TINY, monkeypatch), capture, 2)


def check_padding(ops: KernelLibrary) -> None:
    """A padded row may hold anything: a token that is none makes it NaN throughout, and the others do not notice."""
    random = RandomModel(ops.config, ops.device)
    weights = random.weights(ops)
    active = torch.tensor([1, 1, 1, 0], dtype=torch.int32, device=ops.device)
    finite, poisoned = (Step(random.on(ops, weights, 2048), active) for _ in range(2))
    for step in range(4):
        tokens = torch.tensor([step, 5, 7 * step, 9], dtype=torch.int32, device=ops.device)
        finite.advance(tokens)
        finite.run()
        poisoned.advance(torch.where(active > 0, tokens, -1))
        poisoned.run()
        assert finite.logits[:3].isfinite().all()
        assert poisoned.logits[3].isnan().all()
        assert same_bits(finite.logits[:3], poisoned.logits[:3]), f"step {step}"
    unused = poisoned.model.cache.pool[:, :, poisoned.table[3].long()]
    assert unused.isnan().all(), "a padded row wrote K or V"


@pytest.mark.gpu
@pytest.mark.parametrize("model", BOTH_HEAD_DIMS)
def test_padded_rows_do_no_harm(gpu_ops: GpuOps, model: str) -> None:
    check_padding(gpu_ops(model))


def test_the_check_of_padding_on_the_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    check_padding(stand_in_library(TINY, monkeypatch))
