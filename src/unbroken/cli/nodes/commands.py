"""`unbroken nodes`: the record of nodes, and orders to repair them."""

from __future__ import annotations

import getpass
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unbroken.cli.app import App
from unbroken.cli.completion import names_of
from unbroken.cli.connection import NODES, PODS, RECORDS, Cluster, Object
from unbroken.cli.listing import Listing, require_table, show_list, watch_list
from unbroken.cli.options import ClusterTarget, Form, ListForm, ListOutput, Output, Watching
from unbroken.cli.place import Use
from unbroken.cli.show import note, paper, print_table
from unbroken.errors import SpecError
from unbroken.kube.clock import wall
from unbroken.spec.keys import REPAIR
from unbroken.spec.nodes.kinds import NODE_RECORD, NodeRecordSpec, RepairRecord, RepairState
from unbroken.spec.times import time_text

from . import views

if TYPE_CHECKING:
    from unbroken.cli.watch import ClusterWatch

app = App(
    invoke_without_command=True,
)


Name = Annotated[
    str, typer.Argument(metavar="NODE", help="Name of the node.", autocompletion=names_of(NODES))
]
Names = Annotated[
    list[str],
    typer.Argument(metavar="NODE...", help="Names of nodes.", autocompletion=names_of(NODES)),
]
Wait = Annotated[
    bool, typer.Option("--wait", help="Follow the repair to its end; exit status 1 if it fails.")
]


@app.callback()
def nodes(
    ctx: typer.Context,
    output: ListForm = ListOutput.TEXT,
    watch: Watching = False,
    *,
    target: ClusterTarget,
) -> None:
    """List and describe nodes, order repairs, show and clear the blame of a node.

    Example: `unbroken nodes -o wide`

    Example: `unbroken nodes describe node-1`
    """
    if ctx.invoked_subcommand is None:
        _list(target, output, watch=watch)
    else:
        _refuse_options(ctx, ctx.invoked_subcommand)


def _refuse_options(ctx: typer.Context, command: str) -> None:
    """Raise BadParameter for an option before a subcommand, which would not get its value."""
    for param in ctx.command.params:
        source = ctx.get_parameter_source(param.name or "")
        if source is not None and source.name == "COMMANDLINE":
            place = f"`{ctx.command_path} {command} {param.opts[-1]} ...`"
            hint = f"'{param.opts[-1]}'"
            raise typer.BadParameter(f"write it after the command: {place}", param_hint=hint)


@app.command("list")
def list_nodes(
    output: ListForm = ListOutput.TEXT, watch: Watching = False, *, target: ClusterTarget
) -> None:
    """List nodes: status, health, pods of jobs, current repair, blame score.

    Example: `unbroken nodes list -o wide`
    """
    _list(target, output, watch=watch)


def _list(target: ClusterTarget, output: ListOutput, *, watch: bool) -> None:
    is_wide = output is ListOutput.WIDE

    async def read(cluster: Cluster) -> tuple[Listing]:
        now, pods = wall(), await cluster.select(PODS, namespace="")
        records, nodes = await cluster.select(RECORDS), await cluster.select(NODES)
        rows = [
            views.node_row(*found, now) for found in views.with_belongings(nodes, records, pods)
        ]
        listing = Listing(
            {"nodes": rows},
            [str(row["name"]) for row in rows],
            (*views.TITLES, *(views.WIDE if is_wide else ())),
            [views.cells(row, is_wide=is_wide) for row in rows],
            empty="the cluster has no nodes",
        )
        return (listing,)

    async def follow(cluster: Cluster) -> None:
        from lightkube.resources.core_v1 import Node, Pod  # slow to load

        from .follow import RECORD

        def kinds(watch: ClusterWatch) -> None:
            for kind in (Node, Pod, RECORD):
                watch.follow(kind)

        await watch_list(cluster, kinds, lambda: read(cluster))

    if watch:
        require_table(output)
        target.run(follow)
    else:
        show_list(*target.run(read), output)


@app.command()
def describe(name: Name, output: Form = Output.TEXT, *, target: ClusterTarget) -> None:
    """Show a node: its health, faults, repairs and blame score.

    Example: `unbroken nodes describe node-1`
    """
    now = wall()

    async def read(cluster: Cluster) -> tuple[Object, Object | None, list[Object]]:
        node = await existing_node(cluster, name)
        return node, await _record(cluster, name), await cluster.select(PODS, namespace="")

    node, record, pods = target.run(read)
    row = views.node_row(node, record, pods, now)
    if output.is_data:
        output.print({**row, "record": (record or {}).get("spec") or {}})
        return
    for line in views.story(row, node, record, now, paper()):
        print(line)


