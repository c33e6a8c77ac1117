"""Reports and evidence of a job's agents, and the table of its ranks.

Only agents of the local cluster can be reached from the command. In another cluster the operator
has the reports, and gives them to the page that runs there (`Cluster.operator`). HyperPod's own
agent reports its state and node rank. Its workers are then found among the processes of the pod.
"""

from __future__ import annotations

import asyncio
import base64
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from unbroken.cli.connection import JOB_LABEL, SECRETS, Cluster, Object, ReportSource
from unbroken.core.page.heat_map import RankSigns, differ
from unbroken.core.patience import START
from unbroken.errors import PeerError
from unbroken.foreign_numbers import INT32_MAX, whole_number
from unbroken.spec.times import time_seconds, time_text
from unbroken.wire.agent import PORT, AgentReport, RuleView, WarmReport, WorkerReport
from unbroken.wire.agent_bodies import parse_json, report_of_status
from unbroken.wire.agent_codec import decode_evidence, decode_report
from unbroken.wire.observation import Bound, Evidence, RankWatch
from unbroken.wire.proof import Stranger

from .views import span

ALL_SHOWN = 16
"""A job of up to so many ranks is shown whole; of a larger job, only ranks that differ."""
DIFFERENT_SHOWN = 24
TITLES = ("RANK", "POD", "PHASE", "STEP", "STEP TIME", "LAST SIGN", "ALLOWED", "ALARMS")

SIGNS = {
    Bound.STEPS: "a step",
    Bound.PHASE: "a step in this phase",
    Bound.OUTPUT: "a line",
    Bound.WORK: "work",
    Bound.START: "a sign",
}

Rank = Mapping[str, Any]


def watch_value(watch: RankWatch) -> dict[str, Any]:
    """A rank as JSON: times as RFC 3339, NaN and infinities as text."""

    def when(at: float | None) -> str | None:
        return None if at is None else time_text(at, has_microseconds=True)

    return {
        "phase": watch.phase,
        "step": watch.step,
        "stepTime": when(watch.step_at),
        "stepSeconds": watch.step_seconds,
        "lastSign": when(watch.sign_at),
        "allowedSeconds": watch.allowed_seconds,
        **bound_value(watch),
        "lateSince": when(watch.late_since),
        "checkpointStep": watch.checkpoint_step,
        "metrics": {k: v if math.isfinite(v) else str(v) for k, v in watch.metrics.items()},
        "alarms": [
            {"detector": one.detector, "since": when(one.since), "why": one.why}
            for one in watch.alarms
        ],
    }


def bound_value(watch: RankWatch) -> dict[str, Any]:
    """How soon a hang of a rank is detected, as `bound_lines` reads it."""
    return {
        "rank": watch.rank,
        "bound": watch.bound,
        "lookSeconds": watch.look_seconds,
        "actSeconds": watch.act_seconds,
    }


def rank_rows(ranks: Sequence[Rank], now: float) -> Iterator[list[object]]:
    """Rows of the table; `ranks` are of `watch_value`, each with its `pod`."""
    shown = ranks if len(ranks) <= ALL_SHOWN else differing(ranks, now)[:DIFFERENT_SHOWN]
    for one in shown:
        silence = _silence(one, now)
        yield [
            one["rank"],
            one["pod"],
            one["phase"] or "-",
            "-" if one["step"] is None else one["step"],
            "-" if one["stepSeconds"] is None else span(one["stepSeconds"]),
            "-" if silence is None else f"{_short(silence)} ago",
            "learning" if one["allowedSeconds"] is None else _short(one["allowedSeconds"]),
            ", ".join(f"{alarm['detector']}: {alarm['why']}" for alarm in one["alarms"]) or "-",
        ]


def bound_lines(ranks: Sequence[Rank]) -> Iterator[str]:
    """A line for each kind of bound: its ranks, and how soon their hang is detected."""
    from unbroken.core.diagnosis.stacks import name_ranks

    by_bound: dict[str, list[Rank]] = {}
    for one in ranks:
        by_bound.setdefault(one["bound"], []).append(one)
    for bound, sign in SIGNS.items():
        found = by_bound.get(bound.value, [])
        if not found:
            continue
        who = name_ranks([one["rank"] for one in found])
        looks = [one["lookSeconds"] for one in found if one["lookSeconds"] is not None]
        if not looks:
            limit = span(START.idle.seconds)
            yield f"{who}: starting or learning, alarm after {limit} without any sign of life"
            continue
        acts = max(one["actSeconds"] or 0.0 for one in found)
        yield (
            f"{who}: by {bound.value}, all ranks are looked at after {_short(max(looks))} without "
            f"{sign}, restart from {_short(acts)} on if two looks show who keeps the others waiting"
        )


