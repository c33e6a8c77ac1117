"""The navigation of the documentation site.  `make docs` builds the site itself."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.tools import tool

ROOT = Path(__file__).parents[2]
docs = tool("docs")
FENCED = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
FLAT_ITEM = re.compile(r"^ {1,3}(?:[-*]|\d+\.) .*", re.MULTILINE)
"""Item of a list in a list, in fewer columns than the four that Python-Markdown asks for."""


@pytest.fixture
def nav() -> list[dict[str, Any]]:
    """The navigation as it is written."""
    text = (ROOT / "mkdocs.yml").read_text()
    found: list[dict[str, Any]] = yaml.safe_load(text[text.index("\nnav:") :])["nav"]
    return found


def test_every_page_of_the_navigation_is_there_once(nav: list[dict[str, Any]]) -> None:
    named = list(docs.named(nav))
    assert len(named) == len(set(named))
    assert {name for name in named if not (ROOT / name).is_file()} == set()


def test_a_page_that_is_not_named_is_shown_in_the_section_of_its_folder(
    nav: list[dict[str, Any]],
) -> None:
    (guides,) = (one["How-to guides"] for one in nav if "How-to guides" in one)
    guides[:] = []
    found = docs.completed(nav)
    (guides,) = (one["How-to guides"] for one in found if "How-to guides" in one)
    assert {"docs/guide/install.md", "docs/guide/queues.md"} <= set(guides)
    pages = {page.relative_to(ROOT).as_posix() for page in docs.pages()}
    assert set(docs.named(found)) == pages


def test_lists_in_lists_are_shown_as_such() -> None:
    flat = {page.name: FLAT_ITEM.findall(FENCED.sub("", page.read_text())) for page in docs.pages()}
    assert {name: items for name, items in flat.items() if items} == {}
