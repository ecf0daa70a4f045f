"""decode_step/{8b,70b}/{bf16,int4,fp8,int4-kv4}/head={bf16,fp8,int4}/B=.../ctx=...: from newest tokens to the next.

Ours, ``torch-bf16`` and ``torch-int4`` (each layer compiled, the whole step in one graph, the head a product in BF16)
run the same random model; the check compares the logits that the next tokens come from, after all layers. Where all
layers are one launch, ``ours-chained`` beside it are the single kernels.

70B's 80 layers in BF16, as references and ``torch-bf16`` want them, fit on no card. So ten layers are walked eight
times, which memory cannot tell from eighty (ten of INT4 are 4.4 GB), and ``torch-bf16`` is no rival there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from futransformer.bench.case import MEMORY_BOUND, Case, Contender, Expected, Problem
from futransformer.bench.coded import rounded, worth
from futransformer.bench.graphs import graphed
from futransformer.bench.llama import random_tensor, random_weight
from futransformer.bench.rivals import torch_bf16
from futransformer.bench.runner import Bench
from futransformer.bench.shapes import DECODE_PRECISIONS, decode_step_work, shape_config
from futransformer.bench.subjects.decode_block import DecodeInputs, in_turn, rivals
from futransformer.generator.precision import get_precision
from futransformer.ops.interface import Stream
from futransformer.reference import ReferenceOps

BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (512, 1024, 4096)
LONG = 131_072  # of one sequence
READS = [*((read, row, "") for read, row in DECODE_PRECISIONS.items()), ("int4-kv4", "int4", "-kv4")]
LAYERS = {"70b": 10}  # different ones, where not all of them
HEADS = {"bf16": "", "fp8": "-head8", "int4": "-head4"}
DEFAULT = {(1, 1024), (8, 1024), (32, 1024)}


def cases() -> Sequence[Case]:
    """See futransformer.bench.subjects."""
    return [
        Case(
            f"decode_step/{shape}/{read}/head={head}/B={batch}/ctx={context}",
            "ms",
            MEMORY_BOUND,
            partial(open_case, shape, batch, context, precision=row + head_suffix + copy),
            default=shape == "8b" and (batch, context) in DEFAULT,
            precision=row + head_suffix + copy,
        )
        for shape in ("8b", "70b")
        for read, row, copy in READS
        if shape == "8b" or row == "int4"
        for head, head_suffix in HEADS.items()
        if read != "bf16" or head == "bf16"
        for batch in BATCHES
        for context in (*CONTEXTS, LONG)
        if batch == 1 or context != LONG
    ]


def open_case(shape: str, batch: int, context: int, bench: Bench, *, precision: str = "bf16") -> Problem:
    """Draw a model."""
    ops, config, device = bench.library(shape, precision), shape_config(shape), bench.device
    layers = config.num_hidden_layers
    different = LAYERS.get(shape, layers)
    inputs = DecodeInputs(config, batch, context, different, device, precision)
    embedding = random_tensor(config.vocab_size, config.hidden_size, device=device)
    coded_head = rounded("lm_head", random_weight(config, "lm_head", device), get_precision(precision))
    head = worth(coded_head)
    packed = inputs.packed(ops) * (layers // different)
    packed_head = ops.pack("lm_head", "decode", coded_head)
    tokens = torch.randint(config.vocab_size, (batch,), dtype=torch.int32, device=device)
    work = decode_step_work(config, batch, context, precision)
    floor = work.floor_seconds(bench.ceilings)

    def ours(*, chained: bool = False) -> Contender:
        def stream() -> Stream:
            return inputs.walk(ops, packed, ops.gather_rows("decode", embedding, tokens), chained=chained)

        def step() -> Tensor:
            with ops.chain():
                x, sumsq, _ = stream()
                return ops.next_tokens(x, sumsq, packed_head).tokens

        def outputs() -> Sequence[Tensor]:
            inputs.poison(len(packed))
            with ops.chain():
                x, sumsq, _ = stream()
                return [ops.lm_head("decode", x, sumsq, packed_head)]

        return graphed([step], outputs, floor)

    def expected() -> Sequence[Expected]:
        answers = []
        for dtype in (torch.float32, torch.bfloat16):
            reference = ReferenceOps(config, device=device, dtype=dtype, copy=inputs.form)
            embedded = reference.gather_rows("decode", embedding, tokens)
            stream = inputs.reference_walk(reference, embedded, layers)
            weight = reference.pack("lm_head", "decode", coded_head)
            answers.append(reference.lm_head("decode", stream.x, stream.sumsq, weight))
        return [Expected(answers[0], answers[1])]

    def compiled_torch(rival: str) -> Contender:
        calls = inputs.torch_layers(rival) * (layers // different)
        finish = torch_bf16.compiled(torch_bf16.rms_norm)
        gain = inputs.layers[0].gain

        def logits() -> Tensor:
            x = in_turn(calls, F.embedding(tokens, embedding))
            return F.linear(finish(x, gain, config.rms_norm_eps), head)

        return graphed([lambda: logits().argmax(-1)], lambda: [logits()], floor)

    return Problem(
        work=work,
        ours=ours(),
        rivals={
            rival: partial(compiled_torch, rival)
            for rival in rivals(precision)
            if different == layers or rival != "torch-bf16"
        },
        expected=expected,
        beside={"ours-chained": partial(ours, chained=True)} if inputs.bound(ops, packed) is not None else {},
    )
