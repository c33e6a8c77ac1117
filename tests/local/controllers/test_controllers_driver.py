"""The controllers at work against API servers without controllers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import Namespace

from tests.apiservers import Cluster
from tests.watching import running, until
from unbroken.errors import UnbrokenError
from unbroken.kube.client import STRATEGIC, KubeClient, connect
from unbroken.kube.clock import pause, wall
from unbroken.kube.errors import ApiRefusal
from unbroken.kube.lease import LeaseTerms, renew_lease
from unbroken.local.controllers import ControllerOptions, run_controllers

Object = dict[str, Any]


class World:
    """A namespace of the test's own, and plain requests."""

    def __init__(self, client: KubeClient, namespace: str) -> None:
        self.client = client
        self.namespace = namespace

    def path(self, plural: str, name: str = "", group: str = "api/v1") -> str:
        """Return the path of a collection or an object in the namespace."""
        return f"{group}/namespaces/{self.namespace}/{plural}" + (f"/{name}" if name else "")

    async def post(self, path: str, body: Object) -> Object:
        """Create an object."""
        made: Object = msgspec.json.decode(await self.client.raw("POST", path, body=body))
        return made

    async def get(self, path: str) -> Object | None:
        """Return the object; None if it does not exist."""
        try:
            found: Object = msgspec.json.decode(await self.client.raw("GET", path))
        except ApiRefusal as error:
            if error.code == 404:
                return None
            raise
        return found

    async def until(self, path: str, holds: Callable[[Object | None], object]) -> None:
        """Poll until `holds` is true of the object."""
        await until(lambda: self.get(path), holds)

    async def gone(self, path: str) -> None:
        """Wait until the object is gone."""
        await self.until(path, lambda found: found is None)

    async def config_map(
        self, name: str, *owners: Object, finalizers: list[str] | None = None
    ) -> Object:
        """Create a small object."""
        metadata = {"name": name, "ownerReferences": list(owners), "finalizers": finalizers}
        body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}
        return await self.post(self.path("configmaps"), body)

    async def delete(self, path: str, policy: str = "Background", **more: Any) -> None:
        """Delete an object."""
        await self.client.raw("DELETE", path, body={"propagationPolicy": policy, **more})


def owned_by(item: Object, block: bool = False) -> Object:
    """Return a reference to an owner."""
    return {
        "apiVersion": item["apiVersion"],
        "kind": item["kind"],
        "name": item["metadata"]["name"],
        "uid": item["metadata"]["uid"],
        "blockOwnerDeletion": block,
    }


@asynccontextmanager
async def world(cluster: Cluster, folder: Path, grace: float = 40.0) -> AsyncIterator[World]:
    """Run the controllers; yield a new namespace, which they delete at the end."""
    options = ControllerOptions(folder / "volumes", grace, orphan_seconds=0.2)
    async with connect(cluster.kubeconfig) as client:
        made = await client.create(Namespace(metadata=ObjectMeta(generateName="controllers-")))
        assert made.metadata is not None
        assert made.metadata.name is not None
        it = World(client, made.metadata.name)
        async with running(run_controllers(client, options)):
            yield it
            path = f"api/v1/namespaces/{it.namespace}"
            if await it.get(path) is not None:
                await it.delete(path)
            await it.gone(path)


async def test_dependents_follow_their_owner(cluster: Cluster, tmp_path: Path) -> None:
    """Delete several levels; a dependent with another owner stays without the reference."""
    async with world(cluster, tmp_path) as it:
        root, other = await it.config_map("root"), await it.config_map("other")
        child = await it.config_map("child", owned_by(root))
        await it.config_map("grandchild", owned_by(child))
        await it.config_map("shared", owned_by(root), owned_by(other))
        lost = {**owned_by(root), "uid": "not-there", "name": "not-there"}
        await it.config_map("born-orphan", lost)
        await it.delete(it.path("configmaps", "root"))
        for name in ("child", "grandchild", "born-orphan"):
            await it.gone(it.path("configmaps", name))
        await it.until(
            it.path("configmaps", "shared"),
            lambda found: (
                found and [one["name"] for one in found["metadata"]["ownerReferences"]] == ["other"]
            ),
        )


async def test_foreground_waits_for_those_that_block(cluster: Cluster, tmp_path: Path) -> None:
    """Keep the owner as long as a blocking dependent exists."""
    async with world(cluster, tmp_path) as it:
        root = await it.config_map("root")
        await it.config_map("held", owned_by(root, block=True), finalizers=["example.com/hold"])
        await it.config_map("free", owned_by(root, block=True))
        await it.delete(it.path("configmaps", "root"), "Foreground")
        await it.gone(it.path("configmaps", "free"))
        held = it.path("configmaps", "held")
        await it.until(held, lambda found: found and "deletionTimestamp" in found["metadata"])
        assert await it.get(it.path("configmaps", "root")) is not None
        body = {"metadata": {"finalizers": None}}
        await it.client.merge(held, body)
        await it.gone(held)
        await it.gone(it.path("configmaps", "root"))


