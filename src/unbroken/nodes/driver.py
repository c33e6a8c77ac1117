"""The node daemon: it reads its node's signs of faults and writes what `core/nodes/health` orders.

It is level-triggered: it follows the Node object, and repeats failed writes later. A part that
cannot be read is reported once in the log and is no sign.

The log of the health monitoring agent has the documented streams' form:
`SagemakerHealthMonitoringAgent/<instance group>/<instance>.log` below a directory; each line a JSON
object (reference section 2.3 b, of HyperPod on EKS).
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from contextlib import aclosing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
from lightkube.models.core_v1 import ObjectReference
from lightkube.resources.core_v1 import Node

from unbroken.core.nodes.health import (
    GpusSampled,
    HealthEffect,
    HealthEvent,
    HostSampled,
    LineRead,
    LogFault,
    LookAtGpus,
    NodeHealth,
    OwnNodeGone,
    OwnNodeSeen,
    RecordNodeEvent,
    WriteConditions,
    WriteFailed,
    WriteNode,
    Written,
)
from unbroken.core.nodes.health_object import NODE_ACTIONS, OwnNode, node_state
from unbroken.core.nodes.kernel_log import KERNEL, KernelLine, read_xid
from unbroken.core.nodes.signals import GpuSample, SignTable
from unbroken.core.tick import Tick
from unbroken.errors import PeerError, UnbrokenError, WorldError
from unbroken.foreign_numbers import whole_number
from unbroken.kube.backoff import Backoff
from unbroken.kube.client import MERGE, STRATEGIC, KubeClient
from unbroken.kube.clock import entropy, monotonic, pause, wall
from unbroken.kube.errors import Conflict, NotFound
from unbroken.kube.events import EventRecorder
from unbroken.kube.informer import Informer
from unbroken.log_lines import LastProblem, Log
from unbroken.runtime.drive import Alarm, Inbox
from unbroken.spec.keys import GPU_UNHEALTHY, INSTANCE_GROUP
from unbroken.spec.nodes.values import Action
from unbroken.spec.times import time_text

from . import host
from .gpu_metrics import GpuMetrics, Owner
from .gpus import GpuEyes
from .kernel_reader import FileReader, KmsgReader
from .metrics import MetricsPlace, serving_node
from .pod_resources import gpu_owners
from .tables import read_table

STREAM = "SagemakerHealthMonitoringAgent"
BYTES_MAX = 16 << 20
"""Longest file; then it is set aside as `.1`."""
ACTIONS = {Action.RESET_GPU: "reboot", Action.RESTART_JOB: "none"}
"""The documented lines know none, reboot and replace."""


class AgentLog:
    """The file of one node; made with its first line."""

    def __init__(self, directory: Path, group: str, node: str) -> None:
        instance = node.removeprefix("hyperpod-")
        self.path = directory / STREAM / (group or "default") / f"{instance}.log"

    def write(self, fault: LogFault, now: float) -> None:
        """Append a line.  Raises OSError."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists() and self.path.stat().st_size > BYTES_MAX:
            os.replace(self.path, self.path.with_name(self.path.name + ".1"))
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line(fault, now), ensure_ascii=False) + "\n")


def line(fault: LogFault, now: float) -> dict[str, object]:
    """A line of the log."""
    detail = {
        "Action": ACTIONS.get(fault.action, fault.action.value),
        "Type": fault.type,
        "Reason": documented_reason(fault),
        "Message": f"{fault.reason}: {fault.message}",
    }
    return {
        "level": "info",
        "ts": time_text(now, has_microseconds=True),
        "msg": "Health event detected",
        "Event detail": detail,
        **_condition(fault, now),
        "HealthMonitoringAgentDetectionEvent": "HealthEvent",
    }


def _condition(fault: LogFault, now: float) -> dict[str, object]:
    """Keys of the older documented form, blanks and colons included, for filters that look for
    them; none where the fault sets no condition of the node."""
    if fault.action not in NODE_ACTIONS:
        return {}
    details = {
        "type": fault.type,
        "status": "True",
        "transition": time_text(now),
        "reason": fault.reason,
        "message": fault.message,
    }
    return {"condition type: ": fault.type, "with condition details ": details}


def documented_reason(fault: LogFault) -> str:
    """HyperPod's name of a group of XIDs; else our own of the fault."""
    if fault.type != GPU_UNHEALTHY or not fault.reason.startswith(("Xid", "SXid")):
        return fault.reason
    match fault.action:
        case Action.REPLACE:
            return "NvidiaGpuXidErrorPendingReplacement"
        case Action.RESET_GPU | Action.REBOOT:
            return "NvidiaGpuXidErrorPendingReboot"
        case Action.RESTART_JOB:
            return "NvidiaGpuXidRestartApp" if fault.reason == "Xid94" else "XidUserAppError"
        case Action.NONE:
            return fault.reason


log = Log(__name__)

