"""The pages as a site: built strictly, complete, fetching nothing. The generated ones are what they are made from."""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("writer", ["api", "catalogue"])
def test_a_generated_page_is_what_it_is_made_from(writer: str) -> None:
    module = runpy.run_path(str(ROOT / "docs" / f"{writer}.py"))
    written = module["PAGE"].read_text(encoding="utf-8")
    assert module["page"]() == written, f"write it anew: python -m docs.{writer}"


def test_every_test_that_a_page_names_exists() -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py"))
    named = re.findall(r"`(test_\w+)`", (ROOT / "docs/testing.md").read_text(encoding="utf-8"))
    assert len(named) > 40
    assert {name for name in named if f"def {name}(" not in sources} == set()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` does."""
    if importlib.util.find_spec("material") is None or not (ROOT / "mkdocs.yml").is_file():
        pytest.skip("mkdocs-material is not installed")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr  # a dead link or a page outside the navigation is an error
    return folder


def test_every_page_is_there_and_what_it_links_to(site: Path) -> None:
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    pages = {Path("index.html") if page == Path("README.html") else page for page in pages}
    assert {
        page for page in pages | {Path("CONTRIBUTING.html"), Path("CHANGELOG.html")} if not (site / page).is_file()
    } == set()
    linked = {
        (path.parent / target).resolve()
        for path in site.rglob("*.html")
        if path.name != "404.html"  # its links are absolute, for it stands in for a page of any folder
        for target in re.findall(r'(?:href|src)="([^"#:]+)["#]', path.read_text(encoding="utf-8"))
    }
    assert site / "source/generator/plan.py.txt" in linked
    assert {path for path in linked if not path.exists()} == set()


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    """Links may lead away; scripts, styles, fonts and pictures may not."""
    for path in site.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        assert (
            re.findall(r'<(?:script|img|iframe)[^>]*src="(?:https?:)?//[^"]*"|<link[^>]*href="https?://[^"]*"', text)
            == []
        )


def test_markdown_of_the_repository_is_read_as_there(site: Path) -> None:
    text = (site / "architecture.html").read_text(encoding="utf-8")
    assert "<li>qkv: Q heads" in text, "a list that begins right behind a paragraph"
    assert r"\|" not in "".join(re.findall(r"<td>.*?</td>", (site / "decode.html").read_text(encoding="utf-8")))
    for path in site.rglob("*.html"):
        page = re.sub(r"<(pre|code)\b.*?</\1>", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        assert "&lt;!-- not run" not in page
        assert "](" not in page, path
