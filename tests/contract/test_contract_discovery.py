"""Information about a server from itself: versions, health, discovery, OpenAPI."""

from __future__ import annotations

import pytest

from tests.apiclient import Api

AGGREGATED = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"


def test_version_names_a_kubernetes_release(api: Api) -> None:
    version = api.get("/version").made
    assert version["gitVersion"].startswith(f"v1.{api.minor}.")
    # Debian builds kube-apiserver without major and minor; providers write a plus after the latter.
    told = (version.get("major", ""), version.get("minor", "").rstrip("+"))
    assert told == ("1", str(api.minor)) or (told == ("", "") and api.cluster.is_real)
    assert {"gitCommit", "goVersion", "platform", "buildDate"} <= set(version)


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/livez", "/livez/ping"])
def test_health_is_plain_ok(api: Api, path: str) -> None:
    answer = api.get(path)
    assert (answer.code, answer.body) == (200, b"ok")
    assert answer.headers.get_content_type() == "text/plain"


def test_api_versions_of_the_core_group(api: Api) -> None:
    found = api.get("/api").made
    assert (found["kind"], found["versions"]) == ("APIVersions", ["v1"])
    assert found["serverAddressByClientCIDRs"][0]["clientCIDR"] == "0.0.0.0/0"


GROUPS = [
    ("apps", "v1"),
    ("batch", "v1"),
    ("coordination.k8s.io", "v1"),
    ("scheduling.k8s.io", "v1"),
    ("rbac.authorization.k8s.io", "v1"),
    ("apiextensions.k8s.io", "v1"),
    ("authentication.k8s.io", "v1"),
    ("authorization.k8s.io", "v1"),
    ("events.k8s.io", "v1"),
]


@pytest.mark.parametrize(("group", "version"), GROUPS)
def test_group_is_listed_with_its_versions(api: Api, group: str, version: str) -> None:
    listed = {each["name"]: each for each in api.get("/apis").made["groups"]}
    version_entry = {"groupVersion": f"{group}/{version}", "version": version}
    assert version_entry in listed[group]["versions"]
    alone = api.get(f"/apis/{group}").made
    assert (alone["kind"], alone["apiVersion"]) == ("APIGroup", "v1")
    assert alone["preferredVersion"] == listed[group]["preferredVersion"]


RESOURCES = [
    # group and version, resource, kind, namespaced, short names, categories
    ("v1", "pods", "Pod", True, ["po"], ["all"]),
    ("v1", "namespaces", "Namespace", False, ["ns"], None),
    ("v1", "nodes", "Node", False, ["no"], None),
    ("v1", "configmaps", "ConfigMap", True, ["cm"], None),
    ("v1", "secrets", "Secret", True, None, None),
    ("v1", "services", "Service", True, ["svc"], ["all"]),
    ("v1", "events", "Event", True, ["ev"], None),
    ("v1", "serviceaccounts", "ServiceAccount", True, ["sa"], None),
    ("v1", "persistentvolumeclaims", "PersistentVolumeClaim", True, ["pvc"], None),
    ("batch/v1", "jobs", "Job", True, None, ["all"]),
    ("coordination.k8s.io/v1", "leases", "Lease", True, None, None),
    (
        *("apiextensions.k8s.io/v1", "customresourcedefinitions", "CustomResourceDefinition"),
        *(False, ["crd", "crds"], ["api-extensions"]),
    ),
]
VERBS = {"create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"}


@pytest.mark.parametrize(
    ("version", "plural", "kind", "namespaced", "short", "categories"), RESOURCES
)
def test_resource_is_described(
    api: Api,
    version: str,
    plural: str,
    kind: str,
    namespaced: bool,
    short: list[str] | None,
    categories: list[str] | None,
) -> None:
    root = "/api/v1" if version == "v1" else f"/apis/{version}"
    listed = api.get(root).made
    assert (listed["kind"], listed["groupVersion"]) == ("APIResourceList", version)
    found = {each["name"]: each for each in listed["resources"]}[plural]
    assert (found["kind"], found["namespaced"]) == (kind, namespaced)
    assert found.get("shortNames") == short
    assert found.get("categories") == categories
    missing = {"deletecollection"} if plural == "namespaces" else set()
    if api.minor < 23 and plural == "services":  # deletecollection of services came with 1.23
        missing = {"deletecollection"}
    assert set(found["verbs"]) == VERBS - missing


