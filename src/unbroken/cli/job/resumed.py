"""Jobs of other kinds that auto-resume restarts, as commands show them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from unbroken.cli.connection import EVENTS, JOBS, PODS, Cluster, ObjectKind
from unbroken.cli.listing import Listing
from unbroken.cli.show import Paper, print_table
from unbroken.core.losses import Loss, ResumedJob
from unbroken.core.wording import counted
from unbroken.errors import SpecError
from unbroken.kube.errors import Forbidden
from unbroken.operator.parts import PARTS
from unbroken.operator.resume.record import one_line, resumed_job
from unbroken.spec.job_kinds import JobKind
from unbroken.spec.times import time_text

from .dead_nodes import fence_waits
from .views import age, pod_summary, span

Object = dict[str, Any]
RESUMED = tuple(kind for part in PARTS.values() for kind in part.resumes)
"""Kinds of jobs that the operator resumes."""
TITLES = ("KIND", "NAME", "STATE", "RESTARTS", "LAST FAULT", "RAN AGAIN", "AGE")
WIDE = ("CULPRIT", "REMEDY")


@dataclass(frozen=True, slots=True)
class Resumed:
    """A job with auto-resume, and its object."""

    kind: JobKind
    job: ResumedJob
    item: Object

    @property
    def word(self) -> str:
        """The job as commands take it: `rayjob/lm`."""
        return f"{self.kind.name.lower()}/{self.job.name}"


async def resumed_jobs(cluster: Cluster, namespace: str | None = None) -> list[Resumed]:
    """List the jobs that ask to be resumed; `namespace` as in `Cluster.path`.

    A kind that the cluster does not know, or that the user may not list, is left out.
    """
    return await _of_kinds(cluster, RESUMED, namespace)


async def _of_kinds(
    cluster: Cluster, kinds: Iterable[JobKind], namespace: str | None = None
) -> list[Resumed]:
    found = await asyncio.gather(*(_of_kind(cluster, kind, namespace) for kind in kinds))
    return [one for jobs in found for one in jobs]


async def _of_kind(cluster: Cluster, kind: JobKind, namespace: str | None) -> list[Resumed]:
    collection = ObjectKind(kind.path, kind.plural, kind.name)
    try:
        items = await cluster.select(collection, namespace=namespace)
    except Forbidden:
        return []
    found = ((resumed_job(kind, item), item) for item in items)
    return [Resumed(kind, job, item) for job, item in found if job is not None]


async def find_resumed(cluster: Cluster, name: str) -> Resumed | None:
    """Find a job by its name, or by `KIND/NAME`; None: there is none.

    SpecError if several kinds have a job of this name.
    """
    given, _, word = name.rpartition("/")
    wanted = given.lower()
    kinds = [kind for kind in RESUMED if not given or wanted in _names(kind)]
    if given and not kinds:
        known = ", ".join(kind.name.lower() for kind in RESUMED)
        raise SpecError(f'"{given}" is no kind of job with auto-resume (those are: {known})')
    found = [one for one in await _of_kinds(cluster, kinds) if one.job.name == word]
    if len(found) > 1:
        names = ", ".join(one.word for one in found)
        raise SpecError(f'several jobs have the name "{name}": write one of {names}')
    return found[0] if found else None


async def any_job(cluster: Cluster, name: str) -> Object | Resumed:
    """Find a job of any kind; SpecError if there is none.

    A plain name is looked for among the HyperPodPyTorchJobs first.
    """
    job = None if "/" in name else await cluster.find(JOBS, name)
    if job is not None:
        return job
    found = await find_resumed(cluster, name)
    return found if found is not None else await cluster.job(name)


def _names(kind: JobKind) -> tuple[str, ...]:
    """Names by which kubectl knows a kind, in lower case."""
    return (kind.name.lower(), kind.plural, kind.resource)


def summary(job: ResumedJob) -> dict[str, Any]:
    """The values of a job for `unbroken jobs`."""
    last = job.last
    return {
        "kind": job.kind,
        "name": job.name,
        "namespace": job.namespace,
        "state": job.state,
        "restarts": job.restarts,
        "restartsMax": job.restarts_max,
        "lastFault": job.fault,
        "lastLoss": loss_value(last) if last is not None else None,
        "created": job.created,
    }


def loss_value(loss: Loss) -> dict[str, Any]:
    """A loss as JSON."""
    return {
        "restart": loss.restart,
        "culprit": one_line(loss.culprit),
        "fault": one_line(loss.fault),
        "remedy": one_line(loss.remedy),
        "detectedAt": moment(loss.at),
        "decidedAt": moment(loss.decided),
        "ranAgainAt": None if loss.ran is None else moment(loss.ran),
        "seconds": seconds_of(loss),
    }


def moment(at: float) -> str:
    """A time as JSON has it, to the microsecond."""
    return time_text(at, has_microseconds=True)


def seconds_of(loss: Loss) -> float | None:
    """Seconds until the job ran again, to the millisecond."""
    return None if loss.seconds is None else round(loss.seconds, 3)


# --- the list


def listing(jobs: Sequence[Resumed], now: float, *, every: bool, is_wide: bool) -> Listing:
    """The table of `unbroken jobs`; `every`: with namespaces."""
    titles = [*TITLES, *(WIDE if is_wide else ())]
    rows = [_row(one.job, now, is_wide=is_wide) for one in jobs]
    names = [one.word for one in jobs]
    if every:
        titles = ["NAMESPACE", *titles]
        rows = [[one.job.namespace, *row] for one, row in zip(jobs, rows, strict=True)]
        names = [f"{one.job.namespace}/{one.word}" for one in jobs]
    return Listing([summary(one.job) for one in jobs], names, titles, rows)


def _row(job: ResumedJob, now: float, *, is_wide: bool) -> list[object]:
    last = job.last
    row: list[object] = [
        *(job.kind, job.name, job.state, f"{job.restarts} of {job.restarts_max}"),
        *(job.fault or "-", ran_again(job, last), age(job.created, now)),
    ]
    if is_wide:
        row += [one_line(last.culprit), one_line(last.remedy)] if last else ["-", "-"]
    return row


def ran_again(job: ResumedJob, loss: Loss | None) -> str:
    """Return the time until a job ran again after a loss, in words; `-`: unknown."""
    if loss is None:
        return "-"
    if loss.seconds is not None:
        return f"after {span(loss.seconds)}"
    return "not yet" if loss.is_open and loss is job.last else "no"


# --- one job


async def describe(cluster: Cluster, found: Resumed) -> dict[str, Any]:
    """The answer of `unbroken describe` as JSON."""
    pods = await pods_of(cluster, found)
    events = await events_of(cluster, found.job.uid)
    return {
        **summary(found.job),
        "pods": [
            pod_summary(pod) for pod in sorted(pods, key=lambda one: str(one["metadata"]["name"]))
        ],
        "waiting": await fence_waits(cluster, pods),
        "losses": [loss_value(one) for one in found.job.losses],
        "events": event_values(events),
    }


async def pods_of(cluster: Cluster, found: Resumed) -> list[Object]:
    """The pods of a job."""
    label = found.kind.pods_of(found.item)
    return await cluster.select(PODS, f"{found.kind.pod_label}={label}") if label else []


async def events_of(cluster: Cluster, uid: str) -> list[Object]:
    """Events about the object of this uid, oldest first."""
    found = [
        event
        for event in await cluster.select(EVENTS)
        if (event.get("involvedObject") or {}).get("uid") == uid
    ]
    return sorted(found, key=_event_time)


def event_values(events: Sequence[Object]) -> list[dict[str, Any]]:
    """Events as JSON, in their order."""
    return [
        {key: event.get(key) or "" for key in ("type", "reason", "message")}
        | {"time": _event_time(event), "count": event.get("count") or 1}
        for event in events
    ]


def _event_time(event: Object) -> str:
    """The time of an event's last occurrence, as the object has it."""
    times = (event.get("lastTimestamp"), event.get("eventTime"))
    return str(next((one for one in times if one), event["metadata"]["creationTimestamp"]))


