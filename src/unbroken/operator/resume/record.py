"""The record of auto-resume as annotations of a job, and a job as commands and metrics show it.

Pure, and without the Kubernetes client: commands start fast.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import msgspec

from unbroken.core.auto_resume import FAULT_LENGTH, Record
from unbroken.core.losses import KEPT, Loss, ResumedJob
from unbroken.foreign_numbers import INT32_MAX, whole_number
from unbroken.spec import keys
from unbroken.spec.auto_resume import RETRIES_MAX, TRUE, resume_of
from unbroken.spec.job_kinds import JobKind, is_resumed_by_itself
from unbroken.spec.times import time_seconds, time_text

LOSSES_BYTES_MAX = 64 * 1024
"""Longest annotation of losses that is read."""
NAME_LENGTH = 260
"""Longest culprit: a name of Kubernetes with its kind."""
ACTIVE, RESTARTING, SUSPENDED = "Active", "Restarting", "Suspended"
Time = Annotated[float, msgspec.Meta(ge=0, le=32503680000)]
"""Seconds since the epoch, until the year 3000."""
Words = Annotated[str, msgspec.Meta(max_length=FAULT_LENGTH)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=10**9)]


class _LossText(msgspec.Struct, omit_defaults=True):
    at: Time
    decided: Time
    culprit: Annotated[str, msgspec.Meta(max_length=NAME_LENGTH)]
    fault: Words
    remedy: Words
    restart: Count = 0
    pods: Count = 0
    ran: Time | None = None


def read_record(annotations: Mapping[str, str]) -> Record:
    """Read the record from annotations; a malformed value counts as missing."""
    count, time = annotations.get(keys.RESUME_COUNT, ""), annotations.get(keys.RESUME_TIME, "")
    try:
        at = time_seconds(time) if time else None
    except (ValueError, OverflowError):
        at = None
    return Record(
        count=whole_number(count, 0, INT32_MAX) or 0,
        fault=annotations.get(keys.RESUME_FAULT, ""),
        at=at,
        pods=frozenset(annotations.get(keys.RESUME_PODS, "").split()),
        nodes=frozenset(annotations.get(keys.RESUME_NODES, "").split()),
        exhausted=annotations.get(keys.RESUME_EXHAUSTED, ""),
        is_suspended=annotations.get(keys.RESUME_SUSPENDED) == TRUE,
        losses=_read_losses(annotations.get(keys.RESUME_LOSSES, "")),
        default=whole_number(annotations.get(keys.RESUME_DEFAULT, ""), 0, RETRIES_MAX) or 0,
    )


def write_record(record: Record) -> dict[str, str | None]:
    """Return the annotations as a merge patch; None removes one."""
    return {
        keys.RESUME_DEFAULT: str(record.default) if record.default else None,
        keys.RESUME_COUNT: str(record.count),
        keys.RESUME_FAULT: record.fault or None,
        keys.RESUME_TIME: None if record.at is None else time_text(record.at),
        keys.RESUME_PODS: " ".join(sorted(record.pods)) or None,
        keys.RESUME_NODES: " ".join(sorted(record.nodes)) or None,
        keys.RESUME_EXHAUSTED: record.exhausted or None,
        keys.RESUME_SUSPENDED: TRUE if record.is_suspended else None,
        keys.RESUME_LOSSES: _losses_text(record.losses) if record.losses else None,
    }


def _read_losses(text: str) -> tuple[Loss, ...]:
    if not text or len(text) > LOSSES_BYTES_MAX:
        return ()
    try:
        found = msgspec.json.decode(text.encode(), type=list[_LossText])
    except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError):
        return ()
    return tuple(Loss(**msgspec.structs.asdict(one)) for one in found[-KEPT:])


def _losses_text(losses: Iterable[Loss]) -> str:
    texts = [
        _LossText(
            at=round(one.at, 3),
            decided=round(one.decided, 3),
            culprit=one.culprit[:NAME_LENGTH],
            fault=one.fault[:FAULT_LENGTH],
            remedy=one.remedy[:FAULT_LENGTH],
            restart=one.restart,
            pods=one.pods,
            ran=None if one.ran is None else round(one.ran, 3),
        )
        for one in losses
    ]
    return msgspec.json.encode(texts).decode()


def resumed_job(kind: JobKind, job: Mapping[str, Any]) -> ResumedJob | None:
    """Return a job as it is shown; None: it is not resumed, or another job is in its place."""
    metadata = job["metadata"]
    annotations = metadata.get("annotations") or {}
    record = read_record(annotations)
    resume = resume_of(annotations, record.default)
    if not resume.is_wanted or not is_resumed_by_itself(kind, job):
        return None
    return ResumedJob(
        kind=kind.name,
        name=str(metadata["name"]),
        namespace=str(metadata["namespace"]),
        uid=str(metadata.get("uid") or ""),
        created=str(metadata["creationTimestamp"]),
        state=_state(kind, job, record),
        restarts=record.count,
        restarts_max=resume.retries_max,
        fault=one_line(record.exhausted or record.fault),
        losses=record.losses,
    )


def _state(kind: JobKind, job: Mapping[str, Any], record: Record) -> str:
    if ended := kind.end_of(job):
        return ended
    if record.is_suspended:
        return RESTARTING
    if kind.is_suspended(job):
        return SUSPENDED
    return RESTARTING if record.losses and record.losses[-1].is_open else ACTIVE


def one_line(text: str) -> str:
    """Return a text of an object in one line of bounded length."""
    return " ".join(text.split())[:FAULT_LENGTH]
