"""Refuses bare `int` and `float` of text from outside: they raise, or read too well.

    python tools/check_numbers.py src/unbroken

`unbroken.foreign_numbers` says what is wrong with them, and has the readers to use instead.  A call
with an argument that is evidently a number is allowed: a literal, a sum or a comparison, a length,
a parameter that is annotated as a number.  `REASONS` lists files and folders whose other calls
read no text from outside, each with the reason.  An exception that is not needed is refused, too.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

NOT_EXAMINED = ("cli/", "sim/", "worker/", "nodes/checks/", "foreign_numbers.py")
"""Commands of one user, simulated worlds, the user's own process, programs that measure, and the
readers themselves."""
REASONS = {
    "files of the kernel, or of the machine's owner": (
        *("agent/evidence/procfs.py", "agent/evidence/watch.py", "agent/snapshots/slots.py"),
        *("agent/workers/facts.py", "agent/workers/lineage.py", "agent/workers/spawn.py"),
        *("core/nodes/kernel_log.py", "local/node/processes/process.py", "local/state.py"),
        *("local/node/processes/supervisor.py", "nodes/host.py"),
        *("nodes/nvml.py", "operator/election.py", "operator/nodes/providers/command.py"),
    ),
    "what this program has written itself": (
        *("local/apiserver/access.py", "local/apiserver/http/protobuf.py", "local/networks.py"),
        *("local/machines/node.py", "local/networks.py", "local/node/pods/volumes.py"),
        *("local/node/processes/launcher.py",),
    ),
    "digits that a pattern or a route of the file has matched, no more than Python reads": (
        *("agent_http/peer.py", "agent_http/snapshots.py", "core/diagnosis/flight_waits.py"),
        *("core/diagnosis/job_logs.py", "core/job/record/spans.py", "core/logs/origins.py"),
        *("core/logs/pattern_trees.py", "core/logs/times.py", "kube/quantity.py"),
        *("local/apiserver/http/reads.py", "local/apiserver/kinds/crds.py", "local/node_calls.py"),
        *("local/apiserver/schema/constraints.py", "local/apiserver/tables/custom_columns.py"),
        *("local/apiserver/write/patch.py", "local/machines/decisions/machine.py"),
        *("operator/definitions.py", "spec/job/types.py", "wire/agent_bodies.py"),
        *("wire/flight_dump.py", "wire/spy_dump.py"),
    ),
    "numbers of an object, by the schema that the API server holds it to": (
        *("cluster_api/clusters.py", "cluster_api/shapes.py", "core/clusters/groups.py"),
        *("local/kubeflow/decisions.py", "local/node/driver.py"),
        *("local/node/pods/", "local/ray/decisions/", "operator/kueue/"),
        *("operator/nodes/providers/machines.py",),
    ),
    "numbers by their type, which was looked at or comes from a struct": (
        *("agent/torchrun.py", "agent/workers/expiry.py", "agent/workers/keeper.py"),
        *("agent/snapshots/messages.py", "agent_http/server.py", "core/nodes/repair/course.py"),
        *("spec/job/ledger.py", "spec/job/log_rules.py", "spec/job/rules.py"),
        *("spec/schema/", "wire/codec.py", "wire/snapshot.py", "wire/worker.py"),
    ),
    "any text, and what is no number is handled there": (
        *("agent/evidence/spy.py", "core/logs/rule_lint.py", "core/logs/values.py"),
        *("core/nodes/health_object.py",),
    ),
}
EXCEPTIONS = {place: reason for reason, places in REASONS.items() for place in places}
"""Reasons by the begin of a file's path."""
NUMBERS = frozenset({"int", "float", "bool"})
FUNCTIONS = frozenset({"len", "round", "max", "min", "abs", "sum", "to_integral_value"})
"""Functions whose result is a number, or which fail for a text in any case."""


class _Visitor(ast.NodeVisitor):
    def __init__(self) -> None:
        self.found: list[tuple[int, str]] = []
        self.numbers: frozenset[str] = frozenset()

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        given, outer = node.args, self.numbers
        parameters = [*given.posonlyargs, *given.args, *given.kwonlyargs]
        own = {one.arg for one in parameters if _is_number_type(one.annotation)}
        self.numbers = (outer - {one.arg for one in parameters}) | own
        self.generic_visit(node)
        self.numbers = outer

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Call(self, node: ast.Call) -> None:
        match node.func:
            case ast.Name("int" | "float" as name) if node.args:
                if len(node.args) > 1 or not self._is_number(node.args[0]):
                    self._refuse(node, f"{name}(...) of what may be text")
            case ast.Name("map") if node.args:
                self._reader(node.args[0])
        for keyword in node.keywords:
            if keyword.arg == "key":
                self._reader(keyword.value)
        self.generic_visit(node)

    def _reader(self, node: ast.expr) -> None:
        if isinstance(node, ast.Name) and node.id in ("int", "float"):
            self._refuse(node, f"{node.id} of what may be text")

    def _is_number(self, node: ast.expr) -> bool:
        match node:
            case ast.Constant() | ast.Compare() | ast.UnaryOp():
                return True
            case ast.BinOp(left, ast.Add(), right):
                return self._is_number(left) or self._is_number(right)
            case ast.BinOp():
                return True
            case ast.Name(name):
                return name in self.numbers
            case ast.Call(ast.Name(name) | ast.Attribute(attr=name)):
                return name in FUNCTIONS
            case _:
                return False

    def _refuse(self, node: ast.expr, what: str) -> None:
        self.found.append((node.lineno, f"{what}: read it by unbroken.foreign_numbers"))


def _is_number_type(annotation: ast.expr | None) -> bool:
    match annotation:
        case ast.BinOp(left, ast.BitOr(), right):
            return all(
                _is_number_type(one) or (isinstance(one, ast.Constant) and one.value is None)
                for one in (left, right)
            )
        case ast.Name(name):
            return name in NUMBERS
        case _:
            return False


def refused(root: Path) -> Iterator[str]:
    """Yield every use that is refused below `root`, as FILE:LINE: reason."""
    used = set()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if name.startswith(NOT_EXAMINED):
            continue
        visitor = _Visitor()
        visitor.visit(ast.parse(path.read_text("utf-8")))
        known = [one for one in EXCEPTIONS if visitor.found and name.startswith(one)]
        used.update(known)
        if not known:
            yield from (f"{path}:{line}: {why}" for line, why in visitor.found)
    yield from (f"REASONS: {one} is not needed" for one in sorted(EXCEPTIONS.keys() - used))


if __name__ == "__main__":
    wrong = list(refused(Path(sys.argv[1])))
    print("\n".join(wrong), end="\n" if wrong else "")
    sys.exit(bool(wrong))
