"""Write the chart's Grafana dashboards: `python tools/dashboards.py`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "deploy/helm/unbroken/files/dashboards"
SCHEMA = 39
"""Schema version of Grafana 10.4; later versions migrate it when they load it."""
WIDTH, HEIGHT = 24, 7
JOB = 'namespace=~"$namespace",job=~"$job"'
DOCUMENTED = 'namespace=~"$namespace",jobName=~"$job"'


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel: its title, expressions and unit."""

    title: str
    expr: str
    legend: str = ""
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 8


TRAINING = (
    Panel("Jobs", "sum by (state) (unbroken_jobs)", "{{state}}", kind="stat", width=12),
    Panel(
        "Goodput",
        f"unbroken_job_goodput_ratio{{{JOB}}}",
        "{{namespace}}/{{job}}",
        "percentunit",
        width=12,
    ),
    Panel(
        "Restarts by reason",
        "sum by (reason) (increase("
        f"hyperpod_training_operator_jobs_restarted_total{{{DOCUMENTED}}}[$__range]))",
        "{{reason}}",
        kind="piechart",
    ),
    Panel(
        "Incidents by fault and remedy",
        f"sum by (fault, remedy) (increase(unbroken_job_incidents_total{{{JOB}}}[$__range]))",
        "{{fault}}: {{remedy}}",
        kind="bargauge",
    ),
    Panel(
        "Open incidents",
        f"unbroken_job_incident_open{{{JOB}}} == 1",
        "{{namespace}}/{{job}}",
        kind="stat",
    ),
    Panel(
        "Recovery by stage, median",
        "histogram_quantile(0.5, sum by (stage, le) "
        "(rate(unbroken_recovery_stage_seconds_bucket[$__rate_interval])))",
        "{{stage}}",
        "s",
    ),
    Panel(
        "Time lost to an incident, 95th percentile",
        "histogram_quantile(0.95, sum by (remedy, le) "
        "(rate(unbroken_incident_lost_seconds_bucket[$__rate_interval])))",
        "{{remedy}}",
        "s",
    ),
    Panel("Active time", f"unbroken_job_time_seconds{{{JOB}}}", "{{job}}: {{part}}", "s"),
    Panel(
        "Agents out of reach",
        f"unbroken_job_agents_wanted{{{JOB}}} - unbroken_job_agents_connected{{{JOB}}}",
        "{{namespace}}/{{job}}",
        width=12,
    ),
    Panel("Repeated steps", f"unbroken_job_lost_steps{{{JOB}}}", "{{namespace}}/{{job}}", width=12),
)

NODES = (
    Panel("Nodes", "sum by (ready) (unbroken_nodes)", "ready: {{ready}}", kind="stat"),
    Panel("In quarantine", "unbroken_nodes_quarantined", "nodes", kind="stat"),
    Panel("Operators that lead", "sum(unbroken_operator_leading)", "leading", kind="stat"),
    Panel(
        "Health",
        '{__name__=~"hyperpod_node_health_status_.+"}',
        "{{__name__}} {{cluster_name}}/{{instance_group}}",
        width=12,
    ),
    Panel(
        "Repairs under way",
        "sum by (action, state) (unbroken_node_repairs_under_way)",
        "{{action}}: {{state}}",
        width=12,
    ),
    Panel(
        "Repairs that have ended",
        "sum by (action, outcome) (increase(unbroken_node_repairs_total[$__range]))",
        "{{action}}: {{outcome}}",
        kind="bargauge",
    ),
    Panel(
        "Length of repairs, median",
        "histogram_quantile(0.5, sum by (action, stage, le) "
        "(rate(unbroken_node_repair_seconds_bucket[$__rate_interval])))",
        "{{action}}: {{stage}}",
        "s",
    ),
    Panel(
        "Checks that have ended",
        "sum by (kinds, phase) (increase(unbroken_node_checks_total[$__range]))",
        "{{kinds}}: {{phase}}",
        kind="bargauge",
    ),
    Panel(
        "Silence of the API server",
        "max by (resource) (unbroken_watch_silence_seconds)",
        "{{resource}}",
        "s",
        width=12,
    ),
    Panel("Keys that wait", "unbroken_queue_waiting", "{{queue}}", width=12),
)
DASHBOARDS: Mapping[str, tuple[str, tuple[Panel, ...], tuple[str, ...]]] = {
    "training": ("unbroken: training", TRAINING, ("namespace", "job")),
    "nodes": ("unbroken: nodes and operator", NODES, ()),
}


def dashboard(name: str) -> dict[str, Any]:
    """Return a dashboard as Grafana imports it."""
    title, panels, variables = DASHBOARDS[name]
    return {
        "uid": f"unbroken-{name}",
        "title": title,
        "tags": ["unbroken"],
        "schemaVersion": SCHEMA,
        "refresh": "30s",
        "time": {"from": "now-24h", "to": "now"},
        "templating": {"list": [_source(), *(_variable(one) for one in variables)]},
        "panels": _placed(panels),
    }


def _source() -> dict[str, Any]:
    return {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _variable(name: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "$source"},
        "query": f"label_values(unbroken_job_restarts, {name})",
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _placed(panels: Sequence[Panel]) -> list[dict[str, Any]]:
    """Place panels in rows, side by side while there is room."""
    placed, x, y = [], 0, 0
    for number, one in enumerate(panels, 1):
        if x + one.width > WIDTH:
            x, y = 0, y + HEIGHT
        place = {"x": x, "y": y, "w": one.width, "h": HEIGHT}
        placed.append(
            {
                "id": number,
                "type": one.kind,
                "title": one.title,
                "datasource": {"type": "prometheus", "uid": "$source"},
                "gridPos": place,
                "fieldConfig": {"defaults": {"unit": one.unit, "min": 0}, "overrides": []},
                "targets": [{"refId": "A", "expr": one.expr, "legendFormat": one.legend}],
            }
        )
        x += one.width
    return placed


def files() -> Mapping[Path, str]:
    """Return the content of each file in the folder."""
    return {
        FOLDER / f"{name}.json": json.dumps(dashboard(name), indent=1) + "\n" for name in DASHBOARDS
    }


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path, text in files().items():
        path.write_text(text)
        print(path.relative_to(ROOT))
