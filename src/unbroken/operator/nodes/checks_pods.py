"""Pods that test nodes: their specification, and the results in their logs. Pure."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
from lightkube.resources.core_v1 import Node, Pod

from unbroken.core.nodes.checks.plan import RUN, Step
from unbroken.foreign_numbers import finite_number, whole_number
from unbroken.spec.job_kinds import ENDED_PHASES, is_pod_of_a_job
from unbroken.spec.keys import CHECK_LABEL, CHECK_PLANT, CHECK_SECONDS, CHECK_STEP
from unbroken.spec.nodes.instance_types import EFA, GPU
from unbroken.spec.nodes.kinds import CheckKind, CheckResult, Outcome
from unbroken.spec.problems import Report
from unbroken.spec.schema.fields import read_record

Object = dict[str, Any]

NAMESPACE = "unbroken-checks"
DAY_SECONDS = 86_400.0
"""Longest test under load that a check's annotation may ask for."""
MEMORY_SHARE = 0.5
"""Share of the free memory that is tested."""
PORT = 29531
LOCAL_RUNTIME = "unbroken://"
"""Runtime of the nodes of a local cluster, which run this host's programs."""
MESSAGE_MAX = 600
RANKS_MAX = 64
"""Processes of one node in tests of links."""


@dataclass(frozen=True, slots=True)
class CheckerOptions:
    """Options of checks."""

    image: str = ""
    """Image with this project and torch; empty: only nodes of a local cluster can be tested."""
    stress_seconds: float = 60.0
    """Seconds of each test under load, if the check does not set them."""
    dcgm_level: int = 4
    busy_seconds: float = 600.0
    """Seconds that a node which trains is waited for."""
    log_directory: Path | None = None
    """Folder of the documented log files; None: none are written."""
    region: str = ""
    """Region for the log."""
    link_bandwidth: Mapping[str, float] = field(default_factory=dict)
    """GB/s that two nodes must reach by instance type; for other types the limit is learned."""
    node_bandwidth: Mapping[str, float] = field(default_factory=dict)
    """GB/s that the devices of one node must reach by instance type."""
    ranks: int = 2
    """Processes of a node in tests of links, if it has no GPUs."""


def pod_name(check: str, uid: str, step: Step, rank: int) -> str:
    """Return the name of a step's pod; the same from every operator."""
    text = " ".join((uid, step.kind.value, *step.nodes, str(rank)))
    return f"{check[:40]}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"


def step_text(step: Step) -> str:
    """Return the text of the step for the annotation."""
    return " ".join((step.kind.value, *step.nodes))


def step_of(pod: Pod) -> Step | None:
    """Return the step that a pod belongs to; None: it has no valid annotation."""
    kind, *nodes = ((pod.metadata and pod.metadata.annotations) or {}).get(
        CHECK_STEP, ""
    ).split() or [""]
    if kind not in {check_kind.value for check_kind in CheckKind} or not 1 <= len(nodes) <= 2:
        return None
    return Step(tuple(nodes), CheckKind(kind))


def node_of(pod: Pod) -> str:
    """Return the node that a pod runs on."""
    return (pod.spec and pod.spec.nodeName) or ""


def is_local(node: Node) -> bool:
    """True for a node whose programs are those of this host."""
    info = node.status and node.status.nodeInfo
    return bool(info and info.containerRuntimeVersion.startswith(LOCAL_RUNTIME))


