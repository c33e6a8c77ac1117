"""Agent reports and commands as JSON: the frames of the link and the body of `GET /v1/report`.

Unknown fields are dropped, so that either side may be newer. A wrong value raises PeerError.
Evidence is cut to what a message may hold.

An operator of 12,500 agents reads as many reports each second: most are within all limits, and
msgspec makes their values in one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache, lru_cache, partial
from math import isfinite
from typing import Any

import msgspec

from unbroken.errors import PeerError

from .agent import (
    IMPORTS_MAX,
    AgentReport,
    Beat,
    HistoryCommand,
    Renewal,
    ShutdownCommand,
    StartCommand,
    StopCommand,
    ToAgent,
    WarmCommand,
)
from .agent_bodies import start_body, start_command, stop_body, stop_command
from .codec import FRAME_BYTES_MAX, clean, dump, load, read, write
from .observation import FRAMES_MAX, CollectCommand, Evidence, RankEvidence

EVIDENCE = "evidence"
"""Type of the frame."""


def encode_evidence(evidence: Evidence, longest: int = FRAME_BYTES_MAX) -> str:
    """Return the body of `GET /v1/evidence`; with `longest` LINK_BYTES_MAX a frame of the link.

    Evidence that is too long loses first all threads but the main one and the one that holds the
    GIL, then outer frames.
    """
    frame, frames_max = _frame(evidence), FRAMES_MAX
    if len(frame) > longest:
        frame = _frame(_shortened(evidence, 1, frames_max))
    while len(frame) > longest and frames_max:
        frames_max //= 2
        frame = _frame(_shortened(evidence, 1, frames_max))
    return frame


def _frame(evidence: Evidence) -> str:
    return dump({"type": EVIDENCE, **write(evidence)})


def _shortened(evidence: Evidence, threads_max: int, frames_max: int) -> Evidence:
    def shortened(rank: RankEvidence) -> RankEvidence:
        kept = [*rank.threads[:threads_max]]
        kept += [thread for thread in rank.threads[threads_max:] if thread.holds_gil]
        return replace(
            rank,
            threads=tuple(
                replace(thread_stack, frames=thread_stack.frames[:frames_max])
                for thread_stack in kept
            ),
        )

    return replace(evidence, ranks=tuple(map(shortened, evidence.ranks)))


def decode_evidence(frame: str | bytes) -> Evidence:
    """Read a frame or body of an agent. Raises PeerError."""
    return read(Evidence, load(frame), EVIDENCE)


NAME_CHARACTERS = 300
"""Longest name of a module."""
BEAT = "beat"
LINK_BYTES_MAX = 640 * 1024
"""Longest message that an operator reads from an agent's link."""
REPORT_BYTES_MAX, REPORT_BYTES_PER_WORKER = 256 * 1024, 2048
"""Longest report of an agent, and the addition for each of its workers, in bytes.

A worker and its watch take 0.5 KB; a traceback of 24 lines takes 2 to 12 KB.
"""
FAULTS_WITH_LINES = 8
"""Faults that keep their lines in a report that is too long."""


class EvidenceError(PeerError):
    """Evidence is malformed."""


def encode_report(report: AgentReport) -> str:
    """Return a frame of the link, which is also the body of `GET /v1/report`.

    A report that is too long loses parts in this order: its progress, the lines of all faults but
    the first few, the lines that log rules matched. Then it loses the lines of all faults, the
    metrics, and what it says about saves of snapshots.
    """
    frame, longest = _report_frame(report), report_bytes_max(report.nproc)
    for shorter in _SHORTER:
        if len(frame) <= longest:
            break
        report = shorter(report)
        frame = _report_frame(report)
    return frame


def report_bytes_max(nproc: int | None) -> int:
    """Return the bytes of the longest report of an agent with this number of workers; None: not
    known."""
    return min(LINK_BYTES_MAX, REPORT_BYTES_MAX + REPORT_BYTES_PER_WORKER * (nproc or 0))


def _report_frame(report: AgentReport) -> str:
    return dump({"type": "report", **write(report)})


def _without_progress(report: AgentReport) -> AgentReport:
    return replace(report, progress={})


def _with_few_lines(report: AgentReport) -> AgentReport:
    first, others = report.faults[:FAULTS_WITH_LINES], report.faults[FAULTS_WITH_LINES:]
    return replace(report, faults=(*first, *(replace(other, lines=()) for other in others)))


def _without_matches(report: AgentReport) -> AgentReport:
    rules = (replace(rule, last_line="", last_value="") for rule in report.log_rules)
    return replace(report, log_rules=tuple(rules))


def _without_lines(report: AgentReport) -> AgentReport:
    return replace(report, faults=tuple(replace(fault, lines=()) for fault in report.faults))


def _without_metrics(report: AgentReport) -> AgentReport:
    return replace(
        report, watch=tuple(replace(rank_watch, metrics={}) for rank_watch in report.watch)
    )


def _without_snapshots(report: AgentReport) -> AgentReport:
    return replace(report, snapshots=None)


_SHORTER = (
    _without_progress, _with_few_lines, _without_matches, _without_lines, _without_metrics,
    _without_snapshots,
)  # fmt: skip


