"""The chart, installed on real nodes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import helm_python

from tests.cluster_logs import assert_no_errors
from tests.deploy.charts import CHART, NAMESPACE, Object
from tests.realnodes import images, machines
from tests.realnodes.plane import SYSTEM, RealCluster

VALUES: Object = {"checks": {"image": images.NAMES["training"]}}
LEASE = ("-n", "kube-system", "lease", "unbroken-operator")
ROLLOUT_SECONDS = 150
"""Seconds to wait: two processors start the programs of three nodes."""
CONTROL_PLANE = "hp-training-control-plane=hp-training-operator-controller-manager"
OPERATORS = ("-n", NAMESPACE, "pods", "-l", CONTROL_PLANE)


@dataclass(frozen=True)
class Release:
    """The installed chart."""

    cluster: RealCluster
    helm: helm_python.Config

    def upgrade(self, **operator: Object) -> None:
        """Change values of the operator, and wait until only new pods run."""
        self.helm.upgrade(str(CHART), "unbroken", {**VALUES, "operator": operator})
        self.rolled_out()

    def rolled_out(self) -> None:
        """Wait until all wanted pods are ready."""
        for namespace, what in (
            (NAMESPACE, "deployment/unbroken-operator"),
            (SYSTEM, "daemonset/node-daemon"),
        ):
            command = ("-n", namespace, "rollout", "status", what, f"--timeout={ROLLOUT_SECONDS}s")
            self.cluster.kubectl(*command, seconds=ROLLOUT_SECONDS + 5)

    def scale(self, replicas: int) -> None:
        """Scale the operator to a number of replicas."""
        self.cluster.kubectl(
            "-n", NAMESPACE, "scale", "deployment/unbroken-operator", f"--replicas={replicas}"
        )

    def refuses(self, job: Object, *options: str) -> bool:
        """Return whether `kubectl apply` refuses a job with the error text of unbroken."""
        text = json.dumps(job)
        done = self.cluster.kubectl("apply", "-f", "-", *options, stdin=text, check=False)
        return done.returncode != 0 and "must be auto, cpu, gpu or a whole number" in done.stderr

    def delete(self, operator: str) -> None:
        """Delete an operator's pod without a grace period."""
        now = ("--grace-period=0", "--force")
        self.cluster.kubectl("-n", NAMESPACE, "delete", "pod", operator, *now)

    def operators(self) -> dict[str, str]:
        """Return the operators' pods, and the node of each."""
        pods = self.cluster.get(*OPERATORS)["items"]
        return {one["metadata"]["name"]: one["spec"].get("nodeName", "") for one in pods}

    def addresses(self) -> dict[str, str]:
        """Return the operators' pods that have an address, and the address of each."""
        pods = self.cluster.get(*OPERATORS)["items"]
        placed = (one for one in pods if "podIP" in one["status"])
        return {one["metadata"]["name"]: one["status"]["podIP"] for one in placed}

    @contextmanager
    def unheard_by_peers(self, node: str) -> Iterator[None]:
        """Drop packets from the pods of a node to those of all others, but to the operators."""
        room = self.cluster.directory
        others = [machines.pods_network(room, one) for one in machines.names(room) if one != node]
        network, operators = machines.pods_network(room, node), self.addresses().values()
        with machines.dropped(network, *others, but_to=operators):
            yield

    def run(self, operator: str, *command: str) -> str:
        """Run a command in an operator's container; return its output."""
        return self.cluster.kubectl("-n", NAMESPACE, "exec", operator, "--", *command).stdout

    def check_logs(self) -> None:
        """Fail if the log of a running operator has an error.

        The log of an operator whose machine was off during its deletion cannot be read.
        """
        for pod in self.cluster.get(*OPERATORS)["items"]:
            states = [one["state"] for one in pod["status"].get("containerStatuses") or ()]
            if "deletionTimestamp" in pod["metadata"] and all("terminated" in s for s in states):
                continue
            name = pod["metadata"]["name"]
            log = self.cluster.directory / f"{name}.log"
            log.write_text(self.cluster.kubectl("-n", NAMESPACE, "logs", name).stdout)
            assert_no_errors(log, self.cluster.allowed_errors)

    def leader(self) -> str:
        """Return the pod that leads; empty: none."""
        holder = self.cluster.get(*LEASE)["spec"].get("holderIdentity") or ""
        return next((name for name in self.operators() if holder.startswith(name)), "")


@contextmanager
def released(cluster: RealCluster) -> Iterator[Release]:
    """Install the chart for the block; the logs of its operators must have no error."""
    kubeconfig = cluster.directory / "kubeconfig"
    with helm_python.Config(kubeconfig_path=kubeconfig, namespace=NAMESPACE) as helm:
        helm.install(str(CHART), "unbroken", VALUES, namespace=NAMESPACE, create_namespace=True)
        made = Release(cluster, helm)
        made.rolled_out()
        yield made
        made.check_logs()
