"""The page of the comparison has the README's table, and sources for each row of it."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGE = (ROOT / "docs/comparison.md").read_text()
TABLE = re.compile(r"^\| \| unbroken \|.*?(?=\n\n)", re.MULTILINE | re.DOTALL)


def test_both_pages_have_the_same_table() -> None:
    (short,), (long,) = TABLE.findall(README), TABLE.findall(PAGE)
    assert long == short


def test_each_row_of_the_table_has_its_source() -> None:
    rows = [line.split(" | ")[0].strip("|* ") for line in TABLE.findall(PAGE)[0].splitlines()[2:]]
    listed = PAGE[PAGE.index("## Sources, row by row") :]
    sources = [line.split(" | ")[0].strip("| ") for line in listed.splitlines() if line[:2] == "| "]
    assert len(rows) == len(sources) - 1  # without the head
    assert [row for row, source in zip(rows, sources[1:], strict=True) if source not in row] == []


def test_each_project_of_the_table_says_when_to_choose_it() -> None:
    head = TABLE.findall(PAGE)[0].splitlines()[0]
    projects = [re.sub(r" [\d.]+$", "", cell.strip()) for cell in head.split("|")[3:-1]]
    assert [name for name in projects if f"\n**{name}.** " not in PAGE] == []
