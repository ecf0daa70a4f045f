"""build/<config>/{cold,warm}: seconds of `futransformer build CONFIG`, from an empty cache and from a full one.

It needs nvcc and no GPU. The check: a cold build compiled every kernel of the plan, a warm one none, all are listed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from futransformer.bench.case import HostCase, Row
from futransformer.bench.harness import Timing
from futransformer.bench.runner import host_row
from futransformer.build.settings import BuildSettings
from futransformer.generator.config import CONFIGS, load_config
from futransformer.generator.errors import BuildError
from futransformer.generator.plan import kernel_specs
from futransformer.tables import schedule_table

WARM_BUILDS = 5


def cases() -> Sequence[HostCase]:
    """See futransformer.bench.subjects."""
    return [HostCase(f"build/{name}", partial(measure, name), default=name == "llama-3.1-8b") for name in CONFIGS]


def measure(name: str, _: object = None) -> Sequence[Row]:
    """Build once into an empty cache, then again and again."""
    with tempfile.TemporaryDirectory(prefix="futransformer-bench-") as cache:
        settings = BuildSettings.from_environment({**os.environ, "FUTRANSFORMER_CACHE": cache})
        kernels = len(kernel_specs(load_config(name), "bf16", schedule_table(settings)))
        cold, built = timed_build(name, cache)
        warm = [timed_build(name, cache) for _ in range(WARM_BUILDS)]
    cold_error = kernels - built["compiled"] + kernels - len(built["kernels"])
    warm_error = sum(report["compiled"] + kernels - len(report["kernels"]) for _, report in warm)
    return [
        host_row(f"build/{name}/cold", Timing.of([cold]), error=cold_error),
        host_row(f"build/{name}/warm", Timing.of([seconds for seconds, _ in warm]), error=warm_error),
    ]


def timed_build(name: str, cache: str) -> tuple[float, dict[str, Any]]:
    """Run the command as a user does; its seconds and its report."""
    environment = {**os.environ, "FUTRANSFORMER_CACHE": cache}
    start = time.perf_counter()
    run = subprocess.run(
        [sys.executable, "-m", "futransformer", "build", name, "--json"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.perf_counter() - start
    if run.returncode:
        raise BuildError(f"futransformer build {name} failed: {run.stderr.strip()[-500:]}")
    report: dict[str, Any] = json.loads(run.stdout)
    return seconds, report
