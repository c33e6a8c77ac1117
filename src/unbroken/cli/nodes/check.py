"""`unbroken check`: start a NodeCheck and follow it to its result."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from unbroken.cli.connection import CHECKS, NODES, Cluster, Object, on_cluster
from unbroken.cli.options import ClusterTarget, Form, Output
from unbroken.cli.place import ClusterPlace, Use
from unbroken.cli.show import note, print_table
from unbroken.errors import SpecError
from unbroken.spec.keys import CHECK_SECONDS
from unbroken.spec.nodes.kinds import NODE_CHECK, CheckKind, CheckPhase, NodeCheckSpec

from .results import TITLES, result_rows

LOOK_SECONDS = 0.5
PATIENCE_SECONDS = 15.0
"""Time without progress after which the command hints at a missing operator."""
DEEP = (CheckKind.BASIC, CheckKind.STRESS, CheckKind.CONNECTIVITY, CheckKind.TRAINING)
ENDED = (CheckPhase.PASSED.value, CheckPhase.FAILED.value, CheckPhase.UNKNOWN.value)
CODES = {CheckPhase.PASSED.value: 0, CheckPhase.FAILED.value: 1}
UNKNOWN_CODE = 3
KINDS = {kind.value.lower(): kind for kind in CheckKind}

Kinds = Annotated[
    list[str] | None,
    typer.Option(
        "--kind", help=f"Kind of test: {', '.join(k.value for k in CheckKind)}. Repeatable."
    ),
]


def command(
    nodes: Annotated[
        list[str] | None,
        typer.Argument(metavar="NODE...", help="Names of nodes. Default: all nodes."),
    ] = None,
    deep: Annotated[
        bool,
        typer.Option(
            "--deep", help="Run all kinds of tests; the nodes take no new pods meanwhile."
        ),
    ] = False,
    kind: Kinds = None,
    force: Annotated[
        bool, typer.Option("--force", help="Test while jobs run there; do not wait for them.")
    ] = False,
    seconds: Annotated[
        float | None,
        typer.Option(min=0.1, help="Seconds of each test under load.", show_default="60"),
    ] = None,
    timeout: Annotated[int, typer.Option(min=1, help="Seconds for the whole check.")] = 7200,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Follow the check to its end.")
    ] = True,
    output: Form = Output.TEXT,
    *,
    target: ClusterTarget,
) -> None:
    """Test nodes within seconds, or with --deep under load, against each other and by training.

    Exit status 1: a node is faulty. 3: the tests gave no clear result. Ctrl-C leaves the check
    running.

    Example: `unbroken check node-1 node-2 --deep`
    """
    kinds = _kinds(kind or [], deep=deep)
    place = target.place(Use.CHANGE)
    annotations = {CHECK_SECONDS: f"{seconds:g}"} if seconds else {}
    name = f"check-{secrets.token_hex(3)}"

    async def run(cluster: Cluster) -> Object:
        names = await _names(cluster, nodes or [])
        words = "unbroken check" + (" --deep" if deep else "")
        spec = NodeCheckSpec(names, kinds, f"requested by {words}", force, timeout)
        body = NODE_CHECK.new(name, spec, {"annotations": annotations})
        made = await cluster.create(CHECKS, body)
        return await _follow(cluster, name, output) if wait else made

    try:
        check = on_cluster(place, "", run)
    except KeyboardInterrupt:
        note(f"the check continues; see it with: {_see(place, name)}")
        raise typer.Exit(130) from None
    if not wait:
        _show_started(check, place, name, output)
        return
    _show(check, output)
    phase = (check.get("status") or {}).get("phase", "")
    code = CODES.get(phase, UNKNOWN_CODE)
    if code:
        raise typer.Exit(code)


def _kinds(given: Sequence[str], *, deep: bool) -> tuple[CheckKind, ...]:
    if deep and given:
        raise SpecError("--deep runs all kinds; give either --deep or --kind")
    for one in given:
        if one.lower() not in KINDS:
            known = ", ".join(kind.value for kind in CheckKind)
            raise SpecError(f"--kind {one}: must be one of {known}")
    named = tuple(dict.fromkeys(KINDS[one.lower()] for one in given))
    return DEEP if deep else named or (CheckKind.BASIC,)


async def _names(cluster: Cluster, given: Sequence[str]) -> tuple[str, ...]:
    known = [str(item["metadata"]["name"]) for item in await cluster.select(NODES)]
    for name in given:
        if name not in known:
            raise SpecError(f'no node "{name}"; nodes: {", ".join(sorted(known)) or "none"}')
    if not known:
        raise SpecError("the cluster has no nodes")
    return tuple(dict.fromkeys(given or sorted(known)))


async def _follow(cluster: Cluster, name: str, output: Output) -> Object:
    """The check when it has ended; its progress is printed to standard error."""
    from unbroken.kube.clock import monotonic, pause

    shown, began = "", monotonic()
    while True:
        check = await cluster.get(CHECKS, name)
        status = check.get("status") or {}
        if status.get("phase") in ENDED:
            return check
        text = f"{status.get('done', 0)}/{status.get('total', '?')}  {status.get('message', '')}"
        if status and text != shown and output is Output.TEXT:
            note(text.rstrip())
            shown = text
        elif not status and not shown and monotonic() - began > PATIENCE_SECONDS:
            note("the check has not started: is an operator running? (`unbroken operator`)")
            shown = "waiting"
        await pause(LOOK_SECONDS)


def _see(place: ClusterPlace, name: str) -> str:
    own = f"--kubeconfig {place.paths.kubeconfig} " if place.paths else ""
    return f"kubectl {own}get nodecheck {name} -o yaml"


def _show_started(check: Object, place: ClusterPlace, name: str, output: Output) -> None:
    if output.is_data:
        output.print(_summary(check))
    else:
        print(f"check {name} started; see it with: {_see(place, name)}")


def _summary(check: Object) -> dict[str, Any]:
    status = check.get("status") or {}
    kept = ("phase", "message", "startedAt", "endedAt", "done", "total", "faulty", "results")
    return {
        "name": check["metadata"]["name"],
        "nodes": check["spec"]["nodes"],
        "kinds": check["spec"].get("kinds") or [],
        **{key: status[key] for key in kept if key in status},
    }


def _show(check: Object, output: Output) -> None:
    if output.is_data:
        output.print(_summary(check))
        return
    status = check.get("status") or {}
    print_table(TITLES, result_rows(status.get("results") or ()))
    note(f"{status.get('phase')}: {status.get('message', '')}")
