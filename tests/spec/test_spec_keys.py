"""Labels, annotations and condition types are written in one module."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from unbroken.spec import keys

SOURCES = Path(keys.__file__).parents[1]
KEY = re.compile(
    r"unbroken\.dev|sagemaker\.amazonaws\.com|kubeflow\.org|kueue\.x-k8s\.io|HPJob"
    r"|node\.kubernetes\.io/(out-of-service|not-ready|unreachable|unschedulable|instance-type)"
    r"|NvidiaGPUUnhealthy|HardwareUnhealthy"
)


def literals(module: ast.Module) -> Iterator[ast.Constant]:
    """Yield every literal of a module that is no docstring."""
    documented = {id(node.value) for node in ast.walk(module) if isinstance(node, ast.Expr)}
    for node in ast.walk(module):
        if isinstance(node, ast.Constant) and id(node) not in documented:
            yield node


def test_keys_are_written_in_one_module() -> None:
    """A key that is written twice is changed once."""
    found = [
        f"{path.relative_to(SOURCES)}:{node.lineno}: {node.value}"
        for path in sorted(SOURCES.rglob("*.py"))
        if path != Path(keys.__file__)
        if KEY.search(text := path.read_text())
        for node in literals(ast.parse(text))
        if KEY.search(str(node.value))
    ]
    assert found == [], "import these from unbroken.spec.keys"


def test_no_key_has_two_names() -> None:
    """Except the one that is a label of Machines and the finalizer of Clusters."""
    names: dict[str, list[str]] = {}
    for name, value in vars(keys).items():
        if isinstance(value, str) and name.isupper():
            names.setdefault(value, []).append(name)
    twice = [sorted(same) for same in names.values() if len(same) > 1]
    assert twice == [["CLUSTER_FINALIZER", "CLUSTER_LABEL"]]
