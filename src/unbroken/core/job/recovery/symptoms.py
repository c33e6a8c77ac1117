"""Symptoms of a fault, as an incident keeps them: from agents, pods and nodes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from unbroken.core.agent.faults import signal_name
from unbroken.core.job.roster import Member
from unbroken.spec.job.detectors import Detector
from unbroken.spec.job.incident import Symptom
from unbroken.wire.agent import AgentReport, FaultKind, WorkerFault, WorkerReport, rule_reason

AGENT_LOST = "AgentLost"
"""The agent of a pod restarted, ended, or no longer answers the operator."""
NODE_LOST = "NodeLost"
"""The node of a pod is gone or not ready."""
NODE_FAULT = "NodeFault"
"""The node of a pod has a health label or a taint that a job must leave."""
POD_FAILED = "PodFailed"
"""A container of the pod ended, or the pod failed."""
POD_DELETED = "PodDeleted"
"""The pod was deleted or evicted."""
START_TIMEOUT = "StartTimeout"
"""An agent did not start its workers in time."""
STOP_TIMEOUT = "StopTimeout"
"""The workers of an agent did not end in time after a stop command."""
STOPPED = "StoppedByOthers"
"""The workers of an agent were stopped by a program other than the operator."""
NOT_READY = "WorkersNotReady"
"""The workers of an agent did not come to their barrier in time, before they had a rank."""
NODE_LOSSES = (NODE_LOST, NODE_FAULT)
"""Signs that the pod's node is lost, or must be left."""
POD_LOSSES = (*NODE_LOSSES, POD_FAILED, POD_DELETED, NOT_READY)
"""Signs that the pod itself is lost."""
WORKER_CRASH = "WorkerCrash"
"""HyperPod's agent reported a failed worker without another reason."""

PROCESS_STOPPED = "Stopped"
"""A signal stopped the process, and nothing continued it."""
STALLED = "Stalled"
"""No rank of the job makes progress."""
SPINNING = "Spinning"
"""No rank of the job makes progress, while a rank computes in one place."""
STUCK = "Stuck"
"""A worker waits in the kernel and cannot be interrupted (state D)."""
BAD_METRIC = "BadMetric"
"""A metric of `worker.progress` is not a finite number."""
LOSS_SPIKE = "LossSpike"
"""The metric `loss` left the range that it kept."""
SLOW_STEPS = "SlowSteps"
"""Steps take much longer than before."""
NO_CHECKPOINT = "NoCheckpoint"
"""No checkpoint came for several times the usual interval."""
BY_DETECTOR: Mapping[Detector, str] = {
    Detector.STOPPED: PROCESS_STOPPED,
    Detector.SILENT: STALLED,
    Detector.SPINNING: SPINNING,
    Detector.STUCK: STUCK,
    Detector.SLOW: SLOW_STEPS,
    Detector.NAN: BAD_METRIC,
    Detector.SPIKE: LOSS_SPIKE,
    Detector.CHECKPOINT: NO_CHECKPOINT,
}
"""Class of the fault that a detector finds, and reason of its events."""

TEXT_CHARACTERS = 500
LINES_MAX = 24
FAULTS_MAX = 16
LAST_OUTPUT = "last output"
"""Begins the line of evidence that quotes what a hung worker has written last."""
_NOT_A_REASON = re.compile(r"[^A-Za-z0-9_]+")


def of_pod(fault: str, text: str, member: Member, at: float) -> Symptom:
    """A sign of the whole pod; that its containers ended has their last lines."""
    view = member.view
    lines = view.last_lines if fault == POD_FAILED else ()
    return Symptom(at, fault, _line(text), pod=view.name, node=view.node or "", evidence=lines)


