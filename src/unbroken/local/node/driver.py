"""One of several nodes in one event loop: registers, sends heartbeats, takes pods, gives them back.

This module, with those that act for it, is the only one of the package that distinguishes the API
server's time from its own. Everything with a rule in it is pure and elsewhere.

Words and reasons of the Node object, and of what does not fit on the node, are kubelet's (v1.33,
nodestatus/setters.go, lifecycle/predicate.go).
"""

from __future__ import annotations

import asyncio
import os
import platform
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from decimal import Decimal
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
from lightkube.models.core_v1 import ObjectReference
from lightkube.models.meta_v1 import OwnerReference
from lightkube.resources.core_v1 import ConfigMap, Pod, Secret
from lightkube.resources.core_v1 import Node as NodeResource

from unbroken.agent.socket import directory as socket_directory
from unbroken.errors import UnbrokenError, WorldError
from unbroken.kube import clock
from unbroken.kube.cache import HasMetadata, changed, key_of
from unbroken.kube.client import KubeClient
from unbroken.kube.clock import rfc3339, steady_clock
from unbroken.kube.conditions import is_ready
from unbroken.kube.errors import AlreadyExists
from unbroken.kube.events import EventRecorder
from unbroken.kube.informer import Informer
from unbroken.kube.lease import LeaseTerms, keep_lease
from unbroken.kube.quantity import parse_quantity
from unbroken.local.networks import PodAddresses, node_address
from unbroken.local.node.pods.events import Note, Object, Rejected
from unbroken.local.node.pods.pod_worker import PodWorker, is_over
from unbroken.local.node.processes.isolation import Isolation
from unbroken.local.node.processes.limits import Limits
from unbroken.local.node.processes.process import Launcher, Run
from unbroken.local.node.processes.supervisor import SIGKILL_ALL, SIGTERM
from unbroken.log_lines import Log
from unbroken.spec.keys import NOT_ENFORCED

from .context import NodeApi, NodeContext
from .pods.volumes import PodFiles
from .server import NodeServer

log = Log(__name__)

STATUS_SECONDS = 300.0
"""Seconds between writes of an unchanged status (nodeStatusReportFrequency)."""
RETRY_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """Options of a node."""

    name: str
    directory: Path
    """All of the node's state; one node a directory."""
    index: int
    """Number of the node on this machine: its addresses follow from it."""
    cpu: Decimal | str
    memory: str
    gpus: int = 0
    resources: Mapping[str, str] = field(default_factory=dict)
    """Further ones to offer, which nothing stands behind."""
    labels: Mapping[str, str] = field(default_factory=dict)
    first_labels: Mapping[str, str] = field(default_factory=dict)
    """Labels that others change: given where the node has none of the key."""
    taints: tuple[Mapping[str, str], ...] = ()
    """Taints of a node that joins for the first time (kubelet's --register-with-taints)."""
    boot_id: str = ""
    """Boot ID of this life of the node; empty: the host's."""
    kubelet_token: str = ""
    """Bearer token of the node's own server; empty: it answers no request."""
    heartbeat_seconds: float = 10.0
    images: Mapping[str, str] = field(default_factory=dict)
    """Python environments by the name of the image that each replaces."""


async def run_node(
    client: KubeClient,
    options: NodeOptions,
    *,
    on_registered: Callable[[], None] | None = None,
) -> None:
    """Be a node until cancelled, which leaves the pods running for the next run to find.

    `on_registered` is called when the API has the node and the node knows its pods.
    """
    async with _node(client, options) as node:
        await node.run(on_registered)


