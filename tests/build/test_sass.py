"""Reading a disassembly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from futransformer.build.sass import count_instructions, find_nvdisasm, occurrences
from futransformer.build.settings import BuildSettings
from futransformer.generator.errors import ToolchainError

DISASSEMBLY = """\
.text.k:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 BRA `(.L_x_1) ;
        /*4ac0*/             @!UP0 UTMALDG.2D.MULTICAST [UR8], [UR18], UR17, desc[UR6] ;
        /*4ad0*/               @PT HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24, gsb0 ;
        /*4ae0*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24, gsb0 ;
.L_x_1:
        /*4af0*/                   EXIT ;
        /*0018*/ 	.short	0x0002
"""


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BuildSettings:
    """A disassembler on PATH that says the text above of anything."""
    monkeypatch.setattr("futransformer.build.sass.pip_toolkits", lambda: ())
    tool = tmp_path / "nvdisasm"
    tool.write_text(f"#!/bin/sh\ncat <<'END'\n{DISASSEMBLY}END\n")
    tool.chmod(0o755)
    return BuildSettings(cache_root=tmp_path, search_path=f"{tmp_path}:/usr/bin:/bin")


def test_instructions_are_counted_by_their_mnemonic(settings: BuildSettings, tmp_path: Path) -> None:
    counts = count_instructions(tmp_path / "k.cubin", settings)
    assert counts == {"LDC": 1, "BRA": 1, "UTMALDG.2D.MULTICAST": 1, "HGMMA.64x128x16.F32.BF16": 2, "EXIT": 1}


def test_an_instruction_is_found_with_any_modifiers(settings: BuildSettings, tmp_path: Path) -> None:
    counts = count_instructions(tmp_path / "k.cubin", settings)
    assert occurrences(counts, "HGMMA") == occurrences(counts, "HGMMA.64x128x16.F32.BF16") == 2
    assert occurrences(counts, "UTMALDG.2D") == 1
    assert occurrences(counts, "HGMM") == occurrences(counts, "LD") == 0


def test_a_missing_disassembler_says_what_to_install(settings: BuildSettings) -> None:
    with pytest.raises(ToolchainError, match=r"no nvdisasm in .*PATH.*pip install \"nvidia-cuda-nvdisasm"):
        find_nvdisasm(replace(settings, search_path=""))
