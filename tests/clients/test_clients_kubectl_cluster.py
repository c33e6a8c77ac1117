"""kubectl as it is, against both API servers: what it asks about the cluster itself."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.apiclient import Api
from tests.clients.kubectl_program import Kubectl
from tests.samples import (
    CUSTOM_RESOURCES,
    config_map,
    define,
    definition,
    open_schema,
    pod,
    widget,
)
from unbroken.local.apiserver.kinds.builtin import BUILTINS
from unbroken.local.apiserver.kinds.kinds import Kind

RESOURCES = [
    ("pods", "po", "v1", "true", "Pod"),
    ("nodes", "no", "v1", "false", "Node"),
    ("configmaps", "cm", "v1", "true", "ConfigMap"),
    ("services", "svc", "v1", "true", "Service"),
    (
        *("customresourcedefinitions", "crd,crds", "apiextensions.k8s.io/v1", "false"),
        "CustomResourceDefinition",
    ),
]


def test_api_resources(kubectl: Kubectl) -> None:
    rows = [tuple(line.split()) for line in kubectl("api-resources").splitlines()]
    for row in RESOURCES:
        assert row in rows


def test_api_resources_by_group_scope_and_verb(kubectl: Kubectl) -> None:
    found = kubectl("api-resources", "--api-group=batch", "-o", "name").split()
    assert "jobs.batch" in found
    found = kubectl("api-resources", "--namespaced=false", "-o", "name").split()
    assert "nodes" in found
    assert "pods" not in found
    found = kubectl("api-resources", "--verbs=list,watch", "-o", "name").split()
    assert "pods" in found
    assert "tokenreviews.authentication.k8s.io" not in found


def test_api_resources_know_new_kinds_at_once(kubectl: Kubectl, api: Api) -> None:
    group = f"{api.namespace}.example.com"
    body = definition(group, open_schema())
    body["spec"]["names"] |= {"shortNames": ["wd"]}
    define(api, body)
    out = kubectl("api-resources", f"--api-group={group}", "--no-headers")
    assert out.split() == ["widgets", "wd", f"{group}/v1", "true", "Widget"]


def test_api_versions(kubectl: Kubectl) -> None:
    found = set(kubectl("api-versions").split())
    assert {"v1", "batch/v1", "coordination.k8s.io/v1"} <= found


def test_version(kubectl: Kubectl, api: Api) -> None:
    found = json.loads(kubectl("version", "-o", "json"))
    assert found["serverVersion"]["gitVersion"].startswith(f"v1.{api.minor}.")


def test_cluster_info(kubectl: Kubectl) -> None:
    assert kubectl.cluster.url in kubectl("cluster-info")


EXPLAIN = [
    ("pods", r"KIND:\s+Pod\nVERSION:\s+v1\n"),
    ("pods.spec.containers.image", r"FIELD:\s+image <string>"),
    ("jobs.spec.template.spec.restartPolicy", r"FIELD:\s+restartPolicy <string>"),
    ("configmaps.data", r"FIELD:\s+data <map\[string\]string>"),
    (
        "crd.spec.versions",
        r"(FIELD|RESOURCE):\s+versions <\[\](CustomResourceDefinitionVersion|Object)>",
    ),
]


@pytest.mark.parametrize(("what", "expected"), EXPLAIN)
def test_explain(kubectl: Kubectl, what: str, expected: str) -> None:
    assert re.search(expected, kubectl("explain", what))


def test_explain_of_all_fields(kubectl: Kubectl) -> None:
    out = kubectl("explain", "pod.spec", "--recursive")
    # v1.20 has OpenAPI v2 only, for which kubectl indents otherwise and marks nothing.
    assert re.search(r"\n +containers\t<\[\](Container|Object)>( -required-)?\n", out)
    assert re.search(r"\n +livenessProbe\t<(Probe|Object)>\n", out)


def test_explain_of_what_is_not_there(kubectl: Kubectl) -> None:
    assert 'field "nothing" does not exist' in kubectl.refused("explain", "pods.nothing")


@CUSTOM_RESOURCES
@pytest.mark.since(23, "OpenAPI v3, which has new kinds after a moment")
def test_explain_of_a_custom_resource(kubectl: Kubectl, api: Api) -> None:
    group = f"{api.namespace}.example.com"
    schema = open_schema(size={"type": "integer", "description": "How big it is."})
    define(api, definition(group, schema))
    # kube-apiserver publishes the schema a moment after it serves the kind.
    document = f"/openapi/v3/apis/{group}/v1"
    api.settled(lambda: api.get(document), lambda answer: b'"How big it is."' not in answer.body)
    out = kubectl("explain", f"--api-version={group}/v1", "widgets.spec.size")
    assert re.search(rf"GROUP:\s+{group}\nKIND:\s+Widget\nVERSION:\s+v1\n", out)
    assert "FIELD: size <integer>" in out
    assert "How big it is." in out


def test_may_i(kubectl: Kubectl) -> None:
    assert kubectl("auth", "can-i", "delete", "pods") == "yes\n"
    out = kubectl("auth", "can-i", "--list")
    assert re.search(r"^\*\.\*\s+\[\]\s+\[\]\s+\[\*\]$", out, re.M)


@pytest.mark.since(28, "SelfSubjectReview v1")
def test_who_am_i(kubectl: Kubectl) -> None:
    assert "system:masters" in kubectl("auth", "whoami")


RAW = [
    ("/healthz", "ok"),
    ("/readyz", "ok"),
    ("/api/v1/namespaces/default", '"kind":"Namespace"'),
    ("/apis/apps", '"kind":"APIGroup"'),
]


@pytest.mark.parametrize(("path", "expected"), RAW)
def test_get_raw(kubectl: Kubectl, path: str, expected: str) -> None:
    assert expected in kubectl("get", "--raw", path)


def test_raw_create_and_delete(kubectl: Kubectl, api: Api) -> None:
    path = f"/api/v1/namespaces/{api.namespace}/configmaps"
    body = '{"metadata": {"name": "m"}}'
    assert '"name":"m"' in kubectl("create", "--raw", path, "-f", "-", stdin=body)
    kubectl("delete", "--raw", f"{path}/m")
    assert api.get("configmaps/m").code == 404


def test_custom_resources_by_their_short_names(kubectl: Kubectl, api: Api) -> None:
    group = f"{api.namespace}.example.com"
    columns = [{"name": "Size", "type": "integer", "jsonPath": ".spec.size"}]
    schema = open_schema(size={"type": "integer"})
    body = definition(group, schema, additionalPrinterColumns=columns, subresources={"status": {}})
    short = f"w{api.namespace}".replace("-", "")
    body["spec"]["names"] |= {"shortNames": [short], "categories": [f"c{short}"]}
    define(api, body)
    api.post(f"{group}/v1:widgets", widget(group, "w", spec={"size": 3})).done()
    assert kubectl("get", short).split() == ["NAME", "SIZE", "w", "3"]
    assert kubectl("get", f"c{short}", "-o", "name") == f"widget.{group}/w\n"
    kubectl("patch", short, "w", "--type=merge", "-p", '{"spec":{"size":4}}')
    assert kubectl("get", short, "w", "-o", "jsonpath={.spec.size}") == "4"
    patch = '{"status":{"x":1}}'
    kubectl("patch", short, "w", "--subresource=status", "--type=merge", "-p", patch)
    assert "Size:" in kubectl("describe", short, "w")
    assert kubectl.refused("patch", short, "w", "--type=merge", "-p", '{"spec":{"size":"x"}}')
    kubectl("delete", short, "w")
    assert api.get(f"{group}/v1:widgets/w").code == 404


def test_namespace_is_made_and_deleted(kubectl: Kubectl, api: Api) -> None:
    name = f"{api.namespace}-x"
    assert kubectl("create", "namespace", name) == f"namespace/{name} created\n"
    kubectl("delete", "namespace", name, "--wait=false")
    assert api.get(f"/api/v1/namespaces/{name}").made["status"]["phase"] == "Terminating"


def test_wrong_token_is_told(kubectl: Kubectl) -> None:
    refused = kubectl.refused("--token=wrong", "get", "pods")
    assert "You must be logged in to the server" in refused or "Unauthorized" in refused


LOCAL = pytest.mark.parametrize("cluster", ["embedded"], indirect=True)
REFUSED = [kind for kind in BUILTINS if kind.refusal]


@LOCAL
@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.kind)
def test_a_kind_that_nothing_acts_on_is_refused_by_name(api: Api, kind: Kind) -> None:
    what = f"{kind.group}/v1:{kind.plural}" if kind.group else kind.plural
    body = {"metadata": {"name": "a"}}
    answers = [api.post(what, body), api.get(what), api.get(f"{what}/a"), api.delete(f"{what}/a")]
    for answer in answers:
        assert answer.failure == (404, "NotFound")
        assert answer.message.startswith(f"the local cluster does not run kind {kind.kind}: ")


@LOCAL
def test_kubectl_shows_what_to_use_instead(kubectl: Kubectl, manifests: Any) -> None:
    spec = {"template": {"spec": pod("a")["spec"]}}
    body = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "d"}, "spec": spec}
    sentence = (
        "the local cluster does not run kind Deployment: create a HyperPodPyTorchJob, or Pods "
        "whose spec.restartPolicy is Always"
    )
    done = kubectl.run("apply", "-f", manifests(body, config_map("m")))
    assert (done.returncode, done.stdout) == (1, "configmap/m created\n")
    assert sentence in done.stderr
    for arguments in (["create", "deployment", "d", "--image=x"], ["get", "deploy"]):
        assert sentence in kubectl.refused(*arguments)
    assert "the local cluster does not run" not in kubectl("get", "all")
    assert "the local cluster does not run" not in kubectl("describe", "namespace", "default")
