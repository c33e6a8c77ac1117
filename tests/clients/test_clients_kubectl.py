"""kubectl as it is, against both API servers: reading and writing objects."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from tests.apiclient import Api, Object
from tests.clients.kubectl_program import Kubectl
from tests.samples import config_map, define, definition, open_schema, pod, service, widget

Write = Callable[..., str]


def running(api: Api, name: str = "web") -> Object:
    """A pod that a kubelet would call running."""
    api.post("pods", pod(name, {"app": name}, nodeName="n1")).done()
    status = {
        "phase": "Running",
        "podIP": "10.0.0.7",
        "conditions": [{"type": "Ready", "status": "True"}],
        "containerStatuses": [
            {
                "name": "main",
                "image": "busybox",
                "imageID": "",
                "ready": True,
                "restartCount": 0,
                "state": {"running": {"startedAt": "2024-01-01T00:00:00Z"}},
            }
        ],
    }
    return api.patch("merge", f"pods/{name}/status", {"status": status}).made


def test_apply_creates_then_changes_then_leaves_alone(
    kubectl: Kubectl, manifests: Write, api: Api
) -> None:
    first = manifests(config_map("m", a="1", b="2"), service("s", a=1))
    assert kubectl("apply", "-f", first).splitlines() == [
        "configmap/m created",
        "service/s created",
    ]
    second = manifests(config_map("m", a="1", c="3"))
    assert kubectl("apply", "-f", second) == "configmap/m configured\n"
    assert api.get("configmaps/m").made["data"] == {"a": "1", "c": "3"}
    assert kubectl("apply", "-f", second) == "configmap/m unchanged\n"


def test_apply_keeps_what_others_set(kubectl: Kubectl, manifests: Write, api: Api) -> None:
    kubectl("apply", "-f", manifests(service("s", a=1)))
    api.patch("merge", "services/s", {"spec": {"sessionAffinity": "ClientIP"}}).done()
    kubectl("apply", "-f", manifests(service("s", a=2)))
    spec = api.get("services/s").made["spec"]
    assert (spec["ports"][0]["targetPort"], spec["sessionAffinity"]) == (2, "ClientIP")


def test_apply_of_a_definition_and_its_object_in_one_go(
    kubectl: Kubectl, manifests: Write, api: Api
) -> None:
    group = f"{api.namespace}.example.com"
    schema = open_schema(size={"type": "integer"})
    kubectl("apply", "-f", manifests(definition(group, schema)))
    crd = f"crd/widgets.{group}"
    kubectl("wait", "--for=condition=Established", crd, "--timeout=20s")
    both = manifests(definition(group, schema), widget(group, "w", spec={"size": 3}))
    out = kubectl("apply", "-f", both)
    assert f"widget.{group}/w created" in out
    assert kubectl("get", f"widgets.{group}", "-o", "name") == f"widget.{group}/w\n"
    assert kubectl("apply", "-f", both).count("unchanged") == 2


def test_get_shows_pods_as_a_table(kubectl: Kubectl, api: Api) -> None:
    running(api)
    head, row = kubectl("get", "pods").splitlines()
    assert head.split() == ["NAME", "READY", "STATUS", "RESTARTS", "AGE"]
    assert row.split()[:4] == ["web", "1/1", "Running", "0"]
    head, row = kubectl("get", "pods", "-o", "wide").splitlines()
    assert re.split(r"\s{2,}", head.strip())[5:] == [
        *("IP", "NODE", "NOMINATED NODE", "READINESS GATES")
    ]
    assert row.split()[5:] == ["10.0.0.7", "n1", "<none>", "<none>"]


GET: list[tuple[list[str], str]] = [
    (["get", "pod", "web", "-o", "jsonpath={.status.podIP}"], r"10\.0\.0\.7"),
    (["get", "po", "-o", "name"], "pod/web\n"),
    (["get", "pods", "--no-headers", "-o", "custom-columns=N:.metadata.name"], "web\n"),
    (["get", "pods", "-l", "app=web", "-o", "name"], "pod/web\n"),
    (["get", "pods", "-l", "app in (x)", "-o", "name"], ""),
    (["get", "pods", "--field-selector", "spec.nodeName=n1", "-o", "name"], "pod/web\n"),
    (["get", "pods", "--show-labels"], r"(?s).*LABELS\n.*app=web\n"),
    (["get", "pods", "-L", "app"], r"(?s).*APP\n.*web\n"),
    (["get", "pods", "--sort-by=.metadata.name", "-o", "name"], "pod/web\n"),
    (["get", "pods", "-o", "go-template={{len .items}}"], "1"),
    (["get", "pods,configmaps", "-o", "name"], r"(?s)pod/web\n.*"),
    (["get", "pods", "--chunk-size=1", "-o", "name"], "pod/web\n"),
    (["get", "all", "-o", "name"], "pod/web\n"),
    (["get", "pods", "-A", "--field-selector", "metadata.name=web", "-o", "name"], r"(pod/web\n)+"),
    (["get", "ns", "default", "-o", "jsonpath={.status.phase}"], "Active"),
]


@pytest.mark.parametrize(
    ("arguments", "expected"), GET, ids=[" ".join(row[0])[4:40] for row in GET]
)
def test_get(kubectl: Kubectl, api: Api, arguments: list[str], expected: str) -> None:
    running(api)
    assert re.fullmatch(expected, kubectl(*arguments))


@pytest.mark.parametrize(("form", "load"), [("yaml", yaml.safe_load), ("json", yaml.safe_load)])
def test_get_prints_the_whole_object(
    kubectl: Kubectl, api: Api, form: str, load: Callable[[str], Any]
) -> None:
    made = running(api)
    made["metadata"].pop("managedFields", None)  # kubectl leaves them out
    assert load(kubectl("get", "pod", "web", "-o", form)) == made


def test_get_of_nothing_says_so(kubectl: Kubectl) -> None:
    done = kubectl.run("get", "pods")
    assert done.stderr == f"No resources found in {kubectl.namespace} namespace.\n"
    assert 'pods "none" not found' in kubectl.refused("get", "pod", "none")
    assert "the server doesn't have a resource type" in kubectl.refused("get", "gadgets")


def test_watch_prints_changes(kubectl: Kubectl, api: Api) -> None:
    with kubectl.lines(
        "get", "configmaps", "--watch", "--output-watch-events", "--no-headers"
    ) as out:
        api.post("configmaps", config_map("m", a="1")).done()
        assert next(out).split()[:3] == ["ADDED", "m", "1"]
        api.patch("merge", "configmaps/m", {"data": {"b": "2"}}).done()
        assert next(out).split()[:3] == ["MODIFIED", "m", "2"]
        api.delete("configmaps/m").done()
        assert next(out).split()[:2] == ["DELETED", "m"]


def test_describe_tells_pod_and_events(kubectl: Kubectl, api: Api) -> None:
    found = running(api)
    event = {
        "metadata": {"name": "e"},
        "involvedObject": {
            "kind": "Pod",
            "name": "web",
            "namespace": api.namespace,
            "uid": found["metadata"]["uid"],
        },
        "reason": "Started",
        "message": "it goes",
        "type": "Normal",
        "source": {"component": "kubelet"},
        "lastTimestamp": "2024-01-01T00:00:00Z",
        "count": 1,
    }
    api.post("events", event).done()
    out = kubectl("describe", "pod", "web")
    assert re.search(r"^Status:\s+Running$", out, re.M)
    assert re.search(r"^Node:\s+n1", out, re.M)
    assert re.search(r"Normal\s+Started\s+\S+\s+kubelet\s+it goes", out)
    assert "it goes" in kubectl("get", "events")
    assert "it goes" in kubectl("events")


@pytest.mark.parametrize(
    "what", ["configmap/m", "service/s", "namespace/default", "clusterrole/cluster-admin"]
)
def test_describe(kubectl: Kubectl, api: Api, what: str) -> None:
    api.post("configmaps", config_map("m", a="1")).done()
    api.post("services", service("s", a=1)).done()
    assert re.search(rf"^Name:\s+{what.split('/')[1]}$", kubectl("describe", what), re.M)


def test_describe_node(kubectl: Kubectl, api: Api) -> None:
    name = f"{api.namespace}-n"
    status = {"capacity": {"cpu": "8", "memory": "1Gi"}, "allocatable": {"cpu": "8"}}
    api.within("").post("/api/v1/nodes", {"metadata": {"name": name}, "status": status}).done()
    api.post("pods", pod("p", nodeName=name)).done()
    out = kubectl("describe", "node", name)
    assert re.search(rf"{api.namespace}\s+p\s", out)


def test_delete_waits_until_it_is_gone(kubectl: Kubectl, api: Api) -> None:
    for name in "abc":
        api.post("pods", pod(name, {"x": "y"})).done()
    assert kubectl("delete", "pod", "a").startswith('pod "a" deleted')
    assert api.get("pods/a").code == 404
    assert kubectl("delete", "pods", "-l", "x=y").count("deleted") == 2
    assert "not found" in kubectl.refused("delete", "pod", "a")
    kubectl("delete", "pod", "a", "--ignore-not-found")


def test_delete_by_force(kubectl: Kubectl, api: Api) -> None:
    api.post("pods", pod("a", nodeName="n1")).done()
    kubectl("delete", "pod", "a", "--grace-period=0", "--force")
    assert api.get("pods/a").code == 404


def test_delete_by_file_and_all(kubectl: Kubectl, api: Api, manifests: Write) -> None:
    path = manifests(config_map("a"), config_map("b"))
    kubectl("create", "-f", path)
    assert kubectl("delete", "-f", path).count("deleted") == 2
    kubectl("create", "-f", path)
    kubectl("delete", "configmaps", "--all")
    assert api.get("configmaps").made["items"] == []


def test_label_and_annotate(kubectl: Kubectl, api: Api) -> None:
    api.post("configmaps", config_map("m")).done()
    kubectl("label", "configmap", "m", "a=1", "b=2")
    assert "overwrite" in kubectl.refused("label", "configmap", "m", "a=9")
    kubectl("label", "configmap", "m", "a=9", "--overwrite")
    kubectl("label", "configmap", "m", "b-")
    kubectl("annotate", "configmap", "m", "note=some words")
    metadata = api.get("configmaps/m").made["metadata"]
    assert metadata["labels"] == {"a": "9"}
    assert metadata["annotations"] == {"note": "some words"}
    kubectl("label", "configmaps", "--all", "c=3")
    assert api.get("configmaps/m").made["metadata"]["labels"]["c"] == "3"


def test_taint_and_cordon_a_node(kubectl: Kubectl, api: Api) -> None:
    name = f"{api.namespace}-n"
    api.post("/api/v1/nodes", {"metadata": {"name": name}}).done()
    kubectl("taint", "node", name, "gpu=bad:NoSchedule", "x:NoExecute")
    taints = api.get(f"/api/v1/nodes/{name}").made["spec"]["taints"]
    assert {"key": "gpu", "value": "bad", "effect": "NoSchedule"} in taints
    kubectl("taint", "node", name, "gpu-")
    assert "gpu" not in str(api.get(f"/api/v1/nodes/{name}").made["spec"])
    kubectl("cordon", name)
    assert api.get(f"/api/v1/nodes/{name}").made["spec"]["unschedulable"] is True
    assert "SchedulingDisabled" in kubectl("get", "node", name)
    kubectl("uncordon", name)
    assert "unschedulable" not in api.get(f"/api/v1/nodes/{name}").made["spec"]


def test_drain_evicts_pods(kubectl: Kubectl, api: Api) -> None:
    name = f"{api.namespace}-n"
    api.post("/api/v1/nodes", {"metadata": {"name": name}}).done()
    api.post("pods", pod("p", nodeName=name)).done()
    api.patch("merge", "pods/p/status", {"status": {"phase": "Succeeded"}}).done()
    if api.minor < 22:
        pytest.skip("kubectl 1.32 evicts by policy/v1, which came with v1.22")
    assert "evicted" in kubectl("drain", name, "--force", "--timeout=30s")
    assert api.get("pods/p").code == 404


def test_apply_on_the_server_side(kubectl: Kubectl, api: Api, manifests: Write) -> None:
    path = manifests(config_map("m", a="1"))
    out = kubectl("apply", "--server-side", "--field-manager=one", "-f", path)
    assert out == "configmap/m serverside-applied\n"
    other = manifests(config_map("m", a="2"))
    refused = kubectl.refused("apply", "--server-side", "--field-manager=two", "-f", other)
    assert 'conflict with "one": .data.a' in refused
    assert "--force-conflicts" in refused
    force = ("apply", "--server-side", "--field-manager=two", "--force-conflicts", "-f", other)
    kubectl(*force)
    assert api.get("configmaps/m").made["data"] == {"a": "2"}


def test_apply_moves_from_the_client_to_the_server_side(
    kubectl: Kubectl, api: Api, manifests: Write
) -> None:
    kubectl("apply", "-f", manifests(config_map("m", a="1", b="2")))
    kubectl("apply", "--server-side", "-f", manifests(config_map("m", a="3")))
    assert api.get("configmaps/m").made["data"]["a"] == "3"


def test_diff_shows_what_would_change(kubectl: Kubectl, api: Api, manifests: Write) -> None:
    api.post("configmaps", config_map("m", a="1")).done()
    done = kubectl.run("diff", "-f", manifests(config_map("m", a="2")))
    assert done.returncode == 1, done.stderr
    assert '-  a: "1"' in done.stdout
    assert '+  a: "2"' in done.stdout
    assert api.get("configmaps/m").made["data"] == {"a": "1"}


def test_diff_on_the_server_side(kubectl: Kubectl, api: Api, manifests: Write) -> None:
    kubectl("apply", "--server-side", "-f", manifests(config_map("m", a="1")))
    done = kubectl.run("diff", "--server-side", "-f", manifests(config_map("m", a="2")))
    assert (done.returncode, '+  a: "2"' in done.stdout) == (1, True), done.stderr


def test_dry_run_on_the_server(kubectl: Kubectl, api: Api, manifests: Write) -> None:
    path = manifests(pod("p"))
    out = kubectl("apply", "--dry-run=server", "-f", path)
    assert out == "pod/p created (server dry run)\n"
    found = yaml.safe_load(kubectl("create", "--dry-run=server", "-f", path, "-o", "yaml"))
    assert found["spec"]["schedulerName"] == "default-scheduler"
    assert api.get("pods/p").code == 404


def test_validation_finds_unknown_fields(kubectl: Kubectl, api: Api, manifests: Write) -> None:
    body = pod("p")
    body["spec"]["containers"][0]["comand"] = ["x"]
    path = manifests(body)
    refused = kubectl.refused("apply", "--validate=strict", "-f", path)
    assert re.search(r'unknown field "(spec\.containers\[0\]\.)?comand"', refused)
    assert api.get("pods/p").code == 404
    assert kubectl.refused("apply", "-f", path) == refused
    kubectl("apply", "--validate=ignore", "-f", path)


@pytest.mark.since(25, "field validation by the server")
def test_validation_warns(kubectl: Kubectl, manifests: Write) -> None:
    body = pod("p")
    body["spec"]["comand"] = "x"
    done = kubectl.run("apply", "--validate=warn", "-f", manifests(body))
    assert done.returncode == 0
    assert 'Warning: unknown field "spec.comand"' in done.stderr


def test_create_from_standard_input(kubectl: Kubectl) -> None:
    assert kubectl("create", "-f", "-", stdin=config_map("m")) == "configmap/m created\n"
    assert "AlreadyExists" in kubectl.refused("create", "-f", "-", stdin=config_map("m"))


CREATE: list[tuple[list[str], str, Object]] = [
    (["configmap", "m", "--from-literal=a=1"], "configmaps/m", {"data": {"a": "1"}}),
    (["secret", "generic", "s", "--from-literal=a=1"], "secrets/s", {"data": {"a": "MQ=="}}),
    (["serviceaccount", "sa"], "serviceaccounts/sa", {}),
    (["job", "j", "--image=x"], "batch/v1:jobs/j", {}),
    (
        ["role", "r", "--verb=get", "--resource=pods"],
        "rbac.authorization.k8s.io/v1:roles/r",
        {"rules": [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get"]}]},
    ),
    (["service", "clusterip", "svc", "--tcp=80:8080"], "services/svc", {}),
]


@pytest.mark.parametrize(("arguments", "path", "fields"), CREATE, ids=[row[0][0] for row in CREATE])
def test_create(
    kubectl: Kubectl, api: Api, arguments: list[str], path: str, fields: Object
) -> None:
    kubectl("create", *arguments)
    found = api.get(path).made
    assert {key: found[key] for key in fields} == fields


def test_run_makes_a_pod(kubectl: Kubectl, api: Api) -> None:
    kubectl("run", "p", "--image=busybox", "--restart=Never", "--", "sleep", "5")
    spec = api.get("pods/p").made["spec"]
    assert (spec["containers"][0]["args"], spec["restartPolicy"]) == (["sleep", "5"], "Never")


PATCH = [
    ("strategic", '{"spec":{"ports":[{"port":97,"targetPort":3}]}}'),
    ("merge", '{"spec":{"ports":[{"port":97,"targetPort":3}]}}'),
    ("json", '[{"op":"replace","path":"/spec/ports/0/targetPort","value":3}]'),
]


@pytest.mark.parametrize(("kind", "patch"), PATCH)
def test_patch(kubectl: Kubectl, api: Api, kind: str, patch: str) -> None:
    api.post("services", service("s", a=1)).done()
    kubectl("patch", "service", "s", f"--type={kind}", "-p", patch)
    assert api.get("services/s").made["spec"]["ports"][0]["targetPort"] == 3


def test_patch_of_the_status(kubectl: Kubectl, api: Api) -> None:
    api.post("pods", pod("p")).done()
    patch = '{"status":{"phase":"Running"}}'
    kubectl("patch", "pod", "p", "--subresource=status", "--type=merge", "-p", patch)
    assert api.get("pods/p").made["status"]["phase"] == "Running"


def test_replace(kubectl: Kubectl, api: Api) -> None:
    made = api.post("configmaps", config_map("m", a="1")).made
    kubectl("replace", "-f", "-", stdin=config_map("m", a="2"))
    assert api.get("configmaps/m").made["data"] == {"a": "2"}
    refused = kubectl.refused("replace", "-f", "-", stdin=made)
    assert "the object has been modified" in refused
    kubectl("replace", "--force", "-f", "-", stdin=config_map("m", a="3"))
    assert api.get("configmaps/m").made["metadata"]["uid"] != made["metadata"]["uid"]


def test_scale(kubectl: Kubectl, api: Api) -> None:
    group = f"{api.namespace}.example.com"
    paths = {"specReplicasPath": ".spec.count", "statusReplicasPath": ".status.count"}
    schema = open_schema(count={"type": "integer"})
    define(api, definition(group, schema, subresources={"scale": paths}))
    api.post(f"{group}/v1:widgets", widget(group, "w", spec={"count": 1})).done()
    what = f"widget.{group}/w"
    assert kubectl("scale", what, "--replicas=4") == f"{what} scaled\n"
    assert api.get(f"{group}/v1:widgets/w").made["spec"]["count"] == 4
    kubectl.refused("scale", what, "--current-replicas=9", "--replicas=5")


def test_set_image(kubectl: Kubectl, api: Api) -> None:
    api.post("pods", pod("p")).done()
    kubectl("set", "image", "pod/p", "main=other")
    assert api.get("pods/p").made["spec"]["containers"][0]["image"] == "other"


WAITS = [
    (["--for=condition=Ready"], "pod/web condition met\n"),
    (["--for=jsonpath={.status.phase}=Running"], "pod/web condition met\n"),
]


@pytest.mark.parametrize(("arguments", "expected"), WAITS)
def test_wait(kubectl: Kubectl, api: Api, arguments: list[str], expected: str) -> None:
    running(api)
    assert kubectl("wait", "pod/web", *arguments, "--timeout=10s") == expected


def test_wait_ends_with_the_deletion(kubectl: Kubectl, api: Api) -> None:
    body = config_map("m")
    body["metadata"]["finalizers"] = ["example.com/hold"]
    api.post("configmaps", body).done()
    api.delete("configmaps/m").done()
    with kubectl.lines("wait", "configmap/m", "--for=delete", "--timeout=20s", "-v=6") as out:
        assert any("watch=true" in line for line in out)
        api.patch("merge", "configmaps/m", {"metadata": {"finalizers": None}}).done()
        assert "configmap/m condition met\n" in out


def test_wait_gives_up(kubectl: Kubectl, api: Api) -> None:
    api.post("pods", pod("p")).done()
    refused = kubectl.refused("wait", "pod/p", "--for=condition=Ready", "--timeout=1s")
    assert "timed out waiting for the condition" in refused
