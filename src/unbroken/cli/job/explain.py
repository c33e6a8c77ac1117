"""`unbroken explain`: the incidents of a job, with culprit, evidence, remedy and cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Annotated, Any

import typer

from unbroken.cli.completion import JobName
from unbroken.cli.connection import Cluster
from unbroken.cli.options import CommonOptions, Output
from unbroken.cli.show import Paper, paper
from unbroken.core.job.record.timeline import Goodput, lost_steps, redo_seconds
from unbroken.core.job.recovery.words import incident_line
from unbroken.core.wording import counted
from unbroken.errors import SpecError
from unbroken.kube.clock import wall
from unbroken.spec.job.codec import seconds_lost
from unbroken.spec.job.incident import Incident
from unbroken.spec.job.ledger import UNPROVEN, read_ledger
from unbroken.spec.keys import LEDGER
from unbroken.spec.schema.fields import write_record

from .dead_nodes import fence_waits
from .resumed import Resumed, any_job, chosen, explained, explanation, pods_of
from .story import common, story
from .views import (
    advised,
    goodput_line,
    goodput_of,
    goodput_value,
    restarts_text,
    state,
    wait_lines,
)

OLDER_SHOWN = 10
"""Older incidents that get a line each before the newest incident in full."""


def command(
    job: JobName,
    number: Annotated[
        int | None,
        typer.Option(
            "--incident",
            min=1,
            help="Show only this incident, or the restart of this number by auto-resume.",
            show_default="the newest",
        ),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Show every incident in full.")] = False,
    stacks: Annotated[
        bool,
        typer.Option("--stacks", help="Show every group of ranks, every frame and every signal."),
    ] = False,
    *,
    options: CommonOptions,
) -> None:
    """Explain incidents: culprit, evidence, stacks of all ranks, timeline, remedy, reason, cost.

    The newest incident is shown in full, older ones in a line each, the job's goodput at the end.
    For a job of another kind with auto-resume: its losses (the latest 10) with culprit, cause,
    remedy, and the time until it ran again. If jobs of different kinds share a name, write
    KIND/NAME.

    Example: `unbroken explain train --all --stacks`

    Example: `unbroken explain rayjob/train`
    """

    async def read(cluster: Cluster) -> tuple[Resumed | dict[str, Any], list[Incident], list[str]]:
        found = await any_job(cluster, job)
        if isinstance(found, Resumed):
            return found, [], await fence_waits(cluster, await pods_of(cluster, found))
        nodes = await fence_waits(cluster, await cluster.pods(job))
        waiting = [*wait_lines(found), *nodes]
        advice = advised(waiting) if cluster.place.paths is not None else ""
        return found, await cluster.incidents(found), [*waiting, *filter(None, [advice])]

    found, incidents, waiting = options.run(read)
    if isinstance(found, Resumed):
        _explain_resumed(found, number, options.output, waiting, every=every)
        return
    now = wall()
    good = goodput_of(found, incidents, now)
    chosen = _chosen(job, incidents, number)
    if options.output.is_data:
        listed = incidents if number is None else chosen
        value = {"job": job, "state": state(found), "goodput": goodput_value(good)}
        value["waiting"] = waiting
        value["agentProof"] = _agents(found)
        options.output.print({**value, "incidents": list(map(as_value, listed))})
        return
    sheet = paper()
    print(sheet.paint(f"{job}: {state(found)}, {restarts_text(found)}", "bold"))
    if number is None and not every:
        _print_older(incidents[:-1], sheet)
    for one in incidents if every and number is None else chosen:
        print()
        print("\n".join(story(one, sheet, now=now, is_full=stacks)))
    print()
    print("\n".join(_end(incidents, good, sheet, waiting)))
    if _agents(found) == UNPROVEN:
        text = "offer no proof of the job's key (HyperPod's own agent): everybody who can reach "
        print("\n".join(sheet.wrap(f"{text}their ports can command them", 10, first="agents    ")))


def _agents(job: dict[str, Any]) -> str:
    """`proven`, `unproven`, or empty, as of the newest start."""
    return read_ledger((job["metadata"].get("annotations") or {}).get(LEDGER, "")).agents


def _explain_resumed(
    found: Resumed, number: int | None, output: Output, waiting: Sequence[str], *, every: bool
) -> None:
    losses = chosen(found.job, number, every=every)
    if output.is_data:
        listed = found.job.losses if number is None else losses
        output.print({**explained(found.job, listed), "waiting": list(waiting)})
        return
    sheet = paper()
    print("\n".join(explanation(found.job, losses, sheet)))
    print("\n".join(_waits(waiting, sheet)), end="\n" if waiting else "")


def _chosen(job: str, incidents: Sequence[Incident], number: int | None) -> Sequence[Incident]:
    """The incident with this number, or the newest."""
    if number is None:
        return incidents[-1:]
    return [numbered(job, incidents, number)]


def numbered(job: str, incidents: Sequence[Incident], number: int) -> Incident:
    """The incident with this number; SpecError if the job has none."""
    found = next((one for one in incidents if one.number == number), None)
    if found is None:
        known = ", ".join(str(one.number) for one in incidents) or "none"
        raise SpecError(f"job {job} has no incident {number} (it has: {known})")
    return found


def as_value(incident: Incident) -> dict[str, Any]:
    """An incident as JSON: the keys of the object, and the cost."""
    cost = {"seconds": seconds_lost(incident), "lostSteps": lost_steps(incident)}
    return {**write_record(incident), **cost, "redoSeconds": round(redo_seconds(incident), 3)}


def _print_older(incidents: Sequence[Incident], sheet: Paper) -> None:
    hidden = len(incidents) - OLDER_SHOWN
    if incidents:
        print()
    if hidden > 0:
        print(f"  {counted(hidden, 'older incident')}: --all")
    for one in incidents[-OLDER_SHOWN:]:
        at = datetime.fromtimestamp(one.detected_at).astimezone()
        line = f"{at:%m-%d %H:%M:%S}  {incident_line(one)}"
        print("\n".join(sheet.wrap(line, 18, first="  ")))


def _end(
    incidents: Sequence[Incident], good: Goodput, sheet: Paper, waiting: Sequence[str]
) -> Iterator[str]:
    yield from _waits(waiting, sheet)
    if not incidents and not waiting:
        yield "no incidents so far"
    if pattern := common(incidents):
        yield from sheet.wrap(pattern, 10, first="in common ")
    yield from sheet.wrap(goodput_line(good), 10, first="goodput   ")


def _waits(waiting: Sequence[str], sheet: Paper) -> Iterator[str]:
    for index, line in enumerate(waiting):
        first = " " * 10 if index else "waits for "
        is_command = line.startswith("kubectl ")  # it stays whole, to be copied
        yield from [first + line] if is_command else sheet.wrap(line, 10, first=first)
