"""The pages of nodes as JSON: all nodes with the links between them, and one node over time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from unbroken.cli.connection import CHECKS, NODES, PODS, RECORDS, Cluster, Object
from unbroken.cli.nodes.views import (
    fault_conditions,
    node_row,
    record_of,
    repair_line,
    repair_text,
    score_line,
    status_text,
    with_belongings,
)
from unbroken.core.nodes import blame
from unbroken.core.page.links import PAIRS_MAX, LinkMatrix, Pair, link_matrix, speeds
from unbroken.core.page.node_history import (
    FB_TOTAL,
    GPU_CHARTS,
    HOST_TITLES,
    Gpu,
    Look,
    NodeHistory,
    gpu_values,
    host_values,
)
from unbroken.spec.nodes.kinds import NODE_CHECK, BlameEntry, CheckResult, NodeCheckStatus
from unbroken.spec.times import time_text

NODE_SECONDS = 5.0
"""Seconds between points of a node: the local cluster's daemons look as often."""
NODES_KEPT = 64
"""Nodes whose past is kept."""
CHECKS_SHOWN = 10
"""Newest checks on the page of a node."""
RESULTS_SHOWN = 50
"""Results of a check on the page of a node, those that are not passed first."""
TEXT_SHOWN = 2000
"""Characters of a message."""
UNREACHED = (
    "Temperatures, use and errors over time are in the metrics of the node daemon, which the page "
    "reads on local clusters only. Here, see the dashboards of the chart in Grafana."
)
NO_DRIVER = "The daemon of this node finds no NVIDIA driver, so there are no values of GPUs."
SILENT = "The GPUs of this node did not answer its daemon the last time."
NOT_YET = "The daemon of this node has not reported yet."
SHARED = "All nodes of a local cluster share this machine: these are the machine's values."


@dataclass(slots=True)
class NodePasts:
    """The past of all nodes since the page's server started."""

    nodes: dict[str, NodeHistory] = field(default_factory=dict)
    machine: NodeHistory = field(default_factory=lambda: NodeHistory(NODE_SECONDS))
    look: Look | None = None
    """The newest one; None: none yet."""

    def add(self, at: float, now: Look) -> None:
        """Take what the metrics say now."""
        before = None if self.look is None else self.look.machine
        self.look = now
        self.machine.add(at, host_values(now, before))
        for node, gpus in [*now.gpus.items()][:NODES_KEPT]:
            self.nodes.setdefault(node, NodeHistory(NODE_SECONDS)).add(at, gpu_values(gpus))
        for gone in self.nodes.keys() - now.gpus.keys():
            del self.nodes[gone]


async def nodes_page(cluster: Cluster, now: float) -> dict[str, Any]:
    """All nodes with their faults and repairs."""
    pods, records = await cluster.select(PODS, namespace=""), await cluster.select(RECORDS)
    nodes = await cluster.select(NODES)
    return {
        "nodes": [node_value(*found, now) for found in with_belongings(nodes, records, pods)],
        "missing": cluster.missing(),
    }


async def linked_nodes_page(cluster: Cluster, now: float) -> dict[str, Any]:
    """All nodes, and the links between them."""
    found = await nodes_page(cluster, now)
    checks = _oldest_first(await cluster.select(CHECKS))
    matrix = link_matrix(one.results for _, one in checks)
    return {**found, "links": links_value(matrix), "missing": cluster.missing()}


def node_value(
    node: Object, record: Object | None, pods: Sequence[Object], now: float
) -> dict[str, Any]:
    """A node, with the texts of `unbroken nodes describe`."""
    row, held = node_row(node, record, pods, now), record_of(record)
    return {
        **row,
        "status": status_text(row),
        "repairText": repair_text(row),
        "faults": [one[:TEXT_SHOWN] for one in fault_conditions(node)],
        "repairNow": "" if held.repair is None else repair_line(held.repair, now)[:TEXT_SHOWN],
        "repairs": [repair_line(one, now)[:TEXT_SHOWN] for one in reversed(held.history)],
        "scoreText": score_line(held, now),
    }


def _oldest_first(checks: Iterable[Object]) -> list[tuple[str, NodeCheckStatus]]:
    """Name and status of each check that has begun, the oldest first."""
    found = [(str(one["metadata"]["name"]), NODE_CHECK.status_of(one)[0]) for one in checks]
    begun = [one for one in found if one[1].started_at is not None]
    return sorted(begun, key=lambda one: one[1].started_at or 0.0)


def links_value(found: LinkMatrix) -> dict[str, Any]:
    """The measured links: a matrix of some nodes, and the slowest pairs."""
    return {
        "linkNodes": list(found.nodes),
        "linkNodeCount": found.nodes_all,
        "speeds": speeds(found),
        "pairCount": len(found.pairs),
        "pairs": [pair_value(one) for one in found.pairs[:PAIRS_MAX]],
    }


