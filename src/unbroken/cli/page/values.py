"""The contents of each page as JSON: the same values that the commands print.

`jobs`, `describe`, `explain` and `nodes` compute them; here they are put together, in bounded size.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from unbroken.cli.connection import Cluster, Object
from unbroken.cli.job.agents import (
    bound_lines,
    bound_value,
    reports,
    reports_of_job,
    watch_value,
)
from unbroken.cli.job.dead_nodes import fence_waits
from unbroken.cli.job.describe import EVENTS_SHOWN
from unbroken.cli.job.detectors import detector_values
from unbroken.cli.job.explain import as_value, numbered
from unbroken.cli.job.jobs import job_values
from unbroken.cli.job.resumed import event_values, events_of, resumed_jobs, summary
from unbroken.cli.job.snapshots import (
    loss_rows,
    shortage_lines,
    shortage_values,
    snapshot_lines,
    snapshot_values,
)
from unbroken.cli.job.story import because_text, cost_text, sign_text, story, unseen, without_blame
from unbroken.cli.job.views import (
    goodput_of,
    goodput_parts,
    goodput_value,
    job_summary,
    pod_summary,
    stages,
    state,
    wait_lines,
    world_size,
)
from unbroken.core.job.record import timeline
from unbroken.core.job.recovery.words import culprit_text, incident_line, remedy_words
from unbroken.core.page.heat_map import HeatMap, differ, heat_map, signs_of
from unbroken.core.page.history import MetricHistory
from unbroken.kube.clock import monotonic, pause
from unbroken.spec.job.incident import Incident
from unbroken.spec.times import time_text
from unbroken.wire.agent import AgentReport
from unbroken.wire.observation import RankWatch

SAMPLE_SECONDS = 2.0
"""Seconds between samples of a running job while a page is open."""
UNSEEN_SECONDS = 30.0
"""Seconds between samples while no page is open: whoever opens one wants to see the past, too."""
OPEN_SECONDS = 180.0
"""Seconds after the last reading of a page for which it counts as open: the page of a large job is
read that seldom."""
JOBS_MAX = 200
"""Jobs whose past is kept."""
INCIDENTS_SHOWN = 50
"""Newest incidents on the page of a job."""
DIFFERENT_SHOWN = 32
"""Ranks that differ, in the table below the heat map."""
PODS_SHOWN = 64
"""Pods on the page of a job: those that differ from the others come first."""
UNREACHED = (
    "Steps, metrics and ranks are known to the agents in the pods. The page asks agents of local "
    "clusters only. Here, the page in the cluster shows them (the chart's page.enabled). Or follow "
    "them with a tracker such as MLflow, or in the job's logs."
)
SHORTAGES = "memory is missing"
"""Name of the entry for pods without room, beside the names of snapshots."""
TEXT_SHOWN = 2000
"""Characters of a message."""
WORD_SHOWN = 60
"""Characters of a phase."""


@dataclass(slots=True)
class JobPast:
    """Reports of a job's ranks since the page's server started."""

    history: MetricHistory = field(default_factory=lambda: MetricHistory(SAMPLE_SECONDS))
    ranks: int | None = None
    """World size by the reports of its agents; None: not known."""
    agents: Mapping[str, AgentReport] = field(default_factory=dict)
    """Newest reports, by name of the pod."""
    asked_at: float = float("-inf")
    """Time at which these were asked for."""
    asked_seconds: float = 0.0
    """Seconds until all had answered."""
    shown_at: float = float("-inf")
    """Time at which the job's page was read last."""
    job: Object = field(default_factory=dict)
    """The job as its page showed it."""
    pods: Sequence[Object] = ()
    """Its pods, too."""

    def is_newer(self, now: float, seconds: float) -> bool:
        """True if the reports were asked for within these seconds."""
        return 0 <= now - self.asked_at < seconds

    def is_open(self, now: float) -> bool:
        """True if somebody looks at the job's page."""
        return 0 <= now - self.shown_at < OPEN_SECONDS

    def add(self, now: float, job: Object, agents: Collection[AgentReport]) -> None:
        """Take the reports of all agents of the job."""
        self.ranks = world_size(job, (one.nproc for one in agents))
        if watches := _watches(agents):
            self.history.add(now, watches)


Pasts = dict[str, JobPast]
"""By uid of the job."""


def _watches(agents: Iterable[AgentReport]) -> list[RankWatch]:
    return [watch for report in agents for watch in report.watch]


async def sample(cluster: Cluster, pasts: Pasts, now: float, jobs: Iterable[Object]) -> None:
    """Add what the running jobs report now to their past."""
    for job in running_jobs(jobs):
        await sample_job(cluster, pasts, now, job)


def running_jobs(jobs: Iterable[Object]) -> list[Object]:
    """The jobs that are sampled."""
    return [job for job in jobs if state(job) == "Running"][:JOBS_MAX]


