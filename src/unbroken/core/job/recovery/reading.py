"""The signs of a fault: in the report of an agent, and in the loss of a pod or an agent.

`machine` receives, this module reads, and `recovery` joins the signs to an incident. Nothing is
changed here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unbroken.core.job.gang import GangStage
from unbroken.core.job.roster import Member, is_stock
from unbroken.core.job.state import JobState
from unbroken.spec.job.incident import PLANNED_MOVE, Incident, Signal
from unbroken.wire.agent import IN_PROCESS_RESTART, LEASE_OVER, AgentReport, AgentState, FaultKind

from . import signals
from .incidents import OPERATOR_RESTARTED

RESTARTED = "the agent was restarted in its pod"
RESTARTED_ALL = "the agent was restarted in its pod, or has restarted its processes by itself"
"""A stock in-process agent looks the same after both (its INIT is a new one)."""
LEASE_RAN_OUT = "the lease on its workers ran out: it heard neither the operator nor all peers"
HANG_REASONS = ("LogHang_", "LogSlow_")
"""Beginnings of the reasons of log rules that find a job hanging or slow."""
_PEER_LOST = FaultKind.PEER_LOST.value


@dataclass(frozen=True, slots=True)
class Received:
    """A report that the operator has accepted, with what is needed to read it."""

    member: Member
    report: AgentReport
    attempt: int | None
    """The attempt whose workers it describes."""
    is_same_agent: bool
    """False if another agent process was ordered to start the workers."""
    at: float
    """Time of the operator at which it came."""


def in_report(state: JobState, received: Received) -> list[Signal]:
    """Return the signs of a fault in a report of a pod whose workers run or are being stopped."""
    if state.gang.is_training(received.member.uid):
        return _while_training(state, received)
    incident = state.incidents.open
    if state.gang.stage is GangStage.HALTED and incident is not None:
        return _while_stopping(state, incident, received)
    return []


def in_loss(state: JobState, member: Member, fault: str, text: str, at: float) -> list[Signal]:
    """Return the sign of a fault that the loss of a pod or of its agent is; empty: it is none."""
    was_training = state.gang.stage is GangStage.HALTED and (
        member.uid in state.gang.ranks or _is_missed(state, member, fault)
    )
    # The operator's own deletions are no signs. The loss of a node is a sign even for a pod that is
    # condemned.
    is_news = not member.condemned or fault in signals.NODE_LOSSES
    is_part = was_training and state.incidents.open is not None and is_news
    if is_part or state.gang.is_training(member.uid):
        return [signals.of_pod(fault, text, member, at)]
    return []


def in_early_ends(state: JobState, found: Sequence[Signal], now: float) -> list[Signal]:
    """Return signs of the ranks that ended well, if a peer of theirs reports a missing rank."""
    if all(signal.fault != _PEER_LOST for signal in found):
        return []
    left: list[Signal] = []
    for member in state.roster.members.values():
        if member.report is not None and member.attempt_of(member.report) == state.attempt:
            left += signals.of_leavers(member, member.report, now)
    return left


def is_hang(report: AgentReport) -> bool:
    """True if all that an agent complains of are log rules that hang or are slow."""
    return bool(report.faults) and all(
        fault.kind is FaultKind.LOG_RULE and fault.message.startswith(HANG_REASONS)
        for fault in report.faults
    )


def _while_training(state: JobState, received: Received) -> list[Signal]:
    """Return the signs that the workers do not do what they were ordered to do."""
    report, member, attempt = received.report, received.member, state.attempt
    newest = report.newest_attempt
    fault, text = "", ""
    if not received.is_same_agent:
        is_kept = report.restart_mode == IN_PROCESS_RESTART
        fault, text = signals.AGENT_LOST, RESTARTED_ALL if is_kept else RESTARTED
    elif max(received.attempt or 0, newest or 0) > attempt:
        fault, text = OPERATOR_RESTARTED, "another operator has started a newer attempt"
    elif report.state is AgentState.FAULTED:
        is_ours = received.attempt == attempt
        return signals.of_workers(member, report, received.at) if is_ours else []
    elif report.state is AgentState.SHUTDOWN:
        fault, text = signals.AGENT_LOST, "the agent was shut down"
    elif report.state in (AgentState.READY, AgentState.STOPPING):
        is_over = is_stock(report) and member.uid not in state.gang.awaited
        if is_over or (newest is not None and newest >= attempt):
            fault, text = signals.STOPPED, "another program stopped the workers"
            if report.reason == LEASE_OVER:
                fault, text = signals.AGENT_LOST, LEASE_RAN_OUT
    elif received.attempt == attempt and not _follows_order(state, report):
        fault, text = OPERATOR_RESTARTED, "the agent follows another operator's start"
    return [signals.of_pod(fault, text, member, received.at)] if fault else []


def _while_stopping(state: JobState, incident: Incident, received: Received) -> list[Signal]:
    """Return the signs that belong to the open incident, whose attempt is being stopped."""
    report, member = received.report, received.member
    if not received.is_same_agent:
        return in_loss(state, member, signals.AGENT_LOST, RESTARTED, received.at)
    if received.attempt != incident.attempt:
        return []
    if incident.culprit.fault == PLANNED_MOVE:
        return []  # Workers that are stopped one after another report each other as missing.
    is_missing = incident.culprit.fault == _PEER_LOST
    found = signals.of_leavers(member, report, received.at) if is_missing else []
    if is_missing and report.reason == LEASE_OVER:
        # Its peers noticed the end of its workers before its own report came.
        found.append(signals.of_pod(signals.AGENT_LOST, LEASE_RAN_OUT, member, received.at))
    if report.faults or report.state is AgentState.FAULTED:
        found += signals.of_workers(member, report, received.at)
    return found


def _is_missed(state: JobState, member: Member, fault: str) -> bool:
    """True if the loss of this node explains why a new operator did not find every rank.

    The earlier operator may have died with the node, and nobody can report which ranks trained
    there.
    """
    incident = state.incidents.open
    is_adopted = incident is not None and incident.culprit.fault == OPERATOR_RESTARTED
    return is_adopted and fault in signals.NODE_LOSSES and member.report is None


def _follows_order(state: JobState, report: AgentReport) -> bool:
    """True if the agent's workers meet at the address that this operator has ordered."""
    order = state.gang.order
    if order is None or report.master_addr is None:
        return True
    return (report.master_addr, report.master_port) == (order.master_addr, order.master_port)
