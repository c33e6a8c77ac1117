"""lightkube, against both API servers: sync and async, typed and generic."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from lightkube import ApiError, AsyncClient, Client, KubeConfig
from lightkube.core.resource_registry import resource_registry
from lightkube.generic_resource import (
    async_load_in_cluster_generic_resources,
    create_namespaced_resource,
    load_in_cluster_generic_resources,
)
from lightkube.models.core_v1 import Container, PodSpec
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import ConfigMap, Node, Pod, Service
from lightkube.types import CascadeType, PatchType

from tests.apiclient import Api
from tests.samples import config_map, define, definition, open_schema, pod, service, widget


def configured(api: Api) -> Any:
    """The kubeconfig, with the test's namespace."""
    return KubeConfig.from_file(api.cluster.kubeconfig).get()


@pytest.fixture
def client(api: Api) -> Iterator[Any]:
    """The sync client."""
    with Client(config=configured(api), namespace=api.namespace, field_manager="lightkube") as made:
        yield made


def typed_pod(name: str) -> Any:
    """A pod of one container."""
    container = Container(name="main", image="busybox")
    return Pod(metadata=ObjectMeta(name=name), spec=PodSpec(containers=[container]))


def test_typed_objects_are_made_read_changed_and_deleted(client: Any) -> None:
    made = client.create(typed_pod("p"))
    assert (made.status.phase, made.spec.restartPolicy) == ("Pending", "Always")
    made.metadata.labels = {"x": "y"}
    client.replace(made)
    assert client.get(Pod, "p").metadata.labels == {"x": "y"}
    assert [p.metadata.name for p in client.list(Pod, labels={"x": "y"})] == ["p"]
    client.delete(Pod, "p", grace_period=0, cascade=CascadeType.BACKGROUND)
    with pytest.raises(ApiError) as caught:
        client.get(Pod, "p")
    assert (caught.value.status.code, caught.value.status.reason) == (404, "NotFound")


def test_stale_replace_conflicts(client: Any) -> None:
    made = client.create(ConfigMap(metadata=ObjectMeta(name="m"), data={"a": "1"}))
    made.data = {"a": "2"}
    client.replace(made)
    with pytest.raises(ApiError) as caught:
        client.replace(made)
    assert caught.value.status.reason == "Conflict"


def test_all_kinds_of_patch(client: Any, api: Api) -> None:
    api.post("services", service("s", a=1)).done()
    client.patch(Service, "s", {"spec": {"ports": [{"port": 97, "targetPort": 2}]}})
    affinity = {"spec": {"sessionAffinity": "ClientIP"}}
    client.patch(Service, "s", affinity, patch_type=PatchType.MERGE)
    operation = [{"op": "test", "path": "/spec/ports/0/targetPort", "value": 2}]
    changed = client.patch(Service, "s", operation, patch_type=PatchType.JSON)
    assert (changed.spec.ports[0].targetPort, changed.spec.sessionAffinity) == (2, "ClientIP")


def test_status(client: Any, api: Api) -> None:
    api.post("pods", pod("p")).done()
    changed = client.patch(Pod.Status, "p", {"status": {"phase": "Running"}})
    assert changed.status.phase == "Running"


def test_apply_owns_fields(client: Any, api: Api) -> None:
    body = ConfigMap(metadata=ObjectMeta(name="m"), data={"a": "1"})
    assert client.apply(body).data == {"a": "1"}
    other = ConfigMap(metadata=ObjectMeta(name="m"), data={"a": "2"})
    with pytest.raises(ApiError) as caught:
        client.apply(other, field_manager="other")
    assert caught.value.status.reason == "Conflict"
    assert client.apply(other, field_manager="other", force=True).data == {"a": "2"}
    assert api.get("configmaps/m").made["data"] == {"a": "2"}


def test_list_comes_in_pages(client: Any, api: Api) -> None:
    for name in "abcde":
        api.post("configmaps", config_map(name)).done()
    found = client.list(ConfigMap, chunk_size=2)
    assert [m.metadata.name for m in found] == ["a", "b", "c", "d", "e"]


def test_list_over_namespaces(client: Any, api: Api) -> None:
    api.post("configmaps", config_map("m")).done()
    found = client.list(ConfigMap, namespace="*", fields={"metadata.name": "m"})
    assert api.namespace in {m.metadata.namespace for m in found}


