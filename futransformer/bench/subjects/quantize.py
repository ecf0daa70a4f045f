"""quantize/<config>/<method>: seconds of `futransformer quantize` on a random model, and the host memory at its peak.

It computes on the GPU if there is one. GPTQ reads 128 windows of 2048 random tokens. Memory is what the system could
not take back, so pages of the mapped checkpoint do not count. The checks: no projection errs more than rounded to
nearest, all are there, and on a GPU the host holds no more than ``memory_bound``.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from futransformer.bench.case import HostCase, Row
from futransformer.bench.harness import Timing
from futransformer.bench.runner import Bench, host_row
from futransformer.bench.synthetic import write_random_model
from futransformer.fp8_scaling import READERS
from futransformer.generator.config import CONFIGS, LlamaConfig, load_config
from futransformer.generator.errors import InputError
from futransformer.generator.plan import projections

METHODS: dict[str, tuple[str, ...]] = {
    "rtn": ("--method", "rtn"),
    "gptq": ("--method", "gptq"),
    "gptq-best": ("--method", "gptq", "--rotate", "--act-order", "--scale-search", "mse", "--sweeps", "1"),
}
DEFAULT = ("smollm2-135m", "llama-3.1-8b")
CALIBRATION = ("--calibration", "random", "--samples", "128", "--seqlen", "2048")
SAMPLE_SECONDS = 0.05
PROCESS_BYTES = 2 * 10**9  # Python, PyTorch and its CUDA context, with room


def cases() -> Sequence[HostCase]:
    """See futransformer.bench.subjects."""
    return [
        HostCase(f"quantize/{name}/{method}", partial(measure, name, method), default=name in DEFAULT)
        for name in CONFIGS
        for method in METHODS
    ]


def measure(name: str, method: str, bench: Bench) -> Sequence[Row]:
    """Write a random model and quantise it once."""
    config = load_config(name)
    with tempfile.TemporaryDirectory(prefix="futransformer-bench-") as scratch:
        model = Path(scratch) / name
        write_random_model(config, model, bench.device)
        seconds, peak, report = timed_quantise(model, METHODS[method])
    errors = report["errors"].values()
    wrong = 7 * config.num_hidden_layers - len(errors)
    wrong += sum(error.get("output", 0) > error.get("output_of_nearest", 0) * (1 + 1e-5) for error in errors)
    beyond = bench.device.type == "cuda" and peak > memory_bound(config, rotated="--rotate" in METHODS[method])
    case = f"quantize/{name}/{method}"
    return [
        host_row(case, Timing.of([seconds]), error=wrong),
        host_row(f"{case}/host memory", Timing.of([peak / 1e9]), error=wrong + beyond, unit="GB"),
    ]


def memory_bound(config: LlamaConfig, *, rotated: bool) -> int:
    """Bytes beside the GPU's: a layer's weights, and a shard, embedding or head, with the file that it becomes.

    Where these are rotated, their tables and the pieces that they are made of lie beside the shard.
    """
    shapes = projections(config)
    layer = sum(n * k for n, k in (shapes[op] for op in READERS))
    ends = 2 * config.vocab_size * config.hidden_size
    return PROCESS_BYTES + 2 * (layer + (3 if rotated else 1) * ends)


def timed_quantise(model: Path, method: Sequence[str]) -> tuple[float, int, dict[str, Any]]:
    """Run the command as a user does: its seconds, the bytes of its anonymous memory at their peak, and its report."""
    text = CALIBRATION if "gptq" in method else ()
    command = ["quantize", str(model), "-o", f"{model}-int4", *method, *text, "--json"]
    start = time.perf_counter()
    run = subprocess.Popen(
        [sys.executable, "-m", "futransformer", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    peaks = [0]
    watcher = threading.Thread(target=_watch, args=(run, peaks))
    watcher.start()
    said, heard = run.communicate()
    seconds = time.perf_counter() - start
    watcher.join()
    if run.returncode:
        raise InputError(f"futransformer {' '.join(command)} failed: {heard.strip()[-500:]}")
    report: dict[str, Any] = json.loads(said)
    return seconds, max(peaks), report


def _watch(run: subprocess.Popen[str], peaks: list[int]) -> None:
    """Append the process's anonymous memory, in bytes, until it ends."""
    status = Path(f"/proc/{run.pid}/status")
    while run.poll() is None:
        try:
            lines = status.read_text().splitlines()
        except OSError:  # it has just ended
            return
        peaks += [1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon")]
        time.sleep(SAMPLE_SECONDS)
