#!/usr/bin/env python3
"""Run `make demo-kube`: the training of `make demo` on a real Kubernetes, by kubectl alone.

The control plane and the three nodes are those of the tests on real nodes, with the same
requirements (CONTRIBUTING.md). They are etcd, the programs of Kubernetes 1.20, and for each node a
kubelet and a containerd in their own namespaces. Every wait is for an event that must happen. If it
does not happen, the demo fails.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from demo import JOB, DemoFailed, Training, show, title

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.apiservers import ROOT, CannotStartError
from tests.deploy.charts import NAMESPACE
from tests.realnodes import machines
from tests.realnodes.plane import RealCluster, real_cluster, until
from tests.realnodes.releases import Release, released

Object = dict[str, Any]

SCRIPT, MANIFEST = ROOT / "examples/train_lm.py", ROOT / "examples/train_lm.yaml"
NEEDED = (
    "Linux with cgroup v1, root, ../shared/envtest, and apt-get install etcd-server zstd openssl "
    "containerd runc containernetworking-plugins iproute2 iptables gcc; `make setup` has kubectl"
)
STEPS = 50_000
"""Steps of the job: more than the demo lasts."""


def now() -> float:
    """Return seconds since the epoch."""
    return time.time()  # noqa: TID251


def say(text: str) -> None:
    """Print a fact that no command shows."""
    show(textwrap.fill(text, 96, initial_indent="  ", subsequent_indent="  "))


class Demo:
    """One run on a cluster that is removed at the end."""

    def __init__(self, cluster: RealCluster, began: float) -> None:
        self.cluster = cluster
        self.began = began
        self.incidents = 0

    def title(self, text: str) -> None:
        """Print the title of the next part, and the time since the start."""
        minutes, seconds = divmod(round(now() - self.began), 60)
        title(f"{minutes}:{seconds:02}  {text}")

    def call(self, command: str) -> str:
        """Print a command as a person would type it; print and return its output."""
        show(f"$ {command}")
        done = subprocess.run(
            command,
            shell=True,
            check=True,
            env=self.cluster.environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        if done.stdout:
            show(done.stdout.rstrip())
        return done.stdout

    def run(self, release: Release) -> None:
        """Run all parts of the demo."""
        self.call(f"kubectl -n {NAMESPACE} get pods -o wide")
        self.title("A training job: 2 pods of 2 ranks each, and a spare pod")
        self.apply()
        first = self.first_pod(0)
        training = self.follow(first)
        try:
            training.wait("training", training.steps_after(8), 180)
            self.call("kubectl get pods -o wide")
            other = self.first_pod(3)
            [spare] = {pod["metadata"]["name"] for pod in self.pods()} - {first, other}
            self.kill_worker(training, other)
            self.delete_pod(training, other)
            self.delete_leader(training, release)
            self.lose_node(training, spare)
        finally:
            training.close()
        self.tell(training)

    def apply(self) -> None:
        """Create the job of `make demo`."""
        (self.cluster.directory / "programs/hyperpodrun").symlink_to("unbrokenrun")
        self.cluster.apply(volume(self.cluster.shared))
        self.call(f"kubectl create configmap {JOB} --from-file={SCRIPT}")
        changes = f"s|pytorch/pytorch|{machines.IMAGE}|; s|--steps=600|--steps={STEPS}|"
        self.call(f"sed '{changes}' {MANIFEST} | kubectl apply -f -")

    def follow(self, pod: str) -> Training:
        """Follow the log of a pod."""
        command = ["kubectl", "logs", "-f", pod]
        show(f"$ {' '.join(command)}")
        return Training(command, self.cluster.environment)

    def pods(self) -> list[Object]:
        """Return the pods of the job."""
        found: list[Object] = self.cluster.get("pods", "-l", f"HPJob={JOB}")["items"]
        return found

    def first_pod(self, rank: int) -> str:
        """Return the pod in which a rank has started.

        The pod of a later start follows from the one that was lost.
        """
        look = f"grep -lszx RANK={rank} /proc/[0-9]*/environ"
        found: list[str] = []

        def is_found() -> bool:
            for name in (pod["metadata"]["name"] for pod in self.pods()):
                call = ("exec", name, "--", "sh", "-c", look)
                if self.cluster.kubectl(*call, check=False).stdout:
                    found.append(name)
            return bool(found)

        until(is_found, f"rank {rank} works")
        return found[0]

    def kill_worker(self, training: Training, pod: str) -> None:
        """Kill a process of the training."""
        self.title("A worker is killed: rank 3")
        look = f"kubectl exec {pod} -- sh -c 'grep -lszx RANK=3 /proc/[0-9]*/environ'"
        pid = self.call(look).split("/")[2]
        resumes = self.watched(training)
        self.call(f"kubectl exec {pod} -- sh -c 'kill -9 {pid}'")
        resumes()

    def delete_pod(self, training: Training, pod: str) -> None:
        """Delete a pod of the training."""
        self.title(f"A pod is deleted: {pod}, which has ranks 2 and 3")
        resumes = self.watched(training)
        self.call(f"kubectl delete pod {pod} --wait=false")
        resumes()
        until(self.are_whole, "the spare has a successor")
        self.call("kubectl get pods -o wide")

    def delete_leader(self, training: Training, release: Release) -> None:
        """Delete the leading operator; the training must not notice."""
        leader = release.leader()
        self.title("The operator that leads is deleted")
        self.call("kubectl -n kube-system get lease unbroken-operator")
        resumptions, (step, _) = training.resumptions, training.losses[-1]
        at = now()
        self.call(f"kubectl -n {NAMESPACE} delete pod {leader} --wait=false")
        until(lambda: release.leader() not in ("", leader), "another operator leads")
        say(f"another leads after {now() - at:.1f} s")
        self.call("kubectl -n kube-system get lease unbroken-operator")
        training.wait("training without it", training.steps_after(4), 90)
        if training.resumptions != resumptions:
            raise DemoFailed("the training was restarted")
        say(f"steps {step} to {training.losses[-1][0]} were made meanwhile, without a restart")
        release.rolled_out()

    def lose_node(self, training: Training, pod: str) -> None:
        """Cut off the node of a pod, and reconnect it."""
        cluster = self.cluster
        node = str(cluster.get("pod", pod)["spec"]["nodeName"])
        number = machines.number_of(cluster.directory, node)
        self.title(f"The network of {node} is cut, where {pod} has ranks 2 and 3 now")
        resumes = self.watched(training)
        self.call(f"ip link set un-{number} down")
        say(
            f"Nobody can ask {node} whether the workers there still run, and no two may have one"
            " rank. They hold a lease: where neither the operator nor the other ranks were heard"
            " for 8 s, they are ended. The operator waits for that, and asks nobody."
        )
        resumes()
        self.call("kubectl get nodes")
        self.bring_back(training, node, number)

    def bring_back(self, training: Training, node: str, number: int) -> None:
        """Reconnect the node, and wait for the spare pod; the training must not notice."""
        self.title(f"The network of {node} is back")
        resumptions = training.resumptions
        self.call(f"ip link set un-{number} up")
        until(self.are_whole, f"{node} has the spare pod")
        self.call("kubectl get pods -o wide")
        training.wait("training after it", training.steps_after(2), 90)
        if training.resumptions != resumptions:
            raise DemoFailed("the training was restarted")

    def are_whole(self) -> bool:
        """Return whether all pods of the job are ready, the spare too."""
        ready = [
            pod
            for pod in self.pods()
            if "deletionTimestamp" not in pod["metadata"]
            for one in pod["status"].get("conditions") or ()
            if (one["type"], one["status"]) == ("Ready", "True")
        ]
        return len(ready) == 3

    def incident(self, name: str) -> Object:
        """Return the spec of an incident as it is now."""
        found: Object = self.cluster.get("incident", name)["spec"]
        return found

    def watched(self, training: Training) -> Callable[[], None]:
        """Return a function that waits until training has resumed after a fault.

        Call `watched` before the fault.
        """
        at, resumptions = now(), training.resumptions

        def resumes() -> None:
            training.wait("recovery", lambda: training.resumptions > resumptions, 90)
            training.wait("training after it", training.steps_after(2), 90)
            self.incidents += 1
            name = f"{JOB}-{self.incidents}"
            self.cluster.wait(f"incident/{name}", "jsonpath={.spec.outcome}=recovered", seconds=55)
            until(lambda: "resumed" in self.incident(name), f"{name} says where ranks went on")
            self.call(f"kubectl get incident {name}")
            told = self.incident(name)
            seconds = datetime.fromisoformat(told["progressAt"]).timestamp() - at
            say(f"the first step {seconds:.1f} s after the fault: {told['resumed']}")

        return resumes

    def tell(self, training: Training) -> None:
        """Print the incidents, and check that all were recovered from."""
        self.title("What happened")
        self.call("kubectl get incidents")
        self.call(f"kubectl get hpj {JOB}")
        outcomes = [one["spec"].get("outcome") for one in self.cluster.get("incidents")["items"]]
        if outcomes != ["recovered"] * self.incidents:
            raise DemoFailed(f"the incidents ended as {outcomes}")
        training.tell_loss()


def volume(folder: Path) -> Object:
    """Return the volume for the job's checkpoints: a folder that all nodes see."""
    spec = {
        "capacity": {"storage": "1Gi"},
        "accessModes": ["ReadWriteMany"],
        "hostPath": {"path": str(folder)},
    }
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": JOB},
        "spec": spec,
    }


