"""The checker of prose finds what it counts, and only that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.charts import tool

prose = tool("prose")
LONG = " ".join(["word"] * 31)
PAGE = f"""# A page

Short. The pod of `unbroken run a b c. D` is told twice.

{LONG}.

```sh
{LONG} told {"x" * 100}
```

| a cell | told |
|---|---|
| {LONG} | {"y" * 100} |

- An item
  that has two lines.

{"Wide " * 21}
"""
MODULE = '''"""Of a module that is told.

    told = "in an example"

What follows is a second paragraph.
"""

LIMIT = 3
"""Whether it is so."""


def run(*, help: str = "") -> None:  # told in a comment
    """Run it."""


run(help="Before `told`, it goes on.")
'''


def kinds(found: list[Any]) -> list[tuple[str, str, int]]:
    """Class, source and line of each finding."""
    return sorted((one.kind, one.source, one.line) for one in found)


def test_a_page_is_read_without_its_code(tmp_path: Path) -> None:
    (page := tmp_path / "page.md").write_text(PAGE)
    texts, found = prose.read([page])
    assert kinds(found) == [
        ("long line", "page", 5),
        ("long line", "page", 18),
        ("long sentence", "page", 5),
        ("long sentence", "page", 13),
        ("word", "page", 3),
        ("word", "page", 11),
    ]
    assert "An item that has two lines." in [text.words for text in texts]


def test_docstrings_and_help_are_read_and_comments_only_for_length(tmp_path: Path) -> None:
    (module := tmp_path / "module.py").write_text(MODULE)
    _, found = prose.read([module])
    assert kinds(found) == [
        ("headless", "docstring", 1),
        ("headless", "docstring", 9),
        ("word", "docstring", 1),
        ("word", "help", 16),
    ]


def test_code_counts_as_one_word_and_ends_no_sentence() -> None:
    found = prose.sentences("See `a. B c d`. Then, e.g. Paris, go.")
    assert found == ["See `a. B c d`.", "Then, e.g. Paris, go."]
    assert prose.length(found[0]) == 2


@pytest.mark.parametrize("arguments", [[], ["--json"], ["--list", "word"], ["--sample", "2"]])
def test_every_form_of_output_guides_and_does_not_gate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    (tmp_path / "page.md").write_text(PAGE)
    assert prose.main([*arguments, str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert printed
    if arguments == ["--json"]:
        assert json.loads(printed)["findings"]["long line"] == {"page": 2}


def test_a_sample_is_the_same_for_the_same_seed(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(PAGE)
    texts, _ = prose.read([tmp_path / "page.md"])
    assert list(prose.sample(texts, 3, 5)) == list(prose.sample(texts, 3, 5))
    assert len(list(prose.sample(texts, 100, 5))) == len(set(prose.sample(texts, 100, 5)))