def pair_value(pair: Pair) -> dict[str, Any]:
    """Two nodes whose link was measured."""
    return {
        "one": pair.one,
        "other": pair.other,
        "gigabytesPerSecond": round(pair.speed, 4),
        "microseconds": pair.measured.latency,
        "isRight": pair.measured.is_right is True,
        "slowDevice": pair.measured.slow[:TEXT_SHOWN],
    }


async def node_page(cluster: Cluster, name: str, pasts: NodePasts, now: float) -> dict[str, Any]:
    """A node over time; SpecError if there is none."""
    node = await cluster.get(NODES, name)
    records = [one for one in await cluster.select(RECORDS) if one["metadata"]["name"] == name]
    pods = await cluster.select(PODS, namespace="")
    checks = _oldest_first(await cluster.select(CHECKS))
    (found,) = with_belongings([node], records, pods)
    held = record_of(found[1])
    tested = [(check, one) for check, one in checks if any(r.node == name for r in one.results)]
    return {
        **node_value(*found, now),
        "blame": [blame_value(one, now) for one in reversed(held.blame)],
        "checks": [check_value(*one, name) for one in reversed(tested[-CHECKS_SHOWN:])],
        **past_values(name, pasts, is_local=cluster.place.paths is not None),
        "missing": cluster.missing(),
    }


def blame_value(entry: BlameEntry, now: float) -> dict[str, Any]:
    """One piece of evidence against a node."""
    return {
        "blamedAt": time_text(entry.at),
        "kind": entry.kind.value,
        "source": entry.source,
        "text": entry.text[:TEXT_SHOWN],
        "points": round(blame.points(entry, now), 2),
    }


def check_value(name: str, check: NodeCheckStatus, node: str) -> dict[str, Any]:
    """A check with its results of a node."""
    mine = [one for one in check.results if one.node == node]
    mine.sort(key=lambda one: one.outcome.value == "pass")
    return {
        "check": name,
        "phase": check.phase.value,
        "message": check.message[:TEXT_SHOWN],
        "checkStarted": None if check.started_at is None else time_text(check.started_at),
        "resultCount": len(mine),
        "results": [result_value(one) for one in mine[:RESULTS_SHOWN]],
    }


def result_value(result: CheckResult) -> dict[str, Any]:
    """One test of a node."""
    return {
        "test": result.test,
        "peer": result.peer,
        "outcome": result.outcome.value,
        "measured": result.measured,
        "expected": result.expected,
        "unit": result.unit,
        "text": result.message[:TEXT_SHOWN],
    }


def past_values(name: str, pasts: NodePasts, *, is_local: bool) -> dict[str, Any]:
    """The metrics of a node: over time, and of each GPU now."""
    now, gpus = pasts.look, list[Gpu]()
    if not is_local:
        gpu_note, machine_note = UNREACHED, ""
    elif now is None:
        gpu_note, machine_note = NOT_YET, ""
    else:
        gpus = [*now.gpus.get(name, ())]
        silent = "" if now.readable.get(name, True) else SILENT
        gpu_note, machine_note = silent or ("" if gpus else NO_DRIVER), SHARED
    own = pasts.nodes.get(name)
    return {
        "gpuNote": gpu_note,
        "machineNote": machine_note,
        "gpuCharts": charts_value(own, [one.title for one in GPU_CHARTS]),
        "machineCharts": charts_value(pasts.machine if machine_note else None, HOST_TITLES),
        "gpus": [gpu_value(one) for one in gpus],
    }


def charts_value(found: NodeHistory | None, titles: Sequence[str]) -> dict[str, Any]:
    """Columns of equal length, of the titles that have values; null: not known."""
    points = [] if found is None else found.points
    known = [title for title in titles if any(title in one.values for one in points)]
    return {
        "times": [round(one.at, 1) for one in points],
        "titles": known,
        "columns": [[_short(one.values.get(title)) for one in points] for title in known],
    }


def _short(number: float | None) -> float | None:
    return None if number is None else float(f"{number:.5g}")


def gpu_value(gpu: Gpu) -> dict[str, Any]:
    """A GPU now."""
    values: Mapping[str, float] = gpu.values
    return {
        "gpu": gpu.number,
        "model": gpu.model,
        "gpuPod": gpu.pod,
        "celsius": values.get("DCGM_FI_DEV_GPU_TEMP"),
        "busyPercent": values.get("DCGM_FI_DEV_GPU_UTIL"),
        "usedMebibytes": values.get("DCGM_FI_DEV_FB_USED"),
        "wholeMebibytes": values.get(FB_TOTAL),
        "correctedErrors": values.get("DCGM_FI_DEV_ECC_SBE_VOL_TOTAL"),
        "uncorrectedErrors": values.get("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL"),
        "latestXid": values.get("DCGM_FI_DEV_XID_ERRORS"),
    }