@asynccontextmanager
async def _node(client: KubeClient, options: NodeOptions) -> AsyncIterator[Node]:
    options.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    launcher = Launcher(options.directory / "launcher")
    await launcher.start()
    try:
        timeout = aiohttp.ClientTimeout(total=None)
        connector = aiohttp.TCPConnector(force_close=True, limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            yield Node(client, options, launcher, session)
    finally:
        await launcher.close()


class Node:
    """One node; `run` does everything."""

    def __init__(
        self,
        client: KubeClient,
        options: NodeOptions,
        launcher: Launcher,
        session: aiohttp.ClientSession,
    ) -> None:
        self._client = client
        self._options = options
        self._recorder = EventRecorder(client, "kubelet", options.name)
        self._workers: dict[str, PodWorker] = {}
        server = urlsplit(client.config.cluster.server)
        self._context = NodeContext(
            name=options.name,
            address=node_address(options.index),
            directory=options.directory,
            allocatable=_capacity(options),
            api=NodeApi(client),
            launcher=launcher,
            limits=Limits(options.name),
            addresses=PodAddresses(options.index),
            session=session,
            clock=steady_clock(),
            record=self._record,
            api_host=server.hostname or "",
            api_port=str(server.port or 443),
            gpus=dict.fromkeys(range(options.gpus), ""),
            images=options.images,
        )
        self._tasks = asyncio.TaskGroup()
        self._uid = ""

    async def run(self, on_registered: Callable[[], None] | None) -> None:
        """Register, take over what runs, then follow the API."""
        self._context.limits.find()
        async with NodeServer(self._context, self._options.kubelet_token, self.find) as server:
            facts = self._facts(server.port)
            await self._register(facts)
            self._take_over()
            informer = Informer(
                self._client,
                Pod,
                fields=f"spec.nodeName={self._options.name}",
                on_change=self._changed,
            )
            sources = [
                Informer(
                    self._client, kind, on_change=partial(self._source_changed, kind), tells=False
                )
                for kind in (ConfigMap, Secret)
            ]
            async with self._tasks:
                self._tasks.create_task(self._recorder.run())
                self._tasks.create_task(informer.run())
                for source in sources:
                    self._tasks.create_task(source.run())
                self._tasks.create_task(self._beat())
                self._tasks.create_task(self._report(facts))
                await informer.synced.wait()
                if on_registered is not None:
                    on_registered()
                await self._clear_up()

    def find(self, namespace: str, name: str) -> PodWorker | None:
        """The worker of a pod by its name; the newest if one of that name is still leaving."""
        pod_worker = None
        for worker in self._workers.values():
            metadata = worker.pod["metadata"]
            if metadata["namespace"] == namespace and metadata["name"] == name:
                pod_worker = worker
        return pod_worker

    # --- the node object

    def _facts(self, port: int) -> NodeFacts:
        not_enforced = []
        if problem := self._context.limits.problem:
            not_enforced.append(f"limits of cpu and memory: {problem}")
        if self._context.launcher.isolation is Isolation.NONE:
            not_enforced.append("mount paths: this host allows no user namespaces")
        return NodeFacts(
            name=self._options.name,
            address=self._context.address,
            port=port,
            capacity=self._context.allocatable,
            labels=self._options.labels,
            first_labels=self._options.first_labels,
            taints=self._options.taints,
            not_enforced=tuple(not_enforced),
            machine_id=_first_line("/etc/machine-id"),
            boot_id=self._options.boot_id or host_boot_id(),
        )

    async def _register(self, facts: NodeFacts) -> None:
        """Make or take over the Node object, leaving cordons and taints as they are."""
        while True:
            try:
                known = await self._join(facts)
                await self._write_status(facts, known)
            except WorldError as error:
                if error.retry_after_seconds is None:
                    raise
                log.warning("node cannot register", node=facts.name, error=error)
                await clock.pause(error.retry_after_seconds)
            else:
                break
        self._uid = known["metadata"]["uid"]
        for text in facts.not_enforced:
            self._note_node("NotEnforced", text, is_warning=True)
        self._note_node("Starting", "Starting unbroken.")

    async def _join(self, facts: NodeFacts) -> Object:
        api = self._context.api
        known = await api.named("nodes", None, facts.name)
        if known is None:
            with suppress(AlreadyExists):
                return await api.create("api/v1/nodes", new_node(facts))
        held = (known["metadata"].get("labels") if known else None) or {}
        first = {key: value for key, value in facts.first_labels.items() if key not in held}
        labels = {**first, **labels_of(facts)}
        metadata = {"labels": labels, "annotations": annotations_of(facts)}
        return await api.patch(f"api/v1/nodes/{facts.name}", {"metadata": metadata})

    async def _write_status(self, facts: NodeFacts, known: Object) -> None:
        status = node_status(facts, known.get("status") or {}, self._context.clock())
        await self._context.api.patch(f"api/v1/nodes/{facts.name}/status", {"status": status})

    async def _report(self, facts: NodeFacts) -> None:
        """Write the status now and then, so that the node is seen as ready again after a break."""
        watcher = _NodeWatch(self._client, facts.name)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(watcher.informer.run())
            while True:
                await watcher.wait(STATUS_SECONDS)
                try:
                    known = await self._context.api.named("nodes", None, facts.name)
                    # A node that somebody deleted stays so until its next start, as with kubelet.
                    if known is not None:
                        await self._write_status(facts, known)
                except UnbrokenError as error:
                    log.warning("node status not written", node=facts.name, error=error)
                    await clock.pause(RETRY_SECONDS)

    async def _beat(self) -> None:
        owner = OwnerReference(apiVersion="v1", kind="Node", name=self._options.name, uid=self._uid)
        seconds = self._options.heartbeat_seconds
        await keep_lease(
            self._client,
            LeaseTerms(self._options.name, renew_seconds=seconds, owners=[owner]),
        )

    # --- events

    def _record(self, pod: Object, note: Note) -> None:
        metadata = pod["metadata"]
        about = ObjectReference(
            apiVersion="v1",
            kind="Pod",
            name=metadata["name"],
            namespace=metadata["namespace"],
            uid=metadata["uid"],
            resourceVersion=metadata.get("resourceVersion"),
            fieldPath=note.field_path or None,
        )
        kind = "Warning" if note.is_warning else "Normal"
        self._recorder.record(about, kind, note.reason, note.message)

    def _note_node(self, reason: str, text: str, *, is_warning: bool = False) -> None:
        # Kubelet refers to its node by name only.
        name = self._options.name
        about = ObjectReference(kind="Node", name=name, uid=name)
        self._recorder.record(about, "Warning" if is_warning else "Normal", reason, text)

    # --- pods

    def _changed(self, old: Pod | None, new: Pod | None) -> None:
        """The informer's word: a pod has come, changed or gone."""
        if new is None:
            assert old is not None
            assert old.metadata is not None
            if worker := self._workers.get(str(old.metadata.uid)):
                worker.gone()
            return
        pod: Object = new.to_dict()
        uid = pod["metadata"]["uid"]
        if worker := self._workers.get(uid):
            worker.changed(pod)
        else:
            self._accept(uid, pod)

    def _source_changed(
        self, kind: type[ConfigMap | Secret], old: HasMetadata | None, new: HasMetadata | None
    ) -> None:
        """An object has changed that volumes may be made from."""
        for worker in self._workers.values():
            worker.object_changed(kind, *key_of(changed(old, new)))

    def _accept(self, uid: str, pod: Object) -> None:
        files = PodFiles(self._context.directory / "pods" / uid)
        is_known = files.recorded() is not None
        rejection = None
        if not is_known and not is_over(pod) and "deletionTimestamp" not in pod["metadata"]:
            others = [w.pod for w in self._workers.values() if not w.machine.is_finished]
            rejection = admission(pod, others, self._context.allocatable)
        if rejection is None and not is_over(pod):
            self._give_gpus(uid, pod)
        worker = PodWorker(self._context, pod, rejection)
        self._workers[uid] = worker
        self._tasks.create_task(self._work(uid, worker))

    async def _work(self, uid: str, worker: PodWorker) -> None:
        try:
            await worker.run()
        except Exception:
            # The next change of the pod makes a new worker, which takes over from disk.
            log.exception("task of a pod failed", node=self._options.name, pod=uid)
        else:
            self._free_gpus(uid)
        finally:
            del self._workers[uid]

    def _free_gpus(self, uid: str) -> None:
        for gpu, holder in self._context.gpus.items():
            if holder == uid:
                self._context.gpus[gpu] = ""

    def _give_gpus(self, uid: str, pod: Object) -> None:
        """Lowest free GPUs first; those of pods that have ended are free."""
        for gpu, holder in self._context.gpus.items():
            other = self._workers.get(holder)
            if other is not None and other.machine.is_finished:
                self._context.gpus[gpu] = ""
        wanted = int(pod_requests(pod).get(GPU_RESOURCE, 0))
        wanted -= list(self._context.gpus.values()).count(uid)
        free = [gpu for gpu, holder in self._context.gpus.items() if not holder]
        for gpu in free[: max(wanted, 0)]:
            self._context.gpus[gpu] = uid

    # --- taking over

    def _pods_on_disk(self) -> list[PodFiles]:
        directory = self._context.directory / "pods"
        return (
            [PodFiles(path) for path in sorted(directory.iterdir())] if directory.exists() else []
        )

    def _take_over(self) -> None:
        """Reserve the addresses and GPUs of an earlier runner's pods."""
        recorded = {files.uid: files.recorded() for files in self._pods_on_disk()}
        addresses = {known["ip"] for known in recorded.values() if known}
        self._context.addresses.keep(addresses - {self._context.address})
        for uid, known in recorded.items():
            for gpu in (known or {}).get("gpus", ()):
                if gpu in self._context.gpus:
                    self._context.gpus[gpu] = uid

    async def _clear_up(self) -> None:
        """End pods that left the API while no runner was here."""
        for files in self._pods_on_disk():
            if files.uid not in self._workers:
                await end_pod(files, 0.0)
                files.discard()
                self._free_gpus(files.uid)
        known = [files.container_ids() for files in self._pods_on_disk()]
        self._context.limits.tidy({identity for ids in known for identity in ids})


class _NodeWatch:
    """Notices when the node was declared dead, or removed."""

    def __init__(self, client: KubeClient, name: str) -> None:
        self._needs_word = asyncio.Event()
        self.informer = Informer(
            client, NodeResource, fields=f"metadata.name={name}", on_change=self._changed
        )

    def _changed(self, old: NodeResource | None, new: NodeResource | None) -> None:
        if not is_ready(new):
            self._needs_word.set()

    async def wait(self, seconds: float) -> None:
        """Until the status is to be written."""
        try:
            async with asyncio.timeout(seconds):
                await self._needs_word.wait()
        except TimeoutError:
            return
        finally:
            self._needs_word.clear()


def _capacity(options: NodeOptions) -> dict[str, str]:
    disk = os.statvfs(options.directory)
    result = {
        "cpu": str(options.cpu),
        "memory": options.memory,
        "pods": str(PODS_MAX),
        "ephemeral-storage": f"{disk.f_blocks * disk.f_frsize // 1024}Ki",
        **options.resources,
    }
    if options.gpus:
        result[GPU_RESOURCE] = str(options.gpus)
    return result


def host_boot_id() -> str:
    """Return the boot ID of this host; empty: not known."""
    return _first_line("/proc/sys/kernel/random/boot_id")


def _first_line(path: str) -> str:
    try:
        return Path(path).read_text("utf-8").strip()
    except OSError:
        return ""


def pods_below(directory: Path) -> list[PodFiles]:
    """Pods of a node's directory, or of the nodes' directories in it."""
    return [
        PodFiles(path.parent)
        for pattern in ("pods/*/pod.json", "*/pods/*/pod.json")
        for path in directory.glob(pattern)
    ]


async def stop_pods(directory: Path) -> None:
    """End every pod of the nodes below `directory`, each within its own grace."""
    async with asyncio.TaskGroup() as tasks:
        for files in pods_below(directory):
            known = files.recorded() or {}
            grace = known.get("grace")
            tasks.create_task(end_pod(files, 30.0 if grace is None else float(grace)))
    # Agents that were killed with their keepers could not remove theirs.
    socket_directory.sweep()


async def end_pod(files: PodFiles, grace_seconds: float) -> None:
    """Ask what still runs of a pod to end, and kill it when the grace is over."""
    runs = files.live_runs()
    for run in runs:
        run.signal(SIGTERM if grace_seconds > 0 else SIGKILL_ALL)
    try:
        async with asyncio.timeout(grace_seconds or None):
            await _all_ended(runs)
    except TimeoutError:
        for run in runs:
            run.signal(SIGKILL_ALL)
        await _all_ended(runs)
    for run in runs:
        run.close()


async def _all_ended(runs: list[Run]) -> None:
    await asyncio.gather(*(run.ended() for run in runs))


PODS_MAX = 110
"""Kubelet's --max-pods."""
KUBELET_VERSION = "v1.33.0"
"""The behaviour that is followed; clients compare it with the server's."""
GPU_RESOURCE = "nvidia.com/gpu"


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """Facts about a node for its object."""

    name: str
    address: str
    port: int
    capacity: Mapping[str, str]
    labels: Mapping[str, str] = field(default_factory=dict)
    first_labels: Mapping[str, str] = field(default_factory=dict)
    """Labels that others change: given where the node has none of the key."""
    taints: tuple[Mapping[str, str], ...] = ()
    """Taints of a node that joins for the first time."""
    not_enforced: tuple[str, ...] = ()
    machine_id: str = ""
    boot_id: str = ""


def labels_of(facts: NodeFacts) -> dict[str, str]:
    """Labels that every node has, and its own."""
    machines = {"x86_64": "amd64", "aarch64": "arm64"}
    arch = machines.get(platform.machine(), platform.machine())
    return {
        "kubernetes.io/hostname": facts.name,
        "kubernetes.io/os": "linux",
        "kubernetes.io/arch": arch,
        "beta.kubernetes.io/os": "linux",
        "beta.kubernetes.io/arch": arch,
        **facts.labels,
    }


def new_node(facts: NodeFacts) -> Object:
    """The object with which a node joins."""
    metadata: Object = {"name": facts.name, "labels": {**facts.first_labels, **labels_of(facts)}}
    metadata["annotations"] = annotations_of(facts)
    spec: Object = {"providerID": f"unbroken://{facts.name}"}
    if facts.taints:
        spec["taints"] = [dict(taint) for taint in facts.taints]
    return {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "spec": spec}


def annotations_of(facts: NodeFacts) -> dict[str, str | None]:
    """Return the node's annotations; None removes."""
    return {NOT_ENFORCED: "; ".join(facts.not_enforced) or None}


def node_status(facts: NodeFacts, known: Object, now: float) -> Object:
    """The status; times of conditions that have not changed are those of `known`."""
    arch = labels_of(facts)["kubernetes.io/arch"]
    return {
        "capacity": dict(facts.capacity),
        "allocatable": dict(facts.capacity),
        "conditions": _conditions(known, now),
        "addresses": [
            {"type": "InternalIP", "address": facts.address},
            {"type": "Hostname", "address": facts.name},
        ],
        "daemonEndpoints": {"kubeletEndpoint": {"Port": facts.port}},
        "nodeInfo": {
            "architecture": arch,
            "bootID": facts.boot_id,
            "containerRuntimeVersion": "unbroken://0.1",
            "kernelVersion": platform.release(),
            "kubeProxyVersion": "",
            "kubeletVersion": KUBELET_VERSION,
            "machineID": facts.machine_id,
            "operatingSystem": "linux",
            "osImage": _os_image(),
            "systemUUID": facts.machine_id,
        },
    }


def _os_image() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "Linux")
    except OSError:
        return "Linux"


