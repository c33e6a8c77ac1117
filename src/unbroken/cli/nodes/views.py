"""Rows and reports that `unbroken nodes` shows.  Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from unbroken.cli.job.views import is_ready, span
from unbroken.cli.show import Paper
from unbroken.core.nodes import blame
from unbroken.spec import keys
from unbroken.spec.job_kinds import is_pod_of_a_job
from unbroken.spec.nodes.kinds import (
    NODE_RECORD,
    BlameEntry,
    NodeRecordSpec,
    RepairRecord,
    RepairState,
)
from unbroken.spec.nodes.values import instance_type_of
from unbroken.spec.schema.fields import write_record
from unbroken.spec.times import time_text

Object = dict[str, Any]
TITLES = ("NAME", "STATUS", "HEALTH", "TYPE", "GROUP", "PODS", "REPAIR", "SCORE")
WIDE = ("CLUSTER", "CHECK", "FAULT", "BOOT", "MESSAGE")
SCORE_DIGITS = 1


def node_row(
    node: Object, record: Object | None, pods: Iterable[Object], now: float
) -> dict[str, Any]:
    """The values of a node, for the table and as JSON."""
    metadata, status = node["metadata"], node.get("status") or {}
    labels = metadata.get("labels") or {}
    annotations = metadata.get("annotations") or {}
    held = record_of(record)
    name = metadata["name"]
    repair = held.repair
    return {
        "name": name,
        "ready": is_ready(node),
        "schedulable": not _taints(node) and not (node.get("spec") or {}).get("unschedulable"),
        "health": labels.get(keys.HEALTH, ""),
        "deepHealthCheck": labels.get(keys.DEEP_CHECK, ""),
        "instanceType": instance_type_of(labels),
        "instanceGroup": labels.get(keys.INSTANCE_GROUP, ""),
        "cluster": labels.get(keys.CLUSTER_NAME, ""),
        "faultTypes": labels.get(keys.FAULT_TYPES, ""),
        "faultReasons": labels.get(keys.FAULT_REASONS, ""),
        "bootId": (status.get("nodeInfo") or {}).get("bootID", ""),
        "ordered": annotations.get(keys.REPAIR, ""),
        "advice": annotations.get(keys.ADVICE, ""),
        "verified": annotations.get(keys.VERIFIED, ""),
        "jobPods": sorted(_pod_name(pod) for pod in pods if _is_on(pod, name)),
        "repair": None if repair is None else write_record(repair),
        "score": round(blame.score(held, now), 2),
        "quarantined": None if held.quarantined_at is None else held.quarantine_reason,
    }


def record_of(record: Object | None) -> NodeRecordSpec:
    """The record of a node; an empty one if it has none."""
    return NodeRecordSpec() if record is None else NODE_RECORD.spec_of(record)[0]


def _taints(node: Object) -> list[str]:
    taints = (node.get("spec") or {}).get("taints") or ()
    return [str(taint["key"]) for taint in taints if taint.get("effect") != "PreferNoSchedule"]


def with_belongings(
    nodes: Iterable[Object], records: Iterable[Object], pods: Iterable[Object]
) -> Iterator[tuple[Object, Object | None, Sequence[Object]]]:
    """Each node with its record and its pods: the first parameters of `node_row`.

    Going through all pods for each node takes seconds if there are thousands.
    """
    record_of_node = {str(record["metadata"]["name"]): record for record in records}
    pods_of_node: dict[str, list[Object]] = {}
    for pod in pods:
        pods_of_node.setdefault(str((pod.get("spec") or {}).get("nodeName", "")), []).append(pod)
    for node in nodes:
        name = str(node["metadata"]["name"])
        yield node, record_of_node.get(name), pods_of_node.get(name, ())


def _pod_name(pod: Object) -> str:
    metadata = pod["metadata"]
    return f"{metadata['namespace']}/{metadata['name']}"


def _is_on(pod: Object, node: str) -> bool:
    labels = pod["metadata"].get("labels") or {}
    phase = (pod.get("status") or {}).get("phase")
    return (pod.get("spec") or {}).get("nodeName") == node and is_pod_of_a_job(labels, phase)


def status_text(row: Mapping[str, Any]) -> str:
    """The status as `Ready` or `NotReady`, and the reason if the node takes no pods."""
    words = ["Ready" if row["ready"] else "NotReady"]
    if row["quarantined"] is not None:
        words.append("Quarantined")
    elif not row["schedulable"]:
        words.append("NoPods")
    return ",".join(words)


def repair_text(row: Mapping[str, Any]) -> str:
    """The current repair as `reboot (Draining)`; `-` if there is none."""
    repair = row["repair"]
    if repair is None:
        return f"{row['ordered']} (ordered)" if row["ordered"] else "-"
    action = "burn-in" if repair["action"] == "none" else repair["action"]
    return f"{action} ({repair['state']})"


def cells(row: Mapping[str, Any], *, is_wide: bool) -> list[object]:
    """The row of a node."""
    shown: list[object] = [
        row["name"],
        status_text(row),
        row["health"] or "-",
        row["instanceType"] or "-",
        row["instanceGroup"] or "-",
        len(row["jobPods"]),
        repair_text(row),
        f"{row['score']:.{SCORE_DIGITS}f}",
    ]
    if is_wide:
        message = (row["repair"] or {}).get("message") or row["quarantined"] or "-"
        shown += [
            row["cluster"] or "-",
            row["deepHealthCheck"] or "-",
            row["faultReasons"] or "-",
            row["bootId"][:8] or "-",
            message,
        ]
    return shown


def story(
    row: Mapping[str, Any], node: Object, record: Object | None, now: float, paper: Paper
) -> Iterator[str]:
    """Lines of the report about a node."""
    held = record_of(record)
    yield paper.paint(f"{row['name']}: {status_text(row)}", "bold")
    for name, text in (
        ("health", row["health"]),
        ("deep check", row["deepHealthCheck"]),
        ("type", " ".join(filter(None, (row["instanceType"], row["instanceGroup"])))),
        ("cluster", row["cluster"]),
        ("fault", " ".join(filter(None, (row["faultTypes"], row["faultReasons"])))),
        ("boot", row["bootId"]),
        ("verified", row["verified"]),
        ("pods", ", ".join(row["jobPods"])),
    ):
        if text:
            yield from paper.field(name, text)
    for condition in fault_conditions(node):
        yield from paper.field("condition", condition, "red")
    if held.repair is not None:
        yield from paper.field("repair", repair_line(held.repair, now), "yellow")
    if held.quarantined_at is not None:
        text = f"since {_at(held.quarantined_at)}: {held.quarantine_reason}"
        yield from paper.field("quarantine", text, "red")
        yield from paper.field("", f"unbroken nodes clear {row['name']} --why TEXT")
    if held.probation_until is not None and held.probation_until > now:
        text = f"for {span(held.probation_until - now)}: a fault now goes one rung up"
        yield from paper.field("probation", text)
    yield from paper.field("score", score_line(held, now))
    if held.history:
        yield ""
        yield "repairs, newest first:"
        for repair in reversed(held.history):
            yield from paper.wrap(repair_line(repair, now), 4, first="  ")


def score_line(held: NodeRecordSpec, now: float) -> str:
    """The blame score and the limit for quarantine."""
    points = blame.score(held, now)
    entries = "1 entry" if len(held.blame) == 1 else f"{len(held.blame)} entries"
    text = f"{points:.1f} points in {entries}; quarantine from {blame.LIMIT:.0f}"
    most = blame.LIMIT * blame.SPACE_SHARE
    is_capped = (
        sum(blame.points(blame_entry, now) for blame_entry in _counting(held)) > points + 0.05
    )
    return f"{text}; incidents of one namespace count at most {most:.1f}" if is_capped else text


def _counting(held: NodeRecordSpec) -> list[BlameEntry]:
    cleared = held.cleared_at or float("-inf")
    return [blame_entry for blame_entry in held.blame if blame_entry.at > cleared]


def repair_line(repair: RepairRecord, now: float) -> str:
    """A repair in a line."""
    action = "burn-in" if repair.action.value == "none" else repair.action.value
    end = repair.ended_at
    took = span(max(0.0, (now if end is None else end) - repair.began_at))
    message = f": {repair.message}" if repair.message else ""
    place = f" -> {repair.replacement}" if repair.replacement else ""
    when = f"{_at(repair.began_at)} {action}{place} {repair.state.value}"
    return f"{when} after {took} ({repair.asked_by}: {repair.reason}){message}"


def blame_rows(held: NodeRecordSpec, now: float) -> list[list[object]]:
    """Rows of the blame entries of a node, newest first."""
    points = blame.points_at(held, now)
    return [
        [
            _at(blame_entry.at),
            blame_entry.kind.value,
            blame_entry.source,
            f"{left:.1f}",
            f"{blame_entry.weight:.1f}",
            blame_entry.text,
        ]
        for blame_entry, left in reversed(list(zip(held.blame, points, strict=True)))
    ]


def _at(seconds: float) -> str:
    return time_text(seconds)


def fault_conditions(node: Object) -> Iterator[str]:
    """Conditions of a node that are faults, a line each."""
    for item in (node.get("status") or {}).get("conditions") or ():
        is_fault = (
            item["type"] in (keys.GPU_UNHEALTHY, keys.HARDWARE_UNHEALTHY)
            and item["status"] == "True"
        )
        if is_fault or (item["type"] == "Ready" and item["status"] != "True"):
            reason, message = item.get("reason", ""), item.get("message", "")
            yield f"{item['type']}={item['status']} {reason}: {message}"


def progress_line(name: str, repair: RepairRecord) -> str:
    """The progress of a repair in a line."""
    text = {
        RepairState.WAITING: "waits",
        RepairState.DRAINING: "jobs move off",
        RepairState.ACTING: f"{repair.action.value} under way",
        RepairState.CHECKING: "is back, and is being tested",
        RepairState.DONE: "done",
        RepairState.FAILED: "failed",
    }[repair.state]
    is_said = not repair.message or repair.message in text or text in repair.message
    return f"{name}: {repair.message or text}" if is_said else f"{name}: {text} ({repair.message})"
