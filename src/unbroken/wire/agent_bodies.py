"""The documented HTTP bodies of the agent (HyperPod agent 1.1.3): requests and the status.

A malformed request is refused with the errors that FastAPI would return (`Unprocessable`), all of
its problems at once. Where the stock agent answers 500 to malformed input, this answers 422.

No library reads them. msgspec stops at the first problem; pydantic, with a model of the same
limits, answers 695 of 2,737 tried bodies otherwise: it takes `1_0` for a number and lets NUL pass.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TypeVar

from unbroken.errors import PeerError

from .agent import AgentReport, AgentState, StartCommand, StopCommand
from .codec import CLEAN_TEXT_MAX as TEXT_MAX
from .codec import NUMBER_MAX, PROGRESS_BYTES_MAX, PROGRESS_DEPTH_MAX, clean, is_clean, is_small

RANKS_MAX = 100_000
HOLDERS_MAX = 8
RULES_MAX = 1000
WORKER_DATA_BYTES_MAX = 4 * 1024 * 1024
OBJECT_BYTES_MAX, OBJECT_DEPTH_MAX = 256 * 1024, 16
"""Bytes as JSON, and levels of nested objects, of a rule, the detectors or worker data."""
ECHO_BYTES_MAX = 4096
"""Bytes as JSON from which on a wrong value is not repeated in the answer."""
RESTART_MODE = "process_level_restart"
_TRUE = frozenset(("1", "on", "t", "true", "y", "yes"))
_FALSE = frozenset(("0", "off", "f", "false", "n", "no"))

T = TypeVar("T")
Problem = dict[str, Any]


class Unprocessable(PeerError):
    """A request body that does not fit the endpoint; `problems` go into the 422 answer."""

    def __init__(self, problems: list[Problem]) -> None:
        paths = ("/".join(str(part) for part in problem["loc"]) for problem in problems)
        told = zip(paths, problems, strict=True)
        super().__init__("; ".join(f"{path}: {problem['msg']}" for path, problem in told))
        self.problems = problems


@dataclass(frozen=True, slots=True)
class Status:
    """Fields of `/status` beyond the report."""

    transitions: Mapping[AgentState, float] = field(default_factory=dict)
    """Latest entry of each state."""
    ip_version: str | None = None
    spare: bool = True
    """True before the first start, as with the stock agent."""
    warning: str = ""
    """Shown as the message if there is none."""
    restart_mode: str = RESTART_MODE
    """Restart mode that the agent offers, or that a worker has requested."""
    worker_data: list[dict[str, Any]] = field(default_factory=list)
    rank_labels: Mapping[str, str] | None = None
    """Labels of the ranks; None: an agent that restarts processes."""
    priority: bool = False
    """True if the state in memory of this pod's workers is worth keeping."""


def parse_json(body: bytes) -> object:
    """Return the value of a request body. Raises Unprocessable."""
    try:
        value: object = json.loads(body)
    except (ValueError, RecursionError) as error:
        is_syntax = isinstance(error, json.JSONDecodeError)
        text, at = (error.msg, error.pos) if is_syntax else ("not JSON", 0)  # type: ignore[union-attr]
        problem = _problem("json_invalid", ["body", at], "JSON decode error", {})
        raise Unprocessable([{**problem, "ctx": {"error": text}}]) from None
    return value


