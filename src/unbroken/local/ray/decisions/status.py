"""The status of a RayCluster, as KubeRay 1.7 writes it (`calculateStatus`).  Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from unbroken.kube.quantity import canonical_quantity
from unbroken.spec.times import time_text

from .pods import requests_of
from .values import WORKER, ClusterPicture, Object, RayPod

INT32_MAX = 2**31 - 1
PROVISIONED, HEAD_READY = "RayClusterProvisioned", "HeadPodReady"
SUSPENDING, SUSPENDED = "RayClusterSuspending", "RayClusterSuspended"
PROVISIONING = "RayClusterPodsProvisioning"


def expected_workers(group: Mapping[str, Any]) -> int:
    """Return the number of pods that a worker group should have."""
    if group.get("suspend"):
        return 0
    least, most = int(group.get("minReplicas") or 0), int(group.get("maxReplicas", INT32_MAX))
    wanted = group.get("replicas")
    replicas = min(max(least if wanted is None else int(wanted), least), most)
    return replicas * max(int(group.get("numOfHosts") or 1), 1)


def status_of(seen: ClusterPicture, now: float) -> Object | None:
    """Return the status to write; None: it is up to date."""
    before = dict(seen.status)
    text = time_text(now)
    state = _state(seen)
    result = {
        **before,
        "observedGeneration": seen.generation,
        **_counts(seen),
        **_resources(seen),
        "conditions": _conditions(seen, text),
        "head": _head(seen),
        "endpoints": _endpoints(seen),
    }
    if state != before.get("state"):
        result["state"] = state
        times = before.get("stateTransitionTimes") or {}
        result["stateTransitionTimes"] = {**times, state: text}
    if result == before:
        return None
    return {**result, "lastUpdateTime": text}


def _state(seen: ClusterPicture) -> str | None:
    """Return the state: KubeRay never takes `ready` back but for a suspension."""
    if seen.spec.get("suspend") and not seen.pods:
        return "suspended"
    return "ready" if _all_ready(seen) else seen.status.get("state")


def _all_ready(seen: ClusterPicture) -> bool:
    """True if all pods that there should be exist and are ready."""
    groups = seen.spec.get("workerGroupSpecs") or ()
    if len(seen.pods) != sum(map(expected_workers, groups)) + 1:
        return False
    return all(pod.phase == "Running" and pod.is_ready for pod in seen.pods)


def _counts(seen: ClusterPicture) -> Object:
    groups = seen.spec.get("workerGroupSpecs") or ()
    workers = [pod for pod in seen.pods if pod.node_type == WORKER]
    awake = [group for group in groups if not group.get("suspend")]
    hosts = [max(int(group.get("numOfHosts") or 1), 1) for group in awake]
    least = [int(group.get("minReplicas") or 0) for group in awake]
    most = [int(group.get("maxReplicas", INT32_MAX)) for group in awake]
    return {
        "desiredWorkerReplicas": sum(map(expected_workers, groups)),
        "minWorkerReplicas": sum(a * b for a, b in zip(least, hosts, strict=True)),
        "maxWorkerReplicas": min(sum(a * b for a, b in zip(most, hosts, strict=True)), INT32_MAX),
        "availableWorkerReplicas": sum(pod.phase == "Running" for pod in workers),
        "readyWorkerReplicas": sum(pod.phase == "Running" and pod.is_ready for pod in workers),
    }


def _resources(seen: ClusterPicture) -> Object:
    """Return what head and workers request together."""
    total: dict[str, Decimal] = dict(requests_of(seen.spec["headGroupSpec"]["template"]))
    for group in seen.spec.get("workerGroupSpecs") or ():
        for name, amount in requests_of(group["template"]).items():
            total[name] = total.get(name, Decimal(0)) + amount * expected_workers(group)
    gpus = sum((amount for name, amount in total.items() if name.endswith("gpu")), Decimal(0))
    return {
        "desiredCPU": _amount(total.get("cpu")),
        "desiredMemory": _memory(total.get("memory")),
        "desiredGPU": _amount(gpus),
        "desiredTPU": _amount(total.get("google.com/tpu")),
    }


def _amount(amount: Decimal | None) -> str:
    return canonical_quantity(format(amount or 0, "f"))


def _memory(amount: Decimal | None) -> str:
    """Return bytes in the largest unit of 1024 that divides them."""
    kibi, rest = divmod(int(amount or 0), 1024)
    return _amount(amount) if rest else canonical_quantity(f"{kibi}Ki")


def _head(seen: ClusterPicture) -> Object:
    head, service = seen.head, seen.service
    if head is None and service is None:
        return {}
    result: Object = {}
    if head is not None:
        result = {"podName": head.name, "podIP": head.address, "serviceIP": head.address}
    if service is not None:
        result["serviceName"] = service["metadata"]["name"]
    return {key: value for key, value in result.items() if value}


def _endpoints(seen: ClusterPicture) -> Object:
    if seen.service is None:
        return {}
    return {item["name"]: str(item["targetPort"]) for item in seen.service["spec"]["ports"]}


def _conditions(seen: ClusterPicture, now: str) -> list[Object]:
    known = {item["type"]: item for item in seen.status.get("conditions") or ()}
    for type, value, reason, message in _wanted(seen, known):
        old = known.get(type, {})
        since = old["lastTransitionTime"] if old.get("status") == value else now
        known[type] = {
            **{"type": type, "status": value, "reason": reason, "message": message},
            "lastTransitionTime": since,
        }
    return list(known.values())


def _wanted(
    seen: ClusterPicture, known: Mapping[str, Object]
) -> Iterator[tuple[str, str, str, str]]:
    """Yield type, status, reason and message of each condition that is to be set."""
    yield HEAD_READY, *_head_ready(seen.head)
    suspends = bool(seen.spec.get("suspend"))
    is_suspended = suspends and not seen.pods
    if is_suspended:
        yield PROVISIONED, "False", PROVISIONING, "RayCluster has been suspended"
    elif known.get(PROVISIONED, {}).get("status") != "True":
        if _all_ready(seen):
            reason, text = (
                "AllPodRunningAndReadyFirstTime",
                "All Ray Pods are ready for the first time",
            )
            yield PROVISIONED, "True", reason, text
        else:
            text = "RayCluster Pods are being provisioned for first time"
            yield PROVISIONED, "False", PROVISIONING, text
    asked = "spec.suspend is true" if suspends else "spec.suspend is not true"
    yield SUSPENDED, str(is_suspended), SUSPENDED, asked
    yield SUSPENDING, str(suspends and not is_suspended), SUSPENDING, asked


def _head_ready(head: RayPod | None) -> tuple[str, str, str]:
    if head is None:
        return "False", "HeadPodNotFound", "Head Pod not found"
    reason, message = head.why_not_ready
    if head.is_ready:
        return "True", "HeadPodRunningAndReady", "Head Pod ready"
    return "False", reason or "Unknown", message or "The head Pod has not started"
