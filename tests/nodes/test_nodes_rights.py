"""The DaemonSet of `deploy`: any API server takes it, and its rights are enough and no more."""

from __future__ import annotations

import asyncio
import base64
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.apiclient import Api
from tests.apiservers import ROOT, Cluster
from tests.watching import running, until
from unbroken.kube.client import connect
from unbroken.nodes.driver import DaemonOptions, run_daemon

Object = dict[str, Any]
FILE = ROOT / "deploy/node-daemon.yaml"
SYSTEM = "unbroken-system"
GROUPS = {
    "Namespace": "/api/v1/namespaces",
    "ServiceAccount": f"/api/v1/namespaces/{SYSTEM}/serviceaccounts",
    "ClusterRole": "/apis/rbac.authorization.k8s.io/v1/clusterroles",
    "ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
    "Role": "/apis/rbac.authorization.k8s.io/v1/namespaces/default/roles",
    "RoleBinding": "/apis/rbac.authorization.k8s.io/v1/namespaces/default/rolebindings",
    "DaemonSet": f"/apis/apps/v1/namespaces/{SYSTEM}/daemonsets",
}


def documents() -> list[Object]:
    return [one for one in yaml.safe_load_all(FILE.read_text()) if one]


@pytest.mark.slow
@pytest.mark.realkube
async def test_the_daemon_works_with_its_rights_and_can_do_nothing_else(
    clusters: Any, tmp_path: Path
) -> None:
    cluster: Cluster = clusters("real")
    with closing(Api(cluster)) as api:
        for one in documents():
            api.apply(f"{GROUPS[one['kind']]}/{one['metadata']['name']}", one).done()
        api.post("/api/v1/nodes", {"metadata": {"name": "rights"}}).done()
        account = f"/api/v1/namespaces/{SYSTEM}/serviceaccounts/node-daemon"
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        token = api.post(f"{account}/token", request).made["status"]["token"]
        kubeconfig = tmp_path / "kubeconfig"
        kubeconfig.write_text(_kubeconfig(cluster, token))
        log = tmp_path / "kernel.log"
        log.write_text("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.\n")

        async def watch() -> None:
            options = DaemonOptions("rights", kernel_log=log, root=tmp_path)
            async with connect(kubeconfig) as client, running(run_daemon(client, options)):
                await asyncio.to_thread(api.until, "/api/v1/nodes", "rights", _is_faulty)
                selector = "involvedObject.name=rights"
                found = "/api/v1/namespaces/default/events"
                await until(lambda: api.get(found, fieldSelector=selector).made["items"])

        await watch()
        api.delete("/api/v1/nodes/rights").done()
        other = Cluster("real", cluster.url, token, cluster.ca, kubeconfig, 20, cluster.process)
        _refused(other)
        for one in reversed(documents()):
            api.delete(f"{GROUPS[one['kind']]}/{one['metadata']['name']}").done()


def _is_faulty(node: Object) -> bool:
    listed = node["status"].get("conditions") or ()
    return any(one["type"] == "NvidiaGPUUnhealthy" and one["status"] == "True" for one in listed)


def _refused(cluster: Cluster) -> None:
    with closing(Api(cluster, "default")) as api:
        for method, path in (
            ("GET", "pods"),
            ("DELETE", "pods/any"),
            ("GET", "secrets"),
            ("DELETE", "/api/v1/nodes/any"),
            ("POST", "/api/v1/nodes"),
            ("GET", "events"),
        ):
            assert api.send(method, path, {} if method == "POST" else None).code == 403, path


def _kubeconfig(cluster: Cluster, token: str) -> str:
    ca = base64.b64encode(cluster.ca.encode()).decode()
    place = {"server": cluster.url, "certificate-authority-data": ca}
    return yaml.safe_dump(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "it",
            "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
            "users": [{"name": "it", "user": {"token": token}}],
            "clusters": [{"name": "it", "cluster": place}],
        }
    )


def test_the_daemon_set_tolerates_everything_and_writes_its_logs_only() -> None:
    (found,) = (one for one in documents() if one["kind"] == "DaemonSet")
    pod = found["spec"]["template"]["spec"]
    assert pod["tolerations"] == [{"operator": "Exists"}]
    (container,) = pod["containers"]
    writable = {m["name"] for m in container["volumeMounts"] if not m.get("readOnly")}
    assert writable == {"logs", "scratch"}