def start_command(value: object) -> StartCommand:
    """Read the body of `/start` and `/update`. Raises Unprocessable."""
    reader = BodyReader(value)
    rank = reader.required("rank", _count, 0)
    nnodes = reader.required("nnodes", _count, 1)
    attempt = reader.required("faultCount", _count, 0)
    master_addr = reader.required("master_addr", _filled_text, "")
    master_port = reader.required("master_port", _port, 0)
    spare = reader.optional("spare", _flag, False)
    if not reader.problems and rank >= nnodes and not spare:
        reader.fail("value_error", "rank", "Value error, rank must be less than nnodes", rank)
    ranks = reader.optional("rankIps", _rank_ips, None)
    command = StartCommand(
        attempt=attempt,
        rank=rank,
        nnodes=nnodes,
        master_addr=master_addr,
        master_port=master_port,
        log_rules=reader.optional("log_monitoring_configuration", _rules, ()),
        detectors=reader.optional("detectors", _object, {}),
        spare=spare,
        ip_version=reader.optional("ipVersion", _text, None),
        rank_ips=None if ranks is None else tuple(pair for pair in ranks if pair[0] < nnodes),
        progress=reader.optional("progress", _progress, {}),
        worker_data=reader.optional("worker_data", _worker_data, None),
        buddy=reader.optional("buddy", _text, ""),
        holders=reader.optional("holders", _addresses, ()),
        lease_seconds=reader.optional("lease_seconds", _seconds, None) or 0.0,
        parent=reader.optional("parent", _text, ""),
    )
    reader.finish()
    return command


def stop_command(value: object) -> StopCommand:
    """Read the body of `/stop`: the documented keys, and `attempt` from callers that send it."""
    reader = BodyReader({} if value is None else value)
    command = StopCommand(
        attempt=reader.optional("attempt", _count, None),
        restart_mode=reader.optional("restart_mode", _text, "ipr"),
        is_graceful=reader.optional("is_graceful", _flag, False),
        timeout_seconds=reader.optional("timeout", _seconds, None),
    )
    reader.finish()
    return command


def start_body(command: StartCommand) -> dict[str, Any]:
    """Return the documented body of `/start`; values equal to a default of null are left out."""
    ranks = command.rank_ips
    return {
        "rank": command.rank,
        "nnodes": command.nnodes,
        "faultCount": command.attempt,
        "master_addr": command.master_addr,
        "master_port": command.master_port,
        "spare": command.spare,
        "progress": dict(command.progress),
        **_given(
            log_monitoring_configuration=[dict(rule) for rule in command.log_rules] or None,
            detectors=dict(command.detectors) or None,
            ipVersion=command.ip_version,
            rankIps=None if ranks is None else [{"rank": rank, "ip": ip} for rank, ip in ranks],
            worker_data=command.worker_data,
            buddy=command.buddy or None,
            holders=list(command.holders) or None,
            lease_seconds=command.lease_seconds or None,
            parent=command.parent or None,
        ),
    }


def stop_body(command: StopCommand) -> dict[str, Any]:
    """Return the documented body of `/stop`, and the attempt, which a stock agent ignores."""
    seconds = command.timeout_seconds
    return _given(
        restart_mode=command.restart_mode,
        attempt=command.attempt,
        is_graceful=command.is_graceful or None,
        # The stock agent takes whole seconds, and 0 for its default.
        timeout=None if seconds is None else max(1, math.ceil(seconds)),
    )


def status_body(report: AgentReport, status: Status) -> dict[str, Any]:
    """Return the documented status: keys in the documented order, empty values left out."""
    return _given(
        status=report.state.value,
        transitions={state.name: _iso(at) for state, at in status.transitions.items()},
        reason=report.reason or None,
        message=report.message or status.warning or None,
        restartMode=status.restart_mode,
        worker_data=status.worker_data or None,
        rank_labels=None if status.rank_labels is None else dict(status.rank_labels),
        ipversion=status.ip_version or None,
        progress=dict(report.progress) or None,
        agent_version=report.agent_version,
        assigned_rank=None if report.rank is None else str(report.rank),
        spare=str(status.spare),
        priority="True" if status.priority else None,
    )


def _given(**body: Any) -> dict[str, Any]:
    """Return a body without the keys that are None."""
    return {key: value for key, value in body.items() if value is not None}


