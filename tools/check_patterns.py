"""Refuses regular expressions on `re` that are not literals: `re` may take for ever on a bad one.

    python tools/check_patterns.py src/unbroken

`spec/patterns.py` alone compiles patterns from outside, on RE2.  Everywhere else `re` is imported
as `re`.  At the top of a module its functions take any pattern, since no data from outside exists
yet.  In a function they take a string literal.  `FROM_CODE` lists the functions that make a pattern
of literals, each with the reason.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

BANNED_MODULES = frozenset(
    {"regex", "sre_compile", "sre_parse", "sre_constants", "_sre", "fnmatch", "glob"}
)
"""Backtracking engines by other names, and what makes patterns for them."""
RE2_MODULES = frozenset({"spec/patterns.py", "core/logs/patterns.py"})
COMPILERS = frozenset(
    {"compile", "match", "fullmatch", "search", "split", "findall", "finditer", "sub", "subn"}
)
FLAGS = frozenset({"ASCII", "IGNORECASE", "DOTALL", "MULTILINE", "VERBOSE", "I"})
HARMLESS = frozenset({"escape", "error", "Pattern", "Match"}) | FLAGS
FROM_CODE = {
    ("core/logs/times.py", "_custom"): "escaped text between patterns of the module's own table",
    ("spec/patterns.py", "_explained"): "signs of the module's own table",
}


class _Visitor(ast.NodeVisitor):
    def __init__(self, name: str) -> None:
        self.name = name
        self.found: list[tuple[int, str]] = []
        self.functions: list[str] = []

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.functions.append(node.name)
        self.generic_visit(node)
        self.functions.pop()

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.functions.append("<lambda>")
        self.generic_visit(node)
        self.functions.pop()

    def visit_Import(self, node: ast.Import) -> None:
        for one in node.names:
            root = one.name.partition(".")[0]
            if root == "re" and (one.asname or one.name != "re"):
                self._refuse(node, "import re under its own name")
            self._module(node, root)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        root = (node.module or "").partition(".")[0] if not node.level else ""
        if root == "re" or any(one.name == "re" for one in node.names):
            self._refuse(node, "import re itself, and not its names")
        self._module(node, root)

    def visit_Call(self, node: ast.Call) -> None:
        match node.func:
            case ast.Attribute(ast.Name("re"), function) if function in COMPILERS:
                self._check(node)
                for part in (*node.args, *node.keywords):
                    self.visit(part)
                return
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.value, ast.Name) and node.value.id == "re":
            if node.attr not in HARMLESS:
                self._refuse(node, f"re.{node.attr} is called at once, with a literal")
            return
        if node.attr == "re":
            self._refuse(node, "the module re of another module")
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if node.id == "re":
            self._refuse(node, "the module re has no other name and is handed to nobody")

    def visit_Constant(self, node: ast.Constant) -> None:
        if node.value in ("re", "re2", "sre_compile", "_sre"):
            self._refuse(node, f"{node.value} is imported by its name, and not by text")

    def _check(self, node: ast.Call) -> None:
        if not self.functions or (self.name, self.functions[-1]) in FROM_CODE:
            return
        if not (node.args and isinstance(node.args[0], ast.Constant)):
            self._refuse(node, "the pattern is no literal: use unbroken.spec.patterns")

    def _module(self, node: ast.AST, root: str) -> None:
        if root in BANNED_MODULES:
            self._refuse(node, f"{root} runs patterns on a backtracking engine")
        if root == "re2" and self.name not in RE2_MODULES:
            self._refuse(node, "RE2 is used through unbroken.spec.patterns, which bounds it")

    def _refuse(self, node: ast.AST, why: str) -> None:
        self.found.append((getattr(node, "lineno", 0), why))


def refused(root: Path) -> Iterator[str]:
    """Yield every use that is refused below `root`, as FILE:LINE: reason."""
    for path in sorted(root.rglob("*.py")):
        visitor = _Visitor(path.relative_to(root).as_posix())
        visitor.visit(ast.parse(path.read_text("utf-8")))
        yield from (f"{path}:{line}: {why}" for line, why in visitor.found)


if __name__ == "__main__":
    wrong = list(refused(Path(sys.argv[1])))
    print("\n".join(wrong), end="\n" if wrong else "")
    sys.exit(bool(wrong))
