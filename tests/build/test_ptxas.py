"""What ptxas says, read; and the gate, with canned words and with real kernels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from futransformer.build.compile import build_kernels
from futransformer.build.ptxas import Resources, check_resources, parse_resources
from futransformer.build.sass import count_instructions, occurrences
from futransformer.build.settings import BuildSettings
from futransformer.generator.errors import BuildError
from tests.build.conftest import TinySpec

CLEAN = """\
ptxas info    : 11 bytes gmem
ptxas info    : Compiling entry function 'k' for 'sm_90a'
ptxas info    : Function properties for k
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 128 bytes smem, 400 bytes cmem[0]
ptxas info    : Compile time = 234.861 ms
"""

SPILLS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'k' for 'sm_90a'
ptxas info    : Function properties for k
    432 bytes stack frame, 824 bytes spill stores, 852 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 432 bytes cumulative stack size
"""

# A function that was not inlined keeps a stack of its own.
CALLS = """\
ptxas info    : Compiling entry function 'k' for 'sm_90a'
ptxas info    : Function properties for k
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 0 barriers, 16 bytes cumulative stack size
ptxas info    : Function properties for _Z5innerPf
    16 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
"""

SERIALISED = (
    "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to "
    "insufficient register resources for the wgmma pipeline in the function 'k'\n"
)
SETMAXNREG = (
    "ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored to maintain minimum register "
    "requirements.\n"
)


def judge(log: str) -> Resources:
    resources = parse_resources("k", log)
    check_resources("k", resources, log)
    return resources


def test_a_clean_kernel_passes() -> None:
    assert judge(CLEAN) == Resources(168, 0, 0, 0, 128)


def test_spills_are_refused_with_the_numbers() -> None:
    with pytest.raises(BuildError, match=r"kernel k: .*824 bytes stored, 852 bytes loaded.*432 bytes.*32 registers"):
        judge(SPILLS)


def test_a_stack_in_a_function_that_was_not_inlined_is_refused() -> None:
    with pytest.raises(BuildError, match=r"uses 16 bytes of local memory"):
        judge(CALLS)


def test_the_spills_of_all_functions_count() -> None:
    inner = "8 bytes stack frame, 4 bytes spill stores, 2 bytes spill loads"
    resources = parse_resources("k", f"{SPILLS}ptxas info    : Function properties for _Z5innerPf\n    {inner}\n")
    assert resources == Resources(32, 828, 854, 440, 0)


@pytest.mark.parametrize(
    "line",
    [
        SERIALISED,
        SERIALISED.replace("info    : (C7510)", "warning : (C7511)"),
        SERIALISED.replace("(C7510) Potential Performance Loss: ", ""),
        SETMAXNREG,
    ],
)
def test_serialised_wgmma_is_refused_with_ptxas_words(line: str) -> None:
    with pytest.raises(BuildError) as caught:
        judge(line + CLEAN)
    assert line.strip() in str(caught.value)


def test_other_remarks_are_no_fault() -> None:
    judge("kernel.cu(9): warning #177-D: variable was declared but never referenced\n" + CLEAN)


@pytest.mark.parametrize(
    ("log", "words"),
    [("", "none"), (CLEAN.replace("'k'", "'other'"), "other"), (CLEAN + CLEAN.replace("'k'", "'second'"), "second")],
)
def test_the_source_must_have_its_one_entry(log: str, words: str) -> None:
    with pytest.raises(BuildError, match=f"must have one entry, of that name; it has .*{words}"):
        parse_resources("k", log)


SPILLING_SOURCE = """\
extern "C" __global__ void __launch_bounds__(1024, 2) tiny(float* out, int n) {
  float v[96];
#pragma unroll
  for (int i = 0; i < 96; ++i) v[i] = out[i * 1024 + threadIdx.x];
  for (int r = 0; r < n; ++r)
#pragma unroll
    for (int i = 0; i < 96; ++i) v[i] = v[i] * v[(i + 7) % 96] + 1.0f;
#pragma unroll
  for (int i = 0; i < 96; ++i) out[i * 1024 + threadIdx.x] = v[i];
}
"""

INDEXED_SOURCE = """\
extern "C" __global__ void tiny(float* out, int n) {
  float v[64];
  for (int i = 0; i < 64; ++i) v[(i * n) % 64] = out[i];
  out[threadIdx.x] = v[n % 64];
}
"""

SOUND_SOURCE = """\
#include <cute/tensor.hpp>
#include <cuda.h>
extern "C" __global__ void tiny(float* out, int n) {
  __shared__ float staged[32];
  auto tensor = cute::make_tensor(cute::make_gmem_ptr(out), cute::make_shape(n));
  staged[threadIdx.x] = tensor(threadIdx.x);
  __syncthreads();
  tensor(threadIdx.x) = staged[31 - threadIdx.x] + float(sizeof(CUtensorMap));
}
"""


@pytest.fixture
def real(tmp_path: Path) -> BuildSettings:
    """The tool chain that is installed, and an empty cache in a folder with a space."""
    return replace(BuildSettings.from_environment(jobs=1), cache_root=tmp_path / "a cache")


@pytest.mark.compile
def test_a_real_kernel_that_spills_is_refused(real: BuildSettings) -> None:
    with pytest.raises(BuildError, match=r"kernel tiny: spills registers \(\d+ bytes stored, \d+ bytes loaded\)"):
        build_kernels((TinySpec(),), settings=real, render=lambda _: SPILLING_SOURCE)


@pytest.mark.compile
def test_a_real_kernel_in_local_memory_is_refused(real: BuildSettings) -> None:
    with pytest.raises(BuildError, match=r"kernel tiny: uses 256 bytes of local memory"):
        build_kernels((TinySpec(),), settings=real, render=lambda _: INDEXED_SOURCE)


@pytest.mark.compile
def test_a_real_kernel_from_source_to_instructions(real: BuildSettings) -> None:
    (record,) = build_kernels((TinySpec(),), settings=real, render=lambda _: SOUND_SOURCE)
    assert record.resources == Resources(record.resources.registers, 0, 0, 0, 128)
    assert 0 < record.resources.registers < 64
    counts = count_instructions(record.cubin, real)
    assert occurrences(counts, "BAR.SYNC") == 1
    assert occurrences(counts, "LDG") == occurrences(counts, "STG") == 1
    assert occurrences(counts, "LDL") == occurrences(counts, "STL") == 0
    assert b"tiny" in record.cubin.read_bytes()