def report_of_status(value: object) -> AgentReport:
    """Read the status of a stock agent. Raises PeerError.

    It names neither itself nor the attempt. The time of its entry into INIT is used as its
    identity, and the attempt stays None. Its `progress` is left out: the operator needs none.
    """
    reader = BodyReader(value)
    state = reader.required("status", _state, AgentState.INIT)
    entered: Mapping[str, Any] = reader.optional("transitions", _object, {})
    initialized = _entry(reader, entered, AgentState.INIT)
    # The times are in UTC and of one form, so that their order is that of the texts.
    began = _entry(reader, entered, AgentState.RUNNING)
    waited = max(initialized, _entry(reader, entered, AgentState.READY))
    report = AgentReport(
        agent_id=f"stock-{clean(initialized, 64)}",
        state=state,
        rank=reader.optional("assigned_rank", _count, None),
        reason=reader.optional("reason", _cut, ""),
        message=reader.optional("message", _cut, ""),
        agent_version=reader.optional("agent_version", _cut, ""),
        restart_mode=reader.optional("restartMode", _cut, ""),
        is_unstarted=state is AgentState.FAULTED and waited > began,
    )
    reader.finish()
    return report


def _entry(reader: BodyReader, entered: Mapping[str, Any], state: AgentState) -> str:
    """Return the time of the latest entry into the state; empty: it was never entered."""
    at = entered.get(state.name, "")
    if not isinstance(at, str):
        text = f"{state.name} should be a valid string"
        reader.fail("string_type", "transitions", text, None)
        return ""
    return at