@app.command()
def drain(
    names: Names,
    deadline: Annotated[
        str,
        typer.Option(
            "--deadline",
            metavar="TIME",
            help="Time after which jobs leave even if no other place is free: 90s, 10m, 2h. "
            "Default: they wait for a place as long as it takes.",
        ),
    ] = "",
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Wait until the pods of jobs have left.")
    ] = True,
    output: Form = Output.TEXT,
    *,
    target: ClusterTarget,
) -> None:
    """Cordon nodes and let jobs move to other nodes, without a charge to their restart budget.

    Pods that are not of a HyperPodPyTorchJob stay. Exit status 1: a pod of a job is still there
    a minute after the deadline. Ctrl-C leaves the drain running; undo it with `nodes uncordon`.

    Example: `unbroken nodes drain node-1 --deadline 10m`
    """
    from . import drain as draining  # slow to load

    due = wall() + draining.seconds_of(deadline) if deadline else None

    async def act(cluster: Cluster) -> dict[str, list[str]]:
        for name in names:
            await existing_node(cluster, name)
        for name in names:
            await draining.mark(cluster, name, due)
        return await draining.follow(cluster, names, due) if wait else {}

    try:
        left = target.run(act, Use.CHANGE)
    except KeyboardInterrupt:
        note(f"the drain continues; undo it with: unbroken nodes uncordon {' '.join(names)}")
        raise typer.Exit(130) from None
    if output.is_data:
        until = None if due is None else time_text(due)
        rows = [{"name": name, "pods": left.get(name) if wait else None} for name in names]
        output.print({"deadline": until, "nodes": rows})
    elif not wait:
        print("\n".join(f"{name}: jobs move off" for name in names))
    else:
        print("\n".join(draining.progress_line(name, pods) for name, pods in left.items()))
    if any(left.values()):
        raise typer.Exit(1)


@app.command()
def uncordon(names: Names, output: Form = Output.TEXT, *, target: ClusterTarget) -> None:
    """Let nodes take pods again, after `drain` or `kubectl cordon`.

    Example: `unbroken nodes uncordon node-1`
    """
    from . import drain as draining  # slow to load

    async def act(cluster: Cluster) -> None:
        for name in names:
            await existing_node(cluster, name)
        for name in names:
            await draining.unmark(cluster, name)

    target.run(act, Use.CHANGE)
    if output.is_data:
        output.print({"uncordoned": list(names)})
    else:
        print("\n".join(f"{name}: takes pods again" for name in names))


@app.command()
def reset(
    names: Names, wait: Wait = False, output: Form = Output.TEXT, *, target: ClusterTarget
) -> None:
    """Reset the GPUs of nodes after their jobs have moved to other nodes.

    Example: `unbroken nodes reset node-1 --wait`
    """
    _order(target, names, "reset", output, wait=wait)


@app.command()
def reboot(
    names: Names, wait: Wait = False, output: Form = Output.TEXT, *, target: ClusterTarget
) -> None:
    """Reboot nodes after their jobs have moved to other nodes.

    Example: `unbroken nodes reboot node-1 node-2`
    """
    _order(target, names, "reboot", output, wait=wait)


@app.command()
def replace(
    names: Names,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    wait: Wait = False,
    output: Form = Output.TEXT,
    *,
    target: ClusterTarget,
) -> None:
    """Replace nodes by new nodes. All data on their disks is lost.

    Example: `unbroken nodes replace node-1 --yes --wait`
    """
    shown = ", ".join(names)
    if not yes:
        if not sys.stdin.isatty():
            raise SpecError(f"replacing {shown} destroys the data on it; confirm with --yes")
        typer.confirm(f"Replace {shown}? All data on the disks is lost.", abort=True, err=True)
    _order(target, names, "replace", output, wait=wait)


def _order(
    target: ClusterTarget, names: Sequence[str], what: str, output: Output, *, wait: bool
) -> None:
    async def act(cluster: Cluster) -> list[dict[str, Any]]:
        result = [await existing_node(cluster, name) for name in names]
        records = {item["metadata"]["name"]: item for item in await cluster.select(RECORDS)}
        done = []
        for node in result:
            name = node["metadata"]["name"]
            known = views.record_of(records.get(name))
            await order_repair(cluster, name, what)
            done.append((name, known))
        return [await _ended(cluster, name, known, wait=wait) for name, known in done]

    answers = target.run(act, Use.CHANGE)
    if output.is_data:
        output.print({"ordered": what, "nodes": answers})
    else:
        for answer in answers:
            print(f"{answer['name']}: {what} {answer['state']}" + _after(answer))
    if any(answer["state"] == RepairState.FAILED.value for answer in answers):
        raise typer.Exit(1)


async def order_repair(cluster: Cluster, name: str, what: str) -> None:
    """Order a repair (`reset`, `reboot` or `replace`), as the operator takes it."""
    await cluster.patch(NODES, name, {"metadata": {"annotations": {REPAIR: what}}})


def _after(one: dict[str, Any]) -> str:
    if one["state"] == "ordered":
        return f"; see: unbroken nodes describe {one['name']}"
    place = f", by {one['replacement']}" if one["replacement"] else ""
    return f"{place}: {one['message']}"