def print_description(found: Resumed, value: dict[str, Any], events: Sequence[str]) -> None:
    """Print what `describe` found."""
    job = found.job
    fields = {
        "kind": job.kind,
        "name": f"{job.namespace}/{job.name}",
        "state": job.state,
        "restarts": f"{job.restarts} of {job.restarts_max}",
        "created": job.created,
    }
    for name, text in fields.items():
        print(f"{name + ':':<12}{text}")
    if value["pods"]:
        print()
        rows = [
            [pod["name"], pod["node"] or "-", _phase(pod), pod["restarts"]] for pod in value["pods"]
        ]
        print_table(["POD", "NODE", "PHASE", "RESTARTS"], rows)
    losses = [loss_line(job, one) for one in job.losses]
    sections = {"waiting": value["waiting"], "losses": losses, "events": events}
    for title, lines in sections.items():
        if lines:
            print(f"\n{title}:")
            print("\n".join(f"  {line}" for line in lines))


def _phase(pod: dict[str, Any]) -> str:
    return f"{pod['phase']} ({pod['reason']})" if pod["reason"] else str(pod["phase"])


def loss_line(job: ResumedJob, loss: Loss) -> str:
    """A loss in a line."""
    at = datetime.fromtimestamp(loss.at).astimezone()
    what = f"{at:%m-%d %H:%M:%S}  {_title(loss)}: {one_line(loss.fault)}; {one_line(loss.remedy)}"
    return f"{what}; {_end(job, loss)}" if loss.restart else what


