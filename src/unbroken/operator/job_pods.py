"""Which pods belong to which job."""

from __future__ import annotations

from typing import Any

from lightkube.resources.core_v1 import Pod

from unbroken.kube.cache import HasMetadata, Key, changed, key_of
from unbroken.spec.job_kinds import JobKind


def job_of(item: HasMetadata, kind: JobKind) -> Key | None:
    """Return the key of the job that the label of its kind names; None: there is no such label."""
    metadata: Any = item.metadata
    name = ((metadata and metadata.labels) or {}).get(kind.pod_label)
    return Key(key_of(item).namespace, name) if name else None


def is_owned(item: HasMetadata, uid: str) -> bool:
    """True if an owner reference of the object names the uid."""
    metadata: Any = item.metadata
    return any(owner.uid == uid for owner in (metadata and metadata.ownerReferences) or ())


class JobPods:
    """The pods of all jobs of a kind, by job."""

    def __init__(self, kind: JobKind) -> None:
        self._kind = kind
        self._pods: dict[Key, dict[str, Pod]] = {}
        """By the key of the job and the uid of the pod."""

    def changed(self, old: Pod | None, new: Pod | None) -> Key | None:
        """Take in a change that an informer saw; return the key of the pod's job, None if none."""
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
