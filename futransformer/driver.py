"""The CUDA driver through cuda.bindings: checked calls, a loaded kernel, and its launch.

A kernel's arguments are written by the list in its manifest record into storage that is made once (``Arguments``), so
nothing is allocated and nothing synchronises on the hot path, and every launch can be captured in a CUDA graph. A
kernel object is not thread-safe: two threads need two libraries.

Launches in a ``LaunchChain`` overlap: a kernel may start, and fetch what is constant to the chain, while its
predecessor still runs (programmatic dependent launch). Results do not depend on it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from futransformer.arguments import Argument, Arguments
from futransformer.generator.errors import DeviceError

if TYPE_CHECKING:
    from futransformer.build.manifest import KernelRecord
    from futransformer.generator.specs import KernelSpec

_ALL_SHARED = 100  # per cent of what L1 and shared memory have between them that may be shared


def check(result: tuple[Any, ...]) -> Any:
    """Unwrap a cuda.bindings result; DeviceError names the driver's error."""
    from cuda.bindings import driver  # noqa: PLC0415  (importing it needs libcuda's loader, which not every machine has)

    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        text = driver.cuGetErrorString(status)[1]
        raise DeviceError(f"CUDA driver: {status.name}: {text.decode() if text else 'no description'}")
    return values[0] if len(values) == 1 else tuple(values)


def hopper_problem() -> str | None:
    """Say why the generated kernels cannot run here, or None when they can."""
    if not torch.cuda.is_available():
        reason = "torch was built without CUDA" if torch.version.cuda is None else "torch finds no usable CUDA device"
        return f"no Hopper GPU: {reason}"
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) != (9, 0):
        name = torch.cuda.get_device_name()
        return (
            f"no Hopper GPU: {name} has compute capability {major}.{minor}; the kernels are built for 9.0 (H100, H200)"
        )
    return None


def require_hopper() -> torch.device:
    """Return the current Hopper device; DeviceError says what is missing and what to do instead."""
    problem = hopper_problem()
    if problem is not None:
        raise DeviceError(
            f"{problem}; use the CPU reference (futransformer.reference.ReferenceOps(config); run and perplexity "
            "have --reference), or a machine with an H100 or H200"
        )
    return torch.device("cuda", torch.cuda.current_device())


class LaunchChain:
    """Which launches may start before their predecessor has ended: inside ``with chain``, all but the first.

    What was written before the chain's first launch is constant to its kernels, which may read it early. So a weight,
    a table, a length or a key of an earlier token must not be written inside the chain.
    """

    def __init__(self) -> None:
        """Begin closed; ``enabled = False`` makes every launch an ordinary one."""
        self.enabled = True
        self._links: int | None = None  # launches so far; None outside

    def __enter__(self) -> None:
        assert self._links is None, "chains do not nest"
        self._links = 0

    def __exit__(self, *_: object) -> None:
        self._links = None

    def link(self) -> bool:
        """Count a launch; say whether it may overlap the one before."""
        if self._links is None:
            return False
        self._links += 1
        return self.enabled and self._links > 1


class Kernel:
    """A loaded kernel. ``launch`` takes its arguments by parameter name."""

    def __init__(
        self,
        spec: KernelSpec,
        record: KernelRecord,
        cubin: bytes,
        device: torch.device,
        chain: LaunchChain | None = None,
    ) -> None:
        from cuda.bindings import driver  # noqa: PLC0415

        torch.cuda.current_stream(device)  # the primary context exists from here on
        self.spec = spec
        self.record = record
        self.device = device
        self.sm_count: int = torch.cuda.get_device_properties(device).multi_processor_count
        self._driver = driver
        self._cubin = cubin  # the driver may read it for as long as the library lives
        self._library = check(driver.cuLibraryLoadData(cubin, [], [], 0, [], [], 0))
        kernel = check(driver.cuLibraryGetKernel(self._library, record.name.encode()))
        ordinal = check(driver.cuDeviceGet(device.index))
        # Torch's, which it keeps as long as the process lives.
        self._context = check(driver.cuDevicePrimaryCtxRetain(ordinal))
        attribute = driver.CUfunction_attribute
        if record.shared_bytes:
            dynamic = attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            check(driver.cuKernelSetAttribute(dynamic, record.shared_bytes, kernel, ordinal))
        if spec.dependent_launch:
            # A multiprocessor that must first shift memory from L1 to shared holds nothing of another kernel meanwhile.
            carveout = attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
            check(driver.cuKernelSetAttribute(carveout, _ALL_SHARED, kernel, ordinal))
        self._function = check(driver.cuKernelGetFunction(kernel))
        self._chain = chain if spec.dependent_launch else None
        self._config = self._launch_config(dependent=False)
        self._dependent_config = self._launch_config(dependent=True)
        self._arguments = Arguments(record.name, record.params)

    def _launch_config(self, *, dependent: bool) -> Any:
        driver, record = self._driver, self.record
        config = driver.CUlaunchConfig()
        config.blockDimX, config.blockDimY, config.blockDimZ = record.threads, 1, 1
        config.sharedMemBytes = record.shared_bytes
        attributes = []
        if tuple(record.cluster) != (1, 1, 1):
            cluster = driver.CUlaunchAttribute()
            cluster.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            value = driver.CUlaunchAttributeValue()
            value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = record.cluster
            cluster.value = value
            attributes.append(cluster)
        if dependent:
            overlap = driver.CUlaunchAttribute()
            overlap.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            value = driver.CUlaunchAttributeValue()
            value.programmaticStreamSerializationAllowed = 1
            overlap.value = value
            attributes.append(overlap)
        if self.spec.cooperative:
            together = driver.CUlaunchAttribute()
            together.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
            value = driver.CUlaunchAttributeValue()
            value.cooperative = 1
            together.value = value
            attributes.append(together)
        config.attrs, config.numAttrs = attributes, len(attributes)
        return config

    def launch(self, grid: tuple[int, int, int], **arguments: Argument) -> None:
        """Launch on the current torch stream. A missing or unknown argument is an error, never a stale value."""
        self._arguments.write(arguments)
        overlaps = self._chain is not None and self._chain.link()
        config = self._dependent_config if overlaps else self._config
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.hStream = torch.cuda.current_stream(self.device).cuda_stream
        results = self._driver.CUresult
        launched = self._driver.cuLaunchKernelEx(config, self._function, self._arguments.address, 0)
        if launched[0] == results.CUDA_ERROR_INVALID_CONTEXT:  # a thread's first call to the driver
            check(self._driver.cuCtxSetCurrent(self._context))
            launched = self._driver.cuLaunchKernelEx(config, self._function, self._arguments.address, 0)
        if launched[0] == results.CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE:
            raise DeviceError(
                f"{self.record.name}: its {grid[0]} blocks must all run at once, and this process has too few "
                "multiprocessors of the card: give it the whole card, or load with batch_invariant=True, which runs "
                "layers by single kernels"
            )
        if launched[0] != results.CUDA_SUCCESS:
            check(launched)
