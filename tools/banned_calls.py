#!/usr/bin/env python3
"""Calls that would run code from data, found in the syntax tree of each file.

    banned_calls.py PATH [PATH ...]      exit 1 and a line for each finding

These are banned:

- modules that unpickle (`pickle`, `marshal`, `shelve`, ...), by import or by a string with the name
- `torch.load` and torch's other loaders without `weights_only=True`
- exchanges of pickled objects between ranks (`all_gather_object`, ...) and processes
  (`Connection.recv`)
- YAML loaders that make objects, and numpy's `allow_pickle`
- `eval`, `exec`, `compile` and `runpy`-like calls
- `__reduce__` and similar methods
- `__import__` and `import_module` of a name that is not a literal

A name counts at any place: called, given another name, passed on, or as a string of its own
(`getattr(torch, "load")`): ruff's rules S and TID251 see imports and calls only.  `ALLOWED` lists
exceptions, each with its reason.  An exception that is no longer needed is a finding too.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from pathlib import Path

BOOTS = "starts the user's own script, as `python script.py` would"
OWN_FORK = "from a fork of this process, by send_bytes and recv_bytes, as JSON"
ALLOWED: dict[tuple[str, str], str] = {
    ("cli/main.py", "getattr"): "a command of the table COMMANDS",
    ("worker/__init__.py", "getattr"): "a name of the table _ELSEWHERE",
    ("worker/checkpointing/state.py", "load"): "torch's loader, with our reader and planner",
    ("worker/checkpointing/state.py", "getattr"): "a class of torch.nn or torch.optim, named by us",
    ("worker/checkpointing/dcp.py", "__setstate__"): "torch's own filling of one checked class",
    ("worker/checkpointing/dcp.py", "builtins"): "a name that a pickle holds, never looked up",
    (
        "worker/boot/imports.py",
        "__import__",
    ): "imports what the user's script imports, before it runs",
    ("worker/boot/boot.py", "SourceFileLoader"): BOOTS,
    ("worker/boot/boot.py", "exec_module"): BOOTS,
    ("worker/boot/becoming.py", "SourceFileLoader"): BOOTS,
    ("worker/boot/becoming.py", "__builtins__"): BOOTS,
    ("worker/boot/becoming.py", "compile"): BOOTS,
    ("worker/boot/becoming.py", "exec"): BOOTS,
    ("worker/boot/becoming.py", "runpy"): BOOTS,
    ("worker/accelerate_launch.py", "runpy"): BOOTS,
    ("nodes/checks/driver.py", "multiprocessing"): OWN_FORK,
    ("nodes/checks/sides.py", "multiprocessing"): OWN_FORK,
    ("sim/__main__.py", "multiprocessing"): "the simulator's own processes, of numbers only",
}
"""Exceptions by the end of a file's path and what it uses, with the reason."""

MODULES = frozenset({
    "pickle", "_pickle", "cPickle", "pickletools", "copyreg", "marshal", "shelve", "dill",
    "cloudpickle", "jsonpickle", "joblib", "dbm", "code", "codeop", "runpy", "multiprocessing",
    "imp", "builtins",
})  # fmt: skip
"""Modules that run code from data, or lend the functions that do."""
NAMES = frozenset({
    "eval", "exec", "compile", "__import__", "__builtins__", "__reduce__", "__reduce_ex__",
    "__setstate__", "__getstate__", "find_class", "persistent_load", "Unpickler", "Pickler",
    "unsafe_load", "unsafe_load_all", "full_load", "full_load_all", "UnsafeLoader", "FullLoader",
    "allow_pickle", "pickle_module", "read_pickle", "to_pickle", "all_gather_object",
    "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list",
    "recv_object_list", "dcp_to_torch_save", "load_module", "exec_module", "SourceFileLoader",
    "_import_dotted_name", "_legacy_load", "_load_from_bytes",
})  # fmt: skip
"""Names that are banned wherever they stand, as attributes and as strings too."""
METHODS = frozenset({"compile"})
"""Names of `NAMES` that other things have as a method: `re.compile` is none of ours."""
WORDS = frozenset({"code", "dbm", "eval", "exec", "compile"})
"""Strings that are words as well: banned as names, and where `getattr` looks them up."""
PROCESS_NAMES = frozenset({"multiprocessing.process"})
"""Keys of sys.modules that are only looked up."""
LOADS = frozenset({"load", "loads", "load_all"})
PLAIN_OWNERS = frozenset({"json", "tomllib", "pickled"})
"""Modules whose loaders make plain values."""
SAFE_YAML = frozenset({"SafeLoader", "CSafeLoader", "_Loader"})


