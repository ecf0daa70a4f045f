"""Rendering: the same text on every run, a signature that is the spec's, and no misspelt name that passes."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys

import jinja2
import pytest

from futransformer.generator.config import CONFIGS
from futransformer.generator.plan import kernel_specs
from futransformer.generator.precision import PRECISIONS
from futransformer.generator.render import TEMPLATES, _environment, render
from futransformer.generator.specs import KernelSpec

SMALL = kernel_specs(CONFIGS["smollm2-135m"], "bf16")
ONE_OF_EACH_TEMPLATE = {spec.template: spec for spec in SMALL}

# Every kernel of every model, in one digest: printed by a child process.
DIGEST = """
import hashlib, sys
from futransformer.generator.config import CONFIGS
from futransformer.generator.plan import kernel_specs
from futransformer.generator.render import render
configs = list(CONFIGS.values())
digests = {}
for config in configs if sys.argv[1] == "forwards" else configs[::-1]:
    digests[config.name] = hashlib.sha256(
        "".join(spec.name + render(spec) for spec in kernel_specs(config, "bf16")).encode()
    ).hexdigest()
print(*(f"{name}={digest}" for name, digest in sorted(digests.items())))
"""


def signature(source: str) -> tuple[str, str, list[str]]:
    """The entry's name, its bounds and its parameters' declarations, as they stand in the source."""
    found = re.findall(r'^extern "C" __global__ void (__\w+__\([^)]*\))\n(\w+)\(([^)]*)\) \{$', source, re.MULTILINE)
    assert len(found) == 1, "one entry a source"
    bounds, name, parameters = found[0]
    return name, bounds, [line.strip() for line in parameters.split(",")]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("model", CONFIGS)
def test_every_source_has_its_specs_signature(model: str, precision: str) -> None:
    for spec in kernel_specs(CONFIGS[model], precision):
        source = render(spec)
        expected = [param.declaration for param in spec.params]
        registers = getattr(spec, "max_registers", 0)
        fewer = getattr(spec, "alone", False) or getattr(spec, "copy", None) is not None  # blocks than are planned with
        launch = f"__launch_bounds__({spec.threads}, {spec.blocks_per_sm})"
        bounds = f"__maxnreg__({registers})" if registers else spec.bounds if fewer else launch
        assert signature(source) == (spec.name, bounds, expected)
        assert source.startswith(f"// {spec.name}\n")
        assert source.endswith("}\n")
        assert not re.search(r"\{[{%#]|[%#}]\}\}|[ \t]$", source, re.MULTILINE), "template syntax or trailing blanks"
        if spec.shared_bytes:
            used = getattr(spec, "used_bytes", spec.shared_bytes)
            assert f"kSharedBytes == {used}," in source, "the compiler must hold us to the size"
            assert f"kThreads == {spec.threads}," in source


@pytest.mark.parametrize("spec", SMALL, ids=lambda spec: spec.name)
def test_a_source_is_thin(spec: KernelSpec) -> None:
    """A template chooses and composes; the code is in headers, which are ours."""
    source = render(spec)
    assert len(source.splitlines()) < 50
    includes = re.findall(r"#include (.*)", source)
    assert includes
    for include in includes:
        assert re.fullmatch(r"<futransformer/\w+\.cuh>", include)
        assert (TEMPLATES / "include" / include.strip("<>")).is_file()


def test_each_parameter_is_used() -> None:
    """A parameter that the body does not pass on would be a value that nobody reads."""
    for spec in SMALL:
        body = render(spec).partition(") {\n")[2]
        for param in spec.params:
            assert re.search(rf"\b{param.name}\b", body), f"{spec.name} ignores {param.name}"


def test_rendering_does_not_depend_on_order_or_hashing() -> None:
    """The same text whatever the seed of str's hash, and whatever was rendered before: a cache key hangs on it."""
    printed = {
        subprocess.run(
            [sys.executable, "-c", DIGEST, direction],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed, direction in (("0", "forwards"), ("1", "backwards"), ("4294967295", "forwards"))
    }
    assert len(printed) == 1
    digests = dict(item.split("=") for item in printed.pop().split())
    here = "".join(spec.name + render(spec) for spec in SMALL)
    assert digests["smollm2-135m"] == hashlib.sha256(here.encode()).hexdigest()
    assert len(digests) == len(CONFIGS)


def misspelt(text: str) -> list[str]:
    """The template with one more letter in one of the names that it reads, for each of them."""
    attribute = r"(?<![\w\"'.])(?:spec|heads|tile|element|kernel|epilogue|param)\.\w+"
    variable = r"(?<=\{\{ )\w+(?= \}\})"
    ends = [
        block.start() + name.end()
        for block in re.finditer(r"\{\{.*?\}\}|\{%.*?%\}", text, re.DOTALL)
        for name in re.finditer(f"{attribute}|{variable}", block[0])
    ]
    return [text[:end] + "x" + text[end:] for end in ends]


@pytest.mark.parametrize("template", ONE_OF_EACH_TEMPLATE)
def test_a_misspelt_name_is_an_error(template: str) -> None:
    """Change each name that a template reads, one at a time: none may render as nothing."""
    spec = ONE_OF_EACH_TEMPLATE[template]
    variants = misspelt((TEMPLATES / template).read_text())
    assert len(variants) >= 3
    for variant in variants:
        with pytest.raises(jinja2.UndefinedError):
            _environment().from_string(variant).render(spec.context())


def test_a_misspelt_name_in_a_macro_never_changes_a_source_silently() -> None:
    """Branches that no kernel of this plan takes stay unread; all others must fail."""
    specs = [spec for spec in SMALL if "epilogue" in (TEMPLATES / spec.template).read_text()]
    sources = [render(spec) for spec in specs]
    refused = 0
    for shared in ("kernel.jinja", "epilogue.jinja"):
        for variant in misspelt((TEMPLATES / shared).read_text()):
            loader = jinja2.ChoiceLoader([jinja2.DictLoader({shared: variant}), jinja2.FileSystemLoader(TEMPLATES)])
            environment = _environment().overlay(loader=loader, cache_size=0)
            try:
                rendered = [environment.get_template(spec.template).render(spec.context()) for spec in specs]
            except jinja2.UndefinedError:
                refused += 1
            else:
                assert rendered == sources
    assert refused >= 20


def test_an_epilogue_operation_without_a_template_is_an_error() -> None:
    spec = next(spec for spec in SMALL if spec.name.startswith("gemm_o_"))
    chain = _environment().get_template("epilogue.jinja").module.operation  # type: ignore[attr-defined]
    with pytest.raises(jinja2.UndefinedError):
        chain("gelu", spec)
