"""Loading a kernel library: what an export must hold. A pretended GPU and pretended kernels stand in for real ones."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import futransformer
from futransformer import library
from futransformer.build.compile import BuildEvent
from futransformer.build.export import export
from futransformer.build.manifest import KernelRecord, ModelManifest
from futransformer.build.ptxas import Resources
from futransformer.driver import LaunchChain
from futransformer.generator.config import load_config
from futransformer.generator.errors import (
    ArtifactError,
    ConfigError,
    DeviceError,
    InputError,
    ToolchainError,
    UnsupportedError,
)
from futransformer.generator.plan import kernel_specs
from futransformer.generator.specs import ABI_VERSION, KernelSpec
from futransformer.library import KernelLibrary, load_kernels
from futransformer.ops.interface import PROJECTIONS
from futransformer.quantize.fp8 import quantize_weight
from futransformer.quantize.int4 import round_to_nearest
from tests.ops.stand_in import stand_in_library

SMALL = load_config("smollm2-135m")
SPECS = kernel_specs(SMALL, "bf16")


class LoadedKernel:
    """Stands in for a kernel on a GPU."""

    def __init__(
        self, spec: KernelSpec, record: KernelRecord, cubin: bytes, device: torch.device, chain: LaunchChain
    ) -> None:
        self.spec, self.record, self._cubin, self.device, self.chain = spec, record, cubin, device, chain


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a Hopper GPU on which any cubin loads."""
    monkeypatch.setattr(library, "require_hopper", lambda: torch.device("cpu"))
    monkeypatch.setattr(library, "Kernel", LoadedKernel)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export of the small model whose cubins hold their kernels' names."""
    root = tmp_path_factory.mktemp("exported")
    records = []
    for index, spec in enumerate(SPECS):
        cubin = root / f"{index}.cubin"
        cubin.write_text(spec.name)
        records.append(record_of(spec, cubin))
    export(ModelManifest("smollm2-135m", "bf16", tuple(records)), root / "export")
    return root / "export"


def record_of(spec: KernelSpec, cubin: Path) -> KernelRecord:
    return KernelRecord(
        name=spec.name,
        template=spec.template,
        params=spec.params,
        threads=spec.threads,
        cluster=spec.cluster,
        shared_bytes=spec.shared_bytes,
        resources=Resources(100, 0, 0, 0, 0),
        cubin=cubin,
        cubin_sha256=hashlib.sha256(cubin.read_bytes()).hexdigest(),
        compile_seconds=1.0,
        nvcc_version="13.0.88",
        abi_version=ABI_VERSION,
        source_key="0" * 64,
        toolchain_key="0" * 64,
    )


@pytest.fixture
def mine(exported: Path, tmp_path: Path) -> Path:
    """A copy of the export, to be damaged."""
    folder = tmp_path / "export"
    folder.mkdir()
    for path in exported.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def edit_manifest(folder: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


@pytest.mark.usefixtures("on_hopper")
def test_every_kernel_of_the_plan_is_loaded_once(exported: Path) -> None:
    ops = load_kernels("smollm2-135m", folder=exported)
    loaded = [
        *(gather.kernel for gather in ops._gather_rows.values()),
        *(kernel for op in PROJECTIONS for kernel in kernels_of(ops, op)),
        ops._attention_prefill.kernel,
        ops._attention_decode.kernel,
        ops._argmax.kernel,
        ops._argmax_parts.kernel,
        ops._sample.kernel,
        ops._step_begin.kernel,
        ops._step_end.kernel,
    ]
    assert sorted(kernel.spec.name for kernel in loaded) == sorted(spec.name for spec in SPECS)
    assert all(kernel._cubin == kernel.record.name.encode() for kernel in loaded)
    assert all(kernel.chain is ops.launch_chain for kernel in loaded)
    assert (ops.config, ops.precision.name) == (SMALL, "bf16")


def kernels_of(ops: KernelLibrary, op: Any) -> list[Any]:
    prefill, decode = (ops._projections.gemms[phase, op] for phase in ("prefill", "decode"))
    return [*dict.fromkeys(prefill.kernels.values()), *decode.kernels.values()]  # type: ignore[attr-defined]


@pytest.mark.usefixtures("on_hopper")
def test_an_export_of_another_model_is_refused(exported: Path) -> None:
    with pytest.raises(ArtifactError) as caught:
        load_kernels("llama-3.1-8b", folder=exported)
    message = str(caught.value)
    assert str(exported) in message
    other = kernel_specs(load_config("llama-3.1-8b"), "bf16")
    lacked = [spec for spec in other if spec not in SPECS]  # argmax of parts, and a step's begin, are of no model
    assert len(lacked) == len(other) - 2
    assert f"lacks {len(lacked)} of {len(other)} kernels, first {lacked[0].name}" in message
    assert "exported for smollm2-135m (bf16)" in message
    assert f"futransformer build CONFIG --output {exported}" in message


@pytest.mark.usefixtures("on_hopper")
def test_an_export_that_lacks_one_kernel_names_it(mine: Path) -> None:
    edit_manifest(mine, lambda manifest: manifest["kernels"].pop())
    with pytest.raises(ArtifactError, match=f"lacks 1 of {len(SPECS)} kernels, first {SPECS[-1].name}"):
        load_kernels(SMALL, folder=mine)


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1], lambda data: bytes([data[0] ^ 1]) + data[1:], lambda _: b""]
)
def test_a_corrupt_cubin_is_refused_by_name(mine: Path, damage: Callable[[bytes], bytes]) -> None:
    cubin = sorted(mine.glob("gemm_qkv*.cubin"))[0]
    cubin.write_bytes(damage(cubin.read_bytes()))
    with pytest.raises(ArtifactError, match="is corrupt") as caught:
        load_kernels(SMALL, folder=mine)
    assert str(cubin) in str(caught.value)


