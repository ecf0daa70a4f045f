"""From a CUDA source to a cubin in the cache: tool chain, fingerprint, compilation, manifest."""

from .compile import BuildEvent, build_kernels
from .export import export, load_exported
from .load import load_or_build
from .manifest import KernelRecord, ModelManifest, load_cubin
from .settings import BuildSettings

__all__ = [
    "BuildEvent",
    "BuildSettings",
    "KernelRecord",
    "ModelManifest",
    "build_kernels",
    "export",
    "load_cubin",
    "load_exported",
    "load_or_build",
]
