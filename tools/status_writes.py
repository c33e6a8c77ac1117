#!/usr/bin/env python3
"""Tests of the whole way that write a status, which a real part of the product should write.

    status_writes.py tests      exit 1 and a line for each finding

Such a test would pass although that part does not work. A finding is a text that ends with
`/status` (but for pods and nodes, whose statuses are Kubernetes' own, and for the agent's URL), a
text with `--subresource=status`, or a method `patch_..._status` or `replace_..._status`. `FOLDERS`
lists the folders that are looked at, `ALLOWED` the exceptions. An exception that is no longer
needed is a finding too.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

FOLDERS = ("clients", "cluster_api", "documents", "e2e", "interop", "realnodes")
"""Folders of tests whose parts are all real; tests of single parts give these their input."""
CLIENT = "tests what a client reads and writes, on objects that no part of the product acts on"
ALLOWED = {
    "cluster_api/api_program.py": "stands in for the provider of machines, which is not ours",
    "clients/test_clients_kubectl.py": CLIENT,
    "clients/test_clients_kubectl_cluster.py": CLIENT,
    "clients/test_clients_kubernetes.py": CLIENT,
    "clients/test_clients_state.py": CLIENT,
    "clients/test_hyp_states.py": CLIENT,
}
"""Exceptions by file, with the reason."""
WRITE = re.compile(
    r"--subresource[= ]status\b"
    r"|^(?!https?://)(?!.*\b(pods|nodes)/[^/]+/status$).+/status$"
)
METHOD = re.compile(r"(patch|replace)_\w*_status")


def uses(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of each write of a status."""
    if path.suffix == ".sh":
        for number, line in enumerate(path.read_text().splitlines(), 1):
            for word in line.split(" ") if "--subresource" not in line else [line]:
                if WRITE.search(word.strip("'\"")):
                    yield number, word
        return
    nodes = list(ast.walk(ast.parse(path.read_text())))
    parts = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        match node:
            case _ if id(node) in parts:
                continue
            case ast.JoinedStr() if WRITE.search(text := ast.unparse(node)[2:-1]):
                yield node.lineno, text
            case ast.Constant(str() as text) if WRITE.search(text):
                yield node.lineno, text
            case ast.Attribute(attr=name) if METHOD.fullmatch(name):
                yield node.lineno, name
            case (
                ast.BinOp(right=ast.Constant("/status"))
                | ast.keyword(value=ast.Constant("/status"))
            ):
                yield node.lineno, ast.unparse(node)


def main(tests: Path) -> int:
    """Print the findings; return 1 if there are any."""
    findings, seen = list[str](), set[str]()
    files = (path for folder in FOLDERS for path in sorted((tests / folder).rglob("*.*")))
    for path in files:
        if path.suffix not in (".py", ".sh"):
            continue
        name = path.relative_to(tests).as_posix()
        for line, text in uses(path):
            seen.add(name)
            if name not in ALLOWED:
                findings.append(f"{path}:{line}: writes a status: {text}")
    if findings:
        findings.append("let the real part write it, or give the reason in tools/status_writes.py")
    findings += [f"{tests}/{name}: needs no exception any more" for name in ALLOWED.keys() - seen]
    print("\n".join(findings), end="\n" if findings else "")
    return bool(findings)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
