"""Runs a RayCluster: which pods should exist, as KubeRay 1.7 does it (`reconcilePods`).  Pure.

Everything is derived from what exists; nothing is remembered. Two things differ. Workers are made
when the head is ready, and replaced when the head is another one: their only way to the head is its
address.

Its status is as KubeRay 1.7 writes it (`calculateStatus`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Any

from unbroken.kube.quantity import canonical_quantity
from unbroken.spec.times import time_text

from .pods import (
    HEAD_GROUP,
    gcs_port,
    head_body,
    pod_name,
    requests_of,
    service_body,
    service_name,
    worker_body,
)
from .values import (
    WORKER,
    ClusterPicture,
    Create,
    DeletePod,
    Object,
    Order,
    Plan,
    RayPod,
    RecordClusterEvent,
    is_autoscaled,
)

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
        "head": _head_of(seen),
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


def _head_of(seen: ClusterPicture) -> Object:
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


ENDED = ("Failed", "Succeeded")


def plan(seen: ClusterPicture, now: float, ports: Iterable[int]) -> Plan:
    """Decide what to do about a RayCluster.

    `ports`: free ports, of which the service and each new pod take one.  Pods for which no port is
    left are made at the next look.
    """
    if seen.is_leaving:
        return Plan()
    orders = tuple(_orders(seen, iter(ports)))
    return Plan(orders, status_of(seen, now))


def _orders(seen: ClusterPicture, ports: Iterator[int]) -> list[Order]:
    if seen.spec.get("suspend"):
        message = f"Deleted Pods for RayCluster {seen.namespace}/{seen.name} due to suspension"
        return [
            _delete(pod, RecordClusterEvent("DeletedPod", message))
            for pod in seen.pods
            if not pod.is_leaving
        ]
    if seen.service is None:
        name = service_name(seen.name)
        tell = RecordClusterEvent("CreatedService", f"Created service {seen.namespace}/{name}")
        body = service_body(seen, next(ports))
        return [Create("services", body, tell, "FailedToCreateService")]
    orders = _head(seen, gcs_port(seen.service), ports)
    for group in seen.spec.get("workerGroupSpecs") or ():
        orders += _workers(seen, group, ports)
    return orders


def _head(seen: ClusterPicture, port: int, ports: Iterator[int]) -> list[Order]:
    head = seen.head
    if head is None:
        place = f"{seen.namespace}/{pod_name(seen, HEAD_GROUP, 0)}"
        tell = RecordClusterEvent("CreatedHeadPod", f"Created head Pod {place}")
        body = head_body(seen, port, next(ports), next(ports))
        return [Create("pods", body, tell, "FailedToCreateHeadPod")]
    if _is_over(head) and not head.is_leaving:
        return [_delete(head, RecordClusterEvent("DeletedHeadPod", _end(seen, head, "head Pod")))]
    return []


def _workers(seen: ClusterPicture, group: Mapping[str, Any], ports: Iterator[int]) -> list[Order]:
    name, head = str(group["groupName"]), seen.head
    pods = seen.workers(name)
    if group.get("suspend"):
        place = f"{seen.namespace}/{seen.name}"
        text = f"Deleted all pods for suspended worker group {name} in RayCluster {place}"
        return [
            _delete(pod, RecordClusterEvent("DeletedWorkerPod", text))
            for pod in pods
            if not pod.is_leaving
        ]
    gone = [pod for pod in pods if not pod.is_leaving and _is_lost(pod, head)]
    if gone:
        return [
            _delete(pod, RecordClusterEvent("DeletedWorkerPod", _end(seen, pod, "worker Pod")))
            for pod in gone
        ]
    marked = set((group.get("scaleStrategy") or {}).get("workersToDelete") or ())
    kept = [pod for pod in pods if pod.name not in marked]
    wanted = expected_workers(group)
    # The autoscaler lets a name stay marked after its pod is gone.
    count = wanted + len(pods) + len(marked)
    slots = {pod_name(seen, name, slot): slot for slot in range(count)}
    # Pods that leave are no longer counted when it is decided who is one too many.
    staying = [pod for pod in kept if not pod.is_leaving]
    # The last slots go first.
    staying.sort(key=lambda pod: slots.get(pod.name, len(slots)))
    gone = [pod for pod in pods if pod.name in marked and not pod.is_leaving]
    if not is_autoscaled(seen.spec):
        gone += staying[wanted:]
    orders: list[Order] = [
        _delete(
            pod, RecordClusterEvent("DeletedWorkerPod", f"Deleted Pod {seen.namespace}/{pod.name}")
        )
        for pod in gone
    ]
    if head is not None and head.is_ready and not head.is_leaving:
        taken = marked | {pod.name for pod in pods}
        free = [(pod, slot) for pod, slot in slots.items() if pod not in taken]
        for (pod, slot), port in zip(free[: max(wanted - len(kept), 0)], ports, strict=False):
            tell = RecordClusterEvent(
                "CreatedWorkerPod", f"Created worker Pod {seen.namespace}/{pod}"
            )
            body = worker_body(seen, group, slot, port)
            orders.append(Create("pods", body, tell, "FailedToCreateWorkerPod"))
    return orders


def _is_over(pod: RayPod) -> bool:
    """True if Ray in the pod has ended and the node does not start it again (`shouldDeletePod`)."""
    return pod.phase in ENDED or (pod.exit_code is not None and pod.restart_policy == "Never")


def _is_lost(pod: RayPod, head: RayPod | None) -> bool:
    """True if a worker has ended, or joined a head that another one has replaced."""
    return _is_over(pod) or (head is not None and pod.head_uid != head.uid)


def _delete(pod: RayPod, tell: RecordClusterEvent) -> DeletePod:
    return DeletePod(pod.name, pod.uid, tell)


def _end(seen: ClusterPicture, pod: RayPod, what: str) -> str:
    place = f"{seen.namespace}/{pod.name}"
    if not _is_over(pod):
        return f"Deleted {what} {place}: the head that it joined was replaced"
    code = "nil" if pod.exit_code is None else f"exit code {pod.exit_code}"
    return (
        f"Deleted {what} {place}; Pod status: {pod.phase}; Pod restart policy: "
        f"{pod.restart_policy}; Ray container terminated status: {code}"
    )
