"""A real control plane that the chart is installed on, and who may do what there."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import helm_python
import yaml

from tests.apiclient import Api
from tests.apiservers import Cluster, real_cluster
from tests.deploy.charts import CHART, NAMESPACE, Object
from tests.operator.realkube import SERVICES, program
from tests.operator.trained_jobs import until

AUDIT = """
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
  - {level: Metadata, userGroups: ["system:serviceaccounts"]}
  - {level: None}
"""
TOKEN = {
    "apiVersion": "authentication.k8s.io/v1",
    "kind": "TokenRequest",
    "spec": {"expirationSeconds": 7200},
}


@dataclass(frozen=True)
class Plane:
    """A kube-apiserver with RBAC, its audit log, and Helm."""

    cluster: Cluster
    api: Api
    folder: Path
    helm: helm_python.Config

    def install(self, values: Object, name: str = "unbroken") -> Object:
        """Install the chart as a person does, into the namespace of HyperPod's operator."""
        return self.helm.install(
            str(CHART), name, values, namespace=NAMESPACE, create_namespace=True
        )

    def account(self, name: str, namespace: str = NAMESPACE) -> Path:
        """A kubeconfig with the token of a ServiceAccount, as a pod of it has."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token"
        token = self.api.post(path, TOKEN).made["status"]["token"]
        ca = base64.b64encode(self.cluster.ca.encode()).decode()
        place = {"server": self.cluster.url, "certificate-authority-data": ca}
        file = self.folder / f"{name}.kubeconfig"
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "it",
            "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
            "users": [{"name": "it", "user": {"token": token}}],
            "clusters": [{"name": "it", "cluster": place}],
        }
        file.write_text(yaml.safe_dump(content))
        return file

    def audited(self, account: str) -> list[Object]:
        """The audit log's entries of a ServiceAccount, oldest first."""
        user = f"system:serviceaccount:{account}"
        log = self.folder / "audit.log"
        lines = log.read_text().splitlines() if log.exists() else []
        entries = (json.loads(line) for line in lines if user in line and line.endswith("}"))
        return [one for one in entries if one["user"]["username"] == user]

    def get(self, path: str) -> Object | None:
        """An object; None: it is not there."""
        answer = self.api.get(path)
        return None if answer.code == 404 else answer.made

    def wait(self, path: str, holds: Any = bool) -> Object:
        """The object once it is there and `holds` is true of it."""
        found: list[Object] = []

        def look() -> bool:
            one = self.get(path)
            found[:] = [one] if one is not None else []
            return one is not None and bool(holds(one))

        until(look, path)
        return found[0]

    def gone(self, path: str) -> None:
        """Return once there is no such object."""
        until(lambda: self.get(path) is None, f"{path} is gone")


@contextmanager
def plane(folder: Path) -> Iterator[Plane]:
    """Runs one in `folder`, with the controllers of namespaces and what is owned."""
    policy = folder / "audit.yaml"
    policy.write_text(AUDIT)
    options = (
        f"--audit-policy-file={policy}",
        f"--audit-log-path={folder / 'audit.log'}",
        # OpenShift has this plugin: an account that sets `blockOwnerDeletion` needs a right to the
        # owner.
        "--enable-admission-plugins=OwnerReferencesPermissionEnforcement",
    )
    with real_cluster(folder, options) as cluster, closing(Api(cluster)) as api:
        services = [sys.executable, "-c", SERVICES, str(cluster.kubeconfig), str(folder / "vol")]
        with (
            program(services),
            helm_python.Config(kubeconfig_path=cluster.kubeconfig, namespace=NAMESPACE) as helm,
        ):
            yield Plane(cluster, api, folder, helm)


def ended(process: subprocess.Popen[bytes]) -> int:
    """End a program as the kubelet does; its exit status."""
    process.terminate()
    return process.wait(timeout=20)
