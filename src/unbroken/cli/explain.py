"""`unbroken explain`: what broke, who did it, what was done about it, and what it cost."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Annotated, Any

import typer

from unbroken.errors import SpecError
from unbroken.spec.codec import seconds_lost
from unbroken.spec.incident import Incident, Signal
from unbroken.spec.write import write_record

from .cluster import Cluster, on_cluster
from .complete import JobName
from .place import Context, Embedded, Form, Namespace, Output, find
from .show import print_json
from .views import WORDS, culprit_text, restarts_text, stages, state

WIDTH = 11
"""Of the column of names."""


def command(
    job: JobName,
    number: Annotated[
        int | None, typer.Option("--incident", min=1, help="This one only.", show_default="all")
    ] = None,
    namespace: Namespace = "",
    output: Form = Output.TEXT,
    directory: Embedded = None,
    context: Context = None,
) -> None:
    """Tell each fault of a job: timeline, culprit, evidence, remedy and why, cost."""

    async def read(cluster: Cluster) -> tuple[dict[str, Any], list[Incident]]:
        found = await cluster.job(job)
        return found, await cluster.incidents(found)

    found, incidents = on_cluster(find(directory, context), namespace, read)
    if number is not None:
        known = ", ".join(str(one.number) for one in incidents) or "none"
        incidents = [one for one in incidents if one.number == number]
        if not incidents:
            raise SpecError(f"job {job} has no incident {number} (it has: {known})")
    if output is Output.JSON:
        print_json({"job": job, "state": state(found), "incidents": list(map(as_value, incidents))})
        return
    print(f"{job}: {state(found)}, {restarts_text(found)}")
    if not incidents:
        print("nothing has broken so far")
    for one in incidents:
        print()
        print("\n".join(story(one)))


def as_value(incident: Incident) -> dict[str, Any]:
    """An incident for a program: the object's own keys, and the seconds it cost."""
    return {**write_record(incident), "seconds": seconds_lost(incident)}


def story(incident: Incident) -> Iterator[str]:
    """An incident for a person, line by line."""
    culprit = incident.culprit
    yield f"incident {incident.number} (attempt {incident.attempt}): {culprit.fault}"
    yield _field("culprit", culprit_text(culprit))
    yield _field("what", culprit.text)
    for line in culprit.evidence:
        yield _field("", f"| {line}")
    yield _field("remedy", f"{incident.remedy.value}: {WORDS[incident.remedy][0]}")
    yield _field("why", incident.reason)
    for index, (name, at, since) in enumerate(stages(incident)):
        after = "" if index == 0 else f"  +{since:.3f} s"
        yield _field("" if index else "timeline", f"{_clock(at)}  {name:<13}{after}".rstrip())
    others = [one for one in incident.signals if one != culprit]
    for index, one in enumerate(others):
        yield _field("" if index else "also seen", _also(one, incident.detected_at))
    cost = seconds_lost(incident)
    yield _field("cost", "still open" if cost is None else f"{cost:.3f} s")
    if incident.outcome:
        yield _field("outcome", incident.outcome)


def _field(name: str, text: str) -> str:
    return f"  {name:<{WIDTH}}{text}"


def _also(signal: Signal, detected_at: float) -> str:
    since = signal.at - detected_at
    return f"{since:+.3f} s  {culprit_text(signal)}: {signal.fault}: {signal.text}"


def _clock(at: float) -> str:
    """Local time of day with milliseconds."""
    return datetime.fromtimestamp(at).astimezone().strftime("%H:%M:%S.%f")[:-3]
