"""The repairer against API servers: the daemon's labels on nodes, and each order given once."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.apiservers import Cluster
from tests.operator.plain import Object, PlainRequests
from tests.watching import running, until
from unbroken.core.nodes.repair.events import RepairSettings
from unbroken.errors import SpecError
from unbroken.kube.client import KubeClient, connect
from unbroken.kube.clock import rfc3339, wall
from unbroken.kube.events import EventRecorder
from unbroken.kube.informer import Informers
from unbroken.operator import definitions
from unbroken.operator.jobs.pods import JobIdentity
from unbroken.operator.nodes.providers import provider_of
from unbroken.operator.nodes.repair import COMPONENT, NodeRepair, RepairOptions
from unbroken.spec.job.incident import Incident, Remedy, Symptom
from unbroken.spec.keys import (
    CLUSTER_NAME,
    FAULT_DETAILS,
    FAULT_REASONS,
    FAULT_TYPES,
    FENCE,
    GPU_UNHEALTHY,
    HEALTH,
    OUT_OF_SERVICE,
    REPAIR,
    VERIFIED,
)
from unbroken.spec.nodes.kinds import (
    CLUSTER,
    MACHINE,
    NODE_CHECK,
    NODE_RECORD,
    BlameKind,
    CheckKind,
    ClusterSpec,
    MachineSpec,
    NodeRecordSpec,
    RepairState,
)
from unbroken.spec.nodes.values import Action, NodeRecovery

NUMBERS = itertools.count(1)
QUICK = RepairSettings(check=(), ask_seconds=0.1, share=1.0)
AWAITED = replace(QUICK, awaited_seconds=0.0)
INFO = dict.fromkeys(
    [
        *("machineID", "systemUUID", "kernelVersion", "osImage", "containerRuntimeVersion"),
        *("kubeletVersion", "kubeProxyVersion", "operatingSystem", "architecture"),
    ],
    "",
)


class Fleet(PlainRequests):
    """Nodes of a test's own, and plain requests."""

    def __init__(self, client: KubeClient, folder: Path) -> None:
        super().__init__(client)
        self.folder = folder
        self.names: list[str] = []

    async def until(self, path: str, holds: Callable[[Object], object]) -> Object:
        """Wait until the object exists and `holds` is true of it; return it."""
        found = await until(lambda: self.get(path), lambda one: one is not None and holds(one))
        assert found is not None
        return found

    async def node(self, **labels: str) -> str:
        """Create a healthy node; return its name."""
        name = f"fleet-{next(NUMBERS)}"
        self.names.append(name)
        given = {key.replace("__", "/"): value for key, value in labels.items()}
        body = {"metadata": {"name": name, "labels": {HEALTH: "Schedulable", **given}}}
        await self.call("POST", "api/v1/nodes", body=body)
        await self.boot(name, "boot-1")
        return name

    async def boot(self, name: str, boot_id: str, ready: str = "True") -> None:
        """Set the node's status to that of a booted kubelet; `ready` Unknown: a silent one."""
        condition = {"type": "Ready", "status": ready, "lastTransitionTime": rfc3339(wall())}
        status = {"nodeInfo": {**INFO, "bootID": boot_id}, "conditions": [condition]}
        await self.merge(f"api/v1/nodes/{name}/status", {"status": status})

    async def fault(self, name: str, health: str = "UnschedulablePendingReboot") -> None:
        """Write a fault as the daemon does."""
        now = rfc3339(wall())
        condition = {
            "type": GPU_UNHEALTHY,
            "status": "True",
            "reason": "Xid79",
            "message": "GPU has fallen off the bus",
            "lastTransitionTime": now,
        }
        path = f"api/v1/nodes/{name}"
        held = (await self.call("GET", path))["status"]["conditions"]
        await self.merge(f"{path}/status", {"status": {"conditions": [*held, condition]}})
        labels = {HEALTH: health, FAULT_REASONS: "Xid79", FAULT_TYPES: GPU_UNHEALTHY}
        taint = {"key": HEALTH, "value": "Unschedulable", "effect": "NoSchedule"}
        details = {FAULT_DETAILS: "[]"}
        body = {
            "metadata": {"labels": labels, "annotations": details},
            "spec": {"taints": [taint]},
        }
        await self.merge(path, body)

    async def record(self, name: str, holds: Callable[[NodeRecordSpec], object]) -> NodeRecordSpec:
        """Wait until `holds` is true of the node's record; return the record."""
        path = f"{NODE_RECORD.path}/{name}"
        found = await self.until(path, lambda one: holds(NODE_RECORD.spec_of(one)[0]))
        return NODE_RECORD.spec_of(found)[0]

    async def reasons(self, name: str, last: str) -> list[str]:
        """Wait for the last event of the node; return the reasons of all in order."""
        path = "api/v1/namespaces/default/events"

        def of_node(listed: Object) -> list[str]:
            items = [one for one in listed["items"] if one["involvedObject"]["name"] == name]
            return [one["reason"] for one in sorted(items, key=lambda one: one["metadata"]["name"])]

        return of_node(await self.until(path, lambda listed: last in of_node(listed)))

    async def returned(self, name: str) -> Object:
        """Wait until the node is back in service; return it."""
        return await self.until(
            f"api/v1/nodes/{name}",
            lambda one: (
                one["metadata"]["labels"][HEALTH] == "Schedulable"
                and VERIFIED in one["metadata"].get("annotations", {})
            ),
        )

    def script(self, text: str) -> tuple[str, ...]:
        """Return a command for the provider; it writes its arguments to `calls`."""
        file = self.folder / "repair.sh"
        file.write_text(f'#!/bin/sh\necho "$ACTION $NODE" >> {self.folder}/calls\n{text}\n')
        file.chmod(0o755)
        return (str(file),)

    def calls(self) -> list[str]:
        """Return `ACTION NODE` of each call; other tests have nodes on this server, too."""
        file = self.folder / "calls"
        lines = file.read_text().splitlines() if file.exists() else []
        return [line for line in lines if line.split()[1].startswith("fleet-")]

    @asynccontextmanager
    async def repairer(self, options: RepairOptions) -> AsyncIterator[NodeRepair]:
        """Run a repairer while the block runs."""
        informers, recorder = Informers(self.client), EventRecorder(self.client, COMPONENT)
        repair = NodeRepair(self.client, informers, recorder, options)
        async with running(informers.run(), recorder.run(), repair.run()):
            yield repair

    async def clean_up(self) -> None:
        """Delete all objects, since other tests share the server."""
        for name in self.names:
            paths = [f"{MACHINE.path}/{name}", f"{NODE_RECORD.path}/{name}", f"api/v1/nodes/{name}"]
            for path in paths:
                if await self.get(path) is not None:
                    await self.merge(path, {"metadata": {"finalizers": None}})
                    await self.client.raw("DELETE", path)


