"""Drives the daemon's machine against a Node object, as a driver and an API server would."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from unbroken.core.nodes.health import (
    GpusSampled,
    HealthEffect,
    HealthEvent,
    LineRead,
    LogFault,
    LookAtGpus,
    NodeHealth,
    OwnNodeSeen,
    RecordNodeEvent,
    WriteConditions,
    WriteFailed,
    WriteNode,
    Written,
)
from unbroken.core.nodes.health_object import node_state
from unbroken.core.nodes.kernel_log import KernelLine
from unbroken.core.nodes.signals import GpuSample, SignTable
from unbroken.core.tick import Tick
from unbroken.local.apiserver.write.patch import merge_patch
from unbroken.nodes.tables import read_table
from unbroken.spec.keys import FAULT_DETAILS, HEALTH, VERIFIED

Object = dict[str, Any]
TABLE = read_table(None)


class KilledError(Exception):
    """The daemon was killed here."""


class Bench:
    """A node, its daemon, and a clock; writes succeed unless `is_down`."""

    def __init__(self, table: SignTable = TABLE, gpus: int | None = None) -> None:
        self.table, self.gpus = table, gpus
        self.now = 1_800_000_000.0
        self.version = 1
        self.nvml = GpuSample(problem="no driver")
        """Result of the next look at the GPUs."""
        self.is_nvml_hung = False
        self.is_down = False
        self.log: list[str] = []
        """Lines that the kernel has logged; a cursor is the number of lines read."""
        self.kill_at: int | None = None
        """Number of the moment at which the daemon is killed; each write has two moments."""
        self.told: list[HealthEffect] = []
        self.order: list[str] = []
        """Kind of each write that was ordered."""
        self.node: Object = {
            "metadata": {"name": "node-0", "uid": "u-1", "resourceVersion": "1"},
            "spec": {},
            "status": {"nodeInfo": {"bootID": "boot-1"}},
        }
        self.health = NodeHealth(table, gpus)
        self.see()

    # what happens to the node

    def see(self) -> None:
        """Give the daemon the node as its informer does."""
        self.step(OwnNodeSeen(node_state(self.node)))

    def change(self, patch: Object, *, is_seen: bool = True) -> None:
        """Change the node as another program."""
        self._apply(patch)
        if is_seen:
            self.see()

    def reboot(self, boot: str) -> None:
        """Give the node another boot ID."""
        self.change({"status": {"nodeInfo": {"bootID": boot}}})

    def verify(self, value: str) -> None:
        """Report the node as repaired, as the repairer does."""
        gone = {HEALTH: "Schedulable", "sagemaker.amazonaws.com/fault-types": None}
        annotations = {VERIFIED: value, FAULT_DETAILS: None}
        self.change(
            {"metadata": {"annotations": annotations, "labels": gone}, "spec": {"taints": None}}
        )

    def restart(self) -> None:
        """Start another daemon in place of this one, which reads the lines still unread."""
        self.health = NodeHealth(self.table, self.gpus)
        self.see()
        start = int(self.health.cursor.partition(":")[2] or 0)
        for number, text in enumerate(self.log[start:], start + 1):
            self.step(LineRead(KernelLine(text), f"file:{number}"))

    def kernel(self, *texts: str) -> None:
        """Log lines as the kernel."""
        for text in texts:
            self.log.append(text)
            self.step(LineRead(KernelLine(text), f"file:{len(self.log)}"))

    def xid(self, number: int, rest: str = "text", pci: str = "0000:3b:00") -> None:
        """Log a line as the GPU's driver."""
        self.kernel(f"NVRM: Xid (PCI:{pci}): {number}, {rest}")

    def wait(self, seconds: float) -> None:
        """Let time pass, with every deadline in it."""
        until = self.now + seconds
        while (due := self.health.deadline()) is not None and due <= until:
            self.now = max(self.now, due)
            self.step(Tick())
        self.now = until
        self.step(Tick())

    def step(self, event: HealthEvent) -> None:
        """Give the machine an event, and carry out its effects."""
        try:
            self._step(event)
        except KilledError:
            self.restart()

    def _step(self, event: HealthEvent) -> None:
        waiting = self.health.step(event, self.now)
        while waiting:
            effect, *waiting = waiting
            match effect:
                case WriteNode(patch) | WriteConditions(patch):
                    self.order.append("node" if isinstance(effect, WriteNode) else "conditions")
                    waiting += self.health.step(self._write(patch), self.now)
                case RecordNodeEvent() | LogFault():
                    self.told.append(effect)
                case LookAtGpus() if not self.is_nvml_hung:
                    waiting += self.health.step(GpusSampled(self.nvml, self.now), self.now)

    def _write(self, patch: Mapping[str, Any]) -> HealthEvent:
        version = patch.get("metadata", {}).get("resourceVersion")
        self._pass_by()
        if self.is_down or version not in (None, str(self.version)):
            return WriteFailed()
        self._apply(patch)
        self._pass_by()
        return Written(node_state(self.node))

    def _pass_by(self) -> None:
        if self.kill_at is not None:
            self.kill_at -= 1
            if self.kill_at < 0:
                self.kill_at = None
                raise KilledError

    def _apply(self, patch: Mapping[str, Any]) -> None:
        patch = json.loads(json.dumps(patch))
        listed = patch.get("status", {}).pop("conditions", None)
        patch.get("metadata", {}).pop("resourceVersion", None)
        self.node = merge_patch(self.node, patch)
        if listed is not None:
            conditions = {one["type"]: one for one in self.node["status"].get("conditions", ())}
            conditions.update({one["type"]: one for one in listed})
            self.node["status"]["conditions"] = list(conditions.values())
        self.version += 1
        self.node["metadata"]["resourceVersion"] = str(self.version)

    # what is seen of it

    @property
    def writes(self) -> int:
        """Number of writes ordered."""
        return len(self.order)

    @property
    def labels(self) -> Object:
        found: Object = self.node["metadata"].get("labels", {})
        return found

    @property
    def annotations(self) -> Object:
        found: Object = self.node["metadata"].get("annotations", {})
        return found

    @property
    def taints(self) -> list[Object]:
        found: list[Object] = self.node["spec"].get("taints") or []
        return found

    @property
    def conditions(self) -> dict[str, tuple[str, str]]:
        """Status and reason of each condition, by type."""
        listed = self.node["status"].get("conditions", ())
        return {one["type"]: (one["status"], one["reason"]) for one in listed}

    @property
    def details(self) -> list[Object]:
        found: list[Object] = json.loads(self.annotations.get(FAULT_DETAILS, "[]"))
        return found

    @property
    def events(self) -> list[str]:
        """Reasons of all events."""
        return [one.reason for one in self.told if isinstance(one, RecordNodeEvent)]
