"""The folder of a calibrated model: written as a whole or not at all, read back, and refused where it is not sound."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from futransformer.checkpoint import load_checkpoint
from futransformer.fp8_scaling import ActivationScales
from futransformer.generator.config import load_config
from futransformer.generator.errors import BuildError, CheckpointError, InputError
from futransformer.generator.precision import get_precision
from futransformer.layer_parts import parse_parts
from futransformer.model import Llama
from futransformer.quantize import folder as folder_module
from futransformer.quantize.description import sha256_of
from futransformer.quantize.folder import check_output, read_recipe, write_folder
from futransformer.quantize.fp8 import quantize_weight
from futransformer.quantize.recipe import Fp8Recipe
from futransformer.tokenizer import Tokenizer

SCALES = ActivationScales.from_amax(torch.rand(9, generator=torch.Generator().manual_seed(0)) + 1)
CODES = torch.zeros(2, 2, dtype=torch.float8_e4m3fn)
CALIBRATION = {"text": "a.txt", "windows": 3}


def write(source: Path, output: Path, *, force: bool = False, scales: ActivationScales = SCALES, **recipe: Any) -> Path:
    write_folder(source, output, Fp8Recipe(scales, **recipe), get_precision("fp8"), CALIBRATION, force=force)
    return output


@pytest.fixture
def calibrated(tiny_base_model: Path, tmp_path: Path) -> Path:
    return write(tiny_base_model, tmp_path / "the output")


def test_scales_come_back_as_they_were_written(tiny_base_model: Path, calibrated: Path) -> None:
    read = read_recipe(calibrated, load_config(calibrated)).scales
    assert torch.equal(read.scale, SCALES.scale)
    assert torch.equal(read.amax, SCALES.amax)
    model = Llama.from_pretrained(calibrated, precision="fp8", device="cpu", cache_tokens=256)
    assert model.scaling is not None
    assert torch.equal(model.scaling.scale(), SCALES.scale)
    given = Llama.from_pretrained(
        tiny_base_model, precision="fp8", device="cpu", cache_tokens=256, recipe=Fp8Recipe(SCALES)
    )
    assert torch.equal(model.prefill([[1, 2, 3]]), given.prefill([[1, 2, 3]]))


def test_the_folder_is_the_model_and_says_what_it_is(tiny_base_model: Path, calibrated: Path) -> None:
    names = {path.name for path in calibrated.iterdir()}
    assert names == {path.name for path in tiny_base_model.iterdir()} | {"futransformer.json", "fp8_scales.safetensors"}
    for path in tiny_base_model.iterdir():
        assert (calibrated / path.name).read_bytes() == path.read_bytes()
    said = json.loads((calibrated / "futransformer.json").read_text())
    assert said["format"] == 3
    assert said["precision"] == {
        "name": "fp8",
        "prefill": "e4m3",
        "decode": "bf16",
        "kv": "bf16",
        "head": "bf16",
        "weight_scales": "tensor",
    }
    assert said["fp8_scales"] == {"file": "fp8_scales.safetensors", **CALIBRATION}
    assert (said["bf16_layers"], said["fp8_weights"]) == ("", None)
    assert said["sha256"] == {name: sha256_of(calibrated / name) for name in names - {"futransformer.json"}}
    load_checkpoint(calibrated, load_config(calibrated))
    Llama.from_pretrained(calibrated, device="cpu", cache_tokens=64)  # in BF16, as any other


def test_weights_are_linked_and_small_files_are_not(tiny_base_model: Path, calibrated: Path) -> None:
    """A config that is edited in place must not change the other folder's."""
    assert (calibrated / "model.safetensors").samefile(tiny_base_model / "model.safetensors")
    assert not (calibrated / "config.json").samefile(tiny_base_model / "config.json")


