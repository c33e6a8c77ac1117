"""A real Prometheus scrapes a local cluster on which jobs and nodes break.

Each query of each panel must have data, each served metric a row in the reference, and each alert
fires as promtool's unit tests say.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.apiservers import free_port
from tests.deploy.test_monitoring import dashboards, documented, groups, rules
from tests.e2e.clusters import UNBROKEN, Cluster, find_kubectl
from tests.e2e.jobs import job
from tests.nodes.nvml_library import build
from tests.nodes.test_gpu_metrics import kubelet, pod
from tests.nodes.test_nodes_host import made
from tests.watching import PATIENCE_SECONDS, wait_until

pytestmark = [pytest.mark.clients, pytest.mark.slow, pytest.mark.timeout(900)]
Object = dict[str, Any]
GPUS = "gpu 00000000:3B:00.0 use=93 memory=70000 temperature=61 watts=655 ecc=0 links=2\n"
PORT = "sys/class/infiniband/mlx5_0/ports/1/counters/port_rcv_data"
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

    def has_data(self, expression: str) -> bool:
        """Return True if a panel of this expression shows a number at any time of the test."""
        for name, value in FILLED.items():
            expression = expression.replace(name, value)
        filled = re.sub(r"\$(namespace|job|kind|node)\b", ".*", expression)
        times = {"start": str(self.began), "end": str(self.now()), "step": "1"}
        found = self.ask("query_range", query=filled, **times)["result"]
        return any(not math.isnan(float(value)) for one in found for _, value in one["values"])


@contextmanager
def prometheus(folder: Path, targets: dict[str, str]) -> Iterator[Prometheus]:
    """Run a server with the chart's rules; `targets` by the name of their job."""
    folder.mkdir()
    every = {"groups": [{"name": name, "rules": found} for name, found in groups().items()]}
    (folder / "rules.yaml").write_text(yaml.safe_dump(every))
    scraped = [
        {"job_name": name, "honor_labels": True, "static_configs": [{"targets": [target]}]}
        for name, target in targets.items()
    ]
    times = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    config = {"global": times, "rule_files": ["rules.yaml"], "scrape_configs": scraped}
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
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
    """Run the daemon of a node with an InfiniBand port; yield where its metrics are."""
    made(root, {PORT: "1000\n"})
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
    """The server that has scraped, and the addresses of metrics."""

    server: Prometheus
    targets: dict[str, str]

    def metrics(self, target: str) -> str:
        """Return the metrics of a target as text."""
        with urlopen(f"http://{self.targets[target]}/metrics", timeout=PATIENCE_SECONDS) as answer:
            text: str = answer.read().decode()
            return text


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """Start a cluster, its GPUs and a Prometheus; break jobs and nodes while it scrapes."""
    folder = tmp_path_factory.mktemp("prometheus")
    with ExitStack() as stack:
        state = stack.enter_context(short_folder()) / "state"
        cluster = Cluster(state, find_kubectl())
        cluster.unbroken("up", "--detach", "--nodes", "4")
        stack.callback(cluster.unbroken, "down", "--purge", check=False)
        place = state / "nodes/node-0"
        build(place)
        (place / "gpus.txt").write_text(GPUS)
        message = pod("lm-0", "trainer", "nvidia.com/gpu", "GPU-00000000:3B:00.0")
        stack.enter_context(kubelet_in_thread(place / "host", message))
        told = json.loads(cluster.unbroken("status", "-o", "json").stdout)["metrics"]
        targets = {
            "unbroken": re.sub(r"^http://|/metrics$", "", told),
            "metal": stack.enter_context(node_daemon(cluster, folder / "metal")),
        }
        server = stack.enter_context(prometheus(folder / "server", targets))
        break_things(cluster, server, folder / "job")
        yield Scene(server, targets)


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
    with job(cluster, folder) as one:
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


