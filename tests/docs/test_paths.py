"""The paths that the pages for developers name are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src/unbroken"
PATH = re.compile(r"`([a-z_]+(?:/[a-z_0-9.]+)+/?)`")


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_each_path_is_there(page: str) -> None:
    named = set(PATH.findall((ROOT / page).read_text()))
    assert len(named) > 10
    missing = [
        name
        for name in sorted(named)
        if not any((base / f"{name}{end}").exists() for base in (SRC, ROOT) for end in ("", ".py"))
    ]
    assert missing == []


def test_each_package_is_named() -> None:
    """ARCHITECTURE.md has every folder with Python modules."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    packages = {str(init.parent.relative_to(SRC)) for init in SRC.rglob("__init__.py")} - {"."}
    assert [name for name in sorted(packages) if f"`{name}`" not in text] == []