@pytest.fixture
def fleet(cluster: Cluster, tmp_path: Path) -> Any:
    """Open the API for nodes of a test's own."""

    @asynccontextmanager
    async def opened() -> AsyncIterator[Fleet]:
        async with connect(cluster.kubeconfig) as client:
            await definitions.install(client)
            found = Fleet(client, tmp_path)
            # Many silent nodes of other tests would look like a fault of the network.
            listed = await found.call("GET", "api/v1/nodes")
            found.names = [one["metadata"]["name"] for one in listed["items"]]
            await found.clean_up()
            found.names = []
            try:
                yield found
            finally:
                await found.clean_up()

    return opened


async def test_faulty_node_is_rebooted_and_all_that_told_of_it_taken_away(fleet: Any) -> None:
    async with fleet() as found:
        options = RepairOptions("command", found.script("exit 0"), QUICK)
        name = await found.node()
        async with found.repairer(options):
            await found.fault(name)
            await found.record(name, lambda one: one.repair and one.repair.acted_at)
            await found.until(f"api/v1/nodes/{name}", lambda one: found.calls())
            await found.boot(name, "boot-2")
            node = await found.returned(name)
            assert await found.reasons(name, "NodeRepaired") == [
                "RepairNeeded",
                "RepairOrdered",
                "NodeRepaired",
            ]
        metadata = node["metadata"]
        assert not {FAULT_REASONS, FAULT_TYPES} & metadata["labels"].keys()
        assert metadata["annotations"] == {VERIFIED: "boot-2"}
        assert "taints" not in node["spec"]
        assert set(found.calls()) == {f"reboot {name}"}
        record = await found.record(name, lambda one: one.history)
        assert record.history[-1].state is RepairState.DONE
        assert record.history[-1].reason == "Xid79: GPU has fallen off the bus"
        assert [one.kind for one in record.blame] == [BlameKind.FAULT]
        assert record.probation_until is not None


