"""The operations of a Llama step as PyTorch custom operators, so that ``torch.compile`` can trace code that calls them.

``traceable(ops)`` is the same protocol (futransformer.ops.interface.Ops) over ``torch.ops.futransformer``. An operator
finds its kernels, or the reference, by a name that is its first argument: a graph holds names, not objects. Each has a
schema that says what it writes (pages, the copy, the residual stream, maxima and counts of FP8) and a fake that gives
shapes, types and strides without computing. A fake names the arguments that these depend on; the others come in order.

An operator's results alias neither its arguments nor each other. Where ``Stream`` holds one tensor twice (x is the
residual stream in a BF16 prefill), the operator returns no rows in the second one's place. An FP8 result of one tensor
has an operator of its own: Inductor (PyTorch 2.13) fails on one result beside written arguments that are all left out.
"""

from __future__ import annotations

import itertools
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from futransformer.generator.errors import InputError
from futransformer.generator.heuristics import padded_vocab
from futransformer.ops.interface import Fp8Output, Ops, Phase, Projection
from futransformer.ops.validate import check_phase
from futransformer.reference import ReferenceOps

_SERVED: WeakValueDictionary[str, Ops] = WeakValueDictionary()
_NUMBERS = itertools.count()


def register(ops: Ops) -> str:
    """The name by which operators find ``ops``, for as long as somebody else holds it."""
    name = f"{type(ops).__name__}-{next(_NUMBERS)}"
    _SERVED[name] = ops
    return name


def _served(op: str, name: str) -> Ops:
    ops = _SERVED.get(name)
    if ops is None:
        raise InputError(f"{op}: nothing is registered as {name!r}, or it is gone: keep what traceable() was given")
    return ops


def _phase(op: str, phase: str) -> Phase:
    check_phase(op, phase)
    return "prefill" if phase == "prefill" else "decode"


def _fp8(op: str, scale: Tensor | None, amax: Tensor | None, saturated: Tensor | None) -> Fp8Output | None:
    given = (scale, amax, saturated)
    if scale is not None and amax is not None and saturated is not None:
        return Fp8Output(scale, amax, saturated)
    if any(tensor is not None for tensor in given):
        raise InputError(f"{op}: an FP8 result needs out_scale, amax and saturated: give all three, or none")
    return None


def _stored(ops: Ops) -> torch.dtype:
    """What a result is rounded to."""
    return ops.dtype if isinstance(ops, ReferenceOps) else torch.bfloat16


def _read(ops: Ops, *, fp8: bool) -> torch.dtype:
    """What the next GEMM reads: that, or codes, which the exact reference does not round either."""
    stored = _stored(ops)
    return torch.float8_e4m3fn if fp8 and stored != torch.float32 else stored


