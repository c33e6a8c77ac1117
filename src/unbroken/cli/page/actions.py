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

from unbroken.cli.app import first_paragraph
from unbroken.cli.connection import EVENTS, JOBS, Cluster, Object, ObjectKind
from unbroken.cli.job import change
from unbroken.errors import UnbrokenError
from unbroken.kube.clock import rfc3339, wall

from .orders import Order, RestartJob, ResumeJob, SuspendJob

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


JOB_ACTIONS = (
    Action("restart", "unbroken restart", change.restart, JOBS),
    Action("suspend", "unbroken suspend", change.suspend, JOBS),
    Action("resume", "unbroken resume", change.resume, JOBS),
)


async def job_actions(cluster: Cluster) -> dict[str, Any]:
    """The actions that the account may take on jobs of the namespace."""
    return {"actions": [action_value(one) for one in JOB_ACTIONS if await _may(cluster, one)]}


async def _may(cluster: Cluster, action: Action) -> bool:
    return await cluster.may("patch", action.changes)


def action_value(action: Action) -> dict[str, Any]:
    """An action that is offered."""
    words = first_paragraph(action.function)
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
    cluster = await connect(order.namespace)
    match order:
        case RestartJob():
            job, done = await change.restart_job(cluster, order.name), "restart requested"
        case SuspendJob():
            job, done = await change.suspend_job(cluster, order.name), "suspended"
        case ResumeJob():
            job, done = await change.resume_job(cluster, order.name), "resumed"
    return f"{order.name}: {done}{await _tell(cluster, job, done, person)}"


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
