"""Every subject's inputs, rivals and checks on a small shape: the reference plays ours, PyTorch's rivals are real."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from futransformer.bench import fp8
from futransformer.bench.case import Case, Ceilings, HostCase, Problem, Work
from futransformer.bench.check import judge, judge_rival
from futransformer.bench.llama import Paging, Prompts, to_pair_order
from futransformer.bench.rivals import quack
from futransformer.bench.runner import Bench
from futransformer.bench.shapes import (
    RAGGED,
    block_gemm_work,
    decode_attention_work,
    decode_block_work,
    decode_chain_work,
    decode_gemm_work,
    decode_step_work,
    gemm_work,
    prefill_attention_work,
    prefill_model_work,
    shape_config,
)
from futransformer.bench.subjects import (
    SUBJECTS,
    attention_decode,
    attention_prefill,
    decode_block,
    decode_gemm,
    decode_step,
    gateup_swiglu,
    gemm,
    prefill_block,
    prefill_model,
    sample,
    subject_cases,
)
from futransformer.bench.subjects.projection import ProjectionInputs
from futransformer.generator.errors import UnsupportedError
from futransformer.generator.kv_format import KvFormat
from futransformer.generator.precision import Precision, get_precision
from futransformer.reference import ReferenceOps
from futransformer.sampling import Sampling
from tests.bench.conftest import CpuBench

SMALL = "smollm2-135m"
CEILINGS = Ceilings(read_tbps=4.4, fp8_tflops=1500.0, bf16_tflops=800.0)  # as an H200 measures them
OPENED: dict[str, Callable[[Bench], Problem]] = {
    "gateup_swiglu": partial(gateup_swiglu.open_case, SMALL, 24),
    **{f"gemm/{op}": partial(gemm.open_case, SMALL, op, 24) for op in ("qkv", "o", "gate_up", "down")},
    "gemm/host": partial(gemm.open_case, SMALL, "down", 1024),
    "attention_prefill": partial(attention_prefill.open_case, SMALL, (40, 40)),
    "prefill_block": partial(prefill_block.open_case, SMALL, (40, 40)),
    "prefill_block/ragged": partial(prefill_block.open_case, SMALL, (1, 70, 9)),
    **{f"decode_gemm/{op}": partial(decode_gemm.open_case, SMALL, op, 3) for op in ("qkv", "o", "gate_up", "down")},
    "decode_gemm/chain": partial(decode_gemm.open_chain, SMALL, 3),
    "attention_decode": partial(attention_decode.open_case, SMALL, 3, 100),
    "attention_decode/kv8": partial(attention_decode.open_case, SMALL, 3, 100, precision="bf16-kv8"),
    "attention_decode/kv4": partial(attention_decode.open_case, SMALL, 3, 100, precision="bf16-kv4"),
    "decode_block": partial(decode_block.open_case, SMALL, 3, 100),
    "decode_block/batch_invariant": partial(decode_block.open_invariant_case, SMALL, 3, 100),
    "decode_block/own/int4-g32-kv4": partial(decode_block.open_own_case, SMALL, 3, 100, precision="int4-g32-kv4"),
    "decode_step": partial(decode_step.open_case, SMALL, 2, 70),
    **{
        f"decode_gemm/{op}/int4-g64": partial(decode_gemm.open_case, SMALL, op, 3, precision="int4-g64")
        for op in ("qkv", "o", "gate_up", "down")
    },
    "decode_gemm/chain/int4-g32-asym": partial(decode_gemm.open_chain, SMALL, 3, precision="int4-g32-asym"),
    "decode_block/int4-g64": partial(decode_block.open_case, SMALL, 3, 100, precision="int4-g64"),
    "decode_block/bf16-kv4": partial(decode_block.open_case, SMALL, 3, 100, precision="bf16-kv4"),
    "decode_block/int4-g32-kv4-min": partial(decode_block.open_case, SMALL, 3, 100, precision="int4-g32-kv4-min"),
    "decode_step/int4-g64-kv4": partial(decode_step.open_case, SMALL, 2, 70, precision="int4-g64-kv4"),
    "decode_block/int4-g32-asym": partial(decode_block.open_case, SMALL, 3, 100, precision="int4-g32-asym"),
    "decode_step/int4-g64": partial(decode_step.open_case, SMALL, 2, 70, precision="int4-g64"),
    "decode_step/int4-g64-head8": partial(decode_step.open_case, SMALL, 2, 70, precision="int4-g64-head8"),
    **{
        f"decode_gemm/{op}/bf16-fp8": partial(decode_gemm.open_case, SMALL, op, 3, precision="bf16-fp8")
        for op in ("qkv", "o", "gate_up", "down")
    },
    "decode_gemm/chain/bf16-fp8": partial(decode_gemm.open_chain, SMALL, 3, precision="bf16-fp8"),
    "decode_block/bf16-fp8": partial(decode_block.open_case, SMALL, 3, 100, precision="bf16-fp8"),
    "decode_step/bf16-fp8-head4": partial(decode_step.open_case, SMALL, 2, 70, precision="bf16-fp8-head4"),
    "gateup_swiglu/fp8": partial(gateup_swiglu.open_fp8_case, SMALL, 24),
    **{f"gemm/{op}/fp8": partial(gemm.open_fp8_case, SMALL, op, 24) for op in ("qkv", "o", "gate_up", "down")},
    "gemm/qkv/bf16-kv4": partial(gemm.open_case, SMALL, "qkv", 24, precision="bf16-kv4"),
    "gemm/qkv/fp8-kv4": partial(gemm.open_fp8_case, SMALL, "qkv", 24, precision="fp8-kv4"),
    "gemm/host/fp8": partial(gemm.open_fp8_case, SMALL, "down", 1024),
    "prefill_block/fp8": partial(prefill_block.open_case, SMALL, (40, 40), precision="fp8"),
    "prefill_block/ragged/fp8": partial(prefill_block.open_case, SMALL, (1, 70, 9), precision="fp8"),
    "prefill_model/fp8": partial(prefill_model.open_case, SMALL, 70),
    **{f"sample/{name}": partial(sample.open_case, SMALL, 3, each) for name, each in sample.SETTINGS.items()},
}
RUN_HERE = (
    "torch-bf16",
    "torch-bf16-epilogue",
    "torch-bf16-padded",
    "torch-int4",
    "torch-fp8",
    "torch-fp8-mm",
    "torch-fp8-padded",
    "ours-default",
    "ours-bf16",
    "ours-no-copy",
    "torch-sort",
)


def precision_of(name: str) -> Precision:
    last = name.rpartition("/")[2]
    return get_precision(last if last.startswith(("fp8", "int4", "bf16-fp8")) else "bf16")


@pytest.mark.parametrize("name", OPENED)
def test_ours_and_pytorch_compute_the_same(cpu_bench: CpuBench, name: str) -> None:
    with torch.no_grad():
        problem = OPENED[name](cpu_bench)
        problem.ours.run()
        problem.ours.run()  # running leaves nothing behind that a check would notice
        expected = problem.expected()
        precision = precision_of(name)
        verdict = judge(problem.ours.outputs(), expected, precision)
        assert verdict.passed
        assert 0 < verdict.tolerance < 0.1
        assert problem.work.floor_seconds(cpu_bench.ceilings) > 0
        compared = 0
        for rival in RUN_HERE:
            make = problem.rivals.get(rival) or problem.beside.get(rival)
            if make is None:
                continue
            contender = make()
            contender.run()
            outputs = contender.outputs()
            compared += len(outputs)
            assert not outputs or judge_rival(outputs, expected, precision).passed
            assert contender.calls == problem.ours.calls
        assert set(problem.rivals).isdisjoint(problem.beside)
        if name.startswith(("gemm", "gateup", "prefill", "decode_b", "decode_s")):
            assert compared


@pytest.mark.parametrize("name", [name for name in OPENED if not name.startswith(("decode_step", "prefill_model"))])
def test_a_wrong_answer_is_seen(cpu_bench: CpuBench, name: str) -> None:
    with torch.no_grad():
        problem = OPENED[name](cpu_bench)
        outputs = [tensor.clone() for tensor in problem.ours.outputs()]
        expected = problem.expected()
        precision = precision_of(name)
        outputs[-1].view(-1)[7] = torch.nan
        assert not judge(outputs, expected, precision).passed
        outputs = [tensor.clone() for tensor in problem.ours.outputs()]
        outputs[0][-1] = outputs[0][0].roll(1)
        assert not judge(outputs, expected, precision).passed
        if outputs[-1].dtype == torch.float8_e4m3fn:
            outputs = [tensor.clone() for tensor in problem.ours.outputs()]
            outputs[-1][-1] = -outputs[-1][-1].float()
            assert not judge(outputs, expected, precision).passed


def test_a_step_walks_few_layers_as_often_as_the_model_has_layers(
    cpu_bench: CpuBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(decode_step.LAYERS, SMALL, 10)  # of 30
    taken = dict.fromkeys(("pack", "qkv"), 0)
    ops = cpu_bench.library(SMALL, "int4-g64-kv4")
    monkeypatch.setattr(cpu_bench, "library", lambda *_: ops)
    for op in taken:
        plain = getattr(ops, op)

        def counted(*args: Any, op: str = op, plain: Callable[..., Any] = plain, **named: Any) -> Any:
            taken[op] += 1
            return plain(*args, **named)

        monkeypatch.setattr(ops, op, counted)
    with torch.no_grad():
        problem = decode_step.open_case(SMALL, 2, 70, cpu_bench, precision="int4-g64-kv4")
        assert taken == {"pack": 10 * 4 + 1, "qkv": 0}
        outputs = problem.ours.outputs()
        assert taken["qkv"] == 30
        assert judge(outputs, problem.expected(), get_precision("int4-g64")).passed
        assert list(problem.rivals) == ["torch-int4"]
        assert judge_rival(
            problem.rivals["torch-int4"]().outputs(), problem.expected(), get_precision("int4-g64")
        ).passed


def test_interleaving_for_gated_rivals() -> None:
    weight = torch.arange(12.0).view(6, 2)  # gate rows 0 1 2, up rows 3 4 5
    wanted = weight[[0, 3, 1, 4, 2, 5]]
    assert torch.equal(quack.interleaved(weight).t(), wanted)
    assert quack.interleaved(weight).stride() == (1, 2)  # K contiguous


def test_the_sorting_rival_draws_what_ours_may() -> None:
    logits = torch.tensor([[0.0, 3, 1, 3, -1, 2]]).expand(4000, -1) * 0.6931472
    weights = torch.tensor([1.0, 8, 2, 8, 0.5, 4], dtype=torch.float64)
    torch.manual_seed(0)
    for sampling, kept in ((Sampling(), 0.0), (Sampling(top_k=3), 4.0), (Sampling(top_p=0.8), 4.0)):
        expected = weights * (weights >= kept)
        expected /= expected.sum()
        found = sample.by_sorting(logits, sampling).bincount(minlength=6).double() / 4000
        assert ((found - expected).abs() < 5 * (expected * (1 - expected) / 4000).sqrt() + 1e-9).all()


def test_pair_order() -> None:
    features = torch.arange(8.0).view(1, 8)  # two heads of four
    assert to_pair_order(features, 4).tolist() == [[0, 2, 1, 3, 4, 6, 5, 7]]


def test_paging_stores_what_the_reference_reads() -> None:
    config, device = shape_config(SMALL), torch.device("cpu")
    paging = Paging(3, 100, device)
    cache = paging.cache(config)
    assert sorted(paging.block_table.flatten().tolist()) == list(range(6))
    for sequence in range(3):
        pages = cache.v_pages[paging.block_table[sequence].long()].transpose(0, 1).flatten(1, 2)
        assert torch.equal(pages[:, :100], cache.v[sequence])
        assert pages[:, 100:].isnan().all()


def test_prompts_describe_one_pass() -> None:
    prompts = Prompts((1, 70, 9), torch.device("cpu"))
    rows = prompts.prefill_pass()
    assert prompts.cu_seqlens.tolist() == [0, 1, 71, 80]
    assert rows.max_seqlen_q == 70
    assert len(set(rows.slots.tolist())) == 80
    assert prompts.positions[:3].tolist() == [0, 0, 1]


@pytest.mark.parametrize("subject", SUBJECTS)
def test_cases_are_named_once_and_after_their_subject(subject: str) -> None:
    cases = subject_cases(subject)
    names = [case.name for case in cases]
    assert len(set(names)) == len(names)
    assert all(name.startswith(f"{subject}/") for name in names)
    assert any(case.default for case in cases)
    # by what a decode case is named after; the others are named after their precision
    named = {"decode": {"fp8": "bf16-fp8"}, "attention_decode": {"int4": "bf16-kv4"}}
    of_subject = named.get(subject, named["decode"] if subject.startswith("decode") else {})
    for case in [] if subject == "serve" else cases:  # named after its precision
        parts = case.name.split("/")
        (read,) = {"fp8", "int4", "bf16-kv8", "bf16-kv4", "int4-kv4", "fp8-kv4"} & set(parts) or {"bf16"}
        base, copy, _ = read.partition("-kv4")
        decoded = of_subject.get(read, base)
        head = "-head8" * ("head=fp8" in parts) + "-head4" * ("head=int4" in parts)
        assert case.precision == decoded + head + copy
    if not isinstance(cases[0], HostCase):
        assert all(isinstance(case, Case) and case.unit != "s" for case in cases)


def test_the_agreed_cases_exist() -> None:
    names = {case.name for subject in SUBJECTS for case in subject_cases(subject)}
    assert names >= {
        "gateup_swiglu/70b/bf16/M=16384",
        "gateup_swiglu/70b/fp8/M=8192",
        "gemm/8b/qkv/fp8/M=8192",
        "prefill_block/8b/fp8/ragged",
        "prefill_block/70b/fp8/4x2048",
        "prefill_model/8b/fp8/T=128",
        "prefill_model/8b/fp8/T=8192",
        "gemm/8b/down/bf16/M=8192",
        "attention_prefill/8b/bf16/1x32768",
        "prefill_block/8b/bf16/ragged",
        "decode_gemm/8b/chain/bf16/B=32",
        "decode_gemm/8b/chain/int4/B=16",
        "decode_block/8b/int4/B=32/ctx=4096",
        "decode_block/70b/int4/B=2/ctx=1024",
        "decode_step/8b/int4/head=bf16/B=1/ctx=1024",
        "decode_step/8b/int4/head=fp8/B=1/ctx=1024",
        "decode_step/8b/int4/head=int4/B=1/ctx=1024",
        "decode_step/8b/fp8/head=fp8/B=32/ctx=1024",
        "decode_step/8b/int4-kv4/head=fp8/B=1/ctx=131072",
        "decode_step/70b/int4-kv4/head=fp8/B=1/ctx=1024",
        "decode_gemm/8b/chain/fp8/B=16",
        "decode_block/8b/fp8/B=32/ctx=4096",
        "attention_decode/8b/bf16/B=32/ctx=4096",
        "attention_decode/8b/int4/B=32/ctx=4096",
        "decode_block/70b/bf16/B=64/ctx=131072",
        "decode_block/8b/bf16/batch_invariant/B=4/ctx=1024",
        *(
            f"decode_block/8b/int4-kv4/own/B={batch}/ctx={context}"
            for batch in (1, 8, 64)
            for context in (512, 4096, 32768, 131072)
        ),
        "decode_step/8b/bf16/head=bf16/B=1/ctx=1024",
        "build/llama-3.1-8b",
        "load/llama-3.1-8b",
    }


@pytest.mark.parametrize(
    ("rows", "graphed", "told"),
    [
        (128, True, {"steady"}),
        (256, True, {"burst", "sustained"}),
        (512, True, {"burst", "sustained"}),
        (1024, False, {"burst", "sustained"}),
        (8192, False, {"burst", "sustained"}),
    ],
)
def test_launches_decide_the_graph_and_arithmetic_the_regimes(rows: int, graphed: bool, told: set[str]) -> None:
    work = gemm_work(shape_config("8b"), "o", rows)
    assert set(gemm.regimes(rows)) == told
    assert gemm.graph_floor(work, rows, CEILINGS) == (work.floor_seconds(CEILINGS) if graphed else None)
    # An H200's memory is the slower of the two exactly where the regime is steady, in either precision.
    assert (work.bytes / CEILINGS.read_tbps > work.flops / CEILINGS.bf16_tflops) == (told == {"steady"})
    fp8 = gemm_work(shape_config("8b"), "gate_up", rows, "fp8")
    assert (fp8.bytes / CEILINGS.read_tbps > fp8.fp8_flops / CEILINGS.fp8_tflops) == (told == {"steady"})
    for case in subject_cases("gemm"):
        if case.name.endswith(f"M={rows}"):
            assert isinstance(case, Case)
            assert set(case.regimes) == told


def test_an_unknown_subject_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="choose from: gateup_swiglu"):
        subject_cases("decode_blok")


def test_work_of_the_published_cases() -> None:
    """The floors that the plan quotes for an H200: an 8B layer of 436 MB at 4.5 TB/s, and its KV."""
    config = shape_config("8b")
    assert decode_block_work(config, 1, 1024).bytes / 4.5e12 == pytest.approx(98e-6, rel=0.01)
    assert decode_block_work(config, 32, 1024).bytes / 4.5e12 == pytest.approx(127e-6, rel=0.01)
    assert gemm_work(config, "gate_up", 8192).flops == 4 * 8192 * 14336 * 4096
    assert prefill_attention_work(config, (2048,) * 4).flops == 2 * 4 * 32 * 2048 * 2048 * 128
    assert replace(config, num_hidden_layers=1).heads == config.heads


def test_work_of_int4() -> None:
    """The floor that the plan quotes: 112.5 MB of an 8B layer's weights and scales; activations and cache stay BF16."""
    config = shape_config("8b")
    weights = 218_103_808 * (0.5 + 2 / 128)
    assert decode_block_work(config, 1, 1024, "int4").bytes == weights + 2 * 2 * 1024 * 1024
    bf16, int4 = (decode_chain_work(config, 8, precision) for precision in ("bf16", "int4"))
    assert bf16 == block_gemm_work(config, 8)
    assert int4 == Work(bf16.flops, bf16.bytes - 2 * 218_103_808 + weights)
    assert decode_gemm_work(config, "o", 8, "int4").bytes == 4096 * 4096 * (0.5 + 2 / 128) + 8 * 4096 * 2 * 3
    ceilings = Ceilings(4.5, 1500.0, 800.0)
    for head, milliseconds in (("", 1.03), ("-head8", 0.92), ("-head4", 0.86)):
        step = decode_step_work(config, 1, 1, f"int4{head}")
        assert step.floor_seconds(ceilings) == pytest.approx(milliseconds * 1e-3, rel=0.01)