@torch.library.custom_op("futransformer::gather_rows", mutates_args=("amax", "saturated"))
def gather_rows(
    ops: str,
    phase: str,
    table: Tensor,
    indices: Tensor,
    out_scale: Tensor | None,
    amax: Tensor | None,
    saturated: Tensor | None,
    gain: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See Ops.gather_rows: x, sumsq, and the residual stream, of no rows where it is x."""
    fp8 = _fp8("gather_rows", out_scale, amax, saturated)
    x, sumsq, residual = _served("gather_rows", ops).gather_rows(
        _phase("gather_rows", phase), table, indices, fp8=fp8, gain=gain
    )
    return x, sumsq, x.new_empty(0, x.shape[1]) if residual is x else residual


@gather_rows.register_fake
def _(
    ops: str,
    phase: str,
    table: Tensor,
    indices: Tensor,
    out_scale: Tensor | None,
    amax: Tensor | None,
    saturated: Tensor | None,
    gain: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    served = _served("gather_rows", ops)
    rows, columns = indices.shape[0], table.shape[1]
    apart = _phase("gather_rows", phase) == "decode" or out_scale is not None
    residual = torch.float32 if phase == "decode" else _stored(served)
    return (
        table.new_empty(rows, columns, dtype=_read(served, fp8=out_scale is not None)),
        table.new_empty(rows, 1, dtype=torch.float32),
        table.new_empty(rows if apart else 0, columns, dtype=residual),
    )


@torch.library.custom_op("futransformer::qkv", mutates_args=("k_pages", "v_pages", "kv_copy"))
def qkv(
    ops: str,
    phase: str,
    x: Tensor,
    sumsq: Tensor,
    weight: Tensor,
    rope_table: Tensor,
    positions: Tensor,
    slots: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    scale: Tensor | None,
    kv_scale: Tensor | None,
    kv_copy: Tensor | None,
) -> Tensor:
    """See Ops.qkv."""
    return _served("qkv", ops).qkv(
        _phase("qkv", phase),
        x,
        sumsq,
        weight,
        rope_table,
        positions,
        slots,
        k_pages,
        v_pages,
        scale=scale,
        kv_scale=kv_scale,
        kv_copy=kv_copy,
    )


@qkv.register_fake
def _(ops: str, phase: str, x: Tensor, *_: object) -> Tensor:
    served = _served("qkv", ops)
    return x.new_empty(x.shape[0], served.config.heads.q_features, dtype=_stored(served))


@torch.library.custom_op("futransformer::attention_prefill", mutates_args=())
def attention_prefill(
    ops: str,
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seqlens_k: Tensor,
    max_seqlen_q: int,
    kv_scale: Tensor | None,
) -> Tensor:
    """See Ops.attention_prefill."""
    return _served("attention_prefill", ops).attention_prefill(
        q,
        k_pages,
        v_pages,
        block_table,
        cu_seqlens_q,
        seqlens_k,
        max_seqlen_q=max_seqlen_q,
        kv_scale=kv_scale,
    )


@attention_prefill.register_fake
def _(ops: str, q: Tensor, *_: object) -> Tensor:
    return torch.empty_like(q, dtype=_stored(_served("attention_prefill", ops)))


@torch.library.custom_op("futransformer::attention_prefill_fp8", mutates_args=("amax", "saturated"))
def attention_prefill_fp8(
    ops: str,
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seqlens_k: Tensor,
    max_seqlen_q: int,
    out_scale: Tensor,
    amax: Tensor,
    saturated: Tensor,
    kv_scale: Tensor | None,
) -> Tensor:
    """See Ops.attention_prefill, whose result is FP8."""
    return _served("attention_prefill", ops).attention_prefill(
        q,
        k_pages,
        v_pages,
        block_table,
        cu_seqlens_q,
        seqlens_k,
        max_seqlen_q=max_seqlen_q,
        fp8=Fp8Output(out_scale, amax, saturated),
        kv_scale=kv_scale,
    )


@attention_prefill_fp8.register_fake
def _(ops: str, q: Tensor, *_: object) -> Tensor:
    return torch.empty_like(q, dtype=_read(_served("attention_prefill", ops), fp8=True))


@torch.library.custom_op("futransformer::attention_decode", mutates_args=())
def attention_decode(
    ops: str,
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    seqlens_k: Tensor,
    max_seqlen_k: int,
    kv_scale: Tensor | None,
    kv_copy: Tensor | None,
) -> Tensor:
    """See Ops.attention_decode."""
    return _served("attention_decode", ops).attention_decode(
        q, k_pages, v_pages, block_table, seqlens_k, max_seqlen_k=max_seqlen_k, kv_scale=kv_scale, kv_copy=kv_copy
    )


@attention_decode.register_fake
def _(ops: str, q: Tensor, *_: object) -> Tensor:
    return torch.empty_like(q, dtype=_stored(_served("attention_decode", ops)))


@torch.library.custom_op("futransformer::add_to_residual", mutates_args=("residual", "amax", "saturated"))
def add_to_residual(
    ops: str,
    op: str,
    phase: str,
    x: Tensor,
    weight: Tensor,
    residual: Tensor,
    scale: Tensor | None,
    out_scale: Tensor | None,
    amax: Tensor | None,
    saturated: Tensor | None,
    gain: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """See Ops.o and Ops.down, which ``op`` names: x, of no rows where it is the residual stream, and sumsq."""
    served = _served(op, ops)
    if op not in ("o", "down"):
        raise InputError(f'add_to_residual: op must be "o" or "down", not {op!r}')
    project = served.o if op == "o" else served.down
    fp8 = _fp8(op, out_scale, amax, saturated)
    stream = project(_phase(op, phase), x, weight, residual, scale=scale, fp8=fp8, gain=gain)
    if stream.residual is not residual:
        raise InputError(
            f"{op}: residual is {residual.dtype}, so nothing was added in place; give {stream.residual.dtype}"
        )
    return residual.new_empty(0, residual.shape[1]) if stream.x is residual else stream.x, stream.sumsq


@add_to_residual.register_fake
def _(
    ops: str,
    op: str,
    phase: str,
    x: Tensor,
    weight: Tensor,
    residual: Tensor,
    scale: Tensor | None,
    out_scale: Tensor | None,
    amax: Tensor | None,
    saturated: Tensor | None,
    gain: Tensor | None,
) -> tuple[Tensor, Tensor]:
    served = _served(op, ops)
    read = _read(served, fp8=out_scale is not None)
    rows, columns = residual.shape
    same = read == residual.dtype and out_scale is None and gain is None
    named: Projection = "o" if op == "o" else "down"
    parts = served.sumsq_parts(_phase(op, phase), named, x.dtype, rows)
    return residual.new_empty(0 if same else rows, columns, dtype=read), residual.new_empty(
        rows, parts, dtype=torch.float32
    )


@torch.library.custom_op("futransformer::gate_up", mutates_args=())
def gate_up(
    ops: str,
    phase: str,
    x: Tensor,
    sumsq: Tensor,
    weight: Tensor,
    scale: Tensor | None,
) -> Tensor:
    """See Ops.gate_up."""
    return _served("gate_up", ops).gate_up(_phase("gate_up", phase), x, sumsq, weight, scale=scale)


@gate_up.register_fake
def _(ops: str, phase: str, x: Tensor, *_: object) -> Tensor:
    served = _served("gate_up", ops)
    return x.new_empty(x.shape[0], served.config.intermediate_size, dtype=_stored(served))


@torch.library.custom_op("futransformer::gate_up_fp8", mutates_args=("amax", "saturated"))
def gate_up_fp8(
    ops: str,
    phase: str,
    x: Tensor,
    sumsq: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    out_scale: Tensor,
    amax: Tensor,
    saturated: Tensor,
) -> Tensor:
    """See Ops.gate_up, whose result is FP8."""
    fp8 = Fp8Output(out_scale, amax, saturated)
    return _served("gate_up", ops).gate_up(_phase("gate_up", phase), x, sumsq, weight, scale=scale, fp8=fp8)


@gate_up_fp8.register_fake
def _(ops: str, phase: str, x: Tensor, *_: object) -> Tensor:
    served = _served("gate_up", ops)
    return x.new_empty(x.shape[0], served.config.intermediate_size, dtype=_read(served, fp8=True))


@torch.library.custom_op("futransformer::lm_head", mutates_args=())
def lm_head(ops: str, phase: str, x: Tensor, sumsq: Tensor, weight: Tensor) -> Tensor:
    """See Ops.lm_head."""
    return _served("lm_head", ops).lm_head(_phase("lm_head", phase), x, sumsq, weight)


@lm_head.register_fake
def _(ops: str, phase: str, x: Tensor, sumsq: Tensor, weight: Tensor) -> Tensor:
    return _logits(_served("lm_head", ops), x, x.shape[0])


@torch.library.custom_op("futransformer::next_tokens", mutates_args=())
def next_tokens(ops: str, x: Tensor, sumsq: Tensor, weight: Tensor, logits: bool) -> tuple[Tensor, Tensor]:
    """See Ops.next_tokens: tokens, and the logits, of no rows unless they are asked for."""
    served = _served("next_tokens", ops)
    tokens, found = served.next_tokens(x, sumsq, weight, logits=logits)
    return tokens, _logits(served, x, 0) if found is None else found


@next_tokens.register_fake
def _(ops: str, x: Tensor, sumsq: Tensor, weight: Tensor, logits: bool) -> tuple[Tensor, Tensor]:
    rows = x.shape[0]
    tokens = x.new_empty(rows, dtype=torch.int32)
    return tokens, _logits(_served("next_tokens", ops), x, rows if logits else 0)


def _logits(ops: Ops, x: Tensor, rows: int) -> Tensor:
    """A view of padded rows."""
    vocabulary = ops.config.vocab_size
    return x.new_empty(rows, padded_vocab(vocabulary), dtype=torch.float32)[:, :vocabulary]


@torch.library.custom_op("futransformer::argmax", mutates_args=())
def argmax(ops: str, logits: Tensor) -> Tensor:
    """See Ops.argmax."""
    return _served("argmax", ops).argmax(logits)


@argmax.register_fake
def _(ops: str, logits: Tensor) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.int32)
