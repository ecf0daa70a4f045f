"""FP8 weights in safetensors files: of each that is there ``layers.I.OP.codes`` E4M3 [N, K], and ``.scale`` float32.

In logical order (docs/architecture.md), a scale of [1] or [N]. They are read when they are asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from futransformer.checkpoint import open_safetensors
from futransformer.fp8_scaling import READERS
from futransformer.generator.config import LlamaConfig
from futransformer.generator.errors import CheckpointError, InputError
from futransformer.generator.plan import projections
from futransformer.ops.interface import Projection
from futransformer.quantize.fp8 import Fp8Weight
from futransformer.quantize.recipe import WeightCodes

STORED_TYPES = {"codes": "F8_E4M3", "scale": "F32"}


def tensor_name(layer: int, op: Projection, part: str) -> str:
    """Of a weight's codes or scale."""
    return f"layers.{layer}.{op}.{part}"


def weights_tensors(weights: WeightCodes) -> dict[str, Tensor]:
    """What a file holds of these."""
    return {
        tensor_name(layer, op, part): tensor.cpu().contiguous()
        for (layer, op), weight in weights.items()
        for part, tensor in weight._asdict().items()
    }


def save_weights(weights: WeightCodes, path: Path) -> None:
    """Write them all into one file."""
    save_file(weights_tensors(weights), path)


class StoredWeights(Mapping[tuple[int, Projection], Fp8Weight]):
    """The weights of such files, by layer and projection."""

    def __init__(self, paths: Sequence[Path], config: LlamaConfig) -> None:
        """Open them, and check names, types and shapes; InputError if they are not those of the model's weights."""
        self._paths: dict[str, Path] = {}  # of each tensor
        self._files: dict[str, Any] = {}
        for path in paths:
            opened = open_safetensors(path)
            for name in opened.keys():  # noqa: SIM118 - no mapping
                if name in self._files:
                    raise InputError(f"{path.name} holds {name}, and so does {self._paths[name].name}")
                self._paths[name], self._files[name] = path, opened
        held = set(self._files)
        shapes = projections(config)
        self._names = [
            (layer, op)
            for layer in range(config.num_hidden_layers)
            for op in READERS
            if held & {tensor_name(layer, op, part) for part in STORED_TYPES}
        ]
        for layer, op in self._names:
            n, k = shapes[op]
            for part, allowed in (("codes", [[n, k]]), ("scale", [[1], [n]])):
                name = tensor_name(layer, op, part)
                if name not in held:
                    beside = next(
                        self._paths[other] for other in self._paths if other.startswith(f"layers.{layer}.{op}.")
                    )
                    raise InputError(f"{beside.name} lacks {name}")
                view = self._files[name].get_slice(name)
                if view.get_dtype() != STORED_TYPES[part] or view.get_shape() not in allowed:
                    raise InputError(
                        f"{self._paths[name].name}: {name} is {view.get_dtype()} {view.get_shape()}, where the model "
                        f"has {STORED_TYPES[part]} {' or '.join(map(str, allowed))}"
                    )
                held.remove(name)
        if held:
            spare = min(held)
            raise InputError(f"{self._paths[spare].name} holds {spare}, which is none of the model's FP8 weights")

    def __getitem__(self, name: tuple[int, Projection]) -> Fp8Weight:
        """Read one."""
        if name not in self._names:
            raise KeyError(name)
        layer, op = name
        tensors = [tensor_name(layer, op, part) for part in STORED_TYPES]
        try:
            return Fp8Weight(*(self._files[tensor].get_tensor(tensor) for tensor in tensors))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{self._paths[tensors[0]]}: layer {layer}, {op} cannot be read: {error}: calibrate again"
            ) from error

    def __iter__(self) -> Iterator[tuple[int, Projection]]:
        """In order."""
        return iter(self._names)

    def __len__(self) -> int:
        """How many."""
        return len(self._names)
