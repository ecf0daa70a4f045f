"""The typed errors of FuTransformer; every message says what was wrong, where, and what to do."""


class FuTransformerError(Exception):
    """Base of every error that FuTransformer raises on purpose."""


class ConfigError(FuTransformerError):
    """A model configuration is malformed, or asks for something that cannot be served."""


class UnsupportedError(FuTransformerError):
    """A request that no generated kernel serves; the message lists what is supported."""


class ToolchainError(FuTransformerError):
    """nvcc, the host compiler or the CUTLASS headers are missing or unusable."""


class BuildError(FuTransformerError):
    """A kernel did not compile, spilled registers, or could not be published; carries the compiler's words."""


class ArtifactError(FuTransformerError):
    """A built kernel is missing, corrupt, or belongs to another ABI."""


class DeviceError(FuTransformerError):
    """No usable Hopper GPU, or a CUDA driver call failed."""


class InputError(FuTransformerError, ValueError):
    """A tensor, prompt or argument does not fit the operation."""


class OutOfMemoryError(FuTransformerError):
    """A model or cache does not fit the device's memory; the message gives the numbers."""


class CheckpointError(FuTransformerError):
    """A checkpoint folder is incomplete, corrupt, or not the model that its config describes."""
