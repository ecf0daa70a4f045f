"""A model whose projections are INT4 codes, written as a folder, layer by layer.

The folder is a compressed-tensors checkpoint (pack-quantized), which other engines read as well: the gains of the
layers' norms are folded into the weights before they are quantised, and their weights are ones, unless they are kept.
The last norm, the embedding and the head stay as they are, unless the stream is rotated
(futransformer.quantize.folding).
futransformer.json beside it has the method and the sha256 of every file. Of our own format it also names the precision
that the model is made for, and what an FP8 prefill reads lies beside it: codes of the same weights before they were
INT4, and scales of activations.

One shard a layer, one for the embedding and one for the head, written whole or not at all, into a folder beside OUT
whose name is of the job; what is there when a job begins again is kept. One process at a time works on a job. At no
time is more than one layer, or one shard and its bytes, in memory.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save

from futransformer.build.cache import lock_at, storage_errors
from futransformer.checkpoint import Checkpoint, load_checkpoint, projections_of
from futransformer.formats.codes import Groups
from futransformer.formats.compressed_tensors import packed_tensors, unpacked
from futransformer.fp8_scaling import ActivationScales
from futransformer.generator.config import load_config
from futransformer.generator.errors import BuildError, ConfigError, InputError
from futransformer.generator.json_reader import JsonReader, read_json
from futransformer.generator.precision import E4M3, Precision
from futransformer.quantize.assemble import assemble, begin, finish, seal, write_json, write_whole
from futransformer.quantize.description import FORMAT, INT4_SECTION, precision_section, sha256_of, weight_files
from futransformer.quantize.folder import DONE, SCALES_FILE, check_output, publish, save_scales, scratch_beside
from futransformer.quantize.folding import Folding, logical_weights
from futransformer.quantize.fp8 import quantize_weight
from futransformer.quantize.layers import Errors, LayerQuantiser
from futransformer.quantize.recipe import Fp8Recipe
from futransformer.quantize.stored import StoredWeights, weights_tensors

WHAT = "quantised model"
ENDS = 2  # shards beside the layers'

# A folder without a description, and a recipe without scales -> scales, and where they come from in JSON's types.
Fp8Reader = Callable[[Path, Fp8Recipe], tuple[ActivationScales, Mapping[str, Any]]]


class Progress(NamedTuple):
    """How far a job is."""

    layers: int  # done
    of: int
    seconds_left: float | None  # None: all were done before


@dataclass(frozen=True)
class Own:
    """Our own format: the precision that the folder is to name, and who finds scales if its prefill is FP8."""

    precision: Precision
    read_fp8: Fp8Reader | None = None

    @property
    def fp8(self) -> bool:
        """Whether a prefill reads FP8."""
        return self.precision.prefill == E4M3


@dataclass(frozen=True)
class _Layer:
    """A layer's files: the shard of its codes, and of an FP8 prefill's if there is one."""

    int4: Path
    fp8: Path

    @property
    def done(self) -> Path:
        return self.int4.with_name(f"{self.int4.name}{DONE}")

    def finished(self) -> Mapping[str, Errors] | None:
        """The errors that an earlier run found; None where it did not finish, or a crash has damaged a file since."""
        try:
            said = JsonReader(self.done, read_json(self.done))
            errors, sums = said.section("errors"), said.section("sha256")
            names = dict.fromkeys((self.int4.name, *sums.content))
            sound = all(sha256_of(self.done.with_name(name)) == sums.text(name) for name in names)
            modules = [(module, errors.section(module)) for module in errors.content]
            return {module: {kind: of.number(kind) for kind in of.content} for module, of in modules} if sound else None
        except (ConfigError, OSError):
            return None

    def write(self, files: Mapping[Path, bytes], errors: Mapping[str, Errors]) -> None:
        """Write files, and then that they are all."""
        for path, content in files.items():
            write_whole(path, content)
        sums = {path.name: hashlib.sha256(content).hexdigest() for path, content in files.items()}
        write_json(self.done, {"errors": errors, "sha256": sums})


def write_quantised(
    source: Path,
    output: Path,
    quantiser: Callable[[Checkpoint], LayerQuantiser],
    groups: Groups,
    method: Mapping[str, Any],
    *,
    own: Own | None = None,
    folding: Folding = Folding(),  # noqa: B008 - frozen
    force: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> dict[str, Errors]:
    """Quantise the projections of ``source`` and write the folder; the errors of each, by name (see ``Quantised``).

    ``method`` says in JSON's types what the quantiser does: a job that was interrupted goes on where ``source``,
    ``groups``, ``folding`` and ``method`` are the same.
    """
    check_output(source, output, force=force, what=WHAT)
    config = load_config(source)
    checkpoint = load_checkpoint(source, config)
    if checkpoint.format is not None:
        raise InputError(
            f"{source} is quantised already ({checkpoint.format.title}): give the model that it was made from"
        )
    folding.check(config.name, config.head_dim)
    count, there = config.num_hidden_layers, output.resolve()
    folded = [folding.residual_rotation, folding.value_rotation, folding.keep_gains]
    job = _job(source, [groups, folded, method, own.precision.weight_scales if own and own.fp8 else None])
    partial = there.parent / f".{there.name}-{job}.partial"
    shards = [f"model-{index + 1:05}-of-{count + ENDS:05}.safetensors" for index in range(count + ENDS)]
    layers = [
        _Layer(partial / shard, partial / f"fp8_weights-{index + 1:05}-of-{count:05}.safetensors")
        for index, shard in enumerate(shards[:count])
    ]
    kept = f"finished layers are kept in {partial}, for the same command to go on from them"
    with (
        _interruption(kept),
        storage_errors(f"the {WHAT}", output, "choose another with --output", kept),
        _alone(partial, output),
    ):
        begin(partial)
        errors: dict[str, Errors] = {}
        working = quantiser(checkpoint)
        spent, written = 0.0, 0
        for index, layer in enumerate(layers):
            start = time.perf_counter()
            weights = folding.layer(checkpoint, index)
            found = layer.finished()
            if found is None:
                quantised = working.quantise(index, weights)
                found = {module: quantised[module].errors for module in weights}
                tensors = folding.norms(checkpoint, index)
                for module in weights:
                    tensors |= packed_tensors(module, quantised[module].codes)
                files = {layer.int4: save(tensors, {"format": "pt"})}
                if own is not None and own.fp8:
                    with_gains = replace(folding, keep_gains=False).layer(checkpoint, index)
                    files[layer.fp8] = save(_fp8_tensors(checkpoint, index, with_gains, own.precision))
                layer.write(files, found)
                written += 1
                spent += time.perf_counter() - start
            else:
                codes = unpacked(load_file(layer.int4), projections_of(index), groups)
                working.passed(index, weights, codes)
            errors |= found
            if progress is not None:
                left = spent / written * (count - index - 1) if written else None
                progress(Progress(index + 1, count, left))
        del working  # and with it what it holds of a calibration text
        for shard, tensors in zip(shards[count:], folding.ends(checkpoint), strict=True):
            write_whole(partial / shard, save(tensors, {"format": "pt"}))
        assemble(source, partial, shards, groups, tied=config.tie_word_embeddings and not folding.residual_rotation)
        described = {**method, "group_size": groups.group_size, "zero_points": groups.zero_points, "errors": errors}
        seal(partial, {**_own_sections(own, partial, layers), INT4_SECTION: described})
        check_output(source, output, force=force, what=WHAT)  # another job may have been faster
        with scratch_beside(output, there.parent, WHAT) as scratch:
            publish(partial, there, scratch / "replaced")
            finish(there)  # last: whoever was stopped or refused before goes on from the layers
    return errors


def _fp8_tensors(
    checkpoint: Checkpoint, index: int, weights: Mapping[str, torch.Tensor], precision: Precision
) -> dict[str, torch.Tensor]:
    logical = logical_weights(weights, checkpoint.config.head_dim)
    return weights_tensors(
        {
            (index, op): quantize_weight(f"layer {index}, {op}", weight, precision.weight_scales)
            for op, weight in logical.items()
        }
    )


def _own_sections(own: Own | None, folder: Path, layers: list[_Layer]) -> dict[str, Any]:
    """What our own format says beside the codes; of an FP8 prefill its scales are found first."""
    if own is None:
        return {}
    sections: dict[str, Any] = {"precision": precision_section(own.precision)}
    if own.fp8:
        assert own.read_fp8 is not None
        files = [layer.fp8 for layer in layers]
        weights = StoredWeights(files, load_config(folder))
        scales, origin = own.read_fp8(folder, Fp8Recipe(ActivationScales.unknown(len(layers)), weights=weights))
        save_scales(scales, folder / SCALES_FILE)
        sections |= {
            "bf16_layers": "",
            "fp8_scales": {"file": SCALES_FILE, **origin},
            "fp8_weights": {"files": [path.name for path in files]},
        }
    return sections


@contextmanager
def _alone(partial: Path, output: Path) -> Iterator[None]:
    """Make the job's folder and hold its lock; BuildError where another process does."""
    partial.mkdir(parents=True, exist_ok=True)
    held = lock_at(partial)
    if held is None:
        raise BuildError(f"another process is writing this model to {output}: wait for it, or end it and try again")
    try:
        yield
    finally:
        os.close(held)


@contextmanager
def _interruption(kept: str) -> Iterator[None]:
    """Let an interruption say what is left of the block."""
    try:
        yield
    except KeyboardInterrupt as interruption:
        raise KeyboardInterrupt(kept) from interruption


def _job(source: Path, how: list[Any]) -> str:
    """What an interrupted job is known by: how it quantises, and the source's files by size and time of change."""
    files = [(name, (source / name).stat()) for name in ("config.json", *weight_files(source))]
    known = [how, [[name, stat.st_size, stat.st_mtime_ns] for name, stat in files], FORMAT]
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:12]
