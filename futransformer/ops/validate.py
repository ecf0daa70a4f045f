"""Checks of what a caller hands to an op: one InputError that names the op, the argument and the remedy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from futransformer.arguments import Argument
from futransformer.generator.errors import InputError
from futransformer.generator.precision import BF16, E4M3, INT4
from futransformer.ops.interface import Fp8Output

# A GEMM's arguments that are accessed sixteen bytes at a time.
VECTOR_ARGUMENTS = ("x", "weight", "rope_table", "q", "k_pages", "v_pages", "kv_copy", "residual", "out", "out_fp8")

DTYPES = {BF16: torch.bfloat16, E4M3: torch.float8_e4m3fn, INT4: torch.uint8}  # of elements in memory


def check_tensor(
    op: str, name: str, tensor: Tensor, shape: Sequence[int | None], dtype: torch.dtype, device: torch.device
) -> None:
    """Require a contiguous tensor of this shape (None: any extent), type and device."""
    if not isinstance(tensor, Tensor):
        raise InputError(f"{op}: {name} must be a tensor, not {type(tensor).__name__}")
    if tensor.dtype != dtype:
        remedy = f"convert it with .to({dtype})"
        if torch.uint8 in (dtype, tensor.dtype):
            remedy = "no conversion makes codes of it: see pack, and futransformer.quantize.int4 and .fp8"
        elif torch.float8_e4m3fn in (dtype, tensor.dtype):
            remedy = "no conversion gives codes their scale: see futransformer.quantize.fp8, and fp8= of the operations"
        raise InputError(f"{op}: {name} must be {dtype}, not {tensor.dtype}; {remedy}")
    if tensor.device != device and (device.index is not None or tensor.device.type != device.type):
        raise InputError(f"{op}: {name} is on {tensor.device}, the kernels are on {device}; move it there")
    extents = tensor.shape
    # a list: some eight checks a launch, and a generator takes twice as long
    if len(shape) != len(extents) or False in [want in (None, have) for want, have in zip(shape, extents, strict=True)]:
        wanted = ", ".join("any" if extent is None else str(extent) for extent in shape)
        raise InputError(f"{op}: {name} must have shape [{wanted}], not {list(extents)}")
    if not tensor.is_contiguous():
        raise InputError(f"{op}: {name} must be contiguous, its strides are {tensor.stride()}; call .contiguous()")


def fp8_arguments(op: str, written: bool, fp8: Fp8Output | None, device: torch.device) -> dict[str, Tensor]:
    """Check what an FP8 result, if one is written, is written with; name it as the kernels do."""
    if written != (fp8 is not None):
        needs = "writes FP8 and needs fp8, the scale of its result" if written else "writes no FP8: leave fp8 out"
        raise InputError(f"{op}: the kernel {needs}")
    if fp8 is None:
        return {}
    if not isinstance(fp8, Fp8Output):
        raise InputError(f"{op}: fp8 must be an Fp8Output (scale, amax, saturated), not {type(fp8).__name__}")
    for name, tensor, dtype in zip(fp8._fields, fp8, (torch.float32, torch.float32, torch.int32), strict=True):
        check_tensor(op, f"fp8.{name}", tensor, (1,), dtype, device)
    return {"out_scale": fp8.scale, "amax": fp8.amax, "saturated": fp8.saturated}


def gain_argument(op: str, taken: bool, gain: Tensor | None, hidden: int, device: torch.device) -> dict[str, Tensor]:
    """Check the gain that the stream is written with, if the kernel takes one."""
    if taken != (gain is not None):
        needs = "needs the gain of the next norm" if taken else "takes no gain: the next weight holds it"
        raise InputError(f"{op}: the kernel {needs}")
    if gain is None:
        return {}
    check_tensor(op, "gain", gain, (hidden,), torch.float32, device)
    check_aligned(op, "gain", gain, 16)
    return {"gain": gain}


def check_phase(op: str, phase: str) -> None:
    """Require one of the two phases, in whose layouts weights are packed and kernels are kept."""
    if phase not in ("prefill", "decode"):
        raise InputError(f'{op}: phase must be "prefill" or "decode", not {phase!r}')


def check_aligned(op: str, name: str, tensor: Tensor, alignment: int) -> None:
    """Require that the tensor's first byte stands at a multiple of ``alignment`` bytes, as vector accesses need."""
    if tensor.data_ptr() % alignment:
        raise InputError(
            f"{op}: {name} starts at {tensor.data_ptr():#x}, not at a multiple of {alignment} bytes; call .clone()"
        )


def check_vector_arguments(op: str, arguments: Mapping[str, Argument]) -> None:
    """Require sixteen-byte alignment of those of a GEMM's arguments that need it."""
    for name in VECTOR_ARGUMENTS:
        value = arguments.get(name)
        if isinstance(value, Tensor):
            check_aligned(op, name, value, 16)