def others_line(ranks: Sequence[Rank], now: float) -> str:
    """A line about the ranks without a row; empty if there are none."""
    if len(ranks) <= ALL_SHOWN:
        return ""
    different = differing(ranks, now)
    rest = [one for one in ranks if one not in different]
    hidden = len(different) - DIFFERENT_SHOWN
    more = [f"{hidden} more that differ"] if hidden > 0 else []
    if not rest:
        return "; ".join(more)
    phases = Counter(one["phase"] or "-" for one in rest)
    parts = [f"{'the other ' if different else 'all '}{len(rest)} ranks: {', '.join(phases)}"]
    parts += _range("step", "", (one["step"] for one in rest))
    parts += _range("last sign", " ago", (_silence(one, now) for one in rest))
    parts += _range("allowed", "", (one["allowedSeconds"] for one in rest)) or ["learning"]
    return "; ".join([", ".join(parts), *more])


def differing(ranks: Sequence[Rank], now: float) -> list[Rank]:
    """Ranks with an alarm, with another phase or step than most, or long silent."""
    signs = [
        RankSigns(
            one["phase"],
            one["step"],
            one["stepSeconds"],
            _silence(one, now),
            one["allowedSeconds"],
            has_alarm=bool(one["alarms"]),
        )
        for one in ranks
    ]
    found = (one for one, differs in zip(ranks, differ(signs), strict=True) if differs)
    return sorted(found, key=lambda one: (not one["alarms"], one["rank"]))


def _silence(one: Rank, now: float) -> float | None:
    return None if one["lastSign"] is None else max(now - time_seconds(one["lastSign"]), 0.0)


