"""Runs the nodes of this machine, and switches them off and on as their objects say.

`unbroken.dev/power: off` on a Node is a machine that loses power: its runner stops without a word,
and every process of its pods is killed.  `unbroken.dev/fence: <reason>` asks for proof that nothing
of the node runs.  It is given by the taint `node.kubernetes.io/out-of-service`, as whoever repairs
the nodes of a real cluster gives it; the pods of such a node are then removed, as Kubernetes' own
collector does.  A node that was fenced without being switched off comes back by itself after that.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from urllib.parse import quote

from lightkube.resources.core_v1 import Node, Pod

from unbroken.errors import WorldError
from unbroken.kube.cache import key_of
from unbroken.kube.client import ApiRefusal, KubeClient, Object
from unbroken.kube.informers import Informers
from unbroken.kube.workqueue import WorkQueue

from .node import NodeOptions, run_node
from .node.driver import pods_below
from .node.process import MARKER, Run, kill_marked
from .node.supervisor import descendants, start_ticks

log = logging.getLogger(__name__)

POWER, FENCE = "unbroken.dev/power", "unbroken.dev/fence"
OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"
MERGE = {"Content-Type": "application/merge-patch+json"}

CUT_SECONDS = 0.2
"""A runner that is cut off stops within a few rounds of the loop; what it waits for longer, such as
its server's clients, does not write to the API."""


class NodePower:
    """Keeps each node running, off or fenced, as its object says."""

    def __init__(
        self, client: KubeClient, informers: Informers, nodes: Mapping[str, NodeOptions]
    ) -> None:
        self._client = client
        self._nodes = informers.of(Node)
        self._pods = informers.of(Pod)
        self._options = nodes
        self._runners: dict[str, asyncio.Task[None]] = {}
        self._dark: set[str] = set()
        """Nodes of which nothing runs."""
        self._settled = {name: asyncio.Event() for name in nodes}
        self._tasks = asyncio.TaskGroup()
        self._checks: WorkQueue[str] = WorkQueue("power", self._check, workers=4)

    async def run(self) -> None:
        """Run the nodes until cancelled, which leaves their pods running."""
        for informer in (self._nodes, self._pods):
            await informer.synced.wait()
        async with self._tasks:
            self._tasks.create_task(self._checks.run())
            for name in self._options:
                self._checks.add(name)
            self._nodes.subscribe(self._on_node)
            self._pods.subscribe(self._on_pod)

    async def settled(self) -> None:
        """Return once each node has registered, or is off."""
        for event in self._settled.values():
            await event.wait()

    def _on_node(self, old: Node | None, new: Node | None) -> None:
        if new is None or key_of(new).name not in self._options:
            return
        if old is None or _matters(old) != _matters(new):
            self._checks.add(key_of(new).name)

    def _on_pod(self, old: Pod | None, new: Pod | None) -> None:
        pod = new or old
        name = pod.spec.nodeName if pod is not None and pod.spec else None
        if name in self._dark:
            self._checks.add(name)

    async def _check(self, name: str) -> None:
        node = self._nodes.get(name)
        is_off, is_fenced = _is(node, POWER, "off"), _is(node, FENCE)
        if is_off or is_fenced:
            await self._cut(name)
            self._settled[name].set()
        if is_fenced:
            assert node is not None
            await self._prove(node, comes_back=not is_off)
        elif not is_off:
            if node is not None and _has_taint(node):
                await self._write(node, taint=False)
            self._switch_on(name)

    def _switch_on(self, name: str) -> None:
        if name in self._runners:
            return
        if name in self._dark:
            log.info("node=%s power=on", name)
        self._dark.discard(name)
        options, settled = self._options[name], self._settled[name]
        runner = run_node(self._client, options, on_registered=settled.set)
        self._runners[name] = self._tasks.create_task(runner, name=name)

    async def _cut(self, name: str) -> None:
        if name in self._dark:
            return
        runner = self._runners.get(name)
        log.warning("node=%s power=off", name)
        if runner is not None:
            runner.cancel()
            await asyncio.wait({runner}, timeout=CUT_SECONDS)
        await asyncio.to_thread(kill_pods, self._options[name].directory)
        if runner is not None:
            await asyncio.wait({runner})
            del self._runners[name]
            # What was being started while the power went.
            await asyncio.to_thread(kill_pods, self._options[name].directory)
        self._dark.add(name)

    async def _prove(self, node: Node, *, comes_back: bool) -> None:
        name = key_of(node).name
        if not _has_taint(node):
            await self._write(node, taint=True)
            log.info('node=%s fenced=yes reason="%s"', name, _annotations(node).get(FENCE))
            return
        pods = list(self._unfinished(name))
        for pod in pods:
            await self._delete(pod)
        if not pods and comes_back:
            # Both at once, and before the runner starts: a node with the taint runs nothing.
            await self._write(node, taint=False)

    def _unfinished(self, name: str) -> Iterator[Pod]:
        for pod in self._pods.items():
            if pod.spec is None or pod.spec.nodeName != name:
                continue
            if pod.status is None or pod.status.phase not in ("Succeeded", "Failed"):
                yield pod

    async def _delete(self, pod: Pod) -> None:
        key = key_of(pod)
        uid = pod.metadata.uid if pod.metadata else None
        path = f"api/v1/namespaces/{quote(key.namespace)}/pods/{quote(key.name)}"
        body: Object = {"gracePeriodSeconds": 0, "preconditions": {"uid": uid}}
        try:
            await self._client.raw("DELETE", path, body=body)
        except ApiRefusal as error:
            if error.code not in (404, 409):
                raise
        else:
            log.info("pod=%s removed=node-fenced", key)

    async def _write(self, node: Node, *, taint: bool) -> None:
        """Set the taint, or remove it and what asked for it."""
        metadata = node.metadata
        kept: list[Object] = [
            one.to_dict()
            for one in (node.spec and node.spec.taints) or ()
            if one.key != OUT_OF_SERVICE
        ]
        if taint:
            kept.append({"key": OUT_OF_SERVICE, "value": "nodeshutdown", "effect": "NoExecute"})
        version = metadata.resourceVersion if metadata else None
        # The whole list, so with its version: others taint nodes too.
        changed: Object = {"resourceVersion": version}
        if not taint:
            changed["annotations"] = {FENCE: None}
        body: Object = {"metadata": changed, "spec": {"taints": kept or None}}
        path = f"api/v1/nodes/{quote(key_of(node).name)}"
        try:
            await self._client.raw("PATCH", path, body=body, headers=MERGE)
        except ApiRefusal as error:
            if error.code == 409:
                raise WorldError(str(error), 0.0) from error
            if error.code != 404:
                raise


