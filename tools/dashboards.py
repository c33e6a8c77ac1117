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
        f"sum(unbroken_job_incident_open{{{JOB}}})",
        "open",
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
TRAINING_JOB = 'namespace=~"$namespace",job_name=~"$job"'
RECOVERY = (
    Panel("Uptime", f"training_uptime_percentage{{{TRAINING_JOB}}}", "{{job_name}}", "percent"),
    Panel(
        "Downtime by faults",
        f"training_auto_restart_downtime_ms{{{TRAINING_JOB}}}",
        "{{job_name}}",
        "ms",
    ),
    Panel("Faults", f"training_fault_count{{{TRAINING_JOB}}}", "{{job_name}}", kind="stat"),
    Panel(
        "Recoveries, automatic",
        f"training_auto_recovery_count{{{TRAINING_JOB}}}",
        "{{job_name}}",
        kind="stat",
    ),
    Panel(
        "Recoveries, asked for",
        f"training_manual_recovery_count{{{TRAINING_JOB}}}",
        "{{job_name}}",
        kind="stat",
    ),
    Panel(
        "Faults by class",
        f"sum by (fault_type) (training_fault_type_count{{{TRAINING_JOB}}})",
        "{{fault_type}}",
        kind="piechart",
    ),
    Panel(
        "Time lost by class of the fault",
        f"training_fault_recovery_time_ms{{{TRAINING_JOB}}}",
        "{{job_name}}: {{fault_type}}",
        "ms",
        width=12,
    ),
    Panel(
        "Restarts by their length",
        f"sum by (le) (hyperpod_training_operator_jobs_restart_latency{{{DOCUMENTED}}})",
        "up to {{le}} s",
        kind="bargauge",
        width=12,
    ),
    Panel(
        "Faults by the time to their detection",
        f"sum by (le) (hyperpod_training_operator_jobs_fault_detection_latency{{{DOCUMENTED}}})",
        "up to {{le}} s",
        kind="bargauge",
        width=12,
    ),
    Panel(
        "Stages of a recovery, 95th percentile",
        "histogram_quantile(0.95, sum by (stage, le) "
        "(rate(unbroken_recovery_stage_seconds_bucket[$__rate_interval])))",
        "{{stage}}",
        "s",
        width=12,
    ),
)

GPU = 'Hostname=~"$node"'
HARDWARE = (
    Panel("Use of GPUs", f"DCGM_FI_DEV_GPU_UTIL{{{GPU}}}", "{{Hostname}} {{gpu}}", "percent"),
    Panel("Memory of GPUs", f"DCGM_FI_DEV_FB_USED{{{GPU}}}", "{{Hostname}} {{gpu}}", "decmbytes"),
    Panel("Temperature", f"DCGM_FI_DEV_GPU_TEMP{{{GPU}}}", "{{Hostname}} {{gpu}}", "celsius"),
    Panel("Power", f"DCGM_FI_DEV_POWER_USAGE{{{GPU}}}", "{{Hostname}} {{gpu}}", "watt"),
    Panel("Clock", f"DCGM_FI_DEV_SM_CLOCK{{{GPU}}} * 1e6", "{{Hostname}} {{gpu}}", "hertz"),
    Panel(
        "Use of GPUs by pod",
        f'avg by (namespace, pod) (DCGM_FI_DEV_GPU_UTIL{{{GPU},pod!=""}})',
        "{{namespace}}/{{pod}}",
        "percent",
    ),
    Panel("Latest XID", f"DCGM_FI_DEV_XID_ERRORS{{{GPU}}}", "{{Hostname}} {{gpu}}", kind="stat"),
    Panel(
        "Uncorrected memory errors",
        f"DCGM_FI_DEV_ECC_DBE_VOL_TOTAL{{{GPU}}}",
        "{{Hostname}} {{gpu}}",
    ),
    Panel(
        "Faults that were recorded",
        "sum by (node, fault) (unbroken_node_faults_total)",
        "{{node}}: {{fault}}",
        kind="bargauge",
    ),
    Panel(
        "Processors",
        '1 - avg by (instance) (rate(node_cpu_seconds_total{mode="idle"}[$__rate_interval]))',
        "{{instance}}",
        "percentunit",
    ),
    Panel(
        "Memory",
        "1 - node_memory_MemAvailable_bytes / node_memory_MemTotal_bytes",
        "{{instance}}",
        "percentunit",
    ),
    Panel(
        "File systems",
        "1 - node_filesystem_avail_bytes / node_filesystem_size_bytes",
        "{{instance}} {{mountpoint}}",
        "percentunit",
    ),
    Panel(
        "Disks",
        "sum by (instance) (rate(node_disk_read_bytes_total[$__rate_interval]) "
        "+ rate(node_disk_written_bytes_total[$__rate_interval]))",
        "{{instance}}",
        "Bps",
    ),
    Panel(
        "Network",
        "sum by (instance) "
        '(rate(node_network_receive_bytes_total{device!="lo"}[$__rate_interval]))',
        "{{instance}}",
        "Bps",
    ),
    Panel(
        "InfiniBand and EFA",
        "sum by (instance) "
        "(rate(node_infiniband_port_data_received_bytes_total[$__rate_interval])) "
        "or sum by (instance) (rate(node_amazonefa_rx_bytes[$__rate_interval]))",
        "{{instance}}",
        "Bps",
    ),
)