async def _ended(
    cluster: Cluster, name: str, known: NodeRecordSpec, *, wait: bool
) -> dict[str, Any]:
    """The state of an order: `ordered`, or with `wait` the state at its end."""
    answer: dict[str, Any] = {"name": name, "state": "ordered", "replacement": "", "message": ""}
    if not wait:
        return answer
    from .follow import follow  # slow to load

    last = max((repair_record.began_at for repair_record in known.history), default=0.0)

    def newer(record: NodeRecordSpec) -> RepairRecord | None:
        if record.repair is not None:
            return record.repair
        return next(
            (
                repair_record
                for repair_record in reversed(record.history)
                if repair_record.began_at > last
            ),
            None,
        )

    repair = await follow(cluster, name, newer)
    return {
        **answer,
        "state": repair.state.value,
        "replacement": repair.replacement,
        "message": repair.message,
    }


@app.command()
def blame(name: Name, output: Form = Output.TEXT, *, target: ClusterTarget) -> None:
    """Show the blame entries of a node, with the evidence. Points halve every week.

    Example: `unbroken nodes blame node-1`
    """
    now = wall()

    async def read(cluster: Cluster) -> Object | None:
        record = await _record(cluster, name)
        if record is None:
            await existing_node(cluster, name)
        return record

    record = target.run(read)
    held = views.record_of(record)
    rows = views.blame_rows(held, now)
    if output.is_data:
        entries = ((record or {}).get("spec") or {}).get("blame") or []
        points = [float(str(row[3])) for row in reversed(rows)]
        shown = [{**item, "points": left} for item, left in zip(entries, points, strict=True)]
        output.print({"node": name, "score": _score(held, now), "blame": shown})
        return
    print(f"{name}: {views.score_line(held, now)}")
    if held.cleared_at is not None:
        print(f"cleared at {time_text(held.cleared_at)} by {held.cleared_by}")
    if rows:
        print_table(("AT", "KIND", "SOURCE", "POINTS", "OF", "EVIDENCE"), rows)


def _score(held: NodeRecordSpec, now: float) -> float:
    from unbroken.core.nodes import blame as ledger

    return round(ledger.score(held, now), 2)


@app.command()
def clear(
    name: Name,
    why: Annotated[
        str,
        typer.Option("--why", metavar="TEXT", help="Reason why the node is good; it is recorded."),
    ],
    wait: Wait = False,
    output: Form = Output.TEXT,
    *,
    target: ClusterTarget,
) -> None:
    """Clear the blame of a node. A node in quarantine returns after a burn-in.

    Example: `unbroken nodes clear node-1 --why 'cable replaced'`
    """
    if not why.strip():
        raise SpecError("--why must give a reason why the node is good")
    at, who = wall(), f"{getpass.getuser()}: {why.strip()}"

    async def act(cluster: Cluster) -> tuple[NodeRecordSpec, RepairRecord | None]:
        held = await clear_blame(cluster, name, who, at)
        is_out = held.quarantined_at is not None
        return held, await _burnt_in(cluster, name, at) if wait and is_out else None

    held, burn_in = target.run(act, Use.CHANGE)
    is_out = held.quarantined_at is not None
    if output.is_data:
        ended = None if burn_in is None else burn_in.state.value
        output.print({"node": name, "cleared": who, "wasQuarantined": is_out, "burnIn": ended})
    else:
        later = "; a burn-in follows, then it takes pods again" if is_out and not burn_in else ""
        print(f"{name}: cleared{later}")
        if burn_in is not None:
            print(f"{name}: burn-in {burn_in.state.value}: {burn_in.message}")
    if burn_in is not None and burn_in.state is RepairState.FAILED:
        raise typer.Exit(1)


async def clear_blame(cluster: Cluster, name: str, who: str, at: float) -> NodeRecordSpec:
    """Clear the blame of a node, and return its record as it was before.

    `who`: the person and the reason.  Raises SpecError if the node has no blame.
    """
    record = await _record(cluster, name)
    if record is None:
        await existing_node(cluster, name)
        raise SpecError(f"node {name} has no blame entries")
    spec = {"clearedAt": time_text(at, has_microseconds=True), "clearedBy": who}
    await cluster.patch(RECORDS, name, {"spec": spec})
    return views.record_of(record)


async def _burnt_in(cluster: Cluster, name: str, since: float) -> RepairRecord:
    from .follow import follow  # slow to load

    def newer(record: NodeRecordSpec) -> RepairRecord | None:
        last = record.repair or (record.history[-1] if record.history else None)
        # Allow for different clocks of this machine and the operator's.
        return last if last and last.asked_by == "clear" and last.began_at > since - 60 else None

    return await follow(cluster, name, newer)


async def existing_node(cluster: Cluster, name: str) -> Object:
    """A node; SpecError if it does not exist, with the node that has replaced it."""
    result = await cluster.find(NODES, name)
    if result is not None:
        return result
    history = NODE_RECORD.spec_of(await _record(cluster, name))[0].history
    by = next(
        (
            repair_record.replacement
            for repair_record in reversed(history)
            if repair_record.replacement
        ),
        "",
    )
    if by:
        text = f"{name} was replaced by {by}; to see its blame: unbroken nodes blame {name}"
        raise SpecError(text)
    return await cluster.get(NODES, name)


async def _record(cluster: Cluster, name: str) -> Object | None:
    """The record of a node; None if it has no record."""
    result = await cluster.find(RECORDS, name)
    if result is None:
        await cluster.select(RECORDS)  # SpecError if the cluster does not know the kind
    return result
