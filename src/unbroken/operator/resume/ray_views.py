"""Readers of RayClusters, RayJobs and their pods for auto-resume, and its record.  Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import msgspec
from lightkube.models.core_v1 import PodSpec, PodStatus
from lightkube.resources.core_v1 import Pod

from unbroken.core.auto_resume import PodNode, Record
from unbroken.core.ray_resume import (
    DashboardAnswer,
    Head,
    RayPicture,
    RayState,
    Submission,
    unsupported,
)
from unbroken.errors import SpecError
from unbroken.foreign_numbers import INT32_MAX, PORT_MAX, whole_number
from unbroken.kube.conditions import is_ready
from unbroken.spec import keys
from unbroken.spec.auto_resume import Resume, has_annotations, resume_of, resume_problems
from unbroken.spec.job_kinds import RAY_CLUSTER, RAY_JOB, JobKind
from unbroken.spec.log_monitoring import log_monitoring_of, yaml_value

from .jobs import annotations_of, pod_state, uid_of
from .record import read_record, write_record

Object = Mapping[str, Any]
HEAD = "head"
NODE_TYPE = "ray.io/node-type"
DASHBOARD_PORT = 8265
RESUME_ENV, ATTEMPT_ENV = "UNBROKEN_RESUME", "JOB_RESTART_COUNT"
"""Variables of a job that is submitted again: `1`, and the number of the restart."""
STATE_BYTES_MAX = 128 * 1024
"""Longest state that is read; an object has 256 KiB for all annotations."""
YAML_CHARACTERS_MAX = 64 * 1024
UNFINISHED = frozenset({"Initializing", "Running", "Failed"})
"""Deployment statuses of a RayJob from which a lost attempt can be begun again."""
ACTIVE = frozenset({"Initializing", "Running"})


def owner_of(cluster: Object) -> str | None:
    """Return the name of the RayJob that a RayCluster belongs to; None: it stands alone.

    Empty if the RayCluster belongs to another object, which manages it.
    """
    for owner in cluster["metadata"].get("ownerReferences") or ():
        if owner.get("controller"):
            return str(owner["name"]) if owner.get("kind") == RAY_JOB.name else ""
    return None


def cluster_of(job: Object) -> str:
    """Return the name of the RayCluster of a RayJob's present attempt; empty: there is none."""
    return str((job.get("status") or {}).get("rayClusterName") or "")


def begun_jobs(kind: JobKind, subject: Object, answer: DashboardAnswer | None) -> frozenset[str]:
    """Return the ids of the jobs of a RayJob or a RayCluster whose entrypoint runs."""
    if kind is not RAY_JOB:
        return answer.begun if answer is not None else frozenset()
    status = subject.get("status") or {}
    id = str(status.get("jobId") or "")
    return frozenset({id} if id and status.get("jobStatus") == "RUNNING" else ())


def recorded_uid(job: Object) -> str:
    """Return the uid that the RayCluster of a RayJob's attempt had; empty: nothing recorded it."""
    state = read_state(annotations_of(job))
    return state.cluster_uid if state.cluster == cluster_of(job) else ""


def ray_picture(
    kind: JobKind,
    subject: Object,
    cluster: Object | None,
    pods: Iterable[Pod],
    nodes: Mapping[str, PodNode],
    default: int = 0,
    answer: DashboardAnswer | None = None,
) -> RayPicture:
    """Return all that auto-resume needs of a RayJob, or of a RayCluster that stands alone, but for
    its hung jobs.

    `cluster`: the RayCluster; None: it does not exist.  `default` as in `resume_of`.
    """
    is_rayjob = kind is RAY_JOB
    metadata, annotations = subject["metadata"], annotations_of(subject)
    resume, found = resume_of(annotations, default), list(pods)
    # Jobs of a RayCluster are kept for those who ask for it: they may hold secrets.
    is_kept = is_rayjob or not resume.is_default
    state = read_state(annotations) if is_kept else RayState()
    problems = resume_problems(annotations)
    if is_rayjob and resume.is_wanted:
        spec = subject.get("spec") or {}
        has_selector = bool(spec.get("clusterSelector"))
        problems = unsupported(str(spec.get("submissionMode") or ""), has_selector)
    heads = {head.uid: head for head in map(head_of, found) if head is not None}
    status = (cluster or {}).get("status") or {}
    # Without its log rules, a job is still resumed after losses.
    of_rules = list(map(str, log_monitoring_of(annotations).problems))
    if not has_annotations(annotations):
        resume = Resume() if problems else resume
        problems, of_rules = (), []
    return RayPicture(
        kind=kind.name,
        name=metadata["name"],
        version=metadata.get("resourceVersion") or "",
        resume=resume,
        record=read_record(annotations),
        problems=(*problems, *of_rules),
        is_over=bool(problems) or _is_over(is_rayjob, subject, state),
        pods=tuple(pod_state(pod) for pod in found),
        nodes=nodes,
        is_rayjob=is_rayjob,
        cluster=cluster_of(subject) if is_rayjob else metadata["name"],
        cluster_uid=uid_of(cluster) if cluster is not None else "",
        is_running=_deployment(subject) == "Running",
        is_suspension_asked=bool(((cluster or {}).get("spec") or {}).get("suspend")),
        is_cluster_suspended=status.get("state") == "suspended",
        state=state,
        heads=heads,
        ready=frozenset(_uid(pod) for pod in found if _uid(pod) in heads and is_ready(pod)),
        answer=answer,
    )


