"""Decisions about a PyTorchJob: the pods and services that should exist, and its status. Pure.

They follow the training operator 1.8 (`common/job.go`, `common/pod.go`, `pytorchjob_controller.go`,
`pytorch/envvar.go`, `pytorch/elastic.go`, `util/status.go`), without features that this cluster
lacks: gang scheduling, autoscaling. Everything is computed from the present state; nothing is
remembered.

Two things differ.  Pods keep off nodes that wait for repair, as HyperPod asks people to write into
each manifest.  And there is no DNS: all pods are on this machine, so they meet at 127.0.0.1, at
a port that the caller gives.  The names of the services stand in the pods' /etc/hosts, for scripts
that spell them out, where this host lets pods have one.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from unbroken.foreign_numbers import INT32_MAX, whole_number
from unbroken.spec import keys
from unbroken.spec.job_kinds import PYTORCHJOB
from unbroken.spec.keys import PYTORCHJOB_MANAGER
from unbroken.spec.kubeflow.pytorchjob import (
    CONTAINER,
    KIND,
    OPERATOR,
    OPERATOR_LABEL,
    PORT,
    PORT_NAME,
    JobCondition,
    KubeflowCleanPodPolicy,
    KubeflowElasticPolicy,
    KubeflowReplicaSpec,
    KubeflowRestartPolicy,
    ParsedPyTorchJob,
    PyTorchJobSpec,
    PyTorchJobStatus,
    Replica,
    ReplicaStatus,
    ReplicaStatuses,
)
from unbroken.spec.nodes.values import OLDER_HEALTH, Health


@dataclass(frozen=True, slots=True)
class JobPod:
    """A pod of the job."""

    name: str
    uid: str
    replica: Replica
    index: int
    phase: str = "Pending"
    is_leaving: bool = False
    restarts: int = 0
    """Restarts of all containers of the pod."""
    exit_code: int | None = None
    """Exit code of the training container; None: it has not ended."""


@dataclass(frozen=True, slots=True)
class Replaced:
    """Failed pods that were replaced: they count as restarts against the backoff limit."""

    count: int = 0
    latest: frozenset[str] = frozenset()
    """Uids of the pods counted last, which informers may still show."""


@dataclass(frozen=True, slots=True)
class JobPicture:
    """All that is known of a job."""

    name: str
    namespace: str
    uid: str
    parsed: ParsedPyTorchJob
    status: PyTorchJobStatus
    is_leaving: bool = False
    pods: tuple[JobPod, ...] = ()
    services: frozenset[str] = frozenset()
    """Names of the services of the job."""
    replaced: Replaced = Replaced()


@dataclass(frozen=True, slots=True)
class CreateService:
    """Create the service that gives a pod its name in DNS."""

    name: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class CreatePod:
    """Create a pod."""

    name: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class DeletePod:
    """Delete the pod of this uid."""

    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class DeleteService:
    """Delete a service."""

    name: str


@dataclass(frozen=True, slots=True)
class DeleteJob:
    """Delete the job itself."""


@dataclass(frozen=True, slots=True)
class RecordJobEvent:
    """Record an event on the job."""

    reason: str
    message: str
    is_warning: bool = False


Order = CreateService | CreatePod | DeletePod | DeleteService | DeleteJob | RecordJobEvent


@dataclass(frozen=True, slots=True)
class Plan:
    """Orders, and the status and annotation to write."""

    orders: tuple[Order, ...] = ()
    status: PyTorchJobStatus | None = None
    """Status to write before the orders are carried out; None: it is up to date."""
    replaced: Replaced | None = None
    """Annotation to write after the status and before the orders; None: it is up to date."""
    again_at: float | None = None
    """Time at which to decide again without a change; None: only after a change."""


Object = dict[str, Any]
HERE = "127.0.0.1"
LEAVING = sorted((Health.PENDING_REBOOT.value, Health.PENDING_REPLACEMENT.value, *OLDER_HEALTH))
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def pod_name(job: str, replica: Replica, index: int) -> str:
    """Return the name of a pod and of its service."""
    return f"{job}-{replica.value.lower()}-{index}"


def labels_of(job: str, replica: Replica, index: int) -> dict[str, str]:
    """Return the labels of a pod and the selector of its service."""
    result = {
        keys.PYTORCHJOB_LABEL: job,
        OPERATOR_LABEL: OPERATOR,
        keys.REPLICA_TYPE_LABEL: replica.value.lower(),
        keys.REPLICA_INDEX_LABEL: str(index),
    }
    return result | ({keys.ROLE_LABEL: "master"} if replica is Replica.MASTER else {})


def selector_of(job: str, replica: Replica) -> str:
    """Return the selector of all pods of a type, as `status.replicaStatuses` has it."""
    wanted = {
        keys.PYTORCHJOB_LABEL: job,
        OPERATOR_LABEL: OPERATOR,
        keys.REPLICA_TYPE_LABEL: replica.value.lower(),
    }
    return ",".join(f"{key}={value}" for key, value in sorted(wanted.items()))


def service_body(job: JobPicture, replica: Replica, index: int) -> Object:
    """Return a headless service for one pod."""
    labels = labels_of(job.name, replica, index)
    port = _declared_port(job.parsed.spec.replicas()[replica]) or PORT
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(job, pod_name(job.name, replica, index), labels),
        "spec": {
            "clusterIP": "None",
            "selector": labels,
            "ports": [{"name": PORT_NAME, "port": port}],
        },
    }


def pod_body(job: JobPicture, replica: Replica, index: int, port: int) -> Object:
    """Return a pod.  `port`: rendezvous port of the job, unless the container names one."""
    spec = job.parsed.spec
    mine = spec.replicas()[replica]
    template = copy.deepcopy(dict(mine.template))
    given = template.get("metadata") or {}
    labels = {**(given.get("labels") or {}), **labels_of(job.name, replica, index)}
    metadata = _metadata(job, pod_name(job.name, replica, index), labels)
    metadata["annotations"] = {**(given.get("annotations") or {}), keys.RENDEZVOUS_PORT: str(port)}
    pod = template.get("spec") or {}
    policy = mine.restart_policy
    # A pod that is restarted for its exit code is replaced (`SetRestartPolicy`).
    pod["restartPolicy"] = "Never" if policy is KubeflowRestartPolicy.EXIT_CODE else policy.value
    names = [
        pod_name(job.name, other, number)
        for other, one in spec.replicas().items()
        for number in range(one.replicas)
    ]
    aliases = {"ip": HERE, "hostnames": names}
    pod["hostAliases"] = [*(pod.get("hostAliases") or ()), aliases]
    _avoid_unhealthy(pod)
    added = dict(environment(spec, replica, index, port))
    for container in pod.get("containers") or ():
        kept = [item for item in container.get("env") or () if item.get("name") not in added]
        ours = [{"name": name, "value": value} for name, value in added.items()]
        container["env"] = kept + ours
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod}


def _avoid_unhealthy(pod: Object) -> None:
    """Keep the pod off nodes that wait for repair, whatever else its affinity asks for."""
    affinity = pod["affinity"] = dict(pod.get("affinity") or {})
    by_node = affinity["nodeAffinity"] = dict(affinity.get("nodeAffinity") or {})
    terms = (by_node.get(REQUIRED) or {}).get("nodeSelectorTerms") or [{}]
    is_well = {"key": keys.HEALTH, "operator": "NotIn", "values": LEAVING}
    # One of the terms must hold, so each needs the requirement.
    by_node[REQUIRED] = {
        "nodeSelectorTerms": [
            {**term, "matchExpressions": [*(term.get("matchExpressions") or ()), is_well]}
            for term in terms
        ]
    }


def environment(
    spec: PyTorchJobSpec, replica: Replica, index: int, port: int
) -> Iterator[tuple[str, str]]:
    """The variables that every container gets."""
    replicas = spec.replicas()
    total = sum(one.replicas for one in replicas.values())
    yield "PYTHONUNBUFFERED", "1"
    # Otherwise rank 0 sends its host name to the others, which cannot be resolved here.
    yield "PET_LOCAL_ADDR", HERE
    if Replica.MASTER in replicas:
        rank = index if replica is Replica.MASTER else index + 1
        count = whole_number(spec.nproc_per_node, 0, INT32_MAX)
        count = 1 if count is None else count
        meeting = str(_declared_port(replicas[Replica.MASTER]) or port)
        for prefix in ("", "PET_"):
            yield f"{prefix}MASTER_ADDR", HERE
            yield f"{prefix}MASTER_PORT", meeting
        yield "WORLD_SIZE", str(total * count)
        yield "RANK", str(rank)
        yield "PET_NODE_RANK", str(rank)
    if spec.nproc_per_node:
        yield "PET_NPROC_PER_NODE", spec.nproc_per_node
    if spec.elastic_policy is None:
        yield "PET_NNODES", str(total)
    else:
        yield from _elastic(spec.elastic_policy, replicas[Replica.WORKER], port)


def _elastic(
    policy: KubeflowElasticPolicy, workers: KubeflowReplicaSpec, port: int
) -> Iterator[tuple[str, str]]:
    meeting = policy.rdzv_port or _declared_port(workers) or port
    yield "PET_RDZV_ENDPOINT", f"{policy.rdzv_host or HERE}:{meeting}"
    yield "PET_RDZV_BACKEND", policy.rdzv_backend
    if policy.min_replicas is not None:
        yield "PET_NNODES", f"{policy.min_replicas}:{policy.max_replicas}"
    else:
        yield "PET_NNODES", str(workers.replicas)
    if policy.max_restarts is not None:
        yield "PET_MAX_RESTARTS", str(policy.max_restarts)
    if policy.n_proc_per_node is not None:
        yield "PET_NPROC_PER_NODE", str(policy.n_proc_per_node)
    if policy.rdzv_id:
        yield "PET_RDZV_ID", policy.rdzv_id
    if policy.rdzv_conf:
        pairs = (
            f"{rendezvous_setting.key}={rendezvous_setting.value}"
            for rendezvous_setting in policy.rdzv_conf
        )
        yield "PET_RDZV_CONF", ",".join(pairs)
    if policy.standalone:
        yield "PET_STANDALONE", "1"


def _declared_port(spec: KubeflowReplicaSpec) -> int | None:
    """Return the rendezvous port that the training container names."""
    for container in (spec.template.get("spec") or {}).get("containers") or ():
        if container.get("name") == CONTAINER:
            for port in container.get("ports") or ():
                if port.get("name") == PORT_NAME:
                    return int(port["containerPort"])
    return None


def _metadata(job: JobPicture, name: str, labels: Mapping[str, str]) -> Object:
    owner = PYTORCHJOB.owner_reference(job.name, job.uid)
    result = {"name": name, "namespace": job.namespace, "labels": dict(labels)}
    return {**result, "ownerReferences": [owner]}


RETRYABLE = 128
"""Exit codes from here on are signals, which are retried (`train.IsRetryableExitCode`)."""


def plan(seen: JobPicture, now: float, port: int) -> Plan:
    """Decide what to do about a job.  `port`: rendezvous port of new pods."""
    policy = seen.parsed.spec.run_policy
    if seen.is_leaving or policy.managed_by not in ("", PYTORCHJOB_MANAGER):
        return Plan()
    course = _Course(seen, now)
    if seen.parsed.problems:
        return course.refuse()
    if seen.status.is_finished:
        return course.clean_up()
    course.say("Created", f"{KIND} {seen.name} is created.")
    if policy.suspend:
        return course.suspend()
    course.begin()
    over = course.limit_passed()
    if over:
        return course.fail(over)
    return course.run(port)


class _Course:
    """One look at a job: collects orders and the status."""

    def __init__(self, seen: JobPicture, now: float) -> None:
        self._seen = seen
        self._now = now
        self._status = seen.status
        self._orders: list[Order] = []
        self._again: float | None = None
        self._failed: set[str] = set()
        """Uids of failed pods that are replaced."""

    def say(self, type: str, message: str, *, is_true: bool = True, reason: str = "") -> bool:
        """Set a condition; return whether it is new."""
        whole = f"{KIND}{reason or type}"
        changed = with_condition(
            self._status, type, "True" if is_true else "False", (whole, message), self._now
        )
        is_new = changed != self._status
        self._status = changed
        return is_new

    def _record(self, reason: str, message: str, *, is_warning: bool = False) -> None:
        self._orders.append(RecordJobEvent(f"{KIND}{reason}", message, is_warning))

    def _made(self) -> Plan:
        changed = self._status if self._status != self._seen.status else None
        new = self._failed - self._seen.replaced.latest
        count = self._seen.replaced.count + len(new)
        replaced = Replaced(count, frozenset(self._failed)) if new else None
        return Plan(tuple(self._orders), changed, replaced, self._again)

    # --- the ends of a job

    def refuse(self) -> Plan:
        """Fail a job whose spec is invalid, with the reason."""
        if self._seen.status.is_finished:
            return Plan()
        text = "; ".join(map(str, self._seen.parsed.problems))
        message = f"{KIND} {self._seen.name} is not valid: {text}"
        if self.say("Failed", message, reason="FailedValidation"):
            self._record("FailedValidation", message, is_warning=True)
        self._status = replace(self._status, completion_time=self._now)
        return self._made()

    def fail(self, message: str) -> Plan:
        """Fail the job; `clean_up` deletes its pods by its policy at the next look."""
        if self.say("Failed", message):
            self._record("Failed", message, is_warning=True)
        self._status = replace(self._status, completion_time=self._now)
        return self._made()

    def clean_up(self) -> Plan:
        """Delete pods of an ended job by its policy, and the job itself after its time to live.

        The training operator deletes all pods at a limit, and their logs with them
        (kubeflow/trainer#3419). Here the policy holds. Only at `activeDeadlineSeconds` all pods
        that run are deleted, whatever the policy: the limit is on their time.
        """
        policy, status = self._seen.parsed.spec.run_policy, self._seen.status
        if policy.clean_pod_policy is KubeflowCleanPodPolicy.ALL:
            self._remove(self._seen.pods)
        elif policy.clean_pod_policy is KubeflowCleanPodPolicy.RUNNING or self._is_late():
            self._remove(pod for pod in self._seen.pods if pod.phase in ("Running", "Pending"))
        self._status = replace(status, replica_statuses=self._settled())
        keep = policy.ttl_seconds_after_finished
        if keep is not None and status.completion_time is not None:
            end = status.completion_time + keep
            if self._now >= end:
                self._orders.append(DeleteJob())
            else:
                self._again = end
        return self._made()

    def _is_late(self) -> bool:
        status = self._seen.status
        seconds = self._seen.parsed.spec.run_policy.active_deadline_seconds
        if seconds is None or status.start_time is None or status.completion_time is None:
            return False
        return status.has("Failed") and status.completion_time >= status.start_time + seconds

    def _settled(self) -> ReplicaStatuses:
        """Return the counts of an ended job: pods that no longer run have ended as the job has."""

        def of(replica: Replica, count: ReplicaStatus | None) -> ReplicaStatus | None:
            pods = [pod for pod in self._seen.pods if pod.replica is replica]
            ended = 0 if count is None else max(count.active - _count(pods).active, 0)
            if count is None or not ended:
                return count
            if self._seen.status.has("Failed"):
                return replace(count, active=count.active - ended, failed=count.failed + ended)
            return replace(count, active=count.active - ended, succeeded=count.succeeded + ended)

        statuses = self._seen.status.replica_statuses
        return ReplicaStatuses(
            of(Replica.MASTER, statuses.master), of(Replica.WORKER, statuses.worker)
        )

    def suspend(self) -> Plan:
        """Delete all pods until the job is resumed."""
        message = f"{KIND} {self._seen.name} is suspended."
        if self._status.has("Running"):
            self.say("Running", message, is_true=False, reason="Suspended")
        if self.say("Suspended", message):
            self._record("Suspended", message)
        self._remove(self._seen.pods)
        self._status = replace(self._status, replica_statuses=self._counted({}))
        return self._made()

    def begin(self) -> None:
        """Record that the job runs, for the first time or again."""
        if self._status.has("Suspended"):
            message = f"{KIND} {self._seen.name} is resumed."
            self.say("Suspended", message, is_true=False, reason="Resumed")
            self._record("Resumed", message)
            self._status = replace(self._status, start_time=self._now)
        if self._status.start_time is None:
            self._status = replace(self._status, start_time=self._now)

    def limit_passed(self) -> str:
        """Say which limit the job has exceeded; empty: none."""
        policy, started = self._seen.parsed.spec.run_policy, self._status.start_time
        if policy.backoff_limit is not None:
            running = (pod for pod in self._seen.pods if pod.phase == "Running")
            restarts = sum(pod.restarts for pod in running) + self._seen.replaced.count
            # `PastBackoffLimit`: none at all are allowed by 0, fewer than the limit by others.
            if restarts >= max(policy.backoff_limit, 1):
                limit = "it has reached the specified backoff limit"
                return f"Job {self._seen.name} has failed because {limit}"
        if policy.active_deadline_seconds is not None and started is not None:
            end = started + policy.active_deadline_seconds
            if self._now >= end:
                limit = "it was active longer than specified deadline"
                return f"Job {self._seen.name} has failed because {limit}"
            self._again = end
        return ""

    # --- a job that runs

    def run(self, port: int) -> Plan:
        """Create missing pods, replace failed pods and update the status."""
        counts: dict[Replica, ReplicaStatus] = {}
        for replica, spec in self._seen.parsed.spec.replicas().items():
            pods = [pod for pod in self._seen.pods if pod.replica is replica]
            counts[replica] = _count(pods)
            broken = self._replace(replica, spec, pods)
            if broken:
                self._status = replace(self._status, replica_statuses=self._counted(counts))
                return self.fail(broken)
            self._make(replica, spec, {pod.index for pod in pods}, port)
        self._status = replace(self._status, replica_statuses=self._counted(counts))
        return self._judge(counts)

    def _replace(self, replica: Replica, spec: KubeflowReplicaSpec, pods: list[JobPod]) -> str:
        """Replace failed pods if the policy allows; else return why the job has failed."""
        for pod in pods:
            if pod.index >= spec.replicas and not pod.is_leaving:
                self._delete(pod)
            if pod.phase != "Failed" or pod.is_leaving:
                continue
            if pod.exit_code is not None:
                text = f"Pod: {self._seen.namespace}.{pod.name} exited with code {pod.exit_code}"
                self._orders.append(RecordJobEvent("ExitedWithCode", text))
            retries = pod.exit_code is not None and pod.exit_code >= RETRYABLE
            is_final = spec.restart_policy is KubeflowRestartPolicy.EXIT_CODE and not retries
            if spec.restart_policy is KubeflowRestartPolicy.NEVER:
                continue
            if is_final:
                code = "" if pod.exit_code is None else f" with exit code {pod.exit_code}"
                return f"{KIND} {self._seen.name} is failed because {pod.name} failed{code}."
            self._failed.add(pod.uid)
            self._delete(pod)
        return ""

    def _make(
        self, replica: Replica, spec: KubeflowReplicaSpec, there: set[int], port: int
    ) -> None:
        for index in range(spec.replicas):
            name = pod_name(self._seen.name, replica, index)
            if name not in self._seen.services:
                self._orders.append(CreateService(name, service_body(self._seen, replica, index)))
            if index not in there:
                body = pod_body(self._seen, replica, index, port)
                self._orders.append(CreatePod(name, body))

    def _judge(self, counts: dict[Replica, ReplicaStatus]) -> Plan:
        """Set the condition that follows from the pods; a master decides, if there is one."""
        name, specs = self._seen.name, self._seen.parsed.spec.replicas()
        leader = Replica.MASTER if Replica.MASTER in specs else Replica.WORKER
        first = counts[leader]
        if first.succeeded >= specs[leader].replicas:
            message = f"{KIND} {name} is successfully completed."
            if self.say("Succeeded", message):
                self._record("Succeeded", message)
            self._status = replace(self._status, completion_time=self._now)
            return self._made()
        failing = ""
        for replica, count in counts.items():
            if count.failed and specs[replica].replicas > count.succeeded + count.active:
                failing = f"{count.failed} {replica.value} replica(s) failed."
                if specs[replica].restart_policy is KubeflowRestartPolicy.NEVER:
                    return self.fail(f"{KIND} {name} is failed because {failing}")
        if failing:
            message = f"{KIND} {name} is restarting because {failing}"
            if self.say("Restarting", message):
                self._record("Restarting", message, is_warning=True)
        elif first.active:
            self.say("Running", f"{KIND} {name} is running.")
        return self._made()

    def _counted(self, counts: dict[Replica, ReplicaStatus]) -> ReplicaStatuses:
        def of(replica: Replica) -> ReplicaStatus | None:
            if replica not in self._seen.parsed.spec.replicas():
                return None
            count = counts.get(replica, ReplicaStatus())
            return replace(count, selector=selector_of(self._seen.name, replica))

        return ReplicaStatuses(of(Replica.MASTER), of(Replica.WORKER))

    def _remove(self, pods: Iterable[JobPod]) -> None:
        """Delete pods with their services."""
        for pod in pods:
            if not pod.is_leaving:
                self._delete(pod)
            if pod.name in self._seen.services:
                self._orders.append(DeleteService(pod.name))

    def _delete(self, pod: JobPod) -> None:
        order = DeletePod(pod.name, pod.uid)
        if order not in self._orders:
            self._orders.append(order)


def _count(pods: Iterable[JobPod]) -> ReplicaStatus:
    """Count pods as `updateJobReplicaStatuses`: a running pod that is being deleted counts as
    failed."""
    listed = list(pods)
    return ReplicaStatus(
        active=sum(pod.phase == "Running" and not pod.is_leaving for pod in listed),
        succeeded=sum(pod.phase == "Succeeded" for pod in listed),
        failed=sum(
            pod.phase == "Failed" or (pod.phase == "Running" and pod.is_leaving) for pod in listed
        ),
    )


def with_condition(
    status: PyTorchJobStatus, type: str, value: str, why: tuple[str, str], now: float
) -> PyTorchJobStatus:
    """Return the status with a condition set. `why`: reason and message.

    `kubectl get` prints the type of the last condition whatever its status. So the newest true one
    is the last: Created, for a resumed job that does not run yet.
    """
    held = next((condition for condition in status.conditions if condition.type == type), None)
    reason, message = why
    if held is not None and (held.status, held.reason) == (value, reason):
        return status
    since = held.last_transition_time if held is not None and held.status == value else now
    made = JobCondition(type, value, reason, message, now, since)
    every = (*_others(status.conditions, type), made)
    last = next(
        (job_condition for job_condition in reversed(every) if job_condition.status == "True"), made
    )
    return replace(
        status,
        conditions=(*(job_condition for job_condition in every if job_condition is not last), last),
    )


def _others(conditions: Iterable[JobCondition], type: str) -> Iterator[JobCondition]:
    """Return what is left of the other conditions (`filterOutCondition`)."""
    rivals = {"Restarting": "Running", "Running": "Restarting"}
    for condition in conditions:
        if condition.type in (type, rivals.get(type)):
            continue
        ends = type in ("Failed", "Succeeded") and condition.type == "Running"
        yield replace(condition, status="False") if ends else condition
