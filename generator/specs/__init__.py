"""Kernel specifications, one module a kind of kernel."""

from ..kv_format import PAGE_SIZE
from .attention_decode import AttentionDecodeSpec, copy_blocks
from .attention_prefill import AttentionPrefillSpec
from .base import ABI_VERSION, Heads, KernelSpec, Param, Tile
from .decode_gemm import DecodeGemmSpec
from .decode_layers import DecodeLayersSpec
from .gemm import GemmSpec
from .rows import ArgmaxPartsSpec, ArgmaxSpec, GatherRowsSpec
from .sampling import SampleSpec
from .step import StepBeginSpec, StepEndSpec

__all__ = [
    "ABI_VERSION",
    "PAGE_SIZE",
    "ArgmaxPartsSpec",
    "ArgmaxSpec",
    "AttentionDecodeSpec",
    "AttentionPrefillSpec",
    "DecodeGemmSpec",
    "DecodeLayersSpec",
    "GatherRowsSpec",
    "GemmSpec",
    "Heads",
    "KernelSpec",
    "Param",
    "SampleSpec",
    "StepBeginSpec",
    "StepEndSpec",
    "Tile",
    "copy_blocks",
]
