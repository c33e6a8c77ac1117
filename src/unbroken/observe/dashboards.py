"""The dashboards: their panels, and the queries of them.

`tools/dashboards.py` writes them as files for Grafana; the live page draws the same panels
(`cli/page/dashboards`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class PanelKind(Enum):
    """How a panel shows its series, by Grafana's name of it."""

    TIME_SERIES = "timeseries"
    STAT = "stat"
    """Newest values as figures."""
    BAR_GAUGE = "bargauge"
    """Newest values as bars."""
    PIE_CHART = "piechart"
    """Newest values as shares of their sum."""


class Unit(Enum):
    """Units of values, by Grafana's identifiers."""

    SHORT = "short"
    SHARE = "percentunit"
    """From 0 to 1."""
    PERCENT = "percent"
    """From 0 to 100."""
    SECONDS = "s"
    MILLISECONDS = "ms"
    BYTES_PER_SECOND = "Bps"
    MEGABYTES = "decmbytes"
    CELSIUS = "celsius"
    WATT = "watt"
    HERTZ = "hertz"


JOB = 'namespace=~"$namespace",job=~"$job"'
DOCUMENTED = 'namespace=~"$namespace",jobName=~"$job"'


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel."""

    title: str
    expr: str
    """Query of Prometheus, with variables of the dashboard (`$job`) and Grafana's `$__range` and
    `$__rate_interval`."""
    legend: str = ""
    """Name of a series, with its labels in double braces."""
    unit: Unit = Unit.SHORT
    kind: PanelKind = PanelKind.TIME_SERIES
    width: int = 8
    """Columns of 24."""


@dataclass(frozen=True, slots=True)
class Dashboard:
    """Panels that are shown together."""

    title: str
    panels: tuple[Panel, ...]
    variables: Mapping[str, str]
    """Name of a variable -> query of its values."""


TRAINING = (
    Panel("Jobs", "sum by (state) (unbroken_jobs)", "{{state}}", kind=PanelKind.STAT, width=12),
    Panel(
        "Goodput",
        f"unbroken_job_goodput_ratio{{{JOB}}}",
        "{{namespace}}/{{job}}",
        Unit.SHARE,
        width=12,
    ),
    Panel(
        "Restarts by reason",
        "round(sum by (reason) (increase("
        f"hyperpod_training_operator_jobs_restarted_total{{{DOCUMENTED}}}[$__range])))",
        "{{reason}}",
        kind=PanelKind.PIE_CHART,
    ),
    Panel(
        "Incidents by fault and remedy",
        "round(sum by (fault, remedy) "
        f"(increase(unbroken_job_incidents_total{{{JOB}}}[$__range])))",
        "{{fault}}: {{remedy}}",
        kind=PanelKind.BAR_GAUGE,
    ),
    Panel(
        "Open incidents",
        f"sum(unbroken_job_incident_open{{{JOB}}})",
        "open",
        kind=PanelKind.STAT,
    ),
    Panel(
        "Recovery by stage, median",
        "histogram_quantile(0.5, sum by (stage, le) "
        "(rate(unbroken_recovery_stage_seconds_bucket[$__rate_interval])))",
        "{{stage}}",
        Unit.SECONDS,
    ),
    Panel(
        "Time lost to an incident, 95th percentile",
        "histogram_quantile(0.95, sum by (remedy, le) "
        "(rate(unbroken_incident_lost_seconds_bucket[$__rate_interval])))",
        "{{remedy}}",
        Unit.SECONDS,
    ),
    Panel("Active time", f"unbroken_job_time_seconds{{{JOB}}}", "{{job}}: {{part}}", Unit.SECONDS),
    Panel(
        "Agents out of reach",
        f"unbroken_job_agents_wanted{{{JOB}}} - unbroken_job_agents_connected{{{JOB}}}",
        "{{namespace}}/{{job}}",
        width=12,
    ),
    Panel("Repeated steps", f"unbroken_job_lost_steps{{{JOB}}}", "{{namespace}}/{{job}}", width=12),
)

NODES = (
    Panel("Nodes", "sum by (ready) (unbroken_nodes)", "ready: {{ready}}", kind=PanelKind.STAT),
    Panel("In quarantine", "unbroken_nodes_quarantined", "nodes", kind=PanelKind.STAT),
    Panel("Operators that lead", "sum(unbroken_operator_leading)", "leading", kind=PanelKind.STAT),
    Panel(
        "Health",
        '{__name__=~"hyperpod_node_health_status_.+"}',
        "{{__name__}} {{cluster_name}}/{{instance_group}}",
        width=12,
    ),
    Panel(
        "Repairs under way",
        # A repair may be shorter than the distance of two points.
        "sum by (action, state) (max_over_time(unbroken_node_repairs_under_way[$__rate_interval]))",
        "{{action}}: {{state}}",
        width=12,
    ),
    Panel(
        "Repairs that have ended",
        "round(sum by (action, outcome) (increase(unbroken_node_repairs_total[$__range])))",
        "{{action}}: {{outcome}}",
        kind=PanelKind.BAR_GAUGE,
    ),
    Panel(
        "Length of repairs, median",
        "histogram_quantile(0.5, sum by (action, stage, le) "
        "(rate(unbroken_node_repair_seconds_bucket[$__rate_interval])))",
        "{{action}}: {{stage}}",
        Unit.SECONDS,
    ),
    Panel(
        "Checks that have ended",
        "round(sum by (kinds, phase) (increase(unbroken_node_checks_total[$__range])))",
        "{{kinds}}: {{phase}}",
        kind=PanelKind.BAR_GAUGE,
    ),
    Panel(
        "Silence of the API server",
        "max by (resource) (unbroken_watch_silence_seconds)",
        "{{resource}}",
        Unit.SECONDS,
        width=12,
    ),
    Panel("Keys that wait", "unbroken_queue_waiting", "{{queue}}", width=12),
)
TRAINING_JOB = 'namespace=~"$namespace",job_name=~"$job"'
RECOVERY = (
    Panel("Uptime", f"training_uptime_percentage{{{TRAINING_JOB}}}", "{{job_name}}", Unit.PERCENT),
    Panel(
        "Downtime by faults",
        f"training_auto_restart_downtime_ms{{{TRAINING_JOB}}}",
        "{{job_name}}",
        Unit.MILLISECONDS,
    ),
    Panel("Faults", f"training_fault_count{{{TRAINING_JOB}}}", "{{job_name}}", kind=PanelKind.STAT),
    Panel(
        "Recoveries, automatic",
        f"training_auto_recovery_count{{{TRAINING_JOB}}}",
        "{{job_name}}",
        kind=PanelKind.STAT,
    ),
    Panel(
        "Recoveries, asked for",
        f"training_manual_recovery_count{{{TRAINING_JOB}}}",
        "{{job_name}}",
        kind=PanelKind.STAT,
    ),
    Panel(
        "Faults by class",
        f"sum by (fault_type) (training_fault_type_count{{{TRAINING_JOB}}})",
        "{{fault_type}}",
        kind=PanelKind.PIE_CHART,
    ),
    Panel(
        "Time lost by class of the fault",
        f"training_fault_recovery_time_ms{{{TRAINING_JOB}}}",
        "{{job_name}}: {{fault_type}}",
        Unit.MILLISECONDS,
        width=12,
    ),
    Panel(
        "Restarts by their length",
        f"sum by (le) (hyperpod_training_operator_jobs_restart_latency{{{DOCUMENTED}}})",
        "up to {{le}} s",
        kind=PanelKind.BAR_GAUGE,
        width=12,
    ),
    Panel(
        "Faults by the time to their detection",
        f"sum by (le) (hyperpod_training_operator_jobs_fault_detection_latency{{{DOCUMENTED}}})",
        "up to {{le}} s",
        kind=PanelKind.BAR_GAUGE,
        width=12,
    ),
    Panel(
        "Stages of a recovery, 95th percentile",
        "histogram_quantile(0.95, sum by (stage, le) "
        "(rate(unbroken_recovery_stage_seconds_bucket[$__rate_interval])))",
        "{{stage}}",
        Unit.SECONDS,
        width=12,
    ),
)

GPU = 'Hostname=~"$node"'
HARDWARE = (
    Panel("Use of GPUs", f"DCGM_FI_DEV_GPU_UTIL{{{GPU}}}", "{{Hostname}} {{gpu}}", Unit.PERCENT),
    Panel(
        "Memory of GPUs", f"DCGM_FI_DEV_FB_USED{{{GPU}}}", "{{Hostname}} {{gpu}}", Unit.MEGABYTES
    ),
    Panel("Temperature", f"DCGM_FI_DEV_GPU_TEMP{{{GPU}}}", "{{Hostname}} {{gpu}}", Unit.CELSIUS),
    Panel("Power", f"DCGM_FI_DEV_POWER_USAGE{{{GPU}}}", "{{Hostname}} {{gpu}}", Unit.WATT),
    Panel("Clock", f"DCGM_FI_DEV_SM_CLOCK{{{GPU}}} * 1e6", "{{Hostname}} {{gpu}}", Unit.HERTZ),
    Panel(
        "Use of GPUs by pod",
        f'avg by (namespace, pod) (DCGM_FI_DEV_GPU_UTIL{{{GPU},pod!=""}})',
        "{{namespace}}/{{pod}}",
        Unit.PERCENT,
    ),
    Panel(
        "Latest XID",
        f"DCGM_FI_DEV_XID_ERRORS{{{GPU}}}",
        "{{Hostname}} {{gpu}}",
        kind=PanelKind.STAT,
    ),
    Panel(
        "Uncorrected memory errors",
        f"DCGM_FI_DEV_ECC_DBE_VOL_TOTAL{{{GPU}}}",
        "{{Hostname}} {{gpu}}",
    ),
    Panel(
        "Faults that were recorded",
        "sum by (node, fault) (unbroken_node_faults_total)",
        "{{node}}: {{fault}}",
        kind=PanelKind.BAR_GAUGE,
    ),
    Panel(
        "Processors",
        '1 - avg by (instance) (rate(node_cpu_seconds_total{mode="idle"}[$__rate_interval]))',
        "{{instance}}",
        Unit.SHARE,
    ),
    Panel(
        "Memory",
        "1 - node_memory_MemAvailable_bytes / node_memory_MemTotal_bytes",
        "{{instance}}",
        Unit.SHARE,
    ),
    Panel(
        "File systems",
        "1 - node_filesystem_avail_bytes / node_filesystem_size_bytes",
        "{{instance}} {{mountpoint}}",
        Unit.SHARE,
    ),
    Panel(
        "Disks",
        "sum by (instance) (rate(node_disk_read_bytes_total[$__rate_interval]) "
        "+ rate(node_disk_written_bytes_total[$__rate_interval]))",
        "{{instance}}",
        Unit.BYTES_PER_SECOND,
    ),
    Panel(
        "Network",
        "sum by (instance) "
        '(rate(node_network_receive_bytes_total{device!="lo"}[$__rate_interval]))',
        "{{instance}}",
        Unit.BYTES_PER_SECOND,
    ),
    Panel(
        "InfiniBand and EFA",
        "sum by (instance) "
        "(rate(node_infiniband_port_data_received_bytes_total[$__rate_interval])) "
        "or sum by (instance) (rate(node_amazonefa_rx_bytes[$__rate_interval]))",
        "{{instance}}",
        Unit.BYTES_PER_SECOND,
    ),
)

OTHER = 'kind=~"$kind",namespace=~"$namespace",job=~"$job"'
OTHER_JOBS = (
    Panel(
        "Jobs",
        'sum by (kind, state) (unbroken_resumed_jobs{kind=~"$kind"})',
        "{{kind}}: {{state}}",
        kind=PanelKind.STAT,
        width=12,
    ),
    Panel(
        "Not running again after a loss",
        f"unbroken_resumed_job_loss_open{{{OTHER}}}",
        "{{kind}} {{namespace}}/{{job}}",
        kind=PanelKind.STAT,
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
        Unit.SECONDS,
    ),
    Panel(
        "Time until a job ran again, mean",
        "sum by (kind) (unbroken_resumed_job_restart_seconds_sum) "
        "/ sum by (kind) (unbroken_resumed_job_restart_seconds_count)",
        "{{kind}}",
        Unit.SECONDS,
        width=12,
    ),
)

_JOBS = {name: f"label_values(unbroken_job_restarts, {name})" for name in ("namespace", "job")}
_OTHERS = {
    name: f"label_values(unbroken_resumed_job_restarts, {name})"
    for name in ("kind", "namespace", "job")
}
_NODES = {"node": "label_values(unbroken_node_gpus_readable, node)"}
DASHBOARDS: Mapping[str, Dashboard] = {
    "training": Dashboard("training", TRAINING, _JOBS),
    "recovery": Dashboard("recovery", RECOVERY, _JOBS),
    "nodes": Dashboard("nodes and operator", NODES, {}),
    "hardware": Dashboard("GPUs and systems of nodes", HARDWARE, _NODES),
    "other-jobs": Dashboard("jobs of other kinds", OTHER_JOBS, _OTHERS),
}
