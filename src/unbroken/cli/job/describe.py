"""`unbroken describe`: a job with its pods, ranks, incidents and events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from unbroken.cli.completion import JobName
from unbroken.cli.connection import Cluster
from unbroken.cli.options import CommonOptions
from unbroken.cli.show import print_table
from unbroken.core.job.obstacles import split_wait
from unbroken.core.job.recovery.words import incident_line
from unbroken.kube.clock import wall

from . import resumed
from .agents import TITLES, agent_value, bound_lines, others_line, rank_rows, reports, warm_lines
from .dead_nodes import fence_waits
from .detectors import detector_values, promotion
from .explain import as_value
from .resumed import Resumed, any_job
from .snapshots import (
    LOSS_TITLES,
    UNREACHED,
    loss_rows,
    shortage_lines,
    shortage_values,
    snapshot_lines,
    snapshot_values,
)
from .views import (
    advised,
    first_line,
    goodput_of,
    goodput_rows,
    goodput_value,
    job_summary,
    pod_summary,
    wait_lines,
)

EVENTS_SHOWN = 12
LINE_SHOWN = 60


def command(job: JobName, options: CommonOptions) -> None:
    """Show a job: state, pods, ranks, detectors, goodput, snapshots, incidents, latest events.

    Jobs of other kinds with auto-resume have state, restarts, pods, losses and latest events.

    Example: `unbroken describe train`
    """

    async def read(cluster: Cluster) -> tuple[dict[str, Any], Resumed | None, bool]:
        is_local = cluster.place.paths is not None
        found = await any_job(cluster, job)
        if isinstance(found, Resumed):
            return await resumed.describe(cluster, found), found, is_local
        return await describe(cluster, found), None, is_local

    value, other, is_local = options.run(read)
    if options.output.is_data:
        options.output.print(value)
    elif other is not None:
        resumed.print_description(other, value, list(_events(value)))
    else:
        _show(value, is_local=is_local)


async def describe(cluster: Cluster, job: dict[str, Any]) -> dict[str, Any]:
    """The whole answer as JSON."""
    pods = await cluster.pods(job["metadata"]["name"])
    agents = await reports(cluster, pods)
    incidents = await cluster.incidents(job)
    events = await resumed.events_of(cluster, job["metadata"]["uid"])
    shown = [pod_summary(pod) for pod in sorted(pods, key=lambda one: str(one["metadata"]["name"]))]
    return {
        **job_summary(job),
        "conditions": (job.get("status") or {}).get("conditions") or [],
        "pods": [
            {**pod, "agent": agent_value(agents[pod["name"]]) if pod["name"] in agents else None}
            for pod in shown
        ],
        "waiting": [*wait_lines(job, shown), *await fence_waits(cluster, pods)],
        "goodput": goodput_value(goodput_of(job, incidents, wall())),
        "snapshots": snapshot_values(shown, agents),
        "shortages": shortage_values(shown, agents),
        "unreached": UNREACHED if cluster.place.paths is None else "",
        "detectors": detector_values(job),
        "incidents": [{**as_value(one), "summary": incident_line(one)} for one in incidents],
        "events": resumed.event_values(events),
    }


def _show(found: dict[str, Any], *, is_local: bool) -> None:
    message, _ = split_wait(found["message"])
    fields = {
        "name": f"{found['namespace']}/{found['name']}",
        "state": " ".join(filter(None, (found["state"], _in_brackets(first_line(message))))),
        "pods": f"{found['ready']} ready, {found['replicas']} train, {found['spares']} spare",
        "restarts": found["restarts"],
        "created": found["created"],
        "completed": found["completed"] or "-",
    }
    for name, value in fields.items():
        print(f"{name + ':':<12}{value}")
    if found["pods"]:
        print()
        rows = map(_pod_row, found["pods"])
        print_table(["POD", "NODE", "PHASE", "RESTARTS", "AGENT", "RANKS (PIDS)"], rows)
    _show_watch(found)
    rules = [row for pod in found["pods"] for row in _rule_rows(pod)]
    if rules:
        print()
        titles = ["LOG RULE", "POD", "STATE", "LOGGED BY", "MATCHES", "LAST MATCH", "RANK", "LINE"]
        print_table(titles, rules)
    if found["goodput"]["totalSeconds"]:
        print("\ngoodput:")
        print_table(*_indented(["PART", "TIME", "SHARE"], goodput_rows(found["goodput"])))
    _show_snapshots(found)
    waiting = found["waiting"].copy()
    if is_local and (advice := advised(waiting)):
        waiting.append(advice)
    agents = {pod["name"]: pod["agent"] for pod in found["pods"] if pod["agent"]}
    sections = {
        "next start": warm_lines(agents),
        "detectors": [*_detectors(found), *bound_lines(_ranks(found))],
        "waiting": waiting,
        "incidents": _incidents(found),
        "events": _events(found),
    }
    for title, lines in sections.items():
        listed = list(lines)
        if listed:
            print(f"\n{title}:")
            print("\n".join(f"  {line}" for line in listed))


def _ranks(found: dict[str, Any]) -> list[dict[str, Any]]:
    """All ranks as their agents report them, in order."""
    ranks = [
        {**one, "pod": pod["name"]}
        for pod in found["pods"]
        for one in (pod["agent"] or {}).get("watch", ())
    ]
    return sorted(ranks, key=lambda one: int(one["rank"]))


def _show_watch(found: dict[str, Any]) -> None:
    """Print the table of ranks from the watchdogs of the agents."""
    if ranks := _ranks(found):
        now = wall()
        print()
        if rows := list(rank_rows(ranks, now)):
            print_table(TITLES, rows)
        if line := others_line(ranks, now):
            print(line)


def _show_snapshots(found: dict[str, Any]) -> None:
    """Print what snapshots cost and save, or why that is not known."""
    if found["unreached"] and found["state"] == "Running":
        print(f"\nsnapshots:\n  {found['unreached']}")
    if found["shortages"]:
        print("\nmemory of snapshots:")
        print("\n".join(f"  {line}" for line in shortage_lines(found["shortages"])))
    for one in found["snapshots"]:
        print("\nsnapshots:")
        print("\n".join(f"  {line}" for line in snapshot_lines(one)))
        print()
        print_table(*_indented(LOSS_TITLES, loss_rows(one["losses"])))


def _indented(
    titles: Sequence[str], rows: Iterable[Sequence[object]]
) -> tuple[list[str], list[list[object]]]:
    first, *rest = titles
    return [f"  {first}", *rest], [[f"  {one[0]}", *one[1:]] for one in rows]


def _detectors(found: dict[str, Any]) -> Iterator[str]:
    """A line for each mode with its detectors and their right and wrong alarms on this job."""
    by_mode: dict[str, list[str]] = {}
    for one in found["detectors"]:
        counts = [f"{one[key]} {key}" for key in ("right", "wrong") if one[key]]
        name = " ".join(filter(None, (one["detector"], _in_brackets(", ".join(counts)))))
        by_mode.setdefault(one["mode"], []).append(name)
    for mode in ("act", "warn", "shadow", "off"):
        if mode in by_mode:
            yield f"{mode + ':':<8}{', '.join(by_mode[mode])}"
    if hint := promotion(found["name"], found["detectors"]):
        yield hint


def _in_brackets(text: str) -> str:
    return f"({text})" if text else ""


def _pod_row(pod: dict[str, Any]) -> list[object]:
    agent = pod["agent"] or {"state": "-", "workers": []}
    ranks = " ".join(f"{one['rank']} ({one['pid']})" for one in agent["workers"])
    phase = pod["phase"] + (f" {_in_brackets(pod['reason'])}" if pod["reason"] else "")
    return [pod["name"], pod["node"] or "-", phase, pod["restarts"], agent["state"], ranks or "-"]


def _rule_rows(pod: dict[str, Any]) -> Iterator[list[object]]:
    for rule in (pod["agent"] or {"logRules": ()})["logRules"]:
        yield [
            *(rule["name"], pod["name"], rule["state"], rule["ranks"], rule["matches"]),
            rule["lastMatch"] or "-",
            "-" if rule["lastRank"] is None else rule["lastRank"],
            rule["lastLine"][:LINE_SHOWN] or "-",
        ]


def _incidents(found: dict[str, Any]) -> Iterator[str]:
    return (one["summary"] for one in found["incidents"])


def _events(found: dict[str, Any]) -> Iterator[str]:
    for one in found["events"][-EVENTS_SHOWN:]:
        times = f" (x{one['count']})" if one["count"] > 1 else ""
        what = f"{one['reason']}: {first_line(one['message'])}{times}"
        yield f"{one['time']}  {one['type']:<7}  {what}"
