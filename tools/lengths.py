#!/usr/bin/env python3
"""Functions of more than 60 lines, and files of more than 1,000.

    lengths.py PATH [PATH ...]      exit 1 and a line for each finding

The lines of a function are those from `def` to its end, without its docstring. ruff counts
statements (PLR0915) and branches, but no lines.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

FUNCTION_LINES_MAX = 60
FILE_LINES_MAX = 1000


def findings(path: Path) -> Iterator[str]:
    """Yield a line for each thing in a file that is too long."""
    source = path.read_text()
    if (lines := len(source.splitlines())) > FILE_LINES_MAX:
        yield f"{path}: {lines} lines, {FILE_LINES_MAX} at most"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            text = node.body[0] if ast.get_docstring(node) is not None else None
            lines = _lines(node) - (_lines(text) if text else 0)
            if lines > FUNCTION_LINES_MAX:
                what = f"{path}:{node.lineno}: {node.name}"
                yield f"{what}: {lines} lines, {FUNCTION_LINES_MAX} at most"


def _lines(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def main() -> int:
    """Print the findings; return the exit status."""
    found = [
        finding
        for folder in map(Path, sys.argv[1:])
        for path in sorted(folder.rglob("*.py"))
        for finding in findings(path)
    ]
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
