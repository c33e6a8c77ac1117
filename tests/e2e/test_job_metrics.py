"""Metrics that Prometheus scrapes while a real job fails and recovers, compared with the guide."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from urllib.request import urlopen

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.clusters import Cluster
from tests.e2e.jobs import Job, job
from tests.watching import PATIENCE_SECONDS, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
REFERENCE = Path(__file__).parents[2] / "docs/reference/metrics.md"
OPERATOR = "hyperpod_training_operator_jobs_"
Labels = dict[str, str]
OURS = ("unbroken_", "hyperpod_", "training_")


class Scrape:
    """All samples of one answer, parsed as Prometheus does."""

    def __init__(self, cluster: Cluster) -> None:
        address = json.loads(cluster.unbroken("status", "-o", "json").stdout)["metrics"]
        with urlopen(address, timeout=PATIENCE_SECONDS) as answer:
            text = answer.read().decode()
        self.families: list[Metric] = list(text_string_to_metric_families(text))
        self.samples = [one for family in self.families for one in family.samples]

    def value(self, name: str, **labels: str) -> float | None:
        """Return the value of the only sample with these labels; None: there is none."""
        found = [
            one.value
            for one in self.samples
            if one.name == name and labels.items() <= one.labels.items()
        ]
        assert len(found) <= 1, f"{name} {labels}: {found}"
        return found[0] if found else None


def scraped(cluster: Cluster, holds: Callable[[Scrape], bool]) -> Scrape:
    """Scrape until `holds` is true: metrics follow the job's state in the API server."""
    return wait_until(lambda: Scrape(cluster), holds)


def test_a_job_that_fails_and_recovers_is_measured(cluster: Cluster, tmp_path: Path) -> None:
    with job(cluster, tmp_path) as one:
        ours = {"namespace": "default", "job": one.name}
        one.steps(0)
        found = scraped(cluster, lambda s: s.value("unbroken_job_agents_connected", **ours) == 2)
        while_it_runs(found, one, ours)
        one.kill(one.steps(0)[1])
        one.steps(1)
        (incident,) = one.incidents(1)
        by_class = {**ours, "fault": "Signal", "remedy": incident["remedy"]}
        name = "unbroken_job_incidents_total"
        found = scraped(cluster, lambda s: s.value(name, **by_class) is not None)
        assert found.value(name, **by_class) == 1
        after_the_fault(found, one, ours, incident["remedy"])
        the_guide_names_what_is_served(found)
        one.finish()
        theirs = {"namespace": "default", "jobName": one.name}
        name = OPERATOR + "successful_total"
        found = scraped(cluster, lambda s: s.value(name, **theirs) == 1)
        assert (found.value(name, **theirs), found.value(OPERATOR + "failed_total", **theirs)) == (
            1,
            0,
        )
    name = OPERATOR + "deleted_total"
    found = scraped(cluster, lambda s: s.value(name, **theirs) == 1)
    assert found.value(name, **theirs) == 1
    assert found.value("unbroken_job_restarts", **ours) is None, "it goes with the job"


def while_it_runs(found: Scrape, one: Job, ours: Labels) -> None:
    """Check the metrics of the running job, and of the operator itself."""
    assert found.value("unbroken_job_agents_connected", **ours) == 2
    assert found.value("unbroken_job_agents_wanted", **ours) == 2
    assert found.value("unbroken_job_restarts", **ours) == 0
    assert found.value("unbroken_operator_leading") == 1
    assert found.value(OPERATOR + "created_total", jobName=one.name) == 1
    pods = "api/v1/pods"
    assert found.value("unbroken_watch_synced", resource=pods) == 1
    assert (found.value("unbroken_watch_objects", resource=pods) or 0) >= 2
    assert found.value("unbroken_queue_failed_total", queue="machine") == 0
    assert (found.value("process_resident_memory_bytes") or 0) > 1e7
    assert found.value("unbroken_nodes", ready="true") == 2


def after_the_fault(found: Scrape, one: Job, ours: Labels, remedy: str) -> None:
    """Check the metrics of the fault, of the recovery, and of their cost."""
    theirs = {"namespace": "default", "jobName": one.name}
    assert found.value(OPERATOR + "restarted_total", reason="Signal", **theirs) == 1
    assert found.value(OPERATOR + "restart_latency", le="+Inf", **theirs) == 1
    assert found.value(OPERATOR + "fault_detection_latency", le="+Inf", **theirs) == 1
    for stage in ("detect", "stop", "ready", "start", "progress"):
        labels = {"stage": stage, "remedy": remedy}
        assert (found.value("unbroken_recovery_stage_seconds_count", **labels) or 0) >= 1
    assert found.value("unbroken_job_restarts", **ours) == 1
    assert found.value("unbroken_job_incident_open", **ours) == 0
    assert (found.value("unbroken_job_lost_seconds", fault="Signal", **ours) or 0) > 0
    share = found.value("unbroken_job_goodput_ratio", **ours)
    assert share is not None
    assert 0 < share < 1
    training = {"namespace": "default", "job_name": one.name}
    assert found.value("training_fault_count", **training) == 1
    assert found.value("training_fault_type_count", fault_type="Signal", **training) == 1
    assert 0 < (found.value("training_uptime_percentage", **training) or 0) < 100


def the_guide_names_what_is_served(found: Scrape) -> None:
    """Check the tables of the guide: `name` | labels | meaning."""
    rows = re.findall(r"^\| `([a-z_A-Z]+)` \| ([^|]*) \|", REFERENCE.read_text(), re.M)
    told = {
        name: set(re.findall(r"`(\w+)`", labels)) for name, labels in rows if name.startswith(OURS)
    }
    served: dict[str, set[str]] = {}
    for family in found.families:
        if not family.name.startswith(OURS) or family.name.endswith(
            ("_seconds_created", "_steps_created")
        ):
            continue
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = {key for one in family.samples for key in one.labels}
        served[name] = labels - ({"le"} if family.type == "histogram" else set())
        assert family.documentation.strip(), name
    assert told.keys() == served.keys()
    assert {name: told[name] for name, labels in served.items() if labels} == {
        name: labels for name, labels in served.items() if labels
    }
