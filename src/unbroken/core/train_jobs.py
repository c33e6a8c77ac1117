"""Decisions about a TrainJob of the runtime `unbroken-torch`, from what the API has of it.

The operator makes a HyperPodPyTorchJob of the same name, which the TrainJob controls. It keeps both
equally suspended, and writes the result of the job on the result pod. That is a pod of the JobSet
that Trainer makes; it ends with the same result, and JobSet and TrainJob end with it.

A decision needs no memory: the same picture has the same orders, until they are carried out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from unbroken.errors import SpecError
from unbroken.spec import keys
from unbroken.spec.job_kinds import (
    HYPERPOD_JOB,
    TRAIN_JOB,
    TRAIN_RUNTIME,
    TRAIN_RUNTIME_KIND,
    controller_of,
    names_our_runtime,
)
from unbroken.spec.kubeflow.trainjob import MappedJob, Runtime, map_train_job, read_runtime
from unbroken.spec.lookup import value_at
from unbroken.spec.problems import Problem

from .auto_resume import Say

Object = Mapping[str, Any]
COMPLETED, FAILED = keys.ConditionType.COMPLETED.value, keys.ConditionType.FAILED.value
RESULT_CHARACTERS = 1000
"""Most characters of a result: all annotations of a pod together have 256 KiB, and an event has
1,024 characters."""
CREATED, REFUSED, WAITS, TAKEN, STOPPED = (
    f"TrainJob{name}" for name in ("Created", "Refused", "Waits", "NameTaken", "Stopped")
)
"""Reasons of events on the TrainJob."""


@dataclass(frozen=True, slots=True)
class ResultPod:
    """A pod that waits for the result of the TrainJob, and has not ended."""

    name: str
    uid: str
    result: str
    """The result that is written on it; empty: none."""


@dataclass(frozen=True, slots=True)
class TrainJobPicture:
    """A TrainJob with all that belongs to it; None: the API has no such object."""

    train: Object
    runtime: Object | None
    job: Object | None
    """The HyperPodPyTorchJob that has the name of the TrainJob, even if somebody else made it."""
    pods: tuple[ResultPod, ...] = ()


@dataclass(frozen=True, slots=True)
class CreateJob:
    """Create the HyperPodPyTorchJob."""

    body: Object


@dataclass(frozen=True, slots=True)
class ChangeJob:
    """Merge a patch into the HyperPodPyTorchJob, unless it has changed since."""

    uid: str
    version: str
    patch: Object


@dataclass(frozen=True, slots=True)
class WriteResult:
    """Write the result of the job on a result pod."""

    pod: str
    uid: str
    result: str


Order = CreateJob | ChangeJob | WriteResult | Say


def is_run_here(train: Object) -> bool:
    """True if this operator runs a TrainJob: it names the runtime, and no other cluster has it."""
    manager = value_at(train, "spec", "managedBy")
    return names_our_runtime(train) and manager in (None, keys.TRAINER_MANAGER)


def orders_for(seen: TrainJobPicture) -> list[Order]:
    """Return the orders of a TrainJob that this operator runs."""
    if value_at(seen.train, "metadata", "deletionTimestamp") or not is_run_here(seen.train):
        return []
    job, name = seen.job, str(value_at(seen.train, "metadata", "name"))
    if job is not None and not _controls(seen.train, job):
        if _is_left_over(seen.train, job):
            return []  # the garbage collector deletes it
        text = (
            f"{HYPERPOD_JOB.name} {name} exists and belongs to somebody else: the TrainJob starts "
            "when it is deleted. Delete it, or give the TrainJob another name"
        )
        return [Say(TAKEN, text)]
    if TRAIN_JOB.has_ended(_readable(seen.train)):
        return list(_stop(seen.train, job))
    if job is None:
        return list(_start(seen))
    result = _result(job)
    if result:
        return list(_report(seen, result))
    return list(_follow(seen, job))


def _readable(thing: Object) -> Object:
    """Return an object with those of its conditions that can be read."""
    conditions = value_at(thing, "status", "conditions")
    listed = conditions if isinstance(conditions, list | tuple) else ()
    return {"status": {"conditions": [one for one in listed if isinstance(one, Mapping)]}}


def _controls(train: Object, job: Object) -> bool:
    """True if the TrainJob controls the job."""
    owners = value_at(job, "metadata", "ownerReferences") or ()
    uid = value_at(train, "metadata", "uid")
    return any(owner.get("controller") and owner.get("uid") == uid for owner in owners)


def _is_left_over(train: Object, job: Object) -> bool:
    """True if an earlier TrainJob of the same name controls the job."""
    earlier, name = controller_of(job), value_at(train, "metadata", "name")
    return earlier == (TRAIN_JOB, name)


def _is_true(job: Object, type: str) -> Object | None:
    """Return the condition of a type that is true; None: there is none."""
    conditions = _readable(job)["status"]["conditions"]
    found = (one for one in conditions if one.get("type") == type and one.get("status") == "True")
    return next(found, None)


def _result(job: Object) -> str:
    """Return the result of a job; empty: it has not ended."""
    failed = _is_true(job, FAILED)
    if failed is not None:
        return _failure(str(failed.get("message") or failed.get("reason") or "no reason is known"))
    return COMPLETED if _is_true(job, COMPLETED) is not None else ""


def _failure(text: str) -> str:
    """Return the result of a job that failed, in one line."""
    return f"{FAILED}: {' '.join(text.split())}"[:RESULT_CHARACTERS]


def _report(seen: TrainJobPicture, result: str) -> Iterator[Order]:
    """Write a result on the pods that do not have it."""
    for pod in seen.pods:
        if pod.result != result:
            yield WriteResult(pod.name, pod.uid, result)


def _stop(train: Object, job: Object | None) -> Iterator[Order]:
    """Suspend the job of a TrainJob that has ended otherwise, such as by its deadline."""
    if job is None or _result(job) or HYPERPOD_JOB.is_suspended(job):
        return
    ended = TRAIN_JOB.end_of(_readable(train))
    yield _change(job, HYPERPOD_JOB.suspension(True))
    yield Say(STOPPED, f"the pods of {_name(job)} are stopped: the TrainJob has ended ({ended})")


def _name(job: Object) -> str:
    return f"{HYPERPOD_JOB.name} {value_at(job, 'metadata', 'name')}"


def _change(job: Object, patch: Object) -> ChangeJob:
    metadata = job["metadata"]
    return ChangeJob(
        str(metadata.get("uid") or ""), str(metadata.get("resourceVersion") or ""), patch
    )


def _mapped(seen: TrainJobPicture) -> MappedJob | Say:
    """Return the job as the TrainJob and its runtime describe it now; Say: the runtime is not
    usable."""
    if seen.runtime is None:
        text = f"there is no {TRAIN_RUNTIME_KIND} {TRAIN_RUNTIME}: apply trainer-runtime.yaml"
        return Say(WAITS, text)
    try:
        runtime: Runtime = read_runtime(seen.runtime)
    except SpecError as error:
        return Say(WAITS, str(error))
    return map_train_job(seen.train, runtime)


def _start(seen: TrainJobPicture) -> Iterator[Order]:
    mapped = _mapped(seen)
    if isinstance(mapped, Say):
        yield mapped
    elif mapped.problems:
        yield from _refuse(seen, mapped.problems)
    else:
        yield CreateJob(mapped.body)
        name = mapped.body["metadata"]["name"]
        text = f"{HYPERPOD_JOB.name} {name} is created: it runs the TrainJob"
        yield Say(CREATED, text, is_warning=False)


def _refuse(seen: TrainJobPicture, problems: tuple[Problem, ...]) -> Iterator[Order]:
    """Fail a TrainJob that cannot be run, with the fields that are in the way."""
    text = "; ".join(map(str, problems))
    yield Say(REFUSED, f"the TrainJob cannot run under unbroken's agent: {text}")
    yield from _report(seen, _failure(text))


def _follow(seen: TrainJobPicture, job: Object) -> Iterator[Order]:
    """Suspend or resume a job with its TrainJob, and pass on changed options.

    The pod template changes only when the job resumes, as in Trainer's JobSet.
    """
    wanted, is_suspended = TRAIN_JOB.is_suspended(seen.train), HYPERPOD_JOB.is_suspended(job)
    mapped = _mapped(seen)
    patch: dict[str, Any] = {}
    if is_suspended and not wanted:
        if isinstance(mapped, Say):
            yield mapped
            return
        if mapped.problems:
            yield from _refuse(seen, mapped.problems)
            return
        # A merge replaces the whole list, and with it every field of the old template.
        patch["spec"] = {
            **HYPERPOD_JOB.suspension(False)["spec"],
            **{key: mapped.body["spec"][key] for key in ("nprocPerNode", "replicaSpecs")},
        }
    elif wanted and not is_suspended:
        patch |= HYPERPOD_JOB.suspension(True)
    if not isinstance(mapped, Say) and not mapped.problems:
        changed = _changed_options(mapped.body, job)
        if changed:
            patch["metadata"] = {"annotations": changed}
    if patch:
        yield _change(job, patch)


def _changed_options(body: Object, job: Object) -> dict[str, str]:
    """Return the annotations of the TrainJob that its job does not have.

    Orders to restart are not compared: `unbroken restart` writes newer ones on the job.
    """
    have = value_at(job, "metadata", "annotations") or {}
    wanted = body["metadata"]["annotations"]
    return {
        key: value
        for key, value in wanted.items()
        if key != keys.RESTART and have.get(key) != value
    }
