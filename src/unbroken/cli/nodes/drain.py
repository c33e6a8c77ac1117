"""Marks nodes that jobs should leave, and follows the jobs' pods until they have left."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from lightkube.resources.core_v1 import Pod

from unbroken.cli.connection import NODES, Cluster
from unbroken.cli.show import note
from unbroken.cli.watch import ClusterWatch
from unbroken.core.wording import counted
from unbroken.errors import SpecError
from unbroken.kube.clock import wall
from unbroken.spec.job_kinds import ENDED_PHASES
from unbroken.spec.keys import DRAIN, JOB_LABEL
from unbroken.spec.nodes.notices import NO_DEADLINE
from unbroken.spec.times import time_text

LATE_SECONDS = 60.0
"""Time after the deadline in which pods must be gone: the operator stops their jobs before it."""
NAMED = 3
"""Pods that a line of progress names."""
_DURATION = re.compile(r"(\d+)([smhd]?)")
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def seconds_of(duration: str) -> float:
    """Return the seconds of `90`, `90s`, `10m`, `2h` or `1d`. SpecError for other texts."""
    match = _DURATION.fullmatch(duration.strip())
    if match is None or len(match[1]) > 9:
        raise SpecError(f"--deadline {duration}: must be a number with s, m, h or d, such as 10m")
    return float(int(match[1]) * _UNITS[match[2]])


async def mark(cluster: Cluster, name: str, deadline: float | None) -> None:
    """Cordon a node, and say until when jobs must have left it; None: there is no deadline."""
    until = NO_DEADLINE if deadline is None else time_text(deadline)
    body = {"metadata": {"annotations": {DRAIN: until}}, "spec": {"unschedulable": True}}
    await cluster.patch(NODES, name, body)


async def unmark(cluster: Cluster, name: str) -> None:
    """Let a node take pods again."""
    body = {"metadata": {"annotations": {DRAIN: None}}, "spec": {"unschedulable": None}}
    await cluster.patch(NODES, name, body)


async def follow(
    cluster: Cluster, names: Sequence[str], deadline: float | None
) -> dict[str, list[str]]:
    """Wait until the pods of jobs have left the nodes; progress goes to standard error.

    Return the pods that are still there by node: none, unless the deadline has passed."""
    watch = ClusterWatch(cluster)
    informer = watch.follow(Pod, labels=JOB_LABEL)
    shown: dict[str, str] = {}
    async with watch:
        await informer.synced.wait()
        while True:
            left = {name: _pods_on(name, informer.items()) for name in names}
            for name, pods in left.items():
                line = progress_line(name, pods)
                if pods and shown.get(name) != line:
                    note(line)
                shown[name] = line
            rest = None if deadline is None else deadline + LATE_SECONDS - wall()
            if not any(left.values()) or (rest is not None and rest <= 0):
                return left
            await watch.change(rest)


def progress_line(name: str, pods: Sequence[str]) -> str:
    """Say which pods of jobs are still on a node."""
    if not pods:
        return f"{name}: no job pod is left"
    more = f" and {len(pods) - NAMED} more" if len(pods) > NAMED else ""
    return f"{name}: {counted(len(pods), 'job pod')} left: {', '.join(pods[:NAMED])}{more}"


def _pods_on(node: str, pods: Iterable[Pod]) -> list[str]:
    return sorted(
        f"{pod.metadata.namespace}/{pod.metadata.name}"
        for pod in pods
        if pod.metadata is not None
        and pod.spec is not None
        and pod.spec.nodeName == node
        and (pod.status is None or pod.status.phase not in ENDED_PHASES)
    )