def test_each_query_of_each_panel_has_data(scene: Scene) -> None:
    queries = {
        (board["uid"], panel["title"]): target["expr"]
        for board in dashboards()
        for panel in board["panels"]
        for target in panel["targets"]
    }
    assert len(queries) > 40
    missing = dict(queries)
    assert not scene.server.has_data("unbroken_no_such_metric")
    assert not scene.server.has_data("vector(0) / 0"), "NaN is no figure"

    def ask() -> dict[tuple[str, str], str]:
        for key, expression in list(missing.items()):
            if scene.server.has_data(expression):
                del missing[key]
        return missing

    wait_until(ask, lambda left: not left, patience=300)


def test_recorded_figures_and_alerts_are_evaluated_without_an_error(scene: Scene) -> None:
    records = [rule["record"] for rule in groups()["unbroken-records"]]
    for name in records:
        wait_until(partial(scene.server.has_data, name))
    for group in scene.server.ask("rules")["groups"]:
        assert [rule["lastError"] for rule in group["rules"] if rule.get("lastError")] == []


def test_the_reference_names_each_metric_that_is_served(scene: Scene) -> None:
    known = documented()
    for target in scene.targets:
        for family in text_string_to_metric_families(scene.metrics(target)):
            if family.name.startswith(("process_", "python_")):
                continue
            names = {family.name, family.name.removesuffix("_created")}
            names |= {f"{name}_total" for name in names}
            names.add(re.sub(r"node_memory_\w+?(_bytes)?$", r"node_memory_FIELD\1", family.name))
            assert names & known.keys(), family.name


NAMES_OF_OTHERS = re.compile(
    r"node_memory_\w+ metric names should be written in 'snake_case'"
    r"|DCGM_FI_\w+ label names should be written in 'snake_case'"  # modelName
    r"|(hyperpod|training)_\w+ (label names should be written in 'snake_case'"  # jobName
    r"|metric names should not contain abbreviated units|use base unit)"
)
"""Findings about names that dashboards of others ask for."""


def test_promtool_finds_fault_with_names_of_others_only(scene: Scene) -> None:
    for target in scene.targets:
        done = subprocess.run(
            ["promtool", "check", "metrics"],
            input=scene.metrics(target),
            text=True,
            capture_output=True,
            check=False,
        )
        said = [line for line in (done.stdout + done.stderr).splitlines() if line]
        assert [line for line in said if not NAMES_OF_OTHERS.match(line)] == []


def test_the_system_has_the_types_of_node_exporters_families(scene: Scene) -> None:
    ours = {one.name: one.type for one in text_string_to_metric_families(scene.metrics("unbroken"))}
    port = free_port()
    process = subprocess.Popen(
        ["prometheus-node-exporter", f"--web.listen-address=127.0.0.1:{port}"],
        stderr=subprocess.DEVNULL,
    )

    def scrape() -> str:
        try:
            with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_SECONDS) as answer:
                text: str = answer.read().decode()
                return text
        except OSError:
            return ""

    try:
        theirs = {one.name: one.type for one in text_string_to_metric_families(wait_until(scrape))}
    finally:
        process.terminate()
        process.wait()
    here = {name for name in ours if name.startswith("node_")}
    absent = ("node_infiniband", "node_amazonefa")  # this machine has no such device
    assert {name for name in here - theirs.keys() if not name.startswith(absent)} == set()
    assert {name: ours[name] for name in here & theirs.keys()} == {
        name: theirs[name] for name in here & theirs.keys()
    }


