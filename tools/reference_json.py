"""The page of docs/reference/ about what commands print with `-o json`; `-o yaml` has the same.

The keys are read from the source: from the dictionaries that a function returns or prints, and from
schemas.  `FORMS` says which functions make the answer of which command; a command with `-o` that is
not there is an error.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from textwrap import dedent
from typing import Any

from reference_pages import code, table

from unbroken.spec.schema.crd import incident_definition

INCIDENTS = ("incidents[].", "cli.job.explain:as_value")
JOB = "cli.job.views:job_summary"
STORY = (
    ("goodput.", "cli.job.goodput:goodput_value"),
    INCIDENTS,
)
LOSS = "cli.job.resumed:loss_value"
RESUMED = (("", "cli.job.resumed:summary"), ("lastLoss.", LOSS), ("losses[].", LOSS))
"""Fields of a job of another kind with auto-resume."""
DRILL = (("", "cli.local.chaos:_done"),)
CHANGE = (("", "cli.job.change:_print_done"),)
ORDER = (("", "cli.nodes.commands:_order"), ("nodes[].", "cli.nodes.commands:_ended"))
NODE = "cli.nodes.views:node_row"
FAULT = (("[].", "cli.nodes.faults:_view"),)

FORMS: Mapping[tuple[str, ...], Sequence[tuple[str, str]]] = {
    ("run",): (
        ("", JOB),
        ("", "cli.run.launch:_follow"),
        INCIDENTS,
    ),
    ("jobs",): (
        ("", "cli.job.jobs:_listing"),
        ("jobs[].", JOB),
        ("resumed[].", "cli.job.resumed:summary"),
        ("resumed[].lastLoss.", LOSS),
    ),
    ("describe",): (
        ("", JOB),
        ("", "cli.job.describe:describe"),
        ("pods[].", "cli.job.views:pod_summary"),
        ("pods[].agent.", "cli.job.agents:agent_value"),
        ("detectors", "cli.job.detectors:detector_values"),
        ("events", "cli.job.resumed:event_values"),
        *STORY,
        ("", "cli.job.resumed:describe"),
        *RESUMED,
    ),
    ("logs",): (("", "cli.job.logs:command"),),
    ("explain",): (
        ("", "cli.job.explain:command"),
        *STORY,
        ("", "cli.job.resumed:explained"),
        *RESUMED,
    ),
    ("incidents",): (
        ("", "cli.job.incidents:_listing"),
        ("incidents[].", "cli.job.incidents:incident_value"),
    ),
    ("stacks",): (("", "cli.job.stacks:value"),),
    ("blame",): (("", "cli.job.blame:_value"),),
    ("detectors",): (
        ("", "cli.job.detectors:command"),
        ("detectors", "cli.job.detectors:detector_values"),
    ),
    ("restart", "suspend", "resume", "delete"): CHANGE,
    ("status",): (("", "cli.local.status:command"), ("nodes[].", "cli.local.status:_node")),
    ("doctor",): (("", "cli.nodes.doctor:command"),),
    (
        "chaos kill-worker",
        "chaos freeze-worker",
        "chaos kill-agent",
        "chaos kill-pod",
        "chaos kill-node",
        "chaos start-node",
    ): DRILL,
    ("nodes", "nodes list"): (("nodes[].", NODE),),
    ("nodes describe",): (("", NODE), ("", "cli.nodes.commands:describe")),
    ("nodes drain",): (("", "cli.nodes.commands:drain"),),
    ("nodes uncordon",): (("", "cli.nodes.commands:uncordon"),),
    ("nodes reset", "nodes reboot", "nodes replace"): ORDER,
    ("nodes blame",): (("", "cli.nodes.commands:blame"),),
    ("nodes clear",): (("", "cli.nodes.commands:clear"),),
    ("check",): (("", "cli.nodes.check:_summary"),),
    ("faults list", "faults explain"): FAULT,
    ("rules test",): (
        ("attempts[].", "cli.rules.views:attempt_view"),
        ("patterns", "cli.rules.views:pattern_views"),
    ),
    ("rules check",): (("findings[].", "cli.rules.views:finding_view"),),
    ("node-daemon",): (("", "cli.nodes.daemon:_show"),),
    ("hyperpod start-job",): (("", "cli.hyperpod.commands:_start"),),
    ("hyperpod get-job",): (("", "cli.hyperpod.commands:get_job"),),
    ("hyperpod list-jobs",): (("jobs[].", "cli.hyperpod.commands:_summary"),),
    ("hyperpod cancel-job",): (("", "cli.hyperpod.commands:cancel_job"),),
    ("hyperpod list-pods",): (("pods[].", "cli.hyperpod.commands:_pod"),),
    ("hyperpod get-log",): (("", "cli.hyperpod.commands:get_log"),),
}
FOREIGN = {
    f"cluster {name}": "the answer of the cluster API, in the form of SageMaker's operation"
    for name in ("create", "list", "describe", "update", "delete")
}


def json_forms(commands: Iterable[str]) -> Iterator[str]:
    """Keys of each command's answer; `commands`: those that have the option `-o`."""
    known = {name for names in FORMS for name in names} | FOREIGN.keys()
    if known != set(commands):
        odd = sorted(known.symmetric_difference(commands))
        raise SystemExit(f"tools/reference_json.py: commands with -o that do not fit: {odd}")
    yield from (
        "# JSON of the commands",
        "",
        "Keys of what commands print with `-o json` or `-o yaml`. `a.b` is a key of an object,",
        "`a[].b` a key of every object of a list. Not listed are the keys of parts that are",
        "printed as Kubernetes has them, for example the status of a check.",
        "",
        "A key may be added in any version. A key of this page is removed or changed only with a",
        "line in the [changelog](../../CHANGELOG.md).",
        "",
    )
    for names, parts in FORMS.items():
        yield from (f"## {', '.join(names)}", "")
        keys = sorted({f"{prefix}{key}" for prefix, one in parts for key in _keys(one)})
        yield from (f"- {', '.join(map(code, group))}" for group in _grouped(keys))
        if INCIDENTS in parts:
            yield "- `incidents[].`: and all keys of [an incident](#an-incident)"
        yield ""
    yield from ("## cluster create, list, describe, update, delete", "")
    yield from (f"`-o json` prints {next(iter(FOREIGN.values()))}.", "")
    schema = incident_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    yield from (
        "## An incident",
        "",
        "The keys are those of `spec` of an `Incident` (`kubectl explain incidents.spec`).",
        "",
    )
    rows = _properties(schema["properties"]["spec"], "")
    yield from table(("key", "meaning"), ((code(key), text) for key, text in rows))