class _WrongError(ValueError):
    """A value of the wrong kind; the caller knows its place."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class BodyReader:
    """Takes fields out of an object and collects the problems with them."""

    def __init__(self, value: object) -> None:
        self.problems: list[Problem] = []
        self._value: Mapping[str, Any] = value if isinstance(value, dict) else {}
        self._is_object = isinstance(value, dict)
        if value is None:
            self.problems.append(_problem("missing", ["body"], "Field required", None))
        elif not self._is_object:
            text = "Input should be a valid dictionary or object to extract fields from"
            self.problems.append(_problem("model_attributes_type", ["body"], text, value))

    def required(self, name: str, read: Callable[[Any], T], empty: T) -> T:
        """Return the field, read; `empty` if it is missing or wrong."""
        if name in self._value:
            return self._read(name, read, empty)
        if self._is_object:
            self.fail("missing", name, "Field required", self._value)
        return empty

    def optional(self, name: str, read: Callable[[Any], T], empty: T) -> T:
        """Return the field, read; `empty` if it is absent or null."""
        return empty if self._value.get(name) is None else self._read(name, read, empty)

    def fail(self, kind: str, name: str, text: str, value: object) -> None:
        """Note a problem."""
        problem = _problem(kind, ["body", name], text, value)
        if kind == "value_error":
            problem["ctx"] = {"error": {}}
        self.problems.append(problem)

    def finish(self) -> None:
        """Raise Unprocessable if anything was wrong."""
        if self.problems:
            raise Unprocessable(self.problems)

    def _read(self, name: str, read: Callable[[Any], T], empty: T) -> T:
        value = self._value[name]
        try:
            return read(value)
        except _WrongError as error:
            self.fail(error.kind, name, str(error), value)
            return empty


def _problem(kind: str, loc: list[str | int], text: str, value: object) -> Problem:
    shown = value if is_small(value, ECHO_BYTES_MAX, OBJECT_DEPTH_MAX) else None
    return {"type": kind, "loc": loc, "msg": text, "input": shown}


def _integer(value: object) -> int:
    if isinstance(value, str):
        digits = value.strip()
        if len(digits) > 20 or not digits.lstrip("+-").isascii() or not _is_integer(digits):
            text = "Input should be a valid integer, unable to parse string as an integer"
            raise _WrongError("int_parsing", text)
        value = int(digits)
    if isinstance(value, float) and not value.is_integer():
        text = "Input should be a valid integer, got a number with a fractional part"
        raise _WrongError("int_from_float", text)
    if not isinstance(value, int | float):
        raise _WrongError("int_type", "Input should be a valid integer")
    return int(value)


def _is_integer(digits: str) -> bool:
    return digits[1:].isdigit() if digits[:1] in ("+", "-") else digits.isdigit()


def _count(value: object) -> int:
    number = _integer(value)
    if not 0 <= number <= NUMBER_MAX:
        raise _WrongError("value_error", "Value error, out of range")
    return number


def _port(value: object) -> int:
    number = 0 if value == "" else _count(value)
    if number > 65535:
        raise _WrongError("value_error", "Value error, not a port")
    return number


def _seconds(value: object) -> float | None:
    """Return seconds; 0 counts as absent, as with the stock agent."""
    if isinstance(value, float) and not value.is_integer():
        if not math.isfinite(value) or value < 0:
            raise _WrongError("value_error", "Value error, out of range")
        return value
    return float(_count(value)) or None


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise _WrongError("string_type", "Input should be a valid string")
    if len(value) > TEXT_MAX:
        text = f"String should have at most {TEXT_MAX} characters"
        raise _WrongError("string_too_long", text)
    if not is_clean(value):
        raise _WrongError("value_error", "Value error, must be valid UTF-8 without NUL")
    return value


def _filled_text(value: object) -> str:
    if not _text(value).strip():
        raise _WrongError("value_error", "Value error, must not be empty")
    return _text(value)


def _cut(value: object) -> str:
    """Return a text, cut, or a number as a text."""
    if not isinstance(value, str | int | float):
        raise _WrongError("string_type", "Input should be a valid string")
    return clean(str(value))


def _flag(value: object) -> bool:
    if isinstance(value, bool) or (isinstance(value, int | float) and value in (0, 1)):
        return bool(value)
    if isinstance(value, str) and value.lower() in _TRUE | _FALSE:
        return value.lower() in _TRUE
    if isinstance(value, str | int):
        text = "Input should be a valid boolean, unable to interpret input"
        raise _WrongError("bool_parsing", text)
    raise _WrongError("bool_type", "Input should be a valid boolean")


def _object(value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise _WrongError("dict_type", "Input should be a valid dictionary")
    return _small(value, OBJECT_BYTES_MAX, OBJECT_DEPTH_MAX)


def _progress(value: object) -> Mapping[str, Any]:
    return _small(_object(value), PROGRESS_BYTES_MAX, PROGRESS_DEPTH_MAX)


def _worker_data(value: object) -> object:
    return _small(value, WORKER_DATA_BYTES_MAX, OBJECT_DEPTH_MAX)


def _small(value: T, bytes_max: int, depth_max: int) -> T:
    if not is_small(value, bytes_max, depth_max):
        text = f"Value error, at most {bytes_max} bytes and a depth of {depth_max}"
        raise _WrongError("value_error", text)
    return value


def _list(value: object, longest: int) -> list[Any]:
    if not isinstance(value, list):
        raise _WrongError("list_type", "Input should be a valid list")
    if len(value) > longest:
        raise _WrongError("too_long", f"List should have at most {longest} items")
    return value


def _rules(value: object) -> tuple[Mapping[str, Any], ...]:
    return tuple(_object(rule) for rule in _list(value, RULES_MAX))


def _rank_ips(value: object) -> tuple[tuple[int, str], ...]:
    found = []
    for item in _list(value, RANKS_MAX):
        pair = _object(item)
        rank, ip = pair.get("rank"), pair.get("ip")
        if type(rank) is not int or not 0 <= rank <= RANKS_MAX or not isinstance(ip, str):
            raise _WrongError("value_error", "Value error, items are {rank: int, ip: str}")
        found.append((rank, _text(ip)))
    return tuple(found)


def _addresses(value: object) -> tuple[str, ...]:
    return tuple(_text(one) for one in _list(value, HOLDERS_MAX))


def _state(value: object) -> AgentState:
    try:
        return AgentState(value)
    except ValueError:
        raise _WrongError("enum", "not a state of an agent") from None


def _iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="microseconds")