@pytest.mark.usefixtures("on_hopper")
def test_an_export_of_another_abi_is_refused(mine: Path) -> None:
    def make_older(manifest: dict[str, Any]) -> None:
        manifest["kernels"][3]["abi_version"] = ABI_VERSION - 1

    edit_manifest(mine, make_older)
    with pytest.raises(
        ArtifactError, match=f"was built for kernel ABI {ABI_VERSION - 1}, this version has ABI {ABI_VERSION}; .*build"
    ):
        load_kernels(SMALL, folder=mine)


@pytest.mark.usefixtures("on_hopper")
def test_a_kernel_with_another_interface_is_refused(mine: Path) -> None:
    def drop_parameter(manifest: dict[str, Any]) -> None:
        del manifest["kernels"][1]["params"][0]

    edit_manifest(mine, drop_parameter)
    with pytest.raises(ArtifactError, match=f"kernel {SPECS[1].name} has another launch interface"):
        load_kernels(SMALL, folder=mine)


@pytest.mark.usefixtures("on_hopper")
def test_a_folder_that_is_no_export(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"nowhere is no export.*futransformer build CONFIG --output"):
        load_kernels(SMALL, folder=tmp_path / "nowhere")


@pytest.mark.usefixtures("on_hopper")
def test_what_cannot_be_served_is_refused_before_anything_is_loaded(exported: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean llama-3-8b"):
        load_kernels("llama-3-9b", folder=exported)
    with pytest.raises(UnsupportedError, match="precision 'fp7' is not implemented; choose one of: bf16"):
        load_kernels(SMALL, "fp7", folder=exported)


@pytest.mark.usefixtures("on_hopper")
def test_kernels_that_must_be_built_without_nvcc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("futransformer.build.toolchain.pip_toolkits", lambda: ())
    for name in ("CUDA_HOME", "CUDA_PATH", "FUTRANSFORMER_NVCC", "PATH"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("FUTRANSFORMER_CACHE", str(tmp_path))
    events: list[BuildEvent] = []
    with pytest.raises(
        ToolchainError, match=rf"not in the cache .*gather_rows.* and {len(SPECS) - 3} more.*no usable nvcc"
    ):
        load_kernels(SMALL, progress=events.append)
    assert events == []


def test_without_a_hopper_gpu_no_kernel_is_looked_for(monkeypatch: pytest.MonkeyPatch, exported: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(library, "load_or_build", lambda *_, **__: pytest.fail("kernels were looked for"))
    with pytest.raises(DeviceError, match=r"no Hopper GPU: .*an H100 or H200"):
        futransformer.load_kernels("smollm2-135m", folder=exported)


@pytest.mark.usefixtures("on_hopper")
def test_weights_of_another_shape_are_not_packed(exported: Path) -> None:
    ops = load_kernels(replace(SMALL, name="mine"), folder=exported)
    packed = ops.pack("o", "prefill", torch.zeros(576, 576))
    assert (packed.shape, packed.dtype) == ((576, 576), torch.bfloat16)
    with pytest.raises(InputError, match="o: cannot pack a weight of shape"):
        ops.pack("o", "prefill", torch.zeros(100, 576))


@pytest.mark.usefixtures("on_hopper")
def test_codes_are_packed_where_they_are_read_and_nowhere_else(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversion would give weights without their scale, which no later check can find."""
    weight = torch.zeros(576, 576, dtype=torch.bfloat16)
    codes = weight.to(torch.float8_e4m3fn)
    bf16 = load_kernels(SMALL, folder=exported)
    with pytest.raises(InputError, match=r"pack o: the prefill kernel reads torch.bfloat16, .* not torch.float8"):
        bf16.pack("o", "prefill", codes)
    monkeypatch.setattr(library, "load_or_build", lambda specs, **_: {spec.name: (None, b"") for spec in specs})
    fp8 = load_kernels(SMALL, "fp8")
    assert fp8.pack("o", "prefill", codes).dtype == torch.float8_e4m3fn
    assert fp8.pack("o", "decode", weight).dtype == torch.bfloat16
    with pytest.raises(InputError, match=r"reads torch.float8_e4m3fn, give it codes .*quantize_weight, not "):
        fp8.pack("o", "prefill", weight)


def test_e4m3_of_decode_is_packed_with_its_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = stand_in_library(SMALL, monkeypatch, precision="fp8-fp8-head4")
    logical = torch.randn(576, 576).bfloat16()
    weight = quantize_weight("o", logical, "channel")
    packed = kernels.pack("o", "decode", weight)
    assert (packed.dtype, packed.shape) == (torch.uint8, (576 * 580,))
    assert kernels.pack("o", "prefill", weight.codes).dtype == torch.float8_e4m3fn
    for wrong in (logical, weight.codes, packed):
        with pytest.raises(InputError, match=r"the decode kernel reads E4M3, give it an Fp8Weight of .*, not torch\."):
            kernels.pack("o", "decode", wrong)
    with pytest.raises(InputError, match=r"the decode kernel reads E4M3, .*, not INT4"):
        kernels.pack("o", "decode", round_to_nearest("o", logical, 128))
    with pytest.raises(InputError, match=r"reads torch\.float8_e4m3fn, give it codes .*, not E4M3"):
        kernels.pack("o", "prefill", weight)
    with pytest.raises(InputError, match=r"the decode kernel reads INT4, .*, not E4M3"):
        kernels.pack("lm_head", "decode", weight)


def test_int4_is_packed_where_it_is_read_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = stand_in_library(SMALL, monkeypatch, precision="int4-g32-asym")
    logical = torch.randn(576, 576).bfloat16()
    packed = kernels.pack("o", "decode", round_to_nearest("o", logical, 32, zero_points=True))
    assert (packed.dtype, packed.shape) == (torch.uint8, (36, 18, 16 * 16 + 32 + 16))
    assert kernels.pack("o", "prefill", logical).dtype == torch.bfloat16
    head = torch.randn(SMALL.vocab_size, 576).bfloat16()
    assert kernels.pack("lm_head", "decode", head).dtype == torch.bfloat16
    for wrong in (logical, packed):
        with pytest.raises(InputError, match=r"the decode kernel reads INT4, give it an Int4Weight of .*, not torch\."):
            kernels.pack("o", "decode", wrong)
    with pytest.raises(InputError, match=r"prefill kernel reads torch\.bfloat16, give it no codes, not INT4"):
        kernels.pack("o", "prefill", round_to_nearest("o", logical, 32))
    for others in (round_to_nearest("o", logical, 32), round_to_nearest("o", logical, 64, zero_points=True)):
        with pytest.raises(InputError, match=r"in the groups of int4-g32-asym \(group_size=32, zero_points=True\)"):
            kernels.pack("o", "decode", others)


@pytest.mark.usefixtures("on_hopper")
def test_one_gemm_serves_up_to_eight_sequences_where_batches_may_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "load_or_build", lambda specs, **_: {spec.name: (None, b"") for spec in specs})
    for precision, fastest in (("bf16", 8), ("int4", 4)):
        for invariant, least in ((False, fastest), (True, 8)):
            gemm: Any = load_kernels(SMALL, precision, batch_invariant=invariant)._projections.gemms["decode", "o"]
            assert min(gemm.kernels) == least


@pytest.mark.usefixtures("on_hopper")
def test_a_phase_that_is_none_is_named(exported: Path) -> None:
    ops: Any = load_kernels(SMALL, "bf16", folder=exported)
    weight, x = torch.zeros(576, 576, dtype=torch.bfloat16), torch.zeros(1, 576, dtype=torch.bfloat16)
    for name, arguments in (
        ("pack", ("o", "Decode", weight)),
        ("gather_rows", ("Decode", weight, torch.zeros(1, dtype=torch.int32))),
        ("o", ("Decode", x, weight, x)),
    ):
        with pytest.raises(InputError, match=f"""^{name}.*: phase must be "prefill" or "decode", not 'Decode'$"""):
            getattr(ops, name)(*arguments)