async def test_silent_node_that_a_job_waits_for_is_out_of_service_once_its_machine_is_replaced(
    fleet: Any,
) -> None:
    async with fleet() as found:
        options = RepairOptions(
            "command", found.script(f"test -e {found.folder}/off || exit 75"), AWAITED
        )
        name = await found.node()
        path, pods = f"api/v1/nodes/{name}", "api/v1/namespaces/default/pods"
        body = {
            "metadata": {"name": f"lm-{name}", "labels": {"ray.io/cluster": "lm"}},
            "spec": {"nodeName": name, "containers": [{"name": "ray", "image": "any"}]},
        }
        await found.call("POST", pods, body=body)
        async with found.repairer(options):
            await found.merge(path, {"metadata": {"annotations": {FENCE: f"pod lm-{name}"}}})
            await found.boot(name, "boot-1", ready="Unknown")
            asked = await found.until(path, lambda _: len(found.calls()) > 1)
            assert not proofs(asked), "its machine may still run"
            (found.folder / "off").touch()
            await found.until(path, proofs)
            await found.boot(name, "boot-2")
            await found.until(path, lambda one: not proofs(one))
            node = await found.returned(name)
        assert FENCE not in node["metadata"]["annotations"]
        assert HEALTH not in [one["key"] for one in node["spec"].get("taints") or ()]
        assert set(found.calls()) == {f"replace {name}"}


def proofs(node: Object) -> list[str]:
    """Return the effects of the taints by which Kubernetes removes the pods of a dead node."""
    taints = node["spec"].get("taints") or ()
    return [one["effect"] for one in taints if one["key"] == OUT_OF_SERVICE]


async def test_repair_waits_until_the_ray_pods_of_the_node_have_left(fleet: Any) -> None:
    async with fleet() as found:
        options = RepairOptions("command", found.script("exit 0"), QUICK)
        name = await found.node()
        pod = f"llm-worker-{name}"
        body = {
            "metadata": {"name": pod, "labels": {"ray.io/cluster": "llm"}},
            "spec": {"nodeName": name, "containers": [{"name": "ray", "image": "any"}]},
        }
        pods = "api/v1/namespaces/default/pods"
        await found.call("POST", pods, body=body)
        async with found.repairer(options):
            await found.fault(name)
            waits = f"1 pod of jobs must leave: {pod}"
            await found.record(name, lambda one: one.repair and one.repair.message == waits)
            assert found.calls() == []
            await found.call("DELETE", f"{pods}/{pod}", body={"gracePeriodSeconds": 0})
            await found.record(name, lambda one: one.repair and one.repair.acted_at)