async def test_orphans_stay(cluster: Cluster, tmp_path: Path) -> None:
    """Remove the reference to the owner."""
    async with world(cluster, tmp_path) as it:
        root = await it.config_map("root")
        await it.config_map("child", owned_by(root))
        await it.delete(it.path("configmaps", "root"), "Orphan")
        await it.gone(it.path("configmaps", "root"))
        child = await it.get(it.path("configmaps", "child"))
        assert child is not None
        assert "ownerReferences" not in child["metadata"]


def definition(group: str) -> Object:
    """Return the definition of a custom resource of any content."""
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"things.{group}"},
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {"kind": "Thing", "plural": "things", "singular": "thing"},
            "versions": [
                {
                    "name": "v1",
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": schema},
                }
            ],
        },
    }


async def test_custom_resources_are_owners_and_dependents(cluster: Cluster, tmp_path: Path) -> None:
    """Use kinds that came after the controllers, and delete objects with their namespace."""
    async with world(cluster, tmp_path) as it:
        group = f"{it.namespace}.example.com"
        definitions = "apis/apiextensions.k8s.io/v1/customresourcedefinitions"
        await it.post(definitions, definition(group))
        place = it.path("things", group=f"apis/{group}/v1")
        try:
            await it.until(place, lambda found: found is not None)
            thing: Object = {"apiVersion": f"{group}/v1", "kind": "Thing"}
            owner = await it.post(place, {**thing, "metadata": {"name": "owner"}})
            await it.config_map("child", owned_by(owner))
            child = await it.get(it.path("configmaps", "child"))
            assert child is not None
            await it.post(
                place, {**thing, "metadata": {"name": "leaf", "ownerReferences": [owned_by(child)]}}
            )
            await it.delete(f"{place}/owner")
            await it.gone(it.path("configmaps", "child"))
            await it.gone(f"{place}/leaf")
            await it.post(place, {**thing, "metadata": {"name": "left"}})
            await it.delete(f"api/v1/namespaces/{it.namespace}")
            await it.gone(f"api/v1/namespaces/{it.namespace}")
        finally:
            await it.delete(f"{definitions}/things.{group}")


async def test_namespace_waits_for_what_is_held_and_says_so(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Delete the namespace once nothing is left in it."""
    async with world(cluster, tmp_path) as it:
        await it.config_map("free")
        await it.config_map("held", finalizers=["example.com/hold"])
        namespace = f"api/v1/namespaces/{it.namespace}"
        await it.delete(namespace)
        await it.gone(it.path("configmaps", "free"))

        def told(found: Object | None) -> bool:
            conditions = (found or {}).get("status", {}).get("conditions", [])
            return ("NamespaceFinalizersRemaining", "True") in [
                (one["type"], one["status"]) for one in conditions
            ]

        await it.until(namespace, told)
        body = {"metadata": {"finalizers": None}}
        await it.client.merge(it.path("configmaps", "held"), body)
        await it.gone(namespace)


async def test_namespace_has_its_account_and_certificate(cluster: Cluster, tmp_path: Path) -> None:
    """Create both again after a deletion."""
    async with world(cluster, tmp_path) as it:
        account = it.path("serviceaccounts", "default")
        certificate = it.path("configmaps", "kube-root-ca.crt")
        for path in (account, certificate):
            await it.until(path, bool)
            found = await it.get(path)
            assert found is not None
            uid = found["metadata"]["uid"]
            await it.delete(path)
            await it.until(path, differs(uid))
        found = await it.get(certificate)
        assert found is not None
        assert found["data"]["ca.crt"] == cluster.ca


def differs(uid: str) -> Callable[[Object | None], bool]:
    """Return a check that another object has the name."""
    return lambda found: found is not None and found["metadata"]["uid"] != uid


def pod(name: str, node: str = "", **spec: Any) -> Object:
    """Return a pod of one container."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": "web"}},
        "spec": {
            "nodeName": node,
            "terminationGracePeriodSeconds": 0,
            "containers": [
                {
                    "name": "c",
                    "image": "i",
                    "ports": [{"name": "http", "containerPort": 8080}],
                }
            ],
            **spec,
        },
    }


