"""Metrics of a node's GPUs under the DCGM exporter's names and labels, for public dashboards.

The values are those of NVML (`nvml`), from the daemon's latest look; profiling (`DCGM_FI_PROF_*`)
needs DCGM itself. A GPU that NVML does not read has no series. All fields are untyped: DCGM's
counters do not end in `_total`, as the text format demands of counters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from unbroken.core.nodes.kernel_log import pci_address
from unbroken.core.nodes.signals import GpuSample, GpuValues

XID = "DCGM_FI_DEV_XID_ERRORS"
FIELDS = {
    "DCGM_FI_DEV_GPU_UTIL": "Percentage of time in which the GPU was busy.",
    "DCGM_FI_DEV_MEM_COPY_UTIL": "Percentage of time in which the GPU's memory was busy.",
    "DCGM_FI_DEV_FB_TOTAL": "Memory of the GPU, in MiB.",
    "DCGM_FI_DEV_FB_USED": "Used memory, in MiB.",
    "DCGM_FI_DEV_FB_FREE": "Free memory, in MiB.",
    "DCGM_FI_DEV_FB_RESERVED": "Memory that the driver reserves, in MiB.",
    "DCGM_FI_DEV_SM_CLOCK": "Clock of the multiprocessors, in MHz.",
    "DCGM_FI_DEV_MEM_CLOCK": "Clock of the memory, in MHz.",
    "DCGM_FI_DEV_CLOCKS_EVENT_REASONS": "Reasons why the clocks are low, one bit each.",
    "DCGM_FI_DEV_GPU_TEMP": "Temperature of the GPU, in degrees Celsius.",
    "DCGM_FI_DEV_MEMORY_TEMP": "Temperature of the memory, in degrees Celsius.",
    "DCGM_FI_DEV_POWER_USAGE": "Power, in watts.",
    "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": "Energy since the driver was loaded, in mJ.",
    "DCGM_FI_DEV_PCIE_REPLAY_COUNTER": "Packets that PCIe had to send again.",
    XID: "Number of the latest XID in the kernel's log since the daemon began; 0: none.",
    "DCGM_FI_DEV_ECC_SBE_VOL_TOTAL": "Corrected memory errors since the driver was loaded.",
    "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": "Uncorrected memory errors since the driver was loaded.",
    "DCGM_FI_DEV_ECC_SBE_AGG_TOTAL": "Corrected memory errors of the GPU's life.",
    "DCGM_FI_DEV_ECC_DBE_AGG_TOTAL": "Uncorrected memory errors of the GPU's life.",
    "DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS": "Memory rows remapped after corrected errors.",
    "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS": "Memory rows remapped after uncorrected errors.",
    "DCGM_FI_DEV_ROW_REMAP_PENDING": "1 if a remapped row waits for a reset.",
    "DCGM_FI_DEV_ROW_REMAP_FAILURE": "1 if rows could not be remapped.",
    "DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL": "Packets that NVLinks had to send again.",
    "DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL": "Times that NVLinks had to recover.",
    "DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL": "NVLink checksum errors of flits.",
    "DCGM_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL": "NVLink checksum errors of data.",
}
"""Field of DCGM -> meaning; counters of NVLinks are sums of a GPU's links."""
LABELS = (
    *("gpu", "UUID", "pci_bus_id", "device", "modelName", "Hostname"),
    *("namespace", "pod", "container"),
)
"""Labels of the DCGM exporter; the last three are empty for a GPU that no pod has alone."""
XIDS_MAX = 64
"""GPUs of a node whose XIDs are kept."""


class Owner(NamedTuple):
    """The container that a device is allocated to."""

    namespace: str
    pod: str
    container: str


NOBODY = Owner("", "", "")


@dataclass(slots=True)
class _NodeGpus:
    """GPUs and faults of one node."""

    sample: GpuSample = field(default_factory=GpuSample)
    owners: Mapping[str, Owner] = field(default_factory=dict)
    xids: dict[str, int] = field(default_factory=dict)
    """PCI address -> number of the latest XID."""
    faults: dict[tuple[str, str], int] = field(default_factory=dict)
    """Name and action of a fault -> how often the daemon recorded it."""


class GpuMetrics(Collector):
    """GPUs and faults: of one node in a daemon, of all nodes in a local cluster."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._nodes: dict[str, _NodeGpus] = {}
        registry.register(self)

    # --- input

    def sampled(self, node: str, sample: GpuSample, owners: Mapping[str, Owner]) -> None:
        """Take the latest look at a node's GPUs; `owners` by the UUID of the GPU."""
        known = self._nodes.setdefault(node, _NodeGpus())
        known.sample, known.owners = sample, owners

    def xid(self, node: str, pci: str, number: int) -> None:
        """Take an XID of the kernel's log; those of devices that are no GPU are not shown."""
        xids = self._nodes.setdefault(node, _NodeGpus()).xids
        if pci in xids or len(xids) < XIDS_MAX:
            xids[pci] = number

    def fault(self, node: str, name: str, action: str) -> None:
        """Count a fault of the node; its names are those of the table of faults."""
        faults = self._nodes.setdefault(node, _NodeGpus()).faults
        faults[name, action] = faults.get((name, action), 0) + 1

    def node_gone(self, node: str) -> None:
        """Forget a node."""
        self._nodes.pop(node, None)

    # --- output

    def describe(self) -> Iterable[Metric]:
        """Return the same families as `collect`, which the registry needs for their names."""
        return self.collect()

    def collect(self) -> Iterable[Metric]:
        """Return the latest looks."""
        readable = GaugeMetricFamily(
            "unbroken_node_gpus_readable",
            "1 if the latest look at the node's GPUs had an answer, else 0; absent if there is "
            "no driver.",
            labels=("node",),
        )
        faults = CounterMetricFamily(
            "unbroken_node_faults",
            "Faults that the node's daemon has recorded since it began, and what they need.",
            labels=("node", "fault", "action"),
        )
        fields = {name: Metric(name, text, "unknown") for name, text in FIELDS.items()}
        for node, known in sorted(self._nodes.items()):
            if known.sample.has_driver:
                readable.add_metric((node,), not known.sample.problem)
            for (name, action), count in sorted(known.faults.items()):
                faults.add_metric((node, name, action), count)
            for gpu in known.sample.shown:
                labels = _labels(node, gpu, known.owners.get(gpu.uuid, NOBODY))
                values = {XID: known.xids.get(pci_address(gpu.pci), 0), **gpu.values}
                for name in FIELDS.keys() & values.keys():
                    fields[name].add_sample(name, labels, values[name])
        yield from (readable, faults, *fields.values())


def _labels(node: str, gpu: GpuValues, owner: Owner) -> dict[str, str]:
    device = (str(gpu.index), gpu.uuid, gpu.pci, f"nvidia{gpu.index}", gpu.model, node)
    return dict(zip(LABELS, (*device, *owner), strict=True))