def _title(loss: Loss) -> str:
    return f"restart {loss.restart}" if loss.restart else "no restart"


def _end(job: ResumedJob, loss: Loss) -> str:
    if loss.seconds is not None:
        return f"ran again after {span(loss.seconds)}"
    if loss is not job.last:
        return "did not run again before the next loss"
    return "does not run again yet" if job.state == "Restarting" else "did not run again"


def chosen(job: ResumedJob, number: int | None, *, every: bool) -> Sequence[Loss]:
    """The losses to explain: the restart of this number, the newest loss, or all that are kept."""
    if number is None:
        return job.losses if every else job.losses[-1:]
    found = [one for one in job.losses if one.restart == number]
    if not found:
        known = ", ".join(str(one.restart) for one in job.losses if one.restart) or "none"
        raise SpecError(f"job {job.name} has no record of restart {number} (it has: {known})")
    return found


def explained(job: ResumedJob, losses: Sequence[Loss]) -> dict[str, Any]:
    """The answer of `unbroken explain` as JSON."""
    return {**summary(job), "losses": [loss_value(one) for one in losses]}


def explanation(job: ResumedJob, losses: Sequence[Loss], paper: Paper) -> Iterator[str]:
    """The lines of `unbroken explain`: older losses in a line each, these in full."""
    most = f"{counted(job.restarts, 'restart')} of at most {job.restarts_max}"
    yield paper.paint(f"{job.kind} {job.name}: {job.state}, {most}", "bold")
    older = job.losses[:-1] if losses == job.losses[-1:] else ()
    if older:
        yield ""
    for one in older:
        yield from paper.wrap(loss_line(job, one), 18, first="  ")
    for loss in losses:
        yield ""
        yield from _story(job, loss, paper)
    if not job.losses:
        if job.restarts or job.fault:
            yield from paper.field("fault", job.fault)
            yield from paper.field("", "no details are recorded")
        else:
            yield "no losses so far"


def _story(job: ResumedJob, loss: Loss, paper: Paper) -> Iterator[str]:
    when = f"{datetime.fromtimestamp(loss.at).astimezone():%Y-%m-%d %H:%M:%S}"
    yield from paper.wrap(f"{_title(loss)}, {when}", 2, "bold", "")
    yield from paper.field("culprit", one_line(loss.culprit), "red")
    yield from paper.field("what", one_line(loss.fault))
    yield from paper.field("remedy", one_line(loss.remedy))
    stages = [("detected", loss.at), ("decided", loss.decided)]
    stages += [("runs again", loss.ran)] if loss.ran is not None else []
    for index, (name, at) in enumerate(stages):
        clock = datetime.fromtimestamp(at).astimezone().strftime("%H:%M:%S.%f")[:-3]
        after = f"  {at - loss.at:+.3f} s" if index else ""
        yield from paper.field("" if index else "timeline", f"{clock}  {name:<10}{after}".rstrip())
    if loss.restart:
        yield from paper.field("outcome", _end(job, loss), "yellow")
