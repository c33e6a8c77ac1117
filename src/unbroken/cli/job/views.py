"""Values and texts that commands show of jobs, their goodput, pods and incidents.  Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from unbroken.core.job.obstacles import split_wait
from unbroken.core.job.record.timeline import TWICE, Goodput, goodput
from unbroken.core.job.recovery.words import incident_line
from unbroken.core.wording import counted
from unbroken.foreign_numbers import INT32_MAX, whole_number
from unbroken.spec.job.codec import incident_from, job_status_from
from unbroken.spec.job.incident import Incident, Remedy
from unbroken.spec.job.ledger import Ledger, read_ledger
from unbroken.spec.keys import LEDGER, ConditionType
from unbroken.spec.times import time_seconds

Object = Mapping[str, Any]

STATES = frozenset(one.value for one in ConditionType)
"""Types of conditions that are states; the last one that is True is the job's state."""
ENDED = ("Completed", "Failed")

UNLABELLED = re.compile(r"No node has the label ([\w./-]+=[\w.-]*\w)", re.ASCII)
LACKING = re.compile(r"Insufficient ([\w./-]*\w)")
OPTIONS = {
    "cpu": "--cpu-per-node N",
    "memory": "--memory-per-node SIZE",
    "nvidia.com/gpu": "--gpu-per-node N",
}
READY = re.compile(r"(\d{1,9})/\d{1,9}$", re.ASCII)
LINE_LENGTH = 200
WAIT_LENGTH = 500
RESUMED = "resumed"
STAGES = (
    ("last progress", "progress_before"),
    ("detected", "detected_at"),
    ("examined", "examined_at"),
    ("stopped", "stopped_at"),
    ("ready", "ready_at"),
    ("started", "started_at"),
    ("first output", "first_output_at"),
    (RESUMED, "progress_at"),
)


def condition(job: Object) -> Object:
    """The condition that is the job's state; empty if the job has no state yet."""
    for one in reversed((job.get("status") or {}).get("conditions") or ()):
        if one["type"] in STATES and one["status"] == "True":
            return dict(one)
    return {}


def state(job: Object) -> str:
    """The job's state, such as Running; Pending before the operator has seen the job."""
    return str(condition(job).get("type", "Pending"))


def replicas(job: Object, field: str = "replicas") -> int:
    """Sum of a number over the replica specs; `replicas` counts the pods that train."""
    return sum(int(one.get(field) or 0) for one in job["spec"].get("replicaSpecs") or ())


def world_size(job: Object, counts: Iterable[int | None]) -> int | None:
    """World size of the job, from worker `counts` of its agents, else from its spec.

    None if it is not known.
    """
    given = whole_number(str(job["spec"].get("nprocPerNode", "")), 0, INT32_MAX)
    count = max((one for one in counts if one), default=given or 0)
    return replicas(job) * count or None


def job_summary(job: Object) -> dict[str, Any]:
    """The values of a job for `unbroken jobs`."""
    metadata, status = job["metadata"], job.get("status") or {}
    faulty = status.get("latestFaultyPodInstanceList") or {}
    fault: Object = next((c for c in status.get("conditions") or () if c["type"] == "Faulted"), {})
    now = condition(job)
    return {
        "name": metadata["name"],
        "namespace": metadata["namespace"],
        "state": state(job),
        "reason": now.get("reason", ""),
        "message": now.get("message", ""),
        "replicas": replicas(job),
        "ready": ready_pods(job),
        "spares": replicas(job, "spares"),
        "restarts": int(status.get("restartCount") or 0),
        "lastFault": fault.get("reason", ""),
        "faultyPods": faulty.get("faultyPodList") or [],
        "created": metadata["creationTimestamp"],
        "started": status.get("startTime"),
        "completed": status.get("completionTime"),
    }


def ready_pods(job: Object) -> int:
    """Ready pods among the pods that train, as the operator counts them.

    `kubectl get hpj` shows the same number.  A job that has ended has no ready pods.
    """
    conditions = (job.get("status") or {}).get("conditions") or ()
    texts = (
        str(c.get("message", ""))
        for c in conditions
        if c["type"] == ConditionType.PODS_RUNNING.value
    )
    found = READY.match(next(texts, ""))
    return (whole_number(found[1]) or 0) if found else 0