def _conditions(known: Object, now: float) -> list[Object]:
    wanted = (
        ("MemoryPressure", "False", "KubeletHasSufficientMemory", "has sufficient memory"),
        ("DiskPressure", "False", "KubeletHasNoDiskPressure", "has no disk pressure"),
        ("PIDPressure", "False", "KubeletHasSufficientPID", "has sufficient PID"),
        ("Ready", "True", "KubeletReady", "is posting ready status"),
    )
    before = {c["type"]: c for c in known.get("conditions") or ()}
    result = []
    for kind, status, reason, message in wanted:
        old = before.get(kind) or {}
        since = old.get("lastTransitionTime") if old.get("status") == status else None
        result.append(
            {
                "type": kind,
                "status": status,
                "reason": reason,
                "message": f"unbroken {message}",
                "lastHeartbeatTime": rfc3339(now),
                "lastTransitionTime": since or rfc3339(now),
            }
        )
    return result


# --- what fits


def pod_requests(pod: Object) -> dict[str, Decimal]:
    """Return the resources that a pod takes of its node (resource helpers of Kubernetes,
    PodRequests).

    It is the sum of its containers and sidecars, or the need of an init container at its time if
    that is more.
    """
    spec = pod["spec"]
    total: dict[str, Decimal] = {}
    for container in spec.get("containers") or ():
        _add(total, container_requests(container))
    sidecars: dict[str, Decimal] = {}
    peak: dict[str, Decimal] = {}
    for container in spec.get("initContainers") or ():
        own = container_requests(container)
        if container.get("restartPolicy") == "Always":
            _add(total, own)
            _add(sidecars, own)
            own = dict(sidecars)
        else:
            _add(own, sidecars)
        for name, amount in own.items():
            peak[name] = max(peak.get(name, Decimal(0)), amount)
    for name, amount in peak.items():
        total[name] = max(total.get(name, Decimal(0)), amount)
    _add(total, {n: parse_quantity(a) for n, a in (spec.get("overhead") or {}).items()})
    return total


