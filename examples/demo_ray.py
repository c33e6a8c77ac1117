#!/usr/bin/env python3
"""The story of `make demo-ray`: Ray Train loses a worker pod, a node and the head, and resumes.

A cluster of four nodes on this machine runs a RayCluster of real Ray: a head and two workers, which
share a volume.  Two workers train a model in shards (FSDP).  After each loss, training resumes from
the newest checkpoint, and nobody types anything.  Every wait is for an event that must come; if it
does not come, the demo fails.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from base64 import b64decode
from collections.abc import Callable
from pathlib import Path
from typing import Any

from demo import DemoFailed, LocalDemo, Training, show, title

HERE = Path(__file__).parent / "ray"
CLUSTER = "rayml"
SECONDS = 600.0
"""Seconds for one recovery; two idle cores need less than a minute."""
TRAIN = "python3 /fsx/fsdp_ray.py --storage /fsx/runs --steps 100000 --print-every 5"
Object = dict[str, Any]


class Demo(LocalDemo):
    """The demo of Ray Train."""

    def __init__(self, ray_env: Path) -> None:
        super().__init__("unbroken-demo-ray-", RAY_USAGE_STATS_ENABLED="0")
        self.ray_env = ray_env
        self._forwarding: subprocess.Popen[str] | None = None
        self._address = ""

    def apply(self, name: str, **variables: str) -> None:
        """Apply a manifest of the example with its variables."""
        given = " ".join(f"{key}={value}" for key, value in variables.items())
        show(f"$ {given} envsubst < {name} | kubectl apply -f -")
        text = re.sub(r"\$\{(\w+)\}", lambda found: variables[found[1]], (HERE / name).read_text())
        command = ["kubectl", "apply", "-f", "-"]
        subprocess.run(command, check=True, env=self.environment, input=text, text=True)

    def get(self, *words: str) -> Object:
        """Return the answer of `kubectl get`."""
        command = ["kubectl", "get", *words, "-o", "json"]
        done = subprocess.run(command, check=True, env=self.environment, capture_output=True)
        found: Object = json.loads(done.stdout)
        return found

    def pods(self, node_type: str) -> list[Object]:
        """The pods of this type."""
        found: list[Object] = self.get("pods", "-l", f"ray.io/node-type={node_type}")["items"]
        return found

    def until(self, what: str, field: str, value: str) -> None:
        """Wait for a value in the status of an object."""
        condition = f"--for=jsonpath={{.status.{field}}}={value}"
        command = ["kubectl", "wait", what, condition, f"--timeout={SECONDS:.0f}s"]
        subprocess.run(command, check=True, env=self.environment, stdout=subprocess.DEVNULL)

    def run(self) -> None:
        """Run the demo."""
        title("A cluster of four nodes on this machine, and storage that its pods share")
        image = f"rayproject/ray={self.ray_env}"
        sizes = ("--cpu-per-node", "2", "--memory-per-node", "4Gi")
        self.call("unbroken", "up", "--detach", "--nodes", "4", *sizes, "--image-env", image)
        self.apply("storage.yaml", SUBNET_ID="subnet-1", SECURITYGROUP_ID="sg-1")
        title("A RayCluster: a head and two workers")
        self.apply("raycluster.yaml", REGISTRY="")
        self.until(f"raycluster/{CLUSTER}", "state", "ready")
        self.call("kubectl", "get", "rayclusters,pods", "-o", "wide")
        title("A training job: FSDP by Lightning under Ray Train, two workers")
        self.copy("fsdp_ray.py")
        self.submit()
        claim = self.get("pvc", "fsx-claim")["spec"]["volumeName"]
        folder = self.get("pv", claim)["spec"]["hostPath"]["path"]
        follow = f"exec tail -n +1 -F {folder}/runs/fsdp.log 2> /dev/null"
        training = Training(["sh", "-c", follow], self.environment)
        try:
            training.wait("training", training.steps_after(8), SECONDS)
            title("A worker pod is deleted")
            self.hurt(training, self.lose_pod)
            title("A node is switched off")
            self.hurt(training, self.lose_node)
            title("The head's pod is deleted")
            self.hurt(training, self.lose_head)
        finally:
            training.close()
        title("What happened")
        self.call("kubectl", "get", "rayclusters,pods", "-o", "wide")
        self.call("kubectl", "get", "events", "--field-selector", f"involvedObject.name={CLUSTER}")
        training.tell_loss()

    def hurt(self, training: Training, act: Callable[[], None]) -> None:
        """Break a part, and wait until training has continued for a while."""
        resumptions = training.resumptions
        act()
        training.wait("recovery", lambda: training.resumptions > resumptions, SECONDS)
        training.wait("training after it", training.steps_after(6), SECONDS)

    def lose_pod(self) -> None:
        """Delete a worker's pod: another one is made, and Ray Train starts its workers again."""
        self.call("kubectl", "delete", "pod", self.pods("worker")[0]["metadata"]["name"], "--now")

    def lose_node(self) -> None:
        """Switch off the node of a worker, so that the operator creates its pod again elsewhere."""
        head = self.pods("head")[0]["spec"]["nodeName"]
        lost = next(one for one in self.pods("worker") if one["spec"]["nodeName"] != head)
        self.call("kubectl", "annotate", "node", lost["spec"]["nodeName"], "unbroken.dev/power=off")

    def lose_head(self) -> None:
        """Delete the head's pod: the operator submits the job to the new head."""
        self.call("kubectl", "delete", "pod", self.pods("head")[0]["metadata"]["name"])

    def copy(self, name: str) -> None:
        """Copy a file of the example to the storage: the folder of a job is lost with the head."""
        head = self.pods("head")[0]["metadata"]["name"]
        words = ["kubectl", "exec", "-i", head, "--", "sh", "-c", f"cat > /fsx/{name}"]
        show(f"$ kubectl exec -i {head} -- sh -c 'cat > /fsx/{name}' < examples/ray/{name}")
        text = (HERE / name).read_text()
        subprocess.run(words, check=True, env=self.environment, input=text, text=True)

    def submit(self) -> None:
        """Forward the port of the dashboard, and submit the job through it."""
        self.forward()
        words = ["job", "submit", "--address", self._address, "--no-wait", "--", *TRAIN.split()]
        show(f"$ ray {' '.join(words)}")
        # Its twelve lines of advice are left out.
        command = [str(self.ray_env / "bin/ray"), *words]
        token = b64decode(self.get("secret", f"{CLUSTER}-ray-token")["data"]["auth_token"])
        access = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token.decode()}
        environment = {**self.environment, **access}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise DemoFailed(f"the job was not submitted: {done.stdout}{done.stderr}")

    def forward(self) -> None:
        """Start `kubectl port-forward`."""
        self.close()
        words = ["kubectl", "port-forward", f"service/{CLUSTER}-head-svc", ":8265"]
        show(f"$ {' '.join(words)} &")
        self._forwarding = subprocess.Popen(
            words, stdout=subprocess.PIPE, text=True, env=self.environment
        )
        assert self._forwarding.stdout is not None
        found = re.match(r"Forwarding from (\S+) ->", self._forwarding.stdout.readline())
        if found is None:
            raise DemoFailed("kubectl did not forward the port of the dashboard")
        self._address = f"http://{found[1]}"

    def close(self) -> None:
        """End `kubectl port-forward`."""
        if self._forwarding is not None:
            self._forwarding.terminate()
            self._forwarding.communicate()
            self._forwarding = None


def main() -> int:
    """Run the demo; the exit status says whether all went as it should."""
    ray_env = Path(os.environ.get("RAY_ENV", ".ray-env")).absolute()
    if not (ray_env / "bin/ray").exists():
        print(f"Ray is not installed in {ray_env}: run `make ray-env`", file=sys.stderr)
        return 1
    return Demo(ray_env).play("kubectl", "get", "rayclusters,pods", "-o", "wide")


if __name__ == "__main__":
    sys.exit(main())
