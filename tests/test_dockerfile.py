"""The Dockerfile, as far as it can be read without Docker: it copies what there is, and calls what there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from futransformer.cli import main
from futransformer.generator.config import CONFIGS
from futransformer.generator.precision import get_precision

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def instructions() -> list[tuple[str, str]]:
    """Every instruction and what stands behind it, continued lines joined."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    return [(line.partition(" ")[0], " ".join(line.partition(" ")[2].split())) for line in lines]


def test_bases_are_pinned_and_come_from_nowhere_in_particular(instructions: list[tuple[str, str]]) -> None:
    bases = [rest.split()[0] for word, rest in instructions if word == "FROM"]
    assert len(bases) == 2
    assert all(re.fullmatch(r"python:\d+\.\d+\.\d+-slim-\w+", base) for base in bases), bases
    assert len(set(bases)) == 1


def test_what_is_copied_exists_and_is_sent(instructions: list[tuple[str, str]]) -> None:
    ignored, *let_through = [
        line for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines() if not line.startswith("#")
    ]
    copied = {
        name
        for word, rest in instructions
        if word == "COPY" and not rest.startswith("--from")
        for name in rest.split()[:-1]
    }
    assert ignored == "*"
    assert {name.removeprefix("!") for name in let_through if name.startswith("!")} == copied
    assert {name for name in copied if not (ROOT / name).exists()} == set()
    linked = {link.name for link in (ROOT / "futransformer").iterdir() if link.is_symlink()}
    assert linked <= copied, "the package's links lead to these"


def test_packages_are_built_from_what_is_copied(instructions: list[tuple[str, str]]) -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extras = {
        name
        for word, rest in instructions
        if word == "RUN"
        for found in re.findall(r"\[([\w,]+)\]\"", rest)
        for name in found.split(",")
    }
    assert extras == {"toolchain", "serve"}
    assert {name for name in extras if not re.search(rf"^{name} = \[", project, re.MULTILINE)} == set()


def test_commands_and_defaults_exist(instructions: list[tuple[str, str]], capsys: pytest.CaptureFixture[str]) -> None:
    defaults = dict(rest.split("=") for word, rest in instructions if word == "ARG")
    assert defaults["CONFIG"] in CONFIGS
    get_precision(defaults["PRECISION"])
    told = "\n".join(rest for word, rest in instructions if word in ("RUN", "ENTRYPOINT"))
    for command in ("build", "serve"):
        (options,) = re.findall(rf"futransformer {command} ([^;&\]\n]*)", told)
        with pytest.raises(SystemExit):
            main([command, "--help"])
        known = capsys.readouterr().out
        assert {option for option in re.findall(r"--[\w-]+", options) if option not in known} == set()
