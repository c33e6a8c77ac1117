"""Ray's own dashboard on the metrics of a RayCluster, which a real Prometheus finds and scrapes."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.apiservers import ROOT, free_port
from tests.e2e.clusters import Cluster
from tests.e2e.test_ray import ENVIRONMENT, NAME, SIZES, pods_of, where, with_token
from tests.job_samples import MANIFESTS
from tests.monitored import Prometheus, prometheus
from tests.watching import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.frameworks, pytest.mark.timeout(600)]
Object = dict[str, Any]
WRITE = """
import json
from ray.dashboard.modules.metrics import grafana_dashboard_factory as factory
print(json.dumps(json.loads(factory.generate_default_grafana_dashboard()[0])))
"""
LABELS = {
    "SessionName": "SessionName",
    "Instance": "instance",
    "Cluster": "ray_io_cluster",
    "RayNodeType": "RayNodeType",
}
"""Variable of Ray's dashboard -> label that has its values."""
WITHOUT_DATA = re.compile(
    r".*GPU.*|.*TPU.*"  # this machine has none
    r"|Cluster Utilization: [BD]"  # of GPUs
    r"|Logical (CPUs|Memory) Usage: C"  # this RayCluster has no autoscaler
    r"|Ray OOM Kills.*|Unexpected System Level Worker Failures.*"  # nothing failed
    r"|(All|Active|Running) Tasks by (State|Name): B"  # no task was tried again
    r"|All Placement Groups by State: A"  # the job makes none
)
"""Panels and queries that have no data here, as docs/guide/ray.md says."""


def configuration(cluster: Cluster) -> Object:
    """Return the scrape configuration of docs/guide/ray.md, with its variables filled."""
    text = (ROOT / "docs/guide/ray.md").read_text()
    (found,) = re.findall(r"```yaml\n(scrape_configs:.*?)```", text, re.DOTALL)
    (head,) = pods_of(cluster, "head")
    filled = (
        found.replace("HEAD_ADDRESS", head["status"]["podIP"])
        .replace("TOKEN", with_token(cluster, NAME)["RAY_AUTH_TOKEN"])
        .replace("rayml", NAME)
    )
    (scraped,) = yaml.safe_load(filled)["scrape_configs"]
    scraped["http_sd_configs"][0]["refresh_interval"] = "5s"
    return {**scraped, "scrape_interval": "5s", "scrape_timeout": "5s"}


def dashboard_of_ray() -> Object:
    """Return the dashboard that Ray writes for Grafana."""
    done = subprocess.run(
        [ENVIRONMENT / "bin/python", "-c", WRITE], capture_output=True, text=True, check=True
    )
    found: Object = json.loads(done.stdout.splitlines()[-1])
    return found


def queries(board: Object) -> dict[str, str]:
    """Return each query with all values of the variables, by panel and name of the query."""
    every = {one["name"]: one.get("allValue") or ".*" for one in board["templating"]["list"]}
    panels = [one for row in board["panels"] for one in (row, *row.get("panels", ()))]
    return {
        f"{panel['title']}: {target['refId']}": re.sub(
            r"\$(\w+)\b", lambda match: every.get(match[1], match[0]), target["expr"]
        )
        for panel in panels
        for target in panel.get("targets", ())
    }


def test_rays_own_dashboard_has_data_and_values_of_its_variables(
    make_cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    cluster = make_cluster(*SIZES, "--image-env", f"rayproject/ray={ENVIRONMENT}")
    cluster.apply(yaml.safe_load((MANIFESTS / "raycluster-sample.yaml").read_text()))
    cluster.wait(f"raycluster/{NAME}", "jsonpath={.status.state}=ready", seconds=90)
    place = tmp_path / "server", f"127.0.0.1:{free_port()}"
    with prometheus(*place, configuration(cluster)) as server:
        board = dashboard_of_ray()
        missing = {
            name: query for name, query in queries(board).items() if not WITHOUT_DATA.match(name)
        }
        assert len(missing) > 40

        def ask() -> dict[str, str]:
            where(cluster)
            for name, query in list(missing.items()):
                if server.has_data(query):
                    del missing[name]
            return missing

        wait_until(ask, lambda left: not left, patience=300)
        asked = {one["name"]: values(server, LABELS[one["name"]]) for one in variables(board)}
        assert asked.pop("Cluster") == {NAME}
        assert asked.pop("RayNodeType") == {"head", "worker"}
        assert [name for name, found in asked.items() if not found] == []


def variables(board: Object) -> list[Object]:
    """Return the variables of a dashboard but the data source."""
    return [one for one in board["templating"]["list"] if one["type"] != "datasource"]


def values(server: Prometheus, label: str) -> set[str]:
    """Return the values of a label of the metric that Ray's variables are read from."""
    times = {"start": str(server.began), "end": str(server.now())}
    found = server.ask("series", **{"match[]": "ray_node_network_receive_speed"}, **times)
    return {one[label] for one in found if label in one}
