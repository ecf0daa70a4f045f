"""What a user sees of bad input: the command's exit status and one message on standard error, never a traceback.

Most cases are a process of their own, as a shell would start it; of those that load torch, which takes seconds, a few
are, and the others call the same function. What a message must say is tested beside what raises it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from futransformer.cli import main
from futransformer.driver import hopper_problem

# Run before the command, in its process: a machine without the tool kit that pip has installed here.
NO_PIP_TOOLKIT = "from futransformer.build import toolchain; toolchain.pip_toolkits = lambda: ()"


def futransformer(
    *arguments: object, environment: Mapping[str, str] | None = None, machine: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run a command."""
    script = f"{machine}\nimport sys\nfrom futransformer.cli import main\nsys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **(environment or {})},
    )


def refusal(status: int, *arguments: object, environment: Mapping[str, str] | None = None, machine: str = "") -> str:
    """Run a command that must fail so, and return its message."""
    ran = futransformer(*arguments, environment=environment, machine=machine)
    assert ran.returncode == status, ran.stderr
    return message_of(ran.stdout, ran.stderr)


def message_of(stdout: str, stderr: str) -> str:
    """The one message at the end of standard error; nothing may stand on standard output."""
    assert stdout == ""
    assert "Traceback" not in stderr
    assert stderr.count("futransformer: error: ") == 1
    return stderr.partition("futransformer: error: ")[2].rstrip("\n")


def refusal_line(status: int, *arguments: object, environment: Mapping[str, str] | None = None) -> str:
    """The same, of a message that is one line."""
    message = refusal(status, *arguments, environment=environment)
    assert "\n" not in message
    return message


def refusal_here(capsys: pytest.CaptureFixture[str], status: int, *arguments: object) -> str:
    """The same in this process, where torch is loaded already."""
    assert main([str(argument) for argument in arguments]) == status
    message = message_of(*capsys.readouterr())
    assert "\n" not in message
    return message


