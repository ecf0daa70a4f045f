"""Plans: for every named model and precision, and for odd shapes, kernels that can be launched, each with a name."""

from __future__ import annotations

import itertools
import random
import re
from dataclasses import replace

import pytest

from futransformer.build.cache import file_stem
from futransformer.generator.config import CONFIGS, GROUPS, HEAD_DIMS, LlamaConfig
from futransformer.generator.errors import UnsupportedError
from futransformer.generator.heuristics import MAX_ROWS
from futransformer.generator.kv_format import HEAD, KvFormat
from futransformer.generator.plan import kernel_specs, make_plan, projections
from futransformer.generator.precision import (
    BF16,
    CHANNEL,
    E4M3,
    INT4,
    PRECISIONS,
    Element,
    gains_in_x,
    get_precision,
)
from futransformer.generator.render import TEMPLATES
from futransformer.generator.specs import KernelSpec

EVERY_PLAN = [
    pytest.param(config, precision, id=f"{name}-{precision}")
    for (name, config), precision in itertools.product(CONFIGS.items(), PRECISIONS)
]

# What an sm_90 multiprocessor has, and one block of it may take.
BLOCK_SHARED_BYTES = 227 * 1024
SM_SHARED_BYTES = 228 * 1024
SYSTEM_SHARED_BYTES = 1024  # of every resident block
SM_THREADS, SM_REGISTERS = 2048, 65_536


def odd_configs(count: int) -> list[LlamaConfig]:
    """Configurations that no one has published, from every corner of what LlamaConfig accepts."""
    choose = random.Random(20).choice
    configs = []
    for index in range(count):
        kv_heads = choose((1, 2, 3, 5, 8, 40))
        configs.append(
            replace(
                CONFIGS["llama-2-7b"],
                name=f"odd-{index}",
                hidden_size=64 * choose((1, 2, 9, 15, 17, 48, 80, 129, 256)),
                intermediate_size=64 * choose((1, 3, 24, 41, 172, 224, 832)),
                num_attention_heads=kv_heads * choose(GROUPS),
                num_key_value_heads=kv_heads,
                head_dim=choose(HEAD_DIMS),
                vocab_size=choose((3, 63, 64, 65, 258, 32_001, 128_256, 262_144)),
            )
        )
    return configs


def check_launchable(spec: KernelSpec) -> None:
    """What the driver asks of a launch, and what the spec promises about sharing a multiprocessor."""
    assert spec.threads % 32 == 0
    assert 32 <= spec.threads <= 1024
    assert 0 <= spec.shared_bytes <= BLOCK_SHARED_BYTES
    assert spec.blocks_per_sm * (spec.shared_bytes + SYSTEM_SHARED_BYTES) <= SM_SHARED_BYTES
    assert spec.blocks_per_sm * spec.threads <= SM_THREADS
    assert spec.blocks_per_sm * spec.threads * 24 <= SM_REGISTERS, "fewer than 24 registers a thread is no kernel"
    assert all(size in (1, 2, 4, 8) for size in spec.cluster)
    assert spec.cluster[0] * spec.cluster[1] * spec.cluster[2] <= 8


def check_named(spec: KernelSpec) -> None:
    """A name that C++, the driver and every file system take."""
    assert re.fullmatch(r"[a-z][a-z0-9_]*", spec.name)
    assert "_sm90_" in spec.name
    assert len(f"{file_stem(spec.name)}-0123456789ab.cubin") <= 255


@pytest.mark.parametrize(("config", "precision"), EVERY_PLAN)
def test_every_kernel_of_every_plan_can_be_launched(config: LlamaConfig, precision: str) -> None:
    specs = kernel_specs(config, precision)
    names = [spec.name for spec in specs]
    assert len(set(names)) == len({file_stem(name) for name in names}) == len(specs)
    for spec in specs:
        check_launchable(spec)
        check_named(spec)
        assert (TEMPLATES / spec.template).is_file()
        parameters = [param.name for param in spec.params]
        assert len(set(parameters)) == len(parameters)
        assert spec.instructions, "every kernel promises what it is made of"


def test_hadamard_blocks_wider_than_a_head_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="heads of 64 features are no whole Hadamard blocks"):
        make_plan(CONFIGS["llama-3.2-1b"], "bf16-kv4-h128")