async def retire(client: KubeClient, directories: Iterable[Path]) -> None:
    """Take nodes away for good: end what runs of them, and forget them."""
    for directory in directories:
        await asyncio.to_thread(kill_pods, directory)
        try:
            await client.raw("DELETE", f"api/v1/nodes/{quote(directory.name)}")
        except ApiRefusal as error:
            if error.code != 404:
                raise
        else:
            log.info("node=%s removed=yes", directory.name)


def _annotations(node: Node | None) -> Mapping[str, str]:
    return (node.metadata.annotations if node is not None and node.metadata else None) or {}


def _is(node: Node | None, annotation: str, value: str = "") -> bool:
    found = _annotations(node).get(annotation, "")
    return found == value if value else bool(found)


def _has_taint(node: Node) -> bool:
    return any(one.key == OUT_OF_SERVICE for one in (node.spec and node.spec.taints) or ())


def _matters(node: Node) -> object:
    return _is(node, POWER, "off"), _is(node, FENCE), _has_taint(node)


def kill_pods(directory: Path) -> None:
    """Kill every process of a node's pods, those that would tell of it first.  Blocks."""
    runs = [run for files in pods_below(directory) for run in files.live_runs()]
    try:
        for run in runs:
            _kill_run(run)
        for run in runs:
            # What had left its family.
            kill_marked(run.details[MARKER])
    finally:
        for run in runs:
            run.close()


def _kill_run(run: Run) -> None:
    # All stand still first: who sees another die would act on it, and the dead do not.
    run.signal(signal.SIGSTOP)
    stopped: dict[int, int] = {}
    while born := {pid for pid in descendants(run.supervisor) if pid not in stopped}:
        for pid in born:
            stopped[pid] = _signal(pid, start_ticks(pid), signal.SIGSTOP)
    for pid, ticks in stopped.items():
        _signal(pid, ticks, signal.SIGKILL)
    run.signal(signal.SIGKILL)


def _signal(pid: int, ticks: int | None, number: int) -> int:
    """Signal the process that started at `ticks`, if it lives; gives `ticks` back, or 0."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return 0
    try:
        # The number was checked after the descriptor was had: it cannot change hands.
        if ticks is None or start_ticks(pid) != ticks:
            return 0
        signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        return 0
    finally:
        os.close(handle)
    return ticks
