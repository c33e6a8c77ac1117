"""The page of docs/reference/ about what commands print with `-o json`; `-o yaml` has the same.

The keys are read from the source: from the dictionaries that a function returns or prints, and from
schemas.  `FORMS` says which functions make the answer of which command; a command with `-o` that is
not there is an error.  `json_keys` has their types and meanings; so has a key that is not there.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import dedent
from typing import Any

from json_keys import described, schema_of, type_text
from reference_pages import code, table

from unbroken.spec.job.codec import SECONDS
from unbroken.spec.schema.crd import incident_definition

Parts = Sequence[tuple[str, str]]
"""Functions that make parts of an output, each with the path of its part."""
INCIDENT = "cli.job.explain:as_value"
INCIDENTS = ("incidents[].", INCIDENT)
JOB = "cli.job.views:job_summary"
STORY = (
    ("goodput.", "cli.job.views:goodput_value"),
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

SNAPSHOTS = (
    ("snapshots[].", "cli.job.snapshots:name_value"),
    ("snapshots[].copies[].", "cli.job.snapshots:copy_value"),
    ("snapshots[].losses[].", "cli.job.snapshots:loss_value"),
)

FORMS: Mapping[tuple[str, ...], Parts] = {
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
        *SNAPSHOTS,
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
        ("attempts[].", "cli.rules.commands:attempt_view"),
        ("patterns", "cli.rules.commands:pattern_views"),
    ),
    ("rules check",): (("findings[].", "cli.rules.commands:finding_view"),),
    ("node-daemon",): (("", "cli.nodes.daemon:_show"),),
    ("hyperpod start-job",): (("", "cli.hyperpod.commands:_start"),),
    ("hyperpod get-job",): (("", "cli.hyperpod.commands:get_job"),),
    ("hyperpod list-jobs",): (("jobs[].", "cli.hyperpod.commands:_summary"),),
    ("hyperpod get-clusters",): (("[].", "cli.hyperpod.clusters:row"),),
    ("hyperpod cancel-job",): (("", "cli.hyperpod.commands:cancel_job"),),
    ("hyperpod list-pods",): (("pods[].", "cli.hyperpod.commands:_pod"),),
    ("hyperpod get-log",): (("", "cli.hyperpod.commands:get_log"),),
}
PAGE = "cli.page.values"
NODE_PAGE = "cli.page.node_values"
GOODPUT = "cli.job.views:goodput_value"
PAGES: Mapping[str, Parts] = {
    "page jobs": (
        ("", f"{PAGE}:jobs_page"),
        ("jobs[].", JOB),
        ("jobs[].", f"{PAGE}:job_row"),
        ("jobs[].", f"{PAGE}:training_values"),
        ("jobs[].goodput.", GOODPUT),
        ("resumed[].", "cli.job.resumed:summary"),
        ("resumed[].lastLoss.", LOSS),
    ),
    "page job": (
        ("", JOB),
        ("", f"{PAGE}:job_page"),
        ("", f"{PAGE}:training_values"),
        ("", f"{PAGE}:ranks_values"),
        ("goodput.", GOODPUT),
        ("parts[].", f"{PAGE}:part_value"),
        ("history.", f"{PAGE}:history_value"),
        ("heatMap.", f"{PAGE}:heat_map_value"),
        ("different[].", f"{PAGE}:rank_value"),
        ("detectors", "cli.job.detectors:detector_values"),
        ("incidents[].", f"{PAGE}:recovery_value"),
        ("pods[].", f"{PAGE}:pod_value"),
        ("snapshots[].", f"{PAGE}:snapshots_value"),
        ("snapshots[].losses[].", f"{PAGE}:loss_row"),
        ("events", "cli.job.resumed:event_values"),
    ),
    "page incident": (
        ("", f"{PAGE}:incident_value"),
        ("incident.", INCIDENT),
        ("timeline[].", f"{PAGE}:stage_value"),
    ),
    "page nodes": (
        ("", f"{NODE_PAGE}:nodes_page"),
        ("", f"{NODE_PAGE}:linked_nodes_page"),
        ("nodes[].", NODE),
        ("nodes[].", f"{NODE_PAGE}:node_value"),
        ("links.", f"{NODE_PAGE}:links_value"),
        ("links.pairs[].", f"{NODE_PAGE}:pair_value"),
    ),
    "page node": (
        ("", NODE),
        ("", f"{NODE_PAGE}:node_value"),
        ("", f"{NODE_PAGE}:node_page"),
        ("", f"{NODE_PAGE}:past_values"),
        ("blame[].", f"{NODE_PAGE}:blame_value"),
        ("checks[].", f"{NODE_PAGE}:check_value"),
        ("checks[].results[].", f"{NODE_PAGE}:result_value"),
        ("gpuCharts.", f"{NODE_PAGE}:charts_value"),
        ("machineCharts.", f"{NODE_PAGE}:charts_value"),
        ("gpus[].", f"{NODE_PAGE}:gpu_value"),
    ),
    "page logs": (
        ("", "cli.page.logs:log_page"),
        ("lines[].", "cli.page.logs:line_value"),
    ),
    "page actions": (
        ("", "cli.page.actions:job_actions"),
        ("actions[].", "cli.page.actions:action_value"),
    ),
    "page dashboard": (
        ("", "cli.page.dashboards:dashboard_page"),
        ("boards[].", "cli.page.dashboards:board_value"),
        ("panels[].", "cli.page.dashboards:panel_value"),
        ("panels[].series[].", "cli.page.dashboards:series_value"),
    ),
}
"""Contents of the live page, which its server sends as JSON."""
NOTIFICATION, NOTIFICATION_PARTS = (
    "notification",
    (
        ("", "core.notifications:message_value"),
        ("incident.", "core.notifications:_incident_value"),
        ("repair.", "core.notifications:_repair_value"),
    ),
)
"""The message that a webhook gets."""
TOP, TOP_JOBS, TOP_JOB = "top", ("page jobs", "page nodes"), "page job"
"""The command that prints the contents of pages: of two without a job, else of one."""
NOT_IN_TOP = ("links",)
EXAMPLES: Mapping[str, Any] = json.loads(Path(__file__).with_name("json_examples.json").read_text())
"""Output of each command on a local cluster of two nodes, recorded on 2026-11-27: lists are cut to
one item, and keys of the cluster API are left out."""
EXAMPLE_LINES = 40
"""Lines of an example on the page at most."""
FOREIGN = {
    f"cluster {name}": "the answer of the cluster API, in the form of SageMaker's operation"
    for name in ("create", "list", "describe", "update", "delete")
}


def json_forms(commands: Iterable[str]) -> Iterator[str]:
    """Keys of each command's answer; `commands`: those that have the option `-o`."""
    known = {name for names in FORMS for name in names} | FOREIGN.keys() | {TOP}
    if known != set(commands):
        odd = sorted(known.symmetric_difference(commands))
        raise SystemExit(f"tools/reference_json.py: commands with -o that do not fit: {odd}")
    yield from (
        "# JSON of the commands",
        "",
        "Keys of what commands print with `-o json` or `-o yaml`. `a.b` is a key of an object,",
        "`a[].b` a key of every object of a list. Not listed are the keys of parts that are",
        "printed as Kubernetes has them, for example the status of a check. Each command has a",
        "[JSON Schema](schemas/describe.json) (2020-12) with the same content. A time is a string",
        "in the form of RFC 3339, in UTC.",
        "",
        "A key may be added in any version. A key of this page is removed or changed only with a",
        "line in the [changelog](../../CHANGELOG.md).",
        "",
    )
    for names, parts in FORMS.items():
        yield from (f"## {', '.join(names)}", "")
        found = [(path, *described(names[0], path)) for path in _paths(parts)]
        rows = [(code(path), type_text(kind), text) for path, kind, text in found]
        yield from table(("key", "type", "meaning"), rows)
        if INCIDENTS in parts:
            yield from ("Each of `incidents` has also the keys of [an incident](#an-incident).", "")
        yield from _example(names[0])
        links = (f"[{name}](schemas/{_file(name)})" for name in names)
        yield from (f"JSON Schema: {', '.join(links)}", "")
    yield from (
        "## The live page",
        "",
        "Contents of the [live page](../guide/ui.md), which its server sends to the browser:",
        "",
        *(f"- [{name}](schemas/{_file(name)})" for name in PAGES),
        "",
        "Each key is always there. The page is part of the same version, so these keys may change",
        "in any version.",
        "",
    )
    jobs, nodes, job = (f"[{name}](schemas/{_file(name)})" for name in (*TOP_JOBS, TOP_JOB))
    yield from (
        "## top",
        "",
        f"The contents of {jobs} and",
        f"{nodes} as one object; with a job, those of",
        f"{job}.",
        "",
        f"JSON Schema: [{TOP}](schemas/{_file(TOP)})",
        "",
    )
    yield from (
        "## Notifications",
        "",
        "A webhook gets [messages](../guide/notifications.md) with these keys. Each key is always",
        "there.",
        "",
    )
    found = [(path, *described(NOTIFICATION, path)) for path in _paths(NOTIFICATION_PARTS)]
    rows = [(code(path), type_text(kind), text) for path, kind, text in found]
    yield from table(("key", "type", "meaning"), rows)
    yield from (f"JSON Schema: [{NOTIFICATION}](schemas/{_file(NOTIFICATION)})", "")
    yield from ("## cluster create, list, describe, update, delete", "")
    yield from (f"`-o json` prints {next(iter(FOREIGN.values()))}.", "")
    yield from (
        "## An incident",
        "",
        "The keys are those of `spec` of an `Incident` (`kubectl explain incidents.spec`).",
        "",
    )
    rows = _properties(_incident(), "")
    yield from table(("key", "type", "meaning"), rows)


