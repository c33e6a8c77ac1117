"""An incident as it may be written: without secrets, and smaller than the API's limit.

etcd refuses objects above 1.5 MB, and a job has many incidents. One incident may take at most 256
KiB, whatever characters it contains.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from unbroken.core.job.record.redaction import clean_incident
from unbroken.spec.job.incident import Incident, Restored, Signal, StackGroup

from .signals import reason_of

SIGNALS_MAX = 64
"""Signals kept with an incident; an object of the API must not grow with the job's size."""
OBJECT_BYTES = 256 * 1024
TEXT_BYTES = 1024
NAME_BYTES = 256
CULPRIT_BYTES = 32 * 1024
EVIDENCE_BYTES = 48 * 1024
"""Bytes of all signals but the culprit."""
RESTORED_MAX = 32
STACKS_BYTES = 24 * 1024
UNKNOWN = "unknown"
"""Replacement for a required text that is empty.

Server-side apply of Kubernetes 1.20 turns an empty text into null, which the definition refuses:
the incident would never be written.
"""
_LETTER_BYTES = 12
"""Most bytes that one character takes in JSON: two escapes of six."""


def writable(incident: Incident) -> Incident:
    """Return the incident as it is to be written."""
    result = bounded(clean_incident(incident))
    return replace(result, fault=reason_of(result.culprit))


def bounded(incident: Incident) -> Incident:
    """Return the incident with less evidence if it would be too large; the culprit keeps most."""
    (culprit,) = _signals([incident.culprit], CULPRIT_BYTES)
    left, groups = STACKS_BYTES, []
    for group in incident.groups:
        found, left = _group(group, left)
        groups.append(found)
    return replace(
        incident,
        culprit=culprit,
        signals=_signals(incident.signals[:SIGNALS_MAX], EVIDENCE_BYTES),
        reason=_required(incident.reason, TEXT_BYTES),
        blame=cut(incident.blame, TEXT_BYTES),
        outcome=cut(incident.outcome, TEXT_BYTES),
        groups=tuple(groups[:16]),
        slowest={stage: pod for stage, pod in incident.slowest.items() if pod},
        restored=tuple(map(_restored, incident.restored[:RESTORED_MAX])),
        resumed=cut(incident.resumed, TEXT_BYTES),
    )


def _required(text: str, size: int) -> str:
    """Return a required text, cut to its size."""
    return cut(text, size) or UNKNOWN


def cut(text: str, size: int) -> str:
    """Return the beginning of a text that takes at most this many bytes in JSON."""
    while len(text) * _LETTER_BYTES > size and _size(text) > size:
        text = text[: max(size // _LETTER_BYTES, len(text) * size // _size(text))]
    return text


def _size(text: str) -> int:
    return len(json.dumps(text))


def _signals(signals: Sequence[Signal], left: int) -> tuple[Signal, ...]:
    found = []
    for signal in signals:
        evidence, left = _last(signal.evidence, left)
        found.append(
            replace(
                signal,
                fault=_required(signal.fault, NAME_BYTES),
                text=_required(signal.text, TEXT_BYTES),
                pod=cut(signal.pod, NAME_BYTES),
                node=cut(signal.node, NAME_BYTES),
                evidence=evidence,
                fingerprint=cut(signal.fingerprint, NAME_BYTES),
            )
        )
    return tuple(found)


def _restored(one: Restored) -> Restored:
    return replace(
        one,
        ranks=_required(one.ranks, NAME_BYTES),
        source=_required(one.source, NAME_BYTES // 2),
        checksum=cut(one.checksum, NAME_BYTES // 2),
        name=cut(one.name, NAME_BYTES // 2),
    )


def _group(group: StackGroup, left: int) -> tuple[StackGroup, int]:
    # The innermost frames, which come first, are the most useful.
    stack, left = _last(group.stack[::-1], left)
    words = _required(group.doing, TEXT_BYTES)
    ranks = _required(group.ranks, TEXT_BYTES)
    return replace(group, ranks=ranks, doing=words, stack=stack[::-1]), left


def _last(lines: Sequence[str], left: int) -> tuple[tuple[str, ...], int]:
    """Return the last lines that fit; an empty line becomes a space, as an empty text cannot be
    applied."""
    kept: list[str] = []
    for line in reversed(lines):
        if (size := _size(line)) > left:
            break
        kept.append(line or " ")
        left -= size
    return tuple(reversed(kept)), left