async def sample_job(cluster: Cluster, pasts: Pasts, now: float, job: Object) -> None:
    """Add what a running job reports now to its past."""
    name, seen = job["metadata"]["name"], past(pasts, job)
    inside = Cluster(cluster.place, cluster.client, job["metadata"]["namespace"])
    inside.operator = cluster.operator
    if inside.operator is not None:  # no pods have to be listed
        seen.add(now, job, await reports_of_job(inside, name))
    else:
        await ask(inside, seen, job, await inside.pods(name), now)


async def ask(
    cluster: Cluster, seen: JobPast, job: Object, pods: Sequence[Object], now: float
) -> None:
    """Ask the agents of a job, and keep what they report."""
    began = monotonic()
    seen.agents = await reports(cluster, pods)
    seen.asked_seconds = monotonic() - began
    # Signs of ranks that came while others were asked are no silence.
    seen.asked_at = now
    if state(job) == "Running":
        seen.add(now, job, seen.agents.values())


def is_sample_due(now: float, sampled_at: float, looked_at: float) -> bool:
    """True if running jobs are sampled in this turn, one of each SAMPLE_SECONDS.

    `sampled_at`: time of the newest sample; `looked_at`: time at which a page was read last.
    """
    return now - looked_at < OPEN_SECONDS or now - sampled_at >= UNSEEN_SECONDS


def past(pasts: Pasts, job: Object) -> JobPast:
    """The past of a job. Beyond JOBS_MAX, the past that was read longest ago is dropped."""
    uid = str(job["metadata"]["uid"])
    pasts[uid] = found = pasts.pop(uid, None) or JobPast()
    if len(pasts) > JOBS_MAX:
        del pasts[next(iter(pasts))]
    return found


def forget_deleted(pasts: Pasts, jobs: Iterable[Object]) -> None:
    """Drop the past of jobs that are not among all jobs any more."""
    known = {str(job["metadata"]["uid"]) for job in jobs}
    for uid in pasts.keys() - known:
        del pasts[uid]


async def jobs_page(
    cluster: Cluster, pasts: Pasts, now: float, namespace: str = ""
) -> dict[str, Any]:
    """The jobs of a namespace (empty: of all), with the step and rate that were seen last."""
    found = await job_values(cluster, namespace, now)
    shown = [
        job_row(job, value, pasts.get(str(job["metadata"]["uid"]), JobPast()))
        for job, value in found
    ]
    others = await resumed_jobs(cluster, namespace)
    return {
        "jobs": shown,
        "resumed": [summary(one.job) for one in others],
        "missing": cluster.missing(),
        "unreached": unreached(cluster),
    }


def unreached(cluster: Cluster) -> str:
    """Why there are no reports of agents; empty: there are."""
    if cluster.operator is not None:
        return cluster.operator.problem
    return UNREACHED if cluster.place.paths is None else ""


def job_row(job: Object, value: Mapping[str, Any], seen: JobPast) -> dict[str, Any]:
    """A job in the list."""
    return {
        **value,
        "message": value["message"][:TEXT_SHOWN],
        "goodput": value["goodput"],
        **training_values(job, seen),
    }


def training_values(job: Object, seen: JobPast) -> dict[str, Any]:
    """The ranks of a job, and how far and how fast they train."""
    return {
        "worldSize": seen.ranks or world_size(job, ()),
        "step": seen.history.step,
        "stepsPerSecond": seen.history.rate if state(job) == "Running" else None,
    }


async def job_page(
    cluster: Cluster, name: str, pasts: Pasts, now: float, kept_seconds: float = 0.0
) -> dict[str, Any]:
    """A job with its ranks, its past, its incidents and its pods; SpecError if there is none.

    `kept_seconds`: age up to which reports of agents are used again.
    """
    job = await cluster.job(name)
    pods = await cluster.pods(name)
    seen = past(pasts, job)
    seen.job, seen.shown_at = job, now
    if pods:  # another person may be refused to list them
        seen.pods = pods
    if not seen.is_newer(now, kept_seconds):
        await ask(cluster, seen, job, seen.pods, now)
    incidents = await cluster.incidents(job)
    events = await events_of(cluster, job["metadata"]["uid"])
    # Reports are shared; each person sees those of pods that the person may list.
    names = [str(pod["metadata"]["name"]) for pod in pods]
    agents = {name: seen.agents[name] for name in names if name in seen.agents}
    compared = await compare(seen, agents)
    good = goodput_value(goodput_of(job, incidents, now))
    shown = sorted(map(pod_summary, pods), key=lambda one: str(one["name"]))
    waiting = [*wait_lines(job, shown), *await fence_waits(cluster, pods)]
    value = job_summary(job)
    return {
        **value,
        "uid": job["metadata"]["uid"],
        "message": value["message"][:TEXT_SHOWN],
        "now": time_text(now, has_microseconds=True),
        **training_values(job, seen),
        "goodput": good,
        "parts": [part_value(*one) for one in goodput_parts(good)],
        "history": history_value(seen.history),
        **ranks_values(seen, agents, compared),
        "detectors": detector_values(job),
        "waiting": waiting,
        "incidentCount": len(incidents),
        "incidents": [recovery_value(one) for one in incidents[-INCIDENTS_SHOWN:]],
        "podCount": len(shown),
        "pods": pod_values(shown, agents),
        "snapshots": snapshots_values(shown, agents),
        "events": event_values(events[-EVENTS_SHOWN:]),
        "missing": cluster.missing(),
        "unreached": unreached(cluster),
    }


