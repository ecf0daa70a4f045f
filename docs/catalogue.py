"""The catalogue of kernels, docs/kernels.md, from the plans themselves: ``python -m docs.catalogue`` writes it anew.

Needs neither torch nor a compiler. A test fails where the page is not what the plans say.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from pathlib import Path

from futransformer.cli.kernels import tile_of
from futransformer.generator.config import CONFIGS
from futransformer.generator.heuristics import MAX_ROWS
from futransformer.generator.plan import Plan, kernel_specs, make_plan
from futransformer.generator.precision import PRECISIONS, Element
from futransformer.generator.specs import DecodeGemmSpec, GemmSpec, KernelSpec, Param
from futransformer.generator.specs.base import EPILOGUE_PARAMS

PAGE = Path(__file__).parent / "kernels.md"

SHOWN = "llama-3.1-8b"
PLANS = ("bf16", "fp8-int4-head8-kv4")  # one element everywhere, and one of its own in each place
COUNTED = ("bf16", "fp8", "int4", "fp8-int4", "bf16-fp8", "fp8-fp8", "bf16-kv8", "bf16-kv4", "fp8-int4-head8-kv4")

HEAD = f"""\
# Kernel catalogue

Every kernel that is generated, by template. Written by `python -m docs.catalogue` from the plans, never by hand; what
kernels compute for each other is in [architecture](architecture.md), why they are as they are in the
[notebook](README.md).

Specs are of {SHOWN} in two precisions: `{PLANS[0]}`, and `{PLANS[1]}`, which has another element in each place. Another
model has other shapes and other tiles: `futransformer generate CONFIG` writes its sources, `futransformer build CONFIG`
prints its table with registers and spills.

