"""What is drawn from: the operations of each export, and how one case of them is made from a seed and its index."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from futransformer.library import KernelLibrary
from futransformer.ops.attention_decode import AttentionDecode
from futransformer.ops.interface import PHASES, PROJECTIONS
from tests.kernel_fuzz import attention, rows
from tests.kernel_fuzz.exact import Draw, Rooms
from tests.kernel_fuzz.projections import Projections

Fuzz = Callable[[Draw], None]

# How often a name is drawn: attention has the most that may go wrong, rows the least.
WEIGHTS = {"attention_prefill": 6, "attention_decode": 6, "sample": 2}


def of_library(ops: KernelLibrary) -> dict[str, Fuzz]:
    """Every operation of a model, by name."""
    projections = Projections(ops)
    rooms = projections.rooms
    found: dict[str, Fuzz] = {
        f"{phase}/{op}": partial(projections.run, phase=phase, op=op) for phase in PHASES for op in PROJECTIONS
    }
    found["attention_prefill"] = partial(attention.prefill, ops=ops, rooms=rooms)
    found["attention_decode"] = partial(attention.decode, op=ops._attention_decode, rooms=rooms)
    for name in ("gather", "argmax", "sample", "step"):
        found[name] = partial(getattr(rows, name), ops=ops)
    return found


def of_attention(op: AttentionDecode) -> dict[str, Fuzz]:
    """Of a kernel alone."""
    return {"attention_decode": partial(attention.decode, op=op, rooms=Rooms(op.kernel.device))}


def pick(draw: Draw, exports: dict[str, dict[str, Fuzz]]) -> tuple[str, str]:
    """The export and the operation of a case: all exports are as likely."""
    export = draw.random.choice(list(exports))
    names = list(exports[export])
    return export, draw.random.choices(names, [WEIGHTS.get(name, 1) for name in names])[0]
