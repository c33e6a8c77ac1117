"""A job's goodput for commands: share, parts, causes of lost time.  Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from unbroken.core.job.record.timeline import TWICE, Goodput, goodput
from unbroken.core.wording import counted
from unbroken.spec.job.codec import job_status_from
from unbroken.spec.job.incident import Incident
from unbroken.spec.job.ledger import Ledger, read_ledger
from unbroken.spec.keys import LEDGER
from unbroken.spec.times import time_seconds

from .views import Object, span

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


def goodput_rows(value: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Rows (part, time, share of the total) of a `goodput_value`."""
    total = value["totalSeconds"]
    lost = value["lostSeconds"]
    parts = [("productive", value["productiveSeconds"]), ("start-up", value["startupSeconds"])]
    parts += [(f"lost: {cause_text(name)}", seconds) for name, seconds in lost.items()]
    for name, seconds in parts:
        yield name, span(seconds), share_text(seconds / total if total else None)
    if value["suspendedSeconds"]:
        yield "suspended", span(value["suspendedSeconds"]), "not counted"