@dataclass(frozen=True, slots=True)
class Compared:
    """The ranks of a job, compared with each other."""

    watches: Sequence[RankWatch]
    """In order of rank."""
    cells: HeatMap | None
    odd: Sequence[RankWatch]
    """Ranks that differ, those with alarms first."""


async def compare(seen: JobPast, agents: Mapping[str, AgentReport]) -> Compared:
    """Compare the ranks as they were when the agents were asked last.

    Each step takes tens of milliseconds for a job of 16,384 ranks; others run in between.
    """
    at, spread = seen.asked_at, seen.asked_seconds
    await pause(0)
    watches = sorted(_watches(agents.values()), key=lambda one: one.rank)
    cells = heat_map(watches, at, spread) if watches else None
    await pause(0)
    differs = differ([signs_of(one, at) for one in watches], spread)
    odd = [one for one, is_odd in zip(watches, differs, strict=True) if is_odd]
    await pause(0)
    return Compared(watches, cells, sorted(odd, key=lambda one: not one.alarms))


def ranks_values(
    seen: JobPast, agents: Mapping[str, AgentReport], found: Compared
) -> dict[str, Any]:
    """The ranks of a job in bounded size."""
    pods = {one.rank: pod for pod, report in agents.items() for one in report.watch}
    shown = [{**watch_value(one), "pod": pods[one.rank]} for one in found.odd[:DIFFERENT_SHOWN]]
    return {
        "reported": time_text(seen.asked_at, has_microseconds=True),
        "heatMap": None if found.cells is None else heat_map_value(found.cells),
        "different": [rank_value(one) for one in shown],
        "differentCount": len(found.odd),
        "watch": list(bound_lines([bound_value(one) for one in found.watches])),
    }


def rank_value(rank: Mapping[str, Any]) -> dict[str, Any]:
    """A rank that differs."""
    return {
        "rank": rank["rank"],
        "pod": rank["pod"],
        "phase": rank["phase"][:WORD_SHOWN],
        "step": rank["step"],
        "stepSeconds": rank["stepSeconds"],
        "lastSign": rank["lastSign"],
        "allowedSeconds": rank["allowedSeconds"],
        "alarms": [f"{one['detector']}: {one['why']}"[:TEXT_SHOWN] for one in rank["alarms"]],
    }


def pod_values(
    pods: Sequence[Mapping[str, Any]], agents: Mapping[str, AgentReport]
) -> list[dict[str, Any]]:
    """The pods of a job: if not all are shown, those that differ from most come first."""
    found = [pod_value(pod, agents.get(str(pod["name"]))) for pod in pods]
    if len(found) > PODS_SHOWN:

        def kind(pod: Mapping[str, Any]) -> tuple[object, ...]:
            return tuple(pod[key] for key in ("phase", "restarts", "agentState", "attempt"))

        usual = Counter(map(kind, found)).most_common(1)[0][0]
        found.sort(key=lambda pod: kind(pod) == usual)  # otherwise by name, as before
    return found[:PODS_SHOWN]


def pod_value(pod: Mapping[str, Any], report: AgentReport | None) -> dict[str, Any]:
    """A pod with the report of its agent."""
    return {
        "name": pod["name"],
        "node": pod["node"],
        "phase": pod["phase"],
        "restarts": pod["restarts"],
        "reason": pod["reason"],
        "agentState": "" if report is None else report.state.value,
        "attempt": None if report is None else report.attempt,
        "workers": None if report is None else len(report.workers),
    }


def snapshots_values(
    pods: Sequence[Mapping[str, Any]], agents: Mapping[str, AgentReport]
) -> list[dict[str, Any]]:
    """Snapshots of each name, and after them the memory that is missing, if any is."""
    result = [snapshots_value(one) for one in snapshot_values(pods, agents)]
    missing = [one[:TEXT_SHOWN] for one in shortage_lines(shortage_values(pods, agents))]
    if missing:
        result.append({"name": SHORTAGES, "lines": missing, "losses": []})
    return result