def _short(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else span(seconds)


def _range(name: str, end: str, given: Iterable[float | None]) -> list[str]:
    """The range of values as `last sign 0.1 s to 2.0 s ago`; empty without values."""
    values = [one for one in given if one is not None]
    if not values:
        return []
    least, most = (
        str(value) if isinstance(value, int) else _short(value)
        for value in (min(values), max(values))
    )
    return [f"{name} {least}{end}" if least == most else f"{name} {least} to {most}{end}"]


T = TypeVar("T")

ANSWER_SECONDS = 2.0
"""Timeout of a request to an agent; the answer of a slower agent is left out."""
ASKED_TOGETHER = 64
"""Agents that are asked at the same time: thousands at once would all be too slow."""
ANSWER_BYTES_MAX = 64 << 20
"""Largest answer of an agent: evidence of all ranks of a node."""


async def job_key(cluster: Cluster, pods: Iterable[Object]) -> bytes | None:
    """The key of the job that these pods belong to; None if it has no key."""
    from unbroken.operator.jobs.pods import KEY_ENTRY, KEY_VOLUME

    for pod in pods:
        for volume in pod["spec"].get("volumes") or ():
            if volume["name"] == KEY_VOLUME:
                secret = await cluster.find(SECRETS, volume["secret"]["secretName"])
                if secret is None:
                    continue  # It belongs to an earlier job of the name, whose pods still end.
                return bytes.fromhex(base64.b64decode(secret["data"][KEY_ENTRY]).decode())
    return None


async def reports(cluster: Cluster, pods: Sequence[Object]) -> dict[str, AgentReport]:
    """The reports of the agents of these pods of one job, by name of the pod."""
    if cluster.operator is not None:
        answers = await _reports_of_operator(cluster.operator, pods)
        return _with_workers(answers, pods) if cluster.place.paths is not None else answers
    stock = AgentQuestion("/status", _decode_status, ANSWER_SECONDS)
    question = AgentQuestion("/v1/report", decode_report, ANSWER_SECONDS, stock)
    return _with_workers(await _ask(cluster, pods, question), pods)


def _with_workers(
    answers: Mapping[str, AgentReport], pods: Sequence[Object]
) -> dict[str, AgentReport]:
    """Add the workers of HyperPod's own agents, which do not report them."""
    by_name = {str(pod["metadata"]["name"]): pod for pod in pods}
    return {
        name: report if report.pid is not None else with_workers(report, by_name[name])
        for name, report in answers.items()
    }


async def _reports_of_operator(
    operator: ReportSource, pods: Sequence[Object]
) -> dict[str, AgentReport]:
    """The reports that the operator has of these pods: of no others, whatever it sends."""
    metadata = [pod["metadata"] for pod in pods]
    jobs = {(one["namespace"], (one.get("labels") or {}).get(JOB_LABEL)) for one in metadata}
    found = dict[str, AgentReport]()
    for namespace, job in jobs:
        if job:
            found |= await operator.of_job(namespace, job)
    return {str(one["name"]): found[one["uid"]] for one in metadata if one["uid"] in found}


async def reports_of_job(cluster: Cluster, name: str) -> Collection[AgentReport]:
    """The reports of all agents of a job."""
    if cluster.operator is not None:
        return (await cluster.operator.of_job(cluster.namespace, name)).values()
    return (await reports(cluster, await cluster.pods(name))).values()


def _decode_status(text: bytes) -> AgentReport:
    return report_of_status(parse_json(text))


async def evidence(cluster: Cluster, pods: Sequence[Object], seconds: float) -> dict[str, Evidence]:
    """The evidence that the agents collect within the time, by name of the pod."""
    path = f"/v1/evidence?seconds={seconds:g}"
    question = AgentQuestion(path, decode_evidence, seconds + ANSWER_SECONDS)
    return await _ask(cluster, pods, question)


@dataclass(frozen=True, slots=True)
class AgentQuestion(Generic[T]):
    """A request to every agent."""

    path: str
    decode: Callable[[bytes], T]
    seconds: float
    without_proof: AgentQuestion[T] | None = None
    """Question to an agent that does not prove that it has the job's key."""

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
                    raise Stranger(f"HTTP {head.status}")
                return self.decode(await peer.text(head, ANSWER_BYTES_MAX))
        except Stranger:
            return await self.without_proof.ask(pod, None) if self.without_proof else None
        except (TimeoutError, OSError, PeerError):
            return None


async def _ask(
    cluster: Cluster, pods: Sequence[Object], question: AgentQuestion[T]
) -> dict[str, T]:
    if cluster.place.paths is None:
        return {}
    key = await job_key(cluster, pods)
    reachable = [pod for pod in pods if (pod.get("status") or {}).get("podIP")]
    turns = asyncio.Semaphore(ASKED_TOGETHER)

    async def ask(pod: Object) -> T | None:
        async with turns:
            return await question.ask(pod, key)

    answers = await asyncio.gather(*map(ask, reachable))
    names = [str(pod["metadata"]["name"]) for pod in reachable]
    return {name: one for name, one in zip(names, answers, strict=True) if one is not None}


def with_workers(report: AgentReport, pod: Object) -> AgentReport:
    """The status of HyperPod's own agent, completed by the processes of its pod."""
    from unbroken.local.node.processes.process import marked

    found: dict[int, tuple[int, WorkerReport, int | None]] = {}
    for container in pod["status"].get("containerStatuses") or ():
        for pid in marked(str(container.get("containerID") or "").rpartition("/")[2]):
            if (worker := _worker(pid)) is not None:
                found[pid] = worker
    # Processes that a worker has started have its environment, too.
    first = [one for one in found.values() if one[0] not in found]
    if not first:
        return report
    parent, _, nproc = first[0]
    workers = sorted((worker for _, worker, _ in first), key=lambda one: one.rank)
    return replace(report, pid=parent, nproc=nproc, workers=tuple(workers))


def _worker(pid: int) -> tuple[int, WorkerReport, int | None] | None:
    """Return a process that is a rank's, with its parent and the workers of its node."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        pairs = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    state, parent, *_ = stat.rpartition(")")[2].split()
    variables = dict(pair.decode(errors="replace").split("=", 1) for pair in pairs if b"=" in pair)
    rank, local_rank, nproc = (
        whole_number(variables.get(name, ""), 0, INT32_MAX)
        for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    )
    if rank is None or local_rank is None or state == "Z":
        return None
    return int(parent), WorkerReport(local_rank, rank, pid, "running", 0.0), nproc


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
        "warm": None if report.warm is None else _warm_value(report.warm),
        "watch": [watch_value(one) for one in report.watch],
        "logRules": [_rule_value(view) for view in report.log_rules],
    }


def _warm_value(warm: WarmReport) -> dict[str, Any]:
    return {
        "coldBecause": warm.cold_because,
        "modules": warm.modules,
        "seconds": warm.seconds,
        "leftOut": list(warm.left_out),
        "forRank": warm.for_rank,
    }


def warm_lines(agents: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """How the workers of each pod would start next, pods of one answer together."""
    pods: dict[str, list[str]] = {}
    for pod, agent in agents.items():
        if (warm := agent["warm"]) is not None:
            said = f"cold: {warm['coldBecause']}"
            if not warm["coldBecause"]:
                took = f", which saves {warm['seconds']:.1f} s" if warm["seconds"] else ""
                said = f"warm: {warm['modules']} modules are imported by then{took}"
            count = (
                f"{warm['forRank']} more modules, which read a rank's variables or start threads"
            )
            own = [f"  imported by parked workers: {count}"] if warm["forRank"] else []
            lines = [said, *own, *(f"  imported at each start: {line}" for line in warm["leftOut"])]
            pods.setdefault("\n".join(lines), []).append(pod)
    for said, names in pods.items():
        first, *more = said.split("\n")
        yield f"{names[0]}{f' and {len(names) - 1} more' if names[1:] else ''}: {first}"
        yield from more


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