def findings(source: str) -> Iterator[tuple[int, str, str]]:
    """Line, what is used, and what is wrong with it."""
    tree = ast.parse(source)
    texts = _docstrings(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _module(node.lineno, alias.name)
                if alias.asname in PLAIN_OWNERS and alias.asname != alias.name.split(".")[-1]:
                    yield node.lineno, "import", f"gives {alias.name} the name {alias.asname}"
        elif isinstance(node, ast.ImportFrom):
            if not node.level:
                yield from _module(node.lineno, node.module or "")
            for alias in node.names:
                yield from _name(node.lineno, alias.name)
                if alias.name == "*":
                    yield node.lineno, "*", "import * hides what is used"
                is_ours = node.level or (node.module or "").startswith("unbroken.")
                if alias.name in LOADS and not is_ours:
                    yield node.lineno, "load", "imports a loader: call it by its module's name"
        elif isinstance(node, ast.Name):
            yield from _name(node.lineno, node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _name(node.lineno, node.name)
        elif isinstance(node, ast.Attribute):
            yield from _attribute(node)
        elif isinstance(node, ast.keyword) and node.arg:
            yield from _name(node.value.lineno, node.arg)
        elif id(node) not in texts and (text := _folded(node)) is not None:
            yield from _text(getattr(node, "lineno", 0), text)
        if isinstance(node, ast.Call):
            yield from _call(node)
    yield from _loads(tree)


def _docstrings(tree: ast.AST) -> set[int]:
    """Return the ids of string statements, such as docstrings, which nothing uses."""
    return {
        id(node.value) for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }  # fmt: skip


def _module(line: int, name: str) -> Iterator[tuple[int, str, str]]:
    for part in name.split("."):
        if part in MODULES:
            yield line, part, f"imports {part}"


def _name(line: int, name: str) -> Iterator[tuple[int, str, str]]:
    if name in NAMES:
        yield line, name, f"uses {name}"


def _attribute(node: ast.Attribute) -> Iterator[tuple[int, str, str]]:
    if node.attr not in METHODS:
        yield from _name(node.lineno, node.attr)
    if node.attr in ("Loader", "CLoader"):
        yield node.lineno, node.attr, f"uses {node.attr} of yaml"
    if node.attr in MODULES - {"code"}:
        yield node.lineno, node.attr, f"uses {node.attr}"


def _text(line: int, value: str) -> Iterator[tuple[int, str, str]]:
    """A string that is a name, as getattr and import_module take it."""
    parts = value.split(".")
    is_module = parts[0] in MODULES - WORDS and all(one.isidentifier() for one in parts)
    if value in NAMES - WORDS or (is_module and value not in PROCESS_NAMES):
        yield line, parts[0], f"holds the name {value!r}"


def _call(node: ast.Call) -> Iterator[tuple[int, str, str]]:
    name = _last(node.func)
    if name == "import_module":
        yield from _imported(node)
    if name in ("attrgetter", "methodcaller") and node.args:
        yield from _looked_up(node, node.args[0])
    if name == "getattr" and len(node.args) > 1:
        yield from _looked_up(node, node.args[1])


def _imported(node: ast.Call) -> Iterator[tuple[int, str, str]]:
    first = node.args[0] if node.args else None
    if isinstance(first, ast.JoinedStr):
        start = first.values[0]
        # A part of a package that is written there.
        if isinstance(start, ast.Constant) and str(start.value).count(".") >= 1:
            return
    if not isinstance(first, ast.Constant | ast.IfExp):
        yield node.lineno, "import_module", "imports a module that is not named here"


def _looked_up(node: ast.Call, name: ast.expr) -> Iterator[tuple[int, str, str]]:
    if isinstance(name, ast.Constant):
        if name.value in (WORDS | LOADS) - {"code"}:
            yield node.lineno, str(name.value), f"looks up {name.value!r}"
        return
    what = node.args[0]
    if isinstance(what, ast.Call) and _last(what.func) == "import_module":
        yield node.lineno, "getattr", "looks up a name in a module that is not named here"
    if isinstance(name, ast.BinOp | ast.JoinedStr):
        yield node.lineno, "getattr", "looks up a name that is put together"


def _loads(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Yield loaders of objects with a `load`. JSON, TOML, and loaders of plain data are allowed."""
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in LOADS:
            owner, call = _last(node.value), calls.get(id(node))
            if not (owner in PLAIN_OWNERS or (call is not None and _is_plain(call))):
                yield node.lineno, "load", f"uses {owner}.{node.attr}, which may run code"


def _is_plain(call: ast.Call) -> bool:
    """Return whether a call of `load` makes plain values only, or is a method without a source."""
    given = {one.arg: one.value for one in call.keywords}
    only = given.get("weights_only")
    if isinstance(only, ast.Constant) and only.value is True:
        return True
    loaders = [*call.args[1:2], *(one for name, one in given.items() if name == "Loader")]
    return any(_last(one) in SAFE_YAML for one in loaders) or not (call.args or call.keywords)


def _last(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _folded(node: ast.AST) -> str | None:
    """Return the text of strings that are joined from constants."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _folded(node.left), _folded(node.right)
        return None if left is None or right is None else left + right
    if isinstance(node, ast.JoinedStr):
        parts = [_folded(getattr(one, "value", one)) for one in node.values]
        return None if None in parts else "".join(filter(None, parts))
    return None


def examine(paths: list[Path]) -> list[str]:
    """Return all findings in files and folders, without the exceptions."""
    found, used = [], set()
    files = [one for path in paths for one in (path.rglob("*.py") if path.is_dir() else [path])]
    for file in sorted(files):
        for line, what, why in sorted(set(findings(file.read_text()))):
            known = [key for key in ALLOWED if file.as_posix().endswith(key[0]) and key[1] == what]
            used.update(known)
            if not known:
                found.append(f"{file}:{line}: {why}")
    if any(path.is_dir() for path in paths):
        found += [
            f"ALLOWED is not needed for {where}: {what}" for where, what in ALLOWED.keys() - used
        ]
    return found


def main() -> int:
    """Print the findings; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="+", type=Path)
    found = examine(parser.parse_args().paths)
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
