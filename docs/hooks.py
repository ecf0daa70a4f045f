"""What the site of these pages needs beyond the pages: mkdocs calls the functions whose names begin with ``on_``.

The pages are written for the repository, where a link may lead to any file of it, and in CommonMark. So what they link
to outside docs/ comes along, the texts of the root as pages and all else as plain text, and what Python-Markdown would
read otherwise is written as it reads it.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
ROOT_PAGES = ("CONTRIBUTING.md", "CHANGELOG.md")
SHOWN = (".json", ".svg")  # by a browser, under these names

_LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<target>[^)#\s]+)(?P<anchor>#[^)]*)?\)")
_ITEM = re.compile(r"\s*(?:[-*]|\d+\.) ")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the root, and every file that a page links to outside docs/."""
    pages = {file.src_uri: file.content_string for file in files.documentation_pages()}
    for name in ROOT_PAGES:
        pages[name] = _from_root((ROOT / name).read_text(encoding="utf-8"))
        files.append(File.generated(config, name, content=pages[name]))
    linked = {_outside(uri, link["target"]) for uri, text in pages.items() for link in _LINK.finditer(text)}
    for path in sorted(linked - {None, *ROOT_PAGES}, key=str):
        if path is not None and (ROOT / path).is_file():
            files.append(File.generated(config, _place(path), content=(ROOT / path).read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn a page of the repository into one of the site."""
    uri = page.file.src_uri

    def led(link: re.Match[str]) -> str:
        path = _outside(uri, link["target"])
        if path is None:
            return link[0]
        if (ROOT / path).is_dir():  # which a site cannot show
            return link["text"]
        target = posixpath.relpath(path if path in ROOT_PAGES else _place(path), posixpath.dirname(uri) or ".")
        return f"[{link['text']}]({target}{link['anchor'] or ''})"

    return _for_python_markdown(_LINK.sub(led, markdown))


def _from_root(text: str) -> str:
    """A page of the root as if it lay in docs/."""

    def led(link: re.Match[str]) -> str:
        target = link["target"]
        if ":" in target:
            return link[0]
        moved = target.removeprefix("docs/") if target.startswith("docs/") else f"../{target}"
        return f"[{link['text']}]({moved}{link['anchor'] or ''})"

    return _LINK.sub(led, text)


def _outside(uri: str, target: str) -> str | None:
    """The path from the root of what a page links to outside docs/; None for all else."""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(uri), target))
    return None if ":" in target or path.startswith("docs/") else path


def _place(path: str) -> str:
    """Where a file of the repository lies in the site."""
    return f"source/{path}" if path.endswith(SHOWN) else f"source/{path}.txt"


def _for_python_markdown(text: str) -> str:
    """A blank line before a list behind a paragraph, pipes in a table's code as they are, no comments for the tests."""
    lines: list[str] = []
    fenced = in_list = False
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced:
            if line.startswith("<!-- "):
                continue
            item = _ITEM.match(line) is not None
            if item and not in_list and lines and lines[-1].strip():
                lines.append("")
            in_list = item or (in_list and line[:1] in ("", " "))
            if line.startswith("|"):
                line = re.sub(r"`[^`]*`", lambda code: code[0].replace(r"\|", "|"), line)  # noqa: PLW2901
        lines.append(line)
    return "\n".join(lines) + "\n"
