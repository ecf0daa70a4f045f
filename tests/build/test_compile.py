"""Building into the cache: what rebuilds and what does not, and every way in which a build can go wrong."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from futransformer.build.cache import KernelCache, _try_lock
from futransformer.build.compile import BuildEvent, build_kernels
from futransformer.build.manifest import KernelRecord, load_cubin
from futransformer.build.settings import BuildSettings
from futransformer.generator.config import load_config
from futransformer.generator.errors import ArtifactError, BuildError, ToolchainError
from futransformer.generator.plan import kernel_specs
from futransformer.generator.specs import KernelSpec
from tests.build.conftest import FakeNvcc, TinySpec, render_tiny
from tests.conftest import PATIENCE

# A build of every kernel of a small model, by the pretended compiler, in a process of its own.
BUILD_MODEL = """
from futransformer.build import BuildSettings, build_kernels
from futransformer.generator.config import load_config
from futransformer.generator.plan import kernel_specs
records = build_kernels(
    kernel_specs(load_config("smollm2-135m"), "bf16"), settings=BuildSettings.from_environment(jobs=2)
)
print("\\n".join(f"{record.name} {record.cubin_sha256}" for record in records))
"""
MODEL_KERNELS = len(kernel_specs(load_config("smollm2-135m"), "bf16"))


def build(settings: BuildSettings, *specs: KernelSpec) -> tuple[KernelRecord, ...]:
    return build_kernels(specs or (TinySpec(),), settings=settings, render=render_tiny)


def build_model(settings: BuildSettings) -> subprocess.Popen[str]:
    environment = os.environ | {
        "FUTRANSFORMER_CACHE": str(settings.cache_root),
        "FUTRANSFORMER_NVCC": str(settings.nvcc),
        "NVCC_CCBIN": settings.host_compiler,
    }
    return subprocess.Popen(
        [sys.executable, "-c", BUILD_MODEL],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_until(condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def runs(process: str) -> bool:
    """Whether a process that is nobody's child has not ended; where nobody asks for its status it stays a zombie."""
    try:
        return not Path("/proc", process, "stat").read_text().rpartition(") ")[2].startswith("Z")
    except (FileNotFoundError, ProcessLookupError):
        return False


def left_over(settings: BuildSettings) -> list[str]:
    """Names of what a build must not leave behind."""
    return [path.name for path in settings.cache_root.rglob("*.partial-*")]


def folders(settings: BuildSettings) -> list[Path]:
    return [entry.folder for entry in KernelCache(settings.cache_root).entries()]


# --- the cache ---


def test_a_kernel_is_built_once(settings: BuildSettings, nvcc: FakeNvcc) -> None:
    events: list[BuildEvent] = []
    specs = (TinySpec("one"), TinySpec("two"))
    first = build_kernels(specs, settings=settings, render=render_tiny, progress=events.append)
    second = build_kernels(specs, settings=settings, render=render_tiny, progress=events.append)

    assert first == second
    assert [record.name for record in first] == ["one", "two"]
    assert sorted(nvcc.calls) == ["one", "two"]
    assert [(event.done, event.total, event.cached) for event in events] == [
        (1, 2, False),
        (2, 2, False),
        (1, 2, True),
        (2, 2, True),
    ]
    assert left_over(settings) == []


def test_a_record_says_what_the_runtime_needs(settings: BuildSettings) -> None:
    (record,) = build(settings)
    assert (record.name, record.params, record.threads, record.cluster) == ("tiny", TinySpec().params, 32, (1, 1, 1))
    assert (record.resources.registers, record.nvcc_version) == (10, "13.0.88")
    assert load_cubin(record).endswith(render_tiny(TinySpec()).encode())
    assert sorted(path.name for path in record.cubin.parent.iterdir()) == [
        "build.log",
        "kernel.cu",
        "kernel.cubin",
        "manifest.json",
    ]


