"""Reports and evidence of a job's agents.

Only agents of the local cluster can be reached from the command.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from unbroken.cli.connection import SECRETS, Cluster, Object
from unbroken.errors import PeerError
from unbroken.spec.times import time_text
from unbroken.wire.agent import PORT, AgentReport, RuleView
from unbroken.wire.agent_codec import decode_report
from unbroken.wire.observation import Evidence
from unbroken.wire.observation_codec import decode_evidence

from .ranks import watch_value

T = TypeVar("T")

ANSWER_SECONDS = 2.0
"""Timeout of a request to an agent; the answer of a slower agent is left out."""
ANSWER_BYTES_MAX = 64 << 20
"""Largest answer of an agent: evidence of all ranks of a node."""


async def job_key(cluster: Cluster, pods: Iterable[Object]) -> bytes | None:
    """The key of the job that these pods belong to; None if it has no key."""
    from unbroken.operator.jobs.pods import KEY_ENTRY, KEY_VOLUME

    for pod in pods:
        for volume in pod["spec"].get("volumes") or ():
            if volume["name"] == KEY_VOLUME:
                secret = await cluster.get(SECRETS, volume["secret"]["secretName"])
                return bytes.fromhex(base64.b64decode(secret["data"][KEY_ENTRY]).decode())
    return None


async def reports(cluster: Cluster, pods: Sequence[Object]) -> dict[str, AgentReport]:
    """The reports of the agents that answer, by name of the pod."""
    return await _ask(cluster, pods, Question("/v1/report", decode_report, ANSWER_SECONDS))


async def evidence(cluster: Cluster, pods: Sequence[Object], seconds: float) -> dict[str, Evidence]:
    """The evidence that the agents collect within the time, by name of the pod."""
    path = f"/v1/evidence?seconds={seconds:g}"
    question = Question(path, decode_evidence, seconds + ANSWER_SECONDS)
    return await _ask(cluster, pods, question)


@dataclass(frozen=True, slots=True)
class Question(Generic[T]):
    """A request to every agent."""

    path: str
    decode: Callable[[bytes], T]
    seconds: float

    async def ask(self, pod: Object, key: bytes | None) -> T | None:
        """The answer of a pod's agent; None if no agent answers as expected."""
        from unbroken.agent_http.peer import connected

        address, uid = pod["status"]["podIP"], pod["metadata"]["uid"]
        place = f"[{address}]:{PORT}" if ":" in address else f"{address}:{PORT}"
        try:
            async with asyncio.timeout(self.seconds), connected(place, key, uid) as peer:
                await peer.ask("GET", self.path)
                head = await peer.head(self.seconds)
                if head.status != 200:
                    return None
                return self.decode(await peer.text(head, ANSWER_BYTES_MAX))
        except (TimeoutError, OSError, PeerError):
            return None


async def _ask(cluster: Cluster, pods: Sequence[Object], question: Question[T]) -> dict[str, T]:
    if cluster.place.paths is None:
        return {}
    key = await job_key(cluster, pods)
    reachable = [pod for pod in pods if (pod.get("status") or {}).get("podIP")]
    answers = await asyncio.gather(*(question.ask(pod, key) for pod in reachable))
    names = [str(pod["metadata"]["name"]) for pod in reachable]
    return {name: one for name, one in zip(names, answers, strict=True) if one is not None}


def agent_value(report: AgentReport) -> dict[str, Any]:
    """The report of an agent for `describe`."""
    workers = [
        {
            "rank": one.rank,
            "localRank": one.local_rank,
            "pid": one.pid,
            "state": one.state,
            "start": one.start,
        }
        for one in report.workers
    ]
    return {
        "state": report.state.value,
        "attempt": report.attempt,
        "nodeRank": report.rank,
        "pid": report.pid,
        "workers": workers,
        "watch": [watch_value(one) for one in report.watch],
        "logRules": [_rule_value(view) for view in report.log_rules],
    }


def _rule_value(view: RuleView) -> dict[str, Any]:
    return {
        "name": view.name,
        "state": view.state.value,
        "ranks": view.ranks,
        "matches": view.matches,
        "lastMatch": None if view.last_match_at is None else time_text(view.last_match_at),
        "lastRank": view.last_rank,
        "lastValue": view.last_value,
        "lastLine": view.last_line,
    }
