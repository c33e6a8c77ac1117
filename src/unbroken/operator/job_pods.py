"""The pods of each job."""

from __future__ import annotations

from typing import Any

from lightkube.generic_resource import GenericNamespacedResource
from lightkube.resources.core_v1 import Pod

from unbroken.kube.cache import HasMetadata, Key, changed, key_of
from unbroken.spec.job_kinds import JobKind
from unbroken.spec.times import time_seconds


def job_of(item: HasMetadata, kind: JobKind) -> Key | None:
    """Return the key of the job that the label of its kind names; None: there is no such label."""
    metadata: Any = item.metadata
    name = ((metadata and metadata.labels) or {}).get(kind.pod_label)
    return Key(key_of(item).namespace, name) if name else None


def is_owned(item: HasMetadata, uid: str) -> bool:
    """True if an owner reference of the object names the uid."""
    metadata: Any = item.metadata
    return any(owner.uid == uid for owner in (metadata and metadata.ownerReferences) or ())


def _is_below(pod: Pod, owner: str, since: float) -> bool:
    """True if an object of the kind `owner` controls the pod, made at `since` or later."""
    metadata: Any = pod.metadata
    made = metadata.creationTimestamp
    owners = metadata.ownerReferences or ()
    is_owned_so = any(item.controller and item.kind == owner for item in owners)
    return is_owned_so and made is not None and made.timestamp() >= since


class JobPods:
    """The pods of all jobs of a kind, by job."""

    def __init__(self, kind: JobKind) -> None:
        self._kind = kind
        self._pods: dict[Key, dict[str, Pod]] = {}
        """Pods by the key of the job and the uid of the pod."""

    def changed(self, old: Pod | None, new: Pod | None) -> Key | None:
        """Take a change that an informer saw; return the key of the pod's job, None: it has
        none."""
        pod = changed(old, new)
        key = job_of(pod, self._kind)
        if pod.metadata is None or key is None:
            return None
        pods = self._pods.setdefault(key, {})
        if new is not None:
            pods[pod.metadata.uid or ""] = new
        else:
            pods.pop(pod.metadata.uid or "", None)
        if not pods:
            del self._pods[key]
        return key

    def of(self, key: Key, uid: str) -> list[Pod]:
        """List the pods that belong to the job of this uid."""
        return [pod for pod in self._pods.get(key, {}).values() if is_owned(pod, uid)]

    def of_job(self, job: GenericNamespacedResource) -> list[Pod]:
        """List the pods of a job object.

        Where other objects own the pods, those of this name that are older than the job belong to
        a job of before that had its name.
        """
        metadata, owner = job["metadata"], self._kind.pod_owner
        key = key_of(job)
        if not owner:
            return self.of(key, str(metadata.get("uid") or ""))
        since = time_seconds(metadata["creationTimestamp"])
        return [pod for pod in self._pods.get(key, {}).values() if _is_below(pod, owner, since)]

    def jobs_on(self, node: str) -> list[Key]:
        """List the jobs that have pods on a node."""
        return [
            key
            for key, pods in self._pods.items()
            if any(pod.spec and pod.spec.nodeName == node for pod in pods.values())
        ]

    def clear(self) -> None:
        """Forget all pods."""
        self._pods.clear()
