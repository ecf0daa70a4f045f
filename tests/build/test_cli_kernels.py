"""generate, build, cache and doctor as a user types them: what they print, write and return."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from futransformer.build.export import load_exported
from futransformer.build.settings import BuildSettings
from futransformer.cli import main
from futransformer.cli.doctor import examine, ready
from futransformer.generator.config import load_config
from futransformer.generator.plan import kernel_specs
from futransformer.generator.render import render
from tests.build.conftest import FakeNvcc
from tests.conftest import PATIENCE

SPECS = kernel_specs(load_config("smollm2-135m"), "bf16")


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine with no tool chain, no torch and no GPU."""
    monkeypatch.setattr("futransformer.build.toolchain.pip_toolkits", lambda: ())
    for name in ("CUDA_HOME", "CUDA_PATH", "FUTRANSFORMER_NVCC", "NVCC_CCBIN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("FUTRANSFORMER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(sys.modules, "torch", None)  # the import system's way to say: there is none
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)


def fails(capsys: pytest.CaptureFixture[str], status: int, *argv: str) -> str:
    """Run a command that must fail with this status and one message, and return the message."""
    assert main(argv) == status
    captured = capsys.readouterr()
    assert captured.err.startswith("futransformer: error: ") or "\nfutransformer: error: " in captured.err
    assert "Traceback" not in captured.err
    return captured.err.partition("futransformer: error: ")[2]


# --- generate ---


@pytest.mark.usefixtures("bare")
def test_generate_writes_every_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "the sources"
    assert main(["generate", "smollm2-135m", "-o", str(folder)]) == 0
    written = {path.name: path.read_text() for path in folder.iterdir()}
    assert written == {f"{spec.name}.cu": render(spec) for spec in SPECS}
    assert f"{len(SPECS)} sources for smollm2-135m, bf16" in capsys.readouterr().out


def test_generate_takes_the_kernels_of_bf16_layers_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    counts = []
    for options in ((), ("--mixed",)):
        folder = tmp_path / str(len(options))
        assert main(["generate", "smollm2-135m", "--precision", "fp8", *options, "--output", str(folder)]) == 0
        counts.append(len(list(folder.glob("*.cu"))))
    capsys.readouterr()
    assert counts[1] > counts[0]
    assert main(["generate", "smollm2-135m", "--mixed", "--output", str(tmp_path / "none")]) == 2
    assert "bf16 reads prompts in BF16 throughout" in capsys.readouterr().err


def test_generate_imports_neither_torch_nor_cuda(tmp_path: Path) -> None:
    script = (
        "import sys; from futransformer.cli import main; status = main(sys.argv[1:]);"
        "print(status, sorted({'torch', 'numpy', 'transformers', 'cuda', 'cutlass_library'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", script, "generate", "smollm2-135m", "-o", str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, env={"PATH": ""})
    assert ran.stdout.splitlines()[-1] == "0 []"


def test_generate_takes_a_folder_or_a_file(tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
    }
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    for config_argument, name in (("model", "by folder"), ("model/config.json", "by file")):
        assert main(["generate", str(tmp_path / config_argument), "-o", str(tmp_path / name)]) == 0
        assert {path.stem for path in (tmp_path / name).iterdir()} == {spec.name for spec in SPECS}


def test_what_cannot_be_asked_for_is_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "llama-3.1-8b" in fails(capsys, 2, "generate", "llama-9")
    assert "choose one of: bf16" in fails(capsys, 2, "generate", "smollm2-135m", "--precision", "fp9")
    assert "jobs must be 1 or more" in fails(capsys, 2, "build", "smollm2-135m", "--jobs", "0")
    for argv in ([], ["cache"], ["build"], ["conquer"]):
        with pytest.raises(SystemExit) as caught:
            main(argv)
        assert caught.value.code == 2


def test_what_cannot_be_written_is_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert str(tmp_path / "file") in fails(capsys, 1, "generate", "smollm2-135m", "-o", str(tmp_path / "file" / "x"))


# --- build ---


def test_build_prints_progress_and_a_table(
    machine: FakeNvcc, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["build", "smollm2-135m", "--jobs", "2", "-o", str(tmp_path / "export")]) == 0
    captured = capsys.readouterr()
    progress = captured.err.splitlines()
    assert len(progress) == len(SPECS) == len(machine.calls)
    assert progress[-1].startswith(f"[{len(SPECS)}/{len(SPECS)}] ")

    header, *rows, summary = captured.out.splitlines()
    assert header.split() == ["kernel", "tile", "stages", "registers", "shared", "B", "spill", "B", "seconds"]
    assert [row.split()[0] for row in rows] == [spec.name for spec in SPECS]
    gemm = next(row.split() for row in rows if row.startswith("gemm_qkv"))
    spec = next(spec for spec in SPECS if spec.name == gemm[0])
    assert gemm[1:6] == [
        str(getattr(spec, "tile", None)),
        str(getattr(spec, "stages", None)),
        "10",
        str(spec.shared_bytes),
        "0",
    ]
    assert f"{len(SPECS)} kernels of smollm2-135m (bf16)" in summary
    assert f"{len(SPECS)} built" in summary
    assert {record.name for record in load_exported(tmp_path / "export").kernels} == {spec.name for spec in SPECS}


