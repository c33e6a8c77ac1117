"""Restarts the pods of a RayCluster after a loss, and its jobs if the head was lost.  Pure.

The subject is a RayJob with its RayCluster, or a RayCluster that stands alone, whose jobs come from
`ray job submit`.  KubeRay's operator (or the local cluster's) makes all pods.  It replaces pods
that ended, but leaves pods alone whose node is unhealthy or does not answer (kuberay#4078).

- Worker lost: only the pods of the lost node are deleted.  Ray moves tasks and actors by itself.
- Head lost: the state of Ray is lost with it, so all pods are deleted together.  The jobs run again
  only when no pod of the old attempt exists any more.  A pod on a node that does not answer exists
  until its node is fenced or gone.
- RayJob: its RayCluster is suspended, so that nobody makes a head there.  When it has no pod, the
  RayJob gets the deployment status Retrying, from which KubeRay makes a new RayCluster and submits
  the same entrypoint to it.  (`suspend` of a RayJob would need `shutdownAfterJobFinishes`.)
- RayCluster: the jobs that ran are submitted to the new head under ids that name the attempt.  Ray
  takes an id once, so no job runs twice, even if two programs submit it.
  Without annotations of the user, only pods are watched: the jobs may hold secrets, and may not be
  made to run twice.
- Job that breaks its log rules (it hangs): a RayJob begins again as after the loss of its head.  A
  job of a RayCluster is stopped and submitted again to the same head; all pods stay.

As in `auto_resume`, the write of the record is the decision, and an old picture leads to the same
orders.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256

from unbroken.spec.keys import AUTO_RESUME

from .auto_resume import (
    RESEND_SECONDS,
    STUCK_SECONDS,
    LossSign,
    Picture,
    PodState,
    Record,
    ResumeEffect,
    Resumption,
    Say,
    WriteResumeRecord,
)
from .losses import closed
from .wording import counted

RESUMED = "Resumed"
"""Reason of the event after the name of the kind: the jobs run again."""
NOT_RESUMED = "AutoResumeImpossible"
"""Reason of the event that names a job which cannot be submitted again, and why."""
SHOWN, SHOWN_CHARACTERS = 5, 60
"""Jobs that an event names, and characters of each id after the first."""
_ATTEMPT = re.compile(r"-attempt-[0-9]{1,9}$")
_PLAIN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


@dataclass(frozen=True, slots=True)
class Head:
    """One life of a head: a pod, and the number of restarts of its Ray container.  The state of
    Ray ends with it."""

    name: str
    uid: str
    restarts: int = 0


@dataclass(frozen=True, slots=True)
class Submission:
    """A job that was submitted to a head's dashboard."""

    id: str
    request: str
    """JSON object with the entrypoint, the runtime environment and the metadata."""


@dataclass(frozen=True, slots=True)
class RayState:
    """State of the attempt that runs, as an annotation of the object keeps it."""

    cluster: str = ""
    """Name of the RayCluster."""
    cluster_uid: str = ""
    head: Head | None = None
    """The head that runs the jobs; None: none was ready yet."""
    is_lost: bool = False
    """The latest decision was that the head is lost, and the jobs do not run again yet."""
    attempt: int = 0
    """Number of the restart by which the head was lost last."""
    jobs: tuple[Submission, ...] = ()
    """Jobs of a RayCluster that stands alone which ran when the dashboard last answered."""
    hung: tuple[str, ...] = ()
    """Ids of those of them that were decided to hang, and do not run again yet."""


@dataclass(frozen=True, slots=True)
class DashboardAnswer:
    """Latest answer of the dashboard of a head."""

    head: Head
    ids: frozenset[str] = frozenset()
    """Ids of all jobs, ended ones included."""
    running: tuple[Submission, ...] = ()
    impossible: Mapping[str, str] = field(default_factory=dict)
    """Why a job cannot be submitted (again), by the id that it has or would get."""
    begun: frozenset[str] = frozenset()
    """Ids of the jobs whose entrypoint runs."""
    succeeded: frozenset[str] = frozenset()

    @property
    def alive(self) -> frozenset[str]:
        """Ids of all jobs that have not ended."""
        return frozenset(job.id for job in self.running) | self.impossible.keys() & self.ids


