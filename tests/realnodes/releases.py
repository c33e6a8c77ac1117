"""The chart as it is installed on real nodes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import helm_python

from cluster_logs import assert_no_errors
from deploy.charts import CHART, NAMESPACE, Object
from realnodes.plane import SYSTEM, RealCluster

LEASE = ("-n", "kube-system", "lease", "unbroken-operator")
OPERATORS = ("-n", NAMESPACE, "pods", "-l", "hp-training-control-plane=unbroken-operator")


@dataclass(frozen=True)
class Release:
    """The chart as it is installed."""

    cluster: RealCluster
    helm: helm_python.Config
    values: Object

    def upgrade(self, **operator: Object) -> None:
        """Change values of the operator, and wait until only new pods run."""
        merged = {**self.values, "operator": {**self.values["operator"], **operator}}
        self.helm.upgrade(str(CHART), "unbroken", merged)
        self.rolled_out()

    def rolled_out(self) -> None:
        """Wait until all that was asked for is ready."""
        for namespace, what in (
            (NAMESPACE, "deployment/unbroken-operator"),
            (SYSTEM, "daemonset/node-daemon"),
        ):
            self.cluster.kubectl("-n", namespace, "rollout", "status", what, "--timeout=55s")

    def scale(self, replicas: int) -> None:
        """Have so many operators."""
        self.cluster.kubectl(
            "-n", NAMESPACE, "scale", "deployment/unbroken-operator", f"--replicas={replicas}"
        )

    def delete(self, operator: str) -> None:
        """Delete an operator's pod, and give it no time."""
        now = ("--grace-period=0", "--force")
        self.cluster.kubectl("-n", NAMESPACE, "delete", "pod", operator, *now)

    def operators(self) -> dict[str, str]:
        """The operators' pods, and the node of each."""
        pods = self.cluster.get(*OPERATORS)["items"]
        return {one["metadata"]["name"]: one["spec"].get("nodeName", "") for one in pods}

    def check_logs(self) -> None:
        """Fail if an operator that is there has said anything of an error."""
        for name in self.operators():
            log = self.cluster.directory / f"{name}.log"
            log.write_text(self.cluster.kubectl("-n", NAMESPACE, "logs", name).stdout)
            assert_no_errors(log, self.cluster.allowed_errors)

    def leader(self) -> str:
        """The pod that leads; empty: none."""
        holder = self.cluster.get(*LEASE)["spec"].get("holderIdentity") or ""
        return next((name for name in self.operators() if holder.startswith(name)), "")


@contextmanager
def released(cluster: RealCluster) -> Iterator[Release]:
    """The chart, installed; the logs of its operators must hold no error."""
    address, _, port = cluster.plane.server.removeprefix("https://").rpartition(":")
    # Nothing here makes services' addresses reachable, as a kube-proxy would: not the API server's
    # for pods, nor the webhook's for the API server.
    places = [
        {"name": "KUBERNETES_SERVICE_HOST", "value": address},
        {"name": "KUBERNETES_SERVICE_PORT", "value": port},
    ]
    values: Object = {
        "operator": {"extraEnv": places},
        "nodeDaemon": {"extraEnv": places},
        "webhook": {"enabled": False},
    }
    kubeconfig = cluster.directory / "kubeconfig"
    with helm_python.Config(kubeconfig_path=kubeconfig, namespace=NAMESPACE) as helm:
        helm.install(str(CHART), "unbroken", values, namespace=NAMESPACE, create_namespace=True)
        made = Release(cluster, helm, values)
        made.rolled_out()
        yield made
        made.check_logs()
