"""Links between the pages of the repository lead to a file, and to a heading of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.tools import tool

ROOT = Path(__file__).parents[2]
docs = tool("docs")
PAGES: list[Path] = docs.pages()
LINK = re.compile(r"\]\(\s*([^)\s]+)\)|(?:src|srcset|href)=\"([^\"]+)\"")
CODE = re.compile(r"^(```.*?^```|    .*?)$|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    heads = [line.lstrip("#").strip() for line in text.splitlines() if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def broken(page: Path) -> list[str]:
    """The links of a page that lead nowhere; addresses of other sites are not followed."""
    wrong = []
    for found in LINK.finditer(CODE.sub("", page.read_text())):
        link = found[1] or found[2]
        name, _, anchor = link.partition("#")
        if "://" in link or link.startswith("mailto:"):
            continue
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (
            anchor and target.suffix == ".md" and anchor not in anchors(target)
        ):
            wrong.append(link)
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    assert broken(page) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_site_has_each_file_that_a_page_links_to(page: Path) -> None:
    found = LINK.finditer(CODE.sub("", page.read_text()))
    names = [(one[1] or one[2]).partition("#")[0] for one in found]
    targets = {(page.parent / name).resolve() for name in names if name and "://" not in name}
    files = {target for target in targets if target.is_file() and target.suffix != ".md"}
    assert files <= set(docs.linked(page))
    assert {target for target in targets if target.suffix == ".md"} <= set(PAGES)


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One head\n\n[a](#one-head) [b](#two) [c](none.md) [d](page.md)\n\n    [e](x)\n"
    )
    assert broken(page) == ["#two", "none.md"]