COMPONENT = "health-monitoring-agent"
"""Reporter of the events, as HyperPod's (reference section 2.3)."""
SAMPLE_SECONDS = 30.0
"""Seconds between two looks at GPUs and system (DCGM's connection of the EKS agent: 30 s)."""
QUEUED = 1000
"""Lines and samples that wait; the kernel keeps the rest."""
RETRY = Backoff(first=0.2, limit=30.0)


@dataclass(frozen=True, slots=True)
class DaemonOptions:
    """Options of a daemon."""

    node: str
    kernel_log: Path | None = None
    """A file that replaces the kernel's log; None: /dev/kmsg."""
    root: Path = Path("/")
    """Path of the node's file system."""
    log_directory: Path | None = None
    """Folder of the log in the documented form of streams; None: no log is written."""
    gpus_expected: int | None = None
    """Expected number of GPUs; None: as in the node's labels or its capacity."""
    table: Path | None = None
    """A file with changes to the table of faults."""
    nvml_library: str | None = None
    """Path of the NVML library; None: the driver's."""
    sample_seconds: float = SAMPLE_SECONDS
    metrics: MetricsPlace | None = None
    """Address and families of the metrics; None: none are served."""


async def run_daemon(
    client: KubeClient, options: DaemonOptions, gpus: GpuMetrics | None = None
) -> None:
    """Watch over one node until cancelled.  SpecError for a table of faults that is wrong.

    `gpus`: metrics that another part of this process serves.
    """
    async with serving_node(options.metrics, options.root, options.node) as own:
        daemon = NodeDaemon(client, options, read_table(options.table), gpus or own)
        await daemon.run()


