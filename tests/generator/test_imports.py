"""The generator runs anywhere: pure Python and Jinja, without torch, numpy, CUDA, or a compiler."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import importlib, importlib.abc, pkgutil, sys, sysconfig

at_start = set(sys.modules)  # what the interpreter's own start-up imports, an editable installation's finder for one

class Refused(importlib.abc.MetaPathFinder):
    names = {"torch", "numpy", "cuda", "transformers", "safetensors", "cutlass_library", "cutlass", "pycute", "gguf"}

    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in self.names:
            raise ImportError(f"{name} is not installed here")

sys.meta_path.insert(0, Refused())
for package_name in ("futransformer", "futransformer.generator", "futransformer.build", "futransformer.templates"):
    package = importlib.import_module(package_name)
    if package_name != "futransformer":
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            importlib.import_module(module.name)

from futransformer.generator.config import CONFIGS
from futransformer.generator.plan import kernel_specs
from futransformer.generator.render import render

count = sum(len(render(spec)) > 0 for config in CONFIGS.values() for spec in kernel_specs(config, "bf16"))
installed = tuple(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
foreign = {
    name.partition(".")[0]
    for name, module in sys.modules.items()
    if name not in at_start and (getattr(module, "__file__", None) or "").startswith(installed)
}
print(count, *sorted(foreign))
"""


def test_generator_and_build_need_jinja_alone() -> None:
    """Every module of generator/ and build/ imports, and every model's sources render, with the rest refused."""
    ran = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False, env={"PATH": ""})
    assert ran.returncode == 0, ran.stderr
    count, *foreign = ran.stdout.split()
    assert int(count) > 300
    assert foreign == ["jinja2", "markupsafe"]
