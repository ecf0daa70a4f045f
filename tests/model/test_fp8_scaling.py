"""The scales of an FP8 prefill by themselves: a test plays the kernels, which raise maxima and counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from futransformer.fp8_scaling import ActivationScales, Fp8Scaling
from futransformer.generator.errors import InputError
from futransformer.layer_parts import parse_parts
from futransformer.ops.interface import Fp8Output

LAYERS = 2
RESULTS = 4 * LAYERS + 1
CALIBRATED = torch.arange(1.0, RESULTS + 1)  # the largest magnitudes


def rule(amax: Tensor) -> Tensor:
    """The scales of these maxima."""
    return ActivationScales.from_amax(amax).scale


def make(weight_scales: Sequence[Tensor] | None = None, **options: Any) -> Fp8Scaling:
    scales = [torch.tensor([2.0 + i]) for i in range(RESULTS - 1)] if weight_scales is None else weight_scales
    return Fp8Scaling(ActivationScales.from_amax(CALIBRATED), scales, **options)


def outputs(scaling: Fp8Scaling) -> list[Fp8Output]:
    """All results, as the operations of a pass are given them."""
    named = [(block.attended, block.middle, block.h, block.end) for block in scaling.blocks]
    found = [scaling.embedding, *(output for block in named for output in block)]
    assert None not in found
    return found  # type: ignore[return-value]


def read(scaling: Fp8Scaling, amax: float, saturated: int = 0, *, begins: bool = True) -> None:
    """A pass whose results all reach ``amax``."""
    for output in outputs(scaling):
        torch.maximum(output.amax, torch.tensor([amax]), out=output.amax)
        output.saturated.add_(saturated)
    scaling.finish_pass(begins=begins)


def sums(scaling: Fp8Scaling) -> list[Tensor]:
    found = [sums for b in scaling.blocks for sums in (b.qkv, b.o, b.gate_up, b.down)]
    assert None not in found
    return found  # type: ignore[return-value]


def test_a_scale_leaves_room_for_twice_the_calibrated_maximum() -> None:
    torch.testing.assert_close(make().scale(), 2 * CALIBRATED / 448, rtol=2.0**-20, atol=0)
    assert (2 * CALIBRATED * (1 / make().scale()) <= 448).all()


def test_sums_are_worth_the_scale_of_what_is_read_times_the_weights() -> None:
    scaling = make()
    expected = rule(CALIBRATED)
    assert torch.equal(torch.cat([output.scale for output in outputs(scaling)]), expected)
    for index, worth in enumerate(sums(scaling)):
        assert torch.equal(worth, expected[index : index + 1] * (2.0 + index))


def test_a_weight_may_have_a_scale_for_every_row() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = [torch.rand(32 * (1 + index), generator=generator) for index in range(RESULTS - 1)]
    scaling = make(weights, mode="running", history=1)
    read(scaling, 7.0)
    for worth, weight in zip(sums(scaling), weights, strict=True):
        assert worth.is_contiguous()
        torch.testing.assert_close(worth, rule(torch.tensor(7.0)) * weight, rtol=2.0**-22, atol=0)


def test_frozen_scales_stay() -> None:
    scaling = make()
    before = [scaling.scale(), *(worth.clone() for worth in sums(scaling))]
    for amax in (100.0, 0.0, 1e30, torch.inf):
        read(scaling, amax, 5)
        assert all(map(torch.equal, before, [scaling.scale(), *sums(scaling)]))
    assert (scaling.largest() == torch.inf).all()
    assert sum(scaling.saturated().values()) == 4 * 5 * RESULTS


def test_running_scales_follow_the_largest_of_the_last_passes() -> None:
    scaling = make(mode="running", history=3)
    calibrated = scaling.scale()

    def assert_made_for(amax: Tensor) -> None:
        torch.testing.assert_close(scaling.scale(), rule(amax), rtol=2.0**-22, atol=0)
        torch.testing.assert_close(
            torch.cat(sums(scaling)), scaling.scale()[:-1] * torch.arange(2.0, 10.0), rtol=0, atol=0
        )

    for _ in range(2):
        read(scaling, 0.5)
        assert_made_for(CALIBRATED)  # the calibration is the third of the last passes
    read(scaling, 0.5)
    assert_made_for(torch.full((RESULTS,), 0.5))
    read(scaling, 40.0)
    for _ in range(2):
        assert_made_for(torch.full((RESULTS,), 40.0))
        read(scaling, 2.0)
    assert_made_for(torch.full((RESULTS,), 40.0))
    read(scaling, 2.0)
    assert_made_for(torch.full((RESULTS,), 2.0))
    scaling.reset()
    assert torch.equal(scaling.scale(), calibrated)


def test_passes_that_begin_no_sequence_displace_none() -> None:
    """They may be louder, but what a sequence begins with is louder than all that continues it."""
    scaling = make(mode="running", history=3)
    for _ in range(3):
        read(scaling, 40.0)
    for _ in range(5):
        read(scaling, 2.0, begins=False)
        torch.testing.assert_close(scaling.scale(), rule(torch.full((RESULTS,), 40.0)), rtol=2.0**-22, atol=0)
    read(scaling, 90.0, begins=False)
    for _ in range(3):
        torch.testing.assert_close(scaling.scale(), rule(torch.full((RESULTS,), 90.0)), rtol=2.0**-22, atol=0)
        read(scaling, 2.0)
    torch.testing.assert_close(scaling.scale(), rule(torch.full((RESULTS,), 2.0)), rtol=2.0**-22, atol=0)


def test_running_scales_keep_the_calibrations_ratio() -> None:
    """Whatever rule chose the scales: here half of what the maximum would take."""
    scales = ActivationScales(rule(CALIBRATED) / 2, CALIBRATED)
    scaling = Fp8Scaling(scales, [torch.ones(1)] * (RESULTS - 1), mode="running", history=1)
    read(scaling, 30.0)
    expected = rule(torch.full((RESULTS,), 30.0)) / 2
    torch.testing.assert_close(scaling.scale(), expected, rtol=2.0**-22, atol=0)


@pytest.mark.parametrize("amax", [torch.inf, 0.0])
def test_running_scales_stay_usable(amax: float) -> None:
    """What is not finite is no measure; after nothing but zeros any scale will do that is one."""
    scaling = make(mode="running", history=2)
    for _ in range(3):
        read(scaling, amax)
        assert (scaling.scale() > 0).all()
        assert (1 / scaling.scale()).isfinite().all()
    if amax:
        torch.testing.assert_close(scaling.scale(), rule(CALIBRATED), rtol=2.0**-22, atol=0)
    read(scaling, 3.0)
    read(scaling, 3.0)
    torch.testing.assert_close(scaling.scale(), rule(torch.full((RESULTS,), 3.0)), rtol=2.0**-22, atol=0)


def test_saturated_values_are_reported_by_place() -> None:
    scaling = make()
    assert scaling.saturated() == {}
    assert scaling.embedding is not None
    for _ in range(2):
        scaling.embedding.saturated.add_(2**31 - 1)  # whose sum no int32 holds
        h, end = scaling.blocks[0].h, scaling.blocks[1].end
        assert h is not None
        assert end is not None
        h.saturated.add_(3)
        end.saturated.add_(1)
        scaling.finish_pass()
    assert scaling.saturated() == {"layer 0, x before qkv": 2**32 - 2, "layer 0, h": 6, "x after the last layer": 2}
    scaling.reset()
    assert scaling.saturated() == {}


def test_what_is_no_scaling_is_refused() -> None:
    with pytest.raises(InputError, match="frozen or running, not 'dynamic'"):
        make(mode="dynamic")
    with pytest.raises(InputError, match="at least one pass, not 0"):
        make(history=0)
    with pytest.raises(InputError, match=r"writes 9 FP8 results, so scale must be float32 \[9\].*float32 \[5\]"):
        make().use(ActivationScales.from_amax(torch.ones(5)))
    with pytest.raises(InputError, match=r"amax must be float32 .*float64"):
        make().use(ActivationScales(torch.ones(9), torch.ones(9).double()))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 0.0, -1.0, 1e-39])
def test_what_is_no_scale_is_refused(value: float) -> None:
    """1e-39 has no reciprocal in float32."""
    for name in ("scale", "amax"):
        if name == "scale" or not 0 <= value < torch.inf:
            values = {"scale": torch.ones(9), "amax": torch.ones(9)}
            values[name][3] = value
            with pytest.raises(InputError, match=f"{name} holds values that no {name} "):
                make().use(ActivationScales(**values))


def test_parts_in_bf16_have_no_scales_and_fp8_begins_again_after_them() -> None:
    bf16 = parse_parts("0.attention, 1.mlp", 2)
    scaling = make(bf16=bf16, max_rows=3)
    first, second = scaling.blocks
    assert scaling.embedding is None
    assert (first.qkv, first.o, first.attended, first.begin) == (None, None, None, None)
    assert (second.gate_up, second.down, second.h, second.end) == (None, None, None, None)
    # x before gate_up of layer 0 is gathered; that of layer 1 written by o, as its kernel must, and read by nobody
    for written, result in ((first.middle, 2), (first.h, 3), (first.end, 4), (second.attended, 5), (second.middle, 6)):
        assert written is not None
        assert written.scale.data_ptr() == scaling._scale[result:].data_ptr()
    assert second.begin is None
    assert first.order is not None
    assert first.order.tolist() == [0, 1, 2]
    begin = make(bf16=parse_parts("0.mlp", 2), max_rows=3).blocks[1].begin
    assert begin is not None
    assert make().blocks[1].begin is None
