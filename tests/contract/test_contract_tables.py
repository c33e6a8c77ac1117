"""Other shapes of an answer: tables with printer columns, metadata alone."""

from __future__ import annotations

import pytest

from tests.apiclient import Api, Object
from tests.samples import config_map, define, definition, open_schema, pod, widget
from tests.tables import cases

TABLE = "application/json;as=Table;v=v1;g=meta.k8s.io"
METADATA = "application/json;as=PartialObjectMetadata;v=v1;g=meta.k8s.io"
METADATA_LIST = "application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io"


def shaped(api: Api, what: str, accept: str, **query: object) -> Object:
    """GET with an Accept header."""
    return api.send("GET", what, headers={"Accept": accept}, query=query).made


def cells(table: Object) -> list[dict[str, object]]:
    """Rows as {column: cell}."""
    columns = [column["name"] for column in table["columnDefinitions"]]
    return [dict(zip(columns, row["cells"], strict=True)) for row in table["rows"]]


def test_list_as_a_table(here: Api) -> None:
    made = here.post("configmaps", config_map("a", x="1", y="2")).made
    table = shaped(here, "configmaps", TABLE)
    assert (table["kind"], table["apiVersion"]) == ("Table", "meta.k8s.io/v1")
    assert [c["name"] for c in table["columnDefinitions"]] == ["Name", "Data", "Age"]
    row = table["rows"][0]
    assert row["cells"][:2] == ["a", 2]
    assert row["cells"][2].endswith("s")
    assert row["object"]["kind"] == "PartialObjectMetadata"
    assert row["object"]["metadata"]["uid"] == made["metadata"]["uid"]
    assert "data" not in row["object"]
    assert int(table["metadata"]["resourceVersion"]) >= int(made["metadata"]["resourceVersion"])


def test_one_object_as_a_table(here: Api) -> None:
    here.post("configmaps", config_map("a")).done()
    assert len(shaped(here, "configmaps/a", TABLE)["rows"]) == 1


def test_empty_table_has_columns(here: Api) -> None:
    table = shaped(here, "pods", TABLE)
    assert table["rows"] == []
    assert table["columnDefinitions"][0] == {
        "name": "Name",
        "type": "string",
        "format": "name",
        "description": table["columnDefinitions"][0]["description"],
        "priority": 0,
    }


@pytest.mark.parametrize(("include", "kind"), [("None", None), ("Object", "ConfigMap")])
def test_rows_may_carry_the_object_or_nothing(here: Api, include: str, kind: str | None) -> None:
    here.post("configmaps", config_map("a")).done()
    row = shaped(here, "configmaps", TABLE, includeObject=include)["rows"][0]
    assert (row.get("object") or {}).get("kind") == kind


def test_tables_come_in_pages(here: Api) -> None:
    for name in "abc":
        here.post("configmaps", config_map(name)).done()
    table = shaped(here, "configmaps", TABLE, limit=2)
    assert len(table["rows"]) == 2
    assert table["metadata"]["remainingItemCount"] == 1
    token = table["metadata"]["continue"]
    assert len(shaped(here, "configmaps", TABLE, **{"continue": token})["rows"]) == 1


@cases
def test_columns_of_built_in_kinds(api: Api, what: str, always: str, wide: str | None) -> None:
    table = shaped(api, what, TABLE)
    shown = [c["name"] for c in table["columnDefinitions"] if c["priority"] == 0]
    more = [c["name"] for c in table["columnDefinitions"] if c["priority"] == 1]
    if what == "scheduling.k8s.io/v1:priorityclasses" and api.minor > 30:
        always = "Name Value Global-Default Age PreemptionPolicy"
    if what == "persistentvolumeclaims" and api.minor > 28:
        always = "Name Status Volume Capacity Access Modes StorageClass VolumeAttributesClass Age"
    assert " ".join(shown) == always
    if wide is not None:
        assert ",".join(more) == wide


def test_new_pod_is_pending_with_nothing_ready(here: Api) -> None:
    two = [{"name": name, "image": "x"} for name in ("a", "b")]
    here.post("pods", pod("a", containers=two)).done()
    row = cells(shaped(here, "pods", TABLE))[0]
    assert (row["Name"], row["Ready"], row["Status"]) == ("a", "0/2", "Pending")
    assert str(row["Restarts"]) == "0"
    assert (row["IP"], row["Node"]) == ("<none>", "<none>")
    assert (row["Nominated Node"], row["Readiness Gates"]) == ("<none>", "<none>")


def container_status(name: str, restarts: int = 0, ready: bool = False, **state: Object) -> Object:
    """Status of a container, as a kubelet writes it."""
    return {
        "name": name,
        "image": "x",
        "imageID": "x",
        "ready": ready,
        "restartCount": restarts,
        "state": state,
    }


@cases
def test_status_of_a_pod_is_summed_up(
    here: Api, status: Object, shown: str, ready: str, restarts: str
) -> None:
    here.post("pods", pod("a", nodeName="n1")).done()
    here.patch("merge", "pods/a/status", {"status": {**status, "podIP": "10.0.0.1"}}).done()
    row = cells(shaped(here, "pods", TABLE))[0]
    assert (row["Status"], row["Ready"], str(row["Restarts"])) == (shown, ready, restarts)
    assert (row["IP"], row["Node"]) == ("10.0.0.1", "n1")


def test_pod_that_is_going_is_terminating(here: Api) -> None:
    here.post("pods", pod("a", nodeName="n1")).done()
    here.delete("pods/a").done()
    assert cells(shaped(here, "pods", TABLE))[0]["Status"] == "Terminating"


