"""Each link of a walk leads to a function, and each function names the next one."""

from __future__ import annotations

import ast
import re
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\[`([A-Za-z_.]+)`\]\((src/[^)]+)\)")
OTHERWISE = re.compile(r"\*[A-Z a-z]+\*")
"""Words in italics: the next function is reached in another way than by its name."""
WALKS = [
    ("ARCHITECTURE.md", "from `kubectl apply` to running pods", 20),
    ("ARCHITECTURE.md", "from a worker's exit to its restart", 15),
]
"""Page, title, and most modules."""


class Step(NamedTuple):
    """A function or class of a walk, and the text between it and the one before."""

    name: str
    path: str
    before: str


def steps(page: str, title: str) -> list[Step]:
    """Return the steps of the numbered list of a walk, in order."""
    section = (ROOT / page).read_text().split(f"## A walk: {title}\n")[1].split("\n## ")[0]
    text = section[section.index("\n1. ") :].partition("\n\n")[0]
    found, end = [], 0
    for link in LINK.finditer(text):
        found.append(Step(link[1], link[2], text[end : link.start()]))
        end = link.end()
    return found


def definition(step: Step) -> ast.AST | None:
    """Return the function or class that a step names; None: its module has none."""
    node: ast.AST | None = ast.parse((ROOT / step.path).read_text())
    for name in step.name.split("."):
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        inner = [] if node is None else ast.iter_child_nodes(node)
        node = next((one for one in inner if isinstance(one, kinds) and one.name == name), None)
    return node


def names(node: ast.AST) -> set[str]:
    """Return all names and attributes in a definition."""
    found = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
    return found | {one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute)}


@pytest.mark.parametrize(("page", "title", "modules_max"), WALKS)
def test_each_function_of_a_walk_names_the_next(page: str, title: str, modules_max: int) -> None:
    walk = steps(page, title)
    assert len(walk) > 15
    missing = [step for step in walk if definition(step) is None]
    assert missing == [], "no such function or class"
    apart = []
    for step, following in pairwise(walk):
        node = definition(step)
        assert node is not None
        if OTHERWISE.search(following.before):
            continue
        if following.name.rpartition(".")[2] not in names(node):
            apart.append(f"{step.name} does not name {following.name}")
    assert apart == []
    assert len({step.path for step in walk}) <= modules_max
