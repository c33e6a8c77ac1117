"""The official Python client, against both API servers: typed, watching, dynamic."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from kubernetes import client, config, dynamic, watch
from kubernetes.client import (
    CoordinationV1Api,
    CoreV1Api,
    CustomObjectsApi,
    V1ConfigMap,
    V1Container,
    V1DeleteOptions,
    V1Lease,
    V1LeaseSpec,
    V1ObjectMeta,
    V1Pod,
    V1PodSpec,
)
from kubernetes.client.exceptions import ApiException
from kubernetes.dynamic.exceptions import ConflictError, NotFoundError

from tests.apiclient import Api
from tests.samples import config_map, define, definition, open_schema, pod, service, widget


@pytest.fixture
def connection(api: Api) -> Iterator[Any]:
    """An ApiClient made from the kubeconfig."""
    with config.new_client_from_config(str(api.cluster.kubeconfig)) as made:
        yield made


@pytest.fixture
def core(connection: Any) -> Any:
    """The typed client of core/v1."""
    return CoreV1Api(connection)


def typed_pod(name: str) -> Any:
    """A pod of one container."""
    container = V1Container(name="main", image="busybox", command=["sleep", "5"])
    return V1Pod(metadata=V1ObjectMeta(name=name), spec=V1PodSpec(containers=[container]))


def test_typed_pod_is_made_read_and_deleted(core: Any, api: Api) -> None:
    made = core.create_namespaced_pod(api.namespace, typed_pod("p"))
    assert (made.status.phase, made.spec.restart_policy) == ("Pending", "Always")
    assert core.read_namespaced_pod("p", api.namespace).metadata.uid == made.metadata.uid
    assert [p.metadata.name for p in core.list_namespaced_pod(api.namespace).items] == ["p"]
    core.delete_namespaced_pod("p", api.namespace, body=V1DeleteOptions(grace_period_seconds=0))
    with pytest.raises(ApiException) as caught:
        core.read_namespaced_pod("p", api.namespace)
    assert caught.value.status == 404


def test_typed_times_are_times(core: Any, api: Api) -> None:
    made = core.create_namespaced_pod(api.namespace, typed_pod("p"))
    assert made.metadata.creation_timestamp.tzinfo is not None
    leases = CoordinationV1Api(core.api_client)
    renewed = made.metadata.creation_timestamp.replace(microsecond=123456)
    body = V1Lease(metadata=V1ObjectMeta(name="l"), spec=V1LeaseSpec(renew_time=renewed))
    assert leases.create_namespaced_lease(api.namespace, body).spec.renew_time == renewed


def test_typed_patch_is_strategic(core: Any, api: Api) -> None:
    core.create_namespaced_service(api.namespace, service("s", a=1))
    changed = core.patch_namespaced_service("s", api.namespace, {"spec": service("s", b=2)["spec"]})
    assert [port.name for port in changed.spec.ports] == ["b", "a"]


def test_typed_replace_conflicts(core: Any, api: Api) -> None:
    body = V1ConfigMap(metadata=V1ObjectMeta(name="m"), data={"a": "1"})
    made = core.create_namespaced_config_map(api.namespace, body)
    made.data = {"a": "2"}
    core.replace_namespaced_config_map("m", api.namespace, made)
    with pytest.raises(ApiException) as caught:
        core.replace_namespaced_config_map("m", api.namespace, made)
    assert (caught.value.status, caught.value.reason) == (409, "Conflict")


def test_typed_list_comes_in_pages(core: Any, api: Api) -> None:
    for name in "abc":
        api.post("configmaps", config_map(name)).done()
    first = core.list_namespaced_config_map(api.namespace, limit=2)
    assert first.metadata.remaining_item_count == 1
    token = first.metadata._continue
    rest = core.list_namespaced_config_map(api.namespace, limit=2, _continue=token)
    assert [m.metadata.name for m in first.items + rest.items] == ["a", "b", "c"]


def test_binding_by_the_typed_client(core: Any, api: Api) -> None:
    core.create_namespaced_pod(api.namespace, typed_pod("p"))
    target = client.V1ObjectReference(kind="Node", name="n1")
    body = client.V1Binding(metadata=V1ObjectMeta(name="p"), target=target)
    core.create_namespaced_pod_binding("p", api.namespace, body, _preload_content=False)
    assert core.read_namespaced_pod("p", api.namespace).spec.node_name == "n1"


def test_watch_streams_typed_objects(core: Any, api: Api) -> None:
    version = core.list_namespaced_config_map(api.namespace).metadata.resource_version
    for name in "ab":
        api.post("configmaps", config_map(name)).done()
    api.delete("configmaps/a").done()
    stream = watch.Watch()
    seen = []
    for event in stream.stream(
        core.list_namespaced_config_map,
        api.namespace,
        resource_version=version,
        timeout_seconds=20,
    ):
        seen.append((event["type"], event["object"].metadata.name))
        if len(seen) == 3:
            stream.stop()
    assert seen == [("ADDED", "a"), ("ADDED", "b"), ("DELETED", "a")]


def test_watch_ends_with_its_timeout_and_goes_on(core: Any, api: Api) -> None:
    api.post("configmaps", config_map("a")).done()
    stream = watch.Watch()
    calls = stream.stream(core.list_namespaced_config_map, api.namespace, timeout_seconds=1)
    assert [event["object"].metadata.name for event in calls] == ["a"]


def test_custom_objects(connection: Any, api: Api) -> None:
    group = f"{api.namespace}.example.com"
    schema = open_schema(size={"type": "integer", "maximum": 5})
    define(api, definition(group, schema, subresources={"status": {}}))
    custom = CustomObjectsApi(connection)
    place: Any = {"group": group, "version": "v1", "namespace": api.namespace, "plural": "widgets"}
    custom.create_namespaced_custom_object(**place, body=widget(group, "w", spec={"size": 1}))
    custom.patch_namespaced_custom_object(**place, name="w", body={"spec": {"size": 2}})
    status = {"status": {"ok": True}}
    custom.patch_namespaced_custom_object_status(**place, name="w", body=status)
    found = custom.get_namespaced_custom_object(**place, name="w")
    assert (found["spec"], found["status"]) == ({"size": 2}, {"ok": True})
    with pytest.raises(ApiException) as caught:
        custom.patch_namespaced_custom_object(**place, name="w", body={"spec": {"size": 9}})
    assert caught.value.status == 422
    custom.delete_namespaced_custom_object(**place, name="w")
    assert custom.list_namespaced_custom_object(**place)["items"] == []


@pytest.fixture
def moving(connection: Any, tmp_path: Any) -> Any:
    """The dynamic client, which discovers what there is."""
    return dynamic.DynamicClient(connection, cache_file=str(tmp_path / "discovery.json"))


def test_dynamic_client_finds_built_in_kinds(moving: Any, api: Api) -> None:
    maps = moving.resources.get(api_version="v1", kind="ConfigMap")
    made = maps.create(body=config_map("m", a="1"), namespace=api.namespace)
    assert (made.metadata.name, made.data.a) == ("m", "1")
    maps.patch(
        name="m",
        namespace=api.namespace,
        body={"data": {"b": "2"}},
        content_type="application/merge-patch+json",
    )
    assert maps.get(name="m", namespace=api.namespace).data.to_dict() == {"a": "1", "b": "2"}
    found = maps.get(namespace=api.namespace, label_selector="x=y")
    assert found.items == []
    maps.delete(name="m", namespace=api.namespace)
    with pytest.raises(NotFoundError):
        maps.get(name="m", namespace=api.namespace)


def test_dynamic_client_finds_custom_kinds(moving: Any, api: Api) -> None:
    group = f"{api.namespace}.example.com"
    body = definition(group, open_schema(size={"type": "integer"}), subresources={"status": {}})
    define(api, body)
    widgets = moving.resources.get(api_version=f"{group}/v1", kind="Widget")
    widgets.create(body=widget(group, "w", spec={"size": 1}), namespace=api.namespace)
    widgets.status.patch(
        name="w",
        namespace=api.namespace,
        body={"status": {"x": 1}},
        content_type="application/merge-patch+json",
    )
    assert widgets.get(name="w", namespace=api.namespace).status.x == 1


def test_dynamic_client_applies_on_the_server_side(moving: Any, api: Api) -> None:
    maps = moving.resources.get(api_version="v1", kind="ConfigMap")
    maps.server_side_apply(
        body=config_map("m", a="1"), namespace=api.namespace, field_manager="one"
    )
    with pytest.raises(ConflictError):
        maps.server_side_apply(
            body=config_map("m", a="2"), namespace=api.namespace, field_manager="two"
        )
    maps.server_side_apply(
        body=config_map("m", a="2"),
        namespace=api.namespace,
        field_manager="two",
        force_conflicts=True,
    )
    assert api.get("configmaps/m").made["data"] == {"a": "2"}


def test_dynamic_client_watches(moving: Any, api: Api) -> None:
    pods = moving.resources.get(api_version="v1", kind="Pod")
    api.post("pods", pod("p")).done()
    stream = pods.watch(namespace=api.namespace, timeout=20)
    event = next(stream)
    assert (event["type"], event["object"].metadata.name) == ("ADDED", "p")
    stream.close()
