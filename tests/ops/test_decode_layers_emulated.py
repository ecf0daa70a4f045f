"""The launch for all layers in the emulator: its own source, blocks that wait for one another; by the reference."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from futransformer.driver import Kernel
from futransformer.generator.config import LlamaConfig, load_config
from futransformer.generator.int4 import packed_group
from futransformer.generator.precision import Precision, get_precision
from futransformer.generator.render import _environment
from futransformer.generator.specs import DecodeLayersSpec, Heads
from futransformer.ops import decode_layers as ops_of_layers
from tests.ops import test_decode_layers as decode_layers
from tests.ops.stand_in import CPU, stand_in_library
from tests.sanitize.remote import HostTable, host_table

HEADERS = (
    *("fragment", "unit_scales", "split_activations", "decode_block", "tagged", "staged_activations"),
    *("epilogue", "kv_int4", "epilogue_kv_decode", "epilogue_tagged", "e4m3_operand"),
    *(f"attention_decode{part}" for part in ("_pages", "_warp", "_rows", "_int4", "")),
    *(f"decode_layers_{part}" for part in ("shared", "attention", "results", "projections", "stream")),
    "decode_layers",
)
OF_LAYER = ("qkv", "o", "gate_up", "down", "k_pages", "v_pages", "kv_copy")


@dataclass(frozen=True)
class Case:
    """Layers of a few blocks."""

    heads: Heads
    hidden: int
    intermediate: int
    form: str
    blocks: int = 4
    slots: int = 6
    window_k: int = 1024
    contexts: tuple[int, ...] = (1, 17, 33, 130, 600)

    @property
    def precision(self) -> Precision:
        return get_precision(f"int4{self.form}")

    @property
    def config(self) -> LlamaConfig:
        """A small model."""
        return replace(
            load_config("llama-3.1-8b"),
            name="emulated",
            vocab_size=512,
            bos_token_id=1,
            eos_token_ids=(2,),
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_attention_heads=self.heads.num_attention_heads,
            num_key_value_heads=self.heads.num_key_value_heads,
            head_dim=self.heads.head_dim,
        )

    @property
    def spec(self) -> DecodeLayersSpec:
        precision = self.precision
        assert precision.copy is not None
        return DecodeLayersSpec(
            heads=self.heads,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            group_k=packed_group(self.hidden, precision.group_size),
            zero_points=precision.zero_points,
            copy=precision.copy,
            blocks=self.blocks,
            slots=self.slots,
            in_flight=2,
            window_k=self.window_k,
        )


CASES = {
    "a slot of K": Case(Heads(4, 2, 64), 256, 512, "-kv4"),
    "two windows, a group of one": Case(Heads(2, 2, 128), 256, 1280, "-g32-asym-kv4-head-h64", contexts=(40, 129)),
    "more pages than slots": Case(Heads(4, 2, 64), 256, 512, "-kv4-h0", contexts=(3000,)),
    "parts of slots": Case(Heads(5, 1, 64), 320, 576, "-g32-asym-kv4", contexts=(65, 300)),
    "slots that do not divide": Case(Heads(8, 1, 128), 2048, 512, "-kv4", slots=7, window_k=2048, contexts=(250,)),
}


class EmulatedKernel:
    """The launch as a program, which reads its arguments from files and leaves them there."""

    def __init__(self, spec: DecodeLayersSpec, program: Path) -> None:
        self.spec, self.program, self.device, self.sm_count = spec, program, CPU, spec.blocks

    def launch(self, grid: tuple[int, int, int], *, layers: HostTable, **arguments: Any) -> None:
        """Write, run, read."""
        assert grid == (self.spec.blocks, 1, 1)
        folder = self.program.parent / "arguments"
        folder.mkdir(exist_ok=True)
        tensors: dict[str, Tensor] = {
            f"layer{index}_{name}": tensor
            for index, row in enumerate(layers.rows)
            for name, tensor in zip(OF_LAYER, row, strict=True)
        }
        for param in self.spec.params:
            if param.name != "layers":
                value = arguments.pop(param.name)
                dtype = torch.float32 if isinstance(value, float) else torch.int32
                tensors[param.name] = value if isinstance(value, Tensor) else torch.tensor(value, dtype=dtype)
        assert not arguments
        for name, tensor in tensors.items():
            (folder / name).write_bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        ran = subprocess.run(
            [str(self.program), self.spec.name, str(folder)], capture_output=True, text=True, check=False, timeout=600
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        for name, tensor in tensors.items():
            written = torch.frombuffer(bytearray((folder / name).read_bytes()), dtype=tensor.dtype)
            tensor.copy_(written.view_as(tensor))


@pytest.mark.compile
@pytest.mark.parametrize("name", CASES)
def test_layers_in_the_emulator(name: str, emulated: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths around tiles and pages, none and one too long, the newest token's bytes, and the same bits again."""
    case = CASES[name]
    ops = stand_in_library(case.config, monkeypatch, precision=case.precision)
    monkeypatch.setattr(ops_of_layers, "address_table", host_table)
    template = (Path(__file__).parent / "emulated_decode_layers.cpp.jinja").read_text()
    source = _environment().overlay().from_string(template).render(specs=[case.spec], headers=HEADERS)
    program = emulated(*HEADERS, source=source)
    ops._decode_layers = cast(Kernel, EmulatedKernel(case.spec, program))
    decode_layers.check_layers(ops, case.contexts)