@dataclass(frozen=True, slots=True)
class RayPicture(Picture):
    """All that is known of a RayJob, or of a RayCluster that stands alone."""

    is_rayjob: bool = False
    cluster: str = ""
    """Name of the RayCluster that the pods belong to; empty: there is none now."""
    cluster_uid: str = ""
    """Empty: the RayCluster does not exist (any more)."""
    is_running: bool = True
    """The RayJob has submitted its job."""
    is_suspension_asked: bool = False
    """The RayCluster's `spec.suspend` is true."""
    is_cluster_suspended: bool = False
    """The controller of the RayCluster says that it is suspended."""
    state: RayState = RayState()
    heads: Mapping[str, Head] = field(default_factory=dict)
    """Heads among the pods, by uid."""
    ready: frozenset[str] = frozenset()
    """Uids of the heads that are ready."""
    answer: DashboardAnswer | None = None
    hung: Mapping[str, str] = field(default_factory=dict)
    """The problem of each job (by id) that breaks its log rules now."""

    @property
    def watches_jobs(self) -> bool:
        """True if annotations of the user ask for it: the head's dashboard is asked for jobs."""
        return self.resume.is_wanted and not self.resume.is_default

    @property
    def is_beginning_again(self) -> bool:
        """True if the RayJob's lost attempt is being cleared away."""
        is_same = bool(self.state.cluster) and self.state.cluster == self.cluster
        return self.is_rayjob and self.state.is_lost and is_same

    @property
    def ready_head(self) -> Head | None:
        """The head that is ready and stays; None: there is none."""
        leaving = {pod.uid for pod in self.pods if pod.ends_by is not None}
        stays = self.ready - self.record.pods - leaving
        return next((head for uid, head in self.heads.items() if uid in stays), None)


@dataclass(frozen=True, slots=True)
class WriteRayRecord:
    """Write the record and the state into the annotations if the subject still has this version; if
    not, drop the orders that follow."""

    record: Record
    state: RayState
    version: str
    attempt: int | None = None
    """Number to write into the environment of the RayJob's next attempt; None: leave it."""


@dataclass(frozen=True, slots=True)
class SuspendRayCluster:
    """Set `spec.suspend` of the RayCluster of this uid."""

    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class BeginAgain:
    """Set the deployment status of the RayJob to Retrying if it still has this version, and its
    RayCluster has no pod, by one more look."""

    cluster: str
    version: str


@dataclass(frozen=True, slots=True)
class SubmitAgain:
    """Submit the job to this head under this id, unless the head knows the id."""

    head: Head
    job: Submission
    id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class StopHung:
    """Stop a job that hangs, if the head could submit it again under the id `next`."""

    head: Head
    job: Submission
    next: str


RayEffect = WriteRayRecord | SuspendRayCluster | BeginAgain | SubmitAgain | StopHung


