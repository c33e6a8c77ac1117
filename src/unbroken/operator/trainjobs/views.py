"""Readers of the pods that wait for the result of a TrainJob.  Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from lightkube.resources.core_v1 import Pod

from unbroken.core.train_jobs import ResultPod
from unbroken.spec.job_kinds import ENDED_PHASES
from unbroken.spec.keys import RESULT


def result_pods(pods: Iterable[Pod]) -> Iterator[ResultPod]:
    """Yield the pods of a TrainJob that can still take its result."""
    for pod in pods:
        metadata, phase = pod.metadata, pod.status and pod.status.phase
        if metadata is None or metadata.deletionTimestamp or phase in ENDED_PHASES:
            continue
        result = (metadata.annotations or {}).get(RESULT, "")
        yield ResultPod(metadata.name or "", metadata.uid or "", result)