OTHER = 'kind=~"$kind",namespace=~"$namespace",job=~"$job"'
OTHER_JOBS = (
    Panel(
        "Jobs",
        'sum by (kind, state) (unbroken_resumed_jobs{kind=~"$kind"})',
        "{{kind}}: {{state}}",
        kind="stat",
        width=12,
    ),
    Panel(
        "Not running again after a loss",
        f"unbroken_resumed_job_loss_open{{{OTHER}}}",
        "{{kind}} {{namespace}}/{{job}}",
        kind="stat",
        width=12,
    ),
    Panel(
        "Restarts", f"unbroken_resumed_job_restarts{{{OTHER}}}", "{{kind}} {{namespace}}/{{job}}"
    ),
    Panel(
        "Restarts that are left",
        f"unbroken_resumed_job_restarts_max{{{OTHER}}} - unbroken_resumed_job_restarts{{{OTHER}}}",
        "{{kind}} {{namespace}}/{{job}}",
    ),
    Panel(
        "Downtime by losses",
        f"unbroken_resumed_job_lost_seconds{{{OTHER}}}",
        "{{kind}} {{namespace}}/{{job}}",
        "s",
    ),
    Panel(
        "Time until a job ran again, mean",
        "sum by (kind) (unbroken_resumed_job_restart_seconds_sum) "
        "/ sum by (kind) (unbroken_resumed_job_restart_seconds_count)",
        "{{kind}}",
        "s",
        width=12,
    ),
)

_JOBS = {name: f"label_values(unbroken_job_restarts, {name})" for name in ("namespace", "job")}
_OTHERS = {
    name: f"label_values(unbroken_resumed_job_restarts, {name})"
    for name in ("kind", "namespace", "job")
}
_NODES = {"node": "label_values(unbroken_node_gpus_readable, node)"}
DASHBOARDS: Mapping[str, tuple[str, tuple[Panel, ...], Mapping[str, str]]] = {
    "training": ("unbroken: training", TRAINING, _JOBS),
    "recovery": ("unbroken: recovery", RECOVERY, _JOBS),
    "nodes": ("unbroken: nodes and operator", NODES, {}),
    "hardware": ("unbroken: GPUs and systems of nodes", HARDWARE, _NODES),
    "other-jobs": ("unbroken: jobs of other kinds", OTHER_JOBS, _OTHERS),
}
"""Name -> title, panels, and variables with the query of their values."""


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
        "templating": {"list": [_source(), *map(_variable, variables, variables.values())]},
        "panels": _placed(panels),
    }


def _source() -> dict[str, Any]:
    return {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "$source"},
        "query": query,
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
