"""Which GPU is here, asked of the driver alone: without torch, and without a context on it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Card:
    """A kind of GPU."""

    name: str
    multiprocessors: int


def current_card(ordinal: int = 0) -> Card | None:
    """Return the GPU of that number among the visible ones; None where there is none, or no driver."""
    try:
        from cuda.bindings import driver  # noqa: PLC0415 - importing it needs libcuda's loader, which not every machine has

        if driver.cuInit(0)[0] != driver.CUresult.CUDA_SUCCESS:
            return None
        status, device = driver.cuDeviceGet(ordinal)
        if status != driver.CUresult.CUDA_SUCCESS:
            return None
        _, name = driver.cuDeviceGetName(256, device)
        count = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
        _, multiprocessors = driver.cuDeviceGetAttribute(count, device)
    except (ImportError, OSError, RuntimeError):
        return None
    return Card(name.partition(b"\0")[0].decode(), int(multiprocessors))