@pytest.mark.parametrize("precision", [name for name, row in PRECISIONS.items() if row.prefill == E4M3])
def test_the_kernels_beside_an_fp8_prefill_are_those_of_bf16(precision: str) -> None:
    """So they are built once for both."""
    config = CONFIGS["smollm2-135m"]
    fp8, mixed = (make_plan(config, precision, mixed=mixed) for mixed in (False, True))
    bf16 = make_plan(config, replace(get_precision(precision), prefill=BF16))
    assert replace(mixed, prefill_bf16={}, attention_prefill_bf16=None) == fp8
    assert mixed.prefill_bf16 == {op: specs for op, specs in bf16.prefill.items() if op != "lm_head"}
    assert mixed.attention_prefill_bf16 == bf16.attention_prefill
    assert set(mixed.specs()) == set(fp8.specs()) | set(bf16.specs())
    with pytest.raises(UnsupportedError, match="bf16 reads prompts in BF16 throughout"):
        make_plan(config, "bf16", mixed=True)


@pytest.mark.parametrize(("config", "precision"), EVERY_PLAN)
def test_projections_have_the_shapes_of_the_checkpoint(config: LlamaConfig, precision: str) -> None:
    """N and K of every GEMM, worked out from the config by hand."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = (count * config.head_dim for count in (config.num_attention_heads, config.num_key_value_heads))
    shapes = {
        "qkv": (q + 2 * kv, hidden),
        "o": (hidden, q),
        "gate_up": (2 * inner, hidden),
        "down": (hidden, inner),
        "lm_head": ((config.vocab_size + 63) // 64 * 64, hidden),
    }
    assert projections(config) == shapes
    plan = make_plan(config, precision)
    for by_op in (plan.prefill, plan.decode):
        assert {op: {(spec.n, spec.k) for spec in by_rows.values()} for op, by_rows in by_op.items()} == {
            op: {shape} for op, shape in shapes.items()
        }


@pytest.mark.parametrize(("vocab_size", "rows"), [(1, 64), (63, 64), (64, 64), (65, 128), (32_001, 32_064)])
def test_the_head_is_padded_to_whole_groups(vocab_size: int, rows: int) -> None:
    """Of 64 columns, which every view of the logits takes for granted; no published vocabulary needs any padding."""
    config = replace(CONFIGS["tinyllama-1.1b"], vocab_size=vocab_size, bos_token_id=None, eos_token_ids=())
    assert projections(config)["lm_head"] == (rows, 2048)


@pytest.mark.parametrize("config", odd_configs(200), ids=lambda config: config.name)
def test_whatever_a_config_accepts_has_a_plan(config: LlamaConfig) -> None:
    """No shape passes LlamaConfig and fails at its kernels: it is refused at once or served."""
    specs = kernel_specs(config, "bf16")
    assert len({spec.name for spec in specs}) == len(specs)
    for spec in specs:
        check_launchable(spec)
        check_named(spec)


@pytest.mark.parametrize(
    "precision",
    [
        "bf16-kv4",
        "fp8-int4-kv8-kv4-min",
        "int4-g32-asym-kv4-h0",
        "fp8-promoted-kv4",
        "bf16-kv4-head-h64",
        "bf16-fp8-kv4",
    ],
)
def test_whatever_a_config_accepts_has_a_plan_with_a_copy(precision: str) -> None:
    for config in (*CONFIGS.values(), *odd_configs(60)):
        specs = kernel_specs(config, precision)
        assert len({spec.name for spec in specs}) == len(specs)
        for spec in specs:
            check_launchable(spec)
            check_named(spec)


def test_a_name_stands_for_one_kernel() -> None:
    """Models share cubins by name, so equal names must mean equal specs, across all models."""
    known: dict[str, KernelSpec] = {}
    for config in (*CONFIGS.values(), *odd_configs(200)):
        for spec in kernel_specs(config, "bf16"):
            assert known.setdefault(spec.name, spec) == spec
    assert len(known) > 1000


def test_the_order_is_that_of_the_model() -> None:
    """Stable, and by role: manifests and progress follow it."""
    config = CONFIGS["llama-3.1-8b"]
    names = [spec.name for spec in kernel_specs(config, "bf16")]
    assert names == [spec.name for spec in kernel_specs(replace(config), get_precision("bf16"))]
    role = r"(gather_rows|attention_\w+?|argmax(?:_parts)?|sample|step_begin|step_end|(?:decode_)?gemm_\w+?)_sm90"
    heads = [re.match(role, name) for name in names]
    roles = [role for role, _ in itertools.groupby(found[1] for found in heads if found)]
    ops = ("qkv", "o", "gate_up", "down", "lm_head")
    assert roles == [
        "gather_rows",
        *(f"gemm_{op}" for op in ops),
        "attention_prefill",
        *(f"decode_gemm_{op}" for op in ops),
        "attention_decode",
        "argmax",
        "argmax_parts",
        "sample",
        "step_begin",
        "step_end",
    ]


def test_the_largest_model_is_generated_though_no_gpu_holds_it() -> None:
    """Shapes are numbers to the generator: 405b has the plan of every other model, with 16 heads a group."""
    config = CONFIGS["llama-3.1-405b"]
    plan = make_plan(config, "bf16")
    layer_bytes = 2 * sum(n * k for op, (n, k) in projections(config).items() if op != "lm_head")
    assert layer_bytes * config.num_hidden_layers > 5 * 141e9
    assert {(spec.n, spec.k) for spec in plan.prefill["gate_up"].values()} == {(2 * 53_248, 16_384)}
    assert plan.attention_prefill.heads.group == plan.attention_decode.heads.group == 16
    small = make_plan(CONFIGS["smollm2-135m"], "bf16")
    for gemms, of_small in ((plan.prefill, small.prefill), (plan.decode, small.decode)):
        assert {op: list(by_rows) for op, by_rows in gemms.items()} == {op: list(of_small[op]) for op in of_small}


@pytest.mark.parametrize(
    ("name", "prefill", "group_size", "zero_points", "kv"),
    [
        ("int4", BF16, 128, False, BF16),
        ("int4-g32-asym", BF16, 32, True, BF16),
        ("int4-channel", BF16, CHANNEL, False, BF16),
        ("fp8-int4-g256-asym-kv8", E4M3, 256, True, E4M3),
        ("int4-kv8", BF16, 128, False, E4M3),
    ],
)
def test_int4_rows_are_named_with_their_groups(
    name: str, prefill: Element, group_size: int, zero_points: bool, kv: Element
) -> None:
    row = get_precision(name)
    assert (row.name, row.prefill, row.decode, row.kv) == (name, prefill, INT4, kv)
    assert (row.group_size, row.zero_points) == (group_size, zero_points)


@pytest.mark.parametrize("name", ["int4-gain", "fp8-int4-g64-asym-gain-kv8"])
def test_gains_in_x_change_what_writes_x_and_nothing_else(name: str) -> None:
    row, config = get_precision(name), CONFIGS["llama-3.1-8b"]
    assert (row.name, row.gain_in_x) == (name, True)
    base = name.replace("-gain", "")
    assert gains_in_x(get_precision(base)) == gains_in_x(row) == row
    gained, plain = (set(kernel_specs(config, precision)) for precision in (name, base))
    assert {getattr(spec, "op", "gather_rows") for spec in gained - plain} == {"o", "down", "gather_rows"}
    for spec in gained - plain:
        assert spec.params[-1].name == "gain"
        assert spec.name.endswith("_gain")


def test_the_usual_group_is_no_part_of_a_name() -> None:
    assert get_precision("fp8-int4-g128-asym").name == "fp8-int4-asym"


@pytest.mark.parametrize(
    "name",
    [
        "int4-g48",
        "int4-asym-g32",
        "bf16-g32",
        "int4-kv8-asym",
        "int4-kv8-gain",
        "fp8-gain",
        "fp8-promoted-int4",
        "int4-",
    ],
)
def test_int4_rows_that_do_not_exist_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"precision '{name}' is not implemented"):
        get_precision(name)


@pytest.mark.parametrize(
    ("name", "base", "copy"),
    [
        ("bf16-kv4", "bf16", KvFormat()),
        ("fp8-promoted-kv4-min", "fp8-promoted", KvFormat(minimum=True)),
        ("int4-g32-asym-gain-kv8-kv4-h0", "int4-g32-asym-gain-kv8", KvFormat(hadamard=0)),
        ("fp8-int4-kv4-head-min-h128", "fp8-int4", KvFormat(HEAD, minimum=True, hadamard=128)),
        ("int4-g32-head8-kv8-kv4-head", "int4-g32-head8-kv8", KvFormat(HEAD)),
    ],
)
def test_an_int4_copy_of_the_cache_by_a_last_suffix(name: str, base: str, copy: KvFormat) -> None:
    row = get_precision(name)
    assert row == replace(get_precision(base), name=name, copy=copy)
    assert get_precision(base).name + row.suffix.removeprefix(get_precision(base).suffix) == name


def test_the_usual_form_of_a_copy_is_no_part_of_a_name() -> None:
    assert get_precision("bf16-kv4-h32").name == "bf16-kv4"
    row = get_precision("int4-kv8-kv4-min")
    assert gains_in_x(row) == get_precision("int4-gain-kv8-kv4-min")


@pytest.mark.parametrize("name", ["bf16-kv4-kv8", "bf16-kv4-kv4", "bf16-kv4-h16", "bf16-kv4-min-head", "int4-kv4-asym"])
def test_copies_that_do_not_exist_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"precision '{name}' is not implemented"):
        get_precision(name)


def test_an_unknown_precision_is_refused_with_those_that_exist() -> None:
    with pytest.raises(UnsupportedError, match="precision 'int2' is not implemented; choose one of: bf16"):
        kernel_specs(CONFIGS["llama-3.1-8b"], "int2")


@pytest.mark.parametrize(("suffix", "element"), [("-head8", E4M3), ("-head4", INT4)])
@pytest.mark.parametrize("base", ["bf16", "fp8-promoted", "int4-g32-asym-gain", "fp8-int4", "bf16-fp8"])
def test_heads_by_a_suffix(base: str, suffix: str, element: Element) -> None:
    """Of any row, in its groups, before the suffix of pages: decode's kernels of the head are others, and no more."""
    row, plain = get_precision(base + suffix), get_precision(base)
    assert (row.name, row.head) == (base + suffix, element)
    assert (row.group_size, row.zero_points) == (plain.group_size, plain.zero_points)
    both = get_precision(row.name + "-kv8")
    assert (both.name, both.suffix, both.head, both.kv) == (f"{row.name}-kv8", f"{suffix}-kv8", element, E4M3)
    config = CONFIGS["llama-3.1-8b"]
    plan = make_plan(config, row)
    assert set(plan.specs()) - set(kernel_specs(config, base)) == set(plan.decode["lm_head"].values())
    assert {spec.element for spec in plan.prefill["lm_head"].values()} == {BF16}
    for wrong in (f"{base}-kv8{suffix}", f"{base}{suffix}{suffix}", f"{base}-head8-head4"):
        with pytest.raises(UnsupportedError, match=f"precision '{wrong}' is not implemented"):
            get_precision(wrong)


