"""The guide to security names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/guide/security.md").read_text()
NAMED = re.compile(r"`(test_\w+)`(?: \(`(tests/\w+)`\))?")
FILE = re.compile(r"`((?:\w+/)*\w+\.py)`")


def test_each_test_that_the_page_names_is_where_it_says() -> None:
    named = NAMED.findall(PAGE)
    assert len(named) > 40
    texts: dict[str, str] = {}
    for name, folder in named:
        place = folder or "tests/attack"
        if place not in texts:
            texts[place] = "".join(file.read_text() for file in (ROOT / place).rglob("test_*.py"))
        assert re.search(rf"^(async )?def {name}\(", texts[place], re.MULTILINE), (name, place)


def test_each_line_of_what_an_attacker_can_do_has_a_test_or_says_why_not() -> None:
    section = PAGE.partition("## What each attacker")[2].partition("\n## ")[0]
    cells = [line.split("|")[-2].strip() for line in section.splitlines() if line[:2] == "| "]
    shown = [cell for cell in cells if cell != "test"]
    assert len(shown) > 40
    assert all(NAMED.search(cell) or cell.startswith(("Not tested: ", "Seen: ")) for cell in shown)


def test_each_module_that_the_page_names_exists() -> None:
    section = PAGE.partition("## Findings")[2].partition("\n## ")[0]
    files = FILE.findall(section)
    assert len(files) > 10
    assert [one for one in files if not (ROOT / "src/unbroken" / one).exists()] == []