def run() -> None:
    """Start the cluster, run the demo, and remove the cluster."""
    began = now()
    title("A real Kubernetes on this machine: control plane and three nodes, in a minute")
    with real_cluster(3) as cluster:
        try:
            demo = Demo(cluster, began)
            demo.call("kubectl get nodes -o wide")
            demo.title("unbroken is installed by its chart: two operators, a daemon on each node")
            show(f"$ helm install unbroken deploy/helm/unbroken -n {NAMESPACE} --create-namespace")
            with released(cluster) as release:
                demo.run(release)
        finally:
            on_interrupt(signal.SIG_IGN)


def on_interrupt(handler: Callable[[int, object], None] | signal.Handlers) -> None:
    """Set the handler of Ctrl-C and SIGTERM."""
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, handler)


def leave(number: int, _: object) -> None:
    """Exit, and ignore interrupts meanwhile."""
    on_interrupt(signal.SIG_IGN)
    sys.exit(128 + number)


def main() -> int:
    """Run the demo; return the exit status."""
    on_interrupt(leave)
    # Last: programs of the system are preferred to those of `make setup`.
    os.environ["PATH"] += f"{os.pathsep}{Path(sys.executable).parent}"
    os.environ.pop("UNBROKEN_DIR", None)
    try:
        run()
    except CannotStartError as error:
        print(f"cannot run here: {error}. Needed: {NEEDED}", file=sys.stderr)
        return 2
    except (DemoFailed, AssertionError, subprocess.SubprocessError) as error:
        print(f"\nfailed: {error}", file=sys.stderr)
        return 1
    show("the cluster is stopped and its folder removed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
