"""The generated kernels of one model and precision, loaded on a Hopper GPU, behind the Ops protocol.

Kernels are found by the names of the plan's specs; nothing here knows of templates or of nvcc. Where they come from is
``load_kernels``'s business: a folder that `futransformer build --output` wrote, an installed wheel that `build --wheel`
wrote, or the cache, building what is missing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from futransformer.blocks import LayerWeights
from futransformer.build.compile import BuildEvent
from futransformer.build.installed import find_installed, mention_installed
from futransformer.build.load import LoadedKernels, load_or_build
from futransformer.build.settings import BuildSettings
from futransformer.driver import Kernel, LaunchChain, require_hopper
from futransformer.generator.config import LlamaConfig, load_config
from futransformer.generator.decode_heuristics import BATCH_TILES
from futransformer.generator.errors import InputError
from futransformer.generator.heuristics import MAX_ROWS, padded_vocab
from futransformer.generator.plan import Plan, kernel_specs, make_plan
from futransformer.generator.precision import E4M3, INT4, Element, Precision, get_precision
from futransformer.generator.specs import DecodeLayersSpec, KernelSpec
from futransformer.ops.attention_decode import INVARIANT_PAGES_PER_SPLIT, AttentionDecode
from futransformer.ops.attention_prefill import AttentionPrefill
from futransformer.ops.decode_gemm import DecodeGemm
from futransformer.ops.decode_layers import DecodeLayers
from futransformer.ops.gemm import PrefillGemm
from futransformer.ops.interface import (
    PROJECTIONS,
    DecodeWeight,
    Fp8Output,
    LayerPages,
    NextTokens,
    Phase,
    Projection,
    StepRows,
    Stops,
    Stream,
)
from futransformer.ops.projections import ProjectionGemm, Projections
from futransformer.ops.rows import Argmax, ArgmaxParts, GatherRows
from futransformer.ops.sampling import Sample
from futransformer.ops.step import StepBegin, StepEnd
from futransformer.ops.validate import check_phase
from futransformer.packing import pack_decode, pack_e4m3, pack_int4, pack_prefill, pack_scale
from futransformer.quantize.fp8 import Fp8Weight
from futransformer.quantize.int4 import Int4Weight
from futransformer.sampling import SamplingRows
from futransformer.tables import exported_table, schedule_table

# By what a kernel reads, what is packed to that.
GIVEN = {
    torch.bfloat16: "no codes",
    torch.float8_e4m3fn: "codes of futransformer.quantize.fp8.quantize_weight",
    INT4: "an Int4Weight of futransformer.quantize.int4.round_to_nearest",
    E4M3: "an Fp8Weight of futransformer.quantize.fp8.quantize_weight",
}


class KernelLibrary:
    """Every operation of a Llama step, on generated kernels. Implements futransformer.ops.interface.Ops."""

    def __init__(
        self,
        config: LlamaConfig,
        precision: Precision,
        plan: Plan,
        built: LoadedKernels,
        device: torch.device,
        *,
        batch_invariant: bool = False,
    ) -> None:
        """Load the plan's kernels onto the device.

        ``batch_invariant``: a decoded row has the same bits at any batch of 1 to 8. One GEMM serves all of those (of
        INT4 weights, that for up to eight, though there is a faster one for up to four); this fixes how attention
        splits a sequence as well.
        """
        self.config = config
        self.precision = precision
        self.plan = plan
        self.device = device
        self.capturable = True
        self.launch_chain = LaunchChain()

        @cache
        def kernel(spec: KernelSpec) -> Kernel:
            return Kernel(spec, *built[spec.name], device, self.launch_chain)

        gemms: dict[tuple[Phase, Projection], ProjectionGemm] = {}
        bf16: dict[Projection, ProjectionGemm] = {}
        for op in PROJECTIONS:
            gemms["prefill", op] = PrefillGemm({rows: kernel(spec) for rows, spec in plan.prefill[op].items()})
            least = BATCH_TILES[0] if batch_invariant else 1
            by_batch = {batch: kernel(spec) for batch, spec in plan.decode[op].items() if batch >= least}
            gemms["decode", op] = DecodeGemm(by_batch)
            if op in plan.prefill_bf16:
                bf16[op] = PrefillGemm({rows: kernel(spec) for rows, spec in plan.prefill_bf16[op].items()})
        self._projections = Projections(config, plan.attention_prefill.heads, gemms, device, bf16)
        self._gather_rows = {phase: GatherRows(kernel(spec)) for phase, spec in plan.gather_rows.items()}
        self._attention_prefill = self._attention_prefill_bf16 = AttentionPrefill(kernel(plan.attention_prefill))
        if plan.attention_prefill_bf16 is not None:
            self._attention_prefill_bf16 = AttentionPrefill(kernel(plan.attention_prefill_bf16))
        pages_per_split = INVARIANT_PAGES_PER_SPLIT if batch_invariant else None
        self._attention_decode = AttentionDecode(kernel(plan.attention_decode), pages_per_split=pages_per_split)
        self._argmax = Argmax(kernel(plan.argmax))
        self._argmax_parts = ArgmaxParts(kernel(plan.argmax_parts))
        self._sample = Sample(kernel(plan.sample))
        self._step_begin = StepBegin(kernel(plan.step_begin))
        self._step_end = StepEnd(kernel(plan.step_end))
        # Another order of sums than that of single kernels, which serve larger batches.
        layers = None if batch_invariant else plan.decode_layers
        self._decode_layers = None if layers is None else kernel(layers)

    def with_prefill_gemm(self, op: Projection, kernel: Kernel) -> KernelLibrary:
        """The same library with one kernel for all prompts of a projection, to be compared with what the plan chose."""
        other = copy.copy(self)
        other._projections = copy.copy(self._projections)
        other._projections.gemms = {**self._projections.gemms, ("prefill", op): PrefillGemm({MAX_ROWS: kernel})}
        return other

    def describe(self) -> str:
        """See Ops.describe."""
        return f"{torch.cuda.get_device_name(self.device)}, generated {self.precision.name} kernels"

    def chain(self) -> AbstractContextManager[None]:
        """See Ops.chain."""
        return self.launch_chain

    def pack(self, op: Projection, phase: Phase, logical: DecodeWeight) -> Tensor:
        """See Ops.pack."""
        check_phase(f"pack {op}", phase)
        kind = {Int4Weight: INT4, Fp8Weight: E4M3}.get(type(logical))
        given = logical.dtype if isinstance(logical, Tensor) else None
        gemm = self._projections.gemm(phase, op, given)
        reads = gemm.element if gemm.weight_type == torch.uint8 else gemm.weight_type
        fp8 = torch.float8_e4m3fn
        if kind != (reads if isinstance(reads, Element) else None) or (given == fp8) != (reads == fp8):
            read, other = (what.name.upper() if isinstance(what, Element) else what for what in (reads, kind or given))
            raise InputError(f"pack {op}: the {phase} kernel reads {read}, give it {GIVEN[reads]}, not {other}")
        if isinstance(logical, Fp8Weight):
            return pack_e4m3(op, logical.to(self.device))
        if not isinstance(logical, Int4Weight):
            return (pack_prefill if phase == "prefill" else pack_decode)(op, logical.to(self.device, gemm.weight_type))
        packed = pack_int4(op, logical.to(self.device))
        if packed.shape != gemm.weight_shape():
            raise InputError(
                f"pack {op}: the kernel reads a weight packed to {list(gemm.weight_shape())}, not to "
                f"{list(packed.shape)}: quantise it in the groups of {self.precision.name} "
                f"(group_size={self.precision.group_size}, zero_points={self.precision.zero_points})"
            )
        return packed

    def pack_scale(self, op: Projection, logical: Tensor) -> Tensor:
        """See Ops.pack_scale."""
        return pack_scale(op, logical).to(self.device, torch.float32)

    def bind_layers(self, layers: Sequence[LayerWeights], cache: LayerPages) -> DecodeLayers | None:
        """See Ops.bind_layers. A card with fewer multiprocessors than the kernel has blocks could not run it."""
        kernel = self._decode_layers
        if kernel is None:
            return None
        assert isinstance(kernel.spec, DecodeLayersSpec)
        return DecodeLayers(self.config, kernel, layers, cache) if kernel.spec.blocks <= kernel.sm_count else None

    def sumsq_parts(self, phase: Phase, op: Projection, operand: torch.dtype, rows: int) -> int:
        """See Ops.sumsq_parts."""
        return self._projections.gemm(phase, op, operand).sumsq_parts(rows)

    def gather_rows(
        self,
        phase: Phase,
        table: Tensor,
        indices: Tensor,
        *,
        fp8: Fp8Output | None = None,
        gain: Tensor | None = None,
    ) -> Stream:
        """See Ops.gather_rows."""
        check_phase("gather_rows", phase)
        kernel = phase if fp8 is None else f"{phase}_fp8"
        if kernel not in self._gather_rows:
            raise InputError(f"gather_rows: {phase} of {self.precision.name} kernels writes no FP8: leave fp8 out")
        return self._gather_rows[kernel](table, indices, fp8, gain)

    def qkv(
        self,
        phase: Phase,
        x: Tensor,
        sumsq: Tensor,
        weight: Tensor,
        rope_table: Tensor,
        positions: Tensor,
        slots: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        *,
        scale: Tensor | None = None,
        kv_scale: Tensor | None = None,
        kv_copy: Tensor | None = None,
    ) -> Tensor:
        """See Ops.qkv."""
        return self._projections.qkv(
            phase,
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

    def attention_prefill(
        self,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        block_table: Tensor,
        cu_seqlens_q: Tensor,
        seqlens_k: Tensor,
        *,
        max_seqlen_q: int,
        out: Tensor | None = None,
        fp8: Fp8Output | None = None,
        kv_scale: Tensor | None = None,
    ) -> Tensor:
        """See Ops.attention_prefill."""
        attention = self._attention_prefill_bf16 if fp8 is None else self._attention_prefill
        return attention(
            q,
            k_pages,
            v_pages,
            block_table,
            cu_seqlens_q,
            seqlens_k,
            max_seqlen_q=max_seqlen_q,
            out=out,
            fp8=fp8,
            kv_scale=kv_scale,
        )

    def attention_decode(
        self,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        block_table: Tensor,
        seqlens_k: Tensor,
        *,
        max_seqlen_k: int,
        out: Tensor | None = None,
        kv_scale: Tensor | None = None,
        kv_copy: Tensor | None = None,
    ) -> Tensor:
        """See Ops.attention_decode."""
        return self._attention_decode(
            q,
            k_pages,
            v_pages,
            block_table,
            seqlens_k,
            max_seqlen_k=max_seqlen_k,
            out=out,
            kv_scale=kv_scale,
            kv_copy=kv_copy,
        )

    def o(
        self,
        phase: Phase,
        x: Tensor,
        weight: Tensor,
        residual: Tensor,
        *,
        scale: Tensor | None = None,
        fp8: Fp8Output | None = None,
        gain: Tensor | None = None,
    ) -> Stream:
        """See Ops.o."""
        return self._projections.add_to_residual(phase, "o", x, weight, residual, scale=scale, fp8=fp8, gain=gain)

    def gate_up(
        self,
        phase: Phase,
        x: Tensor,
        sumsq: Tensor,
        weight: Tensor,
        *,
        scale: Tensor | None = None,
        fp8: Fp8Output | None = None,
    ) -> Tensor:
        """See Ops.gate_up."""
        return self._projections.gate_up(phase, x, sumsq, weight, scale=scale, fp8=fp8)

    def down(
        self,
        phase: Phase,
        x: Tensor,
        weight: Tensor,
        residual: Tensor,
        *,
        scale: Tensor | None = None,
        fp8: Fp8Output | None = None,
        gain: Tensor | None = None,
    ) -> Stream:
        """See Ops.down."""
        return self._projections.add_to_residual(phase, "down", x, weight, residual, scale=scale, fp8=fp8, gain=gain)

    def lm_head(self, phase: Phase, x: Tensor, sumsq: Tensor, weight: Tensor) -> Tensor:
        """See Ops.lm_head."""
        return self._projections.lm_head(phase, x, sumsq, weight, padded_vocab(self.config.vocab_size))

    def next_tokens(
        self, x: Tensor, sumsq: Tensor, weight: Tensor, *, logits: bool = False, out: Tensor | None = None
    ) -> NextTokens:
        """See Ops.next_tokens."""
        padded = padded_vocab(self.config.vocab_size)
        found, best = self._projections.decode_head(x, sumsq, weight, padded, logits=logits)
        return NextTokens(self._argmax_parts(best, out), found if logits else None)

    def argmax(self, logits: Tensor, *, out: Tensor | None = None) -> Tensor:
        """See Ops.argmax."""
        return self._argmax(logits, out)

    def sample(self, logits: Tensor, rows: SamplingRows, *, out: Tensor | None = None) -> Tensor:
        """See Ops.sample."""
        return self._sample(logits, rows, out)

    def begin_step(self, rows: StepRows) -> None:
        """See Ops.begin_step."""
        self._step_begin(rows)

    def end_step(self, tokens: Tensor, lengths: Tensor, stops: Stops) -> None:
        """See Ops.end_step."""
        self._step_end(tokens, lengths, stops)


def load_kernels(
    config: LlamaConfig | str | Path,
    precision: Precision | str = "bf16",
    *,
    folder: Path | None = None,
    progress: Callable[[BuildEvent], None] | None = None,
    batch_invariant: bool = False,
    mixed: bool = False,
) -> KernelLibrary:
    """Load the kernels of a model on the current Hopper GPU.

    ``config`` is a LlamaConfig, a name from the table, a Hugging Face folder or a config.json. ``folder`` names an
    export of `futransformer build --output`. Without it an installed wheel of `build --wheel` serves if it holds all
    kernels, else the cache, and what that lacks is built with nvcc.
    ``batch_invariant`` gives a decoded row the same bits at any batch of 1 to 8. ``mixed``: of an FP8 prefill, also the
    kernels for parts of layers that stay in BF16.
    Raises DeviceError (no Hopper GPU), ConfigError or UnsupportedError (shape or precision), ArtifactError (what is
    exported or cached), ToolchainError or BuildError.
    """
    device = require_hopper()
    row = get_precision(precision)
    model = config if isinstance(config, LlamaConfig) else load_config(config)
    settings = BuildSettings.from_environment()
    errors: AbstractContextManager[None] = nullcontext()
    if folder is None:
        wheel = find_installed(lambda table: kernel_specs(model, row, table, mixed=mixed), settings)
        folder, errors = (wheel.folder, wheel.errors()) if wheel else (None, mention_installed())
    table = exported_table(folder) if folder is not None else schedule_table(settings, device.index)
    plan = make_plan(model, row, table, mixed=mixed)
    with errors:
        built = load_or_build(plan.specs(), folder=folder, settings=settings, progress=progress)
    return KernelLibrary(model, row, plan, built, device, batch_invariant=batch_invariant)
