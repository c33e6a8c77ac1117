"""Controller logic of a PyTorchJob: the pods that should exist, and its status. Pure.

It follows the training operator 1.8 (`common/job.go`, `common/pod.go`, `pytorchjob_controller.go`,
`util/status.go`), without features that this cluster lacks: gang scheduling, autoscaling.
Everything is computed from the present state; nothing is remembered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from unbroken.spec.keys import PYTORCHJOB_MANAGER
from unbroken.spec.kubeflow.pytorchjob import (
    KIND,
    CleanPodPolicy,
    JobCondition,
    PyTorchJobStatus,
    Replica,
    ReplicaSpec,
    ReplicaStatus,
    ReplicaStatuses,
    RestartPolicy,
)

from .events import (
    CreatePod,
    CreateService,
    DeleteJob,
    DeletePod,
    DeleteService,
    JobPicture,
    JobPod,
    Order,
    Plan,
    RecordJobEvent,
    Replaced,
)
from .pods import pod_body, pod_name, selector_of, service_body

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
        if policy.clean_pod_policy is CleanPodPolicy.ALL:
            self._remove(self._seen.pods)
        elif policy.clean_pod_policy is CleanPodPolicy.RUNNING or self._is_late():
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

    def _replace(self, replica: Replica, spec: ReplicaSpec, pods: list[JobPod]) -> str:
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
            is_final = spec.restart_policy is RestartPolicy.EXIT_CODE and not retries
            if spec.restart_policy is RestartPolicy.NEVER:
                continue
            if is_final:
                code = "" if pod.exit_code is None else f" with exit code {pod.exit_code}"
                return f"{KIND} {self._seen.name} is failed because {pod.name} failed{code}."
            self._failed.add(pod.uid)
            self._delete(pod)
        return ""

    def _make(self, replica: Replica, spec: ReplicaSpec, there: set[int], port: int) -> None:
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
                if specs[replica].restart_policy is RestartPolicy.NEVER:
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