class NodeDaemon:
    """One node's daemon; `run` does everything."""

    def __init__(
        self,
        client: KubeClient,
        options: DaemonOptions,
        table: SignTable,
        metrics: GpuMetrics | None = None,
    ) -> None:
        self._client = client
        self._metrics = metrics
        self._options = options
        self._counters = tuple(table.counter_limits)
        self._health = NodeHealth(table, options.gpus_expected)
        self._recorder = EventRecorder(client, COMPONENT, options.node)
        self._path = f"api/v1/nodes/{quote(options.node)}"
        self._inbox: Inbox[HealthEvent] = Inbox(self._health.deadline, wall, QUEUED)
        self._seen: OwnNode | None = None
        """Newest state from the informer that the machine has not yet been given."""
        self._is_gone = False
        self._look_now = asyncio.Event()
        self._knows_devices = asyncio.Event()
        """Set once the machine has the system's readings, which it needs before the kernel's
        messages."""
        self._met = asyncio.Event()
        self._failures = 0
        self._must_ask = False
        """The node is to be read again, after a write that failed."""
        self._ask_alarm = Alarm(monotonic, self._ask_now)
        self._gpus_problem = LastProblem()
        self._owners_problem = LastProblem()
        self._cursor = ""
        self._random = entropy()

    async def run(self) -> None:
        """Follow the node and its parts."""
        name = self._options.node
        informer = Informer(
            self._client, Node, fields=f"metadata.name={name}", on_change=self._changed
        )
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._recorder.run())
            tasks.create_task(informer.run())
            tasks.create_task(self._decide())
            # An earlier daemon's cursor is on the node.
            await self._met.wait()
            log.info("node daemon watches", node=name, cursor=self._health.cursor or None)
            tasks.create_task(self._follow_kernel())
            tasks.create_task(self._look())

    # --- events in

    def _changed(self, old: Node | None, new: Node | None) -> None:
        self._is_gone = new is None
        if new is not None:
            self._seen = node_state(new.to_dict())
        self._wake()

    async def _follow_kernel(self) -> None:
        await self._knows_devices.wait()
        self._cursor = self._health.cursor
        problem = ""
        while True:
            try:
                await self._feed()
            except OSError as error:
                # Missing or not allowed: this is no sign about the node.
                if str(error) != problem:
                    problem = str(error)
                    log.warning("kernel log cannot be read", node=self._options.node, error=error)
            await pause(self._options.sample_seconds)

    async def _feed(self) -> None:
        path, root = self._options.kernel_log, self._options.root
        reader = FileReader(path, self._cursor) if path else KmsgReader(root, self._cursor)
        async with aclosing(reader.lines()) as lines:
            async for line, cursor in lines:
                self._cursor = cursor
                self._show_xid(line)
                await self._inbox.put(LineRead(line, cursor))

    def _show_xid(self, line: KernelLine) -> None:
        if self._metrics is None or line.facility not in (None, KERNEL):
            return
        xid = read_xid(line.text)
        if xid is not None:
            self._metrics.xid(self._options.node, xid.pci, xid.number)

    async def _look(self) -> None:
        """Look at the system and the GPUs now and then, and when the machine asks for it."""
        eyes = GpuEyes(self._options.root, self._options.nvml_library)
        while True:
            sample = await asyncio.to_thread(host.look, self._options.root, self._counters)
            await self._inbox.put(HostSampled(sample))
            self._knows_devices.set()
            self._look_now.clear()
            began_at = wall()
            gpus = await eyes.look()
            self._note(gpus)
            await self._inbox.put(GpusSampled(gpus, began_at))
            if self._metrics is not None:
                owners = await self._gpu_owners() if gpus.shown else {}
                self._metrics.sampled(self._options.node, gpus, owners)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._options.sample_seconds):
                    await self._look_now.wait()

    async def _gpu_owners(self) -> dict[str, Owner]:
        problem, owners = "", dict[str, Owner]()
        try:
            owners = await gpu_owners(self._options.root)
        except (PeerError, WorldError) as error:
            problem = str(error)
        if self._owners_problem.note(problem):
            log.info(
                "pods of GPUs are unknown" if problem else "pods of GPUs are known",
                node=self._options.node,
                error=problem or None,
            )
        return owners

    def _note(self, gpus: GpuSample) -> None:
        if self._gpus_problem.note(gpus.problem):
            log.info(
                "GPUs are unknown" if gpus.problem else "GPUs are known",
                node=self._options.node,
                error=gpus.problem or None,
            )

    def _ask_now(self) -> None:
        self._must_ask = True
        self._wake()

    def _wake(self) -> None:
        """Have what is known of the node looked at, also if nothing else happens."""
        if self._inbox.empty():
            self._inbox.put_nowait(Tick())

    # --- decisions

    async def _decide(self) -> None:
        async for event in self._inbox:
            # The node first, for the rest is written into it.
            while (news := await self._news_of_node()) is not None:
                await self._take(news)
            await self._take(event)

    async def _take(self, event: HealthEvent) -> None:
        waiting = self._health.step(event, wall())
        while waiting:
            effect, *waiting = waiting
            waiting += await self._carry_out(effect)
        if self._health.node is not None:
            self._met.set()

    async def _news_of_node(self) -> HealthEvent | None:
        if self._is_gone:
            self._is_gone = False
            return OwnNodeGone()
        if self._seen is not None:
            state, self._seen = self._seen, None
            known = self._health.node
            if known is None or not _is_older(state, known):
                return OwnNodeSeen(state)
        if self._must_ask:
            self._must_ask = False
            return await self._ask()
        return None

    # --- effects

    async def _carry_out(self, effect: HealthEffect) -> list[HealthEffect]:
        match effect:
            case WriteNode(patch):
                return await self._write(self._path, dict(patch), MERGE)
            case WriteConditions(patch):
                return await self._write(f"{self._path}/status", dict(patch), STRATEGIC)
            case RecordNodeEvent(kind, reason, message):
                # The node's name as UID, as kubelet has it in events.
                name = self._options.node
                about = ObjectReference(kind="Node", name=name, uid=name)
                self._recorder.record(about, kind, reason, message)
            case LogFault():
                self._log(effect)
            case LookAtGpus():
                self._look_now.set()
        return []

    async def _write(
        self, path: str, patch: dict[str, Any], kind: dict[str, str]
    ) -> list[HealthEffect]:
        try:
            answer = await self._client.raw("PATCH", path, body=patch, headers=kind)
            written = Written(node_state(msgspec.json.decode(answer)))
        except (UnbrokenError, msgspec.DecodeError) as error:
            self._failed(error)
            return self._health.step(WriteFailed(), wall())
        self._failures = 0
        return self._health.step(written, wall())

    async def _ask(self) -> HealthEvent | None:
        """The node as it is now; None: not known, and asked again."""
        try:
            answer = await self._client.raw("GET", self._path)
            return OwnNodeSeen(node_state(msgspec.json.decode(answer)))
        except NotFound:
            return OwnNodeGone()
        except (UnbrokenError, msgspec.DecodeError) as error:
            self._failed(error)
        return None

    def _failed(self, error: Exception) -> None:
        is_conflict = isinstance(error, Conflict)
        self._failures += 1
        delay = (
            0.0
            if is_conflict and self._failures == 1
            else RETRY.delay(self._failures, self._random)
        )
        is_passing = is_conflict or isinstance(error, WorldError)
        level = logging.WARNING if self._failures == 3 or not is_passing else logging.DEBUG
        log.log(
            level,
            "node not written",
            node=self._options.node,
            failures=self._failures,
            retry_seconds=delay,
            error=error,
        )
        self._ask_alarm.set(monotonic() + delay)

    def _log(self, fault: LogFault) -> None:
        log.info(
            "node fault",
            node=self._options.node,
            fault=fault.reason,
            action=fault.action,
            message=fault.message,
        )
        if self._metrics is not None:
            self._metrics.fault(self._options.node, fault.reason, fault.action.value)
        directory, node = self._options.log_directory, self._health.node
        if directory is None or node is None:
            return
        group = node.labels.get(INSTANCE_GROUP, "")
        try:
            AgentLog(directory, group, self._options.node).write(fault, wall())
        except OSError as error:
            log.warning("log of faults not written", node=self._options.node, error=error)


def _is_older(own_node: OwnNode, other: OwnNode) -> bool:
    """True if a version of the same object is older than another: the informer may bring it late.

    Versions are numbers in every existing API server, though its API does not guarantee that.
    """
    new, old = whole_number(own_node.version), whole_number(other.version)
    return own_node.uid == other.uid and new is not None and old is not None and new < old
