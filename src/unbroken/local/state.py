"""The state in a cluster's directory: its files, its options, the process that runs it.

It is separate from `up`, so that commands which only look need not load a cluster.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from unbroken.errors import WorldError
from unbroken.spec.auto_resume import DEFAULT_RETRIES
from unbroken.spec.notifications import NotificationForm

BEATS_MAX = 25
"""Heartbeats of all nodes together that one machine takes each second; each is a write to disk."""


class ClusterOptions(msgspec.Struct, frozen=True):
    """A person's options for a cluster; kept in DIR/cluster.json for the next `up`."""

    nodes: int = 1
    cpu: str = ""
    """Per node, as a Kubernetes quantity; empty: what the machine has."""
    memory: str = ""
    """Per node, as a Kubernetes quantity; empty: what the machine has."""
    gpus: int = 0
    """Per node, as nvidia.com/gpu."""
    instance_type: str = ""
    """Instance type of nodes without another one; empty: the host's own resources."""
    resources: dict[str, str] = {}
    """Per node, further resources by name, as Kubernetes quantities; nothing stands behind them."""
    labels: dict[str, str] = {}
    port: int = 0
    operator: bool = True
    """Run the operator too; False: somebody runs it as a process of its own."""
    pytorchjobs: bool = True
    """Run Kubeflow's PyTorchJobs too; False: their own operator does, or none."""
    ray: bool = True
    """Run RayClusters and RayJobs too; False: KubeRay's own operator does, or none."""
    resume_retries: int = DEFAULT_RETRIES
    """Restarts of a job of another kind without annotations of its user; 0: none."""
    images: dict[str, str] = {}
    """Python environments (directories) by the name of the image that each replaces."""
    heartbeat_seconds: float = 1.0
    """Seconds between heartbeats of each node."""
    grace_seconds: float = 4.0
    """Seconds of silence after which a node is not ready.

    It is far below Kubernetes' 40 s: nodes, API server and controllers share one event loop. Only a
    pause of that loop could delay a heartbeat, and that is distinguished from silence
    (controllers/node_lifecycle).
    """

    node_recovery: str = "Automatic"
    """Automatic or None: the operator's treatment of bad nodes whose cluster does not set it."""
    node_provider: str = "machines"
    """Provider that resets, reboots and replaces nodes (operator/nodes/providers)."""
    node_command: str = ""
    """Command of the provider `command`."""
    repair_share: float = 0.2
    """Share of all nodes that may be under repair at once."""
    repair_dry_run: bool = False
    lifecycle_sources: dict[str, str] = {}
    """Addresses of lifecycle scripts (`s3://bucket/prefix`) and directories that replace them."""

    cluster_api_port: int = 0
    """Port of the cluster API on the loopback address; 0: any."""
    cluster_api_credentials: str = ""
    """File of the keys that may call it; empty: DIR/cluster-api-credentials, which `up` makes."""
    metrics_port: int = 0
    """Port of the metrics for Prometheus, on the loopback address; 0: any."""
    ui_port: int = 0
    """Port of the live page on the loopback address; 0: that of the last time if it is free."""
    prometheus: str = ""
    """Address of the Prometheus whose data the live page's dashboards show; empty: none."""
    notify_file: str = ""
    """File with the address of the webhook of notifications; empty: there is none."""
    notify_form: str = NotificationForm.JSON.value
    checkpoint_memory: int = 0
    """Percentage of each node's memory for tiered checkpoints; 0: the nodes have no such server."""

    def for_nodes(self) -> tuple[float, float]:
        """Heartbeat and grace; longer where many nodes would keep one machine busy with them."""
        factor = max(1.0, self.nodes * self.heartbeat_seconds / BEATS_MAX)
        return self.heartbeat_seconds * factor, self.grace_seconds * factor


class State(msgspec.Struct, frozen=True):
    """The `up` process of a directory, as DIR/up.json records it."""

    pid: int
    started: int
    """Start time of the process in clock ticks since boot (/proc/PID/stat): pid and start time
    together name a process for good."""
    url: str
    kubeconfig: str
    since: float
    """Seconds since the epoch."""
    cluster_api: str = ""
    """Address of the cluster API, as `--endpoint-url` of the aws CLI takes it."""
    metrics: str = ""
    """Address of the metrics for Prometheus; empty: written by an earlier version."""
    cluster_api_credentials: str = ""
    """File of the keys that may call the cluster API; empty: of an earlier version."""
    ui: str = ""
    """Address of the live page; empty: not served, or written by an earlier version."""


@dataclass(frozen=True, slots=True)
class Paths:
    """Files of one cluster directory."""

    directory: Path
    state: Path = field(init=False)
    options: Path = field(init=False)
    lock: Path = field(init=False)
    log: Path = field(init=False)
    nodes: Path = field(init=False)
    logs: Path = field(init=False)
    kubeconfig: Path = field(init=False)
    cluster_api_credentials: Path = field(init=False)
    operator_key: Path = field(init=False)
    """The master key of the operator (operator/key)."""
    ui: Path = field(init=False)
    """Key and port of the live page."""
    ui_history: Path = field(init=False)
    """Steps and metrics of jobs over time, for the live page."""
    ui_link: Path = field(init=False)
    """File that takes a browser of this machine to the live page."""

    def __post_init__(self) -> None:
        for name, file in (
            ("state", "up.json"),
            ("options", "cluster.json"),
            ("lock", "up.lock"),
            ("log", "up.log"),
            ("nodes", "nodes"),
            ("logs", "logs"),
            ("kubeconfig", "kubeconfig"),
            ("cluster_api_credentials", "cluster-api-credentials"),
            ("operator_key", "operator.key"),
            ("ui", "ui.json"),
            ("ui_history", "ui-history.sqlite"),
            ("ui_link", "ui.html"),
        ):
            object.__setattr__(self, name, self.directory / file)


def process_started(pid: int) -> int | None:
    """Start time of a live process in clock ticks since boot; None when there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def running(paths: Paths) -> State | None:
    """The cluster that runs from the directory; None when there is none."""
    try:
        state = msgspec.json.decode(paths.state.read_bytes(), type=State)
    except (OSError, msgspec.MsgspecError):
        return None
    return state if process_started(state.pid) == state.started else None


def is_up(paths: Paths) -> bool:
    """True while a process of `unbroken up` starts, runs or stops the directory's cluster."""
    try:
        pid, started = map(int, paths.lock.read_text().split())
    except (OSError, ValueError):
        return False
    return process_started(pid) == started


def saved_options(paths: Paths) -> ClusterOptions:
    """Return the options of the last `up`; the defaults for a new directory."""
    try:
        return msgspec.json.decode(paths.options.read_bytes(), type=ClusterOptions)
    except FileNotFoundError:
        return ClusterOptions()
    except (OSError, msgspec.MsgspecError) as error:
        raise WorldError(f"cannot read {paths.options}: {error}; remove it to start over") from None