def encode_brief(report: AgentReport) -> bytes:
    """Return a frame with what a reader of all agents of a job shows: state, workers and watch.

    Much faster than `encode_report`, for thousands of reports at once. `decode_answer` reads it.
    """
    brief = replace(
        report, faults=(), log_rules=(), receipts=(), kept=(), copies=(), progress={}, warm=None
    )
    if all(isfinite(one) for rank in brief.watch for one in rank.metrics.values()):
        return _HEAD + msgspec.json.encode(brief)[1:]
    return _report_frame(brief).encode()  # JSON lacks NaN and infinities


def decode_report(frame: str | bytes) -> AgentReport:
    """Read a frame or body of an agent. Raises PeerError."""
    return read(AgentReport, load(frame), "report")


def decode_answer(
    frame: str | bytes, takes_evidence: bool = True
) -> AgentReport | Evidence | Beat | None:
    """Read a frame of an agent's link as the operator needs it, without `progress`.

    None: evidence that is not wanted, or a frame of a type that only newer programs know. Raises
    PeerError; EvidenceError if only the evidence is lost, and the agent's reports are still valid.
    """
    if len(frame) > LINK_BYTES_MAX:
        raise PeerError(f"a message of {len(frame)} bytes; at most {LINK_BYTES_MAX} are read")
    report = _usual_report(frame) if isinstance(frame, bytes) else None
    if report is not None:
        return _within_limit(report, frame)
    value = load(frame)
    kind = value.get("type", "report")
    if kind == EVIDENCE and takes_evidence:
        try:
            return read(Evidence, value, EVIDENCE)
        except PeerError as error:
            raise EvidenceError(str(error)) from None
    if kind == BEAT:
        return read(Beat, value, BEAT)
    if kind != "report":
        return None
    return _within_limit(read(AgentReport, {**value, "progress": None}, "report"), frame)


_HEAD = b'{"type":"report",'
"""The beginning of each frame that `encode_report` writes."""
_ESCAPE = b"\\"
"""Marks a character that may have to be cleaned."""


def _usual_report(frame: bytes) -> AgentReport | None:
    """Return the report of a frame in which nothing is cut, cleaned or wrong; None: another
    frame."""
    if not frame.startswith(_HEAD) or not frame.isascii() or _ESCAPE in frame:
        return None
    try:
        report = _report_decoder().decode(frame)
    except (msgspec.DecodeError, RecursionError):
        return None
    return replace(report, progress={}) if report.progress else report


@cache
def _report_decoder() -> msgspec.json.Decoder[AgentReport]:
    return msgspec.json.Decoder(AgentReport)


def _within_limit(report: AgentReport, frame: str | bytes) -> AgentReport:
    longest = report_bytes_max(report.nproc)
    if len(frame) > longest:
        raise PeerError(f"a report of {len(frame)} bytes; at most {longest} are read")
    return report


def _stop_frame(command: StopCommand) -> dict[str, Any]:
    body = stop_body(command)
    if command.timeout_seconds is not None:
        body["timeout"] = command.timeout_seconds
    return body


def encode_beat(beat: Beat) -> str:
    """Return a frame of the link, from an agent whose workers hold a lease."""
    return dump({"type": BEAT, **write(beat)})


@dataclass(frozen=True, slots=True)
class Frame:
    """The form of one kind of message on the link."""

    type: str
    body: Callable[[Any], Mapping[str, Any]]
    """Returns the frame without its type."""
    read: Callable[[Mapping[str, Any]], ToAgent | Renewal]
    """Reads a frame. Raises PeerError."""


FRAMES: Mapping[type[ToAgent | Renewal], Frame] = {
    StartCommand: Frame("start", start_body, start_command),
    StopCommand: Frame("stop", _stop_frame, stop_command),
    ShutdownCommand: Frame("shutdown", asdict, lambda value: ShutdownCommand()),
    CollectCommand: Frame("collect", asdict, partial(read, CollectCommand, name="collect")),
    WarmCommand: Frame("warm", asdict, partial(read, WarmCommand, name="warm")),
    HistoryCommand: Frame("history", asdict, partial(read, HistoryCommand, name="history")),
    Renewal: Frame("renewal", asdict, partial(read, Renewal, name="renewal")),
}
_FRAMES_BY_TYPE = {frame.type: frame for frame in FRAMES.values()}


def encode_command(message: ToAgent | Renewal) -> str:
    """Return a frame of the link."""
    return _stop_text(message) if isinstance(message, StopCommand) else _text(message)


def _text(message: ToAgent | Renewal) -> str:
    frame = FRAMES[type(message)]
    return dump({"type": frame.type, **frame.body(message)})


_stop_text = lru_cache(maxsize=8)(_text)
"""Cached frames: all agents of a job get the same stop command."""


def decode_command(frame: str | bytes) -> ToAgent | Renewal:
    """Read a frame of an operator. Raises PeerError."""
    value = load(frame)
    name = value.get("type")
    if not isinstance(name, str):
        raise PeerError("a command without a type")
    if name not in _FRAMES_BY_TYPE:
        raise PeerError(f"unknown command {clean(name, 40)!r}")
    return _FRAMES_BY_TYPE[name].read(value)


def decode_imports(body: bytes) -> tuple[str, ...]:
    """Read the answer of an agent at `IMPORTS_PATH`. Raises PeerError."""
    value = load(body).get("modules")
    if not isinstance(value, list) or len(value) > IMPORTS_MAX:
        raise PeerError(f"no list of {IMPORTS_MAX} modules at most")
    if not all(isinstance(name, str) and 0 < len(name) <= NAME_CHARACTERS for name in value):
        raise PeerError("a list of something else than modules")
    return tuple(clean(name) for name in value)