@pytest.fixture
def model(tiny_base_model: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model, to be damaged."""
    return Path(shutil.copytree(tiny_base_model, tmp_path / "model"))


@pytest.fixture
def sharded(model: Path) -> Path:
    """The same in two shards."""
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, held in shards.items():
        save_file({name: tensors[name] for name in held}, model / shard)
    weight_map = {name: shard for shard, held in shards.items() for name in held}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return model


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def run(folder: Path, *more: object) -> tuple[object, ...]:
    return ("run", folder, "--reference", "--prompt", "Hello", *more)


# Models


def test_a_missing_shard(sharded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (sharded / "b.safetensors").unlink()
    assert "b.safetensors is missing" in refusal_here(capsys, 2, *run(sharded))


def test_a_truncated_shard(sharded: Path) -> None:
    whole = (sharded / "a.safetensors").read_bytes()
    (sharded / "a.safetensors").write_bytes(whole[:-100])
    message = refusal_line(2, *run(sharded))
    assert f"a.safetensors is damaged: it ends at byte {len(whole) - 100}" in message
    assert message.endswith("fetch it again")


def test_a_wrong_shape(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(64, dtype=torch.bfloat16)
    save_file(tensors, model / "model.safetensors")
    message = refusal_here(capsys, 2, *run(model))
    assert "model.norm.weight has shape [64], the config asks for [128]" in message


@pytest.mark.parametrize("command", ["generate", "build"])
def test_an_unknown_rope_type_and_what_is_no_llama(model: Path, tmp_path: Path, command: str) -> None:
    change_config(model, rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0})
    message = refusal_line(2, command, model, "-o", tmp_path / "out")
    assert "config.json: rope_parameters.rope_type 'yarn' is not supported; supported: default, llama3" in message
    change_config(model, model_type="gpt2")
    assert "model_type 'gpt2' is not a Llama; supported: llama, mistral" in refusal_line(2, command, model)
    assert not (tmp_path / "out").exists()


def test_a_model_that_does_not_fit(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = refusal_here(capsys, 1, *run(model, "--max-new-tokens", 10**12))
    assert "model needs " in message
    assert "GiB (prefill weights " in message
    assert "but this machine has " in message


# Prompts


def test_a_prompt_longer_than_the_context(model: Path) -> None:
    message = refusal_line(2, *run(model, "--max-new-tokens", 600))
    assert "would have 604 tokens; model is made for at most 512" in message


def test_an_empty_prompt(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "the prompt is empty" in refusal_here(capsys, 2, "run", model, "--reference", "--prompt", "")


# Machines


@pytest.mark.skipif(hopper_problem() is None, reason="this machine has a Hopper GPU")
def test_no_gpu(model: Path, tmp_path: Path) -> None:
    message = refusal_line(1, "run", model, "--kernels", tmp_path, "--prompt", "Hello")
    assert message.startswith("no Hopper GPU: ")
    assert "--reference" in message


def test_a_gpu_that_is_not_hopper(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "an A100")
    message = refusal_here(capsys, 1, "run", model, "--kernels", tmp_path, "--prompt", "Hello")
    assert message.startswith("no Hopper GPU: an A100 has compute capability 8.0; the kernels are built for 9.0")


def bare(tmp_path: Path) -> dict[str, str]:
    """An environment with nothing on PATH and an empty cache."""
    nothing = dict.fromkeys(("PATH", "CUDA_HOME", "CUDA_PATH", "NVCC_CCBIN", "FUTRANSFORMER_NVCC"), "")
    return {**nothing, "FUTRANSFORMER_CACHE": str(tmp_path / "cache"), "FUTRANSFORMER_DISABLE_JIT": ""}


def test_no_nvcc(tmp_path: Path) -> None:
    message = refusal(1, "build", "smollm2-135m", environment=bare(tmp_path), machine=NO_PIP_TOOLKIT)
    assert "no usable nvcc (12.8 or newer) was found" in message
    assert 'pip install "cuda-toolkit[nvcc,cudart,cccl]==13.0.*"' in message


def test_no_host_compiler(tmp_path: Path) -> None:
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n")
    nvcc.chmod(0o755)
    environment = {**bare(tmp_path), "FUTRANSFORMER_NVCC": str(nvcc)}
    message = refusal_line(1, "build", "smollm2-135m", environment=environment)
    assert "the host compiler 'g++' was not found (PATH: empty)" in message
    assert "apt install g++" in message


def test_a_full_disk_while_building(tmp_path: Path) -> None:
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(
        "#!/bin/sh\n"
        "[ $1 = --version ] && echo 'Cuda compilation tools, release 13.0, V13.0.88' && exit 0\n"
        "echo 'fatal   : Could not write kernel.cubin: No space left on device' && exit 1\n"
    )
    nvcc.chmod(0o755)
    environment = {**bare(tmp_path), "FUTRANSFORMER_NVCC": str(nvcc), "NVCC_CCBIN": "/bin/sh"}
    message = refusal_line(1, "build", "smollm2-135m", environment=environment)
    assert f"the disk of the kernel cache {tmp_path / 'cache'} is full" in message
    assert "FUTRANSFORMER_CACHE" in message
    left = [path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert all(name.endswith(".lock") for name in left), "nothing half-written"


def test_generate_and_cache_need_neither_nvcc_nor_a_compiler(tmp_path: Path) -> None:
    """On a machine with nothing at all: sources are written, an empty cache is listed and cleared."""
    out = tmp_path / "sources"
    ran = futransformer("generate", "smollm2-135m", "-o", out, environment=bare(tmp_path), machine=NO_PIP_TOOLKIT)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert len(list(out.glob("*.cu"))) == int(ran.stdout.split()[0])
    for action, key in (("list", "kernels"), ("clear", "removed")):
        ran = futransformer("cache", action, "--json", environment=bare(tmp_path), machine=NO_PIP_TOOLKIT)
        assert (ran.returncode, ran.stderr) == (0, "")
        assert json.loads(ran.stdout)[key] in ([], 0)
    assert not (tmp_path / "cache").exists()
