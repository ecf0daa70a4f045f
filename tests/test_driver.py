"""What reaches the CUDA driver: arguments in their places, and which device is accepted. No GPU is needed."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from futransformer.arguments import TENSOR_MAP_BYTES, Arguments
from futransformer.driver import Kernel, LaunchChain, check, hopper_problem, require_hopper
from futransformer.generator.errors import DeviceError, FuTransformerError, InputError
from futransformer.generator.specs import Param
from futransformer.tma import TensorMap

PARAMS = (
    Param("x", "tensor_map"),
    Param("rows", "int32"),
    Param("out", "pointer", "float"),
    Param("weight", "tensor_map"),
    Param("scale", "float32"),
)


def tensor_map(fill: int) -> TensorMap:
    """Stand in for an encoded map: 128 equal bytes."""
    encoded = ctypes.create_string_buffer(bytes([fill]) * TENSOR_MAP_BYTES, TENSOR_MAP_BYTES)
    return TensorMap(encoded, ctypes.addressof(encoded))


def some_arguments(**changes: Any) -> dict[str, Any]:
    fitting = {"x": tensor_map(1), "rows": 7, "out": torch.zeros(3), "weight": tensor_map(2), "scale": 0.5}
    return {**fitting, **changes}


def read(arguments: Arguments) -> list[Any]:
    """What the driver would read through kernelParams."""
    addresses = (ctypes.c_void_p * len(PARAMS)).from_address(arguments.address)
    kinds: dict[str, Any] = {"int32": ctypes.c_int32, "float32": ctypes.c_float, "pointer": ctypes.c_void_p}
    return [
        ctypes.string_at(address, TENSOR_MAP_BYTES)
        if param.kind == "tensor_map"
        else kinds[param.kind].from_address(address).value
        for param, address in zip(PARAMS, addresses, strict=True)
    ]


def test_every_argument_stands_in_its_place() -> None:
    arguments, out = Arguments("a_kernel", PARAMS), torch.zeros(3)
    written = some_arguments(out=out)
    # by name, in whatever order they are given
    arguments.write(dict(reversed(written.items())))
    assert read(arguments) == [b"\x01" * 128, 7, out.data_ptr(), b"\x02" * 128, 0.5]
    arguments.write({**written, "rows": -1, "scale": 3, "weight": tensor_map(9)})
    assert read(arguments) == [b"\x01" * 128, -1, out.data_ptr(), b"\x09" * 128, 3.0]


def test_tensor_maps_are_aligned_as_the_driver_asks() -> None:
    params = [Param(f"map{index}", "tensor_map") for index in range(5)]
    arguments = Arguments("a_kernel", params)
    addresses = list((ctypes.c_void_p * 5).from_address(arguments.address))
    assert all(address is not None and address % 128 == 0 for address in addresses)
    arguments.write({param.name: tensor_map(index) for index, param in enumerate(params)})
    for index, address in enumerate(addresses):
        assert address is not None
        assert ctypes.string_at(address, 128) == bytes([index]) * 128


@pytest.mark.parametrize(
    ("changes", "dropped", "message"),
    [
        ({}, "out", r"a_kernel lacks out \(pointer\)$"),
        ({"bias": 1}, None, "a_kernel has no parameter bias$"),
        ({"bias": 1}, "scale", r"a_kernel lacks scale \(float32\); it has no parameter bias$"),  # as many as wanted
        ({"x": torch.zeros(3)}, None, "a_kernel takes x as tensor_map, not Tensor$"),
        ({"out": None}, None, "a_kernel takes out as pointer, not NoneType$"),
        ({"rows": 1.5}, None, "a_kernel takes rows as int32, not float$"),
        ({"scale": "half"}, None, "a_kernel takes scale as float32, not str$"),
    ],
)
def test_arguments_that_do_not_fit_are_named(changes: dict[str, Any], dropped: str | None, message: str) -> None:
    arguments = some_arguments(**changes)
    if dropped is not None:
        del arguments[dropped]
    with pytest.raises(InputError, match=message):
        Arguments("a_kernel", PARAMS).write(arguments)


def test_a_launch_with_a_wrong_argument_reaches_no_driver() -> None:
    kernel = Kernel.__new__(Kernel)  # loading one takes a GPU
    kernel._arguments = Arguments("a_kernel", PARAMS)
    kernel._driver = SimpleNamespace(cuLaunchKernelEx=lambda *_: pytest.fail("launched"))
    with pytest.raises(InputError, match="a_kernel has no parameter colour"):
        kernel.launch((1, 1, 1), **some_arguments(colour=3))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """A driver whose calls succeed."""
    pytest.importorskip("cuda.bindings.driver")
    driver = MagicMock()
    for name in (
        "CtxSetCurrent",
        "DeviceGet",
        "DevicePrimaryCtxRetain",
        "KernelGetFunction",
        "KernelSetAttribute",
        "LaunchKernelEx",
        "LibraryGetKernel",
        "LibraryLoadData",
    ):
        getattr(driver, f"cu{name}").return_value = (driver.CUresult.CUDA_SUCCESS, f"of {name}")
    driver.CUlaunchConfig.side_effect = driver.CUlaunchAttribute.side_effect = SimpleNamespace
    monkeypatch.setattr("cuda.bindings.driver", driver)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
    return driver


def loaded_kernel(chain: LaunchChain | None = None, *, waits: bool = False, together: bool = False) -> Kernel:
    spec: Any = SimpleNamespace(dependent_launch=waits, cooperative=together)
    record: Any = SimpleNamespace(name="k", params=(), shared_bytes=0, threads=32, cluster=(1, 1, 1))
    return Kernel(spec, record, b"", torch.device("cuda", 0), chain)


def test_a_launch_from_a_thread_without_a_context_is_repeated_in_torchs(driver: MagicMock) -> None:
    missing, success = (driver.CUresult.CUDA_ERROR_INVALID_CONTEXT,), (driver.CUresult.CUDA_SUCCESS,)
    driver.cuLaunchKernelEx.side_effect = [missing, success, success]
    kernel = loaded_kernel()
    kernel.launch((1, 1, 1))
    driver.cuCtxSetCurrent.assert_called_once_with("of DevicePrimaryCtxRetain")
    kernel.launch((1, 1, 1))
    assert driver.cuLaunchKernelEx.call_count == 3
    driver.cuCtxSetCurrent.assert_called_once()


@pytest.mark.parametrize("waits", [False, True])
def test_only_a_kernel_that_waits_for_its_predecessor_may_overlap_it(driver: MagicMock, waits: bool) -> None:
    """Any other would read what its predecessor has yet to write."""
    launches: list[int] = []

    def launch(config: SimpleNamespace, *_: object) -> tuple[Any]:
        launches.append(config.numAttrs)
        return (driver.CUresult.CUDA_SUCCESS,)

    driver.cuLaunchKernelEx.side_effect = launch
    chain = LaunchChain()
    kernel = loaded_kernel(chain, waits=waits)
    with chain:
        for _ in range(3):
            kernel.launch((1, 1, 1))
    kernel.launch((1, 1, 1))
    assert launches == [0, int(waits), int(waits), 0]


# Devices


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "A GPU")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)


def test_a_hopper_gpu_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch, (9, 0))
    assert hopper_problem() is None
    assert require_hopper() == torch.device("cuda", 1)


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 9), (10, 0), (12, 0)])
def test_another_gpu_is_refused_by_name_and_capability(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
) -> None:
    """sm_90a code runs on compute capability 9.0 alone: on neither an older nor a newer card."""
    pretend_gpu(monkeypatch, capability)
    major, minor = capability
    with pytest.raises(
        DeviceError, match=rf"no Hopper GPU: A GPU has compute capability {major}\.{minor}; .*--reference"
    ):
        require_hopper()


@pytest.mark.parametrize(
    ("built_for", "reason"), [(None, "torch was built without CUDA"), ("13.0", "torch finds no usable CUDA device")]
)
def test_no_gpu_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, built_for: str | None, reason: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", built_for)
    with pytest.raises(DeviceError, match=f"no Hopper GPU: {reason}; use the CPU reference"):
        require_hopper()


def test_a_driver_error_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda.bindings import driver  # noqa: PLC0415 - as in the code under test

    success, failure = driver.CUresult.CUDA_SUCCESS, driver.CUresult.CUDA_ERROR_NO_BINARY_FOR_GPU
    assert check((success,)) == ()
    assert check((success, 5)) == 5
    assert check((success, 5, 6)) == (5, 6)
    monkeypatch.setattr(driver, "cuGetErrorString", lambda _: (success, b"no kernel image"))
    with pytest.raises(FuTransformerError, match="CUDA driver: CUDA_ERROR_NO_BINARY_FOR_GPU: no kernel image"):
        check((failure,))


def test_blocks_that_wait_for_one_another_run_at_once_or_not_at_all(driver: MagicMock) -> None:
    attribute = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
    kernel = loaded_kernel(together=True)
    assert [each.id for each in kernel._config.attrs] == [attribute]
    assert loaded_kernel()._config.attrs == []
    driver.cuLaunchKernelEx.return_value = (driver.CUresult.CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE,)
    with pytest.raises(DeviceError, match=r"132 blocks must all run at once.*batch_invariant=True"):
        kernel.launch((132, 1, 1))