def test_waiting_init_container_is_shown(here: Api) -> None:
    inits = [{"name": "i1", "image": "x"}, {"name": "i2", "image": "x"}]
    here.post("pods", pod("a", nodeName="n1", initContainers=inits)).done()
    done = container_status("i1", terminated={"exitCode": 0, "reason": "Completed"})
    status = {"initContainerStatuses": [done, container_status("i2", running={})]}
    here.patch("merge", "pods/a/status", {"status": status}).done()
    assert cells(shaped(here, "pods", TABLE))[0]["Status"] == "Init:1/2"


NODES = [
    ({}, [{"type": "Ready", "status": "True"}], {}, "Ready", "<none>"),
    ({}, [{"type": "Ready", "status": "False"}], {}, "NotReady", "<none>"),
    ({}, [], {}, "Unknown", "<none>"),
    (
        {"node-role.kubernetes.io/worker": "", "node-role.kubernetes.io/gpu": ""},
        [{"type": "Ready", "status": "True"}],
        {"unschedulable": True},
        *("Ready,SchedulingDisabled", "gpu,worker"),
    ),
]


@pytest.mark.parametrize(("labels", "conditions", "spec", "shown", "roles"), NODES)
def test_status_of_a_node_is_summed_up(
    here: Api,
    api: Api,
    labels: dict[str, str],
    conditions: list[Object],
    spec: Object,
    shown: str,
    roles: str,
) -> None:
    name = f"{here.namespace}-n"
    api.post("nodes", {"metadata": {"name": name, "labels": labels}, "spec": spec}).done()
    status = {
        "conditions": conditions,
        "nodeInfo": {"kubeletVersion": "v1.2.3"},
        "addresses": [{"type": "InternalIP", "address": "10.1.1.1"}],
    }
    api.patch("merge", f"nodes/{name}/status", {"status": status}).done()
    row = cells(shaped(api, f"nodes/{name}", TABLE))[0]
    assert (row["Status"], row["Roles"], row["Version"]) == (shown, roles, "v1.2.3")
    assert (row["Internal-IP"], row["External-IP"]) == ("10.1.1.1", "<none>")


def test_custom_resource_shows_the_columns_of_its_definition(here: Api) -> None:
    group = f"{here.namespace}.example.com"
    columns = [
        {"name": "Size", "type": "integer", "jsonPath": ".spec.size"},
        {"name": "First", "type": "string", "jsonPath": ".spec.parts[0].name"},
        {"name": "Since", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
        {"name": "More", "type": "string", "jsonPath": ".spec.more", "priority": 1},
    ]
    part = {"type": "object", "properties": {"name": {"type": "string"}}}
    schema = open_schema(
        size={"type": "integer"}, more={"type": "string"}, parts={"type": "array", "items": part}
    )
    define(here, definition(group, schema, additionalPrinterColumns=columns))
    body = widget(group, "a", spec={"size": 3, "parts": [{"name": "x"}, {"name": "y"}]})
    here.post(f"{group}/v1:widgets", body).done()
    table = shaped(here, f"{group}/v1:widgets", TABLE)
    found = [(c["name"], c["type"], c["priority"]) for c in table["columnDefinitions"]]
    assert found == [
        ("Name", "string", 0),
        ("Size", "integer", 0),
        ("First", "string", 0),
        ("Since", "date", 0),
        ("More", "string", 1),
    ]
    row = cells(table)[0]
    assert (row["Size"], row["First"], row["More"]) == (3, "x", None)
    assert str(row["Since"]).endswith("s")


def test_custom_resource_without_columns_shows_name_and_age(here: Api) -> None:
    group = f"{here.namespace}.example.com"
    define(here, definition(group, open_schema()))
    here.post(f"{group}/v1:widgets", widget(group, "a")).done()
    table = shaped(here, f"{group}/v1:widgets", TABLE)
    assert [c["name"] for c in table["columnDefinitions"]] == ["Name", "Age"]


def test_metadata_alone(here: Api) -> None:
    made = here.post("configmaps", config_map("a", x="1")).made
    found = shaped(here, "configmaps/a", METADATA)
    assert (found["kind"], found["apiVersion"]) == ("PartialObjectMetadata", "meta.k8s.io/v1")
    assert found["metadata"] == made["metadata"]
    assert set(found) == {"kind", "apiVersion", "metadata"}


def test_list_of_metadata(here: Api) -> None:
    here.post("configmaps", config_map("a", x="1")).done()
    found = shaped(here, "configmaps", METADATA_LIST)
    assert found["kind"] == "PartialObjectMetadataList"
    assert "data" not in found["items"][0]
    assert found["items"][0]["metadata"]["name"] == "a"


def test_first_shape_that_is_known_is_taken(here: Api) -> None:
    accept = f"application/json;as=Nothing;v=v1;g=meta.k8s.io,{TABLE},application/json"
    assert shaped(here, "configmaps", accept)["kind"] == "Table"


def test_watch_of_a_table_carries_rows(here: Api) -> None:
    here.post("configmaps", config_map("a")).done()
    with here.watch("configmaps", headers={"Accept": TABLE}) as events:
        event = events.event()
    assert (event["type"], event["object"]["kind"]) == ("ADDED", "Table")
    assert event["object"]["rows"][0]["cells"][0] == "a"


def test_watch_of_metadata_carries_metadata(here: Api) -> None:
    here.post("configmaps", config_map("a", x="1")).done()
    with here.watch("configmaps", headers={"Accept": METADATA}) as events:
        event = events.event()
    assert event["object"]["kind"] == "PartialObjectMetadata"
    assert "data" not in event["object"]