def is_ready(item: Object) -> bool:
    """True if the condition Ready of a pod or a node is True."""
    conditions = (item.get("status") or {}).get("conditions") or ()
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def pod_summary(pod: Object) -> dict[str, Any]:
    """The values of a pod for `unbroken describe`."""
    status, metadata = pod.get("status") or {}, pod["metadata"]
    containers = status.get("containerStatuses") or ()
    waiting: Object = next(
        (c["state"]["waiting"] for c in containers if "waiting" in c["state"]), {}
    )
    unplaced: Object = next(
        (
            one
            for one in status.get("conditions") or ()
            if (one["type"], one["status"]) == ("PodScheduled", "False")
        ),
        {},
    )
    trouble = waiting or unplaced
    phase = "Terminating" if metadata.get("deletionTimestamp") else status.get("phase", "Unknown")
    return {
        "name": metadata["name"],
        "node": pod["spec"].get("nodeName", ""),
        "address": status.get("podIP", ""),
        "phase": phase,
        "ready": is_ready(pod),
        "restarts": sum(c.get("restartCount", 0) for c in containers),
        "reason": status.get("reason") or trouble.get("reason", ""),
        "message": status.get("message") or trouble.get("message", ""),
    }


def waits(pods: Iterable[Mapping[str, Any]]) -> list[str]:
    """The reasons why pods are pending, each with its pods (`pod_summary`)."""
    found: dict[str, list[str]] = {}
    for pod in pods:
        if pod["message"] and pod["phase"] == "Pending":
            # The rest of the message is about preemption of jobs with other priorities.
            why = pod["message"].partition(" preemption: ")[0]
            found.setdefault(f"{pod['reason']}: {why}", []).append(pod["name"])
    return [f"{', '.join(names)}: {why}" for why, names in found.items()]


def wait_lines(job: Object, pods: Iterable[Mapping[str, Any]] = ()) -> list[str]:
    """The reasons why the job has not started: from the operator, then from its pods.

    `pods`: of `pod_summary`.  A reason that the operator has named is not repeated.
    """
    named = split_wait(str(condition(job).get("message", "")))[1]
    reasons = {line.split(": ")[1] for line in named if line.startswith("pod ") and ": " in line}
    others = (line for line in waits(pods) if line.split(": ")[1] not in reasons)
    return [*(line[:WAIT_LENGTH] for line in named), *others]


def advised(waiting: Iterable[str]) -> str:
    """The command that makes a local cluster offer missing resources and labels; empty if none is
    missing."""
    lines = list(waiting)
    lacking = {name for line in lines for name in LACKING.findall(line)}
    labels = {label for line in lines for label in UNLABELLED.findall(line)}
    options = [OPTIONS.get(name, f"--resource {name}=N") for name in sorted(lacking)]
    options += [f"--label {label}" for label in sorted(labels)]
    if not options:
        return ""
    return f"to pretend that nodes have it: unbroken down; unbroken up {' '.join(options)}"


def read_incidents(objects: Iterable[Object]) -> list[Incident]:
    """Read incidents from their objects, oldest first."""
    return sorted((incident_from(one)[0] for one in objects), key=lambda one: one.number)


def incident_lines(incident: Incident) -> list[str]:
    """An incident for a user who follows the job and sees the output of rank 0.

    A line, the reason if ranks had to be compared, and the last output of a worker that failed the
    job.
    """
    culprit = incident.culprit
    is_unseen = incident.remedy is Remedy.FAIL and culprit.rank != 0
    is_said = incident.blame.removeprefix(f"rank {culprit.rank} ") in culprit.text
    because = [] if is_said else [f"  {incident.blame} ({incident.confidence})"]
    return [incident_line(incident), *because, *(f"  | {x}" for x in culprit.evidence if is_unseen)]


def stages(incident: Incident) -> list[tuple[str, float, float]]:
    """The stages reached: name, seconds since the epoch, seconds since the detection.

    The first output is left out where steps show when training resumed.
    """
    has_step = incident.resumed_step is not None
    shown = [one for one in STAGES if not (has_step and one[1] == "first_output_at")]
    reached = [(name, getattr(incident, field)) for name, field in shown]
    # Workers may write before the last agent has said that it runs them.
    ordered = sorted(((name, at) for name, at in reached if at is not None), key=lambda one: one[1])
    return [(name, at, at - incident.detected_at) for name, at in ordered]


def first_line(text: str) -> str:
    """The first line, shortened; a message may quote a long traceback."""
    line = text.partition("\n")[0]
    return line if len(line) <= LINE_LENGTH else f"{line[: LINE_LENGTH - 3]}..."


def exit_code(job: Object, incidents: Sequence[Incident]) -> int:
    """Exit code for a command that ran the job: 0, or that of the worker that failed the job."""
    if state(job) == "Completed":
        return 0
    code = incidents[-1].culprit.exit_code if incidents else None
    return code or 1


