"""Agent reports and commands as JSON: the frames of the link and the body of `GET /v1/report`.

Unknown fields are dropped, so that either side may be newer.  A wrong value raises PeerError.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from unbroken.errors import PeerError

from .agent import (
    IMPORTS_MAX,
    WARM_PEERS_MAX,
    AgentReport,
    AgentState,
    FaultKind,
    Receipt,
    RuleState,
    RuleView,
    ShutdownCommand,
    StartCommand,
    StopCommand,
    ToAgent,
    WarmCommand,
    WorkerFault,
    WorkerReport,
)
from .agent_bodies import start_body, start_command, stop_body, stop_command
from .bounds import clean
from .json_fields import TEXT_MAX, Taker, dump, load, plain
from .observation import CollectCommand, Evidence
from .observation_codec import EVIDENCE, collect_from, evidence_from, watch_from

WORKERS_MAX = 1024
FAULTS_MAX = 256
RULES_MAX = 1024
NAME_CHARACTERS = 300
"""Of a module."""
AGENT_ID_CHARACTERS = 128
"""An agent's own has 32."""
LINK_BYTES_MAX = 640 * 1024
"""Longest message that an operator reads from an agent's link."""
REPORT_BYTES_MAX, REPORT_BYTES_PER_WORKER = 256 * 1024, 2048
"""Longest report of an agent: this, and so much more for each of its workers.  A worker and its
watch take 0.5 KB; a traceback of 24 lines takes 2 to 12 KB."""
FAULTS_WITH_LINES = 8
"""Faults that keep their lines in a report that is too long."""


class EvidenceError(PeerError):
    """Evidence that is wrong."""


def encode_report(report: AgentReport) -> str:
    """A frame of the link; also the body of `GET /v1/report`.

    A report that is too long loses, in this order: its progress, the lines of all faults but the
    first few, the lines that log rules matched, the lines of all faults, the metrics.
    """
    frame, longest = _report_frame(report), report_bytes_max(report.nproc)
    for shorter in _SHORTER:
        if len(frame) <= longest:
            break
        report = shorter(report)
        frame = _report_frame(report)
    return frame


def report_bytes_max(nproc: int | None) -> int:
    """Longest report of an agent with so many workers; None: of an unknown number."""
    return min(LINK_BYTES_MAX, REPORT_BYTES_MAX + REPORT_BYTES_PER_WORKER * (nproc or 0))


def _report_frame(report: AgentReport) -> str:
    return dump({"type": "report", **report_value(report)})


def _without_progress(report: AgentReport) -> AgentReport:
    return replace(report, progress={})


def _with_few_lines(report: AgentReport) -> AgentReport:
    first, others = report.faults[:FAULTS_WITH_LINES], report.faults[FAULTS_WITH_LINES:]
    return replace(report, faults=(*first, *(replace(one, lines=()) for one in others)))


def _without_matches(report: AgentReport) -> AgentReport:
    rules = (replace(one, last_line="", last_value="") for one in report.log_rules)
    return replace(report, log_rules=tuple(rules))


def _without_lines(report: AgentReport) -> AgentReport:
    return replace(report, faults=tuple(replace(one, lines=()) for one in report.faults))


def _without_metrics(report: AgentReport) -> AgentReport:
    return replace(report, watch=tuple(replace(one, metrics={}) for one in report.watch))


_SHORTER = (
    _without_progress, _with_few_lines, _without_matches, _without_lines, _without_metrics,
)  # fmt: skip


def decode_report(frame: str | bytes) -> AgentReport:
    """Read a frame or body of an agent; PeerError."""
    return report_from(load(frame))


def decode_answer(frame: str | bytes, takes_evidence: bool = True) -> AgentReport | Evidence | None:
    """Read a frame of an agent's link as the operator needs it, without `progress`.

    None: evidence that is not wanted, or a frame of a type that only newer programs know.
    PeerError; EvidenceError where only the evidence is lost, and the agent reports as before.
    """
    if len(frame) > LINK_BYTES_MAX:
        raise PeerError(f"a message of {len(frame)} bytes; at most {LINK_BYTES_MAX} are read")
    value = load(frame)
    kind = value.get("type", "report")
    if kind == EVIDENCE and takes_evidence:
        try:
            return evidence_from(value)
        except PeerError as error:
            raise EvidenceError(str(error)) from None
    if kind != "report":
        return None
    report = report_from({**value, "progress": None})
    longest = report_bytes_max(report.nproc)
    if len(frame) > longest:
        raise PeerError(f"a report of {len(frame)} bytes; at most {longest} are read")
    return report


def _stop_frame(command: StopCommand) -> dict[str, Any]:
    body = stop_body(command)
    if command.timeout_seconds is not None:
        body["timeout"] = command.timeout_seconds
    return body


def _warm_command(value: Mapping[str, Any]) -> WarmCommand:
    return WarmCommand(Taker(value, "warm").texts("peers", WARM_PEERS_MAX, TEXT_MAX))


@dataclass(frozen=True, slots=True)
class Frame:
    """The form of one kind of message on the link."""

    type: str
    body: Callable[[Any], Mapping[str, Any]]
    """The frame without its type."""
    read: Callable[[Mapping[str, Any]], ToAgent]
    """Read a frame; PeerError."""


FRAMES: Mapping[type[ToAgent], Frame] = {
    StartCommand: Frame("start", start_body, start_command),
    StopCommand: Frame("stop", _stop_frame, stop_command),
    ShutdownCommand: Frame("shutdown", asdict, lambda value: ShutdownCommand()),
    CollectCommand: Frame("collect", asdict, collect_from),
    WarmCommand: Frame("warm", asdict, _warm_command),
}
_FRAMES_BY_TYPE = {frame.type: frame for frame in FRAMES.values()}


