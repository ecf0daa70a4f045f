"""Where the time of a decode step goes: each kind of launch by itself, and the step as it runs.

A step of a random model is recorded, launch by launch. Each *stage*, all launches of one kind, is then timed as a graph
of its own: the same launches with the same arguments, one behind the other in a chain, so that every layer's weights
and pages come from memory unless all of them fit L2. The step is timed twice: as it runs, and with ordinary launches.
In the step a stage overlaps its neighbours of other kinds, so the stages add up to more than it takes; what a single
stage's share of that is cannot be told from outside, and is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from futransformer.bench import graphs
from futransformer.bench.case import Contender
from futransformer.bench.decoder import random_decoder
from futransformer.bench.harness import Harness
from futransformer.bench.shapes import (
    BLOCK_OPS,
    decode_attention_work,
    decode_step_work,
    decode_weight_bytes,
)
from futransformer.blocks import DecodePass, LayerWeights
from futransformer.driver import Kernel
from futransformer.generator.config import LlamaConfig
from futransformer.generator.errors import UnsupportedError
from futransformer.generator.precision import get_precision
from futransformer.kv_cache import page_bucket, pages_for
from futransformer.ops.decode_layers import DecodeLayers
from futransformer.ops.interface import LayerPages, Ops, StepRows, Stream, WalkLayers
from futransformer.sampling import Sampling, pack_seen

# What a step asks of Ops, in its order, and what the stages are called.
STAGES = {
    "begin_step": "begin",
    "gather_rows": "embedding",
    "qkv": "qkv",
    "attention_decode": "attention",
    "o": "o",
    "gate_up": "gate_up",
    "down": "down",
    "layers": "layers",  # all of them, where they are one launch
    "next_tokens": "head, choice",
    "lm_head": "head",
    "sample": "sample",
    "end_step": "end",
}
LAYER = ("qkv", "attention", "o", "gate_up", "down")
ENDLESS = 2**30  # tokens left: no row ends while a step is repeated
SAMPLING = Sampling(top_k=50, top_p=0.95, repetition_penalty=1.1)
CLOCKED_RUNS = 10
LEAST_FLOOR = 1e-6  # seconds of a launch, by which the length of a stage's graph is chosen


@dataclass(frozen=True)
class Stage:
    """All launches of one kind in a step: what they must read, and their time by themselves."""

    name: str
    launches: int
    bytes: float
    seconds: float
    from_l2: bool  # all that they read fits there, so that repeating them is no measure of memory


@dataclass(frozen=True)
class StepProfile:
    """A decode step's stages in order, and the whole."""

    stages: tuple[Stage, ...]
    step_seconds: float
    apart_seconds: float | None  # with ordinary launches, where launches can overlap at all
    step_bytes: float
    read_tbps: float
    gap_seconds: float | None = None  # at most, without a bulk copy under way: the mean of multiprocessors

    @property
    def sum_seconds(self) -> float:
        """Of the stages by themselves."""
        return sum(stage.seconds for stage in self.stages)

    def percent(self, bytes_read: float, seconds: float) -> float:
        """How much of memory's speed that is."""
        return 100 * bytes_read / (self.read_tbps * 1e12) / seconds


class _StandingOps:
    """An Ops whose steps stay where they are: begin_step moves copies of the rows. It notes the first step's calls."""

    def __init__(self, ops: Ops) -> None:
        self.ops = ops
        self.capturable = False  # a step is captured from outside
        self.rows: StepRows | None = None
        self.bound: tuple[Sequence[LayerWeights], LayerPages] | None = None
        self.calls: dict[str, list[Callable[[], object]]] = {}
        self.noting = True

    def begin_step(self, rows: StepRows) -> None:
        """See Ops.begin_step."""
        if self.rows is None:
            self.ops.begin_step(rows)
            self.rows = StepRows(*(tensor.clone() for tensor in rows))
        self._noted("begin_step", self.rows)

    def __getattr__(self, name: str) -> Any:
        return partial(self._noted, name) if name in STAGES else getattr(self.ops, name)

    def bind_layers(self, layers: Sequence[LayerWeights], cache: LayerPages) -> WalkLayers | None:
        """See Ops.bind_layers."""
        walk = self.ops.bind_layers(layers, cache)
        self.bound = layers, cache
        return None if walk is None else _StandingLayers(self, walk)

    def note(self, name: str, call: Callable[[], Any]) -> Any:
        """Make a call, and note it as one of a stage."""
        if self.noting:
            self.calls.setdefault(name, []).append(call)
        return call()

    def _noted(self, name: str, *args: Any, **options: Any) -> Any:
        return self.note(name, partial(getattr(self.ops, name), *args, **options))