def condition(kind: str, status: str) -> Object:
    """Return a condition of a pod or a node."""
    return {"type": kind, "status": status, "lastTransitionTime": "2024-01-01T00:00:00Z"}


def has_condition(kind: str, status: str) -> Callable[[Object | None], bool]:
    """Return a check that the object has the condition."""
    return lambda found: (
        (kind, status)
        in [
            (one["type"], one["status"])
            for one in (found or {}).get("status", {}).get("conditions", [])
        ]
    )


def taints(found: Object | None) -> list[str]:
    """Return keys and effects of a node's taints."""
    return sorted(
        f"{one['key'].rpartition('/')[2]}:{one['effect']}"
        for one in ((found or {}).get("spec") or {}).get("taints") or []
    )


@pytest.mark.slow
async def test_silent_node_loses_its_pods(cluster: Cluster, tmp_path: Path) -> None:
    """Set Unknown, taint the node, and delete its pods; remove the taints once it is back."""
    grace = 3.0  # who renews shares two processors with other tests

    async with world(cluster, tmp_path, grace=grace) as it:
        name = f"{it.namespace}-node"
        await it.post(
            "api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}
        )
        node = f"api/v1/nodes/{name}"
        alive: Object = {"status": {"conditions": [condition("Ready", "True")]}}
        try:
            await it.client.raw("PATCH", f"{node}/status", body=alive, headers=STRATEGIC)
            leaving = {"key": "node.kubernetes.io/unreachable", "operator": "Exists"}
            await it.post(it.path("pods"), pod("stays", name, tolerations=[{"operator": "Exists"}]))
            await it.post(
                it.path("pods"),
                pod("goes", name, tolerations=[{**leaving, "effect": "NoExecute"}]),
            )
            for one in ("stays", "goes"):
                await it.client.raw(
                    "PATCH", it.path("pods", f"{one}/status"), body=alive, headers=STRATEGIC
                )
            await it.until(node, lambda found: taints(found) == [])
            async with running(keep_renewing(it.client, name)):
                await pause(2 * grace)  # the lease alone keeps the node alive
                found = await it.get(node)
                assert has_condition("Ready", "True")(found)
            await it.until(node, has_condition("Ready", "Unknown"))
            lost = ["unreachable:NoExecute", "unreachable:NoSchedule"]
            await it.until(node, lambda found: taints(found) == lost)
            await it.until(it.path("pods", "stays"), has_condition("Ready", "False"))
            async with running(keep_renewing(it.client, name)):
                await it.client.raw("PATCH", f"{node}/status", body=alive, headers=STRATEGIC)
                await it.until(node, lambda found: taints(found) == [])
            assert await it.get(it.path("pods", "stays")) is not None
        finally:
            await it.delete(node)
        await it.gone(it.path("pods", "stays"))
        await it.gone(it.path("pods", "goes"))


async def keep_renewing(client: KubeClient, name: str) -> None:
    """Renew a node's lease four times a second."""
    while True:
        try:
            await renew_lease(client, LeaseTerms(name), wall())
        except UnbrokenError as error:
            raise AssertionError(str(error)) from error
        await pause(0.25)