class RayResume(Resumption[RayPicture, RayEffect]):
    """The machine of one RayJob or RayCluster."""

    def __init__(self) -> None:
        super().__init__()
        self._told: set[str] = set()
        """Ids of jobs of which it was said that they cannot be submitted again."""

    def step(self, seen: RayPicture, now: float) -> list[ResumeEffect | RayEffect]:
        """Return the orders, to be carried out in this order."""
        effects = super().step(seen, now)
        if any(isinstance(effect, WriteRayRecord | WriteResumeRecord) for effect in effects):
            return effects
        if not seen.resume.is_wanted:
            return effects
        if seen.is_over:
            return effects + self._forget(seen)
        again = self._rayjob(seen, now) if seen.is_rayjob else self._raycluster(seen, now)
        return effects + again

    # --- which pods are deleted

    def _is_condemned(self, seen: RayPicture, pod: PodState) -> bool:
        return seen.is_beginning_again or super()._is_condemned(seen, pod)

    def _affected(self, seen: RayPicture, signs: list[LossSign]) -> frozenset[str]:
        earlier = seen.record.pods & {pod.uid for pod in seen.pods}
        named = frozenset(sign.uid for sign in signs if sign.uid)
        if not self._is_head_lost(seen, signs):
            return earlier | named
        # A head that was made, or started again in its pod, after the loss holds nothing old.
        fresh = {uid for uid, head in seen.heads.items() if head != seen.state.head}
        is_gone = any(not sign.uid and not sign.job for sign in signs)
        is_kept = is_gone and not seen.is_rayjob
        keeps = fresh - named - seen.record.pods if is_kept else frozenset[str]()
        return frozenset(pod.uid for pod in seen.pods if pod.uid not in keeps)

    def _is_head_lost(self, seen: RayPicture, signs: list[LossSign]) -> bool:
        """True if all pods go: a RayJob that hangs begins again as after the loss of its head."""
        of_jobs = seen.is_rayjob and any(sign.job for sign in signs)
        others = [sign for sign in signs if not sign.job]
        return of_jobs or any(not sign.uid or sign.uid in seen.heads for sign in others)

    def _is_failure(self, seen: RayPicture, pod: PodState) -> bool:
        """True for a head alone: the controller of the RayCluster replaces a worker that failed."""
        return pod.uid in seen.heads and super()._is_failure(seen, pod)

    def _other_signs(self, seen: RayPicture, now: float) -> Iterable[LossSign]:
        """List the loss of a head with jobs that is gone, goes, or had its container restarted, and
        jobs that hang on a head that is well."""
        state = seen.state
        head, is_same = state.head, state.cluster_uid == seen.cluster_uid
        if head is None or state.is_lost or not is_same or not (state.jobs or seen.is_rayjob):
            return
        if head == seen.ready_head:
            yield from self._hung_signs(seen)
            yield from self._unstopped(seen, head, now)
        if head not in seen.heads.values():
            is_there = head.uid in seen.heads
            lost = "has lost the state of Ray: its container was restarted"
            yield LossSign(head.name, lost if is_there else "(the head) is gone", False)
        elif any(pod.uid == head.uid and pod.ends_by is not None for pod in seen.pods):
            yield LossSign(head.name, "(the head) is being deleted", False, head.uid)

    def _hung_signs(self, seen: RayPicture) -> Iterable[LossSign]:
        """List the jobs that hang, unless others are being stopped; one that could not be submitted
        again is left alone."""
        answer = seen.answer
        impossible = {base_id(id) for id in answer.impossible} if answer is not None else set()
        kept = {job.id for job in seen.state.jobs}
        for id, cause in sorted(seen.hung.items()):
            is_ours = seen.is_rayjob or (id in kept and base_id(id) not in impossible)
            if is_ours and not seen.state.hung:
                yield LossSign("", cause, False, job=id)

    def _unstopped(self, seen: RayPicture, head: Head, now: float) -> Iterable[LossSign]:
        """List a head that does not end a job for a minute after the order."""
        alive = sorted(seen.answer.alive & set(seen.state.hung)) if seen.answer is not None else ()
        if not alive or seen.record.at is None:
            return
        until = seen.record.at + STUCK_SECONDS
        if now >= until:
            yield LossSign(head.name, f"(the head) does not end job {alive[0]}", False, head.uid)
        else:
            self._look_at(until)

    def _runs_again(self, seen: RayPicture) -> bool:
        """True for workers alone: after the loss of a head, or of a job that hung, the jobs must
        run again, too."""
        is_pending = seen.state.is_lost or bool(seen.state.hung)
        return not is_pending and super()._runs_again(seen)

    def _done(self, seen: RayPicture, pods: frozenset[str], signs: list[LossSign]) -> str:
        hung = len(self._stopped(seen, signs))
        deletes = f"deletes {len(pods)} of {counted(len(seen.pods), 'pod')}"
        if not hung:
            return deletes
        stops = f"stops {counted(hung, 'job')} and submits {'it' if hung == 1 else 'them'} again"
        return f"{stops}; {deletes}" if pods - seen.record.pods else stops

    def _stopped(self, seen: RayPicture, signs: list[LossSign]) -> tuple[str, ...]:
        """Return the ids of the jobs that are stopped while the head stays."""
        if self._is_head_lost(seen, signs):
            return ()
        return tuple(sign.job for sign in signs if sign.job)

    def _write(self, seen: RayPicture, record: Record, signs: list[LossSign]) -> RayEffect:
        if not self._is_head_lost(seen, signs):
            hung = self._stopped(seen, signs)
            changed = replace(seen.state, hung=hung, attempt=record.count) if hung else seen.state
            return WriteRayRecord(record, changed, seen.version)
        if not seen.is_rayjob and not seen.watches_jobs:
            return WriteRayRecord(record, seen.state, seen.version)
        state = replace(
            seen.state,
            cluster=seen.cluster,
            cluster_uid=seen.cluster_uid,
            is_lost=True,
            attempt=record.count,
            hung=(),
        )
        attempt = record.count if seen.is_rayjob else None
        return WriteRayRecord(record, state, seen.version, attempt)

    # --- after the loss of a head

    def _forget(self, seen: RayPicture) -> list[ResumeEffect | RayEffect]:
        """Forget the jobs of a RayCluster that was suspended: the suspension ended them."""
        if not seen.is_suspension_asked or seen.is_rayjob or seen.state == RayState():
            return []
        return [WriteRayRecord(seen.record, RayState(), seen.version)]

    def _rayjob(self, seen: RayPicture, now: float) -> list[ResumeEffect | RayEffect]:
        if seen.is_beginning_again:
            self._look_at(now + RESEND_SECONDS)
            if seen.cluster_uid and not seen.is_suspension_asked:
                return [SuspendRayCluster(seen.cluster, seen.cluster_uid)]
            is_at_rest = seen.is_cluster_suspended or not seen.cluster_uid
            return [BeginAgain(seen.cluster, seen.version)] if is_at_rest and not seen.pods else []
        head = seen.ready_head
        state = RayState(seen.cluster, seen.cluster_uid, head, attempt=seen.state.attempt)
        is_known = seen.state.cluster_uid == seen.cluster_uid and seen.state.head is not None
        if head is None or not seen.is_running or is_known:
            return []
        record = _running(seen, now) if seen.state.is_lost else seen.record
        effects: list[ResumeEffect | RayEffect] = [WriteRayRecord(record, state, seen.version)]
        if seen.state.is_lost:
            effects.append(_resumed(seen, f"runs on RayCluster {seen.cluster}"))
        return effects

    def _raycluster(self, seen: RayPicture, now: float) -> list[ResumeEffect | RayEffect]:
        head, state = seen.ready_head, seen.state
        if head is None or not seen.watches_jobs:
            return []
        answer = seen.answer if seen.answer is not None and seen.answer.head == head else None
        if state.is_lost:
            return self._submit_again(seen, head, answer, now)
        is_same = state.head == head and state.cluster_uid == seen.cluster_uid
        if not is_same and state.jobs and state.cluster_uid == seen.cluster_uid:
            return []  # the loss of their head is a sign
        if is_same and state.hung:
            return self._replace_hung(seen, head, answer, now)
        jobs = state.jobs if is_same else ()
        if answer is not None:
            jobs = answer.running
        found = RayState(seen.cluster, seen.cluster_uid, head, attempt=state.attempt, jobs=jobs)
        effects = self._tell(seen, answer.impossible if answer is not None else {})
        if found != state:
            effects.append(WriteRayRecord(seen.record, found, seen.version))
        return effects

    def _replace_hung(
        self, seen: RayPicture, head: Head, answer: DashboardAnswer | None, now: float
    ) -> list[ResumeEffect | RayEffect]:
        """Stop each job that hangs, and submit it again once the head says that it has ended."""
        if answer is None:
            return []
        attempt = seen.state.attempt
        jobs = {job.id: job for job in seen.state.jobs if job.id in seen.state.hung}
        settled = answer.ids | answer.impossible.keys()
        left: list[RayEffect] = []
        for id, job in jobs.items():
            new = next_id(id, attempt)
            if new in settled or id in answer.succeeded:
                continue
            is_alive = id in answer.alive
            again = SubmitAgain(head, job, new, attempt)
            left.append(StopHung(head, job, new) if is_alive else again)
        if left:
            self._look_at(now + RESEND_SECONDS)
            return [*left]
        effects = self._tell(seen, answer.impossible)
        state = replace(seen.state, jobs=answer.running, hung=())
        effects.append(WriteRayRecord(_running(seen, now), state, seen.version))
        done = sorted({next_id(id, attempt) for id in jobs} & answer.ids)
        if done:
            effects.append(_resumed(seen, f"submitted again: {', '.join(done[:5])}"))
        return effects

    def _submit_again(
        self, seen: RayPicture, head: Head, answer: DashboardAnswer | None, now: float
    ) -> list[ResumeEffect | RayEffect]:
        """Submit each job that ran, once nothing of the old attempt is left."""
        left = [pod for pod in seen.pods if pod.uid in seen.record.pods and not pod.has_ended]
        if left or answer is None:
            return []
        attempt = seen.state.attempt
        wanted = {next_id(job.id, attempt): job for job in seen.state.jobs}
        settled = answer.ids | answer.impossible.keys()
        running = {base_id(job.id) for job in answer.running}
        due = [id for id in wanted if id not in settled and base_id(id) not in running]
        if due:
            self._look_at(now + RESEND_SECONDS)
            return [SubmitAgain(head, wanted[id], id, attempt) for id in due]
        effects = self._tell(seen, answer.impossible)
        state = replace(seen.state, head=head, is_lost=False, jobs=answer.running)
        effects.append(WriteRayRecord(_running(seen, now), state, seen.version))
        again = sorted(id for id in wanted if id in answer.ids)
        if again:
            effects.append(_resumed(seen, f"submitted again: {', '.join(again[:5])}"))
        return effects

    def _tell(
        self, seen: RayPicture, impossible: Mapping[str, str]
    ) -> list[ResumeEffect | RayEffect]:
        """Say once of each job that it is not submitted again; of many jobs, in one event."""
        new = sorted(impossible.keys() - self._told)
        self._told = set(impossible)
        if not new:
            return []
        text = f"{seen.title}: job {new[0]} is not submitted again: {impossible[new[0]]}"
        if len(new) > 1:
            others = ", ".join(id[:SHOWN_CHARACTERS] for id in new[1:SHOWN])
            more = f" and {len(new) - SHOWN} more" if len(new) > SHOWN else ""
            text += f"; nor are {others}{more}"
        return [Say(NOT_RESUMED, text)]