@pytest.mark.parametrize("changed", [TinySpec(value=2.0), TinySpec(block=64)], ids=["source", "launch interface"])
def test_another_source_or_interface_is_another_kernel(
    settings: BuildSettings, nvcc: FakeNvcc, changed: TinySpec
) -> None:
    build(settings)
    (record,) = build(settings, changed)
    assert record.threads == changed.threads
    assert nvcc.calls == ["tiny", "tiny"]


def test_an_edited_header_with_an_old_time_rebuilds(settings: BuildSettings, nvcc: FakeNvcc) -> None:
    header = settings.include_dir / "futransformer" / "tiny.cuh"
    inner = settings.include_dir / "futransformer" / "inner.cuh"
    header.write_text('#include "inner.cuh"\n#define OFFSET INNER\n')
    inner.write_text("#define INNER 1.0f\n")
    build(settings)
    inner.write_text("#define INNER 2.0f\n")
    os.utime(inner, (0, 0))
    build(settings)
    assert len(nvcc.calls) == 2

    os.utime(inner)  # now the time alone changes
    build(settings)
    assert len(nvcc.calls) == 2


def test_the_same_tool_chain_elsewhere_does_not_rebuild(
    settings: BuildSettings, nvcc: FakeNvcc, make_nvcc: Callable[..., FakeNvcc], tmp_path: Path
) -> None:
    build(settings)
    moved = make_nvcc("another place")
    assert settings.cutlass_include is not None
    cutlass = tmp_path / "moved headers"
    settings.cutlass_include.rename(cutlass)
    headers = tmp_path / "our moved headers"
    settings.include_dir.rename(headers)
    elsewhere = replace(settings, nvcc=moved.path, cutlass_include=cutlass, include_dir=headers)
    build(elsewhere)
    assert moved.calls == []

    (cutlass / "cute" / "tensor.hpp").write_text("// another CuTe\n")
    build(elsewhere)
    assert moved.calls == ["tiny"]


def test_another_nvcc_rebuilds(settings: BuildSettings, make_nvcc: Callable[..., FakeNvcc]) -> None:
    build(settings)
    newer = make_nvcc("newer", "13.1.2")
    (record,) = build(replace(settings, nvcc=newer.path))
    assert newer.calls == ["tiny"]
    assert record.nvcc_version == "13.1.2"
    assert len(folders(settings)) == 2


