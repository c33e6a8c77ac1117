"""Discovery documents; hashes and rows as a kube-apiserver v1.20.2 gives them."""

from __future__ import annotations

from typing import Any

import pytest

from unbroken.local.apiserver.http import discovery
from unbroken.local.apiserver.http.status import ApiError
from unbroken.local.apiserver.kinds.kinds import Kind, Version
from unbroken.local.apiserver.schema.schemas import Schema

ALL = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]
CHANGE = ["get", "patch", "update"]


def kind(group: str, name: str, *versions: str, **more: Any) -> Kind:
    """A small kind; `more` are fields of Kind or, prefixed `v_`, of its versions."""
    of_versions = {key[2:]: more.pop(key) for key in list(more) if key.startswith("v_")}
    made = {v: Version(v, Schema({}, {}), name, **of_versions) for v in versions}
    fields = {"plural": name.lower() + "s", "singular": name.lower(), "namespaced": True, **more}
    return Kind(group=group, kind=name, versions=made, storage_version=versions[0], **fields)


POD = kind("", "Pod", "v1", short_names=("po",), categories=("all",), v_has_status=True)
NAMESPACE = kind("", "Namespace", "v1", namespaced=False)
DEPLOYMENT = kind("apps", "Deployment", "v1", v_has_status=True, v_scale={})
REVIEW = kind("auth.example.com", "Review", "v1", verbs=("create",))
PROBE = kind("sx.example.com", "Probe", "v1", "v1alpha1")
GADGET = kind("sx.example.com", "Gadget", "v2", "v1beta1")
KINDS = [POD, NAMESPACE, DEPLOYMENT, REVIEW, PROBE, GADGET]


def test_core_resources_come_with_their_subresources() -> None:
    page = discovery.resources(KINDS, "", "v1")
    assert page["groupVersion"] == "v1"
    rows = {row["name"]: row for row in page["resources"]}
    assert list(rows) == [
        "namespaces",
        "namespaces/finalize",
        "pods",
        "pods/binding",
        "pods/eviction",
        "pods/exec",
        "pods/log",
        "pods/status",
    ]
    assert rows["pods"] == {
        "name": "pods",
        "singularName": "pod",
        "namespaced": True,
        "kind": "Pod",
        "verbs": ALL,
        "shortNames": ["po"],
        "categories": ["all"],
        "storageVersionHash": "xPOwRZ+Yhw8=",
    }
    assert rows["pods/eviction"] == {
        "name": "pods/eviction",
        "singularName": "",
        "namespaced": True,
        "group": "policy",
        "version": "v1",
        "kind": "Eviction",
        "verbs": ["create"],
    }
    assert rows["pods/log"]["kind"] == "Pod"


@pytest.mark.parametrize(
    ("kind", "digest"),
    [(POD, "xPOwRZ+Yhw8="), (DEPLOYMENT, "8aSe+NMegvE="), (PROBE, "Vl7HHoYe39o=")],
)
def test_the_storage_hash_is_that_of_the_real_server(kind: Kind, digest: str) -> None:
    page = discovery.resources([kind], kind.group, "v1")
    assert page["resources"][0]["storageVersionHash"] == digest


def test_what_cannot_be_listed_has_no_storage_hash() -> None:
    [row] = discovery.resources(KINDS, "auth.example.com", "v1")["resources"]
    assert (row["verbs"], "storageVersionHash" in row) == (["create"], False)


def test_groups_keep_their_order_and_prefer_stable_versions() -> None:
    listed = discovery.groups(KINDS)["groups"]
    assert [group["name"] for group in listed] == ["apps", "auth.example.com", "sx.example.com"]
    assert [v["version"] for v in listed[2]["versions"]] == ["v2", "v1", "v1beta1", "v1alpha1"]
    preferred = {"groupVersion": "sx.example.com/v2", "version": "v2"}
    assert listed[2]["preferredVersion"] == preferred
    page = discovery.group(KINDS, "sx.example.com")
    assert (page["kind"], page["preferredVersion"]) == ("APIGroup", preferred)


def test_a_version_lists_only_kinds_that_have_it() -> None:
    names = [row["name"] for row in discovery.resources(KINDS, "sx.example.com", "v2")["resources"]]
    assert names == ["gadgets"]


@pytest.mark.parametrize(
    ("group", "version"), [("no.example.com", "v1"), ("apps", "v2"), ("", "v2")]
)
def test_what_is_not_served_is_not_found(group: str, version: str) -> None:
    with pytest.raises(ApiError) as caught:
        discovery.resources(KINDS, group, version)
    assert caught.value.code == 404


@pytest.mark.parametrize("name", ["", "no.example.com"])
def test_an_unknown_group_is_not_found(name: str) -> None:
    with pytest.raises(ApiError) as caught:
        discovery.group(KINDS, name)
    assert caught.value.code == 404


@pytest.mark.parametrize("form", ["v2", "v2beta1"])
def test_the_aggregated_form_splits_core_and_groups(form: str) -> None:
    core = discovery.aggregated(KINDS, "/api", form)
    named = discovery.aggregated(KINDS, "/apis", form)
    assert core["apiVersion"] == named["apiVersion"] == f"apidiscovery.k8s.io/{form}"
    assert [item["metadata"].get("name") for item in core["items"]] == [None]
    assert [item["metadata"]["name"] for item in named["items"]] == [
        "apps",
        "auth.example.com",
        "sx.example.com",
    ]
    assert discovery.aggregated_media(form) == (
        f"application/json;g=apidiscovery.k8s.io;v={form};as=APIGroupDiscoveryList"
    )


def test_an_aggregated_resource_says_all_of_its_row() -> None:
    [version] = discovery.aggregated(KINDS, "/apis", "v2")["items"][0]["versions"]
    identity = {"group": "", "version": "", "kind": "Deployment"}
    scale = {"group": "autoscaling", "version": "v1", "kind": "Scale"}
    assert version == {
        "version": "v1",
        "freshness": "Current",
        "resources": [
            {
                "resource": "deployments",
                "responseKind": identity,
                "scope": "Namespaced",
                "singularResource": "deployment",
                "verbs": ALL,
                "subresources": [
                    {"subresource": "scale", "responseKind": scale, "verbs": CHANGE},
                    {"subresource": "status", "responseKind": identity, "verbs": CHANGE},
                ],
            }
        ],
    }


def test_the_version_is_one_that_clients_understand() -> None:
    assert (discovery.VERSION["major"], discovery.VERSION["minor"]) == ("1", "33")
    assert discovery.VERSION["gitVersion"].startswith("v1.33.0")
