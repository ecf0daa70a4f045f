"""prefill_block/{8b,70b}/bf16/{1x512,1x2048,4x2048,1x8192,ragged}: one layer of a prefill, launched from the host.

``torch-bf16`` is compiled code with the faster of SDPA's cuDNN and flash backends on these lengths; it keeps K and V in
contiguous tensors. Every contender walks over several layers' weights in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from futransformer.bench.case import COMPUTE_BOUND, Case, Contender, Expected, Problem
from futransformer.bench.graphs import rotating
from futransformer.bench.llama import NaturalBlock, Prompts, device_rope_table, natural_rope, random_tensor
from futransformer.bench.rivals import torch_bf16
from futransformer.bench.runner import Bench
from futransformer.bench.shapes import block_gemm_work, prefill_attention_work, shape_config
from futransformer.blocks import LayerWeights, llama_block
from futransformer.generator.config import LlamaConfig
from futransformer.ops.interface import Ops, Stream
from futransformer.reference import ReferenceOps, row_sumsq

# Eight prompts as a server meets them, 4096 tokens in all; 1247 x 8 would be 2.4 times as many with padding.
RAGGED = (1, 17, 130, 389, 512, 777, 1023, 1247)
PROMPTS = {"1x512": (512,), "1x2048": (2048,), "4x2048": (2048,) * 4, "1x8192": (8192,), "ragged": RAGGED}
REFRESH = 32  # layers that add to a residual stream before it starts anew, so that its values stay those of a model
LAYERS = 2  # one layer of an 8B model is seven times what L2 holds


def cases() -> Sequence[Case]:
    """See futransformer.bench.subjects."""
    return [
        Case(
            f"prefill_block/{shape}/bf16/{name}",
            "ms",
            COMPUTE_BOUND,
            partial(open_case, shape, lengths),
            default=shape == "8b",
        )
        for shape in ("8b", "70b")
        for name, lengths in PROMPTS.items()
    ]


class Inputs:
    """Layers in natural order, the prompts' rows, and pages to fill."""

    def __init__(self, config: LlamaConfig, lengths: Sequence[int], device: torch.device) -> None:
        self.config, self.device = config, device
        self.prompts = Prompts(lengths, device)
        self.layers = [NaturalBlock.random(config, device) for _ in range(LAYERS)]
        self.x = random_tensor(self.prompts.rows, config.hidden_size, device=device)
        self.sumsq = row_sumsq(self.x)
        self.rope_table = device_rope_table(config, max(lengths), device)
        self.rows = self.prompts.prefill_pass()
        self.k_pages, self.v_pages = (self.prompts.empty_pages(config) for _ in range(2))

    def stream(self, dtype: torch.dtype = torch.bfloat16) -> Stream:
        """A copy of the rows, with their sums of squares."""
        x = self.x.to(dtype, copy=True)
        return Stream(x, self.sumsq, x)

    def run_layer(self, ops: Ops, weights: LayerWeights, stream: Stream) -> Stream:
        """One layer of ours; the stream is overwritten."""
        return llama_block(ops, weights, stream, self.rows, self.rope_table, self.k_pages, self.v_pages)

    def outputs(self, ops: Ops, weights: LayerWeights) -> Sequence[Tensor]:
        """One checked call of ours: only what it writes can make the pages finite."""
        for pages in (self.k_pages, self.v_pages):
            pages.fill_(torch.nan)
        return [self.run_layer(ops, weights, self.stream()).x]

    def expected(self) -> Sequence[Expected]:
        """The references' answers for the first layer, on pages of their own."""
        answers = []
        for dtype in (torch.float32, torch.bfloat16):
            reference = ReferenceOps(self.config, device=self.device, dtype=dtype)
            k_pages, v_pages = (self.prompts.empty_pages(self.config).to(dtype) for _ in range(2))
            weights = self.layers[0].packed(self.config, reference, "prefill")
            end = llama_block(reference, weights, self.stream(dtype), self.rows, self.rope_table, k_pages, v_pages)
            answers.append(end.x)
        return [Expected(answers[0], answers[1])]


def open_case(shape: str, lengths: tuple[int, ...], bench: Bench) -> Problem:
    """Draw layers and rows."""
    ops, config = bench.library(shape), shape_config(shape)
    inputs = Inputs(config, lengths, bench.device)
    packed = [layer.packed(config, ops, "prefill") for layer in inputs.layers]

    def compiled_torch() -> Contender:
        call = torch_call(inputs)
        calls: list[Callable[[], object]] = [partial(call, layer) for layer in inputs.layers]
        return Contender(run=rotating(calls), outputs=lambda: [call(inputs.layers[0])])

    return Problem(
        work=block_gemm_work(config, inputs.prompts.rows) + prefill_attention_work(config, lengths),
        ours=Contender(run=our_stream(ops, inputs, packed), outputs=lambda: inputs.outputs(ops, packed[0])),
        rivals={"torch-bf16": compiled_torch},
        expected=inputs.expected,
    )


def our_stream(ops: Ops, inputs: Inputs, packed: Sequence[LayerWeights]) -> Callable[[], None]:
    """Layer after layer on one residual stream, which starts anew every REFRESH layers."""
    stream, turn = inputs.stream(), 0

    def run() -> None:
        nonlocal stream, turn
        if turn % REFRESH == 0:
            stream.x.copy_(inputs.x)
            stream = stream._replace(sumsq=inputs.sumsq)
        with ops.chain():
            stream = inputs.run_layer(ops, packed[turn % len(packed)], stream)
        turn += 1

    return run


def torch_call(inputs: Inputs) -> Callable[[NaturalBlock], Tensor]:
    """Compiled PyTorch for one layer."""
    config, prompts = inputs.config, inputs.prompts
    heads, shape = config.heads, torch_bf16.Shape.of(config)
    cos, sin = natural_rope(inputs.rope_table, prompts.positions)
    cache = (prompts.rows, heads.num_key_value_heads, heads.head_dim)
    k_cache, v_cache = (inputs.x.new_empty(cache) for _ in range(2))
    query = random_tensor(prompts.rows, heads.num_attention_heads, heads.head_dim, device=inputs.device)
    key = random_tensor(*cache, device=inputs.device)
    backend = torch_bf16.fastest_backend(query, key, key, prompts.lengths)
    function = torch_bf16.with_backend(backend, torch_bf16.compiled(torch_bf16.prefill_block))
    lengths = prompts.lengths
    return lambda layer: function(inputs.x, layer, shape, cos, sin, lengths, k_cache, v_cache)
