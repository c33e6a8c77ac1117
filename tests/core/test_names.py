"""Public names of `core` are used once: a reader who meets one knows what it is."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import unbroken.core

CORE = Path(unbroken.core.__file__).parent


def test_no_two_modules_define_a_class_or_function_of_one_name() -> None:
    places = defaultdict[str, list[str]](list)
    for path in sorted(CORE.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name[0] != "_":
                places[node.name].append(str(path.relative_to(CORE)))
    assert len(places) > 500
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}
