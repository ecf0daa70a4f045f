"""What a cubin is made of: its machine instructions (SASS), counted, through NVIDIA's disassembler.

Tests require the instructions that a spec promises (wgmma: HGMMA, a TMA load: UTMALDG), and forbid LDL and STL, which
access local memory.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from ..generator.errors import ToolchainError
from .settings import BuildSettings
from .toolchain import pip_toolkits

INSTALL_DISASSEMBLER = 'pip install "nvidia-cuda-nvdisasm>=13.2,<14"'

# `/*01a0*/   @!UP0 UTMALDG.2D [UR8], [UR4] ;`: the address, a predicate, the mnemonic with its modifiers
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Za-z0-9_.]*)", re.MULTILINE)


def find_nvdisasm(settings: BuildSettings) -> Path:
    """Find nvdisasm: in the tool kits that pip installed, in CUDA_HOME and CUDA_PATH, on PATH."""
    folders = [kit / "bin" for kit in pip_toolkits()] + [home / "bin" for _, home in settings.cuda_homes]
    for folder in folders:
        if (folder / "nvdisasm").is_file():
            return folder / "nvdisasm"
    found = shutil.which("nvdisasm", path=settings.search_path)
    if found is None:
        looked = ", ".join([*map(str, folders), "PATH"])
        raise ToolchainError(f"no nvdisasm in {looked}; install it with: {INSTALL_DISASSEMBLER}")
    return Path(found)


def instructions(cubin: Path, settings: BuildSettings) -> list[str]:
    """Disassemble a cubin: its mnemonics in their order, modifiers included (HGMMA.64x128x16.F32.BF16)."""
    command = [str(find_nvdisasm(settings)), "--print-code", str(cubin)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        raise ToolchainError(f"{command[0]} cannot read {cubin}: {ran.stderr.strip() or ran.stdout.strip()}")
    return _INSTRUCTION.findall(ran.stdout)


def count_instructions(cubin: Path, settings: BuildSettings) -> Counter[str]:
    """Disassemble a cubin and count its mnemonics."""
    return Counter(instructions(cubin, settings))


def occurrences(counts: Mapping[str, int], instruction: str) -> int:
    """How often an instruction occurs with any further modifiers: HGMMA counts HGMMA.64x128x16.F32.BF16."""
    return sum(n for mnemonic, n in counts.items() if mnemonic == instruction or mnemonic.startswith(instruction + "."))