def restarts_text(job: Object) -> str:
    """The number of restarts as `2 restarts`."""
    return counted(job_status_from(job.get("status"))[0].restart_count, "restart")


def span(seconds: float) -> str:
    """A duration with suitable precision: `3.214 s`, `4m 50s`, `2h 03m`, `3d 04h`."""
    if seconds < 60:
        return f"{seconds:.3f} s" if seconds < 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if not hours:
        return f"{minutes}m {rest:02}s"
    days, hours = divmod(hours, 24)
    return f"{days}d {hours:02}h" if days else f"{hours}h {minutes:02}m"


def age(created: str, now: float) -> str:
    """The age as kubectl shows it."""
    seconds = max(0, int(now - time_seconds(created)))
    for unit, size, most in (("s", 1, 120), ("m", 60, 120), ("h", 3600, 48)):
        if seconds < size * most:
            return f"{seconds // size}{unit}"
    return f"{seconds // 86400}d"


CAUSES_SHOWN = 3


def ledger_of(job: Object) -> Ledger:
    """The record of the job's past in its annotation."""
    annotations = job["metadata"].get("annotations") or {}
    return read_ledger(str(annotations.get(LEDGER) or ""))


def goodput_of(job: Object, incidents: Iterable[Incident], now: float) -> Goodput:
    """The parts of the job's time until now or until its end."""
    created = time_seconds(job["metadata"]["creationTimestamp"])
    status = job_status_from(job.get("status"))[0]
    return goodput(status, incidents, ledger_of(job), now, created)


def goodput_value(found: Goodput) -> dict[str, Any]:
    """Goodput as JSON: seconds, and the share from 0 to 1 (null: not known)."""
    return {
        "share": None if found.share is None else round(found.share, 4),
        "totalSeconds": round(found.total, 3),
        "startupSeconds": round(found.startup, 3),
        "productiveSeconds": round(found.productive, 3),
        "lostSeconds": {name: round(value, 3) for name, value in found.lost.items()},
        "lostSteps": found.steps,
        "incidentsOfUnknownCost": found.unknown,
        "suspendedSeconds": round(found.suspended, 3),
    }


def share_text(share: float | None) -> str:
    """The share as `97.3%`, rounded down: only a job that lost nothing has 100."""
    return "-" if share is None else f"{int(share * 1000) / 10:.1f}%"


def cause_text(cause: str) -> str:
    """The name of a cause of lost time."""
    return "repeated steps" if cause == TWICE else cause


def largest(value: dict[str, Any]) -> str:
    """The largest cause of lost time in a `goodput_value`, as `Stalled 12.3 s`."""
    parts = {"start-up": value["startupSeconds"]}
    parts |= {cause_text(name): seconds for name, seconds in value["lostSeconds"].items()}
    name = max(parts, key=lambda one: parts[one])
    return f"{name} {span(parts[name])}" if parts[name] else "-"


def goodput_line(found: Goodput) -> str:
    """A line with the share and the causes of lost time."""
    lost = [f"{cause_text(name)} {span(value)}" for name, value in found.lost.items()]
    rest = len(lost) - CAUSES_SHOWN
    lost = [*lost[:CAUSES_SHOWN], *([f"{counted(rest, 'other cause')}"] if rest > 0 else [])]
    parts = [f"start-up {span(found.startup)}", *lost]
    head = "not known: no step and no line that recurs so far"
    if found.share is not None:
        head = f"{share_text(found.share)} of {span(found.total)}"
    unknown = f"; {counted(found.unknown, 'incident')} of unknown cost" if found.unknown else ""
    return f"{head}; {', '.join(parts)}{unknown}"


def goodput_parts(value: Mapping[str, Any]) -> list[tuple[str, float]]:
    """The parts of a `goodput_value` with their seconds, which add up to its total."""
    lost = value["lostSeconds"]
    return [
        ("productive", value["productiveSeconds"]),
        ("start-up", value["startupSeconds"]),
        *((f"lost: {cause_text(name)}", seconds) for name, seconds in lost.items()),
    ]


def goodput_rows(value: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Rows (part, time, share of the total) of a `goodput_value`."""
    total = value["totalSeconds"]
    for name, seconds in goodput_parts(value):
        yield name, span(seconds), share_text(seconds / total if total else None)
    if value["suspendedSeconds"]:
        yield "suspended", span(value["suspendedSeconds"]), "not counted"