def truncate(folder: Path) -> None:
    image = (folder / "kernel.cubin").read_bytes()
    (folder / "kernel.cubin").write_bytes(image[: len(image) // 2])


def flip_a_bit(folder: Path) -> None:
    image = bytearray((folder / "kernel.cubin").read_bytes())
    image[len(image) // 2] ^= 1
    (folder / "kernel.cubin").write_bytes(image)


def remove_cubin(folder: Path) -> None:
    (folder / "kernel.cubin").unlink()


def empty_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text("")


def cut_manifest(folder: Path) -> None:
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text.replace('"threads"', '"strands"'))


def forge(key: str) -> Callable[[Path], None]:
    """A manifest of another kernel: the folder's name holds a part of each key, and cannot tell all of them apart."""

    def damage(folder: Path) -> None:
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["kernel"][key] = manifest["kernel"][key][:-1] + "z"
        (folder / "manifest.json").write_text(json.dumps(manifest))

    damage.__name__ = f"another {key}"
    return damage


DAMAGE = (
    *(truncate, flip_a_bit, remove_cubin, empty_manifest, cut_manifest),
    *map(forge, ("name", "source_key", "toolchain_key")),
)


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_a_corrupt_entry_is_rebuilt(settings: BuildSettings, nvcc: FakeNvcc, damage: Callable[[Path], None]) -> None:
    (record,) = build(settings)
    image = load_cubin(record)
    damage(record.cubin.parent)
    (again,) = build(settings)
    assert nvcc.calls == ["tiny", "tiny"]
    assert load_cubin(again) == image
    assert len(folders(settings)) == 1
    assert left_over(settings) == []


def test_a_very_long_name_is_cached(settings: BuildSettings, nvcc: FakeNvcc) -> None:
    specs = (TinySpec("k" * 400), TinySpec("k" * 399 + "l"))
    build(settings, *specs)
    records = build(settings, *specs)
    assert len(nvcc.calls) == 2
    assert records[0].cubin != records[1].cubin


def test_what_took_longest_is_built_first(
    settings: BuildSettings, nvcc: FakeNvcc, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = replace(settings, jobs=1)
    for name, seconds in (("fast", 1.0), ("slow", 9.0)):
        clock = SimpleNamespace(monotonic=count(0.0, seconds).__next__)  # looked at before and behind a compiler
        monkeypatch.setattr("futransformer.build.compile.time", clock)
        build(one, TinySpec(name))
    build(one, TinySpec("fast", 2.0), TinySpec("slow", 2.0), TinySpec("unknown", 2.0))
    assert nvcc.calls[2:] == ["unknown", "slow", "fast"]


def test_the_environment_adds_nothing_to_the_compilation(
    settings: BuildSettings, nvcc: FakeNvcc, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NVCC_APPEND_FLAGS", "NVCC_PREPEND_FLAGS", "CPATH", "CPLUS_INCLUDE_PATH"):
        monkeypatch.setenv(name, "-hidden-input")
    (record,) = build(settings)
    assert "hidden-input" not in nvcc.note("environment")
    temporary = next(line for line in nvcc.note("environment").splitlines() if line.startswith("TMPDIR="))
    assert Path(temporary.removeprefix("TMPDIR=")).parent.parent == record.cubin.parent.parent
    assert {"-gencode=arch=compute_90a,code=sm_90a", "-std=c++17", str(settings.include_dir)} <= set(
        nvcc.note("arguments").splitlines()
    )


# --- killed, at once, locked ---


def test_a_build_killed_in_the_middle_then_run_again(settings: BuildSettings, nvcc: FakeNvcc) -> None:
    def built() -> int:
        return len(list(settings.cache_root.rglob("manifest.json")))

    nvcc.hold(but=4)  # of two that call at once both may count the other
    process = build_model(settings)
    wait_until(lambda: len(nvcc.note("waiting").split()) == 2)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    before = built()
    assert 3 <= before < MODEL_KERNELS
    assert len(left_over(settings)) == 2

    # The compilers that outlived it are still there, and go on behind the second build.
    outlived = nvcc.note("running").split()[-2:]
    nvcc.hold(but=10**6)
    again = build_model(settings)
    out, err = again.communicate(timeout=PATIENCE)
    assert again.returncode == 0, err
    nvcc.release()
    wait_until(lambda: not any(map(runs, outlived)))
    assert len(out.split("\n")) == MODEL_KERNELS + 1
    assert built() == MODEL_KERNELS
    assert left_over(settings) == []
    names = [line.split()[0] for line in out.splitlines()]
    assert set(nvcc.calls) == set(names)
    assert all(entry.record is not None for entry in KernelCache(settings.cache_root).entries())


def test_two_builds_at_once_compile_each_kernel_once(settings: BuildSettings, nvcc: FakeNvcc) -> None:
    nvcc.hold()
    processes = [build_model(settings), build_model(settings)]
    wait_until(lambda: len(nvcc.note("waiting").split()) == 2)
    nvcc.release()
    results = [process.communicate(timeout=PATIENCE) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], results
    assert results[0][0] == results[1][0]
    assert len(nvcc.calls) == MODEL_KERNELS
    assert len(set(nvcc.calls)) == MODEL_KERNELS
    assert left_over(settings) == []


def test_a_lock_that_is_not_given_back_is_an_error(settings: BuildSettings, nvcc: FakeNvcc) -> None:
    (record,) = build(settings)
    lock = record.cubin.parent.with_suffix(".lock")
    remove_cubin(record.cubin.parent)
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(BuildError, match=r"another process has been building.*wait for that process") as caught:
            build(replace(settings, lock_timeout=0.2))
        assert str(lock) in str(caught.value)
    build(settings)
    assert len(nvcc.calls) == 2


def test_a_kernel_that_appears_while_waiting_for_the_lock_is_taken(
    settings: BuildSettings, nvcc: FakeNvcc, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second look: another process publishes between this one's lookup and its lock."""
    lock = KernelCache.lock

    def lock_late(*args: Any) -> AbstractContextManager[None]:
        monkeypatch.setattr(KernelCache, "lock", lock)
        build(settings)
        return lock(*args)

    monkeypatch.setattr(KernelCache, "lock", lock_late)
    build(settings)
    assert nvcc.calls == ["tiny"]


def test_clear_removes_all_but_what_is_being_built(settings: BuildSettings) -> None:
    kept, _ = build(settings, TinySpec("kept"), TinySpec("gone"))
    cache = KernelCache(settings.cache_root)
    abandoned = kept.cubin.parent.with_name(f"{kept.cubin.parent.name}.partial-old")
    abandoned.mkdir()
    with kept.cubin.parent.with_suffix(".lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        cleared = cache.clear()
        assert (cleared.kernels, cleared.busy) == (1, 1)
        assert [entry.folder for entry in cache.entries()] == [kept.cubin.parent]
        assert abandoned.exists()
    cleared = cache.clear()
    assert (cleared.kernels, cleared.busy) == (1, 0)
    assert list(cache.kernels.iterdir()) == []
    build(settings, TinySpec("kept"))
    assert len(cache.entries()) == 1


def test_clear_leaves_what_is_not_ours(settings: BuildSettings) -> None:
    """A network file system keeps a deleted file that someone reads as .nfs...: its name begins with no key."""
    kept, _ = build(settings, TinySpec("kept"), TinySpec("gone"))
    cache = KernelCache(settings.cache_root)
    foreign = [entry.folder.with_name(".nfs0001") for entry in cache.entries()]
    for path in foreign:
        path.touch()
    with kept.cubin.parent.with_suffix(".lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        cleared = cache.clear()
    assert (cleared.kernels, cleared.busy) == (1, 1)
    assert [entry.folder for entry in cache.entries()] == [kept.cubin.parent]
    assert all(path.exists() for path in foreign)


@pytest.mark.parametrize("made_again", [False, True])
def test_a_lock_on_a_file_that_was_removed_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made_again: bool
) -> None:
    """``clear`` removes it between another process's opening and locking it: two would then build at once."""
    lock_file, path = fcntl.flock, tmp_path / "key.lock"

    def lock_late(descriptor: int, operation: int) -> None:
        path.unlink()
        if made_again:
            path.touch()
        lock_file(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", lock_late)
    assert _try_lock(path) is None
    monkeypatch.undo()
    held = _try_lock(path)
    assert held is not None
    assert _try_lock(path) is None
    os.close(held)


def test_a_folder_that_clear_removes_under_a_build_is_made_again(
    settings: BuildSettings, nvcc: FakeNvcc, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the folder's making and its lock's."""
    open_file = os.open
    raced: list[Path] = []

    def open_late(path: Any, *args: int, **kwargs: int) -> int:
        if not raced:
            raced.append(path)
            KernelCache(settings.cache_root).clear()
            assert not path.parent.exists()
        return open_file(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", open_late)
    build(settings)
    assert raced
    assert nvcc.calls == ["tiny"]


# --- what the machine refuses ---


def test_a_cache_below_a_file_names_the_variable(settings: BuildSettings, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BuildError, match=r"cannot be written.*FUTRANSFORMER_CACHE"):
        build(replace(settings, cache_root=tmp_path / "file" / "cache"))


def make_read_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system mounted read-only. Permission bits would not do: they do not bind root."""
    open_file, flags = os.open, os.O_WRONLY | os.O_RDWR | os.O_CREAT

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), args[0])

    def open_to_read(path: str, mode: int, *args: int, **kwargs: int) -> int:
        if mode & flags:
            refuse(path)
        return open_file(path, mode, *args, **kwargs)

    monkeypatch.setattr(os, "open", open_to_read)
    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    for name in ("mkdir", "rename", "replace", "unlink", "rmdir"):
        monkeypatch.setattr(os, name, refuse)


def test_a_read_only_cache_serves_what_it_holds(
    settings: BuildSettings, nvcc: FakeNvcc, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = build(settings)
    make_read_only(monkeypatch)
    assert build(settings) == built
    with pytest.raises(BuildError, match=r"cannot be written \(Read-only file system.*FUTRANSFORMER_CACHE"):
        build(settings, TinySpec("another"))
    assert nvcc.calls == ["tiny"]


def test_a_read_only_cache_refuses_to_be_cleared(settings: BuildSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    build(settings)
    make_read_only(monkeypatch)
    cache = KernelCache(settings.cache_root)
    with pytest.raises(BuildError, match="cannot be written"), cache.errors():
        cache.clear()
    assert len(cache.entries()) == 1


def test_a_full_disk_leaves_nothing_half_written(
    settings: BuildSettings, nvcc: FakeNvcc, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("futransformer.build.compile.write_kernel_manifest", full)
        with pytest.raises(BuildError, match=r"disk of the kernel cache .* is full.*FUTRANSFORMER_CACHE"):
            build(settings)
    assert folders(settings) == []
    assert left_over(settings) == []
    build(settings)
    assert len(folders(settings)) == 1


def test_a_full_disk_that_nvcc_meets(settings: BuildSettings, nvcc: FakeNvcc) -> None:
    nvcc.fails("echo 'fatal error: error writing to /x/tmp.ii: No space left on device'; exit 1")
    with pytest.raises(BuildError, match=r"disk of the kernel cache .* is full.*FUTRANSFORMER_CACHE"):
        build(settings)
    assert folders(settings) == []
    assert left_over(settings) == []


def test_a_full_disk_that_leaves_nvcc_speechless(
    settings: BuildSettings, nvcc: FakeNvcc, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvcc.fails("exit 1")
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=4096))
    with pytest.raises(BuildError, match=r"disk of the kernel cache .* is full"):
        build(settings)
    assert left_over(settings) == []


@pytest.mark.parametrize(
    "end",
    ["kill -9 $$", "exit 137", "echo \"nvcc error   : 'cicc' died due to signal 9 (Kill signal)\"; exit 9"],
    ids=["killed", "shell's 137", "cicc killed"],
)
def test_nvcc_killed_by_the_system(settings: BuildSettings, nvcc: FakeNvcc, end: str) -> None:
    nvcc.fails(end)
    with pytest.raises(BuildError, match=r"kernel tiny: .*killed.*kernel\.cu.*memory.*--jobs 2") as caught:
        build(replace(settings, jobs=4))
    assert "137" in str(caught.value) or "-9" in str(caught.value) or "exit status 9" in str(caught.value)
    assert folders(settings) == []


def test_nvcc_killed_as_the_only_job_asks_for_memory(settings: BuildSettings, nvcc: FakeNvcc) -> None:
    nvcc.fails("exit 137")
    with pytest.raises(BuildError, match="it was the only one: free memory"):
        build(replace(settings, jobs=1))


def test_nvcc_that_crashes_is_not_called_out_of_memory(settings: BuildSettings, nvcc: FakeNvcc) -> None:
    nvcc.fails("kill -11 $$")
    with pytest.raises(BuildError, match="crashed with signal 11") as caught:
        build(settings)
    assert "memory" not in str(caught.value)


def test_a_compile_error_carries_the_compilers_words_and_the_log(settings: BuildSettings, nvcc: FakeNvcc) -> None:
    script = 'echo "note: of no interest"; echo "kernel.cu(7): error: no such tile"; '
    nvcc.fails(script + "for i in $(seq 500); do echo candidate $i; done; exit 2")
    with pytest.raises(BuildError, match=r"kernel tiny: nvcc failed \(exit status 2\):\nkernel.cu\(7\)") as caught:
        build(settings)
    words, _, log = str(caught.value).partition("\nThe full log: ")
    assert len(words.splitlines()) == 31
    assert "candidate 500" in Path(log).read_text()
    assert (Path(log).parent / "kernel.cu").read_text() == render_tiny(TinySpec())
    assert folders(settings) == []

    (nvcc.folder / "fail.sh").unlink()
    build(settings)
    assert not Path(log).exists()


def test_success_without_a_cubin_is_a_failure(settings: BuildSettings, nvcc: FakeNvcc) -> None:
    nvcc.fails(": > kernel.cubin; exit 0")
    with pytest.raises(BuildError, match="wrote no cubin"):
        build(settings)


def test_the_first_failure_stops_the_others(settings: BuildSettings, nvcc: FakeNvcc) -> None:
    nvcc.fails(f'[ "$name" = bad ] && exit 1; sleep {2 * PATIENCE}')
    start = time.monotonic()
    with pytest.raises(BuildError, match="kernel bad"):
        build(settings, TinySpec("bad"), TinySpec("long"), TinySpec("never_started"))
    assert time.monotonic() - start < PATIENCE
    assert "never_started" not in nvcc.calls
    for process in map(int, nvcc.note("running").split()):
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)
    assert left_over(settings) == []


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_stops_the_compilers(settings: BuildSettings, nvcc: FakeNvcc) -> None:
    nvcc.hold()
    process = build_model(settings)
    wait_until(lambda: len(nvcc.note("waiting").split()) == 2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode != 0
    assert "KeyboardInterrupt" in err
    for running in map(int, nvcc.note("running").split()):
        with pytest.raises(ProcessLookupError):
            os.kill(running, 0)
    assert left_over(settings) == []


# --- no tool chain ---


@pytest.fixture
def bare(settings: BuildSettings, monkeypatch: pytest.MonkeyPatch) -> BuildSettings:
    """A machine without any nvcc."""
    monkeypatch.setattr("futransformer.build.toolchain.pip_toolkits", lambda: ())
    return replace(settings, nvcc=None, search_path="")


def test_without_nvcc_built_kernels_serve(settings: BuildSettings, bare: BuildSettings) -> None:
    built = build(settings)
    assert build(bare) == built


def test_an_nvcc_that_is_named_is_used_or_refused(settings: BuildSettings) -> None:
    """Even where the cache could serve: whoever names one is not given another one's kernels without a word."""
    build(settings)
    with pytest.raises(ToolchainError, match=r"FUTRANSFORMER_NVCC cannot be used: .*nowhere does not exist"):
        build(replace(settings, nvcc=settings.cache_root / "nowhere"))


def test_without_nvcc_the_newest_tool_chains_kernel_serves(
    settings: BuildSettings, bare: BuildSettings, make_nvcc: Callable[..., FakeNvcc]
) -> None:
    for version in ("13.10.0", "13.0.88", "13.9.1"):
        build(replace(settings, nvcc=make_nvcc(version, version).path))
    (record,) = build(bare)
    assert record.nvcc_version == "13.10.0"


def test_without_nvcc_a_missing_kernel_says_what_to_install(settings: BuildSettings, bare: BuildSettings) -> None:
    build(settings)
    with pytest.raises(
        ToolchainError, match=r"not in the cache .*: tiny\. They have to be built, but no usable nvcc"
    ) as caught:
        build(bare, TinySpec(value=2.0))
    assert 'pip install "cuda-toolkit[nvcc,cudart,cccl]==13.0.*"' in str(caught.value)


def test_without_a_host_compiler_built_kernels_serve(settings: BuildSettings) -> None:
    built = build(settings)
    lacking = replace(settings, host_compiler="g++", search_path="")
    assert build(lacking) == built
    with pytest.raises(ToolchainError, match=r"host compiler 'g\+\+'.*apt install g\+\+"):
        build(lacking, TinySpec("another"))


def test_compiling_can_be_forbidden(settings: BuildSettings, nvcc: FakeNvcc) -> None:
    built = build(settings)
    forbidden = replace(settings, jit=False)
    assert build(forbidden) == built
    with pytest.raises(ArtifactError, match=r"not in the cache.*another.*FUTRANSFORMER_DISABLE_JIT"):
        build(forbidden, TinySpec("another"))
    assert nvcc.calls == ["tiny"]
