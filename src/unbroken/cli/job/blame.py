"""`unbroken blame`: finds the ranks that kept others waiting, from the files of a job, which are
read here.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec
import typer

from unbroken.agent.evidence.spy import read as read_spy_json
from unbroken.cli.options import Form, Output
from unbroken.cli.show import Paper, note, paper
from unbroken.cli.terminal import raw
from unbroken.core.diagnosis.flight_analysis import WAITS_MAX, Analysis, Cause, analyse
from unbroken.core.diagnosis.flight_waits import Wait
from unbroken.core.diagnosis.job_logs import JobLogs, LogReader, judge_logs
from unbroken.core.diagnosis.stacks import CERTAIN, LIKELY, UNSURE, Blame, blame, name_ranks
from unbroken.core.wording import counted
from unbroken.errors import PeerError, SpecError, UnbrokenError
from unbroken.wire import flight_dump, spy_dump
from unbroken.wire.flight_dump import DUMP_BYTES_MAX, RankDump
from unbroken.wire.observation import RankEvidence

from .story import COLOURS, group_lines

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
class JobFiles:
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


def find(arguments: list[str], found: JobFiles) -> list[str]:
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


def read(files: list[str], found: JobFiles) -> None:
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


def _read(path: str, found: JobFiles) -> None:
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


def _keep_dump(path: str, dump: RankDump, found: JobFiles) -> None:
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


def _keep_stacks(path: str, evidence: RankEvidence | None, found: JobFiles) -> None:
    if evidence is None:
        raise PeerError("no thread in the py-spy dump")
    found.stacks[evidence.rank] = evidence


def _read_text(path: str, data: bytes, found: JobFiles) -> None:
    if b"\0" in data[:4096]:
        raise PeerError("neither a flight recorder dump nor text")
    text = data.decode(errors="replace")
    if spy_dump.is_spy_dump(text):
        _keep_stacks(path, spy_dump.read(text, _rank_of_stacks(path)), found)
        return
    reader = LogReader(found.logs, rank_of(path))
    for line in _file_lines(text):
        reader.read(line)
    found.log_files += 1


def _file_lines(text: str) -> Iterator[str]:
    at = 0
    while at < len(text):
        end = text.find("\n", at)
        end = len(text) if end < 0 else end
        yield text[at:end]
        at = end + 1


SHOWN_WAITS = 8
SHOWN_NOTES = 8
SourcedCause = tuple[str, Cause]
"""The kind of files that show a cause, and the cause."""


def command(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="PATH...",
            help="Files and folders of one job.",
            show_default=False,
        ),
    ],
    output: Form = Output.TEXT,
) -> None:
    """Find the ranks that kept others waiting, from the files that a job has left.

    Reads flight recorder dumps of torch (pickle or JSON), output of `py-spy dump` (text or
    `--json`) and logs, and judges them together.  It runs no code of the files and needs no
    cluster.

    Example: `unbroken blame /tmp/nccl_trace_rank_*`
    """
    found = JobFiles()
    read(find([str(one) for one in paths], found), found)
    if not (found.dumps or found.stacks or found.log_files):
        raise SpecError(_nothing(found))
    analysis = analyse(found.dumps)
    stacks = blame(tuple(found.stacks.values()), 0.0) if found.stacks else None
    causes = _causes(found, analysis, stacks)
    if output.is_data:
        output.print(_value(found, analysis, stacks, causes))
        return
    for line in _lines(found, analysis, stacks, causes, paper()):
        print(line)
    for path, why in found.refused[:SHOWN_NOTES]:
        note(f"not read: {path}: {why}")
    if len(found.refused) > SHOWN_NOTES:
        note(f"not read: {counted(len(found.refused) - SHOWN_NOTES, 'more file')}; -o json has all")
    for text in found.notes[:SHOWN_NOTES]:
        note(text)


def _nothing(found: JobFiles) -> str:
    if not found.refused:
        return "no flight recorder dump, py-spy dump or log found"
    path, why = found.refused[0]
    more = len(found.refused) - 1
    return f"nothing can be read: {path}: {why}" + (f", and {more} more" if more else "")


def _causes(found: JobFiles, analysis: Analysis, stacks: Blame | None) -> list[SourcedCause]:
    """All causes, the surest first; a failed rank comes before the ranks that waited for it."""
    from_logs = [("log", one) for one in judge_logs(found.logs)]
    errors = [one for one in from_logs if one[1].kind == "error"]
    others = [one for one in from_logs if one[1].kind != "error"]
    others[:0] = [("flight recorder", one) for one in analysis.causes]
    if stacks is not None and stacks.confidence:
        others.append(("stacks", Cause("stacks", stacks.ranks, stacks.confidence, stacks.why)))
    order = (CERTAIN, LIKELY, UNSURE)
    return sorted(errors + others, key=lambda one: order.index(one[1].confidence))


def _culprits(causes: list[SourcedCause]) -> tuple[int, ...]:
    """Ranks of the surest cause and of equally sure causes from the same kind of files."""
    if not causes:
        return ()
    source, first = causes[0]
    alike = (
        one.ranks
        for where, one in causes
        if where == source and one.confidence == first.confidence
        and (one.kind == "error") == (first.kind == "error")
    )  # fmt: skip
    return tuple(sorted({rank for ranks in alike for rank in ranks}))


def _lines(
    found: JobFiles,
    analysis: Analysis,
    stacks: Blame | None,
    causes: list[SourcedCause],
    page: Paper,
) -> Iterator[str]:
    yield _read_line(found, analysis)
    if not causes:
        yield from page.wrap(_healthy(found), 0, "green", first="")
    culprits = _culprits(causes)
    if culprits:
        yield page.paint(f"{causes[0][1].confidence}: {name_ranks(culprits)}", "red")
    elif causes:
        yield page.paint("no culprit found", "yellow")
    for source, one in causes:
        text = f"{one.confidence}, by the {source}: {one.why}"
        yield from page.wrap(text, 4, COLOURS[one.confidence], first="  ")
    if analysis.waits:
        yield "\nwho waits for whom"
        for wait in analysis.waits[:SHOWN_WAITS]:
            yield from page.wrap(_wait_line(wait), 4, first="  ")
        if len(analysis.waits) > SHOWN_WAITS:
            yield f"  and {len(analysis.waits) - SHOWN_WAITS} more; -o json has them"
    if stacks is not None:
        yield from group_lines(stacks.groups, page)


def _read_line(found: JobFiles, analysis: Analysis) -> str:
    parts = []
    if found.dumps:
        text = f"{counted(len(found.dumps), 'flight recorder dump')} ("
        text += f"{name_ranks(analysis.ranks)} by {found.how()}"
        text += f"; none of {name_ranks(analysis.absent)}" if analysis.absent else ""
        text += f"; {counted(len(analysis.groups), 'process group')})"
        parts.append(text)
    if found.stacks:
        parts.append(f"stacks of {name_ranks(sorted(found.stacks))}")
    if found.log_files:
        parts.append(f"{counted(found.log_files, 'log')} of {found.logs.lines} lines")
    return ", ".join(parts)


def _healthy(found: JobFiles) -> str:
    if found.dumps:
        return (
            "no hang in the dumps: every operation that was called has completed, and all ranks "
            "have called as many. A hung rank hangs outside of any collective: look "
            "at stacks (py-spy dump) and at logs"
        )
    return "no error and no timeout of a collective in the logs"


def _wait_line(wait: Wait) -> str:
    does = "waits" if len(wait.waiting) == 1 else "wait"
    text = f"{name_ranks(wait.waiting)} {does} in {wait.name()}"
    if wait.call.where:
        text += f", called by {wait.call.where}"
    if wait.late:
        text += f" for {name_ranks(wait.late)}"
    elif wait.absent:
        text += f" perhaps for {name_ranks(wait.absent)}, without a dump"
    else:
        text += ", which all have called"
    if wait.lasted_seconds is not None and wait.lasted_seconds >= 1:
        text += f"; {wait.lasted_seconds:.0f} s"
    return text


def _value(
    found: JobFiles, analysis: Analysis, stacks: Blame | None, causes: list[SourcedCause]
) -> dict[str, Any]:
    """The whole answer as JSON."""
    return {
        "culprits": list(_culprits(causes)),
        "confidence": causes[0][1].confidence if causes else "",
        "why": causes[0][1].why if causes else "",
        "causes": [
            {
                "by": source, "kind": one.kind, "ranks": list(one.ranks),
                "confidence": one.confidence, "why": one.why,
            }
            for source, one in causes
        ],
        "waits": [_wait_value(one) for one in analysis.waits[:WAITS_MAX]],
        "ranks": {
            "dumps": list(analysis.ranks), "withoutDump": list(analysis.absent),
            "stacks": sorted(found.stacks), "logs": sorted(found.logs.ranks),
            "knownBy": found.how(),
        },
        "groups": [
            {
                "name": one.name, "description": one.description, "ranks": list(one.members),
                "lastCalled": {str(rank): calls.enqueued for rank, calls in one.calls.items()},
            }
            for one in analysis.groups
        ],
        "notRead": [{"file": path, "why": why} for path, why in found.refused],
        "notes": found.notes,
    }  # fmt: skip


def _wait_value(wait: Wait) -> dict[str, Any]:
    return {
        "group": wait.group.name,
        "description": wait.group.description,
        "operation": wait.call.operation,
        "sequence": wait.call.sequence,
        "waiting": list(wait.waiting),
        "notCalled": list(wait.late),
        "withoutDump": list(wait.absent),
        "completed": list(wait.done),
        "seconds": wait.lasted_seconds,
        "calledBy": wait.call.where,
    }
