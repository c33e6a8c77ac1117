"""A PyTorchJob that is looked at again and again, and what becomes of its pods."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from unbroken.local.kubeflow.decisions import (
    CreatePod,
    CreateService,
    DeleteJob,
    DeletePod,
    DeleteService,
    JobPicture,
    JobPod,
    Plan,
    RecordJobEvent,
    Replaced,
    plan,
)
from unbroken.spec.kubeflow.pytorchjob import (
    PyTorchJobStatus,
    Replica,
    parse_pytorchjob,
    status_from,
    status_to,
)

Object = dict[str, Any]


@dataclass
class Script:
    """A job that is looked at again and again; pods are as the test says."""

    job: Object
    now: float = 1000.0
    pods: dict[str, JobPod] = field(default_factory=dict)
    services: set[str] = field(default_factory=set)
    status: PyTorchJobStatus = field(default_factory=PyTorchJobStatus)
    is_gone: bool = False
    bodies: dict[str, Object] = field(default_factory=dict)
    made: int = 0
    replaced: Replaced = field(default_factory=Replaced)

    def look(self) -> Plan:
        """One look, and all that it orders."""
        seen = JobPicture(
            *("lm", "default", "uid", parse_pytorchjob(self.job), self.status),
            pods=tuple(self.pods.values()),
            services=frozenset(self.services),
            replaced=self.replaced,
        )
        found = plan(seen, self.now, 4000 + self.made)
        if found.status is not None:
            self.status = status_from(status_to(found.status))
            assert self.status == found.status, "nothing is lost on the wire"
        self.replaced = found.replaced or self.replaced
        for order in found.orders:
            match order:
                case CreatePod(name, body):
                    assert name not in self.pods
                    self.made += 1
                    _, kind, index = name.rsplit("-", 2)
                    self.bodies[name] = dict(body)
                    replica = Replica(kind.title())
                    self.pods[name] = JobPod(name, f"u{self.made}", replica, int(index))
                case CreateService(name):
                    self.services.add(name)
                case DeletePod(name, uid):
                    assert self.pods[name].uid == uid
                    self.change(name, is_leaving=True)
                case DeleteService(name):
                    self.services.discard(name)
                case DeleteJob():
                    self.is_gone = True
                case RecordJobEvent():
                    pass
        return found

    def change(self, name: str, **changes: Any) -> None:
        """Something becomes of a pod."""
        self.pods[name] = replace(self.pods[name], **changes)

    def run_all(self) -> None:
        """Let all pods run."""
        self.look()
        for name in self.pods:
            self.change(name, phase="Running")
        self.look()

    def left(self) -> set[str]:
        """Pods that leave have left; what is there then."""
        self.pods = {name: pod for name, pod in self.pods.items() if not pod.is_leaving}
        return set(self.pods)

    @property
    def state(self) -> list[tuple[str, str]]:
        """Conditions, the newest last."""
        return [(one.type, one.status) for one in self.status.conditions]


def script(
    workers: int = 2, master: bool = False, policy: str = "OnFailure", **spec: Any
) -> Script:
    """A new job."""
    template = {"spec": {"containers": [{"name": "pytorch", "image": "any"}]}}
    one = {"replicas": 1, "restartPolicy": policy, "template": template}
    replicas = {"Worker": {**one, "replicas": workers}} | ({"Master": one} if master else {})
    return Script({"metadata": {"name": "lm"}, "spec": {"pytorchReplicaSpecs": replicas, **spec}})
