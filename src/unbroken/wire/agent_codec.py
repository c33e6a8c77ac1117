"""Agent reports and commands as JSON: the frames of the link and the body of `GET /v1/report`.

What is not known is passed over, so that either side may be newer.  What is wrong raises PeerError.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from enum import Enum
from typing import Any

from unbroken.errors import PeerError

from .agent import (
    AgentReport,
    AgentState,
    Command,
    FaultKind,
    RuleState,
    RuleView,
    ShutdownCommand,
    StartCommand,
    WorkerFault,
    WorkerReport,
)
from .agent_bodies import NUMBER_MAX, start_body, start_command, stop_body, stop_command
from .observation import Alarm, RankWatch

FRAME_BYTES_MAX = 4 * 1024 * 1024
"""Longest frame either side takes; a start with the addresses of 12,500 nodes has 0.5 MB."""
WORKERS_MAX = 1024
FAULTS_MAX = 1024
RULES_MAX = 1024
ALARMS_MAX = 16
METRICS_MAX = 64
LINES_MAX = 64
TEXT_MAX = 16 * 1024
_REQUIRED = ("agent_id", "state")
_NESTED = ("workers", "faults", "log_rules", "watch", "alarms")


def encode_report(report: AgentReport) -> str:
    """A frame of the link; also the body of `GET /v1/report`."""
    return _dump({"type": "report", **report_value(report)})


def decode_report(frame: str | bytes) -> AgentReport:
    """Read a frame or body of an agent; PeerError."""
    return report_from(_load(frame))


def encode_command(command: Command) -> str:
    """A frame of the link."""
    if isinstance(command, ShutdownCommand):
        return _dump({"type": "shutdown"})
    if isinstance(command, StartCommand):
        return _dump({"type": "start", **start_body(command)})
    body: dict[str, Any] = {"type": "stop", **stop_body(command)}
    if command.timeout_seconds is not None:
        body["timeout"] = command.timeout_seconds
    return _dump(body)


def decode_command(frame: str | bytes) -> Command:
    """Read a frame of an operator; PeerError."""
    value = _load(frame)
    match value.get("type"):
        case "start":
            return start_command(value)
        case "stop":
            return stop_command(value)
        case "shutdown":
            return ShutdownCommand()
        case other:
            raise PeerError(f"unknown command {str(other)[:40]!r}")


def report_value(report: AgentReport) -> dict[str, Any]:
    """The report as JSON objects; what is empty is left out."""
    return _plain(asdict(report))


def report_from(value: Mapping[str, Any]) -> AgentReport:
    """The report in a decoded JSON object; PeerError."""
    take = _Taker(value, "report")
    return AgentReport(
        agent_id=take.text("agent_id"),
        state=take.state("state"),
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
        watch=tuple(_watch(item) for item in take.items("watch", WORKERS_MAX)),
        reason=take.optional_text("reason") or "",
        message=take.optional_text("message") or "",
        agent_version=take.optional_text("agent_version") or "",
        progress=take.mapping("progress"),
    )


def _worker(item: _Taker) -> WorkerReport:
    return WorkerReport(
        local_rank=item.number("local_rank"),
        rank=item.number("rank"),
        pid=item.number("pid"),
        state=item.text("state"),
        started_at=item.time("started_at") or 0.0,
        ended_at=item.time("ended_at"),
        first_output_at=item.time("first_output_at"),
    )


def _fault(item: _Taker) -> WorkerFault:
    return WorkerFault(
        kind=item.kind("kind"),
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


def _watch(item: _Taker) -> RankWatch:
    return RankWatch(
        rank=item.number("rank"),
        phase=item.optional_text("phase") or "",
        step=item.count("step"),
        step_at=item.time("step_at"),
        step_seconds=item.time("step_seconds"),
        sign_at=item.time("sign_at"),
        allowed_seconds=item.time("allowed_seconds"),
        checkpoint_step=item.count("checkpoint_step"),
        metrics=item.floats("metrics"),
        alarms=tuple(_alarm(each) for each in item.items("alarms", ALARMS_MAX)),
    )


def _alarm(item: _Taker) -> Alarm:
    return Alarm(
        detector=item.text("detector"),
        since=item.time("since") or 0.0,
        at=item.time("at") or 0.0,
        why=item.optional_text("why") or "",
    )


def _rule(item: _Taker) -> RuleView:
    return RuleView(
        name=item.optional_text("name") or "",
        state=item.rule_state("state"),
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


class _Taker:
    """Takes checked fields out of an object."""

    def __init__(self, value: object, where: str) -> None:
        if not isinstance(value, Mapping):
            raise PeerError(f"{where}: not an object")
        self._value = value
        self._where = where

    def text(self, name: str) -> str:
        found = self.optional_text(name)
        if found is None:
            raise self._wrong(name, "missing")
        return found

    def optional_text(self, name: str) -> str | None:
        found = self._value.get(name)
        if found is None:
            return None
        if not isinstance(found, str):
            raise self._wrong(name, "not a text")
        return found[:TEXT_MAX]

    def number(self, name: str) -> int:
        found = self.count(name)
        if found is None:
            raise self._wrong(name, "missing")
        return found

    def count(self, name: str) -> int | None:
        found = self._value.get(name)
        if found is None:
            return None
        if not isinstance(found, int) or isinstance(found, bool) or not 0 <= found <= NUMBER_MAX:
            raise self._wrong(name, "not a natural number")
        return found

    def time(self, name: str) -> float | None:
        found = self._value.get(name)
        if found is None:
            return None
        is_number = isinstance(found, int | float) and not isinstance(found, bool)
        if not is_number or not abs(found) <= NUMBER_MAX or not math.isfinite(found):
            raise self._wrong(name, "not a time")
        return float(found)

    def mapping(self, name: str) -> Mapping[str, Any]:
        found = self._value.get(name)
        if found is None:
            return {}
        if not isinstance(found, dict):
            raise self._wrong(name, "not an object")
        return found

    def floats(self, name: str) -> dict[str, float]:
        """Of what JSON cannot say, Python writes and reads NaN and Infinity."""
        found = list(self.mapping(name).items())[:METRICS_MAX]
        return {
            key[:TEXT_MAX]: float(value)
            for key, value in found
            if isinstance(value, int | float) and not isinstance(value, bool)
        }

    def items(self, name: str, longest: int) -> list[_Taker]:
        found = self._list(name)[:longest]
        return [_Taker(item, f"{self._where}.{name}[{i}]") for i, item in enumerate(found)]

    def lines(self, name: str) -> tuple[str, ...]:
        return tuple(str(line)[:TEXT_MAX] for line in self._list(name)[-LINES_MAX:])

    def state(self, name: str) -> AgentState:
        try:
            return AgentState(self.text(name))
        except ValueError:
            raise self._wrong(name, "not a state of an agent") from None

    def rule_state(self, name: str) -> RuleState:
        try:
            return RuleState(self.text(name))
        except ValueError:
            raise self._wrong(name, "not a state of a log rule") from None

    def kind(self, name: str) -> FaultKind:
        try:
            return FaultKind(self.text(name))
        except ValueError:
            # A newer agent knows more kinds; the exit status beside it still tells.
            return FaultKind.EXIT_CODE

    def _list(self, name: str) -> list[Any]:
        found = self._value.get(name)
        if found is not None and not isinstance(found, list):
            raise self._wrong(name, "not a list")
        return found or []

    def _wrong(self, name: str, text: str) -> PeerError:
        return PeerError(f"{self._where}.{name}: {text}")


def _load(frame: str | bytes) -> Mapping[str, Any]:
    if len(frame) > FRAME_BYTES_MAX:
        raise PeerError(f"a message of {len(frame)} bytes")
    try:
        value: object = json.loads(frame)
    except (ValueError, RecursionError):
        raise PeerError("a message that is not JSON") from None
    if not isinstance(value, dict):
        raise PeerError("a message that is not an object")
    return value


def _dump(value: Mapping[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"))


def _plain(value: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for name, item in value.items():
        if isinstance(item, Enum):
            found[name] = item.value
        elif name in _NESTED and item:
            found[name] = [_plain(each) for each in item]
        elif name in _REQUIRED or item not in (None, "", (), {}):
            found[name] = item
    return found
