"""Actions of the live page: which an account may take, and what each does.

Each calls the function behind a command, and is announced in the words of this command's help. The
object then has an event that names the action, the page and the person.
"""

from __future__ import annotations

import getpass
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from unbroken.cli.app import paragraph_of
from unbroken.cli.connection import EVENTS, JOBS, NODES, RECORDS, Cluster, Object, ObjectKind
from unbroken.cli.job import change, detectors
from unbroken.cli.nodes import commands as nodes
from unbroken.cli.nodes import drain as draining
from unbroken.errors import SpecError, UnbrokenError
from unbroken.kube.clock import rfc3339, wall
from unbroken.spec.times import time_text

from .orders import (
    ClearNode,
    DrainNode,
    JobOrder,
    NodeOrder,
    Order,
    RebootNode,
    ReplaceNode,
    ResetNode,
    RestartJob,
    ResumeJob,
    SetDetector,
    SuspendJob,
    UncordonNode,
)

COMPONENT = "unbroken-page"
"""Reporter of the events."""
REASON = "ActionOnPage"
"""Reason of the events."""
REFUSAL_MAX = 200
"""Characters of the reason why an event was not written."""


@dataclass(frozen=True, slots=True)
class Action:
    """An action as the page offers it."""

    name: str
    """As orders name it."""
    command: str
    """The command that does the same, without the name of the object."""
    function: Callable[..., None]
    """The command: its help says what will happen."""
    changes: ObjectKind
    """Kind of the objects that the account must be allowed to patch."""
    paragraph: int = 0
    """The paragraph of the help that says what will happen."""


JOB_ACTIONS = (
    Action("restart", "unbroken restart", change.restart, JOBS),
    Action("suspend", "unbroken suspend", change.suspend, JOBS),
    Action("resume", "unbroken resume", change.resume, JOBS),
    Action("detector", "unbroken detectors", detectors.command, JOBS, paragraph=1),
)
NODE_ACTIONS = (
    Action("drain", "unbroken nodes drain", nodes.drain, NODES),
    Action("uncordon", "unbroken nodes uncordon", nodes.uncordon, NODES),
    Action("reset", "unbroken nodes reset", nodes.reset, NODES),
    Action("reboot", "unbroken nodes reboot", nodes.reboot, NODES),
    Action("replace", "unbroken nodes replace", nodes.replace, NODES),
    Action("clear", "unbroken nodes clear", nodes.clear, RECORDS),
)


async def job_actions(cluster: Cluster) -> dict[str, Any]:
    """The actions that the account may take on jobs of the namespace."""
    return {"actions": [action_value(one) for one in JOB_ACTIONS if await _may(cluster, one)]}


async def node_actions(cluster: Cluster) -> dict[str, Any]:
    """The actions that the account may take on nodes."""
    return {"actions": [action_value(one) for one in NODE_ACTIONS if await _may(cluster, one)]}


async def _may(cluster: Cluster, action: Action) -> bool:
    return await cluster.may("patch", action.changes)


def action_value(action: Action) -> dict[str, Any]:
    """An action that is offered."""
    words = paragraph_of(action.function, action.paragraph)
    return {"action": action.name, "command": action.command, "words": words}


def person_here() -> str:
    """The user who runs this program, as events name a person."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in a container
        return f"user {os.getuid()}"


async def carry_out(order: Order, connect: Callable[[str], Awaitable[Cluster]], person: str) -> str:
    """Carry out an order, and return its result in a sentence.

    `connect`: connects to the cluster, with the namespace to use.  Raises as the functions behind
    the commands, with what Kubernetes says if it refuses.
    """
    if isinstance(order, JobOrder):
        cluster = await connect(order.namespace)
        about, done = await _change_job(cluster, order)
    else:
        # Events about a node are in this namespace, as those of Kubernetes itself.
        cluster = await connect("default")
        about = await nodes.existing_node(cluster, order.name)
        done = await _change_node(cluster, order, person)
    return f"{order.name}: {done}{await _tell(cluster, about, done, person)}"


async def _change_job(cluster: Cluster, order: JobOrder) -> tuple[Object, str]:
    """Change a job; return it, and what was done."""
    job = await cluster.job(order.name)
    if order.uid not in ("", job["metadata"]["uid"]):
        raise SpecError(f"another job has the name {order.name} now: nothing was done")
    match order:
        case RestartJob():
            return await change.restart_job(cluster, job), "restart requested"
        case SuspendJob():
            return await change.suspend_job(cluster, job), "suspended"
        case ResumeJob():
            return await change.resume_job(cluster, job), "resumed"
        case SetDetector():
            text = f"{order.detector.value}={order.mode.value}"
            return await detectors.set_modes(cluster, job, [text]), f"detector {text}"


async def _change_node(cluster: Cluster, order: NodeOrder, person: str) -> str:
    """Change a node that exists; return what was done."""
    match order:
        case DrainNode():
            due = wall() + draining.seconds_of(order.deadline) if order.deadline else None
            await draining.mark(cluster, order.name, due)
            return "drain begun" + (f", until {time_text(due)}" if due is not None else "")
        case UncordonNode():
            await draining.unmark(cluster, order.name)
            return "takes pods again"
        case ClearNode():
            who = f"{person} on the live page: {order.why.strip()}"
            await nodes.clear_blame(cluster, order.name, who, wall())
            return f"blame cleared ({order.why.strip()})"
        case ResetNode() | RebootNode() | ReplaceNode():
            what = str(order.__struct_config__.tag)
            await nodes.order_repair(cluster, order.name, what)
            return f"{what} ordered"


async def _tell(cluster: Cluster, about: Object, done: str, person: str) -> str:
    """Write an event about an action; return what the result must add if that failed."""
    now, metadata = wall(), about["metadata"]
    message = f"{done} on the live page by {person}"
    event = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{metadata['name']}.{int(now * 1e9):x}"},
        "involvedObject": {
            "apiVersion": about["apiVersion"],
            "kind": about["kind"],
            **{key: metadata[key] for key in ("name", "namespace", "uid") if key in metadata},
        },
        "type": "Normal",
        "reason": REASON,
        "message": message,
        "source": {"component": COMPONENT},
        "reportingComponent": COMPONENT,
        "firstTimestamp": rfc3339(now),
        "lastTimestamp": rfc3339(now),
        "count": 1,
    }
    try:
        await cluster.create(EVENTS, event)
    except UnbrokenError as error:  # the action is done, and must not look as if it had failed
        return f" (no event tells of it: {str(error)[:REFUSAL_MAX]})"
    return ""
