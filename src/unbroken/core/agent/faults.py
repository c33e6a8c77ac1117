"""Cause of a worker's death, from its exit status, its last output and the kernel's counters.

Nothing here is certain, so the rules are ordered. The kernel's information takes precedence over
the worker's output. A text is believed only if it names the library that would write it.
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
SIGABRT, SIGBUS, SIGKILL, SIGUSR1, SIGSEGV, SIGTERM = 6, 7, 9, 10, 11, 15
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
# Addresses, sizes and counters vary from one occurrence to the next; the error is the same.
_VARIABLE = re.compile(r"0x[0-9a-fA-F]+|\d+")
_ADDRESS_TAKEN = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)
_PORT = re.compile(r"port: (\d+)")


@dataclass(frozen=True, slots=True)
class WorkerEnd:
    """The end of a process, with what else was found."""

    exit_code: int | None = None
    """Exit code; None: ended by `signal`, or nobody saw the end."""
    signal: int | None = None
    lines: tuple[str, ...] = ()
    """Last lines of its standard error, or of its standard output if that is empty."""
    error_file: str = ""
    """Contents of the file of torch's `@record` (TORCHELASTIC_ERROR_FILE); empty: none."""
    is_out_of_memory: bool = False
    """The kernel counted an OOM kill in the container's memory group while it ran."""
    is_shared_memory_full: bool = False
    """/dev/shm had no room left when it ended."""


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """The worker's ranks, and the time of its end."""

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
    """The last frames of its traceback, and its message."""
    text: str = ""
    """All lines of its message."""


def has_failed(end: WorkerEnd) -> bool:
    """True if it ended other than by exit code 0."""
    return end.exit_code != 0


def judge_stopped(end: WorkerEnd, place: WorkerPlace) -> WorkerFault | None:
    """Return the fault that a worker had when it was stopped.

    None: it trained, or missed a peer. Python prints its traceback first and takes long to end, so
    peers may complain earlier.
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
        # The output of a killed process from before the kill is about something else.
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
    # SIGABRT: the end of a process by NCCL's watchdog, and by uncaught C++ errors of gloo.
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
    """Return the name of a signal, or `signal 35`."""
    return SIGNAL_NAMES.get(number, f"signal {number}")


def bounded_lines(lines: Sequence[str]) -> tuple[str, ...]:
    """Return the end of a text, bounded in lines."""
    return tuple(line[:LINE_CHARACTERS] for line in lines[-LINES_MAX:])


def printed_error(lines: Sequence[str]) -> RaisedError | None:
    """Return the last traceback in a text; None: it holds none."""
    plain = [_RANK_PREFIX.sub("", line) for line in lines]
    starts = [i for i, line in enumerate(plain) if line.strip() == _TRACEBACK]
    if not starts:
        # Syntax errors of the script itself are printed without the heading.
        result = [(i, _FRAME.match(line)) for i, line in enumerate(plain)]
        starts = [i for i, frame in result if frame and not frame["function"]]
    return _parse(plain[starts[-1] :]) if starts else None


def recorded_error(text: str) -> RaisedError | None:
    """Return the exception in a file of torch's `@record`; None: it holds none."""
    try:
        message = json.loads(text)["message"]
        stack = message["extraInfo"]["py_callstack"].splitlines()
        said = str(message["message"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    raised_error = printed_error(stack)
    if raised_error is not None:
        return raised_error
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
    match = _EXCEPTION.match(rest[0])
    if match is None:
        return None
    message = (match["message"] or "").strip()
    # An exception's text may have more lines; further output after it does no harm.
    kept = [*stack[-LINES_MAX // 2 :], *rest[: LINES_MAX // 2]]
    place = [":".join(frame) for frame in frames[-3:]]
    fingerprint = _fingerprint(match["type"], message, place)
    text = "\n".join(rest[: LINES_MAX // 2])
    return RaisedError(match["type"], message, fingerprint, bounded_lines(kept), text)


def _fingerprint(kind: str, message: str, place: Sequence[str]) -> str:
    text = "\n".join([kind, _VARIABLE.sub("#", message), *place])
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:12]
