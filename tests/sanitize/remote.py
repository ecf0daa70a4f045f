"""A kernel library on the CPU whose kernels run on the GPU, one launch at a time.

Every launch copies its tensors to allocations of exactly their sizes and back again, and so it does those whose
addresses stand in a table that it is given: the table is written anew, of the copies' addresses. So PyTorch runs
nothing of its own on the GPU that a tool would have to look through, and with PYTORCH_NO_CUDA_MEMORY_CACHING=1 a tool
sees where each tensor really ends: the rows behind an output, which the tests poison, are not there at all. Kernels do
not overlap, which is nothing that a tool would let them do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from futransformer import library
from futransformer.build.load import LoadedKernels
from futransformer.driver import Kernel, require_hopper
from futransformer.generator.config import LlamaConfig
from futransformer.generator.plan import Plan
from futransformer.generator.precision import Precision
from futransformer.generator.specs import DecodeLayersSpec, KernelSpec
from futransformer.library import KernelLibrary
from futransformer.ops import attention_decode, attention_prefill, decode_gemm, decode_layers, gemm
from futransformer.ops.decode_layers import address_table
from futransformer.tma import TensorMap, tensor_map_2d, tensor_map_column_groups
from tests.ops.stand_in import CPU, stand_in_library, with_poisoned_outputs


@dataclass(frozen=True)
class HostMap:
    """A tensor map of a tensor on the host, to be encoded once the tensor has been copied."""

    tensor: Tensor
    encode: Callable[[Tensor], TensorMap]


@dataclass(frozen=True)
class HostTable:
    """A table of addresses of tensors on the host, to be written once the tensors have been copied."""

    rows: tuple[tuple[Tensor, ...], ...]

    def __len__(self) -> int:
        return len(self.rows)


class RemoteKernel:
    """A kernel that takes tensors of the host; ``launched`` hears the name at every launch."""

    def __init__(self, kernel: Kernel, launched: Callable[[str], None]) -> None:
        self.kernel, self.launched = kernel, launched
        self.spec, self.device, self.sm_count = kernel.spec, CPU, kernel.sm_count
        self._written = {p.name for p in kernel.record.params if p.kind == "pointer" and "const" not in p.ctype}

    def launch(self, grid: tuple[int, int, int], **arguments: Any) -> None:
        """Copy, launch, wait, copy back what the kernel may write."""
        copies: dict[tuple[int, int], Tensor] = {}  # by address and elements: a tensor may be given as two arguments

        def on_device(tensor: Tensor) -> Tensor:
            span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
            elements = span if tensor.numel() else 0
            key = tensor.data_ptr(), elements
            if key not in copies:
                copies[key] = tensor.as_strided((elements,), (1,)).to(self.kernel.device, copy=True)
            return copies[key].as_strided(tensor.shape, tensor.stride())

        def translated(value: Any) -> Any:
            if isinstance(value, HostMap):
                return value.encode(on_device(value.tensor))
            if isinstance(value, HostTable):
                return address_table([[on_device(tensor) for tensor in row] for row in value.rows], self.kernel.device)
            return on_device(value) if isinstance(value, Tensor) else value

        translated_arguments = {name: translated(value) for name, value in arguments.items()}
        self.launched(self.spec.name)
        self.kernel.launch(grid, **translated_arguments)
        torch.cuda.synchronize()
        for name in self._written & arguments.keys():
            arguments[name].copy_(translated_arguments[name])
        for table in (value for value in arguments.values() if isinstance(value, HostTable)):
            for tensor in (tensor for row in table.rows for tensor in row):  # of which nothing says that it is const
                tensor.copy_(on_device(tensor))


def remote_kernel(spec: KernelSpec, built: LoadedKernels, launched: Callable[[str], None]) -> RemoteKernel:
    """Load one kernel."""
    return RemoteKernel(Kernel(spec, *built[spec.name], require_hopper()), launched)


def host_table(rows: Sequence[Sequence[Tensor]], _: torch.device) -> HostTable:
    """What stands for ``address_table`` of tensors on the host."""
    return HostTable(tuple(map(tuple, rows)))


def map_on_the_host(patch: pytest.MonkeyPatch) -> None:
    """Let the ops describe tensors of the host, and tables of them, as long as the patch lasts."""

    def rows_and_columns(tensor: Tensor, rows: int, columns: int) -> HostMap:
        return HostMap(tensor, lambda copy: tensor_map_2d(copy, rows, columns))

    def column_groups(tensor: Tensor, box: tuple[int, int, int]) -> HostMap:
        return HostMap(tensor, lambda copy: tensor_map_column_groups(copy, box))

    for module in (attention_decode, attention_prefill, gemm):
        patch.setattr(module, "tensor_map_2d", rows_and_columns)
    patch.setattr(decode_gemm, "tensor_map_column_groups", column_groups)
    patch.setattr(decode_layers, "address_table", host_table)


def remote_library(
    config: LlamaConfig,
    precision: Precision,
    plan: Plan,
    built: LoadedKernels,
    patch: pytest.MonkeyPatch,
    launched: Callable[[str], None],
) -> KernelLibrary:
    """The library of a model; outputs begin as NaN."""
    patch.setattr(library, "Kernel", lambda spec, *_: remote_kernel(spec, built, launched))
    map_on_the_host(patch)
    ops = KernelLibrary(config, precision, plan, built, CPU)
    ops.capturable = False
    return with_poisoned_outputs(ops)


def layers_library(
    config: LlamaConfig,
    precision: Precision,
    spec: DecodeLayersSpec,
    built: LoadedKernels,
    patch: pytest.MonkeyPatch,
    launched: Callable[[str], None],
) -> KernelLibrary:
    """A library whose launch for all layers runs on the GPU; whatever else is asked for the reference answers."""
    ops = stand_in_library(config, patch, precision=precision)
    patch.setattr(decode_layers, "address_table", host_table)
    ops._decode_layers = cast(Kernel, remote_kernel(spec, built, launched))
    return ops
