"""`unbroken chaos`: drills that break real processes of the local cluster.

A process gets a signal only after a check that it belongs to the pod.  On other clusters, pods can
be deleted, and nothing else.
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
from unbroken.cli.options import ClusterTarget, CommonOptions, Form, Output
from unbroken.cli.place import DEFAULT, ClusterPlace, Use, resolve
from unbroken.errors import SpecError, WorldError
from unbroken.spec.keys import POWER
from unbroken.wire.agent import AgentReport

MARKER = "UNBROKEN_CONTAINER_ID"
"""Environment variable of every process of a container on a local cluster: the container's ID."""

app = App(
    no_args_is_help=True,
    help="Break a worker, agent, pod or node of the local cluster to see the recovery."
    "\n\nExample: `unbroken chaos kill-worker train --rank 3`",
)
Rank = Annotated[int, typer.Option("--rank", min=0, help="Global rank of the worker.")]


@dataclass(frozen=True, slots=True)
class Victim:
    """The worker of a rank."""

    rank: int
    pod: Object
    report: AgentReport
    pid: int
    """Process ID of the worker."""

    @property
    def pod_name(self) -> str:
        """Name of its pod."""
        return str(self.pod["metadata"]["name"])

    @property
    def node(self) -> str:
        """Name of its node."""
        return str(self.pod["spec"]["nodeName"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Drill:
    """Options of a drill that breaks a rank."""

    job: JobName
    rank: Rank = 0
    options: CommonOptions

    def run(self, act: Callable[[Cluster, Victim], Awaitable[dict[str, Any]]]) -> None:
        """Run `act` on the worker of the rank, and print its answer."""

        async def on_victim(cluster: Cluster) -> dict[str, Any]:
            _require_local(cluster)
            return await act(cluster, await _find(cluster, self.job, self.rank))

        _print(self.options.run(on_victim, Use.CHANGE), self.options.output)


@app.command("kill-worker")
def kill_worker(drill: Drill) -> None:
    """Kill a worker (SIGKILL).

    Example: `unbroken chaos kill-worker train --rank 3`
    """

    async def act(cluster: Cluster, victim: Victim) -> dict[str, Any]:
        _signal(victim, victim.pid, signal.SIGKILL)
        return _done("killed", victim, pid=victim.pid)

    drill.run(act)


@app.command("freeze-worker")
def freeze_worker(drill: Drill) -> None:
    """Freeze a worker (SIGSTOP), as in a hang; `kill -CONT PID` continues it.

    Example: `unbroken chaos freeze-worker train --rank 3`
    """

    async def act(cluster: Cluster, victim: Victim) -> dict[str, Any]:
        _signal(victim, victim.pid, signal.SIGSTOP)
        return _done("froze", victim, pid=victim.pid)

    drill.run(act)


@app.command("kill-agent")
def kill_agent(drill: Drill) -> None:
    """Kill the agent of a rank's pod (SIGKILL); its workers die with it.

    Example: `unbroken chaos kill-agent train --rank 3`
    """

    async def act(cluster: Cluster, victim: Victim) -> dict[str, Any]:
        if victim.report.pid is None:
            raise WorldError(f"the agent of {victim.pod_name} does not report its pid")
        _signal(victim, victim.report.pid, signal.SIGKILL)
        return _done("killed the agent of", victim, pid=victim.report.pid)

    drill.run(act)


@app.command("kill-pod")
def kill_pod(
    job: JobName,
    rank: Rank = 0,
    pod: Annotated[
        str, typer.Option(help="Delete this pod instead of that of --rank.", show_default=False)
    ] = "",
    *,
    options: CommonOptions,
) -> None:
    """Delete a pod of the job; the only drill that works on every cluster.

    Example: `unbroken chaos kill-pod train --pod train-pods-1 --context prod`
    """

    async def act(cluster: Cluster) -> dict[str, Any]:
        await cluster.job(job)
        if pod:
            names = sorted(str(item["metadata"]["name"]) for item in await cluster.pods(job))
            if pod not in names:
                raise SpecError(f"job {job} has no pod {pod}; it has: {', '.join(names) or 'none'}")
            await cluster.delete(PODS, pod)
            return {"done": "deleted", "pod": pod}
        if cluster.place.paths is None:
            raise SpecError("the pod of a rank is known on a local cluster only: give --pod POD")
        victim = await _find(cluster, job, rank)
        await cluster.delete(PODS, victim.pod_name)
        return _done("deleted the pod of", victim)

    _print(options.run(act, Use.CHANGE), options.output)


@app.command("kill-node")
def kill_node(
    job: JobName = "",
    rank: Rank = 0,
    node: Annotated[
        str, typer.Option(help="Switch off this node instead of that of --rank; needs no JOB.")
    ] = "",
    *,
    options: CommonOptions,
) -> None:
    """Switch off the node of a rank: its processes are killed and its heartbeats stop.

    Example: `unbroken chaos kill-node train --rank 3`

    Example: `unbroken chaos kill-node --node node-1`
    """
    if bool(job) == bool(node):
        raise SpecError("give a JOB (with --rank) or --node NODE: one of them names the node")

    async def act(cluster: Cluster) -> dict[str, Any]:
        _require_local(cluster)
        if node:
            done = {"done": "switched off", "node": await _known_node(cluster, node)}
        else:
            done = _done("switched off the node of", await _find(cluster, job, rank))
        await cluster.patch(NODES, done["node"], {"metadata": {"annotations": {POWER: "off"}}})
        on = f"unbroken chaos start-node {done['node']}{_folder_option(cluster.place)}"
        return {**done, "hint": f"switch it on again: {on}"}

    _print(options.run(act, Use.CHANGE), options.output)


def _folder_option(place: ClusterPlace) -> str:
    """The `--dir` option for this local cluster; empty for the default folder."""
    if place.paths is None or place.paths.directory == resolve(DEFAULT):
        return ""
    return f" --dir {shlex.quote(str(place.paths.directory))}"


@app.command("start-node")
def start_node(
    node: Annotated[str, typer.Argument(metavar="NODE", help="Name of the node.")],
    output: Form = Output.TEXT,
    *,
    target: ClusterTarget,
) -> None:
    """Switch on a node after kill-node.

    Example: `unbroken chaos start-node node-1`
    """

    async def act(cluster: Cluster) -> dict[str, Any]:
        _require_local(cluster)
        await _known_node(cluster, node)
        await cluster.patch(NODES, node, {"metadata": {"annotations": {POWER: None}}})
        return {"done": "switched on", "node": node}

    _print(target.run(act, Use.CHANGE), output)


async def _known_node(cluster: Cluster, name: str) -> str:
    """The name, if the cluster has such a node; SpecError."""
    names = sorted(str(item["metadata"]["name"]) for item in await cluster.select(NODES))
    if name not in names:
        raise SpecError(f"there is no node {name}; there are: {', '.join(names) or 'none'}")
    return name


def _require_local(cluster: Cluster) -> None:
    if cluster.place.paths is None:
        raise SpecError(
            "this drill is for a local cluster, whose processes and nodes are on this machine; "
            "on other clusters, use: unbroken chaos kill-pod JOB --pod POD"
        )


def _print(done: dict[str, Any], output: Output) -> None:
    if output.is_data:
        output.print(done)
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
    """The worker of a rank, from the report of its agent; WorldError if the rank is not running."""
    await cluster.job(job)
    pods = await cluster.pods(job)
    result = await reports(cluster, pods)
    by_name = {pod["metadata"]["name"]: pod for pod in pods}
    running: list[int] = []
    for name, report in result.items():
        for worker in report.workers:
            if worker.state == "running":
                running.append(worker.rank)
                if worker.rank == rank:
                    return Victim(rank, by_name[name], report, worker.pid)
    ranks = ", ".join(map(str, sorted(running))) or "none"
    raise WorldError(f"rank {rank} of job {job} is not running (running: {ranks})")


def _signal(victim: Victim, pid: int, number: signal.Signals) -> None:
    """Send a signal to a process of the pod; WorldError if it is not of the pod."""
    ids = {
        item["containerID"].rpartition("/")[2]
        for item in victim.pod["status"].get("containerStatuses") or ()
        if item.get("containerID")
    }
    try:
        handle = os.pidfd_open(pid)
        try:
            # Read after the open, so that the pid cannot be reused in between.
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if not any(f"{MARKER}={item}".encode() in variables for item in ids):
                raise WorldError(f"process {pid} does not belong to pod {victim.pod_name}")
            signal.pidfd_send_signal(handle, number)
        finally:
            os.close(handle)
    except OSError as error:
        raise WorldError(f"process {pid} of rank {victim.rank}: {error}") from error