def snapshots_value(found: Mapping[str, Any]) -> dict[str, Any]:
    """Snapshots of one name in the words of `unbroken describe`."""
    return {
        "name": found["name"],
        "lines": [one[:TEXT_SHOWN] for one in snapshot_lines(found)],
        "losses": [loss_row(*one) for one in loss_rows(found["losses"])],
    }


def loss_row(lost: object, steps: object, source: object) -> dict[str, Any]:
    """The cost of one kind of loss now."""
    return {"lost": lost, "stepsText": str(steps), "sourceText": source}


def part_value(name: str, seconds: float) -> dict[str, Any]:
    """A part of the job's time."""
    return {"part": name, "partSeconds": seconds}


def history_value(found: MetricHistory) -> dict[str, Any]:
    """Columns of equal length; null: not known."""
    points = found.points
    return {
        "times": [round(one.at, 1) for one in points],
        "steps": [one.step for one in points],
        "rates": [_short(one.rate) for one in points],
        "metricNames": list(found.names),
        "metricValues": [[one.metrics.get(name) for one in points] for name in found.names],
    }


def heat_map_value(found: HeatMap) -> dict[str, Any]:
    """Columns with an entry for each cell; null: no rank of the cell reports the value."""
    cells = found.cells
    return {
        "ranks": found.ranks,
        "ranksPerCell": found.per_cell,
        "newestStep": found.newest_step,
        "stepsApart": found.steps_apart,
        "reported": [one.reported for one in cells],
        "steps": [one.step for one in cells],
        "behind": [one.behind for one in cells],
        "stepSeconds": [_short(one.step_seconds) for one in cells],
        "silenceSeconds": [_short(one.silence_seconds) for one in cells],
        "silenceShares": [_short(one.silence_share) for one in cells],
        "phases": [one.phase[:WORD_SHOWN] for one in cells],
        "alarms": [one.alarms for one in cells],
    }


def _short(number: float | None) -> float | None:
    return float(f"{number:.4g}") if number is not None and math.isfinite(number) else None


def recovery_value(incident: Incident) -> dict[str, Any]:
    """An incident on the page of its job."""
    began = incident.culprit.at
    return {
        "number": incident.number,
        "attempt": incident.attempt,
        "fault": incident.fault or incident.culprit.fault,
        "culprit": culprit_text(incident.culprit),
        "remedy": incident.remedy.value,
        "summary": incident_line(incident)[:TEXT_SHOWN],
        "began": began,
        "outcome": incident.outcome,
        "cost": cost_text(incident),
        "stages": [
            {"stage": name, "from": round(start - began, 3), "to": round(end - began, 3)}
            for name, start, end in timeline.stages(incident)
        ],
    }


async def incident_page(cluster: Cluster, name: str, number: int, now: float) -> dict[str, Any]:
    """The story of an incident; SpecError if the job has none of this number."""
    job = await cluster.job(name)
    incidents = await cluster.incidents(job)
    return incident_value(job, incidents, number, now)


def incident_value(
    job: Object, incidents: Sequence[Incident], number: int, now: float
) -> dict[str, Any]:
    """The incident of this number as the page shows it."""
    one = numbered(job["metadata"]["name"], incidents, number)
    culprit = one.culprit
    others = [each for each in one.signals if each != culprit]
    return {
        "job": job["metadata"]["name"],
        "namespace": job["metadata"]["namespace"],
        "numbers": [each.number for each in incidents],
        "incident": as_value(one),
        "summary": incident_line(one)[:TEXT_SHOWN],
        "culprit": culprit_text(culprit),
        "because": because_text(one),
        "what": without_blame(culprit.text, one.blame)[:TEXT_SHOWN],
        "evidence": list(unseen(one, is_full=False)),
        "plan": remedy_words(one)[0],
        "cost": cost_text(one, now),
        "timeline": [stage_value(one, *stage) for stage in stages(one)],
        "alsoSeen": [sign_text(each, one.detected_at)[:TEXT_SHOWN] for each in others],
    }


def stage_value(incident: Incident, name: str, at: float, since: float) -> dict[str, Any]:
    """A stage that the recovery has reached."""
    return {
        "stage": name,
        "time": time_text(at, has_microseconds=True),
        "sinceDetection": round(since, 3),
        "lastPod": incident.slowest.get(name, ""),
    }


async def incident_text(cluster: Cluster, name: str, number: int, now: float) -> str:
    """The story of an incident as `unbroken explain --stacks` prints it, to be kept as a file."""
    job = await cluster.job(name)
    one = numbered(name, await cluster.incidents(job), number)
    head = f"job {job['metadata']['namespace']}/{name}"
    return "\n".join([head, *story(one, now=now, is_full=True), ""])