def build_pod(
    check: Mapping[str, Any], step: Step, node: Node, options: CheckerOptions, host: str = ""
) -> Object:
    """Return the pod that makes a step's tests on a node; `host` empty: it is the first of a
    pair."""
    metadata = check["metadata"]
    assert node.metadata is not None
    name, annotations = node.metadata.name or "", node.metadata.annotations or {}
    rank = step.nodes.index(name)
    python = sys.executable if is_local(node) else "python3"
    container: Object = {
        "name": "checks",
        "image": options.image or "none",
        "command": [python, "-m", "unbroken.nodes.checks", *_arguments(check, step, node, options)],
        "env": [{"name": "MEET_HOST", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
    }
    if step.is_pair:
        peer = step.nodes[1 - rank]
        meet = f"{host or '$(MEET_HOST)'}:{PORT}"
        container["command"] += ["--rank", str(rank), "--meet", meet, "--peer", peer]
    if annotations.get(CHECK_PLANT):
        container["env"].append({"name": "UNBROKEN_CHECK_PLANT", "value": annotations[CHECK_PLANT]})
    _request_devices(container, node, is_forced=_is_forced(check))
    volumes: Object = {}
    if not is_local(node):
        # NCCL's processes talk through it; the default is 64 MiB.
        container["volumeMounts"] = [{"name": "shm", "mountPath": "/dev/shm"}]
        volumes = {"volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}]}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": pod_name(metadata["name"], metadata["uid"], step, rank),
            "namespace": NAMESPACE,
            "labels": {
                CHECK_LABEL: metadata["name"],
                "app.kubernetes.io/name": "node-check",
                "app.kubernetes.io/managed-by": "unbroken",
            },
            "annotations": {CHECK_STEP: step_text(step)},
            "ownerReferences": [
                {
                    "apiVersion": check["apiVersion"],
                    "kind": check["kind"],
                    "name": metadata["name"],
                    "uid": metadata["uid"],
                }
            ],
        },
        "spec": {
            # It bypasses the scheduler: a node under test takes no other pods.
            "nodeName": name,
            "tolerations": [{"operator": "Exists"}],
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 5,
            "automountServiceAccountToken": False,
            "containers": [container],
            **volumes,
        },
    }


def _request_devices(container: Object, node: Node, *, is_forced: bool) -> None:
    devices = _devices(node)
    if devices and not is_forced:
        container["resources"] = {"limits": devices}
    elif devices.get(GPU):
        # The GPUs of jobs beside it too: the runtime shows them without a request.
        container["env"].append({"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"})


def _arguments(
    check: Mapping[str, Any], step: Step, node: Node, options: CheckerOptions
) -> list[str]:
    assert node.metadata is not None
    given = (check["metadata"].get("annotations") or {}).get(CHECK_SECONDS, "")
    asked = finite_number(given, 0.0, DAY_SECONDS)
    seconds = options.stress_seconds if asked is None else max(0.1, asked)
    arguments = [step.kind.value, "--json", "--node", node.metadata.name or ""]
    arguments += ["--seconds", f"{seconds:g}", "--dcgm-level", str(options.dcgm_level)]
    if is_local(node):
        # They share the memory of one host, and may all be tested at once.
        share = MEMORY_SHARE / max(1, len(check["spec"]["nodes"]))
        arguments += ["--memory-share", f"{share:.4f}"]
    read = {name: whole_number(text) for name, text in _devices(node).items()}
    counts = {name: number for name, number in read.items() if number is not None}
    # Nodes of a local cluster may have GPUs that exist only as a number.
    ranks = min(max(counts.get(GPU, 0), options.ranks), RANKS_MAX)
    arguments += ["--ranks", str(ranks)]
    for flag, name in (("--gpus", GPU), ("--efa", EFA)):
        arguments += [flag, str(counts[name])] if name in counts else []
    return arguments


def gpus_of(node: Node) -> str:
    """Return the number of GPUs that pods can have on a node; empty: none."""
    return _devices(node).get(GPU, "")


def _devices(node: Node) -> dict[str, str]:
    """Return the GPUs and network devices that pods can have on a node."""
    there = (node.status and node.status.allocatable) or {}
    return {name: there[name] for name in (GPU, EFA) if there.get(name, "0") != "0"}


def _is_forced(check: Mapping[str, Any]) -> bool:
    return bool((check.get("spec") or {}).get("isForced"))


def why_busy(node: str, pods: Iterable[Pod], check: str) -> str:
    """Return why a node cannot be tested now; empty: it can."""
    for pod in pods:
        phase = pod.status.phase if pod.status else None
        if node_of(pod) != node or phase in ENDED_PHASES:
            continue
        assert pod.metadata is not None
        labels = pod.metadata.labels or {}
        other = labels.get(CHECK_LABEL)
        if other is not None:
            if other != check:
                return f"check {other} tests it"
            continue
        if is_pod_of_a_job(labels, phase) or _takes_gpus(pod):
            return f"pod {pod.metadata.namespace}/{pod.metadata.name} runs there"
    return ""


def _takes_gpus(pod: Pod) -> bool:
    containers = (pod.spec and pod.spec.containers) or ()
    return any(
        GPU in ((container.resources and container.resources.limits) or {})
        for container in containers
    )


def why_ended(pod: Pod | None) -> str:
    """Return why a pod's tests did not complete; empty: they did."""
    if pod is None or pod.status is None:
        return "its pod was deleted"
    if pod.metadata is not None and pod.metadata.deletionTimestamp is not None:
        return "its pod was deleted"
    if pod.status.phase == "Succeeded":
        return ""
    for status in pod.status.containerStatuses or ():
        ended = status.state.terminated if status.state else None
        if ended is not None:
            signal = f", signal {ended.signal}" if ended.signal else ""
            return f"its pod ended with {ended.exitCode}{signal} ({ended.reason or 'Error'})"
    return f"its pod failed: {pod.status.reason or ''} {pod.status.message or ''}".strip()


def read_results(log: str, node: str) -> list[CheckResult]:
    """Return the results in a pod's log; other lines are left out."""
    check_results = []
    for line in log.splitlines():
        try:
            content = msgspec.json.decode(line)
        except (msgspec.DecodeError, RecursionError):
            continue
        if not isinstance(content, Mapping) or "test" not in content:
            continue
        report = Report()
        record: CheckResult = read_record(CheckResult, content, "result", report)
        if not report.problems:
            check_results.append(replace(record, node=node, message=_line(record.message)))
    return check_results


def _line(text: str) -> str:
    """Return the text of a tool as one line that can be shown and logged."""
    return "".join(one if one.isprintable() else "?" for one in text[:MESSAGE_MAX])


def unmade(node: str, kind: CheckKind, why: str, peer: str = "") -> CheckResult:
    """Return the result for tests that were not made, or not completed, with the reason."""
    return CheckResult(node, kind, RUN, Outcome.UNKNOWN, 0.0, why[:MESSAGE_MAX], peer=peer)


def softened(results: Sequence[CheckResult]) -> list[CheckResult]:
    """Return results of a pair of which one end was lost: failures of the other end do not
    count."""
    return [
        replace(result, outcome=Outcome.UNKNOWN) if result.outcome is Outcome.FAIL else result
        for result in results
    ]