def _grouped(keys: Iterable[str]) -> list[list[str]]:
    """Keys by the object that they are in."""
    found: dict[str, list[str]] = {}
    for key in keys:
        found.setdefault(key.rpartition(".")[0], []).append(key)
    return list(found.values())


def _keys(source: str) -> list[str]:
    module, _, name = source.partition(":")
    function = inspect.unwrap(getattr(importlib.import_module(f"unbroken.{module}"), name))
    found = list(_of_function(function))
    if not found:
        raise SystemExit(f"{source} returns or prints no dictionary")
    return found


def _properties(schema: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for name, one in schema.get("properties", {}).items():
        yield f"{prefix}{name}", one.get("description", "")
        if one.get("type") == "array":
            yield from _properties(one.get("items", {}), f"{prefix}{name}[].")
        else:
            yield from _properties(one, f"{prefix}{name}.")


def _of_function(function: Any) -> Iterator[str]:
    (tree,) = ast.parse(dedent(inspect.getsource(function))).body
    names = _assigned(tree)
    inner = {
        one
        for outer in ast.walk(tree)
        if outer is not tree and isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef)
        for one in ast.walk(outer)
    }
    for node in ast.walk(tree):
        if node in inner:
            continue
        match node:
            case ast.Return(value=ast.expr() as value):
                yield from _of_value(value, "", names)
            case ast.Call(
                func=ast.Attribute(attr="print") | ast.Name(id="Listing"), args=[value, *_]
            ):
                yield from _of_value(value, "", names)
            case _:
                pass


Names = Mapping[str, Sequence[ast.expr]]


def _assigned(tree: ast.AST) -> Names:
    """The values that make each local name: assigned to it, appended, or set by key."""
    found: dict[str, list[ast.expr]] = {}
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                found.setdefault(name, []).append(value)
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                found.setdefault(name, []).append(value)
            case ast.AugAssign(target=ast.Name(id=name), value=value):
                found.setdefault(name, []).append(value)
            case ast.Assign(
                targets=[ast.Subscript(value=ast.Name(id=name), slice=ast.Constant() as key)],
                value=value,
            ):
                found.setdefault(name, []).append(ast.Dict([key], [value]))
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id=name), attr="append"), args=[ast.Dict() as one]
            ):
                found.setdefault(name, []).append(ast.List([one]))
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="update")):
                words = node.keywords
                keys: list[ast.expr | None] = [ast.Constant(one.arg) for one in words]
                found.setdefault(name, []).append(ast.Dict(keys, [one.value for one in words]))
            case _:
                pass
    return found


def _of_value(value: ast.expr, prefix: str, names: Names, depth: int = 6) -> Iterator[str]:
    parts: list[tuple[ast.expr, str]] = []
    match value:
        case ast.Dict(keys=keys, values=values):
            for key, one in zip(keys, values, strict=True):
                if key is None:
                    parts.append((one, prefix))
                elif isinstance(key, ast.Constant) and isinstance(key.value, str):
                    yield f"{prefix}{key.value}"
                    parts.append((one, f"{prefix}{key.value}."))
        case ast.ListComp(elt=one) | ast.List(elts=[one, *_]):
            parts = [(one, f"{prefix.removesuffix('.')}[].")]
        case ast.BoolOp(values=several):
            parts = [(one, prefix) for one in several]
        case ast.BinOp(left=one, right=other) | ast.IfExp(body=one, orelse=other):
            parts = [(one, prefix), (other, prefix)]
        case ast.DictComp(generators=[ast.comprehension(iter=ast.Tuple(elts=keys))]):
            yield from (f"{prefix}{one.value}" for one in keys if isinstance(one, ast.Constant))
        case ast.Name(id=name):
            parts = [(one, prefix) for one in names.get(name, ())]
        case _:
            pass
    for one, inside in parts if depth else ():
        yield from _of_value(one, inside, names, depth - 1)
