"""Custom operators: schemas and fakes by torch's own checks, and what a compiled function computes, bit for bit.

On the CPU reference, and on the stand-in library, whose kernels leave sums of squares in several parts.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from futransformer import torch_ops
from futransformer.blocks import DecodePass, PrefillPass, llama_block
from futransformer.generator.config import LlamaConfig
from futransformer.generator.errors import InputError
from futransformer.ops.interface import Ops, Phase, Stream
from futransformer.reference import ReferenceOps
from futransformer.torch_ops import register
from futransformer.traceable import TraceableOps, traceable
from tests.ops.stand_in import stand_in_library
from tests.ops.test_two_layers import RandomModel

TINY = LlamaConfig("tiny", 128, 192, 2, 4, 2, 64, 300, 4096, 1e-5, 1e4)
ROWS, PAGES = 5, 2
FAKES = ("test_faketensor", "test_aot_dispatch_dynamic")


@pytest.fixture(params=["reference", "exact", "stand-in"])
def ops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Ops:
    if request.param == "stand-in":
        return stand_in_library(TINY, monkeypatch)
    return ReferenceOps(TINY, dtype=torch.float32 if request.param == "exact" else torch.bfloat16)


def stored(ops: Ops) -> torch.dtype:
    ops = ops.ops if isinstance(ops, TraceableOps) else ops
    return ops.dtype if isinstance(ops, ReferenceOps) else torch.bfloat16


def pages(ops: Ops) -> tuple[Tensor, Tensor]:
    """K and V of a layer, not a number where nobody has written."""
    shape = (PAGES, TINY.num_key_value_heads, 64, TINY.head_dim)
    return torch.full(shape, torch.nan, dtype=stored(ops)), torch.full(shape, torch.nan, dtype=stored(ops))


def integers(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def arguments(ops: Ops, phase: Phase) -> dict[str, tuple[Any, ...]]:
    """What each operator of a phase is called with, behind the name."""
    model = RandomModel(TINY, torch.device("cpu"))
    weights, k_v = model.weights(ops), pages(ops)
    layer = weights.layers[0]
    x, sumsq, residual = ops.gather_rows(phase, weights.embedding, torch.arange(ROWS, dtype=torch.int32))
    positions, slots = integers(*range(ROWS)), torch.arange(ROWS)
    q = ops.qkv(phase, x, sumsq, layer.qkv[phase], weights.rope_table, positions, slots, *k_v)
    h = ops.gate_up(phase, x, sumsq, layer.gate_up[phase])
    no_fp8 = (None, None, None)
    state = (weights.rope_table, positions, slots, *k_v)
    taken = {
        "gather_rows": (phase, weights.embedding, integers(3, 1, 1), *no_fp8, None),
        "qkv": (phase, x, sumsq, layer.qkv[phase], *state, None, None, None),
        "add_to_residual": ("down", phase, h, layer.down[phase], residual, None, *no_fp8, None),
        "gate_up": (phase, x, sumsq, layer.gate_up[phase], None),
        "lm_head": (phase, x, sumsq, weights.lm_head[phase]),
    }
    if phase == "prefill":
        lengths = (integers(0, ROWS), integers(ROWS))
        return {**taken, "attention_prefill": (q, *k_v, integers(0)[None], *lengths, ROWS, None)}
    logits = ops.lm_head(phase, x, sumsq, weights.lm_head[phase])
    tables = torch.zeros(ROWS, 1, dtype=torch.int32), integers(*range(1, ROWS + 1))
    return {
        **taken,
        "attention_decode": (q, *k_v, *tables, ROWS, None, None),
        "next_tokens": (x, sumsq, weights.lm_head[phase], True),
        "argmax": (logits,),
    }


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_schema_and_fake_are_what_the_operation_does(ops: Ops, phase: Phase) -> None:
    """torch's own checks: writes that the schema does not tell of, aliases; shapes, types and strides of the fake."""
    name = register(ops)
    for op, rest in arguments(ops, phase).items():
        torch.library.opcheck(getattr(torch_ops, op), (name, *rest))


