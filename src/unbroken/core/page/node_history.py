"""The past of a node in bounded memory, from samples of its metrics.  Pure.

Names are those that the node daemon exports: of the DCGM exporter for GPUs, of node-exporter for
the system. A point has the worst of the node's GPUs in each respect, because a mean would hide one
hot GPU among eight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .history import POINTS_MAX

GPUS_MAX = 64
"""GPUs of a node that are kept."""


class MetricSample(NamedTuple):
    """One value of a metric."""

    name: str
    labels: Mapping[str, str]
    value: float


class Chart(NamedTuple):
    """A value over time."""

    title: str
    metric: str
    worst: Callable[[Iterable[float]], float]
    """Which of the GPUs' values is shown."""


GPU_CHARTS = (
    Chart("hottest GPU, °C", "DCGM_FI_DEV_GPU_TEMP", max),
    Chart("least busy GPU, %", "DCGM_FI_DEV_GPU_UTIL", min),
    Chart("fullest GPU memory, MiB", "DCGM_FI_DEV_FB_USED", max),
    Chart("corrected memory errors of all GPUs", "DCGM_FI_DEV_ECC_SBE_VOL_TOTAL", sum),
    Chart("uncorrected memory errors of all GPUs", "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", sum),
    Chart("highest number of a GPU's latest XID", "DCGM_FI_DEV_XID_ERRORS", max),
)
FB_TOTAL = "DCGM_FI_DEV_FB_TOTAL"
READABLE = "unbroken_node_gpus_readable"
CPU, MEMORY, AVAILABLE = (
    "node_cpu_seconds_total",
    "node_memory_MemTotal_bytes",
    "node_memory_MemAvailable_bytes",
)
RECEIVED, SENT = "node_network_receive_bytes_total", "node_network_transmit_bytes_total"
CPU_TITLE, MEMORY_TITLE = "processors busy, %", "memory used, %"
RECEIVED_TITLE, SENT_TITLE = "received, kB/s", "sent, kB/s"
HOST_TITLES = (CPU_TITLE, MEMORY_TITLE, RECEIVED_TITLE, SENT_TITLE)
IDLE = ("idle", "iowait")
LOOPBACK = "lo"
NAMES = frozenset(
    {one.metric for one in GPU_CHARTS}
    | {FB_TOTAL, READABLE, CPU, MEMORY, AVAILABLE, RECEIVED, SENT}
)
"""Metrics that are read."""


class NodePoint(NamedTuple):
    """Values at a moment, by title."""

    at: float
    values: Mapping[str, float]


class NodeHistory:
    """The points of one node, oldest first; thinned out as those of a job."""

    def __init__(self, seconds: float) -> None:
        """`seconds`: least distance of two points at the beginning."""
        self.points: list[NodePoint] = []
        self._seconds = seconds

    def add(self, at: float, values: Mapping[str, float]) -> None:
        """Take the values of now."""
        if self.points and at - self.points[-1].at < self._seconds / 2:
            return
        self.points.append(NodePoint(at, values))
        if len(self.points) > POINTS_MAX:
            del self.points[1::2]
            self._seconds *= 2


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU now."""

    number: str
    model: str
    pod: str
    """`NAMESPACE/NAME`; empty: no pod has it, or it is not known."""
    values: Mapping[str, float]
    """By metric."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Counters of a machine, from which rates are computed."""

    at: float
    busy: float
    """Seconds of all processors."""
    whole: float
    received: float
    sent: float


@dataclass(frozen=True, slots=True)
class Look:
    """The values of all metrics at one moment."""

    gpus: Mapping[str, Sequence[Gpu]] = field(default_factory=dict)
    """By node."""
    readable: Mapping[str, bool] = field(default_factory=dict)
    """By node: its GPUs answered; absent: it has no driver."""
    machine: Machine | None = None
    memory: float | None = None
    """Percentage of the machine's memory that is used."""


def look(at: float, samples: Iterable[MetricSample]) -> Look:
    """Read the samples of one moment; numbers that are not finite are left out."""
    gpus: dict[str, dict[str, Gpu]] = {}
    readable: dict[str, bool] = {}
    host: dict[str, float] = {}
    for name, labels, value in samples:
        if name not in NAMES or not math.isfinite(value):
            continue
        if name == READABLE:
            readable[labels.get("node", "")] = value > 0
        elif name.startswith("DCGM_"):
            _add_gpu(gpus.setdefault(labels.get("Hostname", ""), {}), name, labels, value)
        elif labels.get("device") != LOOPBACK:
            key = f"{name} idle" if labels.get("mode") in IDLE else name
            host[key] = host.get(key, 0.0) + value
    machine = None
    if CPU in host:
        busy, idle = host[CPU], host.get(f"{CPU} idle", 0.0)
        machine = Machine(at, busy, busy + idle, host.get(RECEIVED, 0.0), host.get(SENT, 0.0))
    whole, free = host.get(MEMORY, 0.0), host.get(AVAILABLE)
    memory = None if free is None or whole <= 0 else 100 * (1 - free / whole)
    sorted_gpus = {node: _sorted(found) for node, found in gpus.items()}
    return Look(sorted_gpus, readable, machine, memory)


def _add_gpu(found: dict[str, Gpu], name: str, labels: Mapping[str, str], value: float) -> None:
    number = labels.get("gpu", "")
    pod = "/".join(filter(None, (labels.get("namespace", ""), labels.get("pod", ""))))
    known = found.get(number)
    if known is None:
        if len(found) >= GPUS_MAX:
            return
        known = found[number] = Gpu(number, labels.get("modelName", ""), pod, {})
    found[number] = Gpu(number, known.model, pod or known.pod, {**known.values, name: value})


def _sorted(gpus: Mapping[str, Gpu]) -> list[Gpu]:
    return sorted(gpus.values(), key=lambda one: (len(one.number), one.number))


def gpu_values(gpus: Sequence[Gpu]) -> dict[str, float]:
    """The worst of a node's GPUs in each respect, by the title of the chart."""
    found = {}
    for chart in GPU_CHARTS:
        known = [one.values[chart.metric] for one in gpus if chart.metric in one.values]
        if known:
            found[chart.title] = chart.worst(known)
    return found


def host_values(now: Look, before: Machine | None) -> dict[str, float]:
    """The use of a machine since the look before, by the title of the chart."""
    found = {} if now.memory is None else {MEMORY_TITLE: now.memory}
    then = now.machine
    if then is None or before is None or then.at <= before.at:
        return found
    seconds, whole = then.at - before.at, then.whole - before.whole
    if whole > 0 and then.busy >= before.busy:
        found[CPU_TITLE] = 100 * (then.busy - before.busy) / whole
    # A counter that went back is that of another boot.
    if then.received >= before.received and then.sent >= before.sent:
        found[RECEIVED_TITLE] = (then.received - before.received) / seconds / 1e3
        found[SENT_TITLE] = (then.sent - before.sent) / seconds / 1e3
    return found