def container_requests(container: Object) -> dict[str, Decimal]:
    """Requests of a container, with limits where no request is given."""
    resources = container.get("resources") or {}
    asked = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return {name: parse_quantity(amount) for name, amount in asked.items()}


def _add(total: dict[str, Decimal], more: Mapping[str, Decimal]) -> None:
    for name, amount in more.items():
        total[name] = total.get(name, Decimal(0)) + amount


def admission(
    pod: Object, others: Iterable[Object], allocatable: Mapping[str, str]
) -> Rejected | None:
    """Return why the pod does not fit with the others that run here; None when it does."""
    pods = list(others)
    if len(pods) >= int(allocatable.get("pods", PODS_MAX)):
        return _rejected("pods", Decimal(1), Decimal(len(pods)), allocatable)
    used: dict[str, Decimal] = {}
    for other in pods:
        _add(used, pod_requests(other))
    for name, amount in pod_requests(pod).items():
        capacity = parse_quantity(allocatable.get(name, "0"))
        if amount > 0 and used.get(name, Decimal(0)) + amount > capacity:
            return _rejected(name, amount, used.get(name, Decimal(0)), allocatable)
    return None


def _rejected(name: str, asked: Decimal, used: Decimal, allocatable: Mapping[str, str]) -> Rejected:
    # Kubelet prints whole numbers here, of cpu in thousandths.
    factor = 1000 if name == "cpu" else 1
    capacity = parse_quantity(allocatable.get(name, "0"))
    numbers = [int(amount * factor) for amount in (asked, used, capacity)]
    text = (
        f"Pod was rejected: Node didn't have enough resource: {name}, requested: {numbers[0]}, "
        f"used: {numbers[1]}, capacity: {numbers[2]}"
    )
    return Rejected(f"OutOf{name}", text)