def of_workers(member: Member, report: AgentReport, now: float) -> list[Symptom]:
    """The faults that an agent reports; one made of its reason where it names none."""
    if not report.faults:
        text = report.message or report.reason or "the agent reports a fault without a reason"
        return [of_pod(as_reason(report.reason or WORKER_CRASH), text, member, now)]
    return [_of_worker(fault, member, now) for fault in report.faults[:FAULTS_MAX]]


def of_unstarted(member: Member, report: AgentReport, now: float) -> list[Symptom]:
    """The faults of workers that had no rank yet; the rank in such a report is the local rank."""
    found = of_workers(member, report, now)
    said = [f"local rank {one.local_rank}, before its start: " for one in report.faults]
    said = said or ["before the start: "]
    return [
        replace(symptom, rank=None, text=(who + symptom.text)[:TEXT_CHARACTERS])
        for who, symptom in zip(said, found, strict=False)
    ]


def of_leavers(member: Member, report: AgentReport, now: float) -> list[Symptom]:
    """The workers that have ended well, as causes of what others miss."""
    left = [worker for worker in report.workers if worker.state == "succeeded"]
    return [_of_leaver(worker, member, now) for worker in left[:FAULTS_MAX]]


def as_reason(text: str) -> str:
    """The text as a condition's reason, which the API wants to be one word."""
    word = _NOT_A_REASON.sub("", text)[:100]
    return word if word and word[0].isalpha() else "Fault"


def reason_of(symptom: Symptom) -> str:
    """Return the reason of the condition: the class of the fault. For a log rule it is the agent's
    reason. For a worker that was killed it is the signal's name, which says more in the one word of
    a column."""
    if symptom.violation:
        return as_reason(rule_reason(symptom.violation, symptom.rule))
    number = (symptom.exit_code or 0) - 128
    if symptom.fault == FaultKind.SIGNAL.value and number > 0:
        return as_reason(signal_name(number))
    return as_reason(symptom.fault)


def describe(symptom: Symptom) -> str:
    """One line for people: who, where, what."""
    rank = "" if symptom.rank is None else f"rank {symptom.rank}"
    pod = f"pod {symptom.pod}" if symptom.pod else ""
    node = f"node {symptom.node}" if symptom.node else ""
    where = ", ".join(part for part in (rank, pod, node) if part)
    what = f"{symptom.fault}: {symptom.text}"
    return f"{where}: {what}" if where else what


def _line(text: str) -> str:
    """The text in one line: HyperPod's own agent sends several, which may be a traceback."""
    return " ".join(text.split())[:TEXT_CHARACTERS]


def _of_worker(fault: WorkerFault, member: Member, now: float) -> Symptom:
    code = fault.exit_code
    if fault.signal is not None:
        code = 128 + fault.signal
    return Symptom(
        # An agent's clock may be wrong; nothing has happened after it was reported.
        min(fault.at, now),
        fault.kind.value,
        _line(fault.message or _ending(fault)),
        pod=member.view.name,
        node=member.view.node or "",
        # Without a process nobody is named: a rule that no rank of the node ever fulfilled.
        rank=fault.rank if fault.pid or fault.kind is not FaultKind.LOG_RULE else None,
        evidence=tuple(line[:TEXT_CHARACTERS] for line in fault.lines[-LINES_MAX:]),
        exit_code=code,
        fingerprint=fault.fingerprint,
        step=fault.step,
        rule=fault.rule,
        violation=fault.violation.value if fault.violation else "",
    )


def _of_leaver(worker: WorkerReport, member: Member, now: float) -> Symptom:
    return Symptom(
        min(worker.ended_at or now, now),
        FaultKind.EARLY_EXIT.value,
        "ended with exit code 0 while others still trained",
        pod=member.view.name,
        node=member.view.node or "",
        rank=worker.rank,
        exit_code=0,
    )


def _ending(fault: WorkerFault) -> str:
    if fault.signal is not None:
        return f"killed by {signal_name(fault.signal)}"
    return "not started" if fault.exit_code is None else f"exit code {fault.exit_code}"
