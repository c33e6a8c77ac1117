"""Runs a RayCluster: which pods should exist, as KubeRay 1.7 does it (`reconcilePods`).  Pure.

Everything is derived from what exists; nothing is remembered. Two things differ. Workers are made
when the head is ready, and replaced when the head is another one: their only way to the head is its
address.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from .autoscaler import is_autoscaled
from .pods import HEAD_GROUP, gcs_port, head_body, pod_name, service_body, service_name, worker_body
from .status import expected_workers, status_of
from .values import ClusterPicture, Create, DeletePod, Order, Plan, RayPod, RecordClusterEvent

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
