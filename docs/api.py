"""The API reference, docs/api.md, from signatures and docstrings: ``python -m docs.api`` writes it anew.

Sources are parsed, never imported. A test fails where the page is not what the sources say.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

PAGE = Path(__file__).parent / "api.md"

HEAD = """\
# API reference

Written by `python -m docs.api` from signatures and docstrings, never by hand. `LLM`, `Llama`, `SamplingParams`,
`load_kernels` and `load_config` are names of `futransformer` itself, imported when they are first used. What is not on
this page is not an interface: it may change without notice in the [changelog](../CHANGELOG.md).
"""

# Names by module, in the order in which a reader meets them.
SECTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "Text": {
        "futransformer.llm": ("LLM",),
        "futransformer.engine.params": ("SamplingParams",),
        "futransformer.engine.outputs": ("RequestOutput", "CompletionOutput", "Logprob", "RequestMetrics"),
        "futransformer.tokenizer": ("Tokenizer",),
    },
    "The engine": {"futransformer.engine.core": ("Engine",), "futransformer.engine.stats": ("EngineStats",)},
    "The model": {"futransformer.model": ("Llama",), "futransformer.sampling": ("Sampling",)},
    "Operations": {
        "futransformer.library": ("load_kernels",),
        "futransformer.ops.interface": ("Ops", "Stream", "Fp8Output", "NextTokens"),
        "futransformer.reference": ("ReferenceOps",),
        "futransformer.traceable": ("traceable",),
    },
    "Weights": {
        "futransformer.quantize.int4": ("Int4Weight", "round_to_nearest"),
        "futransformer.quantize.fp8": ("Fp8Weight", "quantize_weight"),
    },
    "The generator": {
        "futransformer.generator.config": ("LlamaConfig", "load_config"),
        "futransformer.generator.precision": ("Precision", "get_precision"),
        "futransformer.generator.plan": ("Plan", "make_plan", "kernel_specs"),
        "futransformer.generator.render": ("render",),
    },
    "Building": {
        "futransformer.build.settings": ("BuildSettings",),
        "futransformer.build.compile": ("build_kernels", "BuildEvent"),
        "futransformer.build.manifest": ("KernelRecord", "ModelManifest", "load_cubin"),
        "futransformer.build.export": ("export", "load_exported"),
        "futransformer.build.wheel": ("write_wheel",),
    },
    "In transformers": {"futransformer.transformers_model": ("register",)},
    "Errors": {
        "futransformer.generator.errors": (
            *("FuTransformerError", "ConfigError", "UnsupportedError", "ToolchainError", "BuildError", "ArtifactError"),
            *("DeviceError", "InputError", "OutOfMemoryError", "CheckpointError"),
        )
    },
}

_WIDTH = 100  # of a signature's line
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")


def page() -> str:
    """Return the page as it must be."""
    parts = [HEAD.strip()]
    for title, modules in SECTIONS.items():
        parts.append(f"## {title}")
        for module, names in modules.items():
            source = _source(module)
            nodes = {node.name: node for node in ast.parse(source).body if isinstance(node, (ast.ClassDef, _FUNCTIONS))}
            for name in names:
                parts += _described(nodes[name], f"{module}.{name}", source)
    return "\n\n".join(parts) + "\n"


def _source(module: str) -> str:
    return PAGE.parent.parent.joinpath(*module.split(".")).with_suffix(".py").read_text(encoding="utf-8")


def _described(node: ast.ClassDef | _Function, path: str, source: str) -> Iterator[str]:
    """What the page says of one name: heading, signature or fields, docstring; of a class also its methods."""
    yield f"### {path}"
    if not isinstance(node, ast.ClassDef):
        yield _code(_signature(node))
        yield _docstring(node)
        return
    methods = {item.name: item for item in node.body if isinstance(item, _FUNCTIONS)}
    fields = [_field(item, source) for item in node.body if isinstance(item, ast.AnnAssign)]
    if "__init__" in methods:
        yield _code(_signature(methods["__init__"], node.name))
    elif fields:
        yield _code("\n".join([f"class {node.name}:", *(f"    {field}" for field in fields)]))
    yield _docstring(node)
    if "__init__" in methods and ast.get_docstring(methods["__init__"]):
        yield _docstring(methods["__init__"])
    for name, method in methods.items():
        if not name.startswith("_"):
            yield f"#### {node.name}.{name}"
            if not any(isinstance(by, ast.Name) and by.id == "property" for by in method.decorator_list):
                yield _code(_signature(method))
            yield _docstring(method)


def _field(node: ast.AnnAssign, source: str) -> str:
    """A field as it stands in the source, with what is said behind it."""
    lines = source.splitlines()[node.lineno - 1 : node.end_lineno]
    return inspect.cleandoc("\n".join(lines)).replace("\n", "\n    ")


def _signature(node: _Function, name: str = "") -> str:
    """The call, without self; an argument a line where it is long."""
    arguments = node.args
    if arguments.args and arguments.args[0].arg in ("self", "cls"):
        arguments.args = arguments.args[1:]
    returned = f" -> {ast.unparse(node.returns)}" if node.returns is not None and not name else ""
    parts = list(_parts(arguments))
    line = f"{name or node.name}({', '.join(parts)}){returned}"
    if len(line) <= _WIDTH:
        return line
    return f"{name or node.name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){returned}"


def _parts(arguments: ast.arguments) -> Iterator[str]:
    """Every argument as it is written."""
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(plain) - len(arguments.defaults)) + list(arguments.defaults)
    for argument, default in zip(plain, defaults, strict=True):
        yield _argument(argument, default)
    if arguments.vararg is not None:
        yield f"*{_argument(arguments.vararg, None)}"
    elif arguments.kwonlyargs:
        yield "*"
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield _argument(argument, default)
    if arguments.kwarg is not None:
        yield f"**{_argument(arguments.kwarg, None)}"


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    return ast.unparse(argument) + ("" if default is None else f" = {ast.unparse(default)}")


def _docstring(node: ast.ClassDef | _Function) -> str:
    return (ast.get_docstring(node) or "").replace("``", "`")


def _code(text: str) -> str:
    """A block that tests do not run."""
    return f"```py\n{text}\n```"


if __name__ == "__main__":
    main()
