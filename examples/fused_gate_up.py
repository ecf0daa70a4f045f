"""One generated kernel by itself: gate_up with its norm and SwiGLU, beside the same in PyTorch.

    python examples/fused_gate_up.py llama-3.2-1b --rows 2048

CONFIG is a name of the table, a Hugging Face folder or a config.json. On a Hopper GPU the kernel computes and both are
timed; elsewhere the CPU reference does, and nothing is timed. Exit status 1 if it errs by more than the tolerance that
docs/numerics.md derives.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from futransformer import load_config, load_kernels
from futransformer.driver import hopper_problem
from futransformer.generator.errors import FuTransformerError
from futransformer.generator.precision import BF16, get_precision
from futransformer.ops.interface import Ops
from futransformer.reference import ReferenceOps, allowed_error, largest_error


def main() -> int:
    """Compute, compare, time."""
    parser = argparse.ArgumentParser(description="gate_up with its norm and SwiGLU, beside the same in PyTorch")
    parser.add_argument("config", metavar="CONFIG", help="a model's name, a Hugging Face folder, or a config.json")
    parser.add_argument("--rows", type=int, default=2048, help="tokens (default: 2048)")
    args = parser.parse_args()
    try:
        config = load_config(args.config)
        ops: Ops = ReferenceOps(config) if hopper_problem() else load_kernels(config)
    except FuTransformerError as error:
        print(f"fused_gate_up: {error}", file=sys.stderr)
        return 2
    device = torch.device("cpu") if hopper_problem() else torch.device("cuda")
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator, device=device) * scale).bfloat16()

    hidden, intermediate = config.hidden_size, config.intermediate_size
    embedding = normal(1000, hidden)
    tokens = torch.randint(1000, (args.rows,), generator=generator, device=device, dtype=torch.int32)
    logical = normal(2 * intermediate, hidden, scale=hidden**-0.5)  # all gate rows, then all up rows
    weight = ops.pack("gate_up", "prefill", logical)
    x, sumsq, _ = ops.gather_rows("prefill", embedding, tokens)

    def ours() -> Tensor:
        return ops.gate_up("prefill", x, sumsq, weight)

    def by_torch(x: Tensor = x, weight: Tensor = logical) -> Tensor:
        rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + config.rms_norm_eps)
        gate, up = F.linear((x.float() * rstd).to(x.dtype), weight).chunk(2, -1)
        return F.silu(gate) * up

    exact = by_torch(x.float(), logical.float())
    same_type = by_torch().float()
    ours_error = largest_error(ours().float(), exact)
    allowed = allowed_error(same_type, exact, get_precision(BF16.name))
    print(f"{config.name} on {ops.describe()}: [{args.rows}, {hidden}] -> [{args.rows}, {intermediate}]")
    theirs = largest_error(same_type, exact)
    print(f"largest error {ours_error:.3g}, PyTorch's in BF16 {theirs:.3g}, allowed {allowed:.3g}")
    if device.type == "cuda":
        flops = 4 * args.rows * hidden * intermediate
        for name, call in (("one kernel", ours), ("PyTorch", by_torch)):
            seconds = timed(call)
            print(f"{name}: {1e6 * seconds:.1f} us, {1e-12 * flops / seconds:.0f} TFLOP/s")
    return int(not ours_error <= allowed)


def timed(call: Callable[[], Tensor], runs: int = 20) -> float:
    """The median of single runs, in seconds, after three that do not count."""
    times = []
    for run in range(runs + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        call()
        end.record()
        end.synchronize()
        if run >= 3:
            times.append(float(start.elapsed_time(end)) / 1000)
    return statistics.median(times)


if __name__ == "__main__":
    sys.exit(main())
