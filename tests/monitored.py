"""A local cluster on which jobs and nodes break while a real Prometheus scrapes it."""

from __future__ import annotations

import asyncio
import json
import math
import re
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import yaml

from tests.apiservers import free_port
from tests.deploy.test_monitoring import groups
from tests.e2e.clusters import UNBROKEN, Cluster, find_kubectl
from tests.e2e.jobs import job
from tests.nodes.nvml_library import build
from tests.nodes.test_gpu_metrics import kubelet, pod
from tests.nodes.test_nodes_host import made
from tests.watching import PATIENCE_SECONDS, wait_until
from unbroken.nodes.host_metrics import EFA, LINK
from unbroken.spec.keys import CLUSTER_NAME, INSTANCE_GROUP

Object = dict[str, Any]
GPUS = (
    "gpu 00000000:3B:00.0 use=93 memory=70000 temperature=61 watts=655 energy=5000 replays=1 "
    "ecc=0 links=2\n"
)
INFINIBAND = "sys/class/infiniband/mlx5_0"
EFA_DEVICE = "sys/class/infiniband/rdmap0s6"
HARDWARE = {
    "sys/class/net/eth0/speed": "100000\n",
    f"{INFINIBAND}/board_id": "MT_0000000838\n",
    f"{INFINIBAND}/fw_ver": "28.39.1002\n",
    f"{INFINIBAND}/hca_type": "MT4129\n",
    f"{INFINIBAND}/ports/1/state": "4: ACTIVE\n",
    f"{INFINIBAND}/ports/1/phys_state": "5: LinkUp\n",
    f"{INFINIBAND}/ports/1/rate": "400 Gb/sec (4X NDR)\n",
    **{f"{INFINIBAND}/ports/1/counters/{name}": "1000\n" for name in LINK},
    **{f"{EFA_DEVICE}/ports/1/hw_counters/{name}": "1000\n" for name in EFA},
}
"""Network devices that this machine lacks, as files of the system."""
FILLED = {"$__range": "10m", "$__rate_interval": "20s"}
AWAY_FROM_THE_GPUS: Object = {
    "key": "kubernetes.io/hostname",
    "operator": "NotIn",
    "values": ["node-0"],
}
TEMPLATE: Object = {
    "spec": {
        "containers": [{"name": "pytorch", "image": "any", "command": ["sleep", "3600"]}],
        "terminationGracePeriodSeconds": 1,
        "affinity": {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [{"matchExpressions": [AWAY_FROM_THE_GPUS]}]
                }
            }
        },
    }
}
WORKER: Object = {"replicas": 1, "restartPolicy": "OnFailure", "template": TEMPLATE}
OTHER_JOB: Object = {
    "apiVersion": "kubeflow.org/v1",
    "kind": "PyTorchJob",
    "metadata": {"name": "other"},
    "spec": {"pytorchReplicaSpecs": {"Worker": WORKER}},
}


LABELS = (f"{CLUSTER_NAME}=a", f"{INSTANCE_GROUP}=b")
"""Labels of the nodes of a HyperPod cluster."""
LOCAL, METAL = TARGETS = ("unbroken", "metal")
"""Names of the targets: a local cluster with its operator, and the daemon of a node."""


@dataclass(frozen=True)
class Prometheus:
    """A running server."""

    address: str
    began: float

    def ask(self, path: str, **query: str) -> Any:
        """Return the data of an answer of the HTTP API."""
        url = f"{self.address}/api/v1/{path}?{urlencode(query)}"
        with urlopen(url, timeout=PATIENCE_SECONDS) as answer:
            return json.load(answer)["data"]

    def now(self) -> float:
        """Return the time of the server, in seconds since the epoch."""
        return float(self.ask("query", query="time()")["result"][1])

    def labels(self) -> dict[str, set[str]]:
        """Return the labels that each metric had at any time, without those that were added."""
        times = {"start": str(self.began), "end": str(self.now())}
        found: dict[str, set[str]] = {}
        for one in self.ask("series", **{"match[]": '{__name__=~".+"}'}, **times):
            added = {"__name__", "instance"} | ({"job"} if one.get("job") in TARGETS else set())
            found.setdefault(one["__name__"], set()).update(one.keys() - added)
        return found

    def has_data(self, expression: str) -> bool:
        """Return True if a panel of this expression shows a number at any time of the test."""
        for name, value in FILLED.items():
            expression = expression.replace(name, value)
        filled = re.sub(r"\$(namespace|job|kind|node)\b", ".*", expression)
        times = {"start": str(self.began), "end": str(self.now()), "step": "1"}
        found = self.ask("query_range", query=filled, **times)["result"]
        return any(not math.isnan(float(value)) for one in found for _, value in one["values"])


@contextmanager
def prometheus(folder: Path, address: str, *scraped: Object) -> Iterator[Prometheus]:
    """Run a server with the chart's rules at an address; `scraped`: its `scrape_configs`."""
    folder.mkdir()
    every = {"groups": [{"name": name, "rules": found} for name, found in groups().items()]}
    (folder / "rules.yaml").write_text(yaml.safe_dump(every))
    times = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    config = {"global": times, "rule_files": ["rules.yaml"], "scrape_configs": [*scraped]}
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    options = {
        "config.file": folder / "prometheus.yaml",
        "storage.tsdb.path": folder / "data",
        "web.listen-address": address,
    }
    command = ["prometheus", *(f"--{name}={value}" for name, value in options.items())]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    try:
        found = Prometheus(f"http://{address}", 0.0)
        wait_until(lambda: answers(found), logs=folder / "log")
        yield replace(found, began=found.now())
    finally:
        process.terminate()
        process.wait()


