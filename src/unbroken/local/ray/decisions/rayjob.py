"""Runs a RayJob on a RayCluster of its own: cluster, submission and states, as KubeRay 1.7 has them
(`rayjob_controller.go`).  Pure.

The job is submitted through the API of the head's dashboard, whatever `submissionMode` says. The
submitter of KubeRay's other modes is a `batch/v1` Job, which the local cluster does not run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from unbroken.local.apiserver.http.bodies import YAML, decode_object
from unbroken.spec.times import time_seconds, time_text

from .pods import DASHBOARD_PORT, SUFFIX_LENGTH, SUFFIX_LETTERS
from .values import Object, RecordClusterEvent

GROUP_VERSION, KIND, PLURAL = "ray.io/v1", "RayJob", "rayjobs"
ENDED = frozenset({"SUCCEEDED", "FAILED", "STOPPED"})
"""States of a job of Ray that has ended."""
POLL_SECONDS = 2.0
"""Seconds between questions to the dashboard.  KubeRay: 3."""
SILENCE_SECONDS = 300.0
"""Seconds without an answer of the dashboard after which a job has failed (KubeRay's default)."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer of the dashboard about a job."""

    status: str
    """The state of Ray's job; empty: the dashboard does not know the job."""
    message: str = ""
    ended_at: float | None = None


@dataclass(frozen=True, slots=True)
class JobPicture:
    """All that is known of a RayJob."""

    name: str
    namespace: str
    uid: str
    generation: int
    spec: Mapping[str, Any]
    status: Mapping[str, Any]
    is_leaving: bool = False
    cluster: Mapping[str, Any] | None = None
    """Its RayCluster; None: it does not exist."""

    @property
    def deployment(self) -> str:
        """The status of its deployment; empty: it is new."""
        return str(self.status.get("jobDeploymentStatus") or "")

    @property
    def head(self) -> str:
        """Address of the head of its cluster, once the cluster is ready; else empty."""
        status = (self.cluster or {}).get("status") or {}
        ready = any(
            item["type"] == "HeadPodReady" and item["status"] == "True"
            for item in status.get("conditions") or ()
        )
        is_up = ready and status.get("state") == "ready"
        return str((status.get("head") or {}).get("podIP") or "") if is_up else ""

    @property
    def url(self) -> str:
        """Address of the dashboard to ask about the job; empty: there is nothing to ask yet."""
        asks = self.deployment in ("Initializing", "Running") and not self.spec.get("suspend")
        return f"http://{self.head}:{DASHBOARD_PORT}" if asks and self.head else ""


@dataclass(frozen=True, slots=True)
class JobPlan:
    """Actions for a RayJob, and the status to write before them."""

    status: Mapping[str, Any] | None = None
    """None: it is up to date."""
    create: Mapping[str, Any] | None = None
    """The RayCluster to create."""
    delete: str = ""
    """Name of the RayCluster to delete."""
    submit: Mapping[str, Any] | None = None
    """Body of the submission."""
    tell: RecordClusterEvent | None = None
    again_seconds: float | None = None
    """Time to look again without a change; None: only after a change."""


def plan_job(seen: JobPicture, answer: Answer | None, now: float) -> JobPlan:
    """Decide what to do about a RayJob.  `answer`: None if the dashboard says nothing."""
    if seen.is_leaving:
        return JobPlan()
    match seen.deployment:
        case "" | "Suspended" | "Retrying" if seen.spec.get("suspend"):
            return _asleep(seen)
        case "" | "Suspended":
            return JobPlan(_begun(seen, now))
        case "Retrying" | "Suspending":
            return _without_cluster(seen, now)
        case "Complete" | "Failed":
            return _after(seen, now)
        case _:
            return _work(seen, answer, now)


def _asleep(seen: JobPicture) -> JobPlan:
    if seen.deployment == "Suspended":
        return JobPlan()
    return JobPlan(_status(seen, jobDeploymentStatus="Suspended"))


def _begun(seen: JobPicture, now: float) -> Object:
    """Return the status of a new attempt, with the names of its cluster and submission."""
    digest = sha256(f"{seen.uid}/{now}".encode()).digest()
    suffix = "".join(SUFFIX_LETTERS[one % len(SUFFIX_LETTERS)] for one in digest[:SUFFIX_LENGTH])
    return _status(
        seen,
        jobDeploymentStatus="Initializing",
        **dict.fromkeys(("jobStatus", "endTime", "reason", "message")),
        jobId=seen.spec.get("jobId") or f"{seen.name}-{suffix}",
        rayClusterName=f"{seen.name}-{suffix}",
        startTime=time_text(now),
    )


def _without_cluster(seen: JobPicture, now: float) -> JobPlan:
    """Delete the cluster; continue when it is gone."""
    if seen.cluster is not None:
        return _delete(seen)
    if seen.deployment == "Suspending":
        gone = dict.fromkeys(("jobStatus", "jobId", "rayClusterName", "dashboardURL"))
        return JobPlan(_status(seen, jobDeploymentStatus="Suspended", **gone))
    return JobPlan(_begun(seen, now))


def _work(seen: JobPicture, answer: Answer | None, now: float) -> JobPlan:
    """Bring the job to its end."""
    if seen.spec.get("suspend"):
        return JobPlan(_status(seen, jobDeploymentStatus="Suspending"))
    limit = seen.spec.get("activeDeadlineSeconds")
    started = time_seconds(seen.status["startTime"])
    if limit is not None and now >= started + limit:
        text = "The RayJob has passed the activeDeadlineSeconds. StartTime: "
        return _ended(seen, now, "", ("DeadlineExceeded", text + seen.status["startTime"]))
    if seen.cluster is None:
        return _create(seen)
    wait = POLL_SECONDS if seen.head else None
    left = None if limit is None else started + limit - now
    waits = [one for one in (wait, left) if one is not None]
    again = min(waits, default=None)
    if not seen.url:
        return JobPlan(again_seconds=again)
    if answer is None:
        return _silent(seen, now)
    if not answer.status and seen.deployment == "Running":
        return _ended(seen, now, "FAILED", ("AppFailed", "the head that ran the job was lost"))
    if not answer.status:
        return JobPlan(submit=_submission(seen), again_seconds=POLL_SECONDS)
    if answer.status in ENDED:
        why = ("AppFailed", answer.message) if answer.status == "FAILED" else ("", answer.message)
        return _ended(seen, answer.ended_at or now, answer.status, why)
    status = _status(
        seen,
        jobDeploymentStatus="Running",
        jobStatus=answer.status,
        message=answer.message or None,
        dashboardURL=seen.url.removeprefix("http://"),
        jobStatusCheckFailureStartTime=None,
    )
    return JobPlan(status if status != seen.status else None, again_seconds=again)


def _silent(seen: JobPicture, now: float) -> JobPlan:
    """Wait for a dashboard that does not answer, but not for ever."""
    since = seen.status.get("jobStatusCheckFailureStartTime")
    if since is None:
        status = _status(seen, jobStatusCheckFailureStartTime=time_text(now))
        return JobPlan(status, again_seconds=POLL_SECONDS)
    if now < time_seconds(since) + SILENCE_SECONDS:
        return JobPlan(again_seconds=POLL_SECONDS)
    text = f"the dashboard has not answered for {SILENCE_SECONDS:.0f} s"
    return _ended(seen, now, "", ("JobStatusCheckTimeoutExceeded", text))


def _ended(seen: JobPicture, at: float, status: str, why: tuple[str, str]) -> JobPlan:
    """Record the end, or begin again where the job may."""
    reason, message = why
    failures = int(seen.status.get("failed") or 0) + bool(reason)
    retries = reason == "AppFailed" and failures <= int(seen.spec.get("backoffLimit") or 0)
    deployment = "Retrying" if retries else "Failed" if reason else "Complete"
    result = _status(
        seen,
        jobDeploymentStatus=deployment,
        jobStatus=status or seen.status.get("jobStatus"),
        reason=reason or None,
        message=message or None,
        endTime=time_text(at),
        failed=failures,
        succeeded=int(not reason),
        jobStatusCheckFailureStartTime=None,
    )
    return JobPlan(result)


def _after(seen: JobPicture, now: float) -> JobPlan:
    """Delete the cluster of an ended job, if the job asks for it, after its time to live."""
    if seen.cluster is None or not seen.spec.get("shutdownAfterJobFinishes"):
        return JobPlan()
    ended = time_seconds(seen.status["endTime"]) + int(
        seen.spec.get("ttlSecondsAfterFinished") or 0
    )
    return _delete(seen) if now >= ended else JobPlan(again_seconds=ended - now)


def _delete(seen: JobPicture) -> JobPlan:
    name = seen.status["rayClusterName"]
    if (seen.cluster or {}).get("metadata", {}).get("deletionTimestamp"):
        return JobPlan()
    text = f"Deleted RayCluster {seen.namespace}/{name}"
    return JobPlan(delete=name, tell=RecordClusterEvent("DeletedRayCluster", text))


def _create(seen: JobPicture) -> JobPlan:
    name = seen.status["rayClusterName"]
    owner = {"apiVersion": GROUP_VERSION, "kind": KIND, "name": seen.name, "uid": seen.uid}
    labels = {"ray.io/originated-from-cr-name": seen.name, "ray.io/originated-from-crd": KIND}
    body = {
        "apiVersion": GROUP_VERSION,
        "kind": "RayCluster",
        "metadata": {
            "name": name,
            "namespace": seen.namespace,
            "labels": labels,
            "ownerReferences": [{**owner, "controller": True, "blockOwnerDeletion": True}],
        },
        "spec": seen.spec["rayClusterSpec"],
    }
    return JobPlan(
        create=body,
        tell=RecordClusterEvent("CreatedRayCluster", f"Created RayCluster {seen.namespace}/{name}"),
    )


def _submission(seen: JobPicture) -> Object:
    """Return the body of the request that submits the job."""
    spec = seen.spec
    result = {
        "entrypoint": spec["entrypoint"],
        "submission_id": seen.status["jobId"],
        "runtime_env": read_map(spec.get("runtimeEnvYAML")),
        "metadata": dict(spec.get("metadata") or {}),
    }
    amounts = {
        "entrypoint_num_cpus": spec.get("entrypointNumCpus"),
        "entrypoint_num_gpus": spec.get("entrypointNumGpus"),
        "entrypoint_resources": read_map(spec.get("entrypointResources")),
    }
    return result | {key: value for key, value in amounts.items() if value}


def read_map(text: str | None) -> Object:
    """Read a field that holds a map in YAML, with the bounds of a request; ApiError."""
    return decode_object(text.encode(errors="surrogatepass"), YAML) if text else {}


def _status(seen: JobPicture, **changes: Any) -> Object:
    """Return the status with changes; None removes a field."""
    cluster = (seen.cluster or {}).get("status")
    whole = {**seen.status, "observedGeneration": seen.generation, **changes}
    if cluster:
        whole["rayClusterStatus"] = cluster
    return {key: value for key, value in whole.items() if value is not None}