def test_work_of_fp8_decode() -> None:
    """A byte a weight and four a row: the floor of an 8B layer is 48.5 us at 4.5 TB/s."""
    config = shape_config("8b")
    weights = 218_103_808 + 4 * (6144 + 4096 + 2 * 14336 + 4096)
    assert decode_block_work(config, 1, 1024, "bf16-fp8").bytes == weights + 2 * 2 * 1024 * 1024
    bf16, e4m3 = (decode_chain_work(config, 8, precision) for precision in ("bf16", "bf16-fp8"))
    assert e4m3 == Work(bf16.flops, bf16.bytes - 2 * 218_103_808 + weights)


def test_work_of_an_int4_copy() -> None:
    """4.5 bits an element, scales counted: 151 MB at 32 sequences of 4096 tokens, where BF16 has 537."""
    config = shape_config("8b")
    assert decode_attention_work(config, 32, 4096, "bf16-kv4").bytes == 32 * 4096 * 8 * 2 * 128 * 4.5 / 8
    assert decode_attention_work(config, 1, 64, "bf16-kv4-min").bytes == 8 * 2 * 64 * 128 * 5 / 8


def test_codes_of_the_benchmark_are_exact_in_bf16(cpu_bench: CpuBench) -> None:
    paging, config = Paging(2, 70, cpu_bench.device), shape_config(SMALL)
    held = attention_decode.copied(paging, config, KvFormat())
    ops = ReferenceOps(config, dtype=torch.float32, copy=KvFormat())
    rows, q = paging.decode_pass(), torch.randn(2, config.heads.q_features).bfloat16()
    paired = to_pair_order(q.view(2, -1, config.head_dim), config.head_dim).flatten(1)
    pages = held.cache.k_pages, held.cache.v_pages
    over_copy, over_pages = rows.attention(ops, q, *pages, kv_copy=held.kv_copy), rows.attention(ops, paired, *pages)
    assert (over_copy - over_pages).abs().max() <= 2.0**-20 * over_pages.abs().max()