def schemas() -> Mapping[str, str]:
    """The JSON Schema of each command's output and of each page, by the name of its file."""
    found = {
        _file(name): _schema(name, names[0], parts)
        for names, parts in FORMS.items()
        for name in names
    }
    found |= {_file(name): _page_schema(name, parts) for name, parts in PAGES.items()}
    found[_file(TOP)] = _top_schema()
    found[_file(NOTIFICATION)] = _page_schema(NOTIFICATION, NOTIFICATION_PARTS)
    return {name: json.dumps(schema, indent=1) + "\n" for name, schema in found.items()}


def _page_schema(name: str, parts: Parts) -> dict[str, Any]:
    """The schema of a page, which has all of its keys and no others."""
    made = _schema(name, name, parts)
    made["title"] = f"contents of {name}"
    _require_all(made)
    return made


def _top_schema() -> dict[str, Any]:
    """The schema of `unbroken top -o json`: one page, or two together."""
    made = _schema(TOP, TOP, ())
    made["anyOf"] = []
    for pages in (TOP_JOBS, (TOP_JOB,)):
        keys: dict[str, Any] = {}
        for name in pages:
            keys |= _page_schema(name, PAGES[name])["properties"]
        for name in NOT_IN_TOP:
            keys.pop(name, None)
        made["anyOf"].append({"type": "object", "properties": keys, "required": list(keys)})
    return made