SUBRESOURCES = [
    ("/api/v1", "pods/status", "Pod", {"get", "patch", "update"}),
    ("/api/v1", "pods/binding", "Binding", {"create"}),
    ("/api/v1", "pods/eviction", "Eviction", {"create"}),
    ("/api/v1", "pods/log", "Pod", {"get"}),
    ("/api/v1", "nodes/status", "Node", {"get", "patch", "update"}),
    ("/apis/batch/v1", "jobs/status", "Job", {"get", "patch", "update"}),
]


@pytest.mark.parametrize(("root", "name", "kind", "verbs"), SUBRESOURCES)
def test_subresource_is_described(
    api: Api, root: str, name: str, kind: str, verbs: set[str]
) -> None:
    found = {each["name"]: each for each in api.get(root).made["resources"]}[name]
    assert (found["kind"], set(found["verbs"])) == (kind, verbs)


@pytest.mark.parametrize("path", ["/apis/no.such.group", "/apis/apps/v9", "/api/v2", "/nowhere"])
def test_unknown_path_is_404(api: Api, path: str) -> None:
    assert api.get(path).code == 404


@pytest.mark.since(26, "aggregated discovery")
@pytest.mark.parametrize(("path", "group"), [("/api", ""), ("/apis", "batch")])
def test_aggregated_discovery_has_resources_of_all_groups(api: Api, path: str, group: str) -> None:
    answer = api.send("GET", path, headers={"Accept": AGGREGATED})
    assert answer.headers["Content-Type"] == AGGREGATED
    found = answer.made
    assert found["kind"] == "APIGroupDiscoveryList"
    groups = {each["metadata"].get("name", ""): each for each in found["items"]}
    versions = groups[group]["versions"]
    assert versions[0]["version"] == "v1"
    names = {each["resource"] for each in versions[0]["resources"]}
    assert ("pods" if not group else "jobs") in names


@pytest.mark.since(26, "aggregated discovery")
def test_aggregated_discovery_describes_a_resource(api: Api) -> None:
    items = api.send("GET", "/api", headers={"Accept": AGGREGATED}).made["items"]
    pods = next(r for r in items[0]["versions"][0]["resources"] if r["resource"] == "pods")
    assert pods["responseKind"] == {"group": "", "version": "", "kind": "Pod"}
    assert (pods["scope"], pods["singularResource"]) == ("Namespaced", "pod")
    assert {"status", "log", "binding", "eviction"} <= {
        each["subresource"] for each in pods["subresources"]
    }


def test_openapi_v2_has_built_in_kinds(api: Api) -> None:
    found = api.get("/openapi/v2").made
    assert found["swagger"] == "2.0"
    pod = found["definitions"]["io.k8s.api.core.v1.Pod"]
    gvk = {"group": "", "kind": "Pod", "version": "v1"}
    assert gvk in pod["x-kubernetes-group-version-kind"]
    assert pod["properties"]["spec"]["$ref"].endswith("io.k8s.api.core.v1.PodSpec")


@pytest.mark.since(23, "OpenAPI v3")
@pytest.mark.parametrize("group", ["api/v1", "apis/batch/v1"])
def test_openapi_v3_of_a_group_is_found_by_its_index(api: Api, group: str) -> None:
    index = api.get("/openapi/v3").made["paths"]
    found = api.get(index[group]["serverRelativeURL"]).made
    assert found["openapi"].startswith("3.0")
    kind = "io.k8s.api.core.v1.Pod" if group == "api/v1" else "io.k8s.api.batch.v1.Job"
    assert kind in found["components"]["schemas"]
    assert any(path.endswith("{name}") for path in found["paths"])


def test_paths_are_listed_at_the_root(api: Api) -> None:
    paths = api.get("/").made["paths"]
    assert {"/api", "/apis", "/version", "/healthz", "/openapi/v2"} <= set(paths)