def test_work_of_fp8() -> None:
    """Products count at FP8's ceiling, attention at BF16's; a byte an operand; residual in and out, and its codes."""
    config, rows = shape_config("8b"), 8192
    assert gemm_work(config, "down", rows, "fp8") == Work(
        bytes=4096 * 14336 + rows * 14336 + rows * 4096 * 5, fp8_flops=2 * rows * 4096 * 14336
    )
    assert gemm_work(config, "gate_up", rows, "fp8").bytes == 28672 * 4096 + rows * (4096 + 14336)
    assert gemm_work(config, "qkv", rows, "fp8").bytes == 6144 * 4096 + rows * (4096 + 2 * 6144)
    block = block_gemm_work(config, rows, "fp8") + prefill_attention_work(config, (rows,))
    ceilings = Ceilings(read_tbps=4.5, fp8_tflops=1500.0, bf16_tflops=800.0)
    assert block.floor_seconds(ceilings) == pytest.approx((3.573 / 1500) + (0.55 / 800), rel=0.01)
    model = prefill_model_work(config, 128, "fp8")
    assert model.floor_seconds(ceilings) == pytest.approx((6.98e9 + 1.05e9) / 4.5e12, rel=0.06)  # weights, once


def test_ragged_prompts_are_those_of_a_server() -> None:
    assert len(RAGGED) == 64
    assert (min(RAGGED), max(RAGGED)) == (16, 2048)
    assert sum(RAGGED) / 64 == pytest.approx(500, rel=0.02)
    assert 3.9 < 64 * 2048 / sum(RAGGED) < 4.1


