"""A wheel of one model's kernels: an export that pip installs, for machines that have no tool chain.

```
futransformer_kernels_<config>_<precision>_sm90a/         __init__.py (a docstring), manifest.json, *.cubin
futransformer_kernels_<config>_<precision>_sm90a-<version>.dist-info/
```

Its version is that of FuTransformer, which it requires; its one entry point, of the group ``futransformer.kernels``,
names the package, and by that the runtime finds it (``installed``). The same kernels give the same bytes.
"""

from __future__ import annotations

import base64
import hashlib
import io
import re
import tempfile
import zipfile
from pathlib import Path

from .. import __version__
from .cache import storage_errors
from .export import export, write_atomically
from .manifest import FILE_NAME, ModelManifest

GROUP = "futransformer.kernels"
ARCHITECTURE = "sm90a"

_ZIP_TIME = (1980, 1, 1, 0, 0, 0)  # the earliest that a zip file knows


def distribution_name(config: str, precision: str) -> str:
    """Return what pip calls the wheel of a config and a precision; any config's name gives a valid one."""
    stem = re.sub(r"[^a-z0-9]+", "-", f"{config}-{precision}".lower()).strip("-")
    return f"futransformer-kernels-{stem}-{ARCHITECTURE}"


def write_wheel(manifest: ModelManifest, folder: Path) -> Path:
    """Write the wheel of a model's kernels into ``folder`` and return its path; one of the same name is replaced."""
    name = distribution_name(manifest.config, manifest.precision)
    package = name.replace("-", "_")
    with storage_errors("the wheel's folder", folder, "choose one with --wheel"):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".", dir=folder) as staged:
            exported = export(manifest, Path(staged))
            names = (FILE_NAME, *(record.cubin.name for record in exported.kernels))
            files = {f"{package}/{file}": (Path(staged) / file).read_bytes() for file in names}
        docstring = f'"""Kernels of FuTransformer {__version__}; manifest.json says of which model."""\n'
        files[f"{package}/__init__.py"] = docstring.encode()
        path = folder / f"{package}-{__version__}-py3-none-any.whl"
        write_atomically(path, _zipped(files | _described(manifest, name, package), f"{package}-{__version__}"))
    return path


def _described(manifest: ModelManifest, name: str, package: str) -> dict[str, bytes]:
    """What pip and importlib.metadata read; without RECORD, which names all the others."""
    config = " ".join(manifest.config.split())
    texts = {
        "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {__version__}\n"
        f"Summary: FuTransformer's kernels of {config} ({manifest.precision}) for {ARCHITECTURE}\n"
        f"Requires-Python: >=3.10\nRequires-Dist: futransformer=={__version__}\n",
        "WHEEL": f"Wheel-Version: 1.0\nGenerator: futransformer {__version__}\n"
        "Root-Is-Purelib: true\nTag: py3-none-any\n",
        "entry_points.txt": f"[{GROUP}]\n{name} = {package}\n",
    }
    return {f"{package}-{__version__}.dist-info/{file}": text.encode(errors="replace") for file, text in texts.items()}


def _zipped(files: dict[str, bytes], stem: str) -> bytes:
    """The archive, RECORD last, as the format asks for."""
    record = f"{stem}.dist-info/RECORD"
    lines = [f"{path},sha256={_digest(content)},{len(content)}\n" for path, content in files.items()]
    files = {**files, record: "".join([*lines, f"{record},,\n"]).encode()}
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as wheel:
        for path, content in files.items():
            entry = zipfile.ZipInfo(path, _ZIP_TIME)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o644 << 16
            wheel.writestr(entry, content)
    return archive.getvalue()


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
