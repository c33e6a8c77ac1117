"""Reader of the files that a job has left: flight recorder dumps, py-spy dumps and logs."""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import BinaryIO

import msgspec

from unbroken.agent.evidence.spy import read as read_spy_json
from unbroken.cli.terminal import raw
from unbroken.core.diagnosis.job_logs import JobLogs, LogReader
from unbroken.errors import PeerError, UnbrokenError
from unbroken.wire import flight_dump, spy_dump
from unbroken.wire.flight_dump import DUMP_BYTES_MAX, RankDump
from unbroken.wire.observation import RankEvidence

FILES_MAX = 100_000
LOG_BYTES_MAX = 64 * 1024 * 1024
"""Bytes of a log that are read; of a longer log, the first and the last half of this."""
_PASSED_OVER = (".py", ".pt", ".pth", ".bin", ".safetensors", ".npy", ".gz", ".zst", ".tar", ".zip")
_ENDINGS = r"(?:\.(?:json|pkl|pickle|bin|dump|trace|txt|log|out|err))*$"
_RANK_NAMES = (
    re.compile(r"rank[_\-=.]?(\d{1,7})(?!\d)", re.IGNORECASE),
    re.compile(r"(?<!\d)(\d{1,7})" + _ENDINGS),
)
_FOLDER_RANK = re.compile(r"(?:^|/)(?:rank[_\-]?)?(\d{1,7})/(?:stdout|stderr|error)[^/]*$")
_WHY = {
    "name": "their file names",
    "dump": "the process groups in the dump, since no file name has it",
}


@dataclass(slots=True)
class Found:
    """The contents of a job's files."""

    dumps: dict[int, RankDump] = field(default_factory=dict)
    stacks: dict[int, RankEvidence] = field(default_factory=dict)
    logs: JobLogs = field(default_factory=JobLogs)
    log_files: int = 0
    refused: list[tuple[str, str]] = field(default_factory=list)
    """Files that could not be read, and the reason for each."""
    notes: list[str] = field(default_factory=list)
    ranks_by: set[str] = field(default_factory=set)

    def how(self) -> str:
        """The source of the ranks' numbers, for an error or a note."""
        return " and ".join(_WHY[one] for one in sorted(self.ranks_by, reverse=True))


def find(arguments: list[str], found: Found) -> list[str]:
    """The files to read: arguments, and the files below folders.  Links in folders are skipped."""
    files: list[str] = []
    for argument in arguments:
        if not os.path.isdir(argument):
            files.append(argument)
            continue
        for at, folders, names in os.walk(argument):
            folders.sort()
            for name in sorted(names):
                path = os.path.join(at, name)
                if name.startswith(".") or name.endswith(_PASSED_OVER):
                    continue
                if os.path.islink(path):
                    found.refused.append((path, "a link in a folder is not followed; name it"))
                elif len(files) < FILES_MAX:
                    files.append(path)
        if len(files) >= FILES_MAX:
            found.notes.append(f"only the first {FILES_MAX} files are read")
    return list(dict.fromkeys(files))


def read(files: list[str], found: Found) -> None:
    """Read each file into `found`; a file that cannot be read goes to `found.refused`."""
    for number, path in enumerate(files):
        _progress(number, len(files))
        try:
            _read(path, found)
        except OSError as error:
            found.refused.append((path, error.strerror or str(error)))
        except UnbrokenError as error:
            found.refused.append((path, str(error)))
    _progress(None, len(files))


def _progress(number: int | None, total: int) -> None:
    if total < 64 or not sys.stderr.isatty():
        return
    text = "\r\x1b[K" if number is None else f"\rreading {number + 1} of {total} files"
    if number is None or number % 16 == 0:
        print(text, end="", file=raw(sys.stderr), flush=True)


def _read(path: str, found: Found) -> None:
    # Do not block on a named pipe.
    with open(path, "rb", opener=_now) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise PeerError("no regular file")
        start = file.peek(4096)[:4096]
        if not start:
            raise PeerError("the file is empty")
        if not _is_data(start):
            _read_text(path, _both_ends(file, status.st_size), found)
            return
        if status.st_size > DUMP_BYTES_MAX:
            raise PeerError(f"larger than {DUMP_BYTES_MAX} bytes, which is the limit of a dump")
        data = file.read(DUMP_BYTES_MAX)
    if data[:1] == b"[":
        _keep_stacks(path, _spy_json(path, data), found)
    else:
        _keep_dump(path, flight_dump.read(data), found)


def _now(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def _is_data(start: bytes) -> bool:
    """True if a file is a pickle or a JSON dump; a line of a log may begin with `[`, too."""
    if start[:1] == b"[":
        return start[1:].lstrip()[:1] in (b"{", b"]")
    return start[:1] in (b"\x80", b"{")


def _both_ends(file: BinaryIO, size: int) -> bytes:
    """A whole log, or its first and its last part."""
    if size <= LOG_BYTES_MAX:
        return file.read(LOG_BYTES_MAX)
    start = file.read(LOG_BYTES_MAX // 2)
    file.seek(size - LOG_BYTES_MAX // 2)
    return start + b"\n" + file.read(LOG_BYTES_MAX // 2)


def rank_of(path: str) -> int | None:
    """The rank in a file's name; None if the name has no rank."""
    name = os.path.basename(path)
    for pattern in _RANK_NAMES:
        if found := pattern.findall(name):
            return int(found[-1])
    inside = _FOLDER_RANK.search(path)
    return int(inside[1]) if inside else None


def _keep_dump(path: str, dump: RankDump, found: Found) -> None:
    named = rank_of(path)
    rank = dump.rank if named is None else named
    if rank is None:
        raise PeerError("no rank in the file's name (as in `nccl_trace_rank_3`), nor in the dump")
    found.ranks_by.add("dump" if named is None else "name")
    known = found.dumps.get(rank)
    if known is not None:
        found.notes.append(f"{path}: a second dump of rank {rank}; the newer one counts")
        if known.newest_ns >= dump.newest_ns:
            return
    found.dumps[rank] = dump


def _spy_json(path: str, data: bytes) -> RankEvidence:
    rank = _rank_of_stacks(path)
    try:
        pid = msgspec.json.decode(data)[0].get("pid") or 0
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        raise PeerError(f"no py-spy dump: {error}"[:200]) from error
    if type(pid) is not int:
        raise PeerError("no py-spy dump: a pid that is no number")
    state = "R" if b'"active": true' in data[:4096] else "S"
    return RankEvidence(rank, pid, state, threads=read_spy_json(data, pid).threads)


def _rank_of_stacks(path: str) -> int:
    rank = rank_of(path)
    if rank is None:
        raise PeerError("no rank in the file's name, as in `stacks_rank_3.txt`")
    return rank


def _keep_stacks(path: str, evidence: RankEvidence | None, found: Found) -> None:
    if evidence is None:
        raise PeerError("no thread in the py-spy dump")
    found.stacks[evidence.rank] = evidence


def _read_text(path: str, data: bytes, found: Found) -> None:
    if b"\0" in data[:4096]:
        raise PeerError("neither a flight recorder dump nor text")
    text = data.decode(errors="replace")
    if spy_dump.is_spy_dump(text):
        _keep_stacks(path, spy_dump.read(text, _rank_of_stacks(path)), found)
        return
    reader = LogReader(found.logs, rank_of(path))
    for line in _lines(text):
        reader.read(line)
    found.log_files += 1


def _lines(text: str) -> Iterator[str]:
    at = 0
    while at < len(text):
        end = text.find("\n", at)
        end = len(text) if end < 0 else end
        yield text[at:end]
        at = end + 1