def encode_command(message: ToAgent) -> str:
    """A frame of the link."""
    frame = FRAMES[type(message)]
    return dump({"type": frame.type, **frame.body(message)})


def decode_command(frame: str | bytes) -> ToAgent:
    """Read a frame of an operator; PeerError."""
    value = load(frame)
    name = value.get("type")
    if not isinstance(name, str):
        raise PeerError("a command without a type")
    if name not in _FRAMES_BY_TYPE:
        raise PeerError(f"unknown command {clean(name, 40)!r}")
    return _FRAMES_BY_TYPE[name].read(value)


def decode_imports(body: bytes) -> tuple[str, ...]:
    """What an agent answers at `IMPORTS_PATH`; PeerError."""
    value = load(body).get("modules")
    if not isinstance(value, list) or len(value) > IMPORTS_MAX:
        raise PeerError(f"no list of {IMPORTS_MAX} modules at most")
    if not all(isinstance(name, str) and 0 < len(name) <= NAME_CHARACTERS for name in value):
        raise PeerError("a list of something else than modules")
    return tuple(clean(name) for name in value)


def report_value(report: AgentReport) -> dict[str, Any]:
    """The report as JSON objects; what is empty is left out."""
    return plain(asdict(report))


def report_from(value: Mapping[str, Any]) -> AgentReport:
    """The report in a decoded JSON object; PeerError."""
    take = Taker(value, "report")
    return AgentReport(
        agent_id=take.text("agent_id")[:AGENT_ID_CHARACTERS],
        state=_agent_state(take, "state"),
        newest_attempt=take.count("newest_attempt"),
        attempt=take.count("attempt"),
        rank=take.count("rank"),
        master_addr=take.optional_text("master_addr"),
        master_port=take.count("master_port"),
        nproc=take.count("nproc"),
        pid=take.count("pid"),
        offered_port=take.count("offered_port"),
        workers=tuple(_worker(item) for item in take.items("workers", WORKERS_MAX)),
        faults=tuple(_fault(item) for item in take.items("faults", FAULTS_MAX)),
        log_rules=tuple(_rule(item) for item in take.items("log_rules", RULES_MAX)),
        watch=tuple(watch_from(item) for item in take.items("watch", WORKERS_MAX)),
        reason=take.optional_text("reason") or "",
        message=take.optional_text("message") or "",
        agent_version=take.optional_text("agent_version") or "",
        progress=take.progress("progress"),
        kept=take.counts("kept", WORKERS_MAX),
        restart_mode=take.optional_text("restart_mode") or "",
        receipts=tuple(_receipt(item) for item in take.items("receipts", WORKERS_MAX)),
        copies=take.counts("copies", WORKERS_MAX),
        imports=take.count("imports"),
    )


def _worker(item: Taker) -> WorkerReport:
    return WorkerReport(
        local_rank=item.number("local_rank"),
        rank=item.number("rank"),
        pid=item.number("pid"),
        state=item.text("state"),
        started_at=item.time("started_at") or 0.0,
        ended_at=item.time("ended_at"),
        first_output_at=item.time("first_output_at"),
        start=item.optional_text("start") or "",
    )


def _fault(item: Taker) -> WorkerFault:
    return WorkerFault(
        kind=_kind(item, "kind"),
        local_rank=item.number("local_rank"),
        rank=item.number("rank"),
        pid=item.number("pid"),
        at=item.time("at") or 0.0,
        exit_code=item.count("exit_code"),
        signal=item.count("signal"),
        message=item.optional_text("message") or "",
        fingerprint=item.optional_text("fingerprint") or "",
        lines=item.lines("lines"),
        step=item.count("step"),
    )


def _receipt(item: Taker) -> Receipt:
    return Receipt(
        rank=item.number("rank"),
        attempt=item.number("attempt"),
        step=item.number("step"),
        source=item.text("source"),
        seconds=item.time("seconds") or 0.0,
        checksum=item.optional_text("checksum") or "",
        saved_attempt=item.count("saved_attempt"),
        name=item.optional_text("name") or "",
        replicas=item.optional_text("replicas") or "",
    )


def _rule(item: Taker) -> RuleView:
    return RuleView(
        name=item.optional_text("name") or "",
        state=_rule_state(item, "state"),
        ranks=item.optional_text("ranks") or "",
        matches=item.count("matches") or 0,
        bad_points=item.count("bad_points") or 0,
        unreadable=item.count("unreadable") or 0,
        last_match_at=item.time("last_match_at"),
        last_rank=item.count("last_rank"),
        last_stream=item.optional_text("last_stream") or "",
        last_line=item.optional_text("last_line") or "",
        last_value=item.optional_text("last_value") or "",
    )


def _agent_state(item: Taker, name: str) -> AgentState:
    try:
        return AgentState(item.text(name))
    except ValueError:
        raise item.wrong(name, "not a state of an agent") from None


def _rule_state(item: Taker, name: str) -> RuleState:
    try:
        return RuleState(item.text(name))
    except ValueError:
        raise item.wrong(name, "not a state of a log rule") from None


def _kind(item: Taker, name: str) -> FaultKind:
    try:
        return FaultKind(item.text(name))
    except ValueError:
        # A newer agent knows more kinds; the exit status beside it still tells.
        return FaultKind.EXIT_CODE