A kernel's name is also its entry point's, and says what it is: operation, architecture, elements, shape, tile, cluster
(`c2x1`, with `k2` where it splits K), stages (`s4`), raster (`r8`), schedule, epilogue. Of decode GEMMs `b8` is the
most sequences, `r12x512` row tiles of 16 columns by K of a stage, `c4` blocks of a cluster, `w1x4` warps by rows and K,
`x2` how x is staged, `f1` stages under way, `p2` stages behind the first fill that are asked into L2, `alone` that no
two blocks share a multiprocessor.
"""


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")


def page() -> str:
    """Return the page as it must be."""
    plans = {precision: make_plan(CONFIGS[SHOWN], precision) for precision in PLANS}
    templates = dict.fromkeys(spec.template for plan in plans.values() for spec in plan.specs())
    sections = [
        HEAD,
        "## Precisions\n\n" + _precisions(),
        "## How many\n\nKernels of a model, each built once:\n\n" + _counts(),
        *(_template(template, plans) for template in templates),
        "## Operations of epilogues\n\nWhat each adds to a kernel's parameters; chains are composed of them "
        "([epilogue.cuh](../templates/include/futransformer/epilogue.cuh)).\n\n" + _operations(),
        "## Names\n\n" + "\n\n".join(_names(precision, plan.specs()) for precision, plan in plans.items()),
    ]
    return "\n\n".join(section.strip() for section in sections) + "\n"


def _precisions() -> str:
    rows = [
        (f"`{row.name}`", *(element.name for element in (row.prefill, row.decode, row.kv, row.head)))
        for row in PRECISIONS.values()
    ]
    return _table(("name", "prefill reads", "decode reads", "KV cache", "decode's head"), rows) + (
        "\n\nINT4 rows take other groups (`-g32`, `-g64`, `-g256`, `-channel`), zero points (`-asym`) and gains in x "
        "(`-gain`); all rows take a head of E4M3 or INT4 (`-head8`, `-head4`), pages of E4M3 (`-kv8`) and an INT4 copy "
        "of them (`-kv4`, and its forms)."
    )


def _counts() -> str:
    rows = [
        (name, *(str(len(kernel_specs(config, precision))) for precision in COUNTED))
        for name, config in CONFIGS.items()
    ]
    return _table(("model", *(f"`{precision}`" for precision in COUNTED)), rows)


def _template(template: str, plans: dict[str, Plan]) -> str:
    found = {
        precision: [spec for spec in plan.specs() if spec.template == template] for precision, plan in plans.items()
    }
    most = {spec: rows for plan in plans.values() for by in plan.prefill.values() for rows, spec in by.items()}
    spec = next(spec for specs in found.values() for spec in specs)
    title = template.removesuffix("_sm90.cu.jinja")
    parts = [
        f"## {title}\n\n{_purpose(spec)}",
        f"Template [{template}](../templates/{template}); launched dependent on the kernel before: "
        f"{'yes' if spec.dependent_launch else 'no'}.",
        f"Parameters{', before those of its epilogue' if _chain(spec) else ''}: {_parameters(_own(spec))}",
    ]
    if all(specs == found[PLANS[0]] for specs in found.values()):
        found = {" and ".join(PLANS): found[PLANS[0]]}
    parts += [
        f"In `{precision.replace(' and ', '` and `')}`:\n\n{_specs(specs, most)}"
        for precision, specs in found.items()
        if specs
    ]
    return "\n\n".join(parts)


def _purpose(spec: KernelSpec) -> str:
    """The first paragraph of the spec's docstring, in the page's own marks."""
    return " ".join(inspect.cleandoc(type(spec).__doc__ or "").partition("\n\n")[0].split()).replace("``", "`")


def _chain(spec: KernelSpec) -> tuple[str, ...]:
    return spec.epilogue if isinstance(spec, (GemmSpec, DecodeGemmSpec)) else ()


def _own(spec: KernelSpec) -> list[Param]:
    """Parameters that a kernel has whatever its epilogue is."""
    added = {param.name for operation in _chain(spec) for param in EPILOGUE_PARAMS[operation]}
    return [param for param in spec.params if param.name not in added]


def _parameters(params: Iterable[Param]) -> str:
    return ", ".join(f"`{param.declaration.removeprefix('const __grid_constant__ ')}`" for param in params)


def _specs(specs: Sequence[KernelSpec], most: dict[GemmSpec, int]) -> str:
    rows = [
        (
            spec.op if isinstance(spec, (GemmSpec, DecodeGemmSpec)) else f"`{spec.name}`",
            _rows(most[spec]) if isinstance(spec, GemmSpec) else "",
            _shape(spec),
            _tile(spec),
            "x".join(map(str, spec.cluster)),
            str(getattr(spec, "stages", "")),
            str(spec.threads),
            f"{spec.shared_bytes:,}",
            " -> ".join(_chain(spec)),
            ", ".join(
                f"`{name}`" for name in (*([spec.wgmma] if isinstance(spec, GemmSpec) else []), *spec.instructions)
            ),
        )
        for spec in specs
    ]
    header = (
        "kernel",
        "rows",
        "reads",
        "tile",
        "cluster",
        "stages",
        "threads",
        "shared B",
        "epilogue",
        "machine code has",
    )
    kept = [column for column in range(len(header)) if any(row[column] for row in rows)]
    return _table([header[column] for column in kept], [[row[column] for column in kept] for row in rows])


def _rows(most: int) -> str:
    return "any number" if most == MAX_ROWS else f"up to {most}"


def _shape(spec: KernelSpec) -> str:
    element = getattr(spec, "element", None)
    name = element.name if isinstance(element, Element) else ""
    if isinstance(spec, (GemmSpec, DecodeGemmSpec)):
        return f"{name} {spec.n} x {spec.k}"
    return name


def _tile(spec: KernelSpec) -> str:
    if isinstance(spec, DecodeGemmSpec):
        return f"{16 * spec.row_tiles} columns x up to {spec.batch_tile} sequences"
    return tile_of(spec)


def _operations() -> str:
    rows = [(f"`{name}`", _parameters(params) or "none") for name, params in EPILOGUE_PARAMS.items()]
    return _table(("operation", "parameters"), rows)


def _names(precision: str, specs: Sequence[KernelSpec]) -> str:
    return f"{SHOWN}, `{precision}`:\n\n```text\n" + "\n".join(spec.name for spec in specs) + "\n```"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    main()