async def test_without_recovery_nothing_is_touched_but_on_a_persons_order(fleet: Any) -> None:
    async with fleet() as found:
        spec = ClusterSpec("Mine", "abcdefghijkl", {}, NodeRecovery.NONE)
        await found.call("POST", CLUSTER.path, body=CLUSTER.new("mine", spec))
        quiet = await found.node(**{CLUSTER_NAME: "Mine"})
        other = await found.node()
        options = RepairOptions("command", found.script("exit 0"), QUICK)
        async with found.repairer(options):
            await found.fault(quiet)
            before = await found.call("GET", f"api/v1/nodes/{quiet}")
            await found.fault(other)
            await found.record(other, lambda one: one.repair and one.repair.acted_at)
            await found.boot(other, "boot-2")
            await found.returned(other)
            assert await found.call("GET", f"api/v1/nodes/{quiet}") == before
            record = await found.record(quiet, lambda one: one.blame)
            assert record.repair is None
            annotate = {"metadata": {"annotations": {REPAIR: "reboot"}}}
            await found.merge(f"api/v1/nodes/{quiet}", annotate)
            await found.record(quiet, lambda one: one.repair and one.repair.acted_at)
            await found.boot(quiet, "boot-2")
            node = await found.returned(quiet)
        assert REPAIR not in node["metadata"]["annotations"]
        await found.client.raw("DELETE", f"{CLUSTER.path}/mine")


async def test_repairer_that_takes_over_orders_nothing_twice(fleet: Any) -> None:
    async with fleet() as found:
        name = await found.node()
        await found.call("POST", MACHINE.path, body=MACHINE.new(name, MachineSpec()))
        options = RepairOptions("machines", settings=QUICK)
        async with found.repairer(options):
            await found.fault(name)
            path = f"{MACHINE.path}/{name}"
            await found.until(path, lambda one: one["spec"].get("boots") == 1)
        async with found.repairer(options):
            await found.merge(f"{path}/status", {"status": {"boots": 1}})
            await found.boot(name, "boot-2")
            await found.returned(name)
        machine = await found.call("GET", path)
        assert machine["spec"]["boots"] == 1


async def test_node_returns_when_its_check_has_passed(fleet: Any) -> None:
    async with fleet() as found:
        settings = RepairSettings(check=(CheckKind.BASIC,), ask_seconds=0.1, share=1.0)
        options = RepairOptions("command", found.script("exit 0"), settings)
        name = await found.node()
        async with found.repairer(options):
            await found.fault(name)
            await found.record(name, lambda one: one.repair and one.repair.acted_at)
            await found.boot(name, "boot-2")
            record = await found.record(name, lambda one: one.repair and one.repair.check)
            made = f"{NODE_CHECK.path}/{record.repair.check}"
            asked = await found.until(made, lambda one: True)
            assert asked["spec"]["nodes"] == [name]
            assert asked["spec"]["isForced"] is True
            node = await found.call("GET", f"api/v1/nodes/{name}")
            assert node["spec"]["taints"]
            passed = {"status": {"phase": "Passed", "message": "3 of 3"}}
            await found.merge(f"{made}/status", passed)
            await found.returned(name)
        await found.client.raw("DELETE", made)


async def test_incidents_of_a_job_are_held_against_the_culprits_node_once(fleet: Any) -> None:
    async with fleet() as found:
        name = await found.node()
        now = wall()
        culprit = Symptom(now, "CudaError", "ECC error", node=name, rank=3)
        incident = Incident(1, 0, culprit, (culprit,), Remedy.POD, "lost", now, ended_at=now + 1.0)
        for _ in range(2):
            async with found.repairer(RepairOptions(settings=QUICK)) as repair:
                repair.incident_ended(JobIdentity("team", "lm", "uid"), incident)
                record = await found.record(name, lambda one: one.blame)
        assert [(one.source, one.weight) for one in record.blame] == [("team/lm-1", 0.2)]


async def test_provider_that_is_unknown_or_lacks_its_command_is_refused(cluster: Cluster) -> None:
    client = connect(cluster.kubeconfig)
    with pytest.raises(SpecError, match="there are: machines, cluster-api"):
        provider_of(client, "gcp")
    with pytest.raises(SpecError, match="--node-command"):
        provider_of(client, "command")
    assert provider_of(client, "none").supports == frozenset()
    assert Action.REPLACE in provider_of(client, "karpenter").supports
    await client.close()
