"""What a worker died of: from its exit status, its last words and what the kernel says.

Nothing here is certain, so the rules are ordered: what the kernel says beats what the worker wrote,
and a text is believed only where it names the library that would write it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from unbroken.wire.agent import FaultKind, WorkerFault

from .fault_texts import is_peer_lost, kind_of_text

LINES_MAX = 24
"""Lines of evidence kept with a fault."""
LINE_CHARACTERS = 500
SIGABRT, SIGBUS, SIGKILL, SIGSEGV = 6, 7, 9, 11
# signal(7), Linux on all architectures that torch runs on.
SIGNAL_NAMES = {
    1: "SIGHUP", 2: "SIGINT", 3: "SIGQUIT", 4: "SIGILL", 5: "SIGTRAP", 6: "SIGABRT", 7: "SIGBUS",
    8: "SIGFPE", 9: "SIGKILL", 10: "SIGUSR1", 11: "SIGSEGV", 12: "SIGUSR2", 13: "SIGPIPE",
    14: "SIGALRM", 15: "SIGTERM", 24: "SIGXCPU", 25: "SIGXFSZ", 31: "SIGSYS",
}  # fmt: skip
_TRACEBACK = "Traceback (most recent call last):"
_FRAME = re.compile(r'^\s+File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<function>.+))?$')
_EXCEPTION = re.compile(r"^(?P<type>[A-Za-z_][\w.]*)(?:: ?(?P<message>.*))?$")
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ")
# Addresses, sizes and counters differ from one time to the next; the error is the same.
_VARIABLE = re.compile(r"0x[0-9a-fA-F]+|\d+")
_ADDRESS_TAKEN = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)
_PORT = re.compile(r"port: (\d+)")


@dataclass(frozen=True, slots=True)
class WorkerEnd:
    """How a process ended, and what was found beside it."""

    exit_code: int | None = None
    """None: ended by `signal`, or nobody saw how."""
    signal: int | None = None
    lines: tuple[str, ...] = ()
    """Last lines of its standard error, or of its output where it wrote none."""
    error_file: str = ""
    """What torch's `@record` wrote (TORCHELASTIC_ERROR_FILE); empty: nothing."""
    is_out_of_memory: bool = False
    """The kernel counted an OOM kill in the container's memory group while it ran."""
    is_shared_memory_full: bool = False
    """/dev/shm had no room left when it ended."""


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """Which worker it was, and when it ended."""

    local_rank: int
    rank: int
    pid: int
    at: float
    master_port: int | None = None


@dataclass(frozen=True, slots=True)
class RaisedError:
    """A Python exception as it was printed."""

    type: str
    message: str
    fingerprint: str
    lines: tuple[str, ...]
    """The last frames of its traceback and what it says."""
    text: str = ""
    """What it says, all lines of it."""


def has_failed(end: WorkerEnd) -> bool:
    """True if it ended other than by exit code 0."""
    return end.exit_code != 0


def judge_stopped(end: WorkerEnd, place: WorkerPlace) -> WorkerFault | None:
    """The fault that a worker had come to when it was stopped; None: it trained, or missed a peer.

    Python prints its traceback first and takes long to end, so that peers may complain earlier.
    """
    said = [line for line in end.lines if line.strip()]
    error = recorded_error(end.error_file) or printed_error(said)
    if error is None or (not end.error_file and error.lines[-1] != _RANK_PREFIX.sub("", said[-1])):
        return None
    fault = name_fault(replace(end, signal=None, exit_code=1), place)
    fault = replace(fault, exit_code=end.exit_code, signal=end.signal)
    return None if fault.kind is FaultKind.PEER_LOST else fault


def name_fault(end: WorkerEnd, place: WorkerPlace) -> WorkerFault:
    """Name the fault of a worker that has failed."""
    error = None
    if end.signal is None:
        # What a killed process had printed before is about something else.
        error = recorded_error(end.error_file) or printed_error(end.lines)
    kind = _kind(end, error, place)
    text = f"{error.type}: {error.message}".rstrip(": ") if error else ""
    if end.signal is not None:
        text = _signal_text(end, kind)
    return WorkerFault(
        kind=kind,
        local_rank=place.local_rank,
        rank=place.rank,
        pid=place.pid,
        at=place.at,
        exit_code=end.exit_code,
        signal=end.signal,
        message=(text or _code_text(end))[:LINE_CHARACTERS],
        fingerprint=error.fingerprint if error else "",
        lines=bounded_lines(error.lines if error else end.lines),
    )


def judge_reported(text: str, place: WorkerPlace) -> WorkerFault:
    """Name the fault that a worker reports itself; the text may be a traceback."""
    error = printed_error(text.splitlines())
    kind = FaultKind.REPORTED
    if is_peer_lost("\n".join(error.lines) if error else text, error.text if error else text):
        kind = FaultKind.PEER_LOST
    return WorkerFault(
        kind,
        place.local_rank,
        place.rank,
        place.pid,
        place.at,
        message=(f"{error.type}: {error.message}".rstrip(": ") if error else text),
        fingerprint=error.fingerprint if error else "",
        lines=error.lines if error else (),
    )