FIRING = {
    "UnbrokenNoOperatorLeads": ("unbroken_operator_leading", "0"),
    "UnbrokenTwoOperatorsLead": ("unbroken_operator_leading", "2"),
    "UnbrokenWatchSilent": ('unbroken_watch_silence_seconds{resource="pods"}', "200"),
    "UnbrokenWorkFails": ('unbroken_queue_failed_total{queue="nodes"}', "0+10x60"),
    "UnbrokenIncidentOpen": ('unbroken_job_incident_open{namespace="a",job="b"}', "1"),
    "UnbrokenJobRestartsOften": ('unbroken_job_restarts{namespace="a",job="b"}', "0+1x60"),
    "UnbrokenAgentsUnreachable": ('unbroken_job_agents_connected{namespace="a",job="b"}', "1"),
    "UnbrokenNodesNotReady": ('unbroken_nodes{ready="false"}', "3"),
    "UnbrokenNodeQuarantined": ("unbroken_nodes_quarantined", "1"),
    "UnbrokenNodeRepairFailed": (
        'unbroken_node_repairs_total{action="reset",outcome="Failed"}',
        "0+1x60",
    ),
    "UnbrokenResumedJobDown": (
        'unbroken_resumed_job_loss_open{kind="RayJob",namespace="a",job="b"}',
        "1",
    ),
    "UnbrokenGpusUnreadable": ('unbroken_node_gpus_readable{node="n"}', "0"),
    "UnbrokenFileSystemSilent": (
        'node_filesystem_device_error{instance="n",mountpoint="/fsx"}',
        "1",
    ),
}
"""Alert -> a series and values of it by which the alert fires within an hour."""
HEALTHY = {
    "unbroken_operator_leading": "1",
    'unbroken_watch_silence_seconds{resource="pods"}': "20",
    'unbroken_queue_failed_total{queue="nodes"}': "0+1x60",
    'unbroken_job_incident_open{namespace="a",job="b"}': "0",
    'unbroken_job_restarts{namespace="a",job="b"}': "3",
    'unbroken_job_agents_connected{namespace="a",job="b"}': "2",
    'unbroken_job_agents_wanted{namespace="a",job="b"}': "2",
    'unbroken_nodes{ready="false"}': "1",
    'unbroken_nodes{ready="true"}': "9",
    "unbroken_nodes_quarantined": "0",
    'unbroken_node_repairs_total{action="reset",outcome="Failed"}': "4",
    'unbroken_resumed_job_loss_open{kind="RayJob",namespace="a",job="b"}': "0",
    'unbroken_node_gpus_readable{node="n"}': "1",
    'node_filesystem_device_error{instance="n",mountpoint="/fsx"}': "0",
}
"""Series of a cluster on which no alert fires."""


def test_each_alert_fires_when_it_should_and_only_then(tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(
        yaml.safe_dump({"groups": [{"name": "all", "rules": rules()}]})
    )
    every = {rule["alert"]: rule for rule in rules()}
    assert every.keys() == FIRING.keys()

    def case(changed: dict[str, str], alert: str, *, fires: bool) -> Object:
        series = {**HEALTHY, **changed}
        found = [
            {"series": name, "values": value if "x" in value else f"{value}x60"}
            for name, value in series.items()
        ]
        wanted: Object = {"eval_time": "1h", "alertname": alert}
        if fires:
            wanted["exp_alerts"] = [expected(every[alert], next(iter(changed)))]
        return {"interval": "1m", "input_series": found, "alert_rule_test": [wanted]}

    tests = [case({name: value}, one, fires=True) for one, (name, value) in FIRING.items()]
    tests += [case({}, one, fires=False) for one in FIRING]
    (tmp_path / "tests.yaml").write_text(
        yaml.safe_dump({"rule_files": ["rules.yaml"], "tests": tests})
    )
    for words in (("check", "rules", "rules.yaml"), ("test", "rules", "tests.yaml")):
        done = subprocess.run(
            ["promtool", *words], cwd=tmp_path, text=True, capture_output=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


WITHOUT_LABELS = {"UnbrokenNoOperatorLeads", "UnbrokenTwoOperatorsLead", "UnbrokenNodesNotReady"}
"""Alerts whose expression drops the labels of the series."""


def expected(rule: Object, series: str) -> Object:
    """Return the alert that a series makes fire, with its summary filled in."""
    labels = dict(re.findall(r'(\w+)="([^"]*)"', series))
    if rule["alert"] in WITHOUT_LABELS:
        labels = {}
    fill: Callable[[re.Match[str]], str] = lambda match: labels[match[1]]  # noqa: E731
    notes = {
        name: re.sub(r"{{ \$labels\.(\w+) }}", fill, text)
        for name, text in rule["annotations"].items()
    }
    return {"exp_labels": {**labels, **rule["labels"]}, "exp_annotations": notes}