async def test_pod_leaves_a_node_that_it_does_not_tolerate(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Evict by any program's NoExecute taint, at once or after its time."""
    async with world(cluster, tmp_path) as it:
        name = f"{it.namespace}-node"
        await it.post(
            "api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}
        )
        node = f"api/v1/nodes/{name}"
        try:
            for_a_time = {
                "key": "maintenance",
                "operator": "Exists",
                "effect": "NoExecute",
                "tolerationSeconds": 1,
            }
            forever = {"key": "maintenance", "operator": "Exists"}
            rows: list[tuple[str, list[Object]]] = [
                ("now", []),
                ("later", [for_a_time]),
                ("never", [forever]),
            ]
            for one, tolerations in rows:
                await it.post(it.path("pods"), pod(one, name, tolerations=tolerations))
            taint = {"key": "maintenance", "effect": "NoExecute"}
            await it.client.raw(
                "PATCH", node, body={"spec": {"taints": [taint]}}, headers=STRATEGIC
            )
            await it.gone(it.path("pods", "now"))
            await it.gone(it.path("pods", "later"))
            assert await it.get(it.path("pods", "never")) is not None
        finally:
            await it.delete(node)


def files(directory: Path) -> list[Path]:
    """Return the files in a directory that may not exist."""
    return list(directory.glob("*"))


def bound(found: Object | None) -> bool:
    """Return whether the claim or volume is bound."""
    return bool(found and found["status"].get("phase") == "Bound")


async def test_claim_is_given_a_directory_and_takes_it_along(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Create a volume, which is deleted with the claim; a pod that uses the claim keeps it."""
    async with world(cluster, tmp_path) as it:
        body: Object = {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": "data", "finalizers": ["kubernetes.io/pvc-protection"]},
            "spec": {
                "accessModes": ["ReadWriteOnce"],
                "resources": {"requests": {"storage": "1Gi"}},
            },
        }
        path = it.path("persistentvolumeclaims", "data")
        await it.post(it.path("persistentvolumeclaims"), body)
        await it.until(path, bound)
        claim = await it.get(path)
        assert claim is not None
        assert claim["status"]["capacity"] == {"storage": "1Gi"}
        volume_path = f"api/v1/persistentvolumes/{claim['spec']['volumeName']}"
        await it.until(volume_path, bound)
        volume = await it.get(volume_path)
        assert volume is not None
        directory = Path(volume["spec"]["hostPath"]["path"])
        assert directory.parent == tmp_path / "volumes"
        (directory / "file").write_text("kept")
        uses = {"name": "v", "persistentVolumeClaim": {"claimName": "data"}}
        await it.post(it.path("pods"), pod("user", volumes=[uses]))
        await it.delete(path)
        await it.config_map("marker")  # time for the binder to go wrong
        assert (await it.get(path) or {})["metadata"]["deletionTimestamp"]
        assert (directory / "file") in files(directory)
        await it.delete(it.path("pods", "user"), gracePeriodSeconds=0)
        await it.gone(path)
        await it.gone(volume_path)
        assert files(directory) == []


async def test_claim_without_class_waits_for_a_volume(cluster: Cluster, tmp_path: Path) -> None:
    """Keep the volume when the claim is deleted."""
    async with world(cluster, tmp_path) as it:
        size: Object = {"storage": "1Gi"}
        modes = ["ReadOnlyMany"]  # A claim that another test has left wants to write.
        body: Object = {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": "data"},
            "spec": {
                "storageClassName": "",
                "accessModes": modes,
                "resources": {"requests": size},
            },
        }
        path = it.path("persistentvolumeclaims", "data")
        await it.post(it.path("persistentvolumeclaims"), body)
        name = f"{it.namespace}-volume"
        (tmp_path / "mine").mkdir()
        volume: Object = {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": name},
            "spec": {
                "capacity": size,
                "accessModes": modes,
                "persistentVolumeReclaimPolicy": "Retain",
                "hostPath": {"path": str(tmp_path / "mine")},
            },
        }
        await it.post("api/v1/persistentvolumes", volume)
        await it.until(path, bound)
        await it.delete(path)
        await it.gone(path)
        place = f"api/v1/persistentvolumes/{name}"
        await it.until(place, lambda found: found and found["status"].get("phase") == "Released")
        assert (tmp_path / "mine").exists()
        await it.delete(place)
        await it.gone(place)


async def test_service_has_the_addresses_of_its_pods(cluster: Cluster, tmp_path: Path) -> None:
    """Follow the pods as they become ready and end; delete the addresses with the service."""
    async with world(cluster, tmp_path) as it:
        service: Object = {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "web"},
            "spec": {
                "clusterIP": "None",
                "selector": {"app": "web"},
                "ports": [{"port": 80, "targetPort": "http"}],
            },
        }
        await it.post(it.path("services"), service)
        endpoints = it.path("endpoints", "web")
        await it.until(endpoints, lambda found: found and not found.get("subsets"))
        await it.post(it.path("pods"), pod("a"))
        for ready, key in (("False", "notReadyAddresses"), ("True", "addresses")):
            status = {"podIP": "10.1.2.3", "conditions": [condition("Ready", ready)]}
            await it.client.raw(
                "PATCH", it.path("pods", "a/status"), body={"status": status}, headers=STRATEGIC
            )

            def shows(found: Object | None, key: str = key) -> bool:
                subsets = (found or {}).get("subsets") or [{}]
                return [one["ip"] for one in subsets[0].get(key, [])] == ["10.1.2.3"]

            await it.until(endpoints, shows)
        found = await it.get(endpoints)
        assert found is not None
        assert found["subsets"][0]["ports"] == [{"port": 8080, "protocol": "TCP"}]
        slices = it.path("endpointslices", group="apis/discovery.k8s.io/v1")
        if await it.get(slices) is not None:
            await it.until(
                f"{slices}/web-0",
                lambda found: found and found["endpoints"][0]["conditions"]["ready"],
            )
        await it.delete(it.path("pods", "a"), gracePeriodSeconds=0)
        await it.until(endpoints, lambda found: found and not found.get("subsets"))
        await it.delete(it.path("services", "web"))
        await it.gone(endpoints)