def _is_over(is_rayjob: bool, subject: Object, state: RayState) -> bool:
    if subject["metadata"].get("deletionTimestamp") or (subject.get("spec") or {}).get("suspend"):
        return True
    if not is_rayjob:
        return False
    is_lost = state.is_lost and state.cluster == cluster_of(subject)
    return _deployment(subject) not in (UNFINISHED if is_lost else ACTIVE)


def _deployment(subject: Object) -> str:
    return str((subject.get("status") or {}).get("jobDeploymentStatus") or "")


def _uid(pod: Pod) -> str:
    return (pod.metadata and pod.metadata.uid) or ""


def head_of(pod: Pod) -> Head | None:
    """Return the head that a pod is; None: it is a worker."""
    metadata, spec, status = pod.metadata, pod.spec or PodSpec([]), pod.status or PodStatus()
    if metadata is None or (metadata.labels or {}).get(NODE_TYPE) != HEAD:
        return None
    name = spec.containers[0].name if spec.containers else ""
    restarts = [one.restartCount for one in status.containerStatuses or () if one.name == name]
    return Head(metadata.name or "", metadata.uid or "", restarts[0] if restarts else 0)


def dashboard_url(cluster: Object, pod: Pod) -> str:
    """Return the address of the dashboard of a head; empty: it has none yet."""
    group = (cluster.get("spec") or {}).get("headGroupSpec") or {}
    given = str((group.get("rayStartParams") or {}).get("dashboard-port") or "")
    address = (pod.status and pod.status.podIP) or ""
    port = whole_number(given, 1, PORT_MAX) or DASHBOARD_PORT
    host = f"[{address}]" if ":" in address else address
    return f"http://{host}:{port}" if address else ""


# --- the record


Count = Annotated[int, msgspec.Meta(ge=0, le=INT32_MAX)]


class _HeadText(msgspec.Struct):
    name: str
    uid: str
    restarts: Count = 0


class _JobText(msgspec.Struct):
    id: str
    request: dict[str, Any]


class _StateText(msgspec.Struct, omit_defaults=True):
    cluster: str = ""
    clusterUid: str = ""
    head: _HeadText | None = None
    isLost: bool = False
    attempt: Count = 0
    jobs: list[_JobText] = []
    hung: list[str] = []


def read_state(annotations: Mapping[str, str]) -> RayState:
    """Read the state from its annotation; a malformed one counts as missing."""
    text = annotations.get(keys.RESUME_RAY, "")
    if not text or len(text) > STATE_BYTES_MAX:
        return RayState()
    try:
        found = msgspec.json.decode(text.encode(errors="surrogatepass"), type=_StateText)
    except (msgspec.MsgspecError, RecursionError):
        return RayState()
    head = found.head
    return RayState(
        cluster=found.cluster,
        cluster_uid=found.clusterUid,
        head=Head(head.name, head.uid, head.restarts) if head is not None else None,
        is_lost=found.isLost,
        attempt=found.attempt,
        jobs=tuple(Submission(one.id, request_text(one.request)) for one in found.jobs),
        hung=tuple(found.hung),
    )


def write_ray_record(record: Record, state: RayState) -> dict[str, str | None]:
    """Return the annotations as a merge patch; None removes one."""
    head = state.head
    text = _StateText(
        cluster=state.cluster,
        clusterUid=state.cluster_uid,
        head=_HeadText(head.name, head.uid, head.restarts) if head is not None else None,
        isLost=state.is_lost,
        attempt=state.attempt,
        jobs=[_JobText(one.id, json.loads(one.request)) for one in state.jobs],
        hung=list(state.hung),
    )
    whole = msgspec.json.encode(text).decode()
    found = write_record(record) if record != Record() else {}
    return {**found, keys.RESUME_RAY: whole if state != RayState() else None}


def request_text(request: Mapping[str, Any]) -> str:
    """Return a submission's request as text that is the same for equal requests."""
    return json.dumps(request, sort_keys=True, separators=(",", ":"))


# --- the environment of the next attempt


def with_attempt(runtime_env: Mapping[str, Any], attempt: int) -> dict[str, Any]:
    """Return a runtime environment whose variables show the job that it is resumed."""
    given = runtime_env.get("env_vars")
    variables = dict(given) if isinstance(given, Mapping) else {}
    return {
        **runtime_env,
        "env_vars": {**variables, RESUME_ENV: "1", ATTEMPT_ENV: str(attempt)},
    }


def next_runtime_env(text: str, attempt: int) -> str:
    """Return a RayJob's `runtimeEnvYAML` for an attempt; SpecError if that is impossible."""
    try:
        found = yaml_value(text, YAML_CHARACTERS_MAX)
        if not isinstance(found, dict | None):
            raise SpecError("is not a map")
        whole = json.dumps(with_attempt(found or {}, attempt), indent=2)
    except SpecError as error:
        raise SpecError(f"runtimeEnvYAML {error}") from error
    except (ValueError, TypeError, RecursionError) as error:
        raise SpecError(f"runtimeEnvYAML is not a map of JSON's values: {error}") from error
    return whole + "\n"


def is_of_cluster(pod: Object, name: str) -> bool:
    """True if an owner reference of a pod, which is a dict, names the RayCluster."""
    owners = pod["metadata"].get("ownerReferences") or ()
    return any(one.get("kind") == RAY_CLUSTER.name and one.get("name") == name for one in owners)