def test_gains_stand_before_the_suffixes_of_head_and_pages() -> None:
    row = gains_in_x(get_precision("int4-g32-head8-kv8"))
    assert row.name == "int4-g32-gain-head8-kv8"
    assert get_precision(row.name) == row


@pytest.mark.parametrize("base", ["bf16", "fp8", "fp8-promoted", "int4-g32-asym", "fp8-int4", "fp8-fp8-head4"])
def test_pages_of_e4m3_by_a_suffix(base: str) -> None:
    """Of any row: the kernels that write or read pages are others, and no more than these."""
    row = get_precision(f"{base}-kv8")
    assert (row.name, row.kv) == (f"{base}-kv8", E4M3)
    assert get_precision(row.name) == row
    config = CONFIGS["llama-3.1-8b"]
    plain, coded = (make_plan(config, name) for name in (base, row.name))
    changed = set(coded.specs()) - set(plain.specs())
    touched = {*coded.prefill["qkv"].values(), *coded.decode["qkv"].values()}
    assert changed == touched | {coded.attention_prefill, coded.attention_decode}
    with pytest.raises(UnsupportedError, match=f"precision '{base}-kv8-kv8' is not implemented"):
        get_precision(f"{base}-kv8-kv8")


def test_tiles_leave_registers_for_a_copy_of_many_heads() -> None:
    """13B's 40 heads of K: with 192 sums the place of a page is a register too many. 8B's eight are a shift."""
    widths = {
        name: make_plan(CONFIGS[name], "fp8-int4-head8-kv4").prefill["qkv"][MAX_ROWS].tile.n
        for name in ("llama-2-13b", "llama-3.1-8b")
    }
    assert widths == {"llama-2-13b": 128, "llama-3.1-8b": 192}