class _StandingLayers:
    """A WalkLayers that is noted as a stage."""

    def __init__(self, ops: _StandingOps, walk: WalkLayers) -> None:
        self.ops, self.walk = ops, walk

    def serves(self, rows: int, most_keys: int) -> bool:
        """See WalkLayers.serves."""
        return self.walk.serves(rows, most_keys)

    def __call__(self, stream: Stream, rows: DecodePass, rope_table: Tensor) -> Stream:
        """See WalkLayers."""
        found: Stream = self.ops.note("layers", partial(self.walk, stream, rows, rope_table))
        return found


def profile_step(
    config: LlamaConfig,
    ops: Ops,
    precision: str,
    batch: int,
    context: int,
    harness: Harness,
    read_tbps: float,
    *,
    sampled: bool = False,
    seconds: float = 2.0,
    clocked: Kernel | None = None,
) -> StepProfile:
    """Time the step that appends token ``context`` + 1 to each of ``batch`` sequences.

    ``clocked``, of ``profiling_specs``, tells how long multiprocessors had no bulk copy under way while all layers ran.
    Of the rest of the step all counts as such a gap but what the head's bytes take at memory's speed.
    """
    device = ops.device
    model = random_decoder(config, ops, get_precision(precision), batch, context, 1, device)
    standing = _StandingOps(ops)
    model.ops = cast(Ops, standing)
    step = model.decode_step(batch, page_bucket(pages_for(context + 1)))
    step.load(model.sequences, model.cache)
    settings = [SAMPLING] * batch if sampled else None
    seen = pack_seen([[]] * batch, config.vocab_size, device) if sampled else None
    step.begin_generation([ENDLESS] * batch, pack_seen([[]], config.vocab_size)[0], settings, seen)

    def run() -> None:
        step.run_generation(context + 1)

    run()
    standing.noting = False
    if clocked is not None and "layers" not in standing.calls:
        raise UnsupportedError(
            f"a step of {batch} x {context} tokens is one of single kernels here, which have no build that counts gaps"
        )
    calls = {name: standing.calls[name] for name in STAGES if name in standing.calls}
    bytes_read = {name: _stage_bytes(config, name, batch, context, precision) for name in calls}
    contenders = {}
    for name, each in calls.items():
        floor = max(bytes_read[name] / (read_tbps * 1e12) / len(each), LEAST_FLOOR)
        contenders[name] = _graphed(each, floor, ops.chain())
    work = decode_step_work(config, batch, context + 1, precision)
    contenders["step"] = _graphed([run], work.bytes / (read_tbps * 1e12))
    chain = getattr(ops, "launch_chain", None)
    if chain is not None:
        chain.enabled = False
        try:
            contenders["apart"] = _graphed([run], work.bytes / (read_tbps * 1e12))
        finally:
            chain.enabled = True
    found = {name: timing.median for name, timing in harness.measure("steady", contenders, seconds).items()}
    stages = tuple(
        Stage(
            STAGES[name],
            len(each),
            bytes_read[name],
            found[name] * len(each),
            0 < bytes_read[name] <= _l2_bytes(device),
        )
        for name, each in calls.items()
    )
    gap = None
    if clocked is not None:
        share = _share_without_copies(config, clocked, standing)
        head = work.bytes - bytes_read["layers"]
        gap = share * found["layers"] + found["step"] - found["layers"] - head / (read_tbps * 1e12)
    return StepProfile(stages, found["step"], found.get("apart"), work.bytes, read_tbps, gap)


def _share_without_copies(config: LlamaConfig, clocked: Kernel, standing: _StandingOps) -> float:
    """Run the layers as the step did; the mean over multiprocessors of the last launch."""
    assert standing.bound is not None
    layers, cache = standing.bound
    walk = DecodeLayers(config, clocked, layers, cache)
    (call,) = standing.calls["layers"]
    assert isinstance(call, partial)
    for _ in range(CLOCKED_RUNS):
        walk(*call.args)
    assert walk.clocks is not None
    total, copying = walk.clocks.double().unbind(-1)
    return float((1 - copying / total).mean())


def _graphed(
    calls: Sequence[Callable[[], object]],
    floor_seconds: float,
    context: AbstractContextManager[None] = nullcontext(),  # noqa: B008 - it has no state
) -> Contender:
    return graphs.graphed(calls, tuple, floor_seconds, context)


def _stage_bytes(config: LlamaConfig, name: str, batch: int, context: int, precision: str) -> float:
    """Weights, keys and values; what else is read is small, or in L2 since it was written."""
    if name in BLOCK_OPS:
        return float(config.num_hidden_layers * decode_weight_bytes(config, name, precision))
    if name == "attention_decode":
        return config.num_hidden_layers * decode_attention_work(config, batch, context + 1, precision).bytes
    if name == "layers":
        parts = (*BLOCK_OPS, "attention_decode")
        return sum(_stage_bytes(config, part, batch, context, precision) for part in parts)
    return float(decode_weight_bytes(config, "lm_head", precision)) if name in ("next_tokens", "lm_head") else 0.0


def _l2_bytes(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0