def test_an_fp8_result_declares_what_it_raises() -> None:
    """Maxima and counts are written; x in codes beside the residual stream, which is written too."""
    ops = ReferenceOps(TINY)
    name, model = register(ops), RandomModel(TINY, torch.device("cpu"))
    weights = model.weights(ops)
    x, sumsq, residual = ops.gather_rows("prefill", weights.embedding, torch.arange(ROWS, dtype=torch.int32))
    codes, scale = x.to(torch.float8_e4m3fn), torch.tensor([1.0])

    def fp8() -> tuple[Tensor, Tensor, Tensor]:
        return torch.tensor([2.0**-8]), torch.zeros(1), torch.zeros(1, dtype=torch.int32)

    layer, k_v = weights.layers[0], pages(ops)
    for op, rest in {
        "gather_rows": ("prefill", weights.embedding, integers(3, 1, 1), *fp8(), None),
        "gate_up_fp8": ("prefill", codes, sumsq, layer.gate_up["prefill"], scale, *fp8()),
        "add_to_residual": ("o", "prefill", *o_arguments(ops, layer.o["prefill"], residual), scale, *fp8(), None),
        "attention_prefill_fp8": (
            x.repeat(1, 2),
            *zeros(k_v),
            integers(0)[None],
            integers(0, 5),
            integers(5),
            5,
            *fp8(),
            None,
        ),
    }.items():
        # torch's check of schemas cannot compare tensors of E4M3
        torch.library.opcheck(getattr(torch_ops, op), (name, *rest), test_utils=FAKES)
    values = (scale / 2**8, torch.zeros(1), torch.zeros(1, dtype=torch.int32))
    torch_ops.gate_up_fp8(name, "prefill", codes, sumsq, layer.gate_up["prefill"], scale, *values)
    assert values[1] > 448 * 2**-8
    assert values[2] > 0


def zeros(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(torch.zeros_like(tensor) for tensor in tensors)


def o_arguments(ops: ReferenceOps, weight: Tensor, residual: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.ones(ROWS, TINY.heads.q_features, dtype=torch.float8_e4m3fn)
    return x, weight, residual


def prompt_then_token(ops: Ops, block: Callable[..., Stream], head: Callable[..., Tensor]) -> list[Tensor]:
    """A prompt of five and a decode step through one layer: streams, tokens, and the pages that were written."""
    model = RandomModel(TINY, torch.device("cpu"))
    weights, k_v, results = model.weights(ops), pages(ops), []
    first = PrefillPass(
        integers(*range(ROWS)), torch.arange(ROWS), integers(0)[None], integers(0, ROWS), integers(ROWS), ROWS
    )
    then = DecodePass(integers(ROWS), torch.tensor([ROWS]), integers(0)[None], integers(ROWS + 1), 64)
    for rows, tokens in ((first, integers(*range(7, 7 + ROWS))), (then, integers(40))):
        stream = ops.gather_rows(rows.phase, weights.embedding, tokens)
        stream = block(weights.layers[0], stream, rows, weights.rope_table, *k_v)
        results += [stream.x, stream.sumsq, stream.residual, head(rows.phase, stream, weights.lm_head[rows.phase])]
    return [*results, *(each[0, :, : ROWS + 1] for each in k_v)]


def head_of(ops: Ops, phase: Phase, stream: Stream, weight: Tensor) -> Tensor:
    return ops.argmax(ops.lm_head(phase, stream.x, stream.sumsq, weight))


def test_a_compiled_layer_gives_the_same_bits(ops: Ops) -> None:
    """fullgraph: nothing falls back to Python; the pages and the residual stream are written in place."""
    traced = traceable(ops)
    torch._dynamo.reset()
    compiled: list[Any] = [torch.compile(partial(f, traced), fullgraph=True) for f in (llama_block, head_of)]
    ours = prompt_then_token(traced, compiled[0], compiled[1])
    expected = prompt_then_token(ops, partial(llama_block, ops), partial(head_of, ops))
    for actual, want in zip(ours, expected, strict=True):
        assert torch.equal(actual, want)
        assert not actual.isnan().any()


def test_a_name_is_forgotten_with_its_operations() -> None:
    name = register(ReferenceOps(TINY))
    gc.collect()
    with pytest.raises(InputError, match=f"argmax: nothing is registered as '{name}'.*traceable"):
        torch_ops.argmax(name, torch.zeros(1, 300))


def test_what_cannot_be_done_in_place_is_refused() -> None:
    """The reference would add to a copy of another type, and the graph would go on with what was not added to."""
    ops = ReferenceOps(TINY)
    traced, weights = traceable(ops), RandomModel(TINY, torch.device("cpu")).weights(ops)
    x = torch.ones(1, TINY.intermediate_size, dtype=torch.bfloat16)
    with pytest.raises(InputError, match=r"down: residual is torch.float32.*give torch.bfloat16"):
        traced.down("prefill", x, weights.layers[0].down["prefill"], torch.zeros(1, TINY.hidden_size))
    with pytest.raises(InputError, match="down: an FP8 result needs out_scale, amax and saturated"):
        torch_ops.add_to_residual(traced.name, "down", "prefill", x, x, x, None, torch.ones(1), None, None, None)
