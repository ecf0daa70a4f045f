"""The scales of an FP8 prefill, on the device: of what it writes in FP8, and of the sums of its projections.

L layers write 4 L + 1 FP8 results. Result 4 l + i is read by projection i of layer l:

| i | result | written by | read by |
| --- | --- | --- | --- |
| 0 | x before qkv | the embedding's gather, or down of the layer before | qkv |
| 1 | attention output | attention | o |
| 2 | x before gate_up | o | gate_up |
| 3 | h | gate_up | down |

and the last result, x after the last layer, by nobody. Parts of layers that stay in BF16 (futransformer.layer_parts)
read and write none; what they alone would have to do with has a scale all the same, which means nothing. All results
share one tensor for each quantity, so that a pass costs a few small launches, none of which waits for the device.

Scales are *delayed*: a pass writes by scales that were fixed before it. They are those of a calibration, and then

- *frozen*, they stay, and a prompt's logits do not depend on what was read before it;
- *running*, after each pass a result's scale is its calibrated one times the largest magnitude of the last passes
  (``HISTORY``, which begin as the calibration's) over that of the calibration. Only passes that begin a sequence are
  counted; one that continues sequences adds to the pass before it, and displaces none (``finish_pass``).

Either way a value beyond 448 scales saturates, and is counted; the largest magnitudes are recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from futransformer.blocks import BlockScales
from futransformer.generator.errors import InputError
from futransformer.generator.precision import E4M3_MAX
from futransformer.layer_parts import Part, Parts
from futransformer.ops.interface import Fp8Output, Projection
from futransformer.quantize.fp8 import SMALLEST_SCALE, scale_of

Fp8Scales = Literal["frozen", "running"]
HISTORY = 16  # passes that a running scale remembers
# Maxima differ by up to 1.8 times from one window of a text to the next (SmolLM2-135M). What saturates is farther off
# than any rounding, and a factor of two costs nothing but the lowest of E4M3's 18 binades.
HEADROOM = 2

RESULTS = ("x before qkv", "attention output", "x before gate_up", "h")
READERS: tuple[Projection, ...] = ("qkv", "o", "gate_up", "down")


@dataclass(frozen=True)
class ActivationScales:
    """Of each FP8 result, float32 [4 L + 1] on the CPU: its scale, and the largest magnitude that led to it."""

    scale: Tensor
    amax: Tensor

    @classmethod
    def from_amax(cls, amax: Tensor) -> ActivationScales:
        """Scales by the rule: ``HEADROOM`` times the largest magnitude takes the code 448."""
        return cls(scale_of(HEADROOM * amax), amax)

    @classmethod
    def unknown(cls, layers: int) -> ActivationScales:
        """What a calibration begins with: codes are worth what they say."""
        return cls.from_amax(torch.full((count_results(layers),), E4M3_MAX / HEADROOM))

    def check(self, results: int) -> None:
        """Require a scale that has a reciprocal, and a maximum, for each of so many results; InputError if not."""
        for name, tensor, least in (("scale", self.scale, SMALLEST_SCALE), ("amax", self.amax, 0.0)):
            if tensor.dtype != torch.float32 or tensor.shape != (results,):
                raise InputError(
                    f"the model writes {results} FP8 results, so {name} must be float32 [{results}], as `futransformer "
                    f"calibrate` finds it, but is {tensor.dtype} {list(tensor.shape)}"
                )
            if not ((tensor >= least) & tensor.isfinite()).all():
                raise InputError(f"{name} holds values that no {name} of `futransformer calibrate` can be")


def count_results(layers: int) -> int:
    """FP8 results of so many layers."""
    return len(RESULTS) * layers + 1


def result_name(index: int, results: int) -> str:
    """A result as a person calls it."""
    if index == results - 1:
        return "x after the last layer"
    return f"layer {index // len(RESULTS)}, {RESULTS[index % len(RESULTS)]}"


def check_mode(mode: str) -> None:
    """Require one of the two ways in which scales may follow what is read."""
    if mode not in get_args(Fp8Scales):
        raise InputError(f"FP8 scales are {' or '.join(get_args(Fp8Scales))}, not {mode!r}")


class Fp8Scaling:
    """The scales of one model, the maxima and counts that its passes leave, and how scales follow them."""

    def __init__(
        self,
        calibrated: ActivationScales,
        weight_scales: Sequence[Tensor],
        *,
        mode: Fp8Scales = "frozen",
        history: int = HISTORY,
        bf16: Parts = frozenset(),
        max_rows: int = 0,
    ) -> None:
        """``weight_scales``: those of each layer's ``READERS``, in order, [1] or [N], as the GEMMs read them.

        Parts in ``bf16`` have scales that nobody reads. ``max_rows``: of a pass, where any part is in BF16.
        """
        check_mode(mode)
        if history < 1:
            raise InputError(f"running FP8 scales remember at least one pass, not {history}")
        self.mode = mode
        self.bf16 = bf16
        self.results = len(weight_scales) + 1
        device = weight_scales[0].device
        counts = [scale.numel() for scale in weight_scales]
        self._weight_scales = torch.cat(list(weight_scales))
        self._read = torch.arange(self.results - 1).repeat_interleave(torch.tensor(counts)).to(device)
        self._sums = torch.empty_like(self._weight_scales)
        self._scale, self._amax, self._ratio, self._peak, self._largest = (
            torch.zeros(self.results, device=device) for _ in range(5)
        )
        self._saturated = torch.zeros(self.results, dtype=torch.int32, device=device)  # of one pass
        self._total = torch.zeros(self.results, dtype=torch.int64, device=device)
        self._history = torch.zeros(history, self.results, device=device)
        self._begun = 0  # passes that began a sequence

        outputs = [
            Fp8Output(self._scale[i : i + 1], self._amax[i : i + 1], self._saturated[i : i + 1])
            for i in range(self.results)
        ]
        sums = torch.split(self._sums, counts)
        order = torch.arange(max_rows, dtype=torch.int32, device=device) if bf16 else None
        self.embedding = None if Part(0, "attention") in bf16 else outputs[0]
        self.blocks = [
            block_scales(layer, bf16, sums[4 * layer : 4 * layer + 4], outputs[4 * layer : 4 * layer + 5], order)
            for layer in range(self.results // len(RESULTS))
        ]
        self.use(calibrated)

    def use(self, calibrated: ActivationScales) -> None:
        """Begin anew from these scales, with nothing recorded."""
        calibrated.check(self.results)
        self.calibrated = calibrated
        self.reset()

    def reset(self) -> None:
        """Back to the calibrated scales; nothing recorded."""
        scale, amax = self.calibrated.scale, self.calibrated.amax
        self._scale.copy_(scale)
        self._ratio.copy_(torch.where(amax > 0, scale / amax, scale_of(torch.tensor(float(HEADROOM)))))
        self._history.copy_(amax)
        for counted in (self._amax, self._saturated, self._largest, self._total):
            counted.zero_()
        self._begun = 0
        self.scale_sums()

    def finish_pass(self, *, begins: bool = True) -> None:
        """Take in what a pass has recorded; running scales follow. Launches only, outside any chain.

        ``begins``: a sequence begins in it. Its first token has the largest magnitudes by far, so passes without one
        must not displace those that have seen one: after 20 of one token each, scales followed these, and SmolLM2-135M
        read the next text with a perplexity of 92 instead of 47.
        """
        torch.maximum(self._largest, self._amax, out=self._largest)
        self._total.add_(self._saturated)
        if self.mode == "running":
            torch.amax(self._history, 0, out=self._peak)
            # A magnitude that is not finite is a fault of the input or the weights, and says nothing about a scale.
            observed = torch.where(self._amax.isfinite(), self._amax, self._peak)
            if begins:
                self._history[self._begun % len(self._history)].copy_(observed)
            else:
                latest = self._history[(self._begun - 1) % len(self._history)]
                torch.maximum(latest, observed, out=latest)
            torch.amax(self._history, 0, out=self._peak)
            followed = (self._peak * self._ratio).clamp_(min=SMALLEST_SCALE)
            self._scale.copy_(torch.where(self._peak > 0, followed, 1.0))
            self.scale_sums()
        self._amax.zero_()
        self._saturated.zero_()
        self._begun += begins

    def scale_sums(self) -> None:
        """Bring the scales of the sums up to those of the results."""
        torch.mul(self._scale[self._read], self._weight_scales, out=self._sums)

    # What the user may ask for; these wait for the device.

    def scale(self) -> Tensor:
        """The scales that the next pass will write by, float32 [4 L + 1]."""
        return self._scale.to("cpu", copy=True)

    def largest(self) -> Tensor:
        """The largest magnitude of each result since the last reset, float32 [4 L + 1]."""
        return self._largest.to("cpu", copy=True)

    def saturated(self) -> dict[str, int]:
        """How many values have saturated since the last reset, by result; those without any are left out."""
        counts = self._total.tolist()
        return {result_name(index, self.results): count for index, count in enumerate(counts) if count}


def block_scales(
    layer: int, bf16: Parts, sums: Sequence[Tensor], outputs: Sequence[Fp8Output], order: Tensor | None
) -> BlockScales:
    """A layer's scales from those of its four sums, and of the results from x before qkv to x after down."""
    begin, attended, middle, h, end = outputs
    attention, mlp = Part(layer, "attention") not in bf16, Part(layer, "mlp") not in bf16
    return BlockScales(
        qkv=sums[0] if attention else None,
        o=sums[1] if attention else None,
        gate_up=sums[2] if mlp else None,
        down=sums[3] if mlp else None,
        attended=attended if attention else None,
        middle=middle if attention or mlp else None,
        h=h if mlp else None,
        end=end if mlp else None,
        begin=begin if attention and Part(layer - 1, "mlp") in bf16 else None,
        order=order,
    )
