"""A model's configuration and precision -> the kernels that serve it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from .config import LlamaConfig
from .decode_heuristics import attention_decode_spec, batch_tiles, decode_gemm_spec, decode_layers_spec
from .errors import UnsupportedError
from .heuristics import attention_prefill_spec, gemm_specs, padded_vocab
from .precision import BF16, E4M3, Precision, get_precision
from .schedules import ScheduleTable
from .specs import (
    ArgmaxPartsSpec,
    ArgmaxSpec,
    AttentionDecodeSpec,
    AttentionPrefillSpec,
    DecodeGemmSpec,
    DecodeLayersSpec,
    GatherRowsSpec,
    GemmSpec,
    Heads,
    KernelSpec,
    SampleSpec,
    StepBeginSpec,
    StepEndSpec,
)


@dataclass(frozen=True)
class Plan:
    """Every kernel of a model and precision, by role: GEMMs by projection, then by the most rows that each serves."""

    gather_rows: dict[str, GatherRowsSpec]  # by phase; "prefill_fp8" for what an FP8 prefill begins with
    prefill: dict[str, dict[int, GemmSpec]]
    attention_prefill: AttentionPrefillSpec
    decode: dict[str, dict[int, DecodeGemmSpec]]
    attention_decode: AttentionDecodeSpec
    argmax: ArgmaxSpec
    argmax_parts: ArgmaxPartsSpec
    sample: SampleSpec
    step_begin: StepBeginSpec
    step_end: StepEndSpec
    decode_layers: DecodeLayersSpec | None = None  # all layers of a step of one sequence, where there is such a kernel
    # of an FP8 prefill, for the parts of layers that stay in BF16
    prefill_bf16: dict[str, dict[int, GemmSpec]] = field(default_factory=dict)
    attention_prefill_bf16: AttentionPrefillSpec | None = None

    def specs(self) -> tuple[KernelSpec, ...]:
        """All kernels once, in the order in which a model meets them."""
        specs = (
            *self.gather_rows.values(),
            *(spec for by_rows in self.prefill.values() for spec in by_rows.values()),
            self.attention_prefill,
            *(spec for by_batch in self.decode.values() for spec in by_batch.values()),
            self.attention_decode,
            self.argmax,
            self.argmax_parts,
            self.sample,
            self.step_begin,
            self.step_end,
            *([] if self.decode_layers is None else [self.decode_layers]),
            *(spec for by_rows in self.prefill_bf16.values() for spec in by_rows.values()),
            *([] if self.attention_prefill_bf16 is None else [self.attention_prefill_bf16]),
        )
        return tuple(dict.fromkeys(specs))  # one kernel may serve several numbers of rows


def projections(config: LlamaConfig) -> dict[str, tuple[int, int]]:
    """Rows and columns (N, K) of each projection's weight, as the kernels see it."""
    heads = config.heads
    return {
        "qkv": (heads.qkv_features, config.hidden_size),
        "o": (config.hidden_size, heads.q_features),
        "gate_up": (2 * config.intermediate_size, config.hidden_size),
        "down": (config.hidden_size, config.intermediate_size),
        "lm_head": (padded_vocab(config.vocab_size), config.hidden_size),
    }


def make_plan(
    config: LlamaConfig, precision: str | Precision, table: ScheduleTable | None = None, *, mixed: bool = False
) -> Plan:
    """Choose every kernel, by a card's measured schedules first (default: the shipped table's).

    ``mixed``: of an FP8 prefill, also those for parts of layers that stay in BF16. UnsupportedError says what cannot be
    served and what can.
    """
    row = get_precision(precision)
    heads = config.heads
    if row.copy is not None:
        row.copy.groups(heads.head_dim)  # refuses what is no whole group or block
    shapes = projections(config)
    gather_rows = {
        "prefill": GatherRowsSpec(BF16, config.hidden_size),
        "decode": GatherRowsSpec(BF16, config.hidden_size, residual=True, gain=row.gain_in_x),
    }
    if row.prefill == E4M3:
        gather_rows["prefill_fp8"] = GatherRowsSpec(BF16, config.hidden_size, fp8=True)
    elif mixed:
        raise UnsupportedError(f"{row.name} reads prompts in BF16 throughout: leave mixed out")
    plain = replace(get_precision("bf16"), kv=row.kv, copy=row.copy)

    def of_op(op: str) -> tuple[Heads | None, int | None]:
        return heads if op == "qkv" else None, config.vocab_size if op == "lm_head" else None

    def prefill(precision: Precision, ops: Iterable[str]) -> dict[str, dict[int, GemmSpec]]:
        return {op: gemm_specs(op, *shapes[op], precision, heads if op == "qkv" else None, table) for op in ops}

    return Plan(
        gather_rows=gather_rows,
        prefill=prefill(row, shapes),
        attention_prefill=attention_prefill_spec(heads, row),
        decode={
            op: {batch: decode_gemm_spec(op, n, k, batch, row, *of_op(op)) for batch in batch_tiles(op, row)}
            for op, (n, k) in shapes.items()
        },
        attention_decode=attention_decode_spec(heads, row),
        argmax=ArgmaxSpec(config.vocab_size),
        argmax_parts=ArgmaxPartsSpec(),
        sample=SampleSpec(config.vocab_size),
        step_begin=StepBeginSpec(),
        step_end=StepEndSpec(config.vocab_size),
        decode_layers=decode_layers_spec(heads, config.hidden_size, config.intermediate_size, row),
        prefill_bf16=prefill(plain, [op for op in shapes if op != "lm_head"]) if mixed else {},
        attention_prefill_bf16=attention_prefill_spec(heads, plain) if mixed else None,
    )


def profiling_specs(plan: Plan) -> tuple[KernelSpec, ...]:
    """Builds of a plan's kernels that say where their time goes; models run without them."""
    return () if plan.decode_layers is None else (replace(plan.decode_layers, clocked=True),)


def kernel_specs(
    config: LlamaConfig, precision: str | Precision, table: ScheduleTable | None = None, *, mixed: bool = False
) -> tuple[KernelSpec, ...]:
    """Every kernel of a model and precision, in a stable order, each name once; ``mixed`` as in ``make_plan``."""
    return make_plan(config, precision, table, mixed=mixed).specs()
