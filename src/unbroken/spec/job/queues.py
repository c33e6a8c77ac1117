"""Words of Kueue's API that a job may carry, and their meaning without Kueue."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unbroken.spec.keys import KUEUE_PREFIX, QUEUE

POD_SETS_MAX = 8
"""Most pod sets of a Workload (kueue v0.16, workload_types.go)."""


def queue_of(job: Mapping[str, Any]) -> str:
    """Return the LocalQueue of a job from the API; empty: it has none."""
    metadata = job.get("metadata")
    labels = metadata.get("labels") if isinstance(metadata, Mapping) else None
    name = labels.get(QUEUE) if isinstance(labels, Mapping) else None
    return name if isinstance(name, str) else ""


def queue_warnings(job: Mapping[str, Any]) -> tuple[str, ...]:
    """Return warnings about parts of a job that need Kueue, which is not installed."""
    metadata = job.get("metadata")
    result = []
    if queue_of(job):
        result.append(
            f"metadata.labels[{QUEUE}]: no Kueue is known to this operator: the job runs without "
            "waiting for the queue"
        )
    for place in ("labels", "annotations"):
        given = metadata.get(place) if isinstance(metadata, Mapping) else None
        keys = given if isinstance(given, Mapping) else {}
        result += [
            f"metadata.{place}[{str(key)[:80]}]: no Kueue is known to this operator: it has no "
            "effect"
            for key in keys
            if str(key).startswith(KUEUE_PREFIX) and key != QUEUE
        ]
    return tuple(result)