def test_fp8_scales_come_from_the_data() -> None:
    values = torch.tensor([[1.0, -3.5], [0.25, 7.0]], dtype=torch.bfloat16)
    assert fp8.scale_of(values).tolist() == pytest.approx([7.0 / 448], rel=2.0**-20)
    assert fp8.scale_of(values, room=2).tolist() == pytest.approx([14.0 / 448], rel=2.0**-20)


def test_timed_calls_never_saturate(cpu_bench: CpuBench) -> None:
    """Values beyond the largest code are counted one by one, which would take time: there must be none."""
    with torch.no_grad():
        for op in ("o", "down", "gate_up"):
            inputs = ProjectionInputs(cpu_bench, SMALL, op, 24, "prefill", precision="fp8")
            for call in inputs.stream_calls(cpu_bench.library(SMALL, "fp8")) * 400:
                call()
            assert inputs.timed_scales.result is not None
            assert inputs.timed_scales.result.saturated.item() <= (op == "gate_up")  # its largest is the scale's own
        ops = cpu_bench.library(SMALL, "fp8")
        block = prefill_block.Fp8Inputs(shape_config(SMALL), (40,), ops, ops.precision)
        packed = block.packed(ops)
        run = prefill_block.our_stream(ops, block, packed)
        for _ in range(2 * prefill_block.REFRESH):
            run()
        for _, scales in packed:
            for result in (scales.attended, scales.middle, scales.h, scales.end):
                assert result is not None
                assert result.saturated.item() == 0