def next_id(id: str, attempt: int) -> str:
    """Return the submission id of an attempt of a job.

    An id that may be no part of a path is replaced by its hash: Ray names files after ids.
    """
    base = base_id(id)
    if not _PLAIN_ID.fullmatch(base):
        base = f"job-{sha256(base.encode(errors='surrogatepass')).hexdigest()[:12]}"
    return f"{base}-attempt-{attempt}"


def base_id(id: str) -> str:
    """Return the submission id that all attempts of a job have in common."""
    return _ATTEMPT.sub("", id)


def unsupported(submission_mode: str, has_selector: bool) -> tuple[str, ...]:
    """List why a RayJob cannot be resumed."""
    if has_selector:
        return (f"annotation {AUTO_RESUME} has no effect on a RayJob with clusterSelector",)
    if submission_mode in ("InteractiveMode", "SidecarMode"):
        text = f"annotation {AUTO_RESUME} has no effect on a RayJob with submissionMode"
        return (f"{text} {submission_mode}: use K8sJobMode or HTTPMode",)
    return ()


def _running(seen: RayPicture, now: float) -> Record:
    """Return the record; the jobs run again now."""
    return replace(seen.record, losses=closed(seen.record.losses, now))


def _resumed(seen: RayPicture, what: str) -> Say:
    number, fault = seen.record.count, seen.record.fault
    text = f"{seen.title} {what} (restart {number}, because {fault})"
    return Say(seen.kind + RESUMED, text, is_warning=False)