def test_build_json_and_a_second_build(machine: FakeNvcc, capsys: pytest.CaptureFixture[str]) -> None:
    main(["build", "smollm2-135m", "--jobs", "2"])
    capsys.readouterr()
    assert main(["build", "smollm2-135m", "--json"]) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert captured.err == ""
    assert (report["config"], report["precision"], report["compiled"]) == ("smollm2-135m", "bf16", 0)
    assert [kernel["name"] for kernel in report["kernels"]] == [spec.name for spec in SPECS]
    assert all(Path(kernel["cubin"]).is_file() for kernel in report["kernels"])
    assert len(machine.calls) == len(SPECS)


def test_a_failed_build_is_status_1_with_the_compilers_words(
    machine: FakeNvcc, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.fails("echo 'kernel.cu(3): error: no such thing'; exit 1")
    message = fails(capsys, 1, "build", "smollm2-135m")
    assert message.startswith("kernel ")
    assert "kernel.cu(3): error: no such thing" in message


@pytest.mark.usefixtures("bare")
def test_build_without_nvcc_is_status_1_with_the_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    assert 'pip install "cuda-toolkit[nvcc,cudart,cccl]==13.0.*"' in fails(capsys, 1, "build", "smollm2-135m")


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(
    ("end", "status", "said"),
    [
        (signal.SIGINT, 130, "futransformer: error: interrupted\n"),
        (signal.SIGTERM, 143, ""),
        (signal.SIGHUP, 129, ""),
    ],
)
def test_an_interrupt_stops_the_compilers(
    machine: FakeNvcc, settings: BuildSettings, end: signal.Signals, status: int, said: str
) -> None:
    machine.hold()
    command = [sys.executable, "-m", "futransformer", "build", "smollm2-135m", "--jobs", "2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + PATIENCE
    while len(machine.note("waiting").split()) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(end)
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out, err) == (status, "", said)
    assert list(settings.cache_root.rglob("*.partial-*")) == []
    for running in map(int, machine.note("running").split()):
        with pytest.raises(ProcessLookupError):
            os.kill(running, 0)


# --- cache ---


def test_the_cache_is_listed_and_cleared(
    machine: FakeNvcc, settings: BuildSettings, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["build", "smollm2-135m", "--jobs", "2"])
    next(settings.cache_root.rglob("manifest.json")).write_text("")
    capsys.readouterr()

    assert main(["cache", "list", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert len(report["kernels"]) == len(SPECS)
    assert [kernel["readable"] for kernel in report["kernels"]].count(False) == 1
    assert report["size_bytes"] == sum(path.stat().st_size for path in settings.cache_root.rglob("*") if path.is_file())

    assert main(["cache", "list"]) == 0
    text = capsys.readouterr().out
    assert text.count("13.0.88") == len(SPECS) - 1
    assert text.count("unreadable") == 1
    assert str(settings.cache_root) in text

    assert main(["cache", "clear", "--json"]) == 0
    cleared = json.loads(capsys.readouterr().out)
    assert (cleared["removed"], cleared["size_bytes"], cleared["busy"]) == (len(SPECS), report["size_bytes"], 0)
    assert main(["cache", "clear"]) == 0
    assert main(["cache", "list"]) == 0
    assert f"0 kernels, 0.00 MB, in {settings.cache_root}" in capsys.readouterr().out


@pytest.mark.usefixtures("machine")
def test_a_reader_that_has_gone_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "futransformer", "cache", "list"]
    try:
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.usefixtures("interruptible")
def test_nohup_is_heeded() -> None:
    """SIGHUP that was ignored before stays ignored while a command runs."""
    code = (
        "import os, signal, sys\nfrom futransformer import cli\n"
        "cli.doctor.examine = lambda _: os.kill(os.getpid(), signal.SIGHUP) or ()\n"
        "sys.exit(cli.main(['doctor', '--json']))"
    )
    kept = subprocess.run(["nohup", sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert kept.returncode == 0, kept.stderr
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 129


@pytest.mark.usefixtures("machine")
def test_a_closed_output_is_no_error() -> None:
    command = ["bash", "-c", f"{sys.executable} -m futransformer cache list >&-"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_output_that_has_no_such_character_is_one_message(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "futransformer", "generate", "smollm2-135m", "-o", str(tmp_path / "é")]
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 1
    assert done.stderr.startswith("futransformer: error: the output's encoding, ascii, has no '\\xe9': set PYTHONIO")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("futransformer 0.")


# --- doctor ---


@pytest.mark.usefixtures("bare")
def test_doctor_on_a_machine_with_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ready"] == {"generate": True, "build": False, "run": False}
    missing = {check["name"]: check for check in report["checks"] if not check["ok"]}
    assert set(missing) == {
        "nvcc",
        "host compiler",
        "trial compilation",
        "torch",
        "cuda-python",
        "NVIDIA driver",
        "GPU",
    }
    assert all(check["remedy"] for check in missing.values())
    assert missing["nvcc"]["remedy"].startswith("pip install")

    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "missing  nvcc" in text
    assert "ok       cache folder" in text
    assert "Kernels can be generated: yes, built: no, run: no" in text


@pytest.mark.usefixtures("bare")
def test_doctor_without_jinja() -> None:
    code = "import sys; sys.modules['jinja2'] = None; from futransformer.cli import main; sys.exit(main(['doctor']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == ""
    assert "missing  Jinja" in done.stdout
    assert "-> pip install jinja2" in done.stdout
    assert "Kernels can be generated: no" in done.stdout


@pytest.mark.usefixtures("machine")
def test_doctor_goes_on_past_what_the_system_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A host compiler that is no program, and a folder for temporary files that cannot be written."""
    garbage = tmp_path / "g++"
    garbage.write_text("garbage")
    garbage.chmod(0o755)
    monkeypatch.setenv("NVCC_CCBIN", str(garbage))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    main(["doctor", "--json"])
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert checks["host compiler"]["detail"] == f"{garbage} does not run: Exec format error"
    assert checks["trial compilation"]["detail"].startswith("cannot be examined: ")
    assert len(checks) == 13


class Driver(ModuleType):
    """A CUDA driver with one GPU."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0)
    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR=0, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR=1
    )

    def __init__(self, capability: tuple[int, int] = (9, 0), version: int = 13000) -> None:
        super().__init__("cuda.bindings.driver")
        answers: dict[str, Any] = {
            "cuInit": lambda _: (0,),
            "cuDriverGetVersion": lambda: (0, version),
            "cuDeviceGetCount": lambda: (0, 1),
            "cuDeviceGet": lambda ordinal: (0, ordinal),
            "cuDeviceGetName": lambda length, device: (0, b"A GPU\0 \0 left over".ljust(length, b"\0")),
            "cuDeviceGetAttribute": lambda attribute, device: (0, capability[attribute]),
            "cuDeviceTotalMem": lambda device: (0, 141_000_000_000),
        }
        vars(self).update(answers)


@pytest.fixture
def torch_with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = ModuleType("torch")
    vars(torch)["version"] = SimpleNamespace(cuda="13.0")
    monkeypatch.setitem(sys.modules, "torch", torch)


def set_driver(monkeypatch: pytest.MonkeyPatch, driver: ModuleType) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver)


@pytest.mark.usefixtures("machine", "torch_with_cuda")
def test_doctor_on_a_complete_machine(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    set_driver(monkeypatch, Driver())
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "missing" not in text
    assert "A GPU, compute capability 9.0, 141 GB" in text
    assert "Kernels can be generated: yes, built: yes, run: yes" in text


@pytest.mark.usefixtures("machine", "torch_with_cuda")
@pytest.mark.parametrize(
    ("driver", "check", "words"),
    [
        (Driver(capability=(8, 0)), "GPU", "no Hopper GPU, only: A GPU, compute capability 8.0, 141 GB"),
        (Driver(capability=(10, 0)), "GPU", "no Hopper GPU, only: A GPU, compute capability 10.0, 141 GB"),
        (Driver(version=12080), "NVIDIA driver", "serves CUDA 12.8, older than nvcc 13.0 builds for"),
    ],
)
def test_doctor_on_a_machine_that_cannot_run(
    monkeypatch: pytest.MonkeyPatch, driver: ModuleType, check: str, words: str
) -> None:
    set_driver(monkeypatch, driver)
    checks = examine(BuildSettings.from_environment())
    assert [(found.name, found.detail) for found in checks if not found.ok] == [(check, words)]
    assert ready(checks) == {"generate": True, "build": True, "run": False}


@pytest.mark.usefixtures("machine")
def test_doctor_tries_the_compiler(machine: FakeNvcc, capsys: pytest.CaptureFixture[str]) -> None:
    machine.fails("echo '#error -- unsupported GNU version! gcc versions later than 15 are not supported!'; exit 1")
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "missing  trial compilation" in text
    assert "unsupported GNU version" in text
    assert "NVCC_CCBIN" in text
    assert "built: no" in text
    assert "The full log" not in text


@pytest.mark.usefixtures("machine")
def test_doctor_says_that_the_cache_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FUTRANSFORMER_CACHE", str(tmp_path / "file" / "cache"))
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "missing  cache folder" in text
    assert "FUTRANSFORMER_CACHE" in text
