"""A real Prometheus scrapes a local cluster on which jobs and nodes break.

Each query of each panel must have data, each served metric a row in the reference, and each alert
fires as promtool's unit tests say.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Container, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.apiservers import free_port
from tests.deploy.test_monitoring import dashboards, documented, documented_families, groups, rules
from tests.monitored import Scene, broken_cluster
from tests.watching import PATIENCE_SECONDS, wait_until

pytestmark = [pytest.mark.clients, pytest.mark.slow, pytest.mark.timeout(900)]
Object = dict[str, Any]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """A cluster on which everything has broken that the dashboards show."""
    with broken_cluster(tmp_path_factory.mktemp("prometheus")) as found:
        yield found


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


ADDED = re.compile(r"(process|python|unbroken:|scrape|up|ALERTS).*|.*_created")
"""Metrics that the client library and Prometheus add."""


PASSING = {
    "hyperpod_node_health_status_unschedulable_pending_reboot",
    "hyperpod_node_health_status_unschedulable_pending_replacement",
}
"""States of nodes that may begin and end between two scrapes."""


def served_types(scene: Scene) -> dict[str, str]:
    """Return the type of each family, by the name in the reference."""
    found = {}
    for target in scene.targets:
        for family in text_string_to_metric_families(scene.metrics(target)):
            name = f"{family.name}_total" if family.type == "counter" else family.name
            if not ADDED.fullmatch(name):
                found[in_reference(name)] = family.type.replace("unknown", "untyped")
    return found


def in_reference(name: str) -> str:
    """Return the name by which the reference has a family."""
    return re.sub(r"node_memory_\w+?(_bytes)?$", r"node_memory_FIELD\1", name)


def test_the_reference_has_each_family_that_is_served_and_its_type(scene: Scene) -> None:
    written = {name: kind for name, (kind, _) in documented_families().items()}
    kinds = {
        name: "untyped" if kind == "cumulative buckets" else kind for name, kind in written.items()
    }
    assert served_types(scene) == kinds


def test_each_row_of_the_reference_was_scraped_with_its_labels(scene: Scene) -> None:
    written = documented()

    def different() -> dict[str, object]:
        found = scraped_labels(scene, written)
        names = (found.keys() | written.keys()) - (PASSING - found.keys())
        pairs = {name: (found.get(name), written.get(name)) for name in names}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}

    wait_until(different, lambda found: not found, patience=300)


def scraped_labels(scene: Scene, known: Container[str]) -> dict[str, set[str]]:
    """Return the labels of each family that was scraped, by the name in the reference."""
    result: dict[str, set[str]] = {}
    for series, labels in scene.server.labels().items():
        family = re.sub(r"_(bucket|sum|count)$", "", series)
        is_part = family != series and family in known
        if not ADDED.fullmatch(series):
            name = in_reference(family if is_part else series)
            own = labels - {"le"} if is_part else labels
            result[name] = result.get(name, set()) | own
    return result


NAMES_OF_OTHERS = re.compile(
    r"node_memory_\w+ metric names should be written in 'snake_case'"
    r"|DCGM_FI_\w+ label names should be written in 'snake_case'"  # modelName
    r"|DCGM_FI_DEV_PCIE_REPLAY_COUNTER metric name should not include type 'counter'"
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
    run_promtool(tmp_path, rules(), tests)


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


RECORDED: dict[str, tuple[dict[str, str], dict[str, float]]] = {
    "unbroken:job_goodput_ratio:avg": (
        {'unbroken_job_goodput_ratio{job="a"}': "0.5", 'unbroken_job_goodput_ratio{job="b"}': "1"},
        {"": 0.75},
    ),
    "unbroken:job_lost_seconds:sum": (
        {
            'unbroken_job_lost_seconds{job="a",fault="Signal"}': "2",
            'unbroken_job_lost_seconds{job="b",fault="Signal"}': "3",
            'unbroken_job_lost_seconds{job="b",fault="Hang"}': "7",
        },
        {'{fault="Signal"}': 5, '{fault="Hang"}': 7},
    ),
    "unbroken:incidents_open:sum": (
        {
            'unbroken_job_incident_open{job="a"}': "1",
            'unbroken_job_incident_open{job="b"}': "0",
            'unbroken_resumed_job_loss_open{kind="RayJob",job="c"}': "1",
        },
        {"": 2},
    ),
    "unbroken:gpu_utilization_percent:avg": (
        {
            'DCGM_FI_DEV_GPU_UTIL{namespace="n",pod="p",gpu="0"}': "80",
            'DCGM_FI_DEV_GPU_UTIL{namespace="n",pod="p",gpu="1"}': "90",
            'DCGM_FI_DEV_GPU_UTIL{namespace="",pod="",gpu="2"}': "5",
        },
        {'{namespace="n",pod="p"}': 85},
    ),
    "unbroken:gpus_idle:count": (
        {
            'DCGM_FI_DEV_GPU_UTIL{pod="p",gpu="0"}': "0",
            'DCGM_FI_DEV_GPU_UTIL{pod="p",gpu="1"}': "90",
            'DCGM_FI_DEV_GPU_UTIL{pod="",gpu="2"}': "0",
        },
        {"": 1},
    ),
    "unbroken:node_cpu_use:ratio_rate5m": (
        {
            'node_cpu_seconds_total{instance="i",cpu="0",mode="idle"}': "0+15x60",
            'node_cpu_seconds_total{instance="i",cpu="1",mode="idle"}': "0+45x60",
        },
        {'{instance="i"}': 0.5},
    ),
}
"""Recorded figure -> series, and its values by its labels."""
OF_NONE: dict[str, tuple[dict[str, str], dict[str, float]]] = {
    "unbroken:incidents_open:sum": ({'unbroken_job_incident_open{job="a"}': "1"}, {"": 1}),
    "unbroken:gpus_idle:count": ({'DCGM_FI_DEV_GPU_UTIL{pod="p",gpu="1"}': "90"}, {"": 0}),
}
"""The same where a part has no series."""


def test_each_recorded_figure_is_what_its_name_says(tmp_path: Path) -> None:
    records = groups()["unbroken-records"]
    assert [one["record"] for one in records] == [*RECORDED]
    tests = [
        {
            "interval": "1m",
            "input_series": [
                {"series": series, "values": value if "x" in value else f"{value}x60"}
                for series, value in given.items()
            ],
            "promql_expr_test": [
                {
                    "expr": name,
                    "eval_time": "30m",
                    "exp_samples": [
                        {"labels": f"{name}{labels}", "value": value}
                        for labels, value in expected.items()
                    ],
                }
            ],
        }
        for name, (given, expected) in [*RECORDED.items(), *OF_NONE.items()]
    ]
    run_promtool(tmp_path, records, tests)


def run_promtool(folder: Path, rules: list[Object], tests: list[Object]) -> None:
    """Fail if promtool refuses the rules, or one of the tests of them."""
    (folder / "rules.yaml").write_text(
        yaml.safe_dump({"groups": [{"name": "all", "rules": rules}]})
    )
    text = yaml.safe_dump({"rule_files": ["rules.yaml"], "tests": tests})
    (folder / "tests.yaml").write_text(text)
    for words in (("check", "rules", "rules.yaml"), ("test", "rules", "tests.yaml")):
        done = subprocess.run(
            ["promtool", *words], cwd=folder, text=True, capture_output=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
