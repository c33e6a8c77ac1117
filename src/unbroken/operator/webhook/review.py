"""Answers to an AdmissionReview of a job. Pure.

Everything that the operator would refuse later is refused here, every problem with its path.
Accepted values with an unexpected effect come back as warnings (admission.k8s.io/v1).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from unbroken.core.job.record.conditions import ENDS, current_condition
from unbroken.core.logs.rule_config import rule_warnings
from unbroken.errors import PeerError
from unbroken.foreign_numbers import whole_number
from unbroken.kube.bounds import cut, excess
from unbroken.spec.job.codec import job_status_from
from unbroken.spec.job.parse import Parsed, parse_job
from unbroken.spec.job.types import GROUP, KIND, queue_of
from unbroken.spec.keys import QUEUE, ConditionType
from unbroken.spec.problems import Problem, Verdict, shown

Object = dict[str, Any]
MESSAGE_CHARACTERS = 8000
"""Length of a refusal, so that it fits a terminal."""
INVALID = 422


@dataclass(frozen=True, slots=True)
class JobReview:
    """A review: may `job` be stored, in place of `old` if there is one?"""

    uid: str
    namespace: str
    job: Mapping[str, Any]
    old: Mapping[str, Any] | None = None
    user: Mapping[str, Any] = field(default_factory=dict)
    """The user of the request, as in a SubjectAccessReview."""
    unread: Verdict | None = None
    """The verdict on a job beyond the bounds, of which `job` has the name alone."""


class _Request(msgspec.Struct):
    uid: str
    object: msgspec.Raw
    """Undecoded: it may be larger than is read."""
    oldObject: msgspec.Raw = msgspec.Raw(b"null")
    name: str | None = None
    namespace: str | None = None
    userInfo: Any = None


class _Review(msgspec.Struct):
    request: _Request


def _request(body: bytes) -> _Request:
    try:
        return msgspec.json.decode(body, type=_Review).request
    except RecursionError:  # No decoder skips what is so deep.
        text, pieces = cut(body, 2)
        request = msgspec.json.decode(text, type=_Review).request
        for name in ("object", "oldObject"):
            given = bytes(getattr(request, name)).decode("ascii", "replace")
            number = whole_number(given, 0, len(pieces) - 1)
            if number is not None:
                setattr(request, name, msgspec.Raw(pieces[number]))
        return request


def asked(body: bytes) -> JobReview:
    """Read the body of a review. Raises PeerError for anything but a review of a job."""
    try:
        request = _request(body)
        user, namespace = _user(request.userInfo), request.namespace or "default"
        is_read = not excess(bytes(request.oldObject))
        if why := excess(bytes(request.object)):
            # A job that was stored before this webhook existed may be changed, and deleted.
            problems = (Problem("", why, "FieldValueTooLong"),) if is_read else ()
            job = {"metadata": {"name": request.name}}
            return JobReview(request.uid, namespace, job, None, user, Verdict(problems))
        job = msgspec.json.decode(request.object)
        old = msgspec.json.decode(request.oldObject) if is_read else None
    except (msgspec.DecodeError, RecursionError) as error:
        raise PeerError(f"the body is no review of a job: {str(error)[:300]}") from error
    if not isinstance(job, Mapping):
        raise PeerError("the request has no object; only CREATE and UPDATE are answered")
    return JobReview(request.uid, namespace, job, old if isinstance(old, Mapping) else None, user)


def _user(found: Any) -> dict[str, Any]:
    given = found if isinstance(found, Mapping) else {}
    user = {"user": given.get("username"), "uid": given.get("uid")}
    user |= {"groups": given.get("groups"), "extra": given.get("extra")}
    return {key: value for key, value in user.items() if value}


def judged(asked: JobReview) -> tuple[Verdict, Parsed | None]:
    """Evaluate the job alone; return the parsed job if its pods are to be tried, too."""
    if asked.unread is not None:
        return asked.unread, None
    metadata = asked.job.get("metadata")
    if isinstance(metadata, Mapping) and metadata.get("deletionTimestamp"):
        # Removing a finalizer must always be possible, whatever the job contains.
        return Verdict(), None
    parsed = parse_job(asked.job)
    warnings = (*parsed.warnings, *rule_warnings(parsed.spec))
    if asked.old is None:
        return Verdict(parsed.problems, warnings), None if parsed.problems else parsed
    before = parse_job(asked.old)
    # A job that was stored before this webhook existed may be changed in other places.
    problems = [problem for problem in parsed.problems if problem not in before.problems]
    problems += _immutable(asked.job, asked.old)
    told = [warning for warning in warnings if warning not in before.warnings]
    is_new_shape = _templates(parsed) != _templates(before)
    verdict = Verdict(tuple(problems), (*told, *_late(asked.job, asked.old, parsed, before)))
    return verdict, parsed if is_new_shape and not problems else None


def _templates(parsed: Parsed) -> list[object]:
    return [spec.template for spec in parsed.spec.replica_specs]


def _condition_of(job: Mapping[str, Any]) -> ConditionType | None:
    status, _ = job_status_from(job.get("status"))
    return current_condition(status.conditions)


def _immutable(job: Mapping[str, Any], old: Mapping[str, Any]) -> list[Problem]:
    """Return changes that a running job cannot follow."""
    if queue_of(job) == queue_of(old):
        return []
    if _condition_of(old) in (None, ConditionType.SUSPENDED, *ENDS):
        return []
    why = "the queue of a job that runs cannot be changed; suspend the job first"
    return [Problem(f"metadata.labels[{QUEUE}]", f"Forbidden: {why}", "FieldValueForbidden")]


def _late(
    job: Mapping[str, Any], old: Mapping[str, Any], parsed: Parsed, before: Parsed
) -> list[str]:
    """Return changes that take effect late, or never."""
    stands = _condition_of(old)
    if parsed.spec == before.spec or stands in (None, ConditionType.SUSPENDED):
        return []
    if stands in ENDS:
        return ["spec: the job has ended: a change does not start it again"]
    new, last = ((one.spec.replica_specs, one.spec.nproc_per_node) for one in (parsed, before))
    if new == last:
        return []
    if queue_of(job):
        return ["spec.replicaSpecs: the job is stopped and waits in its queue anew"]
    return ["spec.replicaSpecs: a change takes effect at the next full start of the job"]


def template_problems(index: int, causes: Iterable[Mapping[str, Any]]) -> list[Problem]:
    """Return problems that the API server found in a template's pod, with the template's paths."""
    path = f"spec.replicaSpecs[{index}].template"
    return [
        Problem(
            f"{path}.{cause.get('field')}" if cause.get("field") else path,
            str(cause.get("message") or "is invalid"),
            str(cause.get("reason") or "FieldValueInvalid"),
        )
        for cause in causes
    ]


def answered(asked: JobReview, verdict: Verdict) -> Object:
    """Return the review with its response."""
    response: Object = {"uid": asked.uid, "allowed": not verdict.problems}
    if verdict.warnings:
        response["warnings"] = list(verdict.warnings)
    if verdict.problems:
        response["status"] = _status(asked, verdict.problems)
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}


def _status(asked: JobReview, problems: tuple[Problem, ...]) -> Object:
    metadata = asked.job.get("metadata")
    result = metadata if isinstance(metadata, Mapping) else {}
    name = str(result.get("name") or result.get("generateName") or "")
    text = "\n  ".join([f"{KIND} {shown(name)} is invalid:", *map(str, problems)])
    causes = [
        {"reason": problem.reason, "message": problem.message, "field": problem.path}
        for problem in problems
    ]
    return {
        "status": "Failure",
        "code": INVALID,
        "reason": "Invalid",
        "message": text[:MESSAGE_CHARACTERS],
        "details": {"name": name, "group": GROUP, "kind": KIND, "causes": causes},
    }