def _kind(end: WorkerEnd, error: RaisedError | None, place: WorkerPlace) -> FaultKind:
    if end.signal is not None:
        return _signal_kind(end, "\n".join(end.lines))
    if error is None:
        return FaultKind.EXIT_CODE
    if _is_port_taken(error.text, place):
        return FaultKind.STORE_PORT_TAKEN
    if (kind := kind_of_text(error.text)) is not None:
        return kind
    if is_peer_lost("\n".join(error.lines), error.text):
        return FaultKind.PEER_LOST
    if error.type.rpartition(".")[2] in ("MemoryError", "OutOfMemoryError"):
        return FaultKind.OUT_OF_MEMORY
    return FaultKind.EXCEPTION


def _signal_kind(end: WorkerEnd, text: str) -> FaultKind:
    if end.signal == SIGKILL and end.is_out_of_memory:
        return FaultKind.OUT_OF_MEMORY
    if end.signal == SIGSEGV:
        return FaultKind.SEGMENTATION_FAULT
    if end.signal == SIGBUS and end.is_shared_memory_full:
        return FaultKind.SHARED_MEMORY_FULL
    # SIGABRT: the watchdog of NCCL and uncaught C++ errors of gloo end so.
    if end.signal != SIGABRT:
        return FaultKind.SIGNAL
    if kind_of_text(text) is FaultKind.CUDA_ERROR:
        return FaultKind.CUDA_ERROR
    return FaultKind.PEER_LOST if is_peer_lost(text, text) else FaultKind.SIGNAL


def _is_port_taken(text: str, place: WorkerPlace) -> bool:
    if place.rank != 0 or not _ADDRESS_TAKEN.search(text):
        return False
    ports = _PORT.findall(text)
    return not ports or place.master_port is None or str(place.master_port) in ports


def _signal_text(end: WorkerEnd, kind: FaultKind) -> str:
    assert end.signal is not None
    why = {
        FaultKind.OUT_OF_MEMORY: ": the container ran out of memory",
        FaultKind.SHARED_MEMORY_FULL: ": /dev/shm is full; mount a larger one",
    }
    return f"killed by {signal_name(end.signal)}{why.get(kind, '')}"


def _code_text(end: WorkerEnd) -> str:
    return "ended, and how is not known" if end.exit_code is None else f"exit code {end.exit_code}"


def signal_name(number: int) -> str:
    """The name of a signal, or `signal 35`."""
    return SIGNAL_NAMES.get(number, f"signal {number}")


def bounded_lines(lines: Sequence[str]) -> tuple[str, ...]:
    """The end of a text, bounded."""
    return tuple(line[:LINE_CHARACTERS] for line in lines[-LINES_MAX:])


def printed_error(lines: Sequence[str]) -> RaisedError | None:
    """The last traceback in a text; None: there is none."""
    plain = [_RANK_PREFIX.sub("", line) for line in lines]
    starts = [i for i, line in enumerate(plain) if line.strip() == _TRACEBACK]
    if not starts:
        # Syntax errors of the script itself are told without the heading.
        found = [(i, _FRAME.match(line)) for i, line in enumerate(plain)]
        starts = [i for i, frame in found if frame and not frame["function"]]
    return _parse(plain[starts[-1] :]) if starts else None


def recorded_error(text: str) -> RaisedError | None:
    """The exception in a file of torch's `@record`; None: it holds none."""
    try:
        message = json.loads(text)["message"]
        stack = message["extraInfo"]["py_callstack"].splitlines()
        said = str(message["message"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    found = printed_error(stack)
    if found is not None:
        return found
    kind, _, rest = said.partition(": ")
    lines = bounded_lines(said.splitlines())
    return RaisedError(kind, rest, _fingerprint(kind, rest, ()), lines, said)


def _parse(lines: Sequence[str]) -> RaisedError | None:
    frames: list[tuple[str, str, str]] = []
    for index, line in enumerate(lines):
        frame = _FRAME.match(line)
        if frame:
            frames.append((frame["file"], frame["line"], frame["function"] or ""))
        elif index and line and not line[0].isspace():
            return _raised(lines[:index], lines[index:], frames)
    return None


def _raised(
    stack: Sequence[str], rest: Sequence[str], frames: Sequence[tuple[str, str, str]]
) -> RaisedError | None:
    found = _EXCEPTION.match(rest[0])
    if found is None:
        return None
    message = (found["message"] or "").strip()
    # An exception's text may have more lines; what else follows it in the output does no harm.
    kept = [*stack[-LINES_MAX // 2 :], *rest[: LINES_MAX // 2]]
    place = [":".join(frame) for frame in frames[-3:]]
    fingerprint = _fingerprint(found["type"], message, place)
    text = "\n".join(rest[: LINES_MAX // 2])
    return RaisedError(found["type"], message, fingerprint, bounded_lines(kept), text)


def _fingerprint(kind: str, message: str, place: Sequence[str]) -> str:
    text = "\n".join([kind, _VARIABLE.sub("#", message), *place])
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:12]
