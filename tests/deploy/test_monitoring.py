"""Alerts and dashboards ask for metrics that there are, and each alert has its remedy."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from tests.apiservers import ROOT
from tests.deploy.charts import EVERYTHING, Object, of_kind, one_of, pod_of, render
from tests.tools import tool

GUIDE = ROOT / "docs/guide"
NAME = re.compile(
    r"\b(?:(?:unbroken|hyperpod|training|node)_[A-Za-z0-9_]+[a-z0-9]|DCGM_FI_[A-Z_]+)"
)
ROW = re.compile(r"^\| `([A-Za-z0-9_]+)` \| ([^|]*)\| ([^|]*) \|", re.MULTILINE)
MEMORY = re.compile(r"node_memory_\w+_bytes")
OF_THE_SCRAPER = {"instance"}
MATCHER = re.compile(r"[{,]([a-zA-Z_]+)=")
GROUPED = re.compile(r" by \(([^)]*)\)")


def documented_families() -> dict[str, tuple[str, set[str]]]:
    """Types and labels of metrics by the reference, which is compared with what is served."""
    rows = ROW.findall((GUIDE.parent / "reference/metrics.md").read_text())
    return {name: (kind, set(re.findall(r"[A-Za-z_]+", labels))) for name, labels, kind in rows}


def documented() -> dict[str, set[str]]:
    """Metrics and their labels, by the reference."""
    return {name: labels for name, (_, labels) in documented_families().items()}


def rules() -> list[Object]:
    """The alerts."""
    return groups()["unbroken"]


def groups() -> dict[str, list[Object]]:
    """The rules by the name of their group."""
    found = one_of(render(EVERYTHING), "PrometheusRule", "unbroken")["spec"]["groups"]
    return {group["name"]: group["rules"] for group in found}


def dashboards() -> Iterator[Object]:
    """Yield the dashboards as Grafana's sidecar finds them."""
    for one in of_kind(render(EVERYTHING), "ConfigMap"):
        if one["metadata"]["labels"].get("grafana_dashboard") == "1":
            (text,) = one["data"].values()
            yield json.loads(text)


def expressions() -> Iterator[str]:
    """Yield all expressions for Prometheus."""
    yield from (rule["expr"] for group in groups().values() for rule in group)
    for board in dashboards():
        yield from (target["expr"] for panel in board["panels"] for target in panel["targets"])


def test_they_ask_for_metrics_and_labels_that_are_served() -> None:
    known = documented()
    assert len(list(expressions())) > 20
    for expression in expressions():
        expression = MEMORY.sub("node_memory_FIELD_bytes", expression)
        names = {
            re.sub(r"_(bucket|sum|count)$", "", name)
            if re.sub(r"_(bucket|sum|count)$", "", name) in known
            else name
            for name in NAME.findall(expression)
        }
        prefixes = {one for one in names if any(name.startswith(one + "_") for name in known)}
        assert names <= set(known) | prefixes, expression
        labels = set(MATCHER.findall(expression)) - {"__name__"} - OF_THE_SCRAPER
        for group in GROUPED.findall(expression):
            labels |= {one.strip() for one in group.split(",")} - {"le"} - OF_THE_SCRAPER
        assert labels <= set().union(*(known.get(name, set()) for name in names)), expression


def test_every_alert_says_what_to_do() -> None:
    text = (GUIDE / "alerts.md").read_text()
    told = re.findall(r"^### (\w+)$", text, re.MULTILINE)
    assert told == [rule["alert"] for rule in rules()]
    for rule in rules():
        assert rule["annotations"]["runbook"] == f"docs/guide/alerts.md#{rule['alert'].lower()}"
        assert rule["labels"]["severity"] in ("warning", "critical")
        used = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        known = (documented()[name] for name in NAME.findall(rule["expr"]))
        assert used <= OF_THE_SCRAPER.union(*known)


def test_dashboards_are_what_the_tool_writes() -> None:
    for path, text in tool("dashboards").files().items():
        assert path.read_text() == text, "run tools/dashboards.py"
    assert [one["uid"] for one in dashboards()] == [
        *("unbroken-hardware", "unbroken-nodes", "unbroken-other-jobs"),
        *("unbroken-recovery", "unbroken-training"),
    ]


def test_prometheus_finds_the_metrics_by_the_documented_name() -> None:
    found = render(EVERYTHING)
    monitor = one_of(found, "ServiceMonitor", "hyperpod-training-operator")
    (endpoint,) = monitor["spec"]["endpoints"]
    service = one_of(found, "Service", "unbroken-operator-metrics")
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    assert wanted <= service["metadata"]["labels"].items()
    assert endpoint["port"] in [one["name"] for one in service["spec"]["ports"]]
    assert (endpoint["port"], endpoint["interval"]) == ("8081", "15s")


def test_metrics_of_ray_have_the_label_of_its_dashboards() -> None:
    monitor = one_of(render(EVERYTHING), "PodMonitor", "unbroken-ray")["spec"]
    assert monitor["namespaceSelector"] == {"any": True}
    # These ports are those of KubeRay; test_ray_metrics.py needs the label `ray_io_cluster`.
    assert [one["port"] for one in monitor["podMetricsEndpoints"]] == [
        *("metrics", "as-metrics", "dash-metrics")
    ]
    for endpoint in monitor["podMetricsEndpoints"]:
        (relabeling,) = endpoint["relabelings"]
        assert relabeling["targetLabel"] == "ray_io_cluster"


def test_metrics_of_nodes_are_served_and_scraped_only_if_that_is_wanted() -> None:
    found = render(EVERYTHING)
    (endpoint,) = one_of(found, "PodMonitor", "unbroken-node-daemon")["spec"]["podMetricsEndpoints"]
    assert endpoint["honorLabels"], "a GPU's pod, not the daemon's"
    container = daemon(found)
    assert endpoint["port"] in [one["name"] for one in container["ports"]]
    policy = one_of(found, "NetworkPolicy", "unbroken-node-daemon")
    (allowed,) = policy["spec"]["ingress"]
    assert [one["port"] for one in allowed["ports"]] == [container["ports"][0]["containerPort"]]
    assert not of_kind(render(), "PodMonitor")
    assert {"--metrics=host", "--metrics=gpus"} <= set(daemon(render())["args"])


def test_metrics_of_nodes_can_be_turned_off_in_parts() -> None:
    def arguments(**metrics: bool) -> list[str]:
        container = daemon(render({"nodeDaemon": {"metrics": metrics}}))
        assert ("ports" in container) == ("args" in container)
        return [one for one in container.get("args", ()) if one.startswith("--metrics=")]

    assert arguments(host=False) == ["--metrics=gpus"]
    assert arguments(gpus=False) == ["--metrics=host"]
    assert arguments(host=False, gpus=False) == arguments(enabled=False) == []
    closed = one_of(
        render({"nodeDaemon": {"metrics": {"enabled": False}}}),
        "NetworkPolicy",
        "unbroken-node-daemon",
    )
    assert "ingress" not in closed["spec"]


def daemon(found: list[Object]) -> Object:
    """Return the container of the node daemon."""
    (container,) = pod_of(one_of(found, "DaemonSet", "node-daemon"))["containers"]
    result: Object = container
    return result