def test_cluster_scoped_objects(client: Any, api: Api) -> None:
    name = f"{api.namespace}-n"
    client.create(Node(metadata=ObjectMeta(name=name)))
    client.patch(Node, name, {"spec": {"unschedulable": True}})
    assert client.get(Node, name).spec.unschedulable is True


def test_watch_streams_typed_objects(client: Any, api: Api) -> None:
    version = api.get("configmaps").made["metadata"]["resourceVersion"]
    for name in "ab":
        api.post("configmaps", config_map(name)).done()
    api.delete("configmaps/a").done()
    stream = client.watch(ConfigMap, resource_version=version, server_timeout=20)
    seen = [(kind, found.metadata.name) for kind, found in (next(stream) for _ in range(3))]
    assert seen == [("ADDED", "a"), ("ADDED", "b"), ("DELETED", "a")]
    stream.close()


def test_wait_for_a_condition(client: Any, api: Api) -> None:
    api.post("pods", pod("p")).done()
    status = {"status": {"conditions": [{"type": "Ready", "status": "True"}]}}
    api.patch("merge", "pods/p/status", status).done()
    assert client.wait(Pod, "p", for_conditions=["Ready"]).metadata.name == "p"


def test_generic_resource(client: Any, api: Api) -> None:
    group = f"{api.namespace}.example.com"
    schema = open_schema(size={"type": "integer"})
    define(api, definition(group, schema, subresources={"status": {}}))
    widgets: Any = create_namespaced_resource(group, "v1", "Widget", "widgets")
    client.create(widgets.from_dict(widget(group, "w", spec={"size": 1})))
    found = client.get(widgets, "w")
    assert found.spec == {"size": 1}
    found["spec"] = {"size": 3}
    assert client.replace(found).spec == {"size": 3}
    client.patch(widgets.Status, "w", {"status": {"x": 2}}, patch_type=PatchType.MERGE)
    assert client.get(widgets, "w").status == {"x": 2}
    with pytest.raises(ApiError) as caught:
        client.patch(widgets, "w", {"spec": {"size": "x"}}, patch_type=PatchType.MERGE)
    assert caught.value.status.code == 422
    client.apply(widgets.from_dict(widget(group, "v", spec={"size": 2})))
    assert [w.metadata.name for w in client.list(widgets)] == ["v", "w"]
    resource_registry.clear()


def test_generic_resources_of_the_cluster(client: Any, api: Api) -> None:
    group = f"{api.namespace}.example.com"
    define(api, definition(group, open_schema()))
    load_in_cluster_generic_resources(client)
    assert resource_registry.get(f"{group}/v1", "Widget") is not None
    resource_registry.clear()


async def test_async_client(api: Api) -> None:
    group = f"{api.namespace}.example.com"
    define(api, definition(group, open_schema(size={"type": "integer"})))

    async def use() -> list[tuple[str, str]]:
        async with AsyncClient(
            config=configured(api), namespace=api.namespace, field_manager="lightkube"
        ) as client:
            await client.create(typed_pod("p"))
            await client.apply(typed_pod("q"))
            await client.patch(Pod, "q", {"metadata": {"labels": {"x": "y"}}})
            await async_load_in_cluster_generic_resources(client)
            widgets: Any = resource_registry.get(f"{group}/v1", "Widget")
            await client.create(widgets.from_dict(widget(group, "w", spec={"size": 1})))
            assert (await client.get(widgets, "w")).spec == {"size": 1}
            names = [found.metadata.name async for found in client.list(Pod)]
            assert names == ["p", "q"]
            seen = []
            async for kind, found in client.watch(Pod, labels={"x": "y"}, server_timeout=20):
                seen.append((kind, found.metadata.name))
                if kind == "ADDED":
                    await client.delete(Pod, "q")
                elif kind == "DELETED":
                    break
            return seen

    # kube-apiserver may show that the pod is going before it is gone.
    seen = [event for event in await use() if event[0] != "MODIFIED"]
    assert seen == [("ADDED", "q"), ("DELETED", "q")]
    resource_registry.clear()


async def test_many_requests_at_once(api: Api) -> None:
    async def use() -> int:
        async with AsyncClient(config=configured(api), namespace=api.namespace) as client:
            bodies = [ConfigMap(metadata=ObjectMeta(name=f"m{n}")) for n in range(30)]
            await asyncio.gather(*(client.create(body) for body in bodies))
            return len([found async for found in client.list(ConfigMap)])

    assert await use() == 30
