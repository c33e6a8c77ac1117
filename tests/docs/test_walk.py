"""ARCHITECTURE.md walks from a worker's exit to its restart: each link leads to the next."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[2]
TITLE = "## A walk: from a worker's exit to its restart"
LINK = re.compile(r"^\d+\. \[`([\w.]+)`\]\((src/unbroken/[\w/]+\.py)\)", re.M)
HANDS_ON = re.compile(r"Next: `(\w+)`\.$")
MODULES_MAX = 15


@dataclass(frozen=True)
class Stop:
    """One item of the list."""

    function: str
    path: Path
    next: str
    """The function that is called, or the message that is handed on; empty: the last item."""


def stops() -> list[Stop]:
    """Return the items of the walk."""
    text = (ROOT / "ARCHITECTURE.md").read_text().partition(TITLE)[2].partition("\n## ")[0]
    found = []
    for item in re.split(r"\n(?=\d+\. )", text.strip())[1:]:
        link = LINK.match(item)
        assert link is not None, f"no link to a function: {item}"
        hands_on = HANDS_ON.search(item.strip())
        name = hands_on.group(1) if hands_on is not None else ""
        found.append(Stop(link.group(1), ROOT / link.group(2), name))
    return found


@cache
def tree(path: Path) -> ast.Module:
    """Return a module's syntax."""
    return ast.parse(path.read_text())


def defined(path: Path) -> set[str]:
    """Return the functions of a module, those of classes with the name of their class."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = {one.name for one in tree(path).body if isinstance(one, functions)}
    for owner in (one for one in tree(path).body if isinstance(one, ast.ClassDef)):
        found |= {f"{owner.name}.{one.name}" for one in owner.body if isinstance(one, functions)}
    return found


def used(path: Path) -> set[str]:
    """Return the names that a module uses or defines."""
    nodes = list(ast.walk(tree(path)))
    found = {one.id for one in nodes if isinstance(one, ast.Name)}
    found |= {one.attr for one in nodes if isinstance(one, ast.Attribute)}
    return found | {one.rpartition(".")[2] for one in defined(path)}


def test_each_link_names_a_function() -> None:
    walk = stops()
    assert len(walk) > 10
    assert [stop for stop in walk if stop.function not in defined(stop.path)] == []


def test_each_link_leads_to_the_next() -> None:
    """What is named as next is in both modules: it is called and defined, or sent and taken."""
    lost = [
        (stop.function, stop.next, after.function)
        for stop, after in pairwise(stops())
        if not stop.next or not {stop.next} <= used(stop.path) & used(after.path)
    ]
    assert lost == []
    assert stops()[-1].next == ""


def test_the_walk_enters_few_modules() -> None:
    assert len({stop.path for stop in stops()}) <= MODULES_MAX