def answers(server: Prometheus) -> bool:
    """Return True once the server answers and has scraped all of its targets."""
    try:
        active = server.ask("targets")["activeTargets"]
    except OSError:
        return False
    return bool(active) and all(one["health"] == "up" for one in active)


@contextmanager
def short_folder() -> Iterator[Path]:
    """Yield a folder; the path of a socket below it has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="prom-") as folder:
        yield Path(folder)


@contextmanager
def kubelet_in_thread(root: Path, message: bytes) -> Iterator[None]:
    """Serve a kubelet's answer about GPUs, for the time of the block."""
    started, ended = threading.Event(), threading.Event()

    async def serve() -> None:
        async with kubelet(root, message):
            started.set()
            await asyncio.to_thread(ended.wait)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    started.wait()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def node_daemon(cluster: Cluster, root: Path) -> Iterator[str]:
    """Run the daemon of a node with the hardware; yield where its metrics are."""
    made(root, HARDWARE)
    (root / EFA_DEVICE / "device").mkdir()
    (root / EFA_DEVICE / "device/driver").symlink_to("../../../bus/pci/drivers/efa")
    port = free_port()
    options = {
        "node": "metal",
        "root": root,
        "metrics": "host",
        "metrics-port": port,
        "kubeconfig": cluster.directory / "kubeconfig",
    }
    words = [f"--{name}={value}" for name, value in options.items()]
    process = subprocess.Popen([*UNBROKEN, "node-daemon", *words], stderr=subprocess.DEVNULL)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


@dataclass(frozen=True)
class Scene:
    """The server that has scraped, the addresses of metrics, and the cluster."""

    server: Prometheus
    targets: dict[str, str]
    cluster: Cluster

    def metrics(self, target: str) -> str:
        """Return the metrics of a target as text."""
        with urlopen(f"http://{self.targets[target]}/metrics", timeout=PATIENCE_SECONDS) as answer:
            text: str = answer.read().decode()
            return text


@contextmanager
def broken_cluster(folder: Path, **more: str) -> Iterator[Scene]:
    """Start a cluster, its GPUs and a Prometheus; break jobs and nodes while it scrapes.

    The live page of the cluster shows dashboards of the Prometheus.  `more`: further targets.
    """
    with ExitStack() as stack:
        state = stack.enter_context(short_folder()) / "state"
        cluster = Cluster(state, find_kubectl())
        address = f"127.0.0.1:{free_port()}"
        options = (f"--prometheus=http://{address}", *(f"--label={one}" for one in LABELS))
        cluster.unbroken("up", "--detach", "--nodes", "4", *options)
        stack.callback(cluster.unbroken, "down", "--purge", check=False)
        place = state / "nodes/node-0"
        build(place)
        (place / "gpus.txt").write_text(GPUS)
        message = pod("lm-0", "trainer", "nvidia.com/gpu", "GPU-00000000:3B:00.0")
        stack.enter_context(kubelet_in_thread(place / "host", message))
        told = json.loads(cluster.unbroken("status", "-o", "json").stdout)["metrics"]
        targets = {
            LOCAL: re.sub(r"^http://|/metrics$", "", told),
            METAL: stack.enter_context(node_daemon(cluster, folder / "metal")),
            **more,
        }
        scraped = [
            {"job_name": name, "honor_labels": True, "static_configs": [{"targets": [target]}]}
            for name, target in targets.items()
        ]
        server = stack.enter_context(prometheus(folder / "server", address, *scraped))
        break_things(cluster, server, folder / "job")
        yield Scene(server, targets, cluster)


def break_things(cluster: Cluster, server: Prometheus, folder: Path) -> None:
    """Kill workers of a job twice, have nodes repaired, and lose the node of a PyTorchJob.

    A rate needs two values of a series: each second event waits until the first was scraped.
    """

    def scraped(*expressions: str) -> None:
        wait_until(lambda: all(map(server.has_data, expressions)), patience=300)

    cluster.apply(OTHER_JOB)
    cluster.wait("pytorchjob/other", "condition=Running", seconds=100)
    lost = cluster.get("pod", "other-worker-0")["spec"]["nodeName"]
    folder.mkdir()
    with job(cluster, folder, environment={"PROGRESS": "1"}) as one:
        for attempt in range(2):
            one.kill(one.steps(attempt, 3)[1])
            one.steps(attempt + 1, 3)
            one.incidents(attempt + 1)
            scraped(
                f'unbroken_recovery_stage_seconds_count{{stage="progress"}} == {attempt + 1}',
                f"unbroken_incident_lost_seconds_count == {attempt + 1}",
                "unbroken_job_goodput_ratio",
            )
        one.finish()
    with (cluster.directory / "nodes/node-0/kernel.log").open("a") as log:
        log.write("NVRM: Xid (PCI:0000:3b:00): 31, pid=1, name=python, MMU Fault\n")
    scraped('unbroken_node_faults_total{node="node-0"}', "DCGM_FI_DEV_XID_ERRORS == 31")
    # Nodes are repaired one after the other: at most a fifth of them at once.
    faulty = [name for name in ("node-1", "node-2", "node-3") if name != lost][:2]
    for number, name in enumerate(faulty, 1):
        with (cluster.directory / f"nodes/{name}/kernel.log").open("a") as log:
            log.write("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.\n")
        scraped(f"sum(unbroken_node_repairs_total) == {number}")
    cluster.kubectl("annotate", "node", lost, "unbroken.dev/power=off")
