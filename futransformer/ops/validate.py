"""Checks of what a caller hands to an op: one InputError that names the op, the argument and the remedy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from futransformer.arguments import Argument
from futransformer.generator.errors import InputError

# A GEMM's arguments that are accessed sixteen bytes at a time.
VECTOR_ARGUMENTS = ("x", "weight", "rope_table", "q", "k_pages", "v_pages", "residual", "out")


def check_tensor(
    op: str, name: str, tensor: Tensor, shape: Sequence[int | None], dtype: torch.dtype, device: torch.device
) -> None:
    """Require a contiguous tensor of this shape (None: any extent), type and device."""
    if not isinstance(tensor, Tensor):
        raise InputError(f"{op}: {name} must be a tensor, not {type(tensor).__name__}")
    if tensor.dtype != dtype:
        raise InputError(f"{op}: {name} must be {dtype}, not {tensor.dtype}; convert it with .to({dtype})")
    if tensor.device.type != device.type or (device.index is not None and tensor.device != device):
        raise InputError(f"{op}: {name} is on {tensor.device}, the kernels are on {device}; move it there")
    fits = len(shape) == tensor.dim() and all(
        want in (None, have) for want, have in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if extent is None else str(extent) for extent in shape)
        raise InputError(f"{op}: {name} must have shape [{wanted}], not {list(tensor.shape)}")
    if not tensor.is_contiguous():
        raise InputError(f"{op}: {name} must be contiguous, its strides are {tensor.stride()}; call .contiguous()")


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