def _require_all(schema: dict[str, Any]) -> None:
    if inner := schema.get("properties"):
        schema["required"] = list(inner)
        for one in inner.values():
            _require_all(one)
    if "items" in schema:
        _require_all(schema["items"])


def _example(command: str) -> Iterator[str]:
    """An example that is short enough for the page; a long one is in the schema."""
    if command not in EXAMPLES:
        return
    lines = json.dumps(EXAMPLES[command], indent=1).splitlines()
    if len(lines) > EXAMPLE_LINES:
        yield from ("The schema has an example.", "")
    else:
        yield from ("```json", *lines, "```", "")


def _file(command: str) -> str:
    return f"{command.replace(' ', '-')}.json"


def _schema(command: str, owner: str, parts: Parts) -> dict[str, Any]:
    made: dict[str, Any] = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"unbroken {command} -o json",
    }
    for path in _paths(parts):
        kind, text = described(owner, path)
        above, _, name = path.rpartition(".")
        inside = _inside(made, above)
        inside.setdefault("type", "object")
        # The part of a longer path may have come first.
        value = {"description": text, **schema_of(kind)}
        inside.setdefault("properties", {})[name] = value
    for prefix, source in parts:
        if source == INCIDENT:
            _inside(made, prefix.rstrip("."))["allOf"] = [{"$ref": "#/$defs/incident"}]
            made["$defs"] = {"incident": _incident()}
    if command in EXAMPLES:
        made["examples"] = [EXAMPLES[command]]
    return made


def _inside(schema: dict[str, Any], path: str) -> dict[str, Any]:
    """The schema at the end of a path, whose steps are `a`, `a[]`, or `[]` for a list as a whole;
    it is made where it is missing."""
    found = schema
    for step in path.split(".") if path else ():
        if name := step.removesuffix("[]"):
            found = found.setdefault("properties", {}).setdefault(name, {"type": "object"})
        if step.endswith("[]"):
            if found.get("type", "object") == "object":
                found["type"] = "array"
            found = found.setdefault("items", {"type": "object"})
    return found


def _incident() -> dict[str, Any]:
    found = incident_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    spec: dict[str, Any] = found["properties"]["spec"]
    del spec["properties"][SECONDS]  # the commands print null where the object has no such key
    return spec


def _paths(parts: Parts) -> list[str]:
    """Paths of all keys, each after the path of the object that it is in."""
    return sorted({f"{prefix}{key}" for prefix, one in parts for key in _keys(one)})


def _keys(source: str) -> list[str]:
    module, _, name = source.partition(":")
    function = inspect.unwrap(getattr(importlib.import_module(f"unbroken.{module}"), name))
    found = list(_of_function(function))
    if not found:
        raise SystemExit(f"{source} returns or prints no dictionary")
    return found


def _properties(schema: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str, str]]:
    for name, one in schema.get("properties", {}).items():
        kind = {"array": "list"}.get(one.get("type", ""), one.get("type", "any"))
        yield code(f"{prefix}{name}"), kind, one.get("description", "")
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