def test_weights_are_copied_where_links_are_not_to_be_had(
    tiny_base_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr("os.link", refuse)
    out = write(tiny_base_model, tmp_path / "out")
    assert not (out / "model.safetensors").samefile(tiny_base_model / "model.safetensors")
    assert (out / "model.safetensors").read_bytes() == (tiny_base_model / "model.safetensors").read_bytes()


def test_shards_and_symbolic_links_are_carried(tiny_base_model: Path, tmp_path: Path) -> None:
    """As the Hub's cache lays a model out; what does not belong to the model stays."""
    blobs, source = tmp_path / "blobs", tmp_path / "sharded"
    blobs.mkdir()
    source.mkdir()
    weights = load_file(tiny_base_model / "model.safetensors")
    shards = {name: f"model-{1 + (i % 2)}-of-2.safetensors" for i, name in enumerate(sorted(weights))}
    for shard in set(shards.values()):
        save_file({name: weights[name] for name in weights if shards[name] == shard}, blobs / shard)
    (blobs / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    for path in tiny_base_model.iterdir():
        if path.suffix != ".safetensors":
            shutil.copyfile(path, blobs / path.name)
    for path in blobs.iterdir():
        (source / path.name).symlink_to(path)
    (source / "consolidated.safetensors").write_bytes(b"the same weights once more")
    (source / "pytorch_model.bin").write_bytes(b"pickled")
    out = write(source, tmp_path / "out")
    shutil.rmtree(blobs)
    shutil.rmtree(source)
    assert not any(path.is_symlink() for path in out.iterdir())
    assert not {"consolidated.safetensors", "pytorch_model.bin"} & {path.name for path in out.iterdir()}
    model = Llama.from_pretrained(out, precision="fp8", device="cpu", cache_tokens=64)
    assert model.prefill([[1, 2]]).isfinite().all()


def test_parts_in_bf16_come_back(tiny_base_model: Path, tmp_path: Path) -> None:
    bf16 = parse_parts("0.mlp, 1.attention", 2)
    out = write(tiny_base_model, tmp_path / "out", bf16=bf16)
    assert json.loads((out / "futransformer.json").read_text())["bf16_layers"] == "0.mlp, 1.attention"
    assert read_recipe(out, load_config(out)).bf16 == bf16
    model = Llama.from_pretrained(out, precision="fp8", device="cpu", cache_tokens=256)
    recipe = Fp8Recipe(SCALES, bf16)
    given = Llama.from_pretrained(tiny_base_model, precision="fp8", device="cpu", cache_tokens=256, recipe=recipe)
    assert torch.equal(model.prefill([[1, 2, 3]]), given.prefill([[1, 2, 3]]))


def test_fp8_weights_come_back(tiny_base_model: Path, tmp_path: Path) -> None:
    """Some of them: the others are rounded to nearest."""
    layer = load_checkpoint(tiny_base_model, load_config(tiny_base_model)).layer(1)
    weights = {(1, "down"): quantize_weight("down", layer.down.flip(0), "tensor")}
    out = write(tiny_base_model, tmp_path / "out", weights=weights)
    said = json.loads((out / "futransformer.json").read_text())
    assert said["fp8_weights"] == {"files": ["fp8_weights.safetensors"]}
    assert said["sha256"]["fp8_weights.safetensors"] == sha256_of(out / "fp8_weights.safetensors")
    assert (out / "fp8_weights.safetensors").stat().st_mode == (out / "config.json").stat().st_mode
    read = read_recipe(out, load_config(out)).weights
    assert list(read) == list(weights)
    assert torch.equal(read[1, "down"].codes.float(), weights[1, "down"].codes.float())
    common: dict[str, Any] = {"device": "cpu", "cache_tokens": 256}
    plain = Llama.from_pretrained(out, precision="fp8", recipe=Fp8Recipe(SCALES), **common)
    flipped = Llama.from_pretrained(out, precision="fp8-promoted", **common)
    rounded = [layer.down["prefill"] for layer in plain.weights.layers]
    assert torch.equal(flipped.weights.layers[1].down["prefill"], rounded[1].flip(0))
    assert [scale.numel() for scale in flipped.weights.scales[-4:]] == [512, 128, 384, 128]


def test_format_2_is_read(tiny_base_model: Path, tmp_path: Path) -> None:
    """Which named one file of FP8 weights."""
    layer = load_checkpoint(tiny_base_model, load_config(tiny_base_model)).layer(1)
    weights = {(1, "o"): quantize_weight("o", layer.o.flip(0), "tensor")}
    out = write(tiny_base_model, tmp_path / "out", weights=weights)
    rewrite(out, lambda c: c.update(format=2, fp8_weights={"file": "fp8_weights.safetensors"}))
    read = read_recipe(out, load_config(out)).weights
    assert torch.equal(read[1, "o"].codes.float(), weights[1, "o"].codes.float())


def test_format_1_is_read(calibrated: Path) -> None:
    """Which named neither parts in BF16 nor FP8 weights."""
    rewrite(calibrated, lambda c: [c.update(format=1), c.pop("bf16_layers"), c.pop("fp8_weights")])
    recipe = read_recipe(calibrated, load_config(calibrated))
    assert torch.equal(recipe.scales.scale, SCALES.scale)
    assert (recipe.bf16, dict(recipe.weights)) == (frozenset(), {})


# Refusals before it is written


def test_what_lies_there_is_kept_unless_it_may_be_replaced(tiny_base_model: Path, calibrated: Path) -> None:
    before = (calibrated / "futransformer.json").read_bytes()
    other = ActivationScales.from_amax(SCALES.amax * 2)
    with pytest.raises(InputError, match="holds a model written before: replace it with --force"):
        write(tiny_base_model, calibrated, scales=other)
    assert (calibrated / "futransformer.json").read_bytes() == before
    write(tiny_base_model, calibrated, scales=other, force=True)
    assert torch.equal(read_recipe(calibrated, load_config(calibrated)).scales.amax, other.amax)
    assert [path.name for path in calibrated.parent.iterdir()] == [calibrated.name]


def test_what_was_put_beside_our_files_is_not_lost(tiny_base_model: Path, calibrated: Path) -> None:
    """Another model, whose OUT was in this folder; and whatever lies beside a description that says nothing."""
    inside = write(tiny_base_model, calibrated / "inside")
    with pytest.raises(InputError, match=r"holds inside, which its futransformer\.json does not name"):
        write(tiny_base_model, calibrated, force=True)
    assert (inside / "futransformer.json").is_file()
    shutil.move(inside, calibrated.parent / "beside")
    (calibrated / "futransformer.json").write_text("{")
    with pytest.raises(InputError, match=r"holds config\.json, which its futransformer\.json does not name"):
        write(tiny_base_model, calibrated, force=True)


def test_a_folder_of_something_else_is_never_replaced(tiny_base_model: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.tex").write_text("years")
    with pytest.raises(InputError, match="holds something else"):
        write(tiny_base_model, mine, force=True)
    assert (mine / "thesis.tex").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="holds something else"):
        check_output(tiny_base_model, tmp_path / "file", force=True)


def test_the_model_itself_is_no_output(calibrated: Path) -> None:
    for output in (calibrated, calibrated / "inside", calibrated.parent, calibrated / ".." / calibrated.name):
        with pytest.raises(InputError, match="overlaps the model's folder"):
            write(calibrated, output, force=True)
    assert (calibrated / "model.safetensors").exists()


def test_what_cannot_be_written_is_refused_before_anything_is_computed(
    tiny_base_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BuildError, match="cannot be written"):
        check_output(tiny_base_model, tmp_path / "file" / "below", force=False)
    with pytest.raises(BuildError, match="File name too long"):
        check_output(tiny_base_model, tmp_path / ("a" * 250), force=False)
    monkeypatch.setattr(Path, "is_mount", lambda self: self.name == "volume")
    (tmp_path / "volume").mkdir()
    with pytest.raises(InputError, match="is a mount point"):
        check_output(tiny_base_model, tmp_path / "volume", force=False)
    monkeypatch.chdir(tmp_path / "volume")
    with pytest.raises(InputError, match=r"--output \. is the current folder"):
        check_output(tiny_base_model, Path(), force=False)
    check_output(tiny_base_model, tmp_path / "volume" / "deep" / "out", force=False)
    assert {path.name for path in tmp_path.rglob("*")} == {"file", "volume"}


def test_a_link_leads_to_where_the_folder_is_written(tiny_base_model: Path, tmp_path: Path) -> None:
    """One to nowhere too, and an empty folder that one stands in."""
    link, disk = tmp_path / "link", tmp_path / "disk"
    link.symlink_to(disk / "out")
    write(tiny_base_model, link)
    assert link.is_symlink()
    assert (disk / "out" / "futransformer.json").is_file()
    other = ActivationScales.from_amax(SCALES.amax * 2)
    write(tiny_base_model, link, force=True, scales=other)
    assert torch.equal(read_recipe(disk / "out", load_config(link)).scales.amax, other.amax)
    assert [path.name for path in disk.iterdir()] == ["out"]


def test_whoever_may_read_the_config_may_read_the_scales(calibrated: Path) -> None:
    modes = {(calibrated / name).stat().st_mode for name in ("config.json", "fp8_scales.safetensors")}
    assert len(modes) == 1


def test_an_empty_folder_will_do_and_so_will_one_yet_to_be_made(tiny_base_model: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for output in (tmp_path / "empty", tmp_path / "deep" / "below"):
        read_recipe(write(tiny_base_model, output), load_config(output))


@pytest.mark.parametrize("step", ["_link_or_copy", "sha256_of", "publish"])
def test_a_half_written_folder_is_none(
    tiny_base_model: Path, calibrated: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """New or in place of an old one, which stays; nothing else stays."""

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folder_module, step, fail)
    for output, force in ((calibrated.parent / "new", False), (calibrated, True)):
        with pytest.raises(BuildError, match="is full"):
            write(tiny_base_model, output, force=force)
    assert [path.name for path in calibrated.parent.iterdir()] == [calibrated.name]
    monkeypatch.undo()
    assert torch.equal(read_recipe(calibrated, load_config(calibrated)).scales.scale, SCALES.scale)


@pytest.mark.parametrize(
    ("fault", "raised"),
    [(OSError(5, "Input/output error"), BuildError), (KeyboardInterrupt(), KeyboardInterrupt)],
    ids=["disk", "interrupt"],
)
def test_the_old_folder_returns_when_the_new_one_cannot_take_its_place(
    tiny_base_model: Path,
    calibrated: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: BaseException,
    raised: type[BaseException],
) -> None:
    rename = Path.rename

    def refuse(self: Path, target: Path) -> Path:
        if self.name == "written":
            raise fault
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(raised):
        write(tiny_base_model, calibrated, force=True)
    assert torch.equal(read_recipe(calibrated, load_config(calibrated)).scales.scale, SCALES.scale)


# Refusals when it is read


def rewrite(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "futransformer.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def name_as_it_is(folder: Path, name: str) -> None:
    """Let the description name the file as it lies there."""
    rewrite(folder, lambda content: content["sha256"].update({name: sha256_of(folder / name)}))


def replace_scales(folder: Path, **tensors: torch.Tensor) -> None:
    """Other scales, of the right sha256."""
    save_file(tensors, folder / "fp8_scales.safetensors")
    name_as_it_is(folder, "fp8_scales.safetensors")


def replace_weights(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """FP8 weights, named by the description and of the right sha256."""
    save_file(tensors, folder / "fp8_weights.safetensors")
    rewrite(folder, lambda content: content.update(fp8_weights={"file": "fp8_weights.safetensors"}))
    name_as_it_is(folder, "fp8_weights.safetensors")


def add_line(path: Path) -> None:
    """Change the file, but not what it says as JSON."""
    path.write_text(path.read_text() + "\n")


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no description": (lambda f: (f / "futransformer.json").unlink(), "has no FP8 scales"),
    "cut description": (lambda f: (f / "futransformer.json").write_text('{"form'), "not valid JSON"),
    "no version": (lambda f: rewrite(f, lambda c: c.pop("format")), "format must be an integer"),
    "another version": (lambda f: rewrite(f, lambda c: c.update(format=4)), "is of format 4, this version reads"),
    "no parts": (lambda f: rewrite(f, lambda c: c.pop("bf16_layers")), "bf16_layers must be a string"),
    "parts of another depth": (lambda f: rewrite(f, lambda c: c.update(bf16_layers="2")), "none of the parts of 2 lay"),
    "no weights": (
        lambda f: rewrite(f, lambda c: c.update(fp8_weights={"files": ["fp8_weights.safetensors"]})),
        "fp8_weights.safetensors must be a string",
    ),
    "weights elsewhere": (
        lambda f: rewrite(f, lambda c: c.update(fp8_weights={"files": ["../fp8_weights.safetensors"]})),
        "fp8_weights.files must be a list of names of files",
    ),
    "weights of another type": (
        lambda f: replace_weights(f, {"layers.0.o.codes": torch.zeros(2, 2), "layers.0.o.scale": torch.ones(1)}),
        r"layers.0.o.codes is F32 \[2, 2\], where the model has F8_E4M3 \[128, 256\]",
    ),
    "weights without a scale": (
        lambda f: replace_weights(f, {"layers.0.o.codes": CODES.new_zeros(128, 256)}),
        "fp8_weights.safetensors lacks layers.0.o.scale",
    ),
    "weights of another shape": (
        lambda f: replace_weights(f, {"layers.0.o.codes": CODES, "layers.0.o.scale": torch.ones(1)}),
        r"layers.0.o.codes is F8_E4M3 \[2, 2\], where the model has F8_E4M3 \[128, 256\]",
    ),
    "weights of another depth": (
        lambda f: replace_weights(f, {"layers.2.o.codes": CODES}),
        "holds layers.2.o.codes, which is none of the model's",
    ),
    "a long name": (lambda f: rewrite(f, lambda c: c["sha256"].update({"x" * 256 + ".json": ""})), "no name of a file"),
    "a file elsewhere": (lambda f: rewrite(f, lambda c: c["sha256"].update({"../a.json": ""})), "no name of a file"),
    "no sha256": (lambda f: rewrite(f, lambda c: c.update(sha256={})), "fp8_scales.safetensors must be a string"),
    "no scales": (lambda f: (f / "fp8_scales.safetensors").unlink(), "fp8_scales.safetensors is missing"),
    "other scales": (lambda f: save_file({"scale": SCALES.amax}, f / "fp8_scales.safetensors"), "sha256 differs"),
    "no maxima": (lambda f: replace_scales(f, scale=SCALES.scale), "fp8_scales.safetensors lacks 'amax'"),
    "another config": (lambda f: add_line(f / "config.json"), "config.json is not the file .* its sha256 differs"),
    "another tokenizer": (lambda f: add_line(f / "tokenizer.json"), "tokenizer.json is not the file"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json is missing"),
    "a config of no sha256": (lambda f: rewrite(f, lambda c: c["sha256"].pop("config.json")), "config.json must be a"),
    "the description of another model": (
        lambda f: rewrite(f, lambda c: c["sha256"].update({"config.json": "0" * 64})),
        "config.json is not the file",
    ),
    "scales of another depth": (
        lambda f: replace_scales(f, scale=torch.ones(13), amax=torch.ones(13)),
        r"scale must be float32 \[9\], .* but is torch.float32 \[13\]",
    ),
    "another type": (
        lambda f: replace_scales(f, scale=SCALES.scale.double(), amax=SCALES.amax),
        r"scale must be float32 \[9\], .* but is torch.float64",
    ),
    "a scale without a reciprocal": (
        lambda f: replace_scales(f, scale=torch.full((9,), 1e-39), amax=SCALES.amax),
        "scale holds values that no scale",
    ),
    "a scale of zero": (
        lambda f: replace_scales(f, scale=torch.zeros(9), amax=SCALES.amax),
        "scale holds values that no scale",
    ),
    "a maximum that is none": (
        lambda f: replace_scales(f, scale=SCALES.scale, amax=torch.full((9,), torch.nan)),
        "amax holds values that no amax",
    ),
}


def test_what_is_not_read_may_be_changed(tiny_base_model: Path, tmp_path: Path) -> None:
    """Licences and pages; and the weights, which are too large to be checked whenever they are loaded."""
    source = tmp_path / "source"
    shutil.copytree(tiny_base_model, source)
    for name in ("README.md", "LICENSE.txt"):
        (source / name).write_text("ours")
    out = write(source, tmp_path / "out")
    for name in ("README.md", "LICENSE.txt"):
        add_line(out / name)
    assert torch.equal(read_recipe(out, load_config(out)).scales.scale, SCALES.scale)


@pytest.mark.parametrize("case", DAMAGE)
def test_what_is_not_sound_is_refused(calibrated: Path, case: str) -> None:
    damage, message = DAMAGE[case]
    damage(calibrated)
    with pytest.raises(CheckpointError, match=message) as refusal:
        Llama.from_pretrained(calibrated, precision="fp8", device="cpu", cache_tokens=64)
    assert f"futransformer calibrate '{calibrated}' --output OUT" in str(refusal.value)
    assert str(calibrated) in str(refusal.value).split("calibrate ")[0]


def test_a_plain_folder_says_how_to_calibrate(tiny_base_model: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no FP8 scales.*futransformer calibrate .*tiny-base --output OUT"):
        Llama.from_pretrained(tiny_base_model, precision="fp8", device="cpu")


def test_a_file_that_is_no_safetensors_is_refused(calibrated: Path) -> None:
    path = calibrated / "fp8_scales.safetensors"
    path.write_bytes(b"\xff" * 100)
    name_as_it_is(calibrated, path.name)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_recipe(calibrated, load_config(calibrated))


def test_a_folder_below_home_is_found(calibrated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(calibrated.parent))
    model = Llama.from_pretrained(f"~/{calibrated.name}", precision="fp8", device="cpu", cache_tokens=64)
    assert model.scaling is not None
    assert Tokenizer(f"~/{calibrated.name}").folder == calibrated
