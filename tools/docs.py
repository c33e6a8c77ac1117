"""Build the documentation site in build/site, with every warning as an error.

The site shows the pages of the repository where they are: the README is its home, and links from
one folder to another stay as they are. This copies the pages, and the files that they link to, to
build/docs-source, and runs mkdocs there. A page that the navigation of mkdocs.yml does not name is
shown at the end of the section of its folder.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "build/docs-source"
CONFIG = ROOT / "build/mkdocs.yml"
PATTERNS = ("*.md", "docs/**/*.md", "benchmarks/README.md", "examples/*/README.md")
SECTIONS = {
    "docs/guide": "How-to guides",
    "docs/reference": "Reference",
    "docs/tutorials": "Tutorials",
}
"""Section of a page that the navigation does not name, by its folder."""
OTHERS = "Explanation"
MERMAID = ROOT / ".venv/docs/mermaid.min.js"
"""The program that draws diagrams, from its npm package; the theme would load it from a network."""
LINK = re.compile(r"\]\(\s*([^)\s#]+)[^)\s]*\)|(?:src|srcset)=\"([^\"]+)\"")


def pages() -> list[Path]:
    """The pages of the site."""
    return sorted({path for pattern in PATTERNS for path in ROOT.glob(pattern)})


def linked(page: Path) -> Iterator[Path]:
    """The files of the repository that a page links to."""
    for found in LINK.finditer(page.read_text()):
        target = (page.parent / (found[1] or found[2])).resolve()
        if target.is_file() and target.is_relative_to(ROOT):
            yield target


def copy() -> None:
    """Copy the pages and the files that they link to."""
    shutil.rmtree(SOURCE, ignore_errors=True)
    for path in {*pages(), *(target for page in pages() for target in linked(page))}:
        copied = SOURCE / path.relative_to(ROOT)
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copied)


def named(nav: Any) -> Iterator[str]:
    """The pages that a navigation names."""
    if isinstance(nav, str):
        yield nav
    for one in nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else ():
        yield from named(one)


def completed(nav: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The navigation with the pages that it does not name, each in the section of its folder."""
    known = set(named(nav))
    for page in pages():
        name = page.relative_to(ROOT).as_posix()
        if name not in known:
            title = SECTIONS.get(Path(name).parent.as_posix(), OTHERS)
            next(one[title] for one in nav if title in one).append(name)
    return nav


def main() -> int:
    """Build the site; the exit code of mkdocs."""
    copy()
    text = (ROOT / "mkdocs.yml").read_text()
    head, _, nav = text.partition("\nnav:\n")
    shutil.copyfile(MERMAID, SOURCE / MERMAID.name)
    whole = {
        "nav": completed(yaml.safe_load(f"nav:\n{nav}")["nav"]),
        "extra_javascript": [MERMAID.name],
    }
    moved = head.replace("build/", "")  # this configuration lies in build/
    CONFIG.write_text(f"{moved}\n{yaml.safe_dump(whole, sort_keys=False)}")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(CONFIG)]
    environment = {
        **os.environ,
        "NO_MKDOCS_2_WARNING": "1",
    }  # news of the theme, no warning of ours
    return subprocess.run(command, check=False, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
