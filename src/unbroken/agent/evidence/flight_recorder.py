"""Dumps of torch's flight recorder: the newest collective of each process group.

A rank dumps its own on request only if the job has set up torch's NCCL backend for it. The
variables are TORCH_NCCL_DEBUG_INFO_PIPE_FILE and TORCH_FR_DUMP_TEMP_FILE (before torch 2.8
TORCH_NCCL_DEBUG_INFO_TEMP_FILE). A byte written to the pipe requests the dump. Other backends
record, but can be asked from inside only; their ranks' activity is read from their stacks.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from unbroken.agent.side_thread import SideThread
from unbroken.errors import PeerError
from unbroken.wire import pickled
from unbroken.wire.observation import Collective

PIPE_VARIABLE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
FILE_VARIABLES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
DUMP_BYTES_MAX = 64 * 1024 * 1024
GROUPS_MAX = 64
_files = SideThread("dumps", most=256)


def read(dump: bytes) -> tuple[Collective, ...]:
    """Return the newest collective of each group. Raises PeerError."""
    try:
        result = pickled.load(dump)
        newest: dict[str, Collective] = {}
        for entry in result["entries"]:
            collective = _collective(entry)
            known = newest.get(collective.group)
            is_newer = known is None or collective.sequence >= known.sequence
            if is_newer and not entry["is_p2p"]:
                newest[collective.group] = collective
        return tuple(newest[group] for group in sorted(newest)[:GROUPS_MAX])
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise PeerError(f"a flight recorder's dump is not understood: {error}"[:200]) from error


def _collective(entry: Mapping[str, Any]) -> Collective:
    name, description = entry["process_group"]
    group = f"{_text(name)}({_text(description)})"
    # Gloo's entries stay `scheduled`; a retired entry is over with every backend.
    state = "completed" if entry["retired"] else _text(entry["state"])
    operation = _text(entry["profiling_name"]).rpartition(":")[2]
    sequence = entry["collective_seq_id"]
    if type(sequence) is not int or not 0 <= sequence < 1 << 63:
        raise ValueError("a sequence number is none")
    return Collective(group[:100], sequence, operation[:100], state[:20])


def _text(value: Any) -> str:
    # The text of a nested value could have any length.
    if type(value) not in (str, int):
        raise ValueError(f"a {type(value).__name__} in place of a text")
    return str(value)


class Request:
    """A request to one rank for its dump; a dump from before is not taken as the answer.

    A thread touches the files: they may lie on storage that hangs.
    """

    def __init__(self, rank: int, environ: Mapping[str, str]) -> None:
        self.collectives: tuple[Collective, ...] = ()
        """The collectives dumped since, once they are read; empty: no complete dump."""
        pipe = environ.get(PIPE_VARIABLE)
        prefix = next((environ[name] for name in FILE_VARIABLES if environ.get(name)), None)
        self._path = f"{prefix}{rank}" if pipe and prefix else ""
        self._before: int | None = None
        if self._path:
            _files.call(lambda: self._ask(f"{pipe}{rank}.pipe"))

    def fetch(self) -> Future[None] | None:
        """Have the answer read, if there is a new one; None: the rank dumps nothing."""
        return _files.call(self._read) if self._path else None

    def _ask(self, pipe: str) -> None:
        self._before = _written(self._path)
        # Without a reader the rank does not exist, or does not listen.
        with contextlib.suppress(OSError):
            fd = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with contextlib.closing(os.fdopen(fd, "wb", 0)) as file:
                file.write(b"1")

    def _read(self) -> None:
        written = _written(self._path)
        if written == self._before:
            return
        with contextlib.suppress(OSError, PeerError), open(self._path, "rb", opener=_now) as file:
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                self.collectives = read(file.read(DUMP_BYTES_MAX))
                self._before = written


def _now(path: str, flags: int) -> int:
    # The file is the job's: a pipe in its place must not keep the agent waiting.
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def _written(path: str) -> int | None:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return None
