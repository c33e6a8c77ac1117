"""The reference is complete: what is missing in a table of it is an error, not a gap."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from jsonschema import Draft202012Validator

from tests.tools import tool
from unbroken.cli.nodes import check
from unbroken.cli.rules import commands

TOOLS = str(Path(__file__).parents[2] / "tools")


@pytest.fixture(scope="module")
def pages() -> Iterator[ModuleType]:
    """The module of the pages about programs."""
    sys.path.insert(0, TOOLS)
    try:
        yield tool("reference_pages")
    finally:
        sys.path.remove(TOOLS)


@pytest.fixture(scope="module")
def forms(pages: ModuleType) -> ModuleType:
    """The module of the page about JSON."""
    return tool("reference_json")


def test_every_key_has_a_type_a_meaning_and_a_place_in_the_schema(forms: ModuleType) -> None:
    made = {name: json.loads(text) for name, text in forms.schemas().items()}
    for name, schema in made.items():
        Draft202012Validator.check_schema(schema)
        errors = Draft202012Validator(schema).iter_errors
        assert [one.message for each in schema.get("examples", ()) for one in errors(each)] == [], (
            name
        )
    assert sum("examples" in schema for schema in made.values()) > 20
    assert forms.EXAMPLES.keys() <= {name for names in forms.FORMS for name in names}
    assert made["nodes.json"]["properties"]["nodes"]["type"] == "array"
    assert made["faults-list.json"]["type"] == "array"
    assert {"culprit", "remedy"} <= made["explain.json"]["$defs"]["incident"]["properties"].keys()
    jobs = made["jobs.json"]["properties"]["jobs"]["items"]["properties"]
    assert jobs["completed"]["type"] == ["string", "null"]
    assert list(Draft202012Validator(made["jobs.json"]).iter_errors({"jobs": [{"ready": "2"}]}))
    with pytest.raises(SystemExit, match=r"no line for the key a\.new of jobs"):
        forms.described("jobs", "a.new")


def test_2_is_the_exit_code_of_a_wrong_command_line_alone() -> None:
    page = (Path(TOOLS).parent / "docs/reference/exit-codes.md").read_text()
    common, _, own = page.partition("## Commands with codes of their own")
    assert "| 2 | The command line is wrong" in common
    assert "3: the tests gave no clear result" in own
    assert re.findall(r"\b2: ", own) == []
    assert check.UNKNOWN_CODE == commands.WRONG == 3


def test_every_attribute_of_the_worker_library_has_a_meaning(pages: ModuleType) -> None:
    rows = [line for line in pages.worker_library() if line.startswith("| `")]
    assert any(line.startswith("| `node_rank` | `int` | Rank of this pod") for line in rows)
    assert [line for line in rows if re.search(r"\|\s*\|$", line)] == []


def test_every_metric_has_a_type_labels_and_a_meaning(pages: ModuleType) -> None:
    rows = [line.split(" | ") for line in pages.metrics() if line.startswith("| `")]
    assert len(rows) > 40
    assert [row for row in rows if len(row) != 4 or not row[2] or len(row[3]) < 5] == []
