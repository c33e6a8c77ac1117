"""`unbroken chaos`: drills.  Real signals to real processes, on the embedded cluster.

Every process is checked to be the pod's before it is hurt.  Elsewhere there are only pods to kill:
the processes of another machine are out of reach, and its nodes are somebody's.
"""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from unbroken.cli.app import App
from unbroken.cli.completion import JobName
from unbroken.cli.connection import NODES, PODS, Cluster, Object
from unbroken.cli.job.agents import reports
from unbroken.cli.options import CommonOptions, Form, Output, Target
from unbroken.cli.place import DEFAULT, Place, Use, resolve
from unbroken.cli.show import print_json
from unbroken.errors import SpecError, WorldError
from unbroken.spec.keys import POWER
from unbroken.wire.agent import AgentReport

MARKER = "UNBROKEN_CONTAINER_ID"
"""In the environment of every process of an embedded container: its id."""

app = App(
    add_completion=False,
    no_args_is_help=True,
    help="Break something, to see it mended. For the embedded cluster.",
)
Rank = Annotated[int, typer.Option("--rank", min=0, help="Of the worker, over the whole job.")]


@dataclass(frozen=True, slots=True)
class Victim:
    """Where a rank runs."""

    rank: int
    pod: Object
    report: AgentReport
    pid: int
    """Of the worker."""

    @property
    def pod_name(self) -> str:
        """Of its pod."""
        return str(self.pod["metadata"]["name"])

    @property
    def node(self) -> str:
        """Of its node."""
        return str(self.pod["spec"]["nodeName"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Drill:
    """The rank that a drill is for."""

    job: JobName
    rank: Rank = 0
    options: CommonOptions

    def run(self, act: Callable[[Cluster, Victim], Awaitable[dict[str, Any]]]) -> None:
        """Break what `act` breaks of the rank, and print the answer."""

        async def on_victim(cluster: Cluster) -> dict[str, Any]:
            _require_embedded(cluster)
            return await act(cluster, await _find(cluster, self.job, self.rank))

        _print(self.options.run(on_victim, Use.CHANGE), is_json=self.options.is_json)


@app.command("kill-worker")
def kill_worker(drill: Drill) -> None:
    """Kill a worker (SIGKILL)."""

    async def act(cluster: Cluster, victim: Victim) -> dict[str, Any]:
        _signal(victim, victim.pid, signal.SIGKILL)
        return _done("killed", victim, pid=victim.pid)

    drill.run(act)


@app.command("freeze-worker")
def freeze_worker(drill: Drill) -> None:
    """Stop a worker where it is (SIGSTOP), as one that hangs; `kill -CONT PID` thaws it."""

    async def act(cluster: Cluster, victim: Victim) -> dict[str, Any]:
        _signal(victim, victim.pid, signal.SIGSTOP)
        return _done("froze", victim, pid=victim.pid)

    drill.run(act)


@app.command("kill-agent")
def kill_agent(drill: Drill) -> None:
    """Kill the agent of a rank's pod (SIGKILL); its workers die with it."""

    async def act(cluster: Cluster, victim: Victim) -> dict[str, Any]:
        if victim.report.pid is None:
            raise WorldError(f"the agent of {victim.pod_name} does not say its process")
        _signal(victim, victim.report.pid, signal.SIGKILL)
        return _done("killed the agent of", victim, pid=victim.report.pid)

    drill.run(act)


@app.command("kill-pod")
def kill_pod(
    job: JobName,
    rank: Rank = 0,
    pod: Annotated[
        str, typer.Option(help="Instead of the one of a rank.", show_default=False)
    ] = "",
    *,
    options: CommonOptions,
) -> None:
    """Delete a pod of the job through the API; the only drill that any cluster allows."""

    async def act(cluster: Cluster) -> dict[str, Any]:
        await cluster.job(job)
        if pod:
            names = sorted(str(one["metadata"]["name"]) for one in await cluster.pods(job))
            if pod not in names:
                raise SpecError(f"job {job} has no pod {pod}; it has: {', '.join(names) or 'none'}")
            await cluster.delete(PODS, pod)
            return {"done": "deleted", "pod": pod}
        if cluster.place.paths is None:
            raise SpecError("only an embedded cluster says which pod has a rank: give --pod POD")
        victim = await _find(cluster, job, rank)
        await cluster.delete(PODS, victim.pod_name)
        return _done("deleted the pod of", victim)

    _print(options.run(act, Use.CHANGE), is_json=options.is_json)


@app.command("kill-node")
def kill_node(drill: Drill) -> None:
    """Switch off the node of a rank: all that runs there is killed, and it says nothing more."""

    async def act(cluster: Cluster, victim: Victim) -> dict[str, Any]:
        await cluster.patch(NODES, victim.node, {"metadata": {"annotations": {POWER: "off"}}})
        on = f"unbroken chaos start-node {victim.node}{_folder_option(cluster.place)}"
        return _done("switched off the node of", victim, hint=f"switch it on again: {on}")

    drill.run(act)


def _folder_option(place: Place) -> str:
    """The option that names this local cluster in any shell; empty for the default folder."""
    if place.paths is None or place.paths.directory == resolve(DEFAULT):
        return ""
    return f" --dir {shlex.quote(str(place.paths.directory))}"


@app.command("start-node")
def start_node(
    node: Annotated[str, typer.Argument(metavar="NODE", help="Name of the node.")],
    output: Form = Output.TEXT,
    *,
    target: Target,
) -> None:
    """Switch a node on again after kill-node."""

    async def act(cluster: Cluster) -> dict[str, Any]:
        _require_embedded(cluster)
        names = sorted(str(one["metadata"]["name"]) for one in await cluster.select(NODES))
        if node not in names:
            raise SpecError(f"there is no node {node}; there are: {', '.join(names) or 'none'}")
        await cluster.patch(NODES, node, {"metadata": {"annotations": {POWER: None}}})
        return {"done": "switched on", "node": node}

    _print(target.run(act, Use.CHANGE), is_json=output is Output.JSON)


def _require_embedded(cluster: Cluster) -> None:
    if cluster.place.paths is None:
        raise SpecError(
            "this drill is for an embedded cluster, whose processes and nodes are on this machine; "
            "on another, use: unbroken chaos kill-pod JOB --pod POD"
        )


def _print(done: dict[str, Any], *, is_json: bool) -> None:
    if is_json:
        print_json(done)
        return
    rank = f" rank {done['rank']}" if "rank" in done else ""
    where = " ".join(
        f"{name} {done[name]}" for name in ("pid", "pod", "node") if done.get(name) is not None
    )
    print(f"{done['done']}{rank} ({where})")
    if "hint" in done:
        print(done["hint"])


def _done(what: str, victim: Victim, **more: object) -> dict[str, Any]:
    return {
        "done": what,
        "rank": victim.rank,
        "pod": victim.pod_name,
        "node": victim.node,
        **more,
    }


async def _find(cluster: Cluster, job: str, rank: int) -> Victim:
    """The worker of a rank as its agent knows it; WorldError where it does not run now."""
    await cluster.job(job)
    pods = await cluster.pods(job)
    found = await reports(cluster, pods)
    by_name = {pod["metadata"]["name"]: pod for pod in pods}
    running: list[int] = []
    for name, report in found.items():
        for worker in report.workers:
            if worker.state == "running":
                running.append(worker.rank)
                if worker.rank == rank:
                    return Victim(rank, by_name[name], report, worker.pid)
    ranks = ", ".join(map(str, sorted(running))) or "none"
    raise WorldError(f"rank {rank} of job {job} does not run now (ranks that do: {ranks})")


def _signal(victim: Victim, pid: int, number: signal.Signals) -> None:
    """Send a signal to a process that is the pod's; WorldError where it is not."""
    ids = {
        one["containerID"].rpartition("/")[2]
        for one in victim.pod["status"].get("containerStatuses") or ()
        if one.get("containerID")
    }
    try:
        handle = os.pidfd_open(pid)
        try:
            # After the descriptor was had, so that the number cannot change hands in between.
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if not any(f"{MARKER}={one}".encode() in variables for one in ids):
                raise WorldError(f"process {pid} is not of pod {victim.pod_name}")
            signal.pidfd_send_signal(handle, number)
        finally:
            os.close(handle)
    except OSError as error:
        raise WorldError(f"process {pid} of rank {victim.rank}: {error}") from error
