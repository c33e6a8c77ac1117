"""Reads the frames of a link quickly: an operator of 12,500 agents reads as many each second.

msgspec makes the values of most reports in one pass, without a check of ranges; those are checked
here.  Whatever is unusual in any way is left to `wire.agent_codec`, which has the last word on what
is right, what is cut, and what is wrong.  Only operators read so: agents do without msgspec.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from unbroken.wire.agent import AgentReport
from unbroken.wire.agent_codec import AGENT_ID_CHARACTERS, WORKERS_MAX, decode_answer
from unbroken.wire.bounds import NUMBER_MAX
from unbroken.wire.json_fields import METRICS_MAX, TEXT_MAX
from unbroken.wire.observation import Evidence

_HEAD = b'{"type":"report",'
"""So `encode_report` begins."""
_ESCAPE = b"\\"
"""Before a character that may have to be cleaned."""
_DECODER = msgspec.json.Decoder(AgentReport)


def read_answer(frame: bytes, takes_evidence: bool = True) -> AgentReport | Evidence | None:
    """As `decode_answer`, and with the same errors."""
    # No text in a frame of this size can be one that is to be cut.
    is_usual = len(frame) <= TEXT_MAX and frame.startswith(_HEAD)
    if is_usual and frame.isascii() and _ESCAPE not in frame:
        try:
            report = _DECODER.decode(frame)
        except (msgspec.DecodeError, RecursionError):
            return decode_answer(frame, takes_evidence)
        if _is_usual(report):
            return replace(report, progress={}) if report.progress else report
    return decode_answer(frame, takes_evidence)


def _is_usual(report: AgentReport) -> bool:
    """Whether there is nothing in it that would be cut or refused."""
    if report.faults or report.log_rules or report.receipts or report.kept or report.copies:
        return False
    if len(report.agent_id) > AGENT_ID_CHARACTERS:
        return False
    if len(report.workers) > WORKERS_MAX or len(report.watch) > WORKERS_MAX:
        return False
    if any(one.alarms or len(one.metrics) > METRICS_MAX for one in report.watch):
        return False
    numbers = _numbers(report)
    # Those at the limits are judged before they are made floats; times are never negative.
    return min(numbers) >= 0 and max(numbers) < NUMBER_MAX


def _numbers(report: AgentReport) -> list[float]:
    """All that must be natural numbers, or times."""
    found: list[float] = [
        report.newest_attempt or 0, report.attempt or 0, report.rank or 0, report.nproc or 0,
        report.master_port or 0, report.offered_port or 0, report.pid or 0, report.imports or 0,
    ]  # fmt: skip
    for one in report.workers:
        found += (one.local_rank, one.rank, one.pid, one.started_at)
        found += (one.ended_at or 0, one.first_output_at or 0)
    for each in report.watch:
        found += (each.rank, each.step or 0, each.first_step or 0, each.checkpoint_step or 0)
        found += (each.step_at or 0, each.step_seconds or 0)
        found += (each.sign_at or 0, each.allowed_seconds or 0, each.late_since or 0)
        found += (each.look_seconds or 0, each.act_seconds or 0)
    return found
