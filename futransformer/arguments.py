"""A kernel's arguments in the storage that the driver reads at a launch.

One place a parameter, in the order of the manifest's list, made once: writing the arguments of a launch allocates
nothing, and the driver copies them while it launches. Pointers, int32 and float32 lie in ctypes objects, tensor maps in
one buffer at multiples of 128 bytes, as cuTensorMapEncodeTiled's results must.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from futransformer.generator.errors import InputError
from futransformer.generator.specs import Param
from futransformer.tma import TensorMap

Argument = Tensor | int | float | TensorMap

TENSOR_MAP_BYTES = 128  # also their alignment

_SCALARS: dict[str, Any] = {"pointer": ctypes.c_void_p, "int32": ctypes.c_int32, "float32": ctypes.c_float}


class Arguments:
    """The places of one kernel's parameters; ``address`` is the array of their addresses (kernelParams)."""

    def __init__(self, kernel: str, params: Sequence[Param]) -> None:
        """Make the places; ``kernel`` is named when arguments do not fit."""
        self._kernel = kernel
        self._places: list[tuple[str, str, Any]] = []
        maps = sum(param.kind == "tensor_map" for param in params)
        self._maps = ctypes.create_string_buffer((maps + 1) * TENSOR_MAP_BYTES)
        next_map = -(-ctypes.addressof(self._maps) // TENSOR_MAP_BYTES) * TENSOR_MAP_BYTES
        addresses = []
        for param in params:
            if param.kind == "tensor_map":
                place, address = next_map, next_map
                next_map += TENSOR_MAP_BYTES
            else:
                place = _SCALARS[param.kind]()
                address = ctypes.addressof(place)
            self._places.append((param.name, param.kind, place))
            addresses.append(address)
        self._addresses = (ctypes.c_void_p * len(addresses))(*addresses)
        self.address = ctypes.addressof(self._addresses)

    def write(self, arguments: Mapping[str, Argument]) -> None:
        """Write one launch's arguments. A missing or unknown one is an InputError, never a stale value."""
        if len(arguments) != len(self._places):
            raise self._misfit(arguments)
        try:
            for name, kind, place in self._places:
                value: Any = arguments[name]
                if kind == "pointer":
                    place.value = value.data_ptr()
                elif kind == "tensor_map":
                    ctypes.memmove(place, value.address, TENSOR_MAP_BYTES)
                else:
                    place.value = value
        except (KeyError, AttributeError, TypeError):
            raise self._misfit(arguments) from None

    def _misfit(self, arguments: Mapping[str, Argument]) -> InputError:
        """Say which arguments are missing, unknown or of another kind."""
        wanted = {name: kind for name, kind, _ in self._places}
        faults = [f"lacks {name} ({kind})" for name, kind in wanted.items() if name not in arguments]
        faults += [f"has no parameter {name}" for name in arguments if name not in wanted]
        faults += [
            f"takes {name} as {wanted[name]}, not {type(value).__name__}"
            for name, value in arguments.items()
            if name in wanted and not _is_a(wanted[name], value)
        ]
        return InputError(f"{self._kernel} {'; it '.join(faults)}")


def _is_a(kind: str, value: Argument) -> bool:
    if kind == "pointer":
        return isinstance(value, Tensor)
    if kind == "tensor_map":
        return isinstance(value, TensorMap)
    return isinstance(value, int) or (kind == "float32" and isinstance(value, float))
